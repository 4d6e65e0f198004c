"""Training and validation sequences of a stream of tokens, in an order that has no state."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """Data that cannot be read or is not enough. The message is one line."""


class Tokens(Protocol):
    """A stream of tokens with random access."""

    def __len__(self) -> int: ...

    def cut(self, starts: Sequence[int], length: int) -> Tensor:
        """int64 [len(starts), length]: `length` tokens from each start on."""
        ...


class TokenSequences:
    """Sequences of `block_size` tokens, each with the token after every token as its target.

    Training sequences have no state to save: number i of the endless order is a function of `seed` and i
    alone. A run that goes on asks for the next i, and a batch is the same however many ranks share it.
    """

    def __init__(self, train_tokens: Tokens, validation_tokens: Tokens, block_size: int, seed: int) -> None:
        self.train_tokens = train_tokens
        self.validation_tokens = validation_tokens
        self.block_size = block_size
        self.seed = seed
        # One block fewer than would fit: what is left over gives an epoch's offset a block of room or more.
        self.sequences_per_epoch = max(1, len(train_tokens) // block_size - 1)
        self._epoch: int | None = None
        self._starts = np.empty(0, dtype=np.int64)

    def train_batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Training sequences number `index` (from 0) to `index + count - 1`, with the token after each token.

        For every `sequences_per_epoch` of them the training part is cut into blocks from a random offset on,
        and each block comes once, in random order. Returns (tokens, targets), int64 [count, block_size].
        """
        starts = [self._start_of(*divmod(i, self.sequences_per_epoch)) for i in range(index, index + count)]
        return self._pair(self.train_tokens, starts)

    def _start_of(self, epoch: int, number: int) -> int:
        if epoch != self._epoch:
            # Mixed by SeedSequence, because neither seed + epoch nor torch's 32 bits keep seeds apart.
            random = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            left_over = len(self.train_tokens) - 1 - self.sequences_per_epoch * self.block_size
            offset = int(random.integers(left_over + 1))
            self._starts = offset + self.block_size * random.permutation(self.sequences_per_epoch)
            self._epoch = epoch
        return int(self._starts[number])

    def validation_batches(self, batch_size: int, num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same batches at every call: (tokens, targets), int64 [batch_size, block_size].

        Their sequences are evenly spaced over the validation part and do not overlap. Where it holds fewer
        than were asked for, there are fewer batches, and the last may be smaller.
        """
        available = (len(self.validation_tokens) - 1) // self.block_size
        count = min(batch_size * num_batches, available)
        starts = [i * available // count * self.block_size for i in range(count)]
        for first in range(0, count, batch_size):
            yield self._pair(self.validation_tokens, starts[first : first + batch_size])

    def _pair(self, tokens: Tokens, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        both = tokens.cut(starts, self.block_size + 1)
        return both[:, :-1], both[:, 1:]


class TokenTensor:
    """`Tokens` in memory: an int64 tensor."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, starts: Sequence[int], length: int) -> Tensor:
        return torch.stack([self.tokens[start : start + length] for start in starts])
