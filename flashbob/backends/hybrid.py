"""Baseline: a fast forward and first backward, and PyTorch's double backward of math attention for the second.

The arrangement that a PyTorch user can reach by hand (the paper's matched hybrid): the attention is recomputed with N×N
tensors inside the second backward. `torch.func.vjp` does it, since `autograd.grad` cannot run inside an operator.
"""

from typing import Any

import torch
from torch import Tensor

from . import math, tiled, with_strides_of


def _fast(q: Tensor) -> Any:
    if not q.is_cuda:
        return tiled
    from . import fused

    return fused


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """As `fused` on CUDA, as `tiled` on a CPU."""
    return _fast(q).forward(q, k, v, **options)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused` on CUDA, as `tiled` on a CPU."""
    return _fast(q).backward(do, q, k, v, o, lse, **options)


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
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ⟨dq, u_q⟩ + ⟨dk, u_k⟩ + ⟨dv, u_v⟩ with respect to (q, k, v, do), by differentiating math attention."""

    def first_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor):
        return torch.func.vjp(lambda *qkv: math.attention(*qkv, **options), q, k, v)[1](do)

    cotangents = tuple(torch.zeros_like(x) if u is None else u for u, x in ((u_q, q), (u_k, k), (u_v, v)))
    grads = torch.func.vjp(first_backward, q, k, v, do)[1](cotangents)
    grad_q, grad_k, grad_v, grad_do = (with_strides_of(x, g) for x, g in zip((q, k, v, do), grads))
    return grad_q, grad_k, grad_v, grad_do


def tangent(
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    **options: Any,
) -> Tensor:
    """As `triton` on CUDA, as `tiled` on a CPU."""
    return _fast(q).tangent(t_q, t_k, t_v, q, k, v, o, lse, **options)
