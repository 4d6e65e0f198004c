"""Tile shapes: how many rows and keys a program holds, with how many warps and pipeline stages."""

import contextlib
import functools
from collections.abc import Iterator

import torch

from .common import INTERPRETED, forget_launches

# Keyed by compute capability, then pass, then (largest head dimension that the entry serves, bytes of an
# element). BLOCK_M counts rows and BLOCK_N keys in every pass. `measured` marks what won a search on that
# machine; the others are starting values.
_TABLE: dict[tuple[int, int], dict[str, dict[tuple[int, int], dict]]] = {}


def _entry(
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    *,
    measured: bool = False,
) -> dict:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "measured": measured,
    }


# Measured on an H200 in bf16, causal, B=4, H=12, with triton 3.6: python -m scripts.tune_attention. Of the row and column
# pass these are the plain kernels' tiles; see _HOPPER below.
_TABLE[9, 0] = {
    "forward": {
        (64, 2): _entry(64, 64, 4, 3, measured=True),
        (128, 2): _entry(64, 64, 4, 3, measured=True),
        (256, 2): _entry(64, 64, 8, 2),
    },
    "backward_rows": {
        (64, 2): _entry(64, 64, 4, 3, measured=True),
        (128, 2): _entry(128, 64, 8, 3, measured=True),
        (256, 2): _entry(64, 32, 8, 2),
    },
    "backward_keys": {
        (64, 2): _entry(64, 64, 4, 2, measured=True),
        (128, 2): _entry(32, 64, 4, 2, measured=True),
        (256, 2): _entry(32, 64, 8, 2),
    },
    "row_pass": {
        (64, 2): _entry(64, 32, 4, 3, measured=True),
        (128, 2): _entry(128, 16, 8, 3, measured=True),
        (256, 2): _entry(64, 16, 8, 2),
    },
    "column_pass": {
        (64, 2): _entry(32, 128, 8, 2, measured=True),
        (128, 2): _entry(32, 128, 8, 2, measured=True),
        (256, 2): _entry(16, 64, 8, 2),
    },
}

# For every other machine and for fp32: at most 64 KiB of shared memory, or what the head dimension forces.
_FALLBACK = {
    (64, 2): _entry(64, 32, 4, 2),
    (128, 2): _entry(32, 32, 4, 1),
    (256, 2): _entry(16, 16, 4, 1),
    (64, 4): _entry(16, 16, 4, 1),
    (128, 4): _entry(16, 16, 4, 1),
    (256, 4): _entry(16, 16, 8, 1),
}


def _hopper_entry(block_m: int, block_n: int, *, stages: int, held_operands: int, num_warps: int) -> dict:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "HELD_OPERANDS": held_operands,
        "num_warps": num_warps,
    }


# The Gluon kernels of hopper.py, by pass and head dimension, for bf16 and fp16.
_HOPPER: dict[tuple[str, int], dict] = {
    ("row_pass", 64): _hopper_entry(64, 32, stages=2, held_operands=3, num_warps=4),
    ("row_pass", 128): _hopper_entry(64, 64, stages=2, held_operands=1, num_warps=8),
    ("column_pass", 64): _hopper_entry(32, 64, stages=3, held_operands=4, num_warps=4),
    ("column_pass", 128): _hopper_entry(64, 64, stages=2, held_operands=2, num_warps=8),
}
_INTERPRETER = _entry(32, 32, 1, 1)
FORCED: dict[str, dict] = {}  # tiles of the plain kernels that `forced` asks for


@contextlib.contextmanager
def forced(
    pass_name: str,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
) -> Iterator[None]:
    """Within the block, launch `pass_name` with these tiles whatever the table says: for searches and tests."""
    before = dict(FORCED)
    FORCED[pass_name] = _entry(block_m, block_n, num_warps, num_stages)
    _forget()
    try:
        yield
    finally:
        FORCED.clear()
        FORCED.update(before)
        _forget()


def _forget() -> None:
    tiles.cache_clear()
    forget_launches()


@functools.lru_cache(maxsize=1024)
def tiles(pass_name: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """What `_entry` holds of a pass, one of the names in the table, as arguments of its launch."""
    if pass_name in FORCED:
        entry = FORCED[pass_name]
    elif INTERPRETED:
        entry = _INTERPRETER
    else:
        capability = torch.cuda.get_device_capability(device)
        served = _TABLE.get(capability, {}).get(pass_name, {})
        entry = _smallest(served, head_dim, dtype.itemsize) or _smallest(_FALLBACK, head_dim, dtype.itemsize)
        if entry is None:
            raise ValueError(f"no tiles for head dimension {head_dim} and {dtype}")
    return {name: value for name, value in entry.items() if name != "measured"}


def hopper_tile(pass_name: str, head_dim: int) -> dict:
    """Arguments of a launch of hopper.py's kernels, measured on an H200."""
    return _HOPPER[pass_name, head_dim]


def _smallest(entries: dict[tuple[int, int], dict], head_dim: int, itemsize: int) -> dict | None:
    fitting = [key for key in entries if key[0] >= head_dim and key[1] == itemsize]
    return entries[min(fitting)] if fitting else None
