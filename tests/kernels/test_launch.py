"""Launches that go straight to a compiled kernel: the same arguments in the same places as triton's own launch."""

import contextlib
import dataclasses
import threading
import types

import pytest
import torch
import triton
from triton.runtime.build import compile_module_from_src

from flashbob.kernels import common
from flashbob.kernels import launch as launching
from flashbob.kernels.common import Problem
from flashbob.kernels.launch import compiling_ahead, launch


class Kernel:
    """What `launch` needs of a JITFunction; records what a launch got."""

    arg_names = ("q_ptr", "q_strides", "mask", "scale", "k_desc", "BLOCK")

    def __init__(self):
        self.compilations, self.launches = [], []

    def __getitem__(self, grid):
        def first(**arguments):
            self.compilations.append((grid, arguments))
            return {(*grid, 1, 1): lambda *values: self.launches.append(values)}

        return first

    def warmup(self, **arguments):
        raise NotImplementedError


@dataclasses.dataclass
class Descriptor:
    base: torch.Tensor | None
    block: int


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(common, "check_device", lambda device: None)
    launching._PLANS.clear()
    kernel = Kernel()

    def run(q, k, mask=None, scale=0.5, block=16):
        problem = Problem.of(q, k, scale=scale)
        tensors = {"q_ptr": q, "k_desc": k, "mask": mask}
        arguments = {"scale": scale, "BLOCK": block, "k_desc": Descriptor(k, block), "num_warps": 4}
        launch(kernel, problem, tensors, lambda tile: (7, arguments), {"BLOCK": block})

    yield kernel, run
    launching._PLANS.clear()


def tensors(n=8, d=16):
    return torch.randn(1, 1, n, d), torch.randn(1, 1, n, d)


def test_a_second_call_passes_its_own_tensors_in_the_same_places(call):
    kernel, run = call
    q, k = tensors()
    run(q, k)
    (grid, arguments), *_ = kernel.compilations
    assert (
        grid == (7,)
        and arguments["q_ptr"] is q
        and arguments["q_strides"] == q.stride()
        and arguments["num_warps"] == 4
    )
    q2, k2 = tensors()
    run(q2, k2)
    assert len(kernel.compilations) == 1
    ((q_, strides, mask, scale, descriptor, block),) = kernel.launches
    assert q_ is q2 and strides == q2.stride() and mask is None and (scale, block) == (0.5, 16)
    assert descriptor.base is k2 and descriptor.block == 16
    run(q, k)
    assert descriptor.base is k2, "an earlier launch's descriptor changed"


def test_whatever_triton_would_specialize_on_is_inspected_again(call):
    kernel, run = call
    q, k = tensors()
    run(q, k)
    unaligned = torch.randn(q.numel() + 1)[1:].view(q.shape)
    others = [
        {"q": q.mT.contiguous().mT},  # strides
        {"q": unaligned},
        {"mask": torch.ones(3)},
        {"scale": 0.25},
        {"block": 32},
        {"q": q.half(), "k": k.half()},
    ]
    for count, changed in enumerate(others, start=2):
        run(**({"q": q, "k": k} | changed))
        assert len(kernel.compilations) == count, changed
    assert not kernel.launches


def test_strides_that_the_caller_gives_are_left_alone(call, monkeypatch):
    kernel, _ = call
    q, k = tensors()
    problem = Problem.of(q, k, scale=1.0)
    arguments = {"scale": 1.0, "BLOCK": 16, "q_strides": (1, 2, 3, 4)}
    launch(
        kernel, problem, {"q_ptr": q, "k_desc": k, "mask": None}, lambda tile: (1, arguments), {"BLOCK": 16}
    )
    assert kernel.compilations[0][1]["q_strides"] == (1, 2, 3, 4)


def test_a_plan_keeps_no_tensor_alive(call):
    import gc
    import weakref

    _, run = call
    q, k = tensors()
    run(q, k)
    dead = [weakref.ref(q), weakref.ref(k)]
    kernel, _ = call
    kernel.compilations.clear()
    del q, k
    gc.collect()
    assert [r() for r in dead] == [None, None]


@pytest.fixture
def device_is_cpu(monkeypatch):
    """Triton's driver, which a CPU has none of."""
    driver = types.SimpleNamespace(launcher_cls=None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=driver))
    launching._load_launchers_one_at_a_time.cache_clear()
    yield driver
    launching._load_launchers_one_at_a_time.cache_clear()


def test_a_launch_waits_for_its_compilation_ahead(call, device_is_cpu):
    """Which gets the launch's own arguments, but for tensors that stand in."""
    kernel, run = call
    go, warmed, loaded = threading.Event(), [], []

    class Compiled:
        @property
        def run(self):  # of Triton's: loads the kernel, and compiles its launcher
            loaded.append(threading.get_ident())

    def warmup(**arguments):
        assert go.wait(10)
        warmed.append((threading.get_ident(), arguments))
        return Compiled()

    kernel.warmup = warmup
    q, k = tensors()
    with compiling_ahead():
        run(q, k)
        run(q, k)  # one at a time
    assert not kernel.compilations and not kernel.launches
    launched = threading.Thread(target=run, args=(q, k))
    launched.start()
    launched.join(0.2)
    assert launched.is_alive() and not kernel.compilations
    go.set()
    launched.join(10)
    ((_, arguments),) = kernel.compilations
    ((thread, ahead),) = warmed
    assert loaded == [thread] and thread != threading.get_ident()
    assert ahead.pop("grid") == (1,) and ahead.keys() == arguments.keys()
    for name in ("q_strides", "mask", "scale", "BLOCK", "num_warps"):
        assert ahead[name] == arguments[name], name
    assert ahead["q_ptr"].dtype == q.dtype and ahead["q_ptr"].numel() == 0
    assert ahead["k_desc"].block == 16 and ahead["k_desc"].base.numel() == 0
    assert arguments["k_desc"].base is None, "the launch's own descriptor, emptied for its plan"


# As the launchers of triton 3.6 are: one name for all of them, and state of the process (-1).
LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* arguments) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def test_threads_get_their_own_kernels_launchers(call, device_is_cpu):
    in_between, go_on = threading.Event(), threading.Event()

    def load(number, pause=False):
        module = compile_module_from_src(src=LAUNCHER % number, name="__triton_launcher")
        if pause:
            in_between.set()
            go_on.wait(0.5)
        return module.launch

    def both():
        """Launchers 1 and 2, loaded before, by two threads, of which the first pauses before it takes what it has loaded."""
        in_between.clear()
        got = {}
        first = threading.Thread(target=lambda: got.update({1: device_is_cpu.launcher_cls(1, pause=True)()}))
        first.start()
        assert in_between.wait(10)
        got[2] = device_is_cpu.launcher_cls(2)()
        first.join()
        return got

    assert [load(number)() for number in (1, 2)] == [1, 2]
    device_is_cpu.launcher_cls = load
    assert both() == {1: 2, 2: 2}, "Python mixes them up no more: then this needs no lock"
    _, run = call
    with compiling_ahead():
        run(*tensors())
    assert device_is_cpu.launcher_cls is not load
    assert both() == {1: 1, 2: 2}


def test_an_error_in_a_compilation_ahead_is_left_to_the_launch(call, device_is_cpu):
    kernel, run = call
    with compiling_ahead():
        run(*tensors())  # warmup raises NotImplementedError
    run(*tensors())
    assert len(kernel.compilations) == 1
    run(*tensors())
    assert len(kernel.launches) == 1
