"""Unmeasured variants of flashbob/kernels/hopper.py: correctness against fp64 first, then time. One call, about 90 s.

Make the variants first, as README.md says, then: PYTHONPATH=. python3 docs/variants/run.py [64|128 …]
"""

import sys

sys.path[:0] = [".", "build"]
import time

import hopper_bars
import hopper_pair
import hopper_producer
import torch

from flashbob.backends import tiled
from flashbob.backends import triton as backend
from flashbob.kernels import hopper
from flashbob.kernels.common import Problem
from flashbob.kernels.tuning import hopper_tile
from scripts.tune_attention import median_ms

bf16 = torch.bfloat16


def tile(bm, bn, stages, held, warps=4, **more):
    return {"BLOCK_M": bm, "BLOCK_N": bn, "STAGES": stages, "HELD_OPERANDS": held, "AHEAD": True, "num_warps": warps, **more}


PRODUCER = {"NUM_WARPS": 4, "PRODUCER_REGS": 24, "maxnreg": 128}
# pass, d: (module, tile, predicted share of the floor of the pass's own products at N = 8192)
CANDIDATES = {
    ("column_pass", 64): [
        (hopper, hopper_tile("column_pass", 64), "today 0.70"),
        (hopper_producer, tile(32, 64, 3, 4, **PRODUCER), "0.76"),
        (hopper_bars, tile(32, 64, 3, 4), "0.73"),
    ],
    ("row_pass", 64): [
        (hopper, hopper_tile("row_pass", 64), "today 0.83"),
        (hopper_bars, tile(64, 32, 2, 3), "0.84"),
        (hopper_producer, tile(64, 32, 2, 2, **PRODUCER), "0.80"),
    ],
    ("row_pass", 128): [
        (hopper, hopper_tile("row_pass", 128), "today 0.59"),
        (hopper_pair, tile(64, 64, 2, 0, 8), "0.64"),
        (hopper_pair, tile(64, 64, 2, 1, 8), "0.66"),
        (hopper_bars, tile(64, 16, 3, 0), "0.60"),
    ],
    ("column_pass", 128): [
        (hopper, hopper_tile("column_pass", 128), "today 0.60"),
        (hopper_pair, tile(64, 64, 2, 2, 8), "0.66"),
        (hopper_producer, tile(16, 64, 3, 1, **PRODUCER), "0.60"),
        (hopper_bars, tile(16, 64, 3, 2), "0.62"),
    ],
}


def setup(d, n, causal=True, batch=4, heads=12, kv_heads=12, n_k=None, reference=False):
    q, do, u_q = (torch.randn(batch, heads, n, d, device="cuda", dtype=bf16) for _ in range(3))
    k, v, u_k, u_v = (torch.randn(batch, kv_heads, n_k or n, d, device="cuda", dtype=bf16) for _ in range(4))
    options = {"scale": d**-0.5, "is_causal": causal, "window_size": None, "key_padding_mask": None,
               "dropout_p": 0.0, "dropout_seed": None}  # fmt: skip
    problem = Problem.of(q, k, **options)
    o, lse = backend.forward(q, k, v, **options)
    dq = backend.backward(do, q, k, v, o, lse, **options)[0]
    vectors = hopper.row_pass(problem, u_q, u_k, u_v, do, q, k, v, o, lse, dq, tile=hopper_tile("row_pass", d))[2]
    expected = None
    if reference:  # Q̃, K̃, Ṽ, dÕ in fp64
        x = {name: t.double() for name, t in zip("q k v do uq uk uv".split(), (q, k, v, do, u_q, u_k, u_v), strict=True)}
        o64, lse64 = tiled.forward(x["q"], x["k"], x["v"], **options)
        dq64 = tiled.backward(x["do"], x["q"], x["k"], x["v"], o64, lse64, **options)[0]
        expected = tiled.backward_backward(
            x["uq"], x["uk"], x["uv"], x["do"], x["q"], x["k"], x["v"], o64, lse64, dq64, **options
        )
    rows = (u_q, u_k, u_v, do, q, k, v, o, lse, dq)
    return problem, {"row_pass": rows, "column_pass": (*rows[:7], vectors)}, expected


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


def main():
    tiled._TILE_ELEMENTS["cuda"] = 2**26
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=bf16) for _ in range(2))
    rate = 2 * 8192**3 / median_ms(lambda: a @ b, 10) * 1e3
    print(f"rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    start = time.monotonic()
    for d in [int(x) for x in sys.argv[1:]] or [128, 64]:
        checks = [setup(d, 1000, True, 2, 8, 4, 1200, True), setup(d, 777, False, 1, 4, 4, 500, True)]
        timed = {n: setup(d, n) for n in (1024, 4096, 8192)}
        for name in ("row_pass", "column_pass"):
            share = 10 if name == "row_pass" else 8
            for module, t, predicted in CANDIDATES[name, d]:
                label = f"{name} d={d} {module.__name__.split('.')[-1]} {[v for k, v in t.items() if k != 'AHEAD']}"
                try:
                    errors = []
                    for problem, inputs, expected in checks:
                        call = getattr(module, name)
                        out = call(problem, *inputs[name], tile=t)[:2]
                        again = call(problem, *inputs[name], tile=t)[:2]
                        torch.cuda.synchronize()
                        assert all(torch.equal(x, y) for x, y in zip(out, again, strict=True)), "other bits on a second run"
                        # backward_backward's order: Q̃, K̃, Ṽ, dÕ
                        mine = (expected[0], expected[3]) if name == "row_pass" else expected[1:3]
                        errors += [relative(x, y) for x, y in zip(out, mine, strict=True)]
                    assert max(errors) <= 3e-3, errors
                    shares = []
                    for n, (problem, inputs, _) in timed.items():
                        floor = share * 2 * (n * (n + 1) // 2) * d * 48 / rate * 1e3
                        ms = median_ms(lambda: getattr(module, name)(problem, *inputs[name], tile=t))  # noqa: B023
                        shares.append(f"{n}: {ms:.3f} ms {floor / ms:.0%}")
                    print(f"{label} errors {max(errors):.1e}  {'  '.join(shares)}  predicted {predicted}", flush=True)
                except Exception as error:
                    print(f"{label} FAILED {error!r:.200}", flush=True)
        print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
