"""Which keys a row may attend to, and which of them dropout keeps: the two masks that every backend agrees on."""

import torch
from torch import Tensor

from .philox import philox_4x32

_WORD = 0xFFFFFFFF


def causal_mask(
    rows: range, keys: range, num_rows: int, num_keys: int, window_size: int | None, device: torch.device
) -> Tensor:
    """Bool [len(rows), len(keys)], True = attend.

    Aligned to the bottom right: the last of `num_rows` rows sees the last of `num_keys` keys. With a window w, row i sees
    key j when 0 <= i + (num_keys - num_rows) - j < w.
    """
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    distance = i + (num_keys - num_rows) - j
    valid = distance >= 0
    return valid if window_size is None else valid & (distance < window_size)


def dropout_keep_mask(
    dropout_seed: Tensor, dropout_p: float, batch: int, heads: int, rows: range, keys: range
) -> Tensor:
    """Bool [batch, heads, len(rows), len(keys)], True = kept with probability 1 - dropout_p.

    Counter-based, so that any tile can be recomputed without storing the mask. `dropout_seed` is int64 [2], (seed, offset).
    Philox-4x32-10 with key (low word of seed, high word of seed) and counter (key index // 4, row, batch · heads + head,
    low word of offset) gives four words; word number (key index % 4) belongs to the key, which is kept when the word is
    at least dropout_p · 2³².
    """
    device = dropout_seed.device
    seed, offset = dropout_seed.unbind()
    first = keys.start // 4
    quads = torch.arange(first, (keys.stop + 3) // 4, device=device)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    words = philox_4x32((quads, row, head, offset & _WORD), (seed & _WORD, (seed >> 32) & _WORD))
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(-2)
    start = keys.start - 4 * first
    return words[..., start : start + len(keys)] >= round(dropout_p * 2**32)
