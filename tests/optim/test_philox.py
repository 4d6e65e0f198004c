"""Philox-4x32-10 against the known answers that its authors publish with Random123 (tests/kat_vectors)."""

import pytest
import torch

from flashbob.philox import philox_4x32

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers_as_integers(counter, key, expected):
    assert [int(w) for w in philox_4x32(tuple(words(counter)), tuple(words(key)))] == words(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_known_answers_as_one_broadcast_batch(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    counters, keys, expected = (
        torch.tensor([words(row[i]) for row in KNOWN_ANSWERS], device=device) for i in range(3)
    )
    out = philox_4x32(tuple(counters.unbind(1)), tuple(keys.unbind(1)))
    assert all(w.dtype == torch.int64 and w.device.type == device for w in out)
    assert torch.equal(torch.stack(out, dim=1), expected)


def test_integers_and_tensors_give_the_same_words():
    column = torch.arange(5)[:, None]
    row = torch.arange(7)
    mixed = philox_4x32((column, 3, row, 2**32 - 1), (torch.tensor(17), 2**31))
    assert all(w.shape == (5, 7) for w in mixed)
    for i in range(5):
        for j in range(7):
            single = philox_4x32((i, 3, j, 2**32 - 1), (17, 2**31))
            assert [int(w[i, j]) for w in mixed] == [int(w) for w in single]
