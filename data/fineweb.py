"""FineWeb (or any dataset of documents) as an endless stream of token blocks: exact, shuffled and resumable.

Every rank's every worker is a *lane*, which reads documents of its own, tokenizes them, puts an end-of-text token after each
and cuts the whole into blocks. Together the lanes see every training document once an epoch:

- Of many shards (files) a lane takes every L-th of the epoch's order, L being the number of lanes; of few, all lanes read
  all shards and each takes every L-th document. The order of the shards is drawn anew each epoch.
- A lane shuffles its documents in windows: it reads `shuffle_window` of them, draws an order, and uses them up before it
  reads the next. So a position is the place where the window began and how much of it is used, and going on there re-reads
  one window at most. (A buffer that is refilled document by document would have to be stored with its contents.)
- A lane that has used up its share of an epoch goes on with its share of the next; tokens that fill no block are the
  beginning of the next one. No lane waits for another, so that no rank can hang on one with fewer documents.

A document is for validation by a stable hash of its id. FineWeb is published under ODC-By 1.0.
"""

import hashlib
import itertools
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .sequences import DataError
from .tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)
RETRY_AFTER_S = (1, 2, 4, 8, 16)  # a hub that does not answer
PIECE = 1_000_000  # characters that are tokenized at a time: tokenizers are slower than linear in a text without spaces
PADDING = -1  # in a block: no token; as a target it is ignored
IGNORED_TARGET = -100
# With fewer shards for a lane than this, lanes would differ too much in what they read in an epoch.
_SHARDS_PER_LANE = 8


def is_validation(document_id: str, fraction: float) -> bool:
    """Whether a document is held out: its id's hash, read as a fraction of 2⁶⁴, is below `fraction`."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8]) < fraction * 2**64


@dataclass(frozen=True)
class Source:
    """Where documents are: a dataset of the Hugging Face hub, or local Parquet files in `path`."""

    hub: str
    revision: str | None
    split: str
    path: str | None
    id_column: str
    text_column: str

    def __str__(self) -> str:
        return self.path or f"{self.hub} ({self.split})"

    def open(self) -> Any:
        """The `datasets.IterableDataset` of the two columns. Raises DataError if it cannot be opened or lacks one."""
        import datasets

        try:
            if self.path is not None:
                files = sorted(map(str, _parquet_files(self.path)))
                dataset = datasets.load_dataset(
                    "parquet", data_files={self.split: files}, split=self.split, streaming=True
                )
            else:
                dataset = datasets.load_dataset(
                    self.hub, revision=self.revision, split=self.split, streaming=True
                )
            columns = dataset.column_names or list(next(iter(dataset.take(1)), {}))
        except DataError:
            raise
        except Exception as error:  # anything: the hub's client, file systems and file formats have their own
            raise DataError(f"{self}: the dataset cannot be opened ({_line(error)})") from error
        missing = [c for c in (self.id_column, self.text_column) if c not in columns]
        if missing:
            found = ", ".join(columns) or "none"
            raise DataError(
                f"{self}: no column {', '.join(missing)}; it has {found}; set data.id_column and data.text_column"
            )
        return dataset.select_columns([self.id_column, self.text_column])

    def rows(self, dataset: Any, shard: int, start: int) -> Iterator[tuple[str, str | None]]:
        """(id, text) of a shard's documents from number `start` on.

        A hub that fails is asked again, from the same document on, after 1, 2, 4, 8 and 16 s. Raises DataError when it
        still fails, and at once for a local file that cannot be read.
        """
        failures = 0
        while True:
            try:
                rows = dataset.shard(num_shards=dataset.num_shards, index=shard)
                # In batches: row by row, `datasets` would share them out over the loader's workers once more.
                for batch in (rows.skip(start) if start else rows).iter(batch_size=100):
                    for document_id, text in zip(batch[self.id_column], batch[self.text_column], strict=True):
                        yield str(document_id), text
                        start, failures = start + 1, 0
                return
            except Exception as error:
                if self.path is not None or failures == len(RETRY_AFTER_S):
                    raise DataError(
                        f"{self}: shard {shard}, document {start}: cannot be read ({_line(error)})"
                    ) from error
                log.warning(
                    "%s: shard %d: %s; again in %d s", self, shard, _line(error), RETRY_AFTER_S[failures]
                )
                time.sleep(RETRY_AFTER_S[failures])
                failures += 1


def _parquet_files(path: str) -> list[Path]:
    folder = Path(path).expanduser()
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.parquet"))
    if not files:
        raise DataError(f"data.path={path}: no *.parquet in it")
    return files


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """int32 tokens of a document and its end of text. A long one is cut between words into pieces of a million characters."""
    ids: list[int] = []
    while len(text) > PIECE:
        cut = text.rfind(" ", 1, PIECE)
        cut = PIECE if cut < 0 else cut  # the space goes with the word after it, as in GPT-2's tokens
        ids += tokenizer.encode(text[:cut])
        text = text[cut:]
    ids += tokenizer.encode(text)
    if tokenizer.end_of_text is not None:
        ids.append(tokenizer.end_of_text)
    tokens = np.array(ids, dtype=np.int32)
    if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
        raise DataError(f"token {tokens.max()} is outside the vocabulary of {tokenizer.vocab_size}")
    return tokens


@dataclass
class LaneState:
    """Where a lane is. As a dictionary of numbers and one tensor it is part of checkpoints."""

    epoch: int = 0
    # Where the window began: place of its shard in the epoch's order, document of that shard, the epoch's training documents
    # before that one; and the documents without text that were left out before.
    shard: int = 0
    row: int = 0
    document: int = 0
    empty: int = 0
    window: int = 0  # the epoch's windows before this one
    used: int = 0  # documents of the window that are in blocks, or in `rest`
    rest: Tensor | None = None  # int32: tokens that filled no block yet

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Lane:
    """The blocks of one lane: `next` gives int32 [block_size + 1] arrays, and `state` says where the last one ended.

    A block's last token is the first of the next: every token but a lane's very first is a target once. With
    cross_documents=False no block has tokens of two documents: a document's last block is filled up with PADDING.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        block_size: int,
        *,
        seed: int,
        lane: int,
        num_lanes: int,
        shuffle_window: int,
        validation_fraction: float,
        cross_documents: bool = True,
        state: LaneState | None = None,
    ) -> None:
        self.source, self.tokenizer, self.block_size = source, tokenizer, block_size
        self.seed, self.lane, self.num_lanes = seed, lane, num_lanes
        self.shuffle_window, self.validation_fraction = shuffle_window, validation_fraction
        self.cross_documents = cross_documents
        self.state = state or LaneState()
        self._dataset = source.open()
        rest = self.state.rest
        self._tokens = np.empty(0, np.int32) if rest is None else rest.numpy().astype(np.int32)
        self._documents = self._read()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        length = self.block_size + 1
        while len(self._tokens) < length:
            tokens = encode_document(self.tokenizer, next(self._documents))
            if not self.cross_documents:
                tokens = self._filled_up(tokens)
            self._tokens = np.concatenate([self._tokens, tokens])
        block = self._tokens[:length]
        self._tokens = self._tokens[self.block_size if self.cross_documents else length :]
        self.state.rest = torch.from_numpy(self._tokens.copy())
        return block

    def _filled_up(self, tokens: np.ndarray) -> np.ndarray:
        """A document as whole blocks, each with its first token's predecessor's last token, the end PADDING."""
        starts = range(0, max(len(tokens) - 1, 1), self.block_size)
        blocks = np.full((len(starts), self.block_size + 1), PADDING, np.int32)
        for block, start in zip(blocks, starts):
            part = tokens[start : start + self.block_size + 1]
            block[: len(part)] = part
        return blocks.reshape(-1)

    def _read(self) -> Iterator[str]:
        """Texts in the lane's order, without end."""
        state = self.state
        while True:
            found = state.window > 0 or state.document > 0
            reader = self._reader(state.epoch, state.shard, state.row, state.document, state.empty)
            end = state.shard, state.row, state.document, state.empty
            while True:
                texts = []
                for text, end in itertools.islice(reader, self.shuffle_window):  # noqa: B007  # the last one's end
                    texts.append(text)
                if not texts:
                    break
                found = True
                random = np.random.default_rng(
                    np.random.SeedSequence(self.seed, spawn_key=(state.epoch, self.lane, state.window))
                )
                for place in random.permutation(len(texts))[state.used :]:
                    state.used += 1
                    yield texts[place]
                state.shard, state.row, state.document, state.empty = end
                state.window += 1
                state.used = 0
            if not found:
                raise DataError(
                    f"{self.source}: no training document for reader {self.lane + 1} of {self.num_lanes} (ranks × workers) in a "
                    "whole epoch; use fewer data.num_workers, or more documents"
                )
            state.epoch += 1
            state.shard = state.row = state.document = state.window = 0

    def _reader(
        self, epoch: int, place: int, row: int, document: int, empty: int
    ) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
        """This lane's training texts of an epoch from a position on, each with the position after it."""
        num_shards = self._dataset.num_shards
        order = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,))).permutation(
            num_shards
        )
        whole_shards = num_shards >= _SHARDS_PER_LANE * self.num_lanes
        while place < num_shards:
            if not whole_shards or place % self.num_lanes == self.lane:
                for document_id, text in self.source.rows(self._dataset, int(order[place]), row):
                    row += 1
                    if is_validation(document_id, self.validation_fraction):
                        continue
                    mine = whole_shards or document % self.num_lanes == self.lane
                    document += 1
                    if mine and text:
                        yield text, (place, row, document, empty)
                    elif mine:
                        empty += 1
            place, row = place + 1, 0


class _Batches(IterableDataset):
    """What a DataLoader's workers run: (worker, blocks int32 [batch, block_size + 1], state after them)."""

    def __init__(
        self, lane_options: dict[str, Any], rank: int, batch_size: int, states: list[LaneState], first: int
    ) -> None:
        self.lane_options, self.rank, self.batch_size = lane_options, rank, batch_size
        self.states, self.first = states, first

    def __iter__(self) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        info = get_worker_info()
        # The loader begins with its worker 0: that is to be the one whose turn it is.
        worker = ((0 if info is None else info.id) + self.first) % len(self.states)
        options = dict(self.lane_options)
        tokenizer = load_tokenizer(*options.pop("tokenizer"))
        lane = Lane(
            tokenizer=tokenizer,
            lane=self.rank * len(self.states) + worker,
            state=self.states[worker],
            **options,
        )
        while True:
            blocks = np.stack([next(lane) for _ in range(self.batch_size)])
            yield worker, torch.from_numpy(blocks), lane.state.state_dict()


def _start_worker(_: int) -> None:
    """Signals are the trainer's: a worker that had its handlers would only note that it is to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class StreamedText:
    """Training and validation batches of a stream, for one rank.

    `train_batch` gives (tokens, targets), int64 [batch_size, block_size], in an order that `state_dict` continues; a target
    of -100 is none. Raises DataError for a source that cannot be read.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: str,
        tokenizer_path: str | None,
        block_size: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 2,
        shuffle_window: int = 1000,
        validation_fraction: float = 0.005,
        cross_documents: bool = True,
    ) -> None:
        self.source, self.block_size, self.batch_size = source, block_size, batch_size
        self.rank, self.num_workers = rank, num_workers
        self.validation_fraction = validation_fraction
        self.tokenizer = load_tokenizer(tokenizer, tokenizer_path)
        self.vocab_size = self.tokenizer.vocab_size
        self._lane_options = {
            "source": source, "tokenizer": (tokenizer, tokenizer_path), "block_size": block_size, "seed": seed,
            "num_lanes": world_size * max(1, num_workers), "shuffle_window": shuffle_window,
            "validation_fraction": validation_fraction, "cross_documents": cross_documents,
        }  # fmt: skip
        self._states = [LaneState() for _ in range(max(1, num_workers))]
        self._next_worker = 0
        self._iterator: Iterator[tuple[int, Tensor, dict[str, Any]]] | None = None
        self._validation: np.ndarray | None = None
        source.open()  # what is wrong with it is said before anything else is started

    def train_batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """The stream's next batch. `index`, which says where a source with random access is to look, is not used."""
        if count != self.batch_size:
            raise ValueError(f"count is {count}; this stream was opened for batches of {self.batch_size}")
        if self._iterator is None:
            self._iterator = self._start()
        try:
            worker, blocks, state = next(self._iterator)
        except DataError as error:  # from a worker it comes with the worker's traceback before it
            raise DataError(str(error).strip().splitlines()[-1].rpartition("DataError: ")[-1]) from None
        except (RuntimeError, OSError, EOFError) as error:  # a worker that died, by the kernel's hand for one
            raise DataError(f"{self.source}: a worker of the data loader stopped ({_line(error)})") from error
        self._states[worker] = LaneState(**state)
        self._next_worker = (worker + 1) % len(self._states)
        return _pair(blocks, self.tokenizer.end_of_text)

    def _start(self) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
        batches = _Batches(self._lane_options, self.rank, self.batch_size, self._states, self._next_worker)
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=self.num_workers,
            # Not forked: the hub's client has threads, and a CUDA context is no child's business.
            multiprocessing_context="spawn" if self.num_workers else None,
            prefetch_factor=4 if self.num_workers else None,
            worker_init_fn=_start_worker if self.num_workers else None,
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that were taken end. What workers have read ahead is not in it."""
        return {
            "lanes": [state.state_dict() for state in self._states],
            "next_worker": self._next_worker,
            "num_lanes": self._lane_options["num_lanes"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if that was with other numbers of ranks or workers."""
        if state["num_lanes"] != self._lane_options["num_lanes"] or len(state["lanes"]) != len(self._states):
            raise DataError(
                f"the stream's position is of {state['num_lanes']} readers (ranks × workers), {len(state['lanes'])} on a rank, "
                f"and this run has {self._lane_options['num_lanes']}, {len(self._states)} on a rank; start as many"
            )
        self._states = [LaneState(**lane) for lane in state["lanes"]]
        self._next_worker = state["next_worker"]
        self._iterator = None

    @property
    def empty_documents(self) -> int:
        """Documents without text that this rank has left out."""
        return sum(state.empty for state in self._states)

    def validation_batches(self, batch_size: int, num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches at every call and on every rank, from the first validation documents of the dataset.

        Raises DataError when the dataset has none.
        """
        wanted = batch_size * num_batches * self.block_size + 1
        if self._validation is None or len(self._validation) < wanted:
            self._validation = self._read_validation(wanted)
        count = min(batch_size * num_batches, (len(self._validation) - 1) // self.block_size)
        if count < 1:
            raise DataError(
                f"{self.source}: its validation documents have {len(self._validation)} tokens, fewer than "
                f"block_size={self.block_size} + 1; raise data.validation_fraction"
            )
        starts = self.block_size * np.arange(count)
        blocks = torch.from_numpy(self._validation[starts[:, None] + np.arange(self.block_size + 1)])
        for first in range(0, count, batch_size):
            yield _pair(blocks[first : first + batch_size], self.tokenizer.end_of_text)

    def _read_validation(self, wanted: int) -> np.ndarray:
        dataset, parts, found = self.source.open(), [], 0
        for shard in range(dataset.num_shards):
            for document_id, text in self.source.rows(dataset, shard, 0):
                if text and is_validation(document_id, self.validation_fraction):
                    parts.append(encode_document(self.tokenizer, text))
                    found += len(parts[-1])
                    if found >= wanted:
                        return np.concatenate(parts)[:wanted]
        if not parts:
            raise DataError(
                f"{self.source}: no document is for validation; raise data.validation_fraction={self.validation_fraction:g}"
            )
        return np.concatenate(parts)


def _pair(blocks: Tensor, end_of_text: int | None) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64, of int32 [batch, block_size + 1]."""
    blocks = blocks.long()
    tokens, targets = blocks[:, :-1], blocks[:, 1:]
    padding = blocks == PADDING
    if not padding.any():
        return tokens, targets
    return tokens.masked_fill(padding[:, :-1], end_of_text or 0), targets.masked_fill(
        padding[:, 1:], IGNORED_TARGET
    )


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
