"""Launches: the tile, the other arguments, and on later calls neither."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from . import tuning
from .common import INTERPRETED, Problem, strides_of

# What a first launch found out: (compiled kernel with its grid, all arguments, places of the tensors among them, descriptors).
_PLANS: dict[tuple, tuple] = {}
tuning.ON_CHANGE.append(_PLANS.clear)

# Threads that compile ahead: Triton holds the interpreter's lock for a tenth of the time only. None of them where the call
# itself needs the cores. Python waits for them at its exit.
NUM_COMPILERS = min(4, len(os.sched_getaffinity(0)) - 1)
_COMPILERS = ThreadPoolExecutor(max(1, NUM_COMPILERS), thread_name_prefix="flashbob-compiler")
_COMPILING: dict[tuple, Future] = {}  # the last one of each kernel and name of a tile
_THREAD = threading.local()


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within the block, this thread's launches only start to compile, and return."""
    _THREAD.compiles_ahead = True
    try:
        yield
    finally:
        _THREAD.compiles_ahead = False


def compiles_ahead() -> bool:
    """Whether this thread is within such a block."""
    return getattr(_THREAD, "compiles_ahead", False)


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
    if compiles_ahead():
        _compile_ahead(kernel, problem, tensors, prepare, tile)
        return
    described = [None if x is None else (x.stride(), x.data_ptr() % 16 == 0) for x in tensors.values()]
    key = (kernel, problem.key, *described, tile if isinstance(tile, str) else tuple(tile.values()), variant)
    plan = _PLANS.get(key)
    _make_context_current(problem.device)
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


def _make_context_current(device: torch.device) -> None:
    """TMA descriptors are encoded by the driver, in the context that a thread's first call of the CUDA runtime makes current;
    autograd's threads may come here before any."""
    if device.type == "cuda" and not getattr(_THREAD, "has_context", False):
        torch.cuda.mem_get_info()
        _THREAD.has_context = True


def _first_launch(
    kernel: Any,
    problem: Problem,
    tensors: dict[str, Tensor | None],
    prepare: Callable[[dict], tuple[int, dict[str, Any]]],
    tile: str | dict,
) -> tuple | None:
    names = kernel.arg_names
    compiling = _COMPILING.pop(_compilation(kernel, tile), None)
    if compiling is not None:
        wait([compiling])  # if it failed, so will this launch, and say why

    def run(chosen: dict) -> tuple[Any, int, dict]:
        programs, arguments = _arguments(kernel, tensors, prepare, chosen)
        return kernel[(programs,)](**arguments), programs, arguments

    if isinstance(tile, dict):
        compiled, programs, arguments = run(tile)
    else:
        form = _form(problem, tile)
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


def _compile_ahead(
    kernel: Any,
    problem: Problem,
    tensors: dict[str, Tensor | None],
    prepare: Callable[[dict], tuple[int, dict[str, Any]]],
    tile: str | dict,
) -> None:
    """Have a thread compile what a first launch of the same form will ask for; nothing keeps the tensors alive."""
    key = _compilation(kernel, tile)
    if isinstance(tile, str):
        form = _form(problem, tile)
        if tuning.searches(*form):
            return
        tile = tuning.tiles(*form)[0]
    running = _COMPILING.get(key)
    if running is not None and not running.done():
        return  # one thread at a time
    _load_launchers_one_at_a_time()
    _, arguments = _arguments(kernel, tensors, prepare, tile)
    for name, x in tensors.items():
        if x is None:
            continue
        # All that a kernel depends on in a tensor: its type, and that its address is a multiple of 16.
        stand_in = torch.empty(0, dtype=x.dtype, device="meta")
        arguments[name] = stand_in if arguments[name] is x else _rebased(arguments[name], stand_in)

    device = problem.device

    def work() -> None:
        with torch.cuda.device(device):
            kernel.warmup(**arguments, grid=(1,)).run  # noqa: B018  loads it, and has a C compiler make its launcher

    _COMPILING[key] = _COMPILERS.submit(work)


def _compilation(kernel: Any, tile: str | dict) -> tuple:
    """Launches of one kernel by several names are compilations of their own."""
    return kernel, tile if isinstance(tile, str) else None


@functools.cache
def _load_launchers_one_at_a_time() -> None:
    """Have the threads of this process load launchers one after the other, those of other libraries' kernels too.

    In triton 3.6, not in 3.9, each kernel's launcher is an extension module of one and the same name. When Python loads such a
    file for the second time, for two kernels with like arguments, it writes over the module of that name that was loaded last; a
    thread that was about to take its own launcher from there gets another kernel's ("function takes exactly 54 arguments (66
    given)").
    """
    driver: Any = triton.runtime.driver.active
    load, lock = driver.launcher_cls, threading.Lock()

    @functools.wraps(load, updated=())
    def load_alone(*arguments: Any, **options: Any) -> Any:
        with lock:
            return load(*arguments, **options)

    driver.launcher_cls = load_alone


def _arguments(
    kernel: Any,
    tensors: dict[str, Tensor | None],
    prepare: Callable[[dict], tuple[int, dict[str, Any]]],
    tile: dict,
) -> tuple[int, dict[str, Any]]:
    """(number of programs, all arguments of the launch by name)."""
    programs, arguments = prepare(tile)
    for name, x in tensors.items():
        strides = name.removesuffix("_ptr") + "_strides"
        if strides in kernel.arg_names:
            arguments.setdefault(strides, strides_of(x))
    return programs, tensors | arguments


def _form(problem: Problem, tile: str) -> tuple[str, int, torch.dtype, torch.device, int]:
    """What tuning's table and its searches ask of a problem."""
    return tile, problem.head_dim, problem.dtype, problem.device, max(problem.num_rows, problem.num_keys)


def _rebased(descriptor: Any, x: Tensor | None) -> Any:
    """The descriptor of another tensor of the same form, whose checks were made for the first."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__)
    new.base = x
    return new
