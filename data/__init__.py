"""Text into batches of tokens."""

from pathlib import Path
from typing import Any

from .fineweb import Source, StreamedText
from .sequences import DataError, TokenSequences
from .text import TextTokens
from .tokenizer import Tokenizer, TokenizerError, load_tokenizer
from .tokens import ShardTokens

__all__ = [
    "DataError",
    "ShardTokens",
    "Source",
    "StreamedText",
    "TextTokens",
    "TokenSequences",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
    "open_data",
]

SHAKESPEARE = Path(__file__).parent / "shakespeare" / "tinyshakespeare.txt"


def open_data(
    config: Any,
    block_size: int,
    seed: int,
    *,
    batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> TextTokens | ShardTokens | StreamedText:
    """The data that a configuration names.

    Args:
        config: has `name`, and what the file of that name in configs/data/ has: "shakespeare" (`path`, a text file, None for
            the text that ships with the repository), "tokens" (`path`, a folder of shards) or "fineweb" (a stream); all of
            them `tokenizer` and `tokenizer_path` (as `load_tokenizer` takes them).
        block_size: tokens in a sequence.
        seed: of the order of the training sequences.
        batch_size, rank, world_size: of a stream: sequences of a micro-batch, and who shares the documents.

    Raises DataError or TokenizerError, each with a message of one line.
    """
    if config.name == "tokens":
        folder = Path(config.path).expanduser()
        return ShardTokens(folder, block_size, seed, config.tokenizer, config.tokenizer_path)
    if config.name == "fineweb":
        source = Source(
            config.hub, config.revision, config.split, config.path, config.id_column, config.text_column
        )
        return StreamedText(
            source, config.tokenizer, config.tokenizer_path, block_size, batch_size, seed=seed, rank=rank, world_size=world_size,
            num_workers=config.num_workers, shuffle_window=config.shuffle_window,
            validation_fraction=config.validation_fraction, cross_documents=config.cross_documents,
        )  # fmt: skip
    if config.name != "shakespeare":
        raise DataError(f"data is {config.name!r}; allowed are 'shakespeare', 'tokens' and 'fineweb'")
    path = SHAKESPEARE if config.path is None else Path(config.path).expanduser()
    return TextTokens(path, load_tokenizer(config.tokenizer, config.tokenizer_path), block_size, seed)
