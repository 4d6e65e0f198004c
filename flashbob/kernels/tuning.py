"""Tile shapes: how many rows and keys a program holds, with how many warps and pipeline stages.

They come from the table here, or from a search: with FLASHBOB_AUTOTUNE=1 in the environment the first call of each kind
times the candidates and writes the fastest to a file, which later processes read, with or without the variable. The file
is tiles-<GPU>-triton-<version>.json in FLASHBOB_CACHE_DIR, by default ~/.cache/flashbob.
"""

import contextlib
import functools
import itertools
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from .common import INTERPRETED

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
        (256, 2): _entry(64, 32, 4, 3, measured=True),
    },
    "backward_keys": {
        (64, 2): _entry(64, 64, 4, 2, measured=True),
        (128, 2): _entry(32, 64, 4, 2, measured=True),
        (256, 2): _entry(32, 32, 8, 1),
    },
    "row_pass": {
        (64, 2): _entry(64, 32, 4, 3, measured=True),
        (128, 2): _entry(128, 16, 8, 3, measured=True),
        (256, 2): _entry(16, 16, 8, 1),
    },
    "baseline_rows": {
        (64, 2): _entry(64, 32, 4, 3),
        (128, 2): _entry(128, 16, 8, 3),
        (256, 2): _entry(16, 16, 8, 1),
    },
    "column_pass": {
        (64, 2): _entry(32, 128, 8, 2, measured=True),
        (128, 2): _entry(32, 128, 8, 2, measured=True),
        (256, 2): _entry(16, 32, 8, 2),
    },
    "tangent": {  # compile without spills
        (64, 2): _entry(64, 64, 4, 2),
        (128, 2): _entry(64, 32, 4, 3),
        (256, 2): _entry(32, 32, 8, 2),
    },
    # One sum a launch. row_pass_q and column_pass_k are the fastest although they spill (0.4 and 0.7 KiB of stack a thread).
    "row_pass_vectors": {(256, 2): _entry(64, 32, 4, 2, measured=True)},
    "row_pass_q": {(256, 2): _entry(64, 32, 4, 2, measured=True)},
    "row_pass_do": {(256, 2): _entry(64, 32, 4, 2, measured=True)},
    "column_pass_k": {(256, 2): _entry(32, 64, 4, 2, measured=True)},
    "column_pass_v": {(256, 2): _entry(16, 64, 4, 2, measured=True)},
    "backward_keys_k": {(256, 2): _entry(32, 128, 8, 2, measured=True)},
    "backward_keys_v": {(256, 2): _entry(64, 128, 8, 2, measured=True)},
}

# Nobody has run these there. They compile for sm_80, sm_86 and sm_100 (triton 3.6) with next to no spills, in at most 96 KiB.
_UNMEASURED = {
    "forward": {
        (64, 2): _entry(64, 64, 4, 2),
        (128, 2): _entry(64, 32, 4, 2),
        (256, 2): _entry(32, 32, 4, 1),
    },
    "backward_rows": {
        (64, 2): _entry(64, 32, 4, 2),
        (128, 2): _entry(64, 32, 4, 1),
        (256, 2): _entry(32, 16, 4, 1),
    },
    "backward_keys": {
        (64, 2): _entry(32, 64, 4, 1),
        (128, 2): _entry(32, 32, 4, 1),
        (256, 2): _entry(32, 32, 8, 1),
    },
    "row_pass": {
        (64, 2): _entry(32, 32, 4, 1),
        (128, 2): _entry(32, 32, 8, 1),
        (256, 2): _entry(16, 16, 8, 1),
    },
    "column_pass": {
        (64, 2): _entry(32, 64, 8, 1),
        (128, 2): _entry(32, 32, 8, 1),
        (256, 2): _entry(16, 32, 8, 2),
    },
    "tangent": {
        (64, 2): _entry(64, 32, 4, 2),
        (128, 2): _entry(32, 32, 4, 2),
        (256, 2): _entry(32, 32, 8, 1),
    },
    "row_pass_vectors": {(256, 2): _entry(16, 32, 8, 1)},
    "row_pass_q": {(256, 2): _entry(32, 32, 8, 1)},
    "row_pass_do": {(256, 2): _entry(32, 32, 8, 1)},
    "column_pass_k": {(256, 2): _entry(32, 16, 8, 1)},
    "column_pass_v": {(256, 2): _entry(32, 32, 8, 1)},
    "backward_keys_k": {(256, 2): _entry(32, 64, 8, 1)},
    "backward_keys_v": {(256, 2): _entry(32, 64, 8, 1)},
}
for _capability in ((8, 0), (8, 6), (8, 9), (10, 0), (10, 3)):
    _TABLE[_capability] = _UNMEASURED

# For every other machine and for fp32: at most 64 KiB of shared memory, or what the head dimension forces. They are also what
# runs where a tile of the table does not fit.
_FALLBACK = {
    (64, 2): _entry(64, 32, 4, 2),
    (128, 2): _entry(32, 32, 4, 1),
    (256, 2): _entry(16, 16, 4, 1),
    (64, 4): _entry(16, 16, 4, 1),
    (128, 4): _entry(16, 16, 4, 1),
    (256, 4): _entry(16, 16, 8, 1),
}


def _hopper_entry(block_m: int, block_n: int, *, stages: int, held_operands: int, **options: bool) -> dict:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "HELD_OPERANDS": held_operands,
        "num_warps": 4,
        **options,
    }


# The Gluon kernels in hopper/, by pass and largest head dimension, for bf16 and fp16; measured on an H200. No search
# changes them.
_HOPPER: dict[tuple[str, int], dict] = {
    ("backward_rows", 32): _hopper_entry(64, 64, stages=3, held_operands=2),
    ("backward_rows", 64): _hopper_entry(64, 64, stages=3, held_operands=2),
    ("backward_rows", 128): _hopper_entry(64, 64, stages=2, held_operands=2),
    ("backward_keys", 32): _hopper_entry(64, 64, stages=3, held_operands=2),
    ("backward_keys", 64): _hopper_entry(64, 64, stages=3, held_operands=2),
    ("backward_keys", 128): _hopper_entry(32, 64, stages=3, held_operands=1),
    ("row_pass", 32): _hopper_entry(64, 32, stages=2, held_operands=2, PAIR=False),
    ("row_pass", 64): _hopper_entry(64, 32, stages=2, held_operands=2, PAIR=False),
    ("row_pass", 128): _hopper_entry(64, 64, stages=2, held_operands=1, PAIR=True),
    ("column_pass", 32): _hopper_entry(64, 64, stages=3, held_operands=2, PAIR=False),
    ("column_pass", 64): _hopper_entry(32, 64, stages=3, held_operands=4, PAIR=False),
    ("column_pass", 128): _hopper_entry(64, 64, stages=2, held_operands=2, PAIR=True),
}
_INTERPRETER = _entry(32, 32, 1, 1)
FORCED: dict[str, dict] = {}  # tiles of the plain kernels that `forced` asks for
ON_CHANGE: list[Callable[[], None]] = []  # called when a tile may be another than before

# --- which tile ---------------------------------------------------------------------------------------------


def tiles(pass_name: str, head_dim: int, dtype: torch.dtype, device: torch.device, length: int) -> list[dict]:
    """Tiles of a pass, one of the names in the table, as arguments of its launch: the first that fits the device is to run."""
    if pass_name in FORCED:
        return [_arguments(FORCED[pass_name])]
    if INTERPRETED:
        return [_arguments(_INTERPRETER)]
    served = _TABLE.get(torch.cuda.get_device_capability(device), {}).get(pass_name, {})
    found = _stored(device).get(_key(pass_name, head_dim, dtype, length))
    entries = [found, _smallest(served, head_dim, dtype.itemsize), *_fallbacks(head_dim, dtype.itemsize)]
    return [_arguments(entry) for entry in entries if entry is not None]


def hopper_tile(pass_name: str, head_dim: int) -> dict:
    """Arguments of a launch of the kernels in hopper/."""
    return _HOPPER[pass_name, max(32, triton.next_power_of_2(head_dim))]


@contextlib.contextmanager
def forced(pass_name: str, block_m: int, block_n: int, num_warps: int, num_stages: int) -> Iterator[None]:
    """Within the block, launch `pass_name` with this tile whatever the table says: for searches and tests."""
    before = dict(FORCED)
    FORCED[pass_name] = _entry(block_m, block_n, num_warps, num_stages)
    _changed()
    try:
        yield
    finally:
        FORCED.clear()
        FORCED.update(before)
        _changed()


def _changed() -> None:
    for callback in ON_CHANGE:
        callback()


def _arguments(entry: dict) -> dict:
    return {name: entry[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")}


def _smallest(entries: dict[tuple[int, int], dict], head_dim: int, itemsize: int) -> dict | None:
    fitting = [key for key in entries if key[0] >= head_dim and key[1] == itemsize]
    return entries[min(fitting)] if fitting else None


def _fallbacks(head_dim: int, itemsize: int) -> list[dict]:
    """The safe tile of the head dimension, then smaller ones: (16, 16) is the least that a product takes."""
    first = _smallest(_FALLBACK, head_dim, itemsize)
    return [] if first is None else [first, _entry(16, 16, first["num_warps"], 1)]


# --- the search ---------------------------------------------------------------------------------------------


# Launches of one sum, of wide heads (Problem.one_sum), with the score tiles that each holds.
ONE_SUM = {
    "row_pass_vectors": 4,
    "row_pass_q": 4,
    "row_pass_do": 2,
    "column_pass_k": 4,
    "column_pass_v": 2,
    "backward_keys_k": 2,
    "backward_keys_v": 1,
}
SEARCHED = ("forward", "backward_rows", "backward_keys", "row_pass", "column_pass", "tangent", *ONE_SUM)


def candidates(pass_name: str, head_dim: int) -> list[tuple[int, int, int, int]]:
    """(rows, keys, warps, stages) within what registers may hold: fp32 sums and score tiles."""
    by_keys = pass_name.startswith(("column_pass", "backward_keys"))
    sums = {
        "forward": 1,
        "backward_rows": 1,
        "backward_keys": 2,
        "row_pass": 3,
        "column_pass": 2,
        "tangent": 1,
        **dict.fromkeys(ONE_SUM, 1),
        "row_pass_vectors": 0,
    }
    scores = {
        "forward": 2,
        "backward_rows": 3,
        "backward_keys": 3,
        "row_pass": 4,
        "column_pass": 4,
        "tangent": 3,
        **ONE_SUM,
    }
    found = []
    for held, streamed, warps, stages in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)
    ):
        # Warpgroups that share rows exchange operands through shared memory: much slower.
        if 64 <= held < 16 * warps:
            continue
        registers = held * (sums[pass_name] * head_dim + scores[pass_name] * streamed) / (32 * warps)
        if 64 <= registers <= 260:
            tile = (held, streamed) if not by_keys else (streamed, held)
            found.append((*tile, warps, stages))
    return found


def searches(pass_name: str, head_dim: int, dtype: torch.dtype, device: torch.device, length: int) -> bool:
    """Whether a first call of this kind is to search."""
    if INTERPRETED or pass_name not in SEARCHED or pass_name in FORCED:
        return False
    wanted = os.environ.get("FLASHBOB_AUTOTUNE", "0") not in ("", "0")
    return wanted and _key(pass_name, head_dim, dtype, length) not in _stored(device)


def search(
    pass_name: str,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    launch: Callable[[dict], Any],
) -> None:
    """Time `launch` with every tile that compiles and fits, and store the fastest."""
    shipped = [tuple(tile.values()) for tile in tiles(pass_name, head_dim, dtype, device, length)]
    times: dict[tuple, float] = {}
    for tile in dict.fromkeys([*shipped, *candidates(pass_name, head_dim)]):
        arguments = _arguments(_entry(*tile))
        with contextlib.suppress(OutOfResources, CompilationError, PTXASError):
            times[tile] = _median_ms(lambda arguments=arguments: launch(arguments))
    if not times:
        return  # the launch itself will say why
    best = min(times, key=times.__getitem__)
    entries = _stored(device) | {
        _key(pass_name, head_dim, dtype, length): _entry(*best, measured=True) | {"ms": times[best]}
    }
    _store(device, entries)


def _median_ms(call: Callable[[], Any], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _key(pass_name: str, head_dim: int, dtype: torch.dtype, length: int) -> str:
    bucket = min(max(triton.next_power_of_2(length), 512), 16384)
    return f"{pass_name} d={max(16, triton.next_power_of_2(head_dim))} {str(dtype).removeprefix('torch.')} N={bucket}"


def _path(device: torch.device) -> Path:
    folder = os.environ.get("FLASHBOB_CACHE_DIR") or Path.home() / ".cache" / "flashbob"
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return Path(folder) / f"tiles-{name}-triton-{triton.__version__}.json"


@functools.cache
def _stored(device: torch.device) -> dict[str, dict]:
    """What earlier searches found; a file that cannot be read is left out after one warning."""
    path = _path(device)
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())
        for entry in entries.values():
            if not all(isinstance(entry[name], int) and entry[name] > 0 for name in _arguments(entry)):
                raise ValueError(f"not a tile: {entry}")
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is no file of tiles ({error}); the tiles that ship are used, and a search replaces it",
            stacklevel=2,
        )
        return {}


def _store(device: torch.device, entries: dict[str, dict]) -> None:
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
            json.dump(entries, file, indent=1)
        os.replace(file.name, path)
    except (
        OSError
    ) as error:  # a read-only home or a full disk costs the next process a search, and this one nothing
        warnings.warn(f"the tiles found could not be written to {path}: {error}", stacklevel=2)
    _stored(device).update(entries)
