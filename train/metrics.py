"""What a run records: metrics.jsonl and system.json always, Weights & Biases if asked, and a line of progress for people.

Names are grouped by a prefix: train/, val/, hessian/, time/ (seconds), memory/ (GiB), throughput/.
"""

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from train import system
from train.config import Config, WandbConfig
from train.wandb_log import WandbLog

# Dense bf16 rates of NVIDIA's datasheets, FLOP/s; the first name that the device's contains.
_PEAK_FLOPS = {
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "RTX A6000": 154.8e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165.2e12,
}


class Metrics:
    """The record of one run, on rank 0. `first_step` is the first step that is still to come."""

    def __init__(self, config: Config, directory: Path, first_step: int) -> None:
        self._path = directory / "metrics.jsonl"
        rows = self._drop_rows_from(first_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._wandb = None
        ran_on = system.record(config, directory, first_step)
        if isinstance(config.logger, WandbConfig):
            self._wandb = WandbLog(config, directory, rows, ran_on)

    def write(self, row: dict[str, Any]) -> None:
        """Append one step. JSON has no NaN: values that are not finite are left out, and named under `nonfinite`."""
        bad = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            row = {key: value for key, value in row.items() if key not in bad} | {"nonfinite": bad}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.write(row)

    def close(self, exit_code: int) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.close(exit_code)

    def _drop_rows_from(self, step: int) -> list[dict[str, Any]]:
        """Forget the steps that are about to be taken again, and a last line that a kill cut short. Returns the others."""
        if not self._path.exists():
            return []
        kept, rows = [], []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if line.endswith("\n") and row["step"] < step:
                kept.append(line)
                rows.append(row)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self._path)
        return rows


def progress_line(row: dict[str, Any], max_steps: int) -> str:
    """One step in words. Parts that a row does not have are left out."""
    parts = [f"step {row['step']:>{len(str(max_steps))}}/{max_steps}"]
    for key, form in (
        ("train/loss", "loss {:.4f}"),
        ("val/loss", "val {:.4f}"),
        ("train/lr", "lr {:.2e}"),
        ("time/tokens_per_s", "{:,.0f} tokens/s"),
        ("hessian/event_s", "Hessian {:.2f} s"),
        ("hessian/clip_fraction", "clipped {:.0%}"),
        ("memory/peak_gib", "{:.2f} GiB"),
        ("throughput/mfu", "MFU {:.1%}"),
    ):
        if key in row:
            parts.append(form.format(row[key]))
    if "train/nonfinite" in row:
        parts.append(f"skipped: {row['train/nonfinite']}")
    if "time/eta_s" in row:
        parts.append(f"ETA {clock(row['time/eta_s'])}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """65 → 1:05, 3665 → 1:01:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def peak_memory_gib(device: torch.device) -> float:
    """Largest so far: what PyTorch allocated on a GPU; on a CPU the whole process, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return process_peak_bytes() / 2**30


def process_peak_bytes() -> int:
    """The largest resident set of this process so far.

    Not getrusage's: Linux has a new process start with the maximum of the one that started it.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 rate in FLOP/s; None for a CPU and for a device that the table does not have."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in _PEAK_FLOPS.items() if key in name), None)
