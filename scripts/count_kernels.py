"""What a compiled Hessian-vector product of GPT-2 would launch on an H200, counted without one.

    python -m scripts.count_kernels [--model gpt2-small] [--shape 4x2048] [--layers 2 4] [--option combo_kernels=True]

The pass of `HessianVectorProduct` (bf16 autocast, chunked cross-entropy) is traced with fake tensors and given to Inductor as if
the machine had an H200: its graph passes, its scheduler and its Triton code run, no kernel is compiled. Two depths are
counted; their difference is what a layer costs, and the rest what the embedding, the head and the loss cost.

Printed are Inductor's own kernels, by what they do: how many, the MiB that they must read and write (each buffer once; rows
gathered from a table count as what is gathered), and the time of these bytes at --tb-per-s. Matrix products, attention and
the cross-entropy are calls that launch their own kernels. Bytes are a lower bound: a kernel can be slower, never faster.

It uses Inductor's internals, and was run with torch 2.11 and 2.13. Without CUDA it needs g++: PyTorch must believe in the device.
"""

import argparse
import contextlib
import functools
import json
import subprocess
import tempfile
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from optim import HessianVectorProduct
from optim.closed_forms import register_lowerings
from scripts.bench_hvp import LOSS_CHUNK
from train.model import GPT, GPTConfig, attention_function

CUDA = torch.device("cuda", 0)
H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, L2_cache_size=60 * 2**20, total_memory=150 * 10**9, gcnArchName="",
    is_integrated=False,
)  # fmt: skip


def trace(layers: int, model: Any, batch: int, length: int) -> tuple[GraphModule, HessianVectorProduct, list]:
    """The traced pass, the object that traced it, and what its inputs are like."""
    with FakeTensorMode():
        config = GPTConfig(length, 50257, layers, model.num_heads, model.embed_dim, loss_chunk=LOSS_CHUNK)
        gpt = GPT(config, attention_function("auto"))
        tokens, targets = (torch.empty(batch, length, dtype=torch.int64) for _ in range(2))
        hvp = HessianVectorProduct(gpt, lambda m, x, y: m(x, y)[1])
        inputs = hvp._inputs([torch.empty_like(p) for p in hvp.params], (tokens, targets))
        with torch.autocast("cpu", torch.bfloat16):
            graph = hvp._trace(inputs)
    return graph, hvp, inputs


def lower(graph: GraphModule, inputs: list, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Inductor's kernels for `graph` on an H200: for each its kind, bytes, and the operations that it came from."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    for node in graph.graph.nodes:  # traced for a CPU
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda x: CUDA if isinstance(x, torch.device) else x
        )
        node.meta.clear()
    graph.recompile()
    rows: list[dict[str, Any]] = []

    def stop(self):
        self.codegen()
        rows.extend(_describe(node) for node in self.scheduler.nodes)
        raise InterruptedError

    register_lowerings()
    _believe_in_cuda()
    fake = FakeTensorMode()
    with fake:
        inputs = [torch.empty(x.shape, dtype=x.dtype, device=CUDA) for x in inputs]
    with (
        _an_h200(),
        torch._inductor.config.patch({**options, "force_disable_caches": True, "compile_threads": 1}),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        torch.no_grad(),
        fake,
    ):
        try:
            compile_fx(graph, inputs)
        except Exception:
            if not rows:
                raise
    return [row for row in rows if row["kind"]]


def _describe(node) -> dict[str, Any]:
    from torch._inductor.ir import ExternKernel, MultiOutput
    from torch._inductor.scheduler import NopKernelSchedulerNode

    parts = node.get_nodes()
    extern = next((x.node for x in parts if isinstance(x.node, ExternKernel)), None)
    if isinstance(node, NopKernelSchedulerNode) or isinstance(extern, MultiOutput):
        return {"kind": None}
    if extern is not None:
        name = str(getattr(extern, "op_overload", None) or extern.python_kernel_name)
        return {"kind": _group_of_extern(name), "bytes": 0}
    total = 0
    for name, whole in node.get_read_write_buffer_accesses(True, True).items():
        accessed = sum(x.get_read_write_buffer_accesses(True, True).get(name, 0) for x in parts)
        total += min(whole, accessed) if accessed else whole
    operations = Counter(str(o.target) for x in parts if x.node for o in x.node.get_origins())
    reduction = any(x.is_reduction() for x in parts)
    return {"kind": _group(operations, reduction, total), "bytes": total}


def _group_of_extern(name: str) -> str | None:
    names = {
        "mm": "matrix products",
        "add_product_": "matrix products",
        "flashbob.": "attention",
        "flashbob_train.": "cross-entropy",
        "touch": None,
    }
    return next((group for part, group in names.items() if part in name), name)


def _group(operations: Counter, reduction: bool, size: int) -> str:
    """By the operations that a kernel holds; the first group that fits."""

    def has(*names: str) -> bool:
        return any(name in target for target in operations for name in names)

    if size < 2**20:
        return "small: biases, second stages of sums"
    if has("index_put"):
        return "embedding gradient"
    if has("sigmoid", "tanh", "cosh") and not reduction:
        return "GELU"
    if has("cat"):
        return "q, k, v gradients" if not reduction else "bias gradients"
    if has("rsqrt", "var_mean"):
        return "LayerNorm and residuals"
    if reduction:
        return "bias gradients"
    return "casts and sums"


@contextlib.contextmanager
def _an_h200():
    """Inductor sees an H200, and nothing is sent to it."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph

    deduce = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce_on_the_cpu(self, node):
        kwargs = node.kwargs
        node.kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = kwargs

    nothing = lambda *_, **__: None  # noqa: E731
    state = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "is_initialized": lambda: False,
        "get_device_properties": lambda *_: H200, "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H200.name,
        "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": nothing, "_lazy_init": nothing,
        "synchronize": nothing,
        "set_device": nothing, "is_bf16_supported": lambda *_, **__: True,
        "_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0,
    }  # fmt: skip
    interface = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_compute_capability": lambda *_: 90,
        "get_device_properties": lambda *_: H200, "set_device": nothing, "synchronize": nothing,
        "exchange_device": lambda *_: 0, "maybe_exchange_device": lambda *_: 0,
        "is_triton_capable": lambda *_: True, "raise_if_triton_unavailable": nothing,
    }  # fmt: skip
    passes = "torch._inductor.fx_passes."
    replaced = {  # patterns are traced with tensors of the device
        passes + "fuse_attention._sfdp_init": nothing,
        passes + "pad_mm._pad_mm_init": nothing,
        passes + "misc_patterns._misc_patterns_init": nothing,
        "torch.utils._triton.triton_hash_with_backend": lambda *_: "none",
        "torch.utils._triton.has_triton": lambda *_, **__: True,
    }
    with contextlib.ExitStack() as stack:
        for name, value in state.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in interface.items():
            if hasattr(CudaInterface, name):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        worker = CudaInterface.Worker
        stack.enter_context(mock.patch.object(worker, "get_device_properties", staticmethod(lambda *_: H200)))
        stack.enter_context(mock.patch.object(worker, "current_device", staticmethod(lambda: 0)))
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        folder = joint_graph.UniformValueConstantFolder
        stack.enter_context(mock.patch.object(folder, "_deduce_value", deduce_on_the_cpu))
        yield


@functools.cache
def _believe_in_cuda() -> None:
    """PyTorch's CPU build has no guard for CUDA devices, not even for tensors without data: give it one that does nothing."""
    if torch.version.cuda is not None:
        return
    code = "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
    code += "C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)\n"
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(
            ["g++", "-x", "c++", "-", *flags, "-o", str(library)], input=code, text=True, check=True
        )
        torch.ops.load_library(str(library))


def count(rows: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    groups: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for row in rows:
        groups[row["kind"]][0] += 1
        groups[row["kind"]][1] += row["bytes"] / 2**20
    return {name: (kernels, mib) for name, (kernels, mib) in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--shape", default="4x2048", help="sequences x tokens")
    parser.add_argument("--layers", nargs=2, type=int, default=(2, 4), help="the two depths that are counted")
    parser.add_argument("--tb-per-s", type=float, default=4.0)
    parser.add_argument("--option", nargs="*", default=[], help="Inductor's, as name=JSON")
    arguments = parser.parse_args()
    model = OmegaConf.load(
        Path(__file__).resolve().parent.parent / "configs" / "model" / f"{arguments.model}.yaml"
    )
    options = {k: json.loads(v.lower()) for k, v in (x.split("=") for x in arguments.option)}
    low, high = arguments.layers
    counts = []
    for layers in (low, high):
        graph, hvp, inputs = trace(layers, model, *map(int, arguments.shape.split("x")))
        counts.append(count(lower(graph, inputs, {**hvp.options, **options})))
    few, many = counts
    total = Counter()
    table = Table(
        "",
        "kernels a layer",
        "MiB a layer",
        "kernels, rest",
        "MiB, rest",
        f"whole model, ms at {arguments.tb_per_s} TB/s",
    )
    for name in sorted(many, key=lambda name: -many[name][1]):
        here = [(many[name][i] - few.get(name, (0, 0.0))[i]) / (high - low) for i in (0, 1)]
        rest = [many[name][i] - high * here[i] for i in (0, 1)]
        ms = (model.num_layers * here[1] + rest[1]) * 2**20 / arguments.tb_per_s / 1e9
        values = *here, *rest, ms
        if many[name][1]:
            total.update(dict(enumerate(values)))
        table.add_row(
            name, *(f"{x:.1f}" for x in values[:1]), *(f"{x:.0f}" for x in values[1:4]), f"{ms:.2f}"
        )
    table.add_row(
        "all of Inductor's", f"{total[0]:.1f}", *(f"{total[i]:.0f}" for i in (1, 2, 3)), f"{total[4]:.2f}"
    )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
