"""The trainer on a stream of documents: killed at any moment it goes on as if it had not been, also with two ranks."""

import random
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train.launch import ADAMW, SMALL, SOPHIA, kill_group, rows, series, start, train, wait_for_step

KEYS = ("train/loss", "train/grad_norm", "val/loss")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three Parquet files of uneven length; texts that a byte model can tell apart."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    for number, count in enumerate((60, 7, 120)):
        texts = [" ".join(generator.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(generator.randrange(5, 60)))
                 for _ in range(count)]  # fmt: skip
        texts[0] = None if number == 1 else ""
        table = pa.table(
            {"id": [f"{number}/{i}" for i in range(count)], "text": pa.array(texts, pa.string())}
        )
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def arguments(corpus, *more):
    stream = ("data=fineweb", f"data.path={corpus}", "data.tokenizer=bytes", "data.validation_fraction=0.1")
    return (*SMALL, *stream, "data.shuffle_window=20", "run.dir=run", *more)


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(*arguments(corpus, *SOPHIA, "data.num_workers=2"), cwd=folder)
    return folder / "run"


@pytest.mark.parametrize("attempt", range(2))
def test_a_killed_run_goes_on_with_the_same_tokens(corpus, uninterrupted, tmp_path, attempt):
    call = arguments(corpus, *SOPHIA, "data.num_workers=2")
    process = start(*call, cwd=tmp_path)
    wait_for_step(tmp_path / "run", random.Random(attempt).randrange(4, 11), process)
    time.sleep(0.02 * attempt)
    kill_group(process)
    train(*call, cwd=tmp_path)
    for key in KEYS:
        expected = {row["step"]: row[key] for row in rows(uninterrupted) if key in row}
        got = {row["step"]: row[key] for row in rows(tmp_path / "run") if key in row}
        assert got == expected, key


def test_two_ranks_resume_and_another_number_is_refused(corpus, tmp_path):
    call = arguments(corpus, *ADAMW, "data.num_workers=1")
    train(*call, cwd=tmp_path, processes=2)
    whole = {row["step"]: row["train/loss"] for row in rows(tmp_path / "run")}
    (tmp_path / "run" / "checkpoints" / "step-00000012.pt").unlink()  # back to step 8
    alone = train(*call, cwd=tmp_path, expect=1)
    assert "is of 2 ranks, each with documents of its own, and this run has 1; start 2 ranks" in alone.stderr
    train(*call, cwd=tmp_path, processes=2)
    assert {row["step"]: row["train/loss"] for row in rows(tmp_path / "run")} == whole


def test_data_that_end_in_an_error_leave_a_checkpoint(corpus, tmp_path):
    """A file that is cut while the run reads it, on one rank of two: both stop, with the last whole step saved."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for path in corpus.glob("*.parquet"):
        (folder / path.name).write_bytes(path.read_bytes())
    call = arguments(
        folder,
        *ADAMW,
        "data.num_workers=0",
        "train.max_steps=4000",
        "train.checkpoint_every=0",
        "train.eval_every=4000",
    )
    process = start(*call, cwd=tmp_path, processes=2)
    wait_for_step(tmp_path / "run", 5, process)
    for path in folder.glob("*.parquet"):
        path.write_bytes(b"PAR1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "cannot be read" in output and "with a checkpoint: the same command continues" in output
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}.pt").exists()


def test_a_wait_for_data_is_reported(uninterrupted):
    waits = series(uninterrupted, "time/data_wait_s")
    assert len(waits) == 12 and all(0 <= w < row["time/step_s"] for w, row in zip(waits, rows(uninterrupted)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.validation_fraction=2", "data.validation_fraction=2: expected a number in (0, 1)"),
        ("data.num_workers=-1", "data.num_workers=-1: expected an integer, at least 0"),
        ("data.text_column=body", "no column body; it has id, text; set data.id_column and data.text_column"),
    ],
)
def test_bad_input_is_one_line_before_the_first_step(corpus, tmp_path, change, message):
    result = train(*arguments(corpus, *ADAMW, change), cwd=tmp_path, expect=1)
    assert message in result.stderr and "Traceback" not in result.stderr
