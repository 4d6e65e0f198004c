"""What a Hessian-vector product costs beside a gradient: GPT-2 on random tokens, fp32 weights, bf16 autocast.

    python -m scripts.bench_hvp [--model gpt2-small] [--shapes 4x2048 1x16384] [--modes …] [--out docs/results/hvp.json]

One command, one GPU, one run. Modes: the gradient (eager or compiled, with PyTorch's attention or FlashBoB's), and
(loss, gradient, H z) in one pass (math attention eager, FlashBoB eager, FlashBoB compiled; reverse over reverse, or forward over
reverse). `ratio_to_gradient` is the time over that of the compiled SDPA gradient at the same shape. Writes --out after every row,
and a picture beside it at the end.

Without a GPU, or with --device cpu, the passes are timed on the CPU. Peak memory is then the process's largest resident set,
compilation included, so that each mode needs a process of its own:

    python -m scripts.bench_hvp --device cpu --model gpt2-tiny --shapes 2x128 --modes hvp-forward-over-reverse-eager
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from omegaconf import OmegaConf
from rich.console import Console

from optim import HessianVectorProduct
from scripts.tune_attention import median_ms
from train.gradient_graph import GradientGraph
from train.metrics import process_peak_bytes
from train.model import GPT, GPTConfig, attention_function


class Mode(NamedTuple):
    attention: str
    second_order: bool
    compiled: bool = False
    chunk: int | None = None  # tokens of logits at a time, in the loss; None: PyTorch's loss of all logits
    cuda_graph: bool = False
    method: Literal["reverse", "forward"] = "reverse"
    recomputed: bool = False  # blocks: activation checkpointing, and compiled, if they are, one by one


LOSS_CHUNK = 4096
ALL = 2**30  # in one chunk, which keeps the loss's gradient with respect to its logits
MODES = {
    "gradient-sdpa-compiled": Mode("sdpa", False, compiled=True),
    "gradient-sdpa-graph": Mode("sdpa", False, compiled=True, cuda_graph=True),
    "gradient-sdpa-eager": Mode("sdpa", False),
    "gradient-flashbob-compiled": Mode("auto", False, compiled=True),
    "gradient-flashbob-graph": Mode("auto", False, compiled=True, cuda_graph=True),
    "gradient-flashbob-chunked-compiled": Mode("auto", False, compiled=True, chunk=LOSS_CHUNK),
    "gradient-flashbob-chunked-graph": Mode("auto", False, compiled=True, chunk=LOSS_CHUNK, cuda_graph=True),
    "hvp-flashbob-eager": Mode("auto", True),
    "hvp-flashbob-compiled": Mode("auto", True, compiled=True),
    "hvp-flashbob-chunked-compiled": Mode("auto", True, compiled=True, chunk=LOSS_CHUNK),
    "hvp-flashbob-graph": Mode("auto", True, compiled=True, cuda_graph=True),
    "hvp-flashbob-chunked-graph": Mode("auto", True, compiled=True, chunk=LOSS_CHUNK, cuda_graph=True),
    "hvp-flashbob-kept-graph": Mode("auto", True, compiled=True, chunk=ALL, cuda_graph=True),
    "hvp-forward-over-reverse-eager": Mode("auto", True, method="forward"),
    "hvp-forward-over-reverse-compiled": Mode("auto", True, compiled=True, method="forward"),
    "hvp-forward-over-reverse-chunked-compiled": Mode(
        "auto", True, compiled=True, chunk=LOSS_CHUNK, method="forward"
    ),
    "hvp-forward-over-reverse-chunked-graph": Mode(
        "auto", True, compiled=True, chunk=LOSS_CHUNK, cuda_graph=True, method="forward"
    ),
    "hvp-recomputed-eager": Mode("auto", True, chunk=LOSS_CHUNK, recomputed=True),
    "hvp-recomputed-compiled": Mode("auto", True, compiled=True, chunk=LOSS_CHUNK, recomputed=True),
    "hvp-recomputed-graph": Mode(
        "auto", True, compiled=True, chunk=LOSS_CHUNK, cuda_graph=True, recomputed=True
    ),
    "hvp-hybrid-eager": Mode("hybrid", True),
    "hvp-math-eager": Mode("math", True),
}
GROUPS = {  # of kernels, by what their names hold; the first that fits
    "attention": (
        "_row_pass",
        "_column_pass",
        "_backward_rows",
        "_backward_keys",
        "_forward",
        "_tangent",
        "cudnn",
    ),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "chunked cross-entropy": ("_normalize_kernel", "_differentiate"),
    "elementwise and reductions": ("triton_", "elementwise", "reduce", "Memset", "Memcpy", "copy"),
}


def prepare(mode: str, model_name: str, batch: int, length: int, device: str) -> Callable[[], Any]:
    """A function that runs one pass; compiled already."""
    attention, second, compiled, chunk, cuda_graph, method, recomputed = MODES[mode]
    c = OmegaConf.load(Path(__file__).resolve().parent.parent / "configs" / "model" / f"{model_name}.yaml")
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(
            GPTConfig(
                length,
                50257,
                c.num_layers,
                c.num_heads,
                c.embed_dim,
                loss_chunk=chunk,
                recompute_blocks=recomputed,
            ),
            attention_function(attention),
        )
        tokens, targets = torch.randint(50257, (2, batch, length))
    autocast = torch.autocast(device, torch.bfloat16)
    if second:
        hvp = HessianVectorProduct(
            model,
            lambda m, x, y: m(x, y)[1],
            compile=compiled,
            cuda_graph=cuda_graph,
            method=method,
        )
        with autocast:
            hvp(
                [torch.zeros_like(p) for p in hvp.params], tokens, targets
            )  # makes the graph, if there is one
            z = [x.normal_() for x in hvp.empty_vectors(tokens, targets)]  # where it reads them

        def run() -> None:
            attention_function(attention)
            with autocast:
                hvp(z, tokens, targets)
    else:
        forward = torch.compile(model) if compiled else model

        def add_gradient(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            attention_function(attention)
            with autocast:
                loss = forward(tokens, targets)[1]
            loss.backward()
            return loss.detach()

        graph = GradientGraph(add_gradient, list(model.parameters()))

        def run() -> None:
            if cuda_graph:
                graph(tokens, targets)
            else:
                add_gradient(tokens, targets)
                model.zero_grad()

    run()
    run()  # a graph of the gradient is made now
    if device == "cuda":
        torch.cuda.synchronize()
    return run


def reset_peak(device: str) -> int:
    """Bytes that are allocated on the GPU now, from where a peak is counted."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure_gpu(run: Callable[[], Any], others: float) -> dict[str, Any]:
    """`others` are the bytes that other modes hold."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return {
        "ms": median_ms(run, 5),
        "peak_gib": (torch.cuda.max_memory_allocated() - others) / 2**30,
        "ledger_ms": ledger(run),
    }


def measure_cpu(run: Callable[[], Any]) -> dict[str, Any]:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    # The peak is of the process's life: one mode a process.
    return {"ms": statistics.median(times), "peak_gib": process_peak_bytes() / 2**30, "ledger_ms": {}}


def ledger(run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of GPU time by group of kernels, and of the gaps between kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        run()
        torch.cuda.synchronize()
    events = [e for e in p.events() or [] if str(e.device_type).endswith("CUDA")]
    groups = dict.fromkeys([*GROUPS, "other"], 0.0)
    for e in events:
        name = next((g for g, parts in GROUPS.items() if any(part in e.name for part in parts)), "other")
        groups[name] += e.time_range.elapsed_us() / 1e3
    span = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1e3
    return groups | {"gaps": span - sum(groups.values()), "kernels": len(events)}


def plot(rows: list[dict], path: Path) -> None:
    """A panel for each shape: each mode's time by group of kernels, with its peak memory beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    shapes: dict[tuple[int, int], dict[str, dict]] = {}
    for row in rows:
        shapes.setdefault((row["B"], row["N"]), {}).setdefault(row["mode"], row)
    groups = [*GROUPS, "other", "gaps"]
    colors = dict(zip(groups, plt.get_cmap("tab10").colors))  # pyright: ignore[reportAttributeAccessIssue]
    heights = [len(modes) + 1 for modes in shapes.values()]
    figure, axes = plt.subplots(
        len(shapes), 1, squeeze=False, figsize=(10, 0.42 * sum(heights) + 1.2), height_ratios=heights
    )
    for ax, ((batch, length), modes) in zip(axes[:, 0], shapes.items()):
        for place, row in enumerate(modes.values()):
            parts = {g: row["ledger_ms"].get(g, 0.0) for g in groups}
            scale, left = row["ms"] / (sum(parts.values()) or 1.0), 0.0
            if not any(parts.values()):
                ax.barh(place, row["ms"], color="lightgray")
            for group, part in parts.items():
                ax.barh(place, part * scale, left=left, color=colors[group])
                left += part * scale
            ratio = row["ratio_to_gradient"]
            label = f"{row['ms']:,.1f} ms" + (f", {ratio:.2f} ×" if ratio else "")
            ax.text(row["ms"], place, f" {label}, {row['peak_gib']:.1f} GiB", va="center", fontsize=8)
        ax.set_yticks(range(len(modes)), list(modes), fontsize=8)
        ax.invert_yaxis()
        ax.set_xlim(0, 1.4 * max(row["ms"] for row in modes.values()))
        ax.set_title(f"B={batch}, N={length:,}", fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    figure.suptitle(f"{first['model']}, milliseconds of a pass on {first['gpu']}", fontsize=10)
    handles = [Patch(color=colors[g]) for g in groups]
    figure.legend(handles, groups, ncols=3, fontsize=8, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.9 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--shapes", nargs="+", default=["4x2048"], help="sequences x tokens, e.g. 4x2048")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu")
    )
    parser.add_argument("--commit", help="recorded in each row (default: git's)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/hvp.json"))
    parser.add_argument(
        "--wait-for", type=Path, help="compile everything, then wait for this file before timing"
    )
    parser.add_argument("--plot-only", action="store_true", help="draw the picture from --out again")
    arguments = parser.parse_args()
    if arguments.plot_only:
        plot(json.loads(arguments.out.read_text()), arguments.out.with_suffix(".png"))
        return
    console = Console(width=140)
    rows = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in arguments.shapes:
        batch, length = map(int, shape.split("x"))
        runs, compile_s, captured_gib, kept = {}, {}, {}, {}
        for mode in arguments.modes:
            start = time.perf_counter()
            held = reset_peak(arguments.device)
            runs[mode] = prepare(mode, arguments.model, batch, length, arguments.device)
            compile_s[mode] = time.perf_counter() - start
            kept[mode] = (torch.cuda.memory_allocated() if arguments.device == "cuda" else 0) - held
            if MODES[mode].cuda_graph:  # a replay allocates nothing: what it needs shows while it is captured
                captured_gib[mode] = (torch.cuda.max_memory_allocated() - held) / 2**30
            console.print(f"{mode}: first call {compile_s[mode]:.1f} s")
        while arguments.wait_for and not arguments.wait_for.exists():
            time.sleep(0.5)
        reference = None
        for mode, run in runs.items():
            if arguments.device == "cuda":
                measured = measure_gpu(run, sum(kept.values()) - kept[mode])
                machine = torch.cuda.get_device_name()
            else:
                measured, machine = measure_cpu(run), f"CPU, {torch.get_num_threads()} threads"
            row = {
                "gpu": machine, "torch": torch.__version__, "triton": triton.__version__,
                "commit": arguments.commit or subprocess.getoutput("git rev-parse --short HEAD"),
                "model": arguments.model, "B": batch, "N": length, "mode": mode, **measured,
                "first_call_s": compile_s[mode],
            }  # fmt: skip
            row["peak_gib"] = captured_gib.get(mode, row["peak_gib"])
            reference = reference or row["ms"]
            row["ratio_to_gradient"] = (
                row["ms"] / reference if arguments.modes[0] == "gradient-sdpa-compiled" else None
            )
            rows.append(row)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
            console.print(
                f"{mode:34} B={batch} N={length}  {row['ms']:8.2f} ms  {row['ms'] / reference:5.2f} ×  {row['peak_gib']:.2f} GiB"
            )
            console.print(
                "    " + "  ".join(f"{name} {value:.1f}" for name, value in row["ledger_ms"].items())
            )
    plot(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
