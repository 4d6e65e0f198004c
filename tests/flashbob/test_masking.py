"""The dropout mask: a pure function of its counter, and a fair one."""

import pytest
import torch

from flashbob import sdpa_bob, set_backend
from flashbob.masking import causal_mask, dropout_keep_mask
from flashbob.philox import philox_4x32

SEED = torch.tensor([2**61 + 12345, 678])


@pytest.mark.parametrize(
    "rows,keys", [((0, 5), (0, 9)), ((3, 8), (4, 8)), ((7, 20), (5, 31)), ((31, 32), (30, 31))]
)
def test_tiles_agree_with_the_whole(rows, keys):
    whole = dropout_keep_mask(SEED, 0.4, 2, 3, range(32), range(33))
    tile = dropout_keep_mask(SEED, 0.4, 2, 3, range(*rows), range(*keys))
    assert torch.equal(tile, whole[:, :, rows[0] : rows[1], keys[0] : keys[1]])


def test_the_written_counter():
    """The definition in the docstring, for single elements, so that other implementations can be held to it."""
    seed, offset = SEED.tolist()
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 17, 29), (1, 0, 5, 3)]:
        words = philox_4x32((j // 4, i, b * 3 + h, offset % 2**32), (seed % 2**32, seed >> 32))
        expected = int(words[j % 4]) >= round(0.4 * 2**32)
        assert dropout_keep_mask(SEED, 0.4, 2, 3, range(32), range(33))[b, h, i, j].item() == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_share(p):
    kept = dropout_keep_mask(SEED, p, 2, 2, range(256), range(256)).double()
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * deviation
    assert (kept.mean((0, 1, 3)) - (1 - p)).abs().max() < 5 * (p * (1 - p) / 1024) ** 0.5


def test_seed_offset_and_head_matter():
    masks = [
        dropout_keep_mask(torch.tensor(s), 0.5, 1, 2, range(64), range(64))
        for s in ([1, 0], [1, 1], [2, 0], [1 << 33, 0])
    ]
    flat = torch.stack([m[0, h].flatten() for m in masks for h in (0, 1)]).double() * 2 - 1
    correlation = flat @ flat.T / flat.shape[1]
    assert (correlation - torch.eye(8)).abs().max() < 5 / 64


def test_drawn_seed_follows_the_default_generator():
    q = torch.randn(1, 2, 16, 16)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(sdpa_bob(q, q, q, dropout_p=0.5))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_backends_drop_the_same_weights():
    q = torch.randn(2, 2, 40, 16, dtype=torch.float64)
    with set_backend("math"):
        expected = sdpa_bob(q, q, q, dropout_p=0.5, dropout_seed=SEED)
    torch.testing.assert_close(sdpa_bob(q, q, q, dropout_p=0.5, dropout_seed=SEED), expected)


def test_causal_mask_is_aligned_to_the_bottom_right():
    device = torch.device("cpu")
    assert causal_mask(range(2), range(4), 2, 4, None, device).tolist() == [[True] * 3 + [False], [True] * 4]
    assert causal_mask(range(3), range(2), 3, 2, None, device).tolist() == [
        [False] * 2,
        [True, False],
        [True] * 2,
    ]
    assert causal_mask(range(2), range(4), 2, 4, 2, device).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
