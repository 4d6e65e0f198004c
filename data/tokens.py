"""Tokens in files: `train-*.bin` and `val-*.bin`, memory-mapped, written by scripts/prepare_data.py.

A shard is a header of 64 bytes (magic "FBTOKENS", version u32, bytes a token u32, vocabulary u32, CRC-32 of the tokens u32,
count u64, the tokenizer's name in 32 bytes) and the tokens, little-endian uint16 or uint32.
"""

import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .sequences import DataError, TokenSequences
from .tokenizer import Tokenizer, load_tokenizer

MAGIC, VERSION = b"FBTOKENS", 1
_HEADER = struct.Struct("<8sIIIIQ32s")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class Header:
    dtype: np.dtype
    vocab_size: int
    checksum: int
    count: int
    tokenizer: str


def write_shard(path: Path, parts: Iterable[Sequence[int]], vocab_size: int, tokenizer: str) -> int:
    """Write the tokens of `parts`, one after the other, as the shard `path`; returns their number.

    The file gets its name when it is complete and on the disk. Raises DataError for a token that the vocabulary
    does not have.
    """
    dtype = _DTYPES[2 if vocab_size <= 2**16 else 4]
    partial = path.with_name(path.name + ".partial")
    count = checksum = 0
    with partial.open("wb") as file:
        file.write(bytes(_HEADER.size))
        for part in parts:
            tokens = np.asarray(part, dtype=np.int64)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                partial.unlink()
                raise DataError(f"{path}: token {tokens.max()} is outside the vocabulary of {vocab_size}")
            data = tokens.astype(dtype).tobytes()
            file.write(data)
            checksum = zlib.crc32(data, checksum)
            count += len(tokens)
        file.seek(0)
        name = tokenizer.encode()[:32]
        file.write(_HEADER.pack(MAGIC, VERSION, dtype.itemsize, vocab_size, checksum, count, name))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return count


def read_header(path: Path) -> Header:
    """The header of a shard. Raises DataError if the file is none, or is not as long as its header says."""
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: the shard cannot be read ({error.strerror})") from error
    if len(raw) < _HEADER.size or raw[:8] != MAGIC:
        raise DataError(f"{path}: not a token shard; scripts/prepare_data.py writes them")
    _, version, itemsize, vocab_size, checksum, count, name = _HEADER.unpack(raw)
    if version != VERSION or itemsize not in _DTYPES:
        raise DataError(
            f"{path}: version {version} with {itemsize} bytes a token; {VERSION} with 2 or 4 is expected"
        )
    expected = _HEADER.size + count * itemsize
    if size != expected:
        raise DataError(
            f"{path}: {size} bytes where its header says {expected}: cut short or overwritten; write it again"
        )
    return Header(_DTYPES[itemsize], vocab_size, checksum, count, name.rstrip(b"\0").decode())


def _map(path: Path, header: Header) -> np.ndarray:
    if not header.count:  # an empty file cannot be mapped
        return np.empty(0, header.dtype)
    return np.memmap(path, header.dtype, "r", _HEADER.size, (header.count,))


class Shards:
    """Shards one after the other as one stream (`sequences.Tokens`). Opening one checks its checksum: about 1 GB/s."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.headers = [read_header(path) for path in paths]
        self._parts = []
        for path, header in zip(paths, self.headers, strict=True):
            tokens = _map(path, header)
            if zlib.crc32(tokens.data) != header.checksum:
                raise DataError(f"{path}: the checksum is wrong: the shard is damaged; write it again")
            self._parts.append(tokens)
        self._ends = np.cumsum([header.count for header in self.headers])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cut(self, starts: Sequence[int], length: int) -> Tensor:
        """int64 [len(starts), length]."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts, strict=True):
            filled = 0
            part = int(np.searchsorted(self._ends, start, side="right"))
            while filled < length:
                begin = start + filled - (int(self._ends[part - 1]) if part else 0)
                piece = self._parts[part][begin : begin + length - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
                part += 1
        return torch.from_numpy(out)


class ShardTokens(TokenSequences):
    """The shards of a folder. Raises DataError for a folder without them, or with too few tokens for one sequence."""

    def __init__(
        self, folder: Path, block_size: int, seed: int, tokenizer: str, tokenizer_path: str | None
    ) -> None:
        train, validation = (Shards(sorted(folder.glob(f"{part}-*.bin"))) for part in ("train", "val"))
        for part, shards in (("train", train), ("val", validation)):
            if len(shards) <= block_size:
                raise DataError(
                    f"{folder}: {len(shards)} tokens in {len(shards.headers)} {part}-*.bin are too few for "
                    f"block_size={block_size}; scripts/prepare_data.py writes them"
                )
        headers = [*train.headers, *validation.headers]
        found = sorted({(header.tokenizer, header.vocab_size) for header in headers})
        if found != [(tokenizer, found[0][1])]:
            names = ", ".join(f"{name} (vocabulary {size})" for name, size in found)
            raise DataError(
                f"{folder}: written with {names}; data.tokenizer={tokenizer} is expected of every shard"
            )
        self.vocab_size = found[0][1]
        self._tokenizer = (tokenizer, tokenizer_path)
        super().__init__(train, validation, block_size, seed)

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded when asked for: training needs none."""
        return load_tokenizer(*self._tokenizer)
