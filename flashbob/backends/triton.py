"""The operators as Triton kernels: CUDA, every feature; under TRITON_INTERPRET=1 also on a CPU.

Same functions and meaning as `tiled`, in bf16, fp16 and fp32 with fp32 sums. O(N) memory: besides the
outputs, at most 16 bytes for a row of a query head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import backward as _backward
from ..kernels import forward as _forward
from ..kernels.column_pass import column_pass
from ..kernels.common import Problem
from ..kernels.row_pass import row_pass
from ..kernels.tangent import tangent as _tangent


def forward(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """O [B, H, N_q, d] in q's dtype and layout; L [B, H, N_q], natural log, fp32."""
    return _forward.forward(Problem.of(q, k, **options), q, k, v)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    base: Sequence[Tensor] | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtype and layout of q, k, v (or in `out`, added to `base`)."""
    return _backward.backward(Problem.of(q, k, **options), do.to(q.dtype), q, k, v, o, lse, out, base)


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
    dq: Tensor | None,
    *,
    out: Sequence[Tensor] | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of Φ = ⟨dQ, U_Q⟩ + ⟨dK, U_K⟩ + ⟨dV, U_V⟩ with respect to Q, K, V and dO, like them; three in `out`.

    dq = None runs the paper's form of the row pass, which computes R = (P ⊙ dP) K in dq's place.
    """
    problem = Problem.of(q, k, **options)
    if u_q is None and u_k is None and u_v is None:
        grad_q, grad_k, grad_v = (x.zero_() for x in out or (torch.empty_like(x) for x in (q, k, v)))
        return grad_q, grad_k, grad_v, torch.zeros_like(do)
    u_q, u_k, u_v = (None if u is None else u.to(q.dtype) for u in (u_q, u_k, u_v))
    do_ = do.to(q.dtype)
    grad_q, grad_do, vectors = row_pass(
        problem, u_q, u_k, u_v, do_, q, k, v, o, lse, dq, out[0] if out else None
    )
    grad_k, grad_v = column_pass(problem, u_q, u_k, u_v, do_, q, k, v, vectors, out[1:] if out else None)
    return grad_q, grad_k, grad_v, grad_do.to(do.dtype)


def tangent(
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    **options,
) -> Tensor:
    """Derivative of O along (t_q, t_k, t_v), like q."""
    if t_q is None and t_k is None and t_v is None:
        return torch.zeros_like(q)
    t_q, t_k, t_v = (None if t is None else t.to(q.dtype) for t in (t_q, t_k, t_v))
    return _tangent(Problem.of(q, k, **options), t_q, t_k, t_v, q, k, v, o, lse)
