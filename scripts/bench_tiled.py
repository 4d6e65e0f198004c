"""The `tiled` backend beside `math` on this machine's CPU: time and memory of one whole second-order call.

    python -m scripts.bench_tiled [--lengths 1024 4096] [--out docs/results/tiled_cpu.json]

A call is forward, gradient and gradient of the gradient; one head of 64 dimensions, causal, fp32. Each row is a process of
its own, whose peak memory is read before and after the call.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import flashbob
from train.metrics import process_peak_bytes

HEAD_DIM = 64


def second_order_call(length: int) -> None:
    q, k, v, u, w = (torch.randn(1, 1, length, HEAD_DIM) for _ in range(5))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flashbob.sdpa_bob(*inputs, is_causal=True)
    gradients = torch.autograd.grad(out, inputs, u, create_graph=True)
    torch.autograd.grad(torch.stack([(g * w).sum() for g in gradients]).sum(), inputs)


def measure(backend: str, length: int) -> dict:
    """Seconds (the best of three) and MiB above the process before the call."""
    flashbob.set_backend(backend)
    second_order_call(256)
    before = process_peak_bytes()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        second_order_call(length)
        seconds.append(time.perf_counter() - start)
    peak = process_peak_bytes()
    return {"backend": backend, "N": length, "s": min(seconds), "mib": (peak - before) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument(
        "--math-up-to", type=int, default=8192, help="math needs N² memory (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/tiled_cpu.json"))
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return
    rows = []
    table = Table("N", "math (s)", "tiled (s)", "tiled / math", "math (MiB)", "tiled (MiB)")
    for length in arguments.lengths:
        found = {}
        for backend in ("math", "tiled"):
            if backend == "tiled" or length <= arguments.math_up_to:
                call = [sys.executable, "-m", "scripts.bench_tiled", "--one", backend, str(length)]
                found[backend] = json.loads(
                    subprocess.run(call, check=True, capture_output=True, text=True).stdout
                )
                rows.append(found[backend])
        math, tiled = found.get("math"), found["tiled"]
        table.add_row(
            f"{length:,}",
            f"{math['s']:.3f}" if math else "–",
            f"{tiled['s']:.3f}",
            f"{tiled['s'] / math['s']:.2f}" if math else "–",
            f"{math['mib']:,.0f}" if math else "–",
            f"{tiled['mib']:,.0f}",
        )
    Console().print(table)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps({**machine, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
