"""Baseline: the closed form of the second backward with N×N tensors, in PyTorch operations.

Forward and first backward are those of `hybrid`. It stands in for published implementations that materialize the scores,
and reproduces none of them. The formulas are the specification's (FlashBoB, arXiv 2609.24089, section 3) read from top to bottom.
"""

from typing import Any

import torch
from torch import Tensor

from ..masking import causal_mask, dropout_keep_mask
from . import with_strides_of
from .hybrid import backward, forward, tangent

__all__ = ["backward", "backward_backward", "forward", "tangent"]


def backward_backward(
    u_q: Tensor | None,
    u_k: Tensor | None,
    u_v: Tensor | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    *,
    scale: float,
    is_causal: bool,
    window_size: int | None,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ⟨dQ, u_q⟩ + ⟨dK, u_k⟩ + ⟨dV, u_v⟩ with respect to q, k, v and do; [B, H, N_q, N_k] tensors in between."""
    batch, heads, num_rows, _ = q.shape
    kv_heads, num_keys = k.shape[1], k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    zeros = {"u_q": (u_q, q), "u_k": (u_k, k), "u_v": (u_v, v)}
    uq, uk, uv = (torch.zeros_like(x) if u is None else u for u, x in zeros.values())
    inputs = q, k, v, do

    def wide(x: Tensor) -> Tensor:  # key heads are repeated for their group's query heads
        return x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1)

    def narrow(x: Tensor) -> Tensor:  # and their gradients summed
        return x.unflatten(1, (kv_heads, -1)).sum(2)

    q, k, v, do, o, uq, uk, uv = map(wide, (q, k, v, do, o, uq, uk, uv))
    s = scale * q @ k.mT
    valid = None
    if is_causal:
        valid = causal_mask(range(num_rows), range(num_keys), num_rows, num_keys, window_size, q.device)
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]
        valid = padding if valid is None else valid & padding
    p = (s - lse.to(dtype).unsqueeze(-1)).exp()
    if valid is not None:
        p = p.masked_fill(~valid, 0.0)
    g: Any = 1.0
    if dropout_p > 0.0:
        assert dropout_seed is not None
        keep = dropout_keep_mask(dropout_seed, dropout_p, batch, heads, range(num_rows), range(num_keys))
        g = keep.to(dtype) / (1.0 - dropout_p)

    a = g * (do @ v.mT)  # A = g ⊙ dP
    delta = (do * o).sum(-1, keepdim=True)  # D
    ds = p * (a - delta)
    f = scale * (uq @ k.mT + q @ uk.mT)
    alpha = (p * f).sum(-1, keepdim=True)
    c = g * (do @ uv.mT)
    p_tilde = c + f * (a - delta) - alpha * a
    e = (p * p_tilde).sum(-1, keepdim=True)
    s_tilde = p * (p_tilde - e)
    grad_q = scale * (s_tilde @ k + ds @ uk)
    grad_k = narrow(scale * (s_tilde.mT @ q + ds.mT @ uq))
    grad_v = narrow((g * p * (f - alpha)).mT @ do)
    grad_do = (g * p) @ uv + (g * p * (f - alpha)) @ v
    grads = grad_q, grad_k, grad_v, grad_do
    return tuple(with_strides_of(x, g.to(x.dtype)) for x, g in zip(inputs, grads))  # type: ignore[return-value]
