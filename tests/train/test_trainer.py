"""The training program, started as users start it."""

import gzip
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from wandb.proto import wandb_internal_pb2

from tests.train.launch import (
    ADAMW,
    ROOT,
    SMALL,
    SOPHIA,
    build_trainer,
    command,
    environment,
    kill_everything_in,
    kill_group,
    rows,
    series,
    start,
    train,
    train_here,
    wait_for_step,
)
from train.checkpoint import CheckpointError, list_checkpoints
from train.wandb_log import records

DROPOUT = "model.dropout=0.1"
SERIES = (
    "step",
    "train/loss",
    "val/loss",
    "train/grad_norm",
    "hessian/norm",
)  # the same bits, however a run came there


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Runs that nobody disturbed: name -> directory."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    arms = {"adamw": ADAMW, "sophia": SOPHIA}
    for name, arm in arms.items():
        train(*SMALL, *arm, DROPOUT, f"run.dir={name}", cwd=folder)
    return {name: folder / name for name in arms}


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_metrics_of_every_step(uninterrupted):
    for name, directory in uninterrupted.items():
        recorded = rows(directory)
        assert [row["step"] for row in recorded] == list(range(1, 13))
        assert [row["tokens"] for row in recorded] == [256 * step for step in range(1, 13)]
        assert [row["step"] for row in recorded if "val/loss" in row] == [6, 12]
        for row in recorded:
            for key in ("train/loss", "train/lr", "train/grad_norm", "time/elapsed_s", "time/step_s"):
                assert math.isfinite(row[key])
            assert row["memory/peak_gib"] > 0.05
        elapsed = [row["time/elapsed_s"] for row in recorded]
        assert elapsed == sorted(elapsed)
        hessian = [row["step"] for row in recorded if "hessian/event_s" in row]
        assert hessian == ([1, 4, 7, 10] if name == "sophia" else [])
        assert (directory / "config.yaml").is_file()
        steps = [path.name for path in list_checkpoints(directory / "checkpoints")]
        assert steps == ["step-00000008.pt", "step-00000012.pt"]


def test_training_learns(tmp_path):
    """Bytes of English: uniform is ln 256 = 5.5; 60 steps of either optimizer get well below the unigram's 3.3 + 10 %."""
    for name, arm in {"adamw": ADAMW, "sophia": SOPHIA}.items():
        train_here(*SMALL, *arm, "train.max_steps=60", "train.precision=fp32", run=tmp_path / name)
        losses = series(tmp_path / name, "train/loss")
        assert 5.4 < losses[0] < 5.8
        assert sum(losses[-5:]) / 5 < 4.0
        assert series(tmp_path / name, "val/loss")[-1] < 4.0


def test_learning_rate_schedule(uninterrupted):
    lr = series(uninterrupted["adamw"], "train/lr")
    assert lr[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    for step in range(4, 12):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 3) / 9))
        assert lr[step - 1] == pytest.approx(3e-4 + (3e-3 - 3e-4) * cosine)
    assert lr[-1] == pytest.approx(3e-4)


def test_a_finished_run_says_so(uninterrupted):
    directory = uninterrupted["adamw"]
    before = (directory / "metrics.jsonl").read_bytes()
    # What changes nothing about the numbers may differ.
    other = ("train.log_every=2", "logger=jsonl", f"run.dir={directory.name}")
    result = train(*SMALL, *ADAMW, DROPOUT, *other, cwd=directory.parent)
    assert "already complete" in result.stdout
    assert (directory / "metrics.jsonl").read_bytes() == before


def test_help_cfg_and_sweep(tmp_path):
    text = train("--help", cwd=tmp_path).stdout
    for word in ("sophia-flashbob", "train.global_batch_size", "fineweb-8xa100", "torchrun"):
        assert word in text
    assert "hessian_interval: 10" in train("--cfg", "job", cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []
    small = ("model.num_layers=1", "model.block_size=32", "train.max_steps=1", "train.eval_batches=1")
    small += ("train.precision=fp64",)
    train("-m", *small, "arm=adamw,sophia-flashbob", "seed=1,2", cwd=tmp_path)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 4 and all("seed=" in name for name in names)
    assert {name.split("-gpt2")[0] for name in names} == {"adamw", "sophia-flashbob"}
    losses = {name: series(tmp_path / "runs" / name, "train/loss")[0] for name in names}
    adamw, sophia = ([x for name, x in losses.items() if name.startswith(arm)] for arm in ("adamw", "sophia"))
    # A seed's weights and batches are one arm's no more than the other's.
    assert adamw == pytest.approx(sophia, rel=1e-12) and abs(adamw[0] - adamw[1]) > 1e-3


def test_every_arm_runs_on_a_cpu(tmp_path):
    arms = ("adamw", "sophia-math", "sophia-hybrid", "sophia-paper", "sophia-flashbob")
    printed = train("-m", *SMALL, f"arm={','.join(arms)}", "train.max_steps=2", cwd=tmp_path).stdout
    directories = {arm: next((tmp_path / "runs").glob(f"{arm}-gpt2-*")) for arm in arms}
    losses = {arm: series(directory, "train/loss") for arm, directory in directories.items()}
    begins = {arm: next(x for x in printed.splitlines() if x.startswith(f"{arm}-gpt2")) for arm in arms}
    assert "hybrid (forward and first backward: tiled)" in begins["sophia-hybrid"]
    assert "attention: flashbob tiled" in begins["sophia-paper"]
    first = losses.pop("adamw")[0]
    for values in losses.values():  # one set of weights and batches; one Sophia, whatever computes it
        assert values[0] == pytest.approx(first, rel=1e-12)
        assert values == pytest.approx(losses["sophia-math"], rel=1e-10)


@pytest.mark.parametrize("name", ["fineweb-8xa100", "fineweb-8xa6000"])
@pytest.mark.parametrize("arm", ["adamw", "sophia-paper"])
def test_published_presets_hold_the_published_numbers(name, arm, tmp_path):
    from omegaconf import OmegaConf

    text = train("--cfg", "job", f"preset={name}", f"arm={arm}", cwd=tmp_path).stdout
    config = OmegaConf.create(text)
    assert config.seed == 17 and config.model.block_size == 2048 and config.model.num_layers == 12
    t = config.train
    assert (t.max_steps, t.micro_batch_size, t.global_batch_size) == (1908, 2, 256)
    assert (t.precision, t.compile, t.eval_every, t.eval_batches) == ("bf16", False, 250, 32)
    assert t.global_batch_size * config.model.block_size == 524288
    o = config.optim
    assert o.grad_clip == 1.0
    if arm == "adamw":
        assert (o.lr, o.min_lr, o.warmup_steps, o.betas, o.eps, o.weight_decay) == (
            1e-3,
            1e-4,
            150,
            [0.9, 0.95],
            1e-8,
            0.1,
        )
    else:
        assert (o.lr, o.min_lr, o.warmup_steps, o.betas, o.eps, o.weight_decay) == (
            6e-4, 3e-5, 2000, [0.96, 0.99], 1e-12, 0.2,
        )  # fmt: skip
        assert (o.gamma, o.hessian_interval, o.hessian_gradient, o.probe) == (
            0.01,
            10,
            "separate",
            "gaussian",
        )
        assert (o.hessian_batch_size or t.global_batch_size) // 8 == 32


# --- the same numbers another way -------------------------------------------------------------------------------------


def test_shards_train_alike_on_any_number_of_ranks(tmp_path):
    """data=tokens: one order of blocks, whatever reads it; evaluation on the shards that are held out."""
    from data.tokens import write_shard

    text = (ROOT / "data" / "shakespeare" / "tinyshakespeare.txt").read_bytes()
    for name, part in {
        "train-a": text[:7000],
        "train-b": text[7000:20000],
        "val-a": text[20000:24000],
    }.items():
        write_shard(tmp_path / f"{name}.bin", [list(part)], 256, "bytes")
    shards = (*SMALL, *SOPHIA, "data=tokens", f"data.path={tmp_path}", "data.tokenizer=bytes")
    train(*shards, "run.dir=one", cwd=tmp_path)
    train(*shards, "run.dir=two", cwd=tmp_path, processes=2)
    for key in ("train/loss", "val/loss"):
        assert series(tmp_path / "two", key) == pytest.approx(series(tmp_path / "one", key), rel=1e-10)
    result = train(*SMALL, *SOPHIA, "data=tokens", "run.dir=none", cwd=tmp_path, expect=1)
    assert "data=tokens needs data.path=DIR" in result.stderr


def test_shared_and_separate_gradients_agree_and_a_part_of_the_batch_does(tmp_path):
    part = (*SMALL, *SOPHIA, "optim.hessian_batch_size=4")
    for gradient in ("shared", "separate"):
        train_here(*part, f"optim.hessian_gradient={gradient}", run=tmp_path / gradient)
    train_here(*SMALL, *SOPHIA, run=tmp_path / "whole")
    shared, separate, whole = (
        series(tmp_path / name, "train/loss") for name in ("shared", "separate", "whole")
    )
    assert shared == pytest.approx(separate, rel=1e-10)
    assert shared[0] == pytest.approx(whole[0], rel=1e-12) and abs(shared[-1] - whole[-1]) > 1e-6


def test_tangents_and_a_second_backward_train_alike(tmp_path):
    for method in ("reverse", "forward"):
        train_here(*SMALL, *SOPHIA, f"optim.hessian_method={method}", run=tmp_path / method)
    for key in ("train/loss", "hessian/norm"):
        reverse, forward = (series(tmp_path / method, key) for method in ("reverse", "forward"))
        assert forward == pytest.approx(reverse, rel=1e-9)


def test_math_and_flashbob_agree_over_50_steps(tmp_path):
    """fp64: the backends differ by 1e-15 in a gradient; 50 steps, 17 of them with a new Hessian, keep losses to 1e-9."""
    for arm in ("sophia-math", "sophia-flashbob"):
        train_here(*SMALL, f"arm={arm}", "optim.hessian_interval=3", "train.max_steps=50", run=tmp_path / arm)
    a, b = (series(tmp_path / arm, "train/loss") for arm in ("sophia-math", "sophia-flashbob"))
    assert len(a) == 50
    assert a == pytest.approx(b, rel=1e-9)


# --- stopping and going on --------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_twice_resumes_bit_for_bit(uninterrupted, tmp_path):
    """Before its first checkpoint, and after its second. An AdamW run is killed where the disk is full."""
    arguments = (*SMALL, *SOPHIA, DROPOUT, "run.dir=run")
    for step in (3, 9):
        process = start(*arguments, cwd=tmp_path)
        wait_for_step(tmp_path / "run", step, process)
        kill_group(process)
        assert len(rows(tmp_path / "run")) < 12
    result = train(*arguments, cwd=tmp_path)
    assert "continues after step 8" in result.stdout
    for key in SERIES:
        assert series(tmp_path / "run", key) == series(uninterrupted["sophia"], key)


def test_a_stop_signal_checkpoints_and_ends_well(uninterrupted, tmp_path):
    arguments = (*SMALL, *SOPHIA, DROPOUT, "run.dir=run")
    done = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = start(*arguments, cwd=tmp_path)
        wait_for_step(tmp_path / "run", done + 2, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        done = len(rows(tmp_path / "run"))
        assert done < 12 and f"stopped by signal {int(number)} after step {done}" in output
        assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{done:08d}.pt"
    train(*arguments, cwd=tmp_path)
    assert series(tmp_path / "run", "train/loss") == series(uninterrupted["sophia"], "train/loss")


def test_a_signal_to_one_rank_stops_all(tmp_path):
    arguments = (*SMALL, *SOPHIA, "train.max_steps=2000", "train.checkpoint_every=0", "run.dir=run")
    process = start(*arguments, cwd=tmp_path, processes=2)
    wait_for_step(tmp_path / "run", 2, process)
    workers = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit()
        and _environ(pid).get("RANK") == "1"
        and os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
    ]
    (worker,) = workers
    os.kill(worker, signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    done = len(rows(tmp_path / "run"))
    assert f"stopped by signal {int(signal.SIGUSR1)} after step {done}" in output
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == [
        f"step-{done:08d}.pt"
    ]


def _environ(pid: str) -> dict[str, str]:
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def test_a_truncated_checkpoint(uninterrupted, tmp_path):
    arguments = (*SMALL, *SOPHIA, DROPOUT, "run.dir=run")
    shutil.copytree(uninterrupted["sophia"], tmp_path / "run")
    *_, newest = list_checkpoints(tmp_path / "run" / "checkpoints")
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])

    result = train(*arguments, f"train.resume={newest}", cwd=tmp_path, expect=1)
    (line,) = result.stderr.splitlines()
    assert f"{newest}: not a complete checkpoint" in line

    result = train(*arguments, cwd=tmp_path)  # auto goes back to the one before, and says so
    assert "not a complete checkpoint" in result.stdout and "continues after step 8" in result.stdout
    assert series(tmp_path / "run", "train/loss") == series(uninterrupted["sophia"], "train/loss")

    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint in it is complete"):
        train_here(*SMALL, *SOPHIA, DROPOUT, run=tmp_path / "run")


def test_resume_refuses_another_configuration(tmp_path):
    from train.config import ConfigError

    arguments = (*SMALL, *ADAMW, "run.dir=run")
    train_here(*arguments, "train.max_steps=4", run=tmp_path / "run")
    result = train(*arguments, "optim.lr=1e-3", "seed=3", cwd=tmp_path, expect=1)
    (line,) = result.stderr.splitlines()
    assert "optim.lr: 0.003 → 0.001; seed: 17 → 3; train.max_steps: 4 → 12" in line
    with pytest.raises(ConfigError, match="has checkpoints that would be lost"):
        train_here(*arguments, "train.max_steps=4", "train.resume=never", run=tmp_path / "run")


def test_a_checkpoint_from_before_a_key_existed_goes_on(uninterrupted):
    from train.checkpoint import differing_keys, load
    from train.config import flatten

    stored = flatten(load(list_checkpoints(uninterrupted["sophia"] / "checkpoints")[-1])["config"])
    older = {key: value for key, value in stored.items() if key != "optim.hessian_method"}
    assert len(older) == len(stored) - 1 and differing_keys(older, stored) == []
    assert differing_keys(older, {**stored, "optim.hessian_method": "forward"}) == [
        "optim.hessian_method: reverse → forward"
    ]


def test_a_run_directory_has_one_process(tmp_path):
    arguments = (*SMALL, *ADAMW, "train.max_steps=5000", "run.dir=run")
    process = start(*arguments, cwd=tmp_path)
    try:
        wait_for_step(tmp_path / "run", 1, process)
        result = train(*arguments, cwd=tmp_path, expect=1)
        assert "another process is training in it" in result.stderr
    finally:
        kill_group(process)


def test_a_full_disk_leaves_the_last_checkpoint(uninterrupted, tmp_path):
    """No file may grow past half a checkpoint: as on a full disk, writing fails midway."""
    arguments = (*SMALL, *ADAMW, DROPOUT, "run.dir=run")
    process = start(*arguments, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 5, process)
    kill_group(process)
    folder = tmp_path / "run" / "checkpoints"
    last = list_checkpoints(folder)[-1]
    before = last.read_bytes()
    limit = len(before) // 2
    result = subprocess.run(
        command(*arguments),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        timeout=120,
    )
    assert result.returncode == 1, result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert re.search(r"step-000000(08|12)\.pt: the checkpoint could not be written", line)
    assert list(folder.iterdir()) == [last] and last.read_bytes() == before
    train(*arguments, cwd=tmp_path)  # with space again
    for key in SERIES:
        assert series(tmp_path / "run", key) == series(uninterrupted["adamw"], key)


# --- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loss_that_is_not_finite(processes, tmp_path):
    broken = (*SMALL, *SOPHIA, "optim.lr=1e200", "optim.warmup_steps=0")
    result = train(*broken, "run.dir=stop", cwd=tmp_path, expect=1, processes=processes)
    line = next(line for line in result.stderr.splitlines() if line.startswith("train.py: error: "))
    assert re.search(r"step 2: train/(loss|grad_norm) is not finite; the weights are those of step 1", line)
    assert len(rows(tmp_path / "stop")) == 1


def test_losses_that_are_not_finite_are_skipped_ten_times_by_two_ranks(tmp_path):
    broken = (*SMALL, *SOPHIA, "optim.lr=1e200", "optim.warmup_steps=0", "optim.on_nonfinite=skip")
    result = train(*broken, "run.dir=skip", cwd=tmp_path, expect=1, processes=2)
    assert "10 times in a row" in result.stderr
    recorded = rows(tmp_path / "skip")
    assert [row["step"] for row in recorded if "train/nonfinite" in row] == list(range(2, 11))


def test_numbers_that_are_read_a_step_late_change_nothing(tmp_path):
    """`log_every` decides when the host looks. Every step is recorded, and a step that must not be taken is not."""
    from train.trainer import TrainingStopped

    late = ("train.log_every=100", "train.checkpoint_every=0")
    for name, arm in {"adamw": ADAMW, "sophia": SOPHIA}.items():
        at_once, read_late = tmp_path / name / "at-once", tmp_path / name / "late"
        train_here(*SMALL, *arm, DROPOUT, run=at_once)
        train_here(*SMALL, *arm, DROPOUT, *late, run=read_late)
        for key in (
            "step",
            "train/loss",
            "train/grad_norm",
            "val/loss",
            "hessian/norm",
            "hessian/clip_fraction",
        ):
            assert series(read_late, key) == series(at_once, key)

        broken = (
            *SMALL,
            *arm,
            *late,
            "train.eval_every=100",
            "optim.lr=1e200",
            "optim.warmup_steps=0",
            "optim.grad_clip=0",
            "optim.decay_steps=12",
        )
        one = train_here(*broken, "train.max_steps=1", run=tmp_path / name / "one")
        stopped = build_trainer(*broken, f"run.dir={tmp_path / name / 'stopped'}")
        with pytest.raises(TrainingStopped, match=r"step 2: .*; the weights are those of step 1"):
            stopped.run()
        assert stopped.step == 3  # when it was known; by then step 3 had been asked for
        assert all(torch.equal(p, q) for p, q in zip(stopped.params, one.params))

        with pytest.raises(TrainingStopped, match="10 times in a row"):
            train_here(*broken, "optim.on_nonfinite=skip", run=tmp_path / name / "skip")
        recorded = rows(tmp_path / name / "skip")
        assert [row["step"] for row in recorded if "train/nonfinite" in row] == list(range(2, 11))


@pytest.mark.parametrize("arm", [ADAMW, SOPHIA])
def test_one_step_that_is_not_finite_among_others_that_are(arm, tmp_path, monkeypatch):
    """Step 3 is asked for before the host knows of step 2. With `stop` it must not be taken, though its numbers are good."""
    from train.trainer import TrainingStopped

    def run(name, *more):
        late = ("train.log_every=100", "train.eval_every=100", "train.checkpoint_every=0")
        trainer = build_trainer(*SMALL, *arm, *late, *more, f"run.dir={tmp_path / name}")
        accumulate = trainer._accumulate

        def broken(*arguments):
            loss, estimate = accumulate(*arguments)
            return (loss * math.nan if trainer.step == 2 else loss), estimate

        monkeypatch.setattr(trainer, "_accumulate", broken)
        return trainer

    one = run("one", "train.max_steps=1", "optim.decay_steps=12")
    one.run()
    stopped = run("stopped", "optim.decay_steps=12")
    with pytest.raises(
        TrainingStopped, match="step 2: train/loss is not finite; the weights are those of step 1"
    ):
        stopped.run()
    assert stopped.step == 3 and series(tmp_path / "stopped", "step") == [1]
    assert all(torch.equal(p, q) for p, q in zip(stopped.params, one.params))

    skipped = run("skipped", "optim.on_nonfinite=skip")
    skipped.run()
    recorded = rows(tmp_path / "skipped")
    assert [row["step"] for row in recorded] == list(range(1, 13)) and skipped.skipped_in_a_row == 0
    measured = ("train/loss", "train/grad_norm", "train/momentum_norm", "hessian/norm")
    assert [row["step"] for row in recorded if "train/nonfinite" in row] == [2]
    assert not any(key in recorded[1] for key in (*measured, "nonfinite"))
    assert all(p.isfinite().all() for p in skipped.params)


@pytest.mark.parametrize("end", ["a signal", "no more data"])
def test_the_step_before_an_end_is_recorded_and_saved(end, tmp_path, monkeypatch):
    """Nothing else asks for the numbers of step 5: they are read because the run ends."""
    from data import DataError
    from train import distributed
    from train.trainer import TrainingStopped

    late = ("train.log_every=100", "train.eval_every=100", "train.checkpoint_every=0")
    trainer = build_trainer(*SMALL, *SOPHIA, *late, f"run.dir={tmp_path}")
    if end == "a signal":
        monkeypatch.setattr(distributed, "stop_signal", lambda: signal.SIGTERM if trainer.step == 5 else 0)
        trainer.run()
    else:
        take_batches = trainer._take_batches

        def ending():
            if trainer.step == 6:
                raise DataError("no more")
            return take_batches()

        monkeypatch.setattr(trainer, "_take_batches", ending)
        with pytest.raises(TrainingStopped, match="no more; after step 5, with a checkpoint"):
            trainer.run()
    assert series(tmp_path, "step") == [1, 2, 3, 4, 5] and len(series(tmp_path, "train/loss")) == 5
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    stored = torch.load(path, weights_only=True)
    assert stored["step"] == 5 and stored["optimizer"]["param_groups"][0]["step"] == 5


def test_time_and_memory_are_those_of_the_step_not_of_its_reading(tmp_path, monkeypatch):
    """Step 3 is read after step 4, which takes half a second; the largest memory is the last evaluation's."""
    from train import metrics

    late = ("train.log_every=100", "train.eval_every=100", "train.max_steps=5")
    trainer = build_trainer(*SMALL, *ADAMW, *late, f"run.dir={tmp_path}")
    take_batches, evaluate, peak = trainer._take_batches, trainer.evaluate, [1.0]

    def slow():
        time.sleep(0.5 if trainer.step == 4 else 0.0)
        return take_batches()

    def large():
        peak[0] = 2.0
        return evaluate()

    monkeypatch.setattr(trainer, "_take_batches", slow)
    monkeypatch.setattr(trainer, "evaluate", large)
    monkeypatch.setattr(metrics, "peak_memory_gib", lambda device: peak[0])
    trainer.run()
    elapsed = series(tmp_path, "time/elapsed_s")
    assert elapsed[3] - elapsed[2] >= 0.5
    eta = [seconds / step * (5 - step) for step, seconds in enumerate(elapsed, 1)]
    assert series(tmp_path, "time/eta_s") == pytest.approx(eta)
    assert series(tmp_path, "memory/peak_gib") == [1.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("gradient", ["shared", "separate"])
def test_a_hessian_estimate_that_is_not_finite(gradient, tmp_path, monkeypatch):
    from optim import HutchinsonEstimator
    from train.trainer import TrainingStopped

    reduce = HutchinsonEstimator.reduce

    def broken(self, process_group=None):
        estimate = reduce(self, process_group)
        estimate[0].view(-1)[3] = math.inf
        return estimate

    monkeypatch.setattr(HutchinsonEstimator, "reduce", broken)
    arguments = (*SOPHIA, f"optim.hessian_gradient={gradient}")
    trainer = build_trainer(*SMALL, *arguments, f"run.dir={tmp_path / 'stop'}")
    before = [p.detach().clone() for p in trainer.params]
    with pytest.raises(TrainingStopped, match="step 1: the Hessian estimate is not finite"):
        trainer.run()
    assert all(torch.equal(p, q) for p, q in zip(trainer.params, before))

    trainer = build_trainer(
        *SMALL, *arguments, "optim.on_nonfinite=skip", "train.max_steps=4", f"run.dir={tmp_path / 'skip'}"
    )
    trainer.run()
    recorded = rows(tmp_path / "skip")
    assert [row["step"] for row in recorded if row.get("hessian/skipped")] == [1, 4]
    assert len(recorded) == 4 and all(row["hessian/norm"] == 0.0 for row in recorded)  # h was never touched
    assert all(math.isfinite(row["train/loss"]) for row in recorded)


# The C++ that Inductor writes for a CPU sums in another order: fp32 rounding, which six steps amplify.
def test_a_compiled_model_trains_alike(tmp_path):
    arguments = (*SMALL, *SOPHIA, "train.precision=fp32", "train.max_steps=6")
    train_here(*arguments, run=tmp_path / "compile-false")
    train(*arguments, "train.compile=true", "run.dir=compile-true", cwd=tmp_path)
    assert series(tmp_path / "compile-true", "train/loss") == pytest.approx(
        series(tmp_path / "compile-false", "train/loss"), rel=1e-4
    )


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_sample_evaluates_and_samples(uninterrupted):
    directory = uninterrupted["sophia"]
    call = [
        sys.executable,
        "-m",
        "train.sample",
        str(directory),
        "--prompt",
        "ROMEO:",
        "--tokens",
        "20",
        "--device",
        "cpu",
    ]
    first, second = (
        subprocess.run(call, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert first.stdout == second.stdout and first.stdout.startswith("ROMEO:")
    assert f"step 12: validation loss {rows(directory)[-1]['val/loss']:.4f}" in first.stderr
    missing = subprocess.run(
        [*call[:3], "/nowhere"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert missing.returncode == 1
    assert missing.stderr.strip() == (
        "train.sample: error: /nowhere: no checkpoint there; expected a checkpoint, or a run directory that has one"
    )


def test_a_profile_names_the_phases(tmp_path):
    result = train(*SMALL, *SOPHIA, "profile=true", "train.max_steps=7", "run.dir=run", cwd=tmp_path)
    assert "trace.json.gz: a trace of three steps, up to step 5" in result.stdout
    trace = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))
    counts = Counter(
        event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
    )
    # Steps 3 to 5 with four micro-batches; step 4 has the Hessian, which brings its gradients along.
    assert (counts["data"], counts["optimizer"]) == (3, 3)
    assert (counts["forward"], counts["backward"], counts["hessian_vector_product"]) == (8, 8, 4)


# --- Weights & Biases, and what must not be stored --------------------------------------------------------------------


def read_wandb(folder: Path) -> tuple[list[dict], dict, set[str]]:
    """History rows, configuration and the metrics that were defined, from a run's offline files in order."""
    history, config, metrics = [], {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                history.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items})
            elif kind == "run":
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
                config["id"] = record.run.run_id
            elif kind == "metric":
                metrics.add(record.metric.name or record.metric.glob_name)
    return history, config, metrics


LOGGED = (*SMALL, *SOPHIA, "logger=wandb", "logger.mode=offline", "run.dir=run", "model.embed_dim=128")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The directory of a run with wandb's offline files whose two processes were killed."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(*LOGGED, cwd=folder, processes=2)
    wait_for_step(folder / "run", 7, process)
    kill_everything_in(folder)
    process.wait()
    return folder / "run"


@pytest.mark.parametrize("after", ["a kill", "a kill that lost the last rows"])
def test_wandb_has_every_step_once_after_a_kill_of_two_processes(after, killed, tmp_path):
    shutil.copytree(killed, tmp_path / "run")
    (first,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    if after != "a kill":  # as if the machine had gone down: not all of it had reached the disk
        whole = first.read_bytes()
        first.write_bytes(whole[: len(whole) // 2])
    before = [row["step"] for row in read_wandb(tmp_path / "run")[0]]
    assert len(before) < 12 and len(rows(tmp_path / "run")) < 12
    train(*LOGGED, cwd=tmp_path, processes=2)
    history, _, _ = read_wandb(tmp_path / "run")
    assert [row["step"] for row in history] == list(range(1, 13)), before
    assert [row["train/loss"] for row in history] == series(tmp_path / "run", "train/loss")
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*"))) == 2


def test_wandb_offline_holds_the_run_and_no_secrets(tmp_path):
    secret = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "home" / "somebody"
    home.mkdir(parents=True)
    text = home / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 500)
    train(
        *SMALL, *SOPHIA, "logger=wandb", "logger.mode=offline", "run.dir=run", f"data.path={text}",
        f"logger.tags=[{secret}]",
        cwd=tmp_path, WANDB_API_KEY=secret, HF_TOKEN="hf_" + "a" * 34, HOME=str(home),
    )  # fmt: skip
    history, config, metrics = read_wandb(tmp_path / "run")
    assert [row["step"] for row in history] == list(range(1, 13))
    assert [row["train/loss"] for row in history] == series(tmp_path / "run", "train/loss")
    assert config["optim"]["gamma"] == 0.01 and config["arm"] == "sophia-flashbob"
    assert {"step", "tokens", "time/elapsed_s"} <= metrics
    assert (tmp_path / "run" / "wandb_id").read_text().strip() == config["id"]

    stored = torch.load(list_checkpoints(tmp_path / "run" / "checkpoints")[-1], weights_only=True)
    everything = repr(stored["config"]) + (tmp_path / "run" / "config.yaml").read_text() + repr(config)
    assert "~/text.txt" in everything
    assert secret not in everything and str(home) not in everything and "hf_aaa" not in everything
    # A stored `~` is found again.
    result = subprocess.run(
        [sys.executable, "-m", "train.sample", str(tmp_path / "run"), "--tokens", "0", "--device", "cpu"],
        cwd=ROOT, env=environment(HOME=str(home)), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
