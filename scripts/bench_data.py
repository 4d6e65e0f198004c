"""How fast batches come: streaming with tokenization, for several numbers of workers, and tokens from shards.

    python -m scripts.bench_data PARQUET_DIR [--shards DIR] [--tokenizer-path DIR] [--seconds 10] [--out docs/results/data.json]

Tokens are counted after the first batch, with nothing else to do between batches: what a loader can give at most.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from data import ShardTokens, Source, StreamedText


def rate(data: Any, block_size: int, batch_size: int, seconds: float) -> float:
    """Tokens a second."""
    data.train_batch(0, batch_size)
    start, batches = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        batches += 1
        data.train_batch(batches * batch_size, batch_size)
    return batches * batch_size * block_size / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parquet", type=Path, help="a folder of Parquet files with the columns id and text")
    parser.add_argument("--shards", type=Path, help="a folder of scripts.prepare_data, for data=tokens")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results/data.json"))
    arguments = parser.parse_args()
    console, rows = Console(width=120), []
    shape = arguments.block_size, arguments.batch_size
    source = Source("", None, "train", str(arguments.parquet), "id", "text")
    for workers in arguments.workers:
        stream = StreamedText(
            source, arguments.tokenizer, arguments.tokenizer_path, *shape, seed=0, num_workers=workers
        )
        rows.append(
            {"data": "fineweb", "workers": workers, "tokens_per_s": rate(stream, *shape, arguments.seconds)}
        )
        del stream
    if arguments.shards:
        tokens = ShardTokens(
            arguments.shards, arguments.block_size, 0, arguments.tokenizer, arguments.tokenizer_path
        )
        rows.append({"data": "tokens", "workers": 0, "tokens_per_s": rate(tokens, *shape, arguments.seconds)})
    for row in rows:
        row |= {
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        console.print(
            f"{row['data']:8} workers {row['workers']}  {row['tokens_per_s'] / 1e6:8.2f} M tokens/s"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
