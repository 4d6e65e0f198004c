"""Row and column pass of the second backward, each by itself, in cycles of the multiprocessors' clocks.

    python -m scripts.bench_passes [--head-dims 64 128] [--out docs/results/passes.json] [--commit …]

Milliseconds of one kernel differ by 5 % from run to run, because clocks follow power and temperature; cycles by 0.7 % at most.
So this tells versions apart, and `scripts.bench_attention` what a call costs. Before and after each pass a small kernel reads
every multiprocessor's clock, all in one CUDA graph; what such a kernel takes is measured too and subtracted. `fraction` is 18
products of 2·(valid pairs)·d FLOPs at the 4,096 bf16 FLOPs a cycle of a Hopper multiprocessor, over both passes. Rows of other
commits stay in --out.
"""

# pyright: reportCallIssue=false

import argparse
import json
import statistics
import subprocess
from pathlib import Path

import torch
import triton
import triton.language as tl

from flashbob.kernels.column_pass import column_pass
from flashbob.kernels.common import Problem
from flashbob.kernels.row_pass import row_pass
from scripts.bench_attention import BATCH, HEADS, valid_pairs

FLOPS_A_CYCLE = 4096
SHAPES = (  # (N, window or None, causal)
    (1024, None, True), (2048, None, True), (4096, None, True), (8192, None, True),
    (4096, 1024, True), (8192, 1024, True), (4096, None, False),
)  # fmt: skip


@triton.jit
def _read_clocks(clocks_ptr):
    """The clock of the multiprocessor that a program runs on, at the place of its number."""
    place = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;  // $1", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1
    )
    clock = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;  // $1", "=l,r", [tl.program_id(0)], tl.int64, is_pure=False, pack=1
    )
    tl.store(clocks_ptr + place, clock)


def measure(d: int, n: int, window: int | None, causal: bool) -> dict:
    """Cycles of both passes: medians over replays of the median over multiprocessors."""
    torch.manual_seed(0)
    shape = (BATCH, HEADS, n, d)
    q, k, v, do, u_q, u_k, u_v, o, dq = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(9)
    )
    lse = torch.randn(shape[:3], device="cuda").abs() + 5
    problem = Problem.of(q, k, scale=d**-0.5, is_causal=causal, window_size=window)
    vectors = row_pass(problem, u_q, u_k, u_v, do, q, k, v, o, lse, dq)[2]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(4, 2 * multiprocessors, dtype=torch.int64, device="cuda")

    def run() -> None:
        read = [lambda i=i: _read_clocks[(8 * multiprocessors,)](clocks[i], num_warps=1) for i in range(4)]
        read[0]()
        row_pass(problem, u_q, u_k, u_v, do, q, k, v, o, lse, dq)
        read[1]()
        column_pass(problem, u_q, u_k, u_v, do, q, k, v, vectors)
        read[2]()
        read[3]()

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    passes = []
    for _ in range(12):
        graph.replay()
        torch.cuda.synchronize()
        row, column, reading = clocks[:, :multiprocessors].diff(dim=0).median(1).values.tolist()
        passes.append((row - reading, column - reading))
    row, column = (statistics.median(times) for times in zip(*passes[2:]))
    flops = 18 * 2 * valid_pairs(n, causal, window) * d * BATCH * HEADS
    return {
        "d": d, "N": n, "B": BATCH, "H": HEADS, "causal": causal, "window": window,
        "row_pass_cycles": row, "column_pass_cycles": column,
        "fraction": flops / (multiprocessors * FLOPS_A_CYCLE) / (row + column),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--commit", help="recorded in each row (default: git's)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/passes.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error(
            "needs a Hopper GPU (compute capability 9.0): the rate a cycle is that of its multiprocessors"
        )
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": arguments.commit or subprocess.getoutput("git rev-parse --short HEAD"),
    }  # fmt: skip
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    rows = [row for row in rows if (row["commit"], row["gpu"]) != (machine["commit"], machine["gpu"])]
    for d in arguments.head_dims:
        for n, window, causal in SHAPES:
            row = machine | measure(d, n, window, causal)
            rows.append(row)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
            form = f"window {window}" if window else "causal" if causal else "full"
            print(
                f"d={d:<4} N={n:<6} {form:<12} row pass {row['row_pass_cycles'] / 1e3:9,.0f} k  "
                f"column pass {row['column_pass_cycles'] / 1e3:9,.0f} k  {row['fraction']:.1%}"
            )


if __name__ == "__main__":
    main()
