"""The stream: every document once an epoch, whoever reads; the same tokens after a resume; and what cannot be read."""

import functools
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data import DataError, Source, StreamedText, fineweb, load_tokenizer
from data.fineweb import PADDING, Lane, LaneState, encode_document, is_validation

BYTES = load_tokenizer("bytes")
FRACTION = 0.1
END = 0  # of a document, in the tests' texts


def write(folder: Path, texts: list[list[str | None]]) -> Source:
    """A Parquet file for each list of texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(texts):
        ids = [f"{number}-{i}" for i in range(len(part))]
        pq.write_table(
            pa.table({"id": ids, "text": pa.array(part, pa.string())}), folder / f"part-{number:03}.parquet"
        )
    return source(folder)


def source(folder: Path, **changes) -> Source:
    return Source(**({"hub": "nobody/nothing", "revision": None, "split": "train", "path": str(folder),
                      "id_column": "id", "text_column": "text"} | changes))  # fmt: skip


def uneven(counts=(40, 3, 57)) -> list[list[str | None]]:
    """Texts of 5 to 60 characters that say which document they are; NUL ends each, as the byte tokenizer puts nothing between."""
    return [[f"{n}-{i}:" + "x" * (7 * i % 50) + "\0" for i in range(count)] for n, count in enumerate(counts)]


def training_texts(texts) -> list[str]:
    return [
        t
        for n, part in enumerate(texts)
        for i, t in enumerate(part)
        if t and not is_validation(f"{n}-{i}", FRACTION)
    ]


def lane(source, number=0, of=1, state=None, block_size=16, **options) -> Lane:
    options = {"seed": 3, "shuffle_window": 10, "validation_fraction": FRACTION} | options
    return Lane(source, BYTES, block_size, lane=number, num_lanes=of, state=state, **options)


@pytest.fixture
def opened_once(monkeypatch):
    """Hundreds of lanes over one dataset."""
    monkeypatch.setattr(Source, "open", functools.cache(Source.open))


def read_epochs(lane: Lane, count: int) -> list[list[str]]:
    """The documents of a lane's first epochs."""
    epochs = [[] for _ in range(count + 1)]
    while lane.state.epoch < count:
        text = next(lane._documents)
        epochs[lane.state.epoch].append(text)
    return epochs[:count]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_document_is_read_once_an_epoch_by_one_lane(tmp_path, opened_once, world_size):
    texts = uneven()
    data = write(tmp_path, texts)
    for workers in range(5):
        count = world_size * max(1, workers)
        epochs = [read_epochs(lane(data, i, count), 2) for i in range(count)]
        for epoch in range(2):
            assert Counter(itertools.chain(*(e[epoch] for e in epochs))) == Counter(training_texts(texts))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_with_many_files_lanes_share_out_files(tmp_path, opened_once, monkeypatch, lanes):
    texts = uneven([5] * 25)
    data = write(tmp_path, texts)
    opened = []
    rows = Source.rows
    monkeypatch.setattr(
        Source, "rows", lambda self, d, shard, start: (opened.append(shard), rows(self, d, shard, start))[1]
    )
    epochs = [read_epochs(lane(data, i, lanes), 2) for i in range(lanes)]
    for epoch in range(2):
        assert Counter(itertools.chain(*(e[epoch] for e in epochs))) == Counter(training_texts(texts))
    assert all(count <= 3 for count in Counter(opened).values())  # two epochs and the beginning of the third


def test_a_new_order_each_epoch_and_for_each_seed(tmp_path):
    data = write(tmp_path, uneven())
    first, second = read_epochs(lane(data), 2)
    (other,) = read_epochs(lane(data, seed=4), 1)
    assert sorted(first) == sorted(second) == sorted(other)
    assert first != second and first != other
    assert first == read_epochs(lane(data), 1)[0]


def stream_of(blocks) -> list[int]:
    """The tokens of blocks that overlap by one."""
    return [*blocks[0][:1].tolist(), *itertools.chain(*(b[1:].tolist() for b in blocks))]


def test_blocks_are_the_documents_one_after_the_other_over_two_epochs(tmp_path):
    """No token is lost or doubled where an epoch ends: what fills no block begins the next."""
    data = write(tmp_path, uneven())
    documents = itertools.chain(*read_epochs(lane(data), 3))
    expected = list(itertools.chain(*(BYTES.encode(text) for text in documents)))
    two_epochs = 2 * sum(len(t) for t in training_texts(uneven()))
    blocks = list(itertools.islice(lane(data), two_epochs // 16 + 2))
    assert stream_of(blocks) == expected[: 16 * len(blocks) + 1]


@pytest.mark.parametrize("stop", [0, 1, 7, 60, 61, 200, 333])
@pytest.mark.parametrize("many_files", [False, True])
def test_a_lane_goes_on_where_its_state_says(tmp_path, monkeypatch, stop, many_files):
    data = write(tmp_path, uneven([5] * 25 if many_files else (40, 3, 57)))
    whole = list(itertools.islice(lane(data, 1, 2), stop + 150))
    first = lane(data, 1, 2)
    for _ in range(stop):
        next(first)
    state = LaneState(**first.state.state_dict())
    read = []
    rows = Source.rows

    def counted(self, dataset, shard, start):
        for row in rows(self, dataset, shard, start):
            read.append(row)
            yield row

    monkeypatch.setattr(Source, "rows", counted)
    again = lane(data, 1, 2, state)
    for number, block in enumerate(itertools.islice(again, 150)):
        if number == 0:
            # Its documents are among two lanes' and some are for validation: not the whole again.
            assert len(read) <= 40
        assert np.array_equal(block, whole[stop + number])


def test_null_and_empty_texts_are_left_out_and_counted_once(tmp_path):
    texts = uneven((30, 30))
    texts[0][3], texts[0][4], texts[1][7] = None, "", None
    data = write(tmp_path, texts)
    reader = lane(data, validation_fraction=1e-9)
    read = read_epochs(reader, 1)[0]
    assert Counter(read) == Counter(t for part in texts for t in part if t)
    assert reader.state.empty == 3
    state = LaneState(**reader.state.state_dict())
    resumed = lane(data, state=state, validation_fraction=1e-9)
    read_epochs(resumed, 2)
    assert resumed.state.empty == 6


def test_documents_that_may_not_share_a_block(tmp_path):
    data = write(tmp_path, uneven())
    blocks = list(itertools.islice(lane(data, cross_documents=False), 80))
    documents = iter(read_epochs(lane(data), 1)[0])
    tokens: list[int] = []
    for block in blocks:
        kept = block[block != PADDING]
        assert (block[: len(kept)] == kept).all() and END not in kept[:-1]
        tokens += kept[1:].tolist() if tokens else kept.tolist()
        if kept[-1] == END:
            assert tokens == BYTES.encode(next(documents))
            tokens = []
        else:
            assert len(kept) == len(block)


def test_special_tokens_in_a_text_are_text_and_long_texts_lose_nothing(monkeypatch):
    from tests.data.test_tokenizer import gpt2_folder

    gpt2 = load_tokenizer("gpt2", str(gpt2_folder()))
    text = "a <|endoftext|> b"
    tokens = encode_document(gpt2, text)
    assert tokens[-1] == gpt2.end_of_text and gpt2.end_of_text not in tokens[:-1]
    assert gpt2.decode(tokens[:-1].tolist()) == text
    monkeypatch.setattr(fineweb, "PIECE", 50)
    text = "some words of a text " * 20 + "x" * 200
    assert gpt2.decode(encode_document(gpt2, text)[:-1].tolist()) == text


def test_50_million_characters_without_a_space_come_through():
    assert len(encode_document(BYTES, "x" * 50_000_000)) == 50_000_000


# --- through the DataLoader ----------------------------------------------------------------------------------------------


def streamed(data: Source, **options) -> StreamedText:
    options = {"seed": 3, "shuffle_window": 10, "validation_fraction": FRACTION, "num_workers": 2} | options
    return StreamedText(data, "bytes", None, 16, 4, **options)


def take(stream: StreamedText, count: int) -> list[torch.Tensor]:
    return [torch.stack(stream.train_batch(0, 4)) for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_after_a_resume_are_those_of_an_uninterrupted_stream(tmp_path, num_workers):
    data = write(tmp_path, uneven())
    whole = take(streamed(data, num_workers=num_workers), 40)
    stream = streamed(data, num_workers=num_workers)
    assert all(torch.equal(a, b) for a, b in zip(take(stream, 13), whole))
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    again = streamed(data, num_workers=num_workers)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(take(again, 27), whole[13:], strict=True))
    tokens, targets = whole[0]
    assert tokens.dtype == torch.int64 and torch.equal(tokens[:, 1:], targets[:, :-1])


def test_another_number_of_readers_is_refused(tmp_path):
    data = write(tmp_path, uneven())
    state = streamed(data, num_workers=0).state_dict()
    for other in ({"num_workers": 2}, {"world_size": 2}):
        with pytest.raises(DataError, match=r"position is of 1 readers .* and this run has"):
            streamed(data, **({"num_workers": 0} | other)).load_state_dict(state)


def test_validation_is_the_same_everywhere_and_apart_from_training(tmp_path):
    texts = uneven()
    data = write(tmp_path, texts)
    one, two = streamed(data, num_workers=0), streamed(data, num_workers=0, world_size=4, rank=3, seed=9)
    batches = list(one.validation_batches(2, 3))
    for (a, b), (c, d) in zip(batches, two.validation_batches(2, 3), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d) and a.shape == (2, 16)
    held_out = [
        t for n, part in enumerate(texts) for i, t in enumerate(part) if is_validation(f"{n}-{i}", FRACTION)
    ]
    expected = list(itertools.chain(*(BYTES.encode(t) for t in held_out)))
    got = torch.cat([a.flatten() for a, _ in batches]).tolist()
    assert got == expected[: len(got)]


# --- what cannot be read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_column": "txt"}, "no column txt; it has id, text; set data.id_column and data.text_column"),
        ({"path": "nowhere"}, "no \\*.parquet in it"),
    ],
)
def test_a_wrong_source_is_said_at_once(tmp_path, change, message):
    data = write(tmp_path / "data", uneven())
    if "path" in change:
        (tmp_path / "nowhere").mkdir()
        change = {"path": str(tmp_path / "nowhere")}
    with pytest.raises(DataError, match=message):
        streamed(
            source(tmp_path / "data", **change) if "path" not in change else source(Path(change["path"]))
        )
    assert data.path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("keep", [0, 100, -200])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, keep, num_workers):
    data = write(tmp_path, uneven())
    path = tmp_path / "part-002.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"(cannot be opened|cannot be read)") as caught:
        take(streamed(data, num_workers=num_workers), 40)
    assert "\n" not in str(caught.value)


def test_no_training_or_validation_document(tmp_path):
    data = write(tmp_path, [["one\0", "two\0"]])
    with pytest.raises(DataError, match="no training document for reader 1 of 1"):
        take(streamed(data, num_workers=0, validation_fraction=1.0), 1)
    with pytest.raises(DataError, match=r"no document is for validation; raise data.validation_fraction"):
        next(streamed(data, num_workers=0, validation_fraction=1e-12).validation_batches(1, 1))
    with pytest.raises(DataError, match="fewer than block_size=16"):
        next(streamed(data, num_workers=0, validation_fraction=1.0).validation_batches(1, 1))


def test_more_readers_than_documents(tmp_path):
    data = write(tmp_path, [["a\0"]])
    with pytest.raises(DataError, match=r"use fewer data.num_workers, or more documents"):
        next(lane(data, 1, 2, validation_fraction=1e-12))


def test_no_network_is_an_error_of_one_line():
    code = (
        "from data import DataError, Source\n"
        "try: Source('nobody/nothing', None, 'train', None, 'id', 'text').open()\n"
        "except DataError as error: print('message:', error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("message:")]
    assert line.startswith("message: nobody/nothing (train): the dataset cannot be opened (")


class Hub:
    """A dataset of one shard whose connection breaks after every `every` rows."""

    num_shards = 1

    def __init__(self, rows, every, failures):
        self.all, self.every, self.failures = rows, every, failures

    def shard(self, num_shards, index):
        return Rows(self, 0)


class Rows:
    def __init__(self, hub, start):
        self.hub, self.start = hub, start

    def skip(self, count):
        return Rows(self.hub, count)

    def iter(self, batch_size):
        for i in range(self.start, len(self.hub.all)):
            if self.hub.failures and i % self.hub.every == self.hub.every - 1:
                self.hub.failures -= 1
                raise ConnectionError("the hub is gone")
            yield {"id": [str(i)], "text": [self.hub.all[i]]}


def test_a_hub_that_fails_is_asked_again_from_where_it_stopped(monkeypatch):
    waits = []
    monkeypatch.setattr(fineweb.time, "sleep", waits.append)
    hub = Source("a/b", None, "train", None, "id", "text")
    texts = [f"text {i}" for i in range(20)]
    assert [t for _, t in hub.rows(Hub(texts, 4, failures=3), 0, 2)] == texts[2:]
    assert waits == [1, 2, 4]  # three in a row at the same place
    with pytest.raises(
        DataError, match=r"a/b \(train\): shard 0, document 3: cannot be read \(the hub is gone\)"
    ):
        list(hub.rows(Hub(texts, 4, failures=6), 0, 0))
    assert waits[3:] == [1, 2, 4, 8, 16]


def test_a_worker_that_dies_is_an_error_and_no_hang(tmp_path):
    stream = streamed(write(tmp_path, uneven()), num_workers=1)
    take(stream, 1)
    (worker,) = stream._iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a worker of the data loader stopped"):
        take(stream, 50)
