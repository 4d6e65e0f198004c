"""Launches: the tile, the other arguments, and on later calls neither."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from . import tuning
from .common import INTERPRETED, Problem, strides_of

# What a first launch found out: (compiled kernel with its grid, all arguments, places of the tensors among them, descriptors).
_PLANS: dict[tuple, tuple] = {}
tuning.ON_CHANGE.append(_PLANS.clear)


def launch(
    kernel: Any,
    problem: Problem,
    tensors: dict[str, Tensor | None],
    prepare: Callable[[dict], tuple[int, dict[str, Any]]],
    tile: str | dict,
    variant: Any = None,
) -> None:
    """Launch `kernel` on `tensors`, which are named like its arguments.

    `tile` is a name in tuning's table, whose first tile that fits this device is taken, or the tile itself. From the tile
    `prepare` tells the number of programs and the other arguments; where these name one of the tensors too, that is a TMA
    descriptor to pass in its place. For a tensor `x_ptr` of which the kernel takes `x_strides`, these are filled in.

    Triton's own launch inspects every argument: 0.1 ms of host time for kernels like these. All that it would find is in
    the key here, so that a call like an earlier one goes straight to the kernel that was compiled then. What `prepare`
    depends on beyond the problem, the tensors' strides and the tile is in `variant`.

    Raises RuntimeError when no tile fits the device.
    """
    described = [None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in tensors.values()]
    key = (kernel, problem.key, *described, tile if isinstance(tile, str) else tuple(tile.values()), variant)
    plan = _PLANS.get(key)
    with torch.cuda.device_of(next(iter(tensors.values()))):
        if plan is None:
            plan = _first_launch(kernel, problem, tensors, prepare, tile)
            if plan is not None:
                _PLANS[key] = plan
            return
        run, values, places, descriptors = plan
        values = values.copy()
        for i, x, descriptor in zip(places, tensors.values(), descriptors):
            values[i] = x if descriptor is None else _rebased(descriptor, x)
        run(*values)


def _first_launch(
    kernel: Any,
    problem: Problem,
    tensors: dict[str, Tensor | None],
    prepare: Callable[[dict], tuple[int, dict[str, Any]]],
    tile: str | dict,
) -> tuple | None:
    names = kernel.arg_names

    def run(chosen: dict) -> tuple[Any, int, dict]:
        programs, arguments = prepare(chosen)
        for name, x in tensors.items():
            strides = name.removesuffix("_ptr") + "_strides"
            if strides in names:
                arguments.setdefault(strides, strides_of(x))
        arguments = tensors | arguments
        return kernel[(programs,)](**arguments), programs, arguments

    if isinstance(tile, dict):
        compiled, programs, arguments = run(tile)
    else:
        form = (
            tile,
            problem.head_dim,
            problem.dtype,
            problem.device,
            max(problem.num_rows, problem.num_keys),
        )
        if tuning.searches(*form):
            tuning.search(*form, run)
        for chosen in tuning.tiles(*form):
            try:
                compiled, programs, arguments = run(chosen)
                break
            except OutOfResources as error:  # raised before anything is launched
                reason = error
        else:
            raise RuntimeError(
                f"no tile of {tile} for head dimension {problem.head_dim} and {problem.dtype} fits {problem.device}: {reason}"
            )
    if INTERPRETED:
        return None
    values = [arguments[name] for name in names]
    places = [names.index(name) for name in tensors]
    descriptors = [values[i] if values[i] is not x else None for i, x in zip(places, tensors.values())]
    for i in places:
        values[i] = None  # or the plan would keep the tensors alive
    for descriptor in descriptors:
        if descriptor is not None:
            descriptor.base = None
    return compiled[(programs, 1, 1)], values, places, descriptors


def _rebased(descriptor: Any, x: Tensor | None) -> Any:
    """The descriptor of another tensor of the same form, whose checks were made for the first."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__)
    new.base = x
    return new
