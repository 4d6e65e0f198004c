"""Baseline: α in a pass of its own, then the row pass, then the column pass (the three-pass form of the paper, its Table 8).

The first two are plain Triton kernels; the column pass is the library's.
"""

from typing import Any

from torch import Tensor

from ..kernels import baselines
from ..kernels.common import Problem
from .fused import backward, forward, tangent

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
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ⟨dq, u_q⟩ + ⟨dk, u_k⟩ + ⟨dv, u_v⟩ with respect to q, k, v and do, each like its input."""
    problem = Problem.of(q, k, **options)
    cotangents = [None if u is None else u.to(q.dtype) for u in (u_q, u_k, u_v)]
    grad_q, grad_k, grad_v, grad_do = baselines.three_pass(
        problem, cotangents, do.to(q.dtype), q, k, v, o, lse
    )
    return grad_q, grad_k, grad_v, grad_do.to(do.dtype)
