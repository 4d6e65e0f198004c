"""Shards of tokens: what is written is read, in an order that depends on the seed alone, and damage is found."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import DataError, ShardTokens
from data.tokens import Shards, read_header, write_shard
from scripts.prepare_data import is_validation, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    """Three training shards of uneven length, 0, 1, 2, … 999 together, and one for validation."""
    for name, first, last in (("a", 0, 333), ("b", 333, 340), ("c", 340, 1000)):
        write_shard(tmp_path / f"train-{name}.bin", [range(first, last)], 1000, "bytes")
    write_shard(tmp_path / "val-a.bin", [range(500), range(500, 600)], 1000, "bytes")
    return tmp_path


def open_shards(folder, block_size=10, seed=3):
    return ShardTokens(folder, block_size, seed, "bytes", None)


def test_cuts_cross_shards(folder):
    shards = Shards(sorted(folder.glob("train-*.bin")))
    assert len(shards) == 1000
    cut = shards.cut([0, 330, 325, 990], 10).tolist()
    assert cut == [list(range(s, s + 10)) for s in (0, 330, 325, 990)]


def test_an_epoch_has_every_block_once_and_no_token_of_validation(folder):
    data = open_shards(folder)
    count = data.sequences_per_epoch
    tokens, targets = data.train_batch(0, count)
    assert (targets == tokens + 1).all()  # of the stream 0, 1, 2, …
    seen = Counter(tokens.flatten().tolist())
    assert max(seen.values()) == 1 and len(seen) == count * 10
    again, _ = data.train_batch(count, count)
    assert sorted(again[:, 0].tolist()) != tokens[:, 0].tolist() and (again[:, 0] != tokens[:, 0]).any()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks_sees_the_same_order(folder, ranks):
    whole, _ = open_shards(folder).train_batch(24, 24)
    parts = [open_shards(folder).train_batch(24 + 24 // ranks * r, 24 // ranks)[0] for r in range(ranks)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(open_shards(folder, seed=4).train_batch(24, 24)[0], whole)


def test_vocabulary_decides_the_width(tmp_path):
    write_shard(tmp_path / "small.bin", [[65535]], 2**16, "x")
    write_shard(tmp_path / "large.bin", [[65536]], 2**16 + 1, "x")
    assert read_header(tmp_path / "small.bin").dtype.itemsize == 2
    assert read_header(tmp_path / "large.bin").dtype.itemsize == 4
    assert Shards([tmp_path / "large.bin"]).cut([0], 1).item() == 65536
    with pytest.raises(DataError, match="token 70 is outside the vocabulary of 70"):
        write_shard(tmp_path / "wrong.bin", [[1, 70]], 70, "x")
    assert not list(tmp_path.glob("wrong*"))


def test_damage_is_found(folder):
    path = folder / "train-c.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match=r"train-c\.bin: \d+ bytes where its header says \d+"):
        open_shards(folder)
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(DataError, match=r"train-c\.bin: the checksum is wrong"):
        open_shards(folder)
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"train-c\.bin: not a token shard"):
        open_shards(folder)
    path.write_bytes(good)
    with pytest.raises(
        DataError, match=r"written with bytes \(vocabulary 1000\); data.tokenizer=gpt2 is expected"
    ):
        ShardTokens(folder, 10, 0, "gpt2", None)
    with pytest.raises(DataError, match=r"600 tokens in 1 val-\*.bin are too few for block_size=700"):
        open_shards(folder, block_size=700)


def parquet(path, rows):
    pq.write_table(pa.table({"id": [i for i, _ in rows], "text": [t for _, t in rows]}), path)


def test_prepare_data_keeps_every_document_on_its_side(tmp_path):
    rows = [[(f"doc-{f}-{i}", f"text {f} {i} " * (i % 7 + 1)) for i in range(200)] for f in range(3)]
    rows[1][5] = ("doc-null", None)
    rows[1][6] = ("doc-empty", "")
    rows[2][7] = ("doc-special", "a <|endoftext|> b")
    for f in range(3):
        parquet(tmp_path / f"part-{f}.parquet", rows[f])
    out = tmp_path / "out"
    main([str(tmp_path), "--out", str(out), "--tokenizer", "bytes", "--validation", "0.2", "--workers", "2"])
    for part in ("train", "val"):
        for f in range(3):
            texts = [t for i, t in rows[f] if t and is_validation(i, 0.2) == (part == "val")]
            shards = Shards([out / f"{part}-part-{f}.bin"])
            assert bytes(shards.cut([0], len(shards))[0].tolist()).decode() == "".join(texts)
    # A second call has nothing to do; one file that was lost is written again, and the same.
    before = (out / "train-part-1.bin").read_bytes()
    stamp = (out / "train-part-0.bin").stat().st_mtime_ns
    (out / "train-part-1.bin").unlink()
    main([str(tmp_path), "--out", str(out), "--tokenizer", "bytes", "--validation", "0.2"])
    assert (out / "train-part-1.bin").read_bytes() == before
    assert (out / "train-part-0.bin").stat().st_mtime_ns == stamp


def test_prepare_data_after_a_kill(tmp_path):
    for f in range(6):
        parquet(tmp_path / f"part-{f}.parquet", [(f"{f}-{i}", "some words " * 400) for i in range(500)])
    call = [
        sys.executable,
        "-m",
        "scripts.prepare_data",
        str(tmp_path),
        "--tokenizer",
        "bytes",
        "--validation",
        "0.1",
    ]
    subprocess.run([*call, "--out", str(tmp_path / "whole")], cwd=ROOT, check=True, capture_output=True)
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [*call, "--out", str(out)], cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    while not list(out.glob("train-*.bin")):
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list(out.glob("train-*.bin"))) < 6
    subprocess.run([*call, "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    for path in sorted((tmp_path / "whole").glob("*.bin")):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert not list(out.glob("*.partial"))


@pytest.mark.parametrize("wrong", ["column", "cut", "none"])
def test_prepare_data_names_what_is_wrong(wrong, tmp_path):
    path = tmp_path / "part.parquet"
    if wrong == "column":
        pq.write_table(pa.table({"id": ["a"], "body": ["b"]}), path)
        message = "part.parquet: no column text; it has id, body"
    elif wrong == "cut":
        parquet(path, [("a", "b" * 1000)])
        path.write_bytes(path.read_bytes()[:-20])
        message = "part.parquet: not a readable Parquet file"
    else:
        message = "no *.parquet in"
    result = subprocess.run(
        [sys.executable, "-m", "scripts.prepare_data", str(tmp_path), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1] and result.stderr.splitlines()[-1].startswith(
        "prepare_data: "
    )
