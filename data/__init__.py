"""Text into batches of tokens."""

from pathlib import Path
from typing import Any

from .text import DataError, TextTokens
from .tokenizer import Tokenizer, TokenizerError, load_tokenizer

__all__ = ["DataError", "TextTokens", "Tokenizer", "TokenizerError", "load_tokenizer", "open_data"]

SHAKESPEARE = Path(__file__).parent / "shakespeare" / "tinyshakespeare.txt"


def open_data(config: Any, block_size: int, seed: int) -> TextTokens:
    """The data that a configuration names.

    Args:
        config: has `name` ("shakespeare"), `path` (a text file; None: the text that ships with the
            repository), `tokenizer` and `tokenizer_path` (as `load_tokenizer` takes them).
        block_size: tokens in a sequence.
        seed: of the order of the training sequences.

    Raises DataError or TokenizerError, each with a message of one line.
    """
    if config.name != "shakespeare":
        raise DataError(f"data is {config.name!r}; allowed is 'shakespeare'")
    path = SHAKESPEARE if config.path is None else Path(config.path).expanduser()
    return TextTokens(path, load_tokenizer(config.tokenizer, config.tokenizer_path), block_size, seed)
