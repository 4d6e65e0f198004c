"""Tokenize Parquet files into shards for data=tokens.

    python -m scripts.prepare_data DIR_OR_FILE… --out corpora/fineweb --tokenizer gpt2 --workers 8

Reads the columns `id` and `text` of every Parquet file and writes train-NAME.bin and val-NAME.bin for it into --out, an
end-of-text token after each document. A document is for validation by a stable hash of its id, so it is on the same side on
every machine, whatever the files are called. Files are shared out over --workers processes; shards that are complete are not
written again, so the same command continues after a kill. Null and empty texts are counted and left out.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data import DataError, Tokenizer, TokenizerError, load_tokenizer
from data.fineweb import encode_document, is_validation
from data.tokens import read_header, write_shard


@dataclass
class Counts:
    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def write_file(source: Path, out: Path, tokenizer: Tokenizer, fraction: float) -> Counts:
    """The two shards of one Parquet file. Raises DataError if it cannot be read or lacks a column."""
    counts, parts = Counts(), {"train": [], "val": []}
    try:
        file = pq.ParquetFile(source)
        missing = {"id", "text"} - set(file.schema_arrow.names)
        if missing:
            found = ", ".join(file.schema_arrow.names)
            raise DataError(f"{source}: no column {', '.join(sorted(missing))}; it has {found}")
        for batch in file.iter_batches(1000, columns=["id", "text"]):
            for document_id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                if not text:
                    counts.skipped += 1
                    continue
                part = "val" if is_validation(str(document_id), fraction) else "train"
                parts[part].append(encode_document(tokenizer, text))
                counts.documents += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{source}: not a readable Parquet file ({str(error).splitlines()[0]})") from error
    # The training shard last: it says that both are complete.
    for part in ("val", "train"):
        counts.tokens += write_shard(
            out / f"{part}-{source.stem}.bin", parts[part], tokenizer.vocab_size, tokenizer.name
        )
    return counts


@cache
def _tokenizer(name: str, path: str | None) -> Tokenizer:
    return load_tokenizer(name, path)


def _work(source: Path, out: Path, name: str, path: str | None, fraction: float) -> Counts:
    return write_file(source, out, _tokenizer(name, path), fraction)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="PARQUET", help="files, or folders of *.parquet"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", default="gpt2", help="bytes, gpt2 or a transformers tokenizer (default %(default)s)"
    )
    parser.add_argument("--tokenizer-path", help="a local folder with it")
    parser.add_argument(
        "--validation", type=float, default=0.005, help="share of the documents (default %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (default %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 < options.validation < 1 or options.workers < 1:
        parser.error("--validation must be in (0, 1) and --workers at least 1")
    sources = [f for x in options.inputs for f in (sorted(x.rglob("*.parquet")) if x.is_dir() else [x])]
    if not sources:
        sys.exit(f"prepare_data: no *.parquet in {', '.join(map(str, options.inputs))}")
    stems = [source.stem for source in sources]
    if doubled := sorted({stem for stem in stems if stems.count(stem) > 1}):
        sys.exit(f"prepare_data: two inputs are called {doubled[0]}; their shards would have one name")
    options.out.mkdir(parents=True, exist_ok=True)

    todo = []
    for source in sources:
        try:
            if read_header(options.out / f"train-{source.stem}.bin").tokenizer == options.tokenizer:
                continue
        except DataError:
            pass
        todo.append(source)
    print(f"{len(sources)} files, {len(sources) - len(todo)} of them done already", flush=True)
    _tokenizer(options.tokenizer, options.tokenizer_path)  # a wrong name fails here, not in every worker
    total, start = Counts(), time.monotonic()
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        work = (options.out, options.tokenizer, options.tokenizer_path, options.validation)
        futures = {pool.submit(_work, source, *work): source for source in todo}
        for done, future in enumerate(as_completed(futures), start=1):
            counts = future.result()
            total.tokens += counts.tokens
            total.documents += counts.documents
            total.skipped += counts.skipped
            elapsed = time.monotonic() - start
            eta = elapsed / done * (len(todo) - done)
            print(
                f"{done}/{len(todo)} {futures[future].name}: {total.tokens:,} tokens, {total.documents:,} documents, "
                f"{total.skipped} empty, {total.tokens / elapsed / 1e6:.2f} M tokens/s, ETA {eta:.0f} s",
                flush=True,
            )
    print(f"{options.out}: train with data=tokens data.path={options.out} data.tokenizer={options.tokenizer}")


if __name__ == "__main__":
    try:
        main()
    except (DataError, TokenizerError) as error:
        sys.exit(f"prepare_data: {error}")
