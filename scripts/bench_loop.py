"""What a training step costs in each arm: real runs of train.py, one after the other, on one GPU.

    python -m scripts.bench_loop DATA_OVERRIDE… [--arms adamw sophia-flashbob …] [--out docs/results/loop.json]
    python -m scripts.bench_loop data=fineweb data.path=build/corpus data.tokenizer_path=DIR

GPT-2 Small, N=2048, bf16, 4 sequences × 4 accumulation rounds. Each run takes a Hessian step every 5 steps; medians of ordinary
and Hessian steps give the time per step at k = 10, 5 and 2. Arms that compile run two steps first, side by side, which fills
the compiler's cache. Loss, memory and times come from the runs' own metrics.jsonl.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "adamw": ("arm=adamw", "train.compile=true"),
    "adamw-graph": ("arm=adamw", "train.compile=true", "train.cuda_graph=true"),
    "sophia-flashbob": (
        "arm=sophia-flashbob",
        "train.compile=true",
        "train.cuda_graph=true",
        "model.loss_chunk=8192",  # all tokens of a micro-batch
    ),
    "sophia-paper": ("arm=sophia-paper",),
    "sophia-hybrid": ("arm=sophia-hybrid",),
    "sophia-math": ("arm=sophia-math",),
}
COMMON = (
    "model=gpt2-small", "model.block_size=2048", "train.precision=bf16", "train.micro_batch_size=4", "train.global_batch_size=16",
    "train.max_steps=11", "train.eval_every=1000", "train.eval_batches=1", "train.checkpoint_every=0", "train.log_every=1000",
    "train.resume=never", "optim.warmup_steps=5",
)  # fmt: skip
INTERVAL = 5


def command(arm: str, data: list[str], directory: Path, *more: str) -> list[str]:
    interval = () if arm.startswith("adamw") else (f"optim.hessian_interval={INTERVAL}",)
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *ARMS[arm],
        *COMMON,
        *interval,
        *data,
        f"run.dir={directory}",
        *more,
    ]


def read(arm: str, directory: Path, device: str) -> dict:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    hessian = [r["time/step_s"] for r in rows[1:] if "hessian/event_s" in r]
    ordinary = [r["time/step_s"] for r in rows[2:] if "hessian/event_s" not in r]
    result = {
        "arm": arm, "device": device, "steps": len(rows), "tokens_per_step": rows[0]["tokens"],
        "ordinary_ms": 1e3 * statistics.median(ordinary), "hessian_ms": 1e3 * statistics.median(hessian) if hessian else None,
        "data_wait_ms": 1e3 * statistics.median(r["time/data_wait_s"] for r in rows[1:]),
        "peak_gib": rows[-2]["memory/peak_gib"], "losses": [r["train/loss"] for r in rows],
    }  # fmt: skip
    for k in (10, 5, 2):
        extra = (result["hessian_ms"] - result["ordinary_ms"]) / k if hessian else 0.0
        result[f"ms_per_step_k{k}"] = result["ordinary_ms"] + extra
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", nargs="+", help="overrides that choose the data, e.g. data=tokens data.path=DIR"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--commit", help="recorded in each row (default: git's)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/loop.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_loop"))
    arguments = parser.parse_args()
    console, rows = Console(width=140), []
    shutil.rmtree(arguments.runs, ignore_errors=True)
    compiling = [a for a in arguments.arms if "train.compile=true" in ARMS[a]]
    warm = [
        subprocess.Popen(
            command(arm, arguments.data, arguments.runs / f"warm-{arm}", "train.max_steps=2"),
            stdout=subprocess.DEVNULL,
        )
        for arm in compiling
    ]
    if any(process.wait() for process in warm):
        sys.exit("bench_loop: a first run failed; its message is above")
    import torch
    import triton

    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": arguments.commit or subprocess.getoutput("git rev-parse --short HEAD"),
    }  # fmt: skip
    for arm in arguments.arms:
        directory = arguments.runs / arm
        subprocess.run(command(arm, arguments.data, directory), stdout=subprocess.DEVNULL, check=True)
        rows.append({**machine, **read(arm, directory, "cuda")})
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
        row, first = rows[-1], rows[0]
        hessian = f"{row['hessian_ms']:8.1f}" if row["hessian_ms"] else "       –"
        per_step = "  ".join(
            f"k={k} {row[f'ms_per_step_k{k}']:7.1f} ({row[f'ms_per_step_k{k}'] / first[f'ms_per_step_k{k}']:.2f} ×)"
            for k in (10, 5, 2)
        )
        console.print(
            f"{arm:16} ordinary {row['ordinary_ms']:8.1f} ms  Hessian {hessian} ms  {per_step}  {row['peak_gib']:.1f} GiB"
        )


if __name__ == "__main__":
    main()
