"""One text file as training and validation sequences."""

from pathlib import Path

import torch

from .sequences import DataError, TokenSequences, TokenTensor
from .tokenizer import Tokenizer


class TextTokens(TokenSequences):
    """A UTF-8 text file, tokenized in memory; its last tenth is held out for validation.

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
        num_validation = len(tokens) // 10
        super().__init__(
            TokenTensor(tokens[:-num_validation]), TokenTensor(tokens[-num_validation:]), block_size, seed
        )

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


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
