"""What happens to runs on machines: killed ranks at random moments, a clock that jumps.

The full disk, the checkpoint cut in half and the stop signals are in test_trainer.py.
"""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.train.launch import (
    SMALL,
    SOPHIA,
    command,
    environment,
    kill_everything_in,
    kill_group,
    rows,
    series,
    train,
    wait_for_step,
)
from train.checkpoint import list_checkpoints, load
from train.wandb_log import read_offline

KILLS = int(os.environ.get("KILLS", 5))  # 20 have been tried
STEPS_BETWEEN = 15  # at most


def workers_in(folder: Path) -> list[int]:
    """Process ids of the ranks, those that torchrun started with a RANK, that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            here = (process / "cwd").resolve(strict=True) == folder.resolve()
            if (
                here
                and b"torch.distributed.run" not in arguments
                and b"RANK=" in (process / "environ").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
    return found


def test_a_rank_killed_at_random_moments_changes_nothing(tmp_path):
    """torchrun starts the ranks again, and they go on after the newest checkpoint: to the same losses, bit for bit."""
    setting = (*SMALL, *SOPHIA, "model.dropout=0.1", f"train.max_steps={(KILLS + 2) * STEPS_BETWEEN}")
    setting += ("train.eval_every=20", "run.dir=run")
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    train(*setting, cwd=undisturbed, processes=2)

    chance = random.Random(17)
    run, log = disturbed / "run", disturbed / "log"
    launch = command(*setting, processes=2)
    launch.insert(launch.index("--standalone"), f"--max-restarts={KILLS}")
    with log.open("w") as output:
        process = subprocess.Popen(
            launch, cwd=disturbed, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )

    def wait(condition):
        deadline = time.monotonic() + 120
        while not (result := condition()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
        return result

    def steps() -> int:
        path = run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    saved = 0  # the step of the newest checkpoint when a rank was killed
    try:
        for kill in range(KILLS):
            if kill % 2:  # at any moment: mostly while ranks start and load
                time.sleep(chance.uniform(0, 4))
            else:  # at any moment of a step, a checkpoint or an evaluation
                target = steps() + chance.randrange(1, STEPS_BETWEEN)
                wait(lambda target=target: steps() >= target)
                time.sleep(chance.uniform(0, 0.1))
            if found := list_checkpoints(run / "checkpoints"):
                saved = int(found[-1].stem.removeprefix("step-"))
            os.kill(chance.choice(wait(lambda: workers_in(disturbed))), signal.SIGKILL)
        assert process.wait(timeout=240) == 0, log.read_text()
    finally:
        process.kill()
        kill_everything_in(disturbed)

    continued = [int(step) for step in re.findall(r"continues after step (\d+)", log.read_text())]
    assert len(continued) >= KILLS // 2
    assert continued == sorted(continued) and continued[-1] >= saved > 0
    assert [row["step"] for row in rows(run)] == list(range(1, (KILLS + 2) * STEPS_BETWEEN + 1))
    for key in ("train/loss", "val/loss", "train/grad_norm", "hessian/norm"):
        assert series(run, key) == series(undisturbed / "run", key)
    ends = [load(list_checkpoints(folder / "run" / "checkpoints")[-1]) for folder in (undisturbed, disturbed)]
    assert all(torch.equal(ends[0]["model"][name], x) for name, x in ends[1]["model"].items())


def test_a_clock_that_jumps_changes_nothing(tmp_path):
    """The system's clock goes back an hour at step 4 and forward a day at step 8, and the run is resumed after a kill."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        assert not os.environ.get("CI"), "continuous integration installs faketime"
        pytest.skip("needs Debian's package faketime")
    setting = (*SMALL, *SOPHIA, "run.dir=run")
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    train(*setting, cwd=undisturbed)

    clock = disturbed / "clock"
    clock.write_text("+0")
    faked = environment(
        LD_PRELOAD=str(library),
        FAKETIME_TIMESTAMP_FILE=str(clock),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
    )
    for stop, offset in ((4, "-3600"), (8, "+86400"), (None, None)):
        process = subprocess.Popen(
            command(*setting),
            cwd=disturbed,
            env=faked,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if stop is None:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
        else:
            wait_for_step(disturbed / "run", stop, process)
            clock.write_text(offset)
            wait_for_step(disturbed / "run", stop + 1, process)
            kill_group(process)
    assert series(disturbed / "run", "train/loss") == series(undisturbed / "run", "train/loss")
    elapsed = series(disturbed / "run", "time/elapsed_s")
    assert elapsed == sorted(elapsed) and elapsed[-1] < 120


def test_a_run_without_wandbs_server_records_offline(tmp_path):
    """Nothing listens at the address; without a login there is one line before the first step."""
    nowhere = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    nowhere |= {"WANDB_INIT_TIMEOUT": "3", "WANDB_HTTP_TIMEOUT": "2"}  # seconds
    setting = (*SMALL, "arm=adamw", "logger=wandb", "run.dir=run")
    result = train(*setting, cwd=tmp_path, **nowhere)
    assert "warning: wandb's server cannot be reached" in result.stdout
    _, recorded = read_offline((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert [row["step"] for row in recorded] == list(range(1, 13))

    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": ""}
    result = train(*setting, "run.dir=other", cwd=tmp_path, expect=1, **nowhere | home)
    assert "train.py: error: logger=wandb: No API key configured" in result.stderr
    assert rows(tmp_path / "other") == []
