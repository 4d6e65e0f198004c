from types import SimpleNamespace

import pytest
import torch

from data import DataError, TextTokens, load_tokenizer, open_data

BLOCK = 16


class Numbered:
    """A tokenizer whose tokens are their own positions, so that a batch shows where it was cut."""

    name = "numbered"
    vocab_size = 10**9
    end_of_text: int | None = None

    def encode(self, text):
        return list(range(len(text)))

    def decode(self, ids):
        return "x" * len(ids)


@pytest.fixture
def numbered(tmp_path):
    def make(length=1000, block_size=BLOCK, seed=0):
        path = tmp_path / "numbered.txt"
        path.write_text("x" * length)
        return TextTokens(path, Numbered(), block_size, seed)

    return make


def epoch(data, number):
    size = data.sequences_per_epoch
    return data.train_batch(number * size, size)[0]


# --- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [170, 171, 185, 999, 1000, 4321])
def test_an_epoch_has_every_block_once(numbered, length):
    data = numbered(length)
    train_size = length - length // 10
    for number in range(20):
        starts = epoch(data, number)[:, 0].sort().values
        offset = int(starts[0])
        # One block after the other from the offset on, with no room for two more.
        assert torch.equal(starts, offset + BLOCK * torch.arange(len(starts)))
        assert train_size - 2 * BLOCK < len(starts) * BLOCK + 1 <= train_size
        assert 0 <= offset and starts[-1] + BLOCK < train_size


def test_sequences_are_contiguous_and_targets_come_next(numbered):
    tokens, targets = numbered().train_batch(7, 5)
    assert tokens.shape == targets.shape == (5, BLOCK)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(BLOCK))
    assert torch.equal(targets, tokens + 1)


def test_tokens_are_the_text(tmp_path):
    path = tmp_path / "text.txt"
    text = "".join(chr(97 + i * i % 26) for i in range(400)) + "é\r\n" * 20
    path.write_bytes(text.encode())
    data = TextTokens(path, load_tokenizer("bytes"), BLOCK, 0)
    assert data.vocab_size == 256
    contents = path.read_bytes()
    for tokens, targets in [data.train_batch(0, 30), *data.validation_batches(1, 9)]:
        for row, shifted in zip(tokens.tolist(), targets.tolist()):
            assert bytes(row + shifted[-1:]) in contents
            assert row[1:] == shifted[:-1]


def test_a_sequence_depends_on_its_number_alone(numbered):
    data = numbered()
    count = 3 * data.sequences_per_epoch
    tokens, targets = data.train_batch(0, count)
    for size in (1, 5, 32):  # in micro-batches, over the borders of epochs
        parts = [data.train_batch(i, min(size, count - i)) for i in range(0, count, size)]
        assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    ranks = [numbered() for _ in range(4)]  # taking turns, as the ranks of a job would
    strided = [ranks[i // 2 % 4].train_batch(i, 2)[0] for i in range(0, count - count % 2, 2)]
    assert torch.equal(torch.cat(strided), tokens[: count - count % 2])
    backwards = [data.train_batch(i, 1)[0] for i in reversed(range(count))]
    assert torch.equal(torch.cat(backwards[::-1]), tokens)


def test_epochs_and_seeds_differ(numbered):
    data = numbered()
    first, second = epoch(data, 0), epoch(data, 1)
    other = epoch(numbered(seed=1), 0)
    large = epoch(numbered(seed=2**32), 0)  # a seed cut to 32 bits would give the first again
    for some in (second, other, large):
        assert not torch.equal(first, some)
        assert not torch.equal(first.argsort(0), some.argsort(0))  # the order, not only the offset
    assert not torch.equal(second, other)
    assert not torch.equal(first[:, 0], first[:, 0].sort().values)
    assert torch.equal(first, epoch(numbered(), 0))


def test_every_token_of_the_training_part_comes_up(numbered):
    data = numbered(200)
    seen = torch.cat([torch.cat(data.train_batch(i, 1), dim=1).flatten() for i in range(2000)])
    assert torch.equal(seen.unique(), torch.arange(180))


# --- validation ---------------------------------------------------------------------------------------------


def test_validation_is_disjoint_from_training(numbered):
    data = numbered(1005)
    trained = {int(x) for i in range(20) for x in torch.cat(data.train_batch(i * 50, 50)).flatten()}
    held_out = {int(x) for batch in data.validation_batches(4, 99) for x in torch.cat(batch).flatten()}
    assert max(trained) < 905 <= min(held_out)
    assert max(held_out) < 1005


def test_validation_is_fixed_and_evenly_spaced(numbered):
    data = numbered(16_000)  # 1600 tokens held out: 99 sequences
    batches = list(data.validation_batches(4, 5))
    assert [tokens.shape for tokens, _ in batches] == [(4, BLOCK)] * 5
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches])
    gaps = starts.diff()
    assert starts[0] == 14_400
    assert gaps.min() >= BLOCK and gaps.max() - gaps.min() <= BLOCK
    assert 16_000 - starts[-1] <= gaps.max() + BLOCK  # up to the end
    for tokens, targets in batches:
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(BLOCK))
        assert torch.equal(targets, tokens + 1)

    data.train_batch(123, 4)
    for again in (data.validation_batches(4, 5), numbered(16_000, seed=5).validation_batches(4, 5)):
        for (tokens, targets), (same, same_targets) in zip(batches, again, strict=True):
            assert torch.equal(tokens, same) and torch.equal(targets, same_targets)


def test_validation_gives_at_most_what_there_is(numbered):
    data = numbered(1000)  # 100 tokens held out: 6 sequences
    assert [len(tokens) for tokens, _ in data.validation_batches(4, 10)] == [4, 2]
    starts = torch.cat([tokens[:, 0] for tokens, _ in data.validation_batches(4, 10)])
    assert torch.equal(starts, 900 + BLOCK * torch.arange(6))
    assert [len(tokens) for tokens, _ in data.validation_batches(9, 1)] == [6]


# --- errors and the entry -----------------------------------------------------------------------------------


def test_the_shortest_text(numbered):
    data = numbered(10 * (BLOCK + 1))
    assert epoch(data, 0).shape == (data.sequences_per_epoch, BLOCK)
    assert len(list(data.validation_batches(1, 5))) == 1
    with pytest.raises(
        DataError, match=r"numbered.txt: 169 tokens are too few for block_size=16, which needs 170"
    ):
        numbered(10 * (BLOCK + 1) - 1)


def test_files_that_cannot_be_read(tmp_path):
    def read(path):
        return TextTokens(path, load_tokenizer("bytes"), BLOCK, 0)

    with pytest.raises(DataError, match=r"absent.txt: the text cannot be read \(No such file"):
        read(tmp_path / "absent.txt")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory"):
        read(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty.txt: the text is empty"):
        read(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"x" * 300 + b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin.txt: the text is not UTF-8 \(byte 0xe9 at offset 303\)"):
        read(tmp_path / "latin.txt")


def configuration(**changes):
    return SimpleNamespace(
        **{"name": "shakespeare", "path": None, "tokenizer": "bytes", "tokenizer_path": None, **changes}
    )


def test_open_data_gives_the_text_that_ships():
    data = open_data(configuration(), 128, 0)
    assert data.vocab_size == 256
    assert len(data.train_tokens) + len(data.validation_tokens) == 1_115_394
    assert data.tokenizer.decode(data.train_tokens.tokens[:14].tolist()) == "First Citizen:"
    tokens, _ = data.train_batch(0, 3)
    assert tokens.shape == (3, 128)


def test_open_data_reads_a_text_of_one_s_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.txt").write_text("abcdefghij" * 100)
    data = open_data(configuration(path="~/own.txt"), 16, 0)
    assert bytes(data.train_tokens.tokens.tolist()) == b"abcdefghij" * 90


def test_open_data_refuses_other_names():
    with pytest.raises(DataError, match="data is 'c4'; allowed are 'shakespeare', 'tokens' and 'fineweb'"):
        open_data(configuration(name="c4"), 16, 0)
