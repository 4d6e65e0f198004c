"""Start the real program as a user does, and read what it wrote."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A model that takes milliseconds a step, in fp64 so that only the order of sums differs between ways to the same step.
SMALL = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embed_dim=32",
    "model.block_size=32",
    "train.precision=fp64",
    "train.max_steps=12",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.eval_every=6",
    "train.eval_batches=4",
    "train.eval_batch_size=2",
    "train.checkpoint_every=4",
    "train.log_every=1",
    "optim.warmup_steps=3",
    "optim.lr=3e-3",
    "optim.min_lr=3e-4",
    "device=cpu",
)
SOPHIA = ("arm=sophia-flashbob", "optim.hessian_interval=3")
ADAMW = ("arm=adamw",)


def command(*arguments: str, processes: int = 0) -> list[str]:
    """`python train.py …`, or the same under torchrun with `processes` ranks."""
    launcher = [sys.executable]
    if processes:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
        ]
    return [*launcher, str(ROOT / "train.py"), *arguments]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **extra}


def train(*arguments: str, cwd: Path, processes: int = 0, expect: int = 0, timeout: float = 240, **env: str):
    """Run to the end; the exit status must be `expect`."""
    result = subprocess.run(
        command(*arguments, processes=processes),
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == expect, f"{result.stdout}\n{result.stderr}"
    return result


def start(*arguments: str, cwd: Path, processes: int = 0) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments, processes=processes),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def series(run: Path, key: str) -> list[float]:
    return [row[key] for row in rows(run) if key in row]


def wait_for_step(run: Path, step: int, process: subprocess.Popen, timeout: float = 120) -> None:
    """Until `step` is recorded in the run's metrics.jsonl."""
    deadline = time.monotonic() + timeout
    path = run / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline, f"no step {step} within {timeout} s"
        time.sleep(0.01)


def kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_everything_in(folder: Path) -> None:
    """SIGKILL for every process that works in `folder`: torchrun gives its workers sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve(strict=True) == folder.resolve() and int(
                process.name
            ) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
        except (OSError, PermissionError):
            continue  # it has ended meanwhile, or is somebody else's


def build_trainer(*overrides: str):
    """A Trainer of this process, for what no command line can bring about."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from train.config import build_config
    from train.main import register_resolvers
    from train.trainer import Trainer

    register_resolvers()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        values = OmegaConf.to_container(compose("train", list(overrides)), resolve=True)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    values["run"]["name"] = "run"
    return Trainer(build_config(values))


def train_here(*overrides: str, run: Path):
    """Train in this process, for what the numbers alone say: it saves the seconds in which Python and PyTorch start."""
    trainer = build_trainer(*overrides, f"run.dir={run}")
    trainer.run()
    return trainer
