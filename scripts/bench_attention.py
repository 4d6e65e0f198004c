"""Attention's three passes and the whole second-order call: time, memory, and the share of the matrix rate.

    python -m scripts.bench_attention [--quick] [--head-dims 64 128] [--lengths 512 … 16384] [--seconds 500]

One command, one machine, one run. `floor_ms` is 18 products of 2·(valid pairs)·d FLOPs at the bf16 rate of an 8192³ product
measured right before and after the row's passes (clocks follow temperature and power), and `fraction` is floor_ms / bob_ms.
`peak_mib` is what the row's own tensors take. Writes --out after every row, draws a picture beside it, and stops cleanly at
--seconds.
"""

import argparse
import functools
import gc
import importlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console

import flashbob
from scripts.tune_attention import median_ms

HEADS, BATCH = 12, 4
VARIANTS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "MQA 8/1": {"causal": True, "H": 8, "H_kv": 1, "B": 1},
    "GQA 12/4": {"causal": True, "H_kv": 4},
    "window 1024": {"causal": True, "window": 1024},
    "padding": {"causal": True, "padding": True},
    "dropout 0.1": {"causal": True, "dropout_p": 0.1},
}
BASELINES = ("math", "hybrid", "hvp_materialized")  # N×N tensors: 35 GB at N=4096
OTHERS = ("fused", "paper", "three_pass", "single_pass_atomic")


def graph_ms(call: Callable[[], Any], calls: int = 10) -> float:
    """Milliseconds of a call replayed in a CUDA graph: without the host's time to launch it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return median_ms(graph.replay) / calls


@functools.cache
def square_matrices() -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return a, b


def matrix_rate() -> float:
    """FLOP/s of a product of square bf16 matrices, now."""
    a, b = square_matrices()
    return 2 * 8192**3 / (median_ms(lambda: a @ b) / 1e3)


def valid_pairs(n: int, causal: bool, window: int | None) -> int:
    if not causal:
        return n * n
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w


def measure(backend: str, n: int, d: int, shape: dict) -> dict:
    causal, window = shape["causal"], shape.get("window")
    batch, heads = shape.get("B", BATCH), shape.get("H", HEADS)
    kv_heads = shape.get("H_kv", heads)
    matrix_rate()  # what it allocates is there from the first row on
    gc.collect()  # of the row before, autograd's graphs may be left
    others = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    new = lambda h: torch.randn(batch, h, n, d, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, do, u_q = (new(heads) for _ in range(3))
    k, v, u_k, u_v = (new(kv_heads) for _ in range(4))
    row: dict[str, Any] = {
        "d": d, "N": n, "B": batch, "H": heads, "H_kv": kv_heads, "causal": causal, "window": window,
        "padding": "padding" in shape, "dropout_p": shape.get("dropout_p", 0.0), "backend": backend,
        "fwd_ms": None, "bwd_ms": None, "bob_ms": None, "fraction": None,
    }  # fmt: skip
    flops = 18 * 2 * valid_pairs(n, causal, window) * d * batch * heads
    options: dict[str, Any] = {
        "is_causal": causal, "window_size": window, "dropout_p": shape.get("dropout_p", 0.0), "scale": d**-0.5,
        "key_padding_mask": None, "dropout_seed": None,
    }  # fmt: skip
    if "padding" in shape:  # the last eighth of every sequence; the floor counts its pairs all the same
        options["key_padding_mask"] = (torch.arange(n, device="cuda") < n - n // 8).expand(batch, n)
    if options["dropout_p"]:
        options["dropout_seed"] = torch.tensor([1, 2], device="cuda")
    flashbob.set_backend(backend)

    def whole() -> None:
        x = [t.detach().requires_grad_() for t in (q, k, v)]
        g = do.detach().requires_grad_()
        out = flashbob.sdpa_bob(*x, **options)
        first = torch.autograd.grad(out, x, g, create_graph=True)
        torch.autograd.grad(first, (*x, g), (u_q, u_k, u_v))

    start = time.perf_counter()
    whole()
    torch.cuda.synchronize()
    row["first_call_s"] = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    whole()
    torch.cuda.synchronize()
    row["peak_mib"] = (torch.cuda.max_memory_allocated() - others) / 2**20
    row["total_ms"] = median_ms(whole)
    rate = matrix_rate()
    if backend not in ("math", "auto"):  # `math` is one autograd graph; "auto" a choice for each pass
        module = importlib.import_module(f"flashbob.backends.{backend}")
        o, lse = module.forward(q, k, v, **options)
        dq = module.backward(do, q, k, v, o, lse, **options)[0]
        passes = {
            "fwd_ms": lambda: module.forward(q, k, v, **options),
            "bwd_ms": lambda: module.backward(do, q, k, v, o, lse, **options),
            "bob_ms": lambda: module.backward_backward(u_q, u_k, u_v, do, q, k, v, o, lse, dq, **options),
        }
        # Below a millisecond the host may need longer than the GPU.
        timer = graph_ms if flops / rate < 1e-3 and backend not in BASELINES else median_ms
        row["timing"] = "graph replay" if timer is graph_ms else "events"
        row |= {name: timer(call) for name, call in passes.items()}
        rate = (rate + matrix_rate()) / 2
    row["rate_tflops"] = rate / 1e12
    row["floor_ms"] = flops / rate * 1e3
    if row["bob_ms"] is not None:
        row["fraction"] = row["floor_ms"] / row["bob_ms"]
    return row


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = {d: {r["N"] for r in rows if r["d"] == d} for d in {r["d"] for r in rows}}
    dims = sorted(d for d in lengths if len(lengths[d]) > 2)
    figure, axes = plt.subplots(
        2, len(dims), figsize=(5.5 * len(dims), 7), layout="constrained", squeeze=False
    )
    for column, d in enumerate(dims):
        chosen = [r for r in rows if r["d"] == d and r["variant"] == "causal"]
        for backend in dict.fromkeys(r["backend"] for r in chosen):
            mine = [r for r in chosen if r["backend"] == backend]
            for axis, key in zip(axes[:, column], ("total_ms", "peak_mib"), strict=True):
                axis.loglog(
                    [r["N"] for r in mine], [r[key] for r in mine], marker="o", markersize=4, label=backend
                )
        mine = [r for r in chosen if r["bob_ms"] and r["backend"] == "triton"]
        axes[0, column].loglog(
            [r["N"] for r in mine], [r["bob_ms"] for r in mine], "k--", label="triton, second backward"
        )
        axes[0, column].loglog([r["N"] for r in mine], [r["floor_ms"] for r in mine], "k:", label="its floor")
        axes[0, column].set(title=f"d = {d}, causal, B={BATCH}, H={HEADS}", ylabel="ms")
        axes[1, column].set(xlabel="N", ylabel="peak memory (MiB)")
        for axis in axes[:, column]:
            axis.grid(alpha=0.25, which="both")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="causal d=64 and 128 at 1024 and 4096 only")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 32, 80, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--backends", nargs="+", default=["triton", *OTHERS, *BASELINES])
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--commit", help="recorded in each row (default: git's)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/attention.json"))
    parser.add_argument("--plot-only", action="store_true", help="draw the picture from --out again")
    arguments = parser.parse_args()
    if arguments.plot_only:
        plot(json.loads(arguments.out.read_text()), arguments.out.with_suffix(".png"))
        return
    start = time.monotonic()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit or subprocess.getoutput("git rev-parse --short HEAD"),
    }
    console = Console(width=160)
    console.print(machine)
    head_dims, lengths = (
        ([64, 128], [1024, 4096]) if arguments.quick else (arguments.head_dims, arguments.lengths)
    )
    jobs = [("causal", d, n) for d, n in itertools.product(head_dims[:2], lengths)]
    if not arguments.quick:
        jobs += [(v, d, n) for v, d, n in itertools.product(list(VARIANTS)[1:], head_dims[:2], (4096, 8192))]
        jobs += [("causal", d, n) for d, n in itertools.product(head_dims[2:], (4096, 8192))]
    rows = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for backend, (variant, d, n) in itertools.product(arguments.backends, jobs):
        if backend != "triton" and (variant != "causal" or d not in (64, 128)):
            continue
        if (backend in BASELINES and n > 4096) or (backend in OTHERS and n > 8192):
            continue
        if time.monotonic() - start > arguments.seconds:
            console.print("stopped: --seconds are over")
            break
        row = {**machine, "variant": variant, **measure(backend, n, d, VARIANTS[variant])}
        torch.cuda.empty_cache()
        rows.append(row)
        partial = arguments.out.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(arguments.out)
        shown = {key: row[key] for key in ("fwd_ms", "bwd_ms", "bob_ms", "total_ms", "floor_ms")}
        times = "  ".join(f"{key[:-3]} {value:.3f}" for key, value in shown.items() if value is not None)
        share = "" if row["fraction"] is None else f"  {row['fraction']:.1%} of the floor"
        console.print(
            f"{variant:12} d={d:<3} N={n:<6} {backend:7} {times} ms{share}  {row['peak_mib']:,.0f} MiB"
        )
    plot(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
