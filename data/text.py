"""One text file as training and validation sequences."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .tokenizer import Tokenizer


class DataError(ValueError):
    """Data that cannot be read or is not enough. The message is one line."""


class TextTokens:
    """A UTF-8 text file, tokenized in memory; its last tenth is held out for validation.

    Training sequences have no state to save: number i of the endless order is a function of `seed` and i
    alone. A run that goes on asks for the next i, and a batch is the same however many ranks share it.

    Raises DataError for a file that is missing, empty, not UTF-8, or too short for one sequence in each part.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, block_size: int, seed: int) -> None:
        tokens = torch.tensor(tokenizer.encode(_read(path)), dtype=torch.int64)
        needed = 10 * (block_size + 1)  # a sequence and its targets span block_size + 1 tokens
        if len(tokens) < needed:
            raise DataError(
                f"{path}: {len(tokens)} tokens are too few for block_size={block_size}, which needs {needed} "
                f"({block_size + 1} in the tenth that is held out for validation)"
            )
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.seed = seed
        num_validation = len(tokens) // 10
        self.train_tokens = tokens[:-num_validation]
        self.validation_tokens = tokens[-num_validation:]
        # One block fewer than would fit: what is left over gives an epoch's offset a block of room or more.
        self.sequences_per_epoch = len(self.train_tokens) // block_size - 1
        self._epoch: int | None = None
        self._starts = torch.empty(0, dtype=torch.int64)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def train_batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Training sequences number `index` (from 0) to `index + count - 1`, with the token after each token.

        For every `sequences_per_epoch` of them the training part is cut into blocks from a random offset on,
        and each block comes once, in random order. Returns (tokens, targets), int64 [count, block_size].
        """
        starts = [self._starts_of(*divmod(i, self.sequences_per_epoch)) for i in range(index, index + count)]
        return _cut(self.train_tokens, torch.stack(starts), self.block_size)

    def _starts_of(self, epoch: int, number: int) -> Tensor:
        if epoch != self._epoch:
            # Mixed by SeedSequence, because neither seed + epoch nor torch's 32 bits keep seeds apart.
            random = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            left_over = len(self.train_tokens) - 1 - self.sequences_per_epoch * self.block_size
            offset = int(random.integers(left_over + 1))
            self._starts = offset + self.block_size * torch.from_numpy(
                random.permutation(self.sequences_per_epoch)
            )
            self._epoch = epoch
        return self._starts[number]

    def validation_batches(self, batch_size: int, num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches at every call: (tokens, targets), int64 [batch_size, block_size].

        Their sequences are evenly spaced over the validation part and do not overlap. Where it holds fewer
        than were asked for, there are fewer batches, and the last may be smaller.
        """
        available = (len(self.validation_tokens) - 1) // self.block_size
        count = min(batch_size * num_batches, available)
        starts = torch.arange(count) * available // count * self.block_size
        for some in starts.split(batch_size):
            yield _cut(self.validation_tokens, some, self.block_size)


def _cut(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    at = starts[:, None] + torch.arange(length)
    return tokens[at], tokens[at + 1]


def _read(path: Path) -> str:
    try:
        contents = path.read_bytes()  # not as text, which would change the ends of lines
    except OSError as error:
        raise DataError(f"{path}: the text cannot be read ({error.strerror})") from error
    if not contents:
        raise DataError(f"{path}: the text is empty")
    try:
        return contents.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {contents[error.start]:#04x} at offset {error.start}"
        raise DataError(f"{path}: the text is not UTF-8 ({byte}); convert it first") from error
