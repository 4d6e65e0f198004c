"""Text into batches of tokens."""

from pathlib import Path
from typing import Any

from .sequences import DataError, TokenSequences
from .text import TextTokens
from .tokenizer import Tokenizer, TokenizerError, load_tokenizer
from .tokens import ShardTokens

__all__ = [
    "DataError",
    "ShardTokens",
    "TextTokens",
    "TokenSequences",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
    "open_data",
]

SHAKESPEARE = Path(__file__).parent / "shakespeare" / "tinyshakespeare.txt"


def open_data(config: Any, block_size: int, seed: int) -> TextTokens | ShardTokens:
    """The data that a configuration names.

    Args:
        config: has `name` ("shakespeare" or "tokens"), `path` (a text file, None for the text that ships with
            the repository; of "tokens" a folder of shards), `tokenizer` and `tokenizer_path` (as `load_tokenizer` takes them).
        block_size: tokens in a sequence.
        seed: of the order of the training sequences.

    Raises DataError or TokenizerError, each with a message of one line.
    """
    if config.name == "tokens":
        folder = Path(config.path).expanduser()
        return ShardTokens(folder, block_size, seed, config.tokenizer, config.tokenizer_path)
    if config.name != "shakespeare":
        raise DataError(f"data is {config.name!r}; allowed are 'shakespeare' and 'tokens'")
    path = SHAKESPEARE if config.path is None else Path(config.path).expanduser()
    return TextTokens(path, load_tokenizer(config.tokenizer, config.tokenizer_path), block_size, seed)
