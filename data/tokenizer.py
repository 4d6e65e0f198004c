"""Tokenizers: text to token ids and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
_GPT2_OFFLINE = (
    "without a network, give a folder that holds vocab.bpe and encoder.json as data.tokenizer_path, "
    "or set TIKTOKEN_CACHE_DIR to tiktoken's filled cache"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded. The message is one line."""


class Tokenizer(Protocol):
    name: str
    vocab_size: int  # ids are below it
    end_of_text: int | None  # the id to put between documents; `encode` never gives it

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. What looks like a special token is text like any other."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no UTF-8, as samples may be, becomes U+FFFD."""
        ...


def load_tokenizer(name: str, path: str | None = None) -> Tokenizer:
    """The tokenizer `name`.

    - "bytes": the 256 bytes of UTF-8.
    - "gpt2": GPT-2's, from the folder `path` with its vocab.bpe and encoder.json; without `path`, tiktoken's,
      which downloads these at first use into TIKTOKEN_CACHE_DIR.
    - Any other: what `transformers.AutoTokenizer` loads from `path`, or from `name` without it.

    Raises TokenizerError if it cannot be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(path)
    return TransformersTokenizer(name, path)


class ByteTokenizer:
    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class GPT2Tokenizer:
    name = "gpt2"
    end_of_text: int | None

    def __init__(self, path: str | None) -> None:
        import tiktoken

        if path is not None:
            self._encoding = _gpt2_from_folder(Path(path).expanduser())
        else:
            try:
                self._encoding = tiktoken.get_encoding("gpt2")
            except (
                OSError,
                ValueError,
            ) as error:  # OSError: requests' errors are such; ValueError: a wrong checksum
                raise TokenizerError(
                    f"tokenizer 'gpt2': tiktoken has no vocabulary ({_line(error)}); {_GPT2_OFFLINE}"
                ) from error
        self.vocab_size = self._encoding.n_vocab
        self.end_of_text = self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))


def _gpt2_from_folder(folder: Path):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    files = {name: folder / name for name in _GPT2_SHA256}
    for file in files.values():
        if not file.is_file():
            raise TokenizerError(f"tokenizer 'gpt2': there is no {file}; {_GPT2_OFFLINE}")
    try:
        # The checksums matter for good files too: tiktoken keeps copies by path, and would trust a stale one.
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(files["vocab.bpe"]),
            encoder_json_file=str(files["encoder.json"]),
            vocab_bpe_hash=_GPT2_SHA256["vocab.bpe"],
            encoder_json_hash=_GPT2_SHA256["encoder.json"],
        )
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"tokenizer 'gpt2': {folder} does not hold GPT-2's vocab.bpe and encoder.json ({_line(error)})"
        ) from error
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=50257,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )


class TransformersTokenizer:
    def __init__(self, name: str, path: str | None) -> None:
        from transformers import AutoTokenizer

        if path is not None and not Path(path).expanduser().exists():
            raise TokenizerError(f"tokenizer {name!r}: there is no {path}")
        source = name if path is None else str(Path(path).expanduser())
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source)
        except Exception as error:  # anything: it reads files of many kinds and runs the code of many models
            raise TokenizerError(
                f"tokenizer {name!r}: transformers cannot load {source!r} ({_line(error)}); "
                "allowed are bytes, gpt2, a folder saved by transformers or a name on the Hugging Face hub"
            ) from error
        self.name = name
        self.vocab_size = (
            max(self._tokenizer.get_vocab().values()) + 1
        )  # with added tokens, ids may have gaps
        self.end_of_text = self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list only for a batch
        return text


def _line(error: Exception) -> str:
    """The first line of an error's message, or its type's name."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
