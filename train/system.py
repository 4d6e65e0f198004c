"""What a run ran on: commit, versions and hardware, for its directory and for wandb. Names no host, user or path."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from train import distributed
from train.config import Config

ROOT = Path(__file__).resolve().parent.parent


def describe(config: Config) -> dict[str, Any]:
    """Commit, versions and hardware of this process. GPUs and CPUs are those of rank 0's host.

    `uncommitted` says whether tracked files differed from the commit; both are None outside a git checkout.
    """
    world = distributed.environment()
    device = distributed.choose_device(config.device, world)
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": None if status is None else bool(status),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
            "wandb": _version("wandb"),
        },
        "hardware": {
            "device": device.type,
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if device.type == "cuda"
            else [],
            "cpu": _cpu_name(),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),  # of one process, for operations on the CPU
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "platform": f"{platform.system()} {platform.machine()}",
            "processes": world.size,
            "hosts": world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)),
        },
    }


def record(config: Config, directory: Path, first_step: int) -> dict[str, Any]:
    """Write `system.json`, a list with one entry for each process that found the run on something else than the one before.

    An entry is `describe`'s, with `first_step`, from which on it holds, and `started`, in UTC. Returns this process's.
    """
    path = directory / "system.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    entries = [entry for entry in entries if entry["first_step"] < first_step]
    current = describe(config)
    if not entries or any(entries[-1].get(key) != value for key, value in current.items()):
        started = datetime.now(UTC).isoformat(timespec="seconds")
        entries.append({"first_step": first_step, "started": started, **current})
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(entries, indent=1) + "\n")
        partial.replace(path)
    return entries[-1]


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The processor's name on Linux; elsewhere what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
