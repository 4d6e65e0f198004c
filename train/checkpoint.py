"""Checkpoints: written atomically, rotated, found again, and refused when they are broken or another run's."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or continued. The message is one line."""


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.pt"


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, oldest first; unfinished files are not among them."""
    return sorted(path for path in directory.glob("step-*.pt") if _NAME.fullmatch(path.name))


def save(directory: Path, step: int, contents: dict[str, Any], keep: int) -> Path:
    """Write `contents` as the checkpoint of `step`, then delete all but the `keep` newest.

    The file gets its name only when it is complete and on the disk, so a kill at any moment leaves the earlier
    checkpoints as they were. Raises CheckpointError if it cannot be written, for want of space for one.
    """
    path = checkpoint_path(directory, step)
    partial = path.with_suffix(".partial")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **contents}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: the checkpoint could not be written ({_first_line(error)}); earlier checkpoints are as they were"
        ) from error
    # Only older ones: a run that was taken back to an earlier checkpoint has overwritten what came later, or will.
    older = [other for other in list_checkpoints(directory) if other != path]
    for stale in older[: max(0, len(older) + 1 - keep)]:
        stale.unlink(missing_ok=True)
    return path


def load(path: Path) -> dict[str, Any]:
    """The contents of the checkpoint at `path`, on the CPU. Raises CheckpointError if it is none or damaged."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a complete checkpoint ({_first_line(error)}); use another one, or delete it"
        ) from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        found = contents.get("format") if isinstance(contents, dict) else type(contents).__name__
        raise CheckpointError(
            f"{path}: not a checkpoint of this program (format {found}; {FORMAT} is expected)"
        )
    return contents


def load_latest(directory: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable checkpoint in `directory`, or None; and a line for each newer one that is damaged."""
    warnings = []
    for path in reversed(list_checkpoints(directory)):
        try:
            return load(path), warnings
        except CheckpointError as error:
            warnings.append(str(error))
    if warnings:
        raise CheckpointError(f"{directory}: no checkpoint in it is complete; the newest: {warnings[0]}")
    return None, warnings


def locate(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest in a run directory or a folder of checkpoints."""
    path = Path(path).expanduser()
    if path.is_file():
        return path
    for folder in (path / "checkpoints", path):
        if found := list_checkpoints(folder):
            return found[-1]
    raise CheckpointError(
        f"{path}: no checkpoint there; expected a checkpoint, or a run directory that has one"
    )


# --- models that `fully_shard` has split over ranks: a checkpoint holds what one process would have -------------------


def gather_fully_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole states of both, on the CPU of rank 0 and empty on the others. A collective, tensor by tensor."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    by_name: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    if not weights:
        return {}, {}
    first_name: dict[torch.Tensor, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):  # a tied tensor is stored once
        weights[name] = weights[first_name.setdefault(p, name)]
    # PyTorch names parameters here and numbers them in an optimizer's own state_dict, in the order of the groups.
    number = {
        name: i for i, name in enumerate(n for group in by_name["param_groups"] for n in group["params"])
    }
    groups = [
        {**group, "params": [number[name] for name in group["params"]]} for group in by_name["param_groups"]
    ]
    state = {number[name]: values for name, values in by_name["state"].items()}
    return weights, {"state": dict(sorted(state.items())), "param_groups": groups}


def restore_fully_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], states: dict[str, Any]
) -> None:
    """Load whole states, which every rank has: each takes its share."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, weights, options=options)
    name_of = {p: name for name, p in model.named_parameters()}
    names = [name_of[p] for group in optimizer.param_groups for p in group["params"]]
    by_name: dict[str, Any] = {
        "state": {names[number]: values for number, values in states["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in states["param_groups"]
        ],
    }
    set_optimizer_state_dict(model, optimizer, by_name, options=options)


# Keys that older checkpoints do not have, with what was done then.
_ADDED = {"optim.hessian_method": "reverse"}


def differing_keys(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """`key: stored → current` for every flat key that differs."""
    lines = []
    for key in sorted({*stored, *current}):
        before = stored.get(key, _ADDED.get(key, "absent"))
        after = current.get(key, "absent")
        if before != after:
            lines.append(f"{key}: {before} → {after}")
    return lines


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
