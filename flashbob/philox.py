"""Philox-4x32-10, the counter-based generator behind dropout masks and Hutchinson probes.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Word = int | Tensor


def philox_4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    `counter` and `key` hold integers or int64 tensors with values in [0, 2³²), which broadcast together.
    Returns int64 tensors with values in [0, 2³²), the same on every device.
    """
    c0, c1, c2, c3 = (
        counter  # integers stay integers until they meet a tensor: no copy to the device, no wait for it
    )
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2⁶⁴, which keeps all 64 bits of the unsigned product (as integers do).
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.as_tensor(c0), torch.as_tensor(c1), torch.as_tensor(c2), torch.as_tensor(c3)
