"""Search the tiles of the Triton kernels on this machine.

    python -m scripts.tune_attention --passes row_pass column_pass --head-dims 64 128 --out build/tiles.json

Every candidate is compiled in its own process first, all cores at once, then timed alone on the GPU and compared with
the tiles that ship. Prints the best of each pass and head dimension; --out gets every timing.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flashbob.kernels.tuning import ONE_SUM, SEARCHED

B, H = 4, 12


def problem(
    pass_name: str, head_dim: int, length: int, causal: bool, dtype: torch.dtype
) -> Callable[[], Any]:
    """A function that launches the pass alone, on random inputs; what is a pass in several launches as a whole."""
    from flashbob.backends import triton as backend
    from flashbob.kernels import backward, forward
    from flashbob.kernels.column_pass import column_pass
    from flashbob.kernels.common import Problem
    from flashbob.kernels.row_pass import row_pass
    from flashbob.kernels.tangent import tangent

    torch.manual_seed(0)
    q, k, v, do, u_q, u_k, u_v = (
        torch.randn(B, H, length, head_dim, device="cuda", dtype=dtype) for _ in range(7)
    )
    p = Problem.of(q, k, scale=head_dim**-0.5, is_causal=causal)
    if pass_name == "forward":
        return lambda: forward.forward(p, q, k, v)
    options = {"scale": head_dim**-0.5, "is_causal": causal}
    o, lse = backend.forward(q, k, v, **options)
    if pass_name.startswith("backward"):
        return lambda: backward.backward(p, do, q, k, v, o, lse)
    if pass_name == "tangent":
        return lambda: tangent(p, u_q, u_k, u_v, q, k, v, o, lse)
    dq, _, _ = backend.backward(do, q, k, v, o, lse, **options)
    if pass_name.startswith("row_pass"):
        return lambda: row_pass(p, u_q, u_k, u_v, do, q, k, v, o, lse, dq)
    _, _, vectors = row_pass(p, u_q, u_k, u_v, do, q, k, v, o, lse, dq)
    return lambda: column_pass(p, u_q, u_k, u_v, do, q, k, v, vectors)


def compile_tile(
    pass_name: str, head_dim: int, length: int, causal: bool, dtype: torch.dtype, tile
) -> str | None:
    """Fill Triton's cache on the disk; the error's first line if the tile does not compile or does not fit."""
    from flashbob.kernels.tuning import forced

    try:
        with forced(pass_name, *tile):
            problem(pass_name, head_dim, length, causal, dtype)()
            torch.cuda.synchronize()
    except Exception as error:
        return str(error).splitlines()[0][:120]
    return None


def median_ms(launch: Callable[[], Any], repeats: int = 7) -> float:
    """Milliseconds of one call, launched ahead of the GPU: each sample is several calls in a row."""
    launch()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the calls are queued
        start.record()
        for _ in range(4):
            launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 4)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", nargs="+", default=list(SEARCHED), choices=SEARCHED)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--noncausal", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tiles", nargs="+", help="only these, as rows,keys,warps,stages")
    parser.add_argument(
        "--seconds", type=float, default=240, help="stop compiling after this long (default 240)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/tiles.json"))
    arguments = parser.parse_args()
    dtype, causal = getattr(torch, arguments.dtype), not arguments.noncausal

    from flashbob.kernels.tuning import candidates, forced, tiles

    device = torch.device("cuda", 0)
    jobs = []
    for pass_name, head_dim in itertools.product(arguments.passes, arguments.head_dims):
        if pass_name in ONE_SUM and (head_dim <= 128 or dtype == torch.float32):
            continue  # not launched
        chosen = candidates(pass_name, head_dim)
        if arguments.tiles:
            chosen = [tuple(map(int, tile.split(","))) for tile in arguments.tiles]
        entry = tiles(pass_name, head_dim, dtype, device, arguments.length)[0]
        shipped = tuple(entry[key] for key in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
        jobs += [(pass_name, head_dim, tile) for tile in dict.fromkeys([shipped, *chosen])]
    print(f"{len(jobs)} candidates on {torch.cuda.get_device_name()}, {os.cpu_count()} cores", flush=True)

    start, usable = time.monotonic(), []
    # A tile that faults takes its process's CUDA context along, so each has a process of its own; forked from one that
    # has imported everything, it starts at once.
    context = get_context("forkserver")
    context.set_forkserver_preload(["flashbob.backends.triton", "scripts.tune_attention"])
    workers = min(os.cpu_count() or 1, 15)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {
            # Compiling needs no long sequence; lengths are not specialized.
            pool.submit(compile_tile, pass_name, head_dim, 512, causal, dtype, tile): (
                pass_name,
                head_dim,
                tile,
            )
            for pass_name, head_dim, tile in jobs
        }
        try:
            for future in as_completed(futures, timeout=arguments.seconds):
                if (error := future.result()) is None:
                    usable.append(futures[future])
                else:
                    print("refused", *futures[future], error, flush=True)
        except TimeoutError:
            print(f"{len(jobs) - len(usable)} candidates are left out: not compiled in time", flush=True)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(pool._processes.values()):
                process.kill()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)

    rows = []
    for pass_name, head_dim in itertools.product(arguments.passes, arguments.head_dims):
        launch = problem(pass_name, head_dim, arguments.length, causal, dtype)
        mine = []
        for tile in [job[2] for job in jobs if job[:2] == (pass_name, head_dim) and job in usable]:
            with forced(pass_name, *tile):
                mine.append(
                    {
                        "pass": pass_name,
                        "d": head_dim,
                        "N": arguments.length,
                        "tile": tile,
                        "ms": median_ms(launch),
                    }
                )
        rows += mine
        del launch
        torch.cuda.empty_cache()
        if mine:
            first, best = mine[0], sorted(mine, key=lambda row: row["ms"])
            print(f"{pass_name} d={head_dim}: ships {first['tile']} {first['ms']:.3f} ms")
            for row in best[:6]:
                print(f"    {row['tile']} {row['ms']:.3f} ms")
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
