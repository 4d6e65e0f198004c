"""PyTorch's materializing attention, as users have it: no operator in between, autograd all the way. The reference."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..masking import causal_mask, dropout_keep_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    is_causal: bool,
    window_size: int | None,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v with N×N tensors; [B, H, N_q, d] like q. Differentiable any number of times."""
    batch, heads, num_rows, _ = q.shape
    num_keys = k.shape[2]
    # PyTorch aligns is_causal to the top left; that is ours only when the matrix is square.
    plain_causal = is_causal and window_size is None and num_rows == num_keys and key_padding_mask is None
    mask = None
    if is_causal and not plain_causal:
        mask = causal_mask(range(num_rows), range(num_keys), num_rows, num_keys, window_size, q.device)
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        mask = padding if mask is None else mask & padding
    enable_gqa = k.shape[1] != heads
    if dropout_p == 0.0:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=plain_causal, scale=scale, enable_gqa=enable_gqa
            )
    # PyTorch's function draws a mask of its own, so with dropout the same steps are written out around ours.
    assert dropout_seed is not None
    if enable_gqa:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = scale * (q @ k.mT)
    if plain_causal:
        mask = causal_mask(range(num_rows), range(num_keys), num_rows, num_keys, None, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    p = scores.softmax(-1)
    if mask is not None:
        p = p.masked_fill(~mask, 0.0)  # a row without a key came out uniform
    keep = dropout_keep_mask(dropout_seed, dropout_p, batch, heads, range(num_rows), range(num_keys))
    return (p * keep / (1.0 - dropout_p)) @ v
