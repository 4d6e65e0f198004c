"""One module a backend, each with the same four functions (`math` alone is plain PyTorch and has no operators).

    forward(q, k, v, **options)                                              -> (o, lse)
    backward(do, q, k, v, o, lse, **options)                                 -> (dq, dk, dv)
    backward_backward(u_q, u_k, u_v, do, q, k, v, o, lse, dq, **options)     -> (gradients of q, k, v, do)
    tangent(t_q, t_k, t_v, q, k, v, o, lse, **options)                       -> (derivative of o along them)

`options` are scale, is_causal, window_size, key_padding_mask, dropout_p and dropout_seed as in `sdpa_bob`, checked and with
defaults filled in. u_q, u_k, u_v are the cotangents of dq, dk, dv, and t_q, t_k, t_v the tangents of q, k, v; each may be None,
which means zero and costs nothing.

`fused`, `triton` and `tiled` take two options more. `out`, three tensors like q, k, v but for their strides, is where the
gradients of q, k, v are written, and `backward` adds `base`, three tensors of `out`'s strides, to them; k has q's heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def with_strides_of(x: Tensor, result: Tensor) -> Tensor:
    """`result` in the strides of empty_like(x), which the operators' fake implementations promise to compiled code."""
    promised = torch.empty_like(x, device="meta").stride()
    return result if result.stride() == promised else torch.empty_like(x).copy_(result)


def written(
    out: Sequence[Tensor] | None, base: Sequence[Tensor] | None, results: Sequence[Tensor]
) -> Sequence[Tensor]:
    """`results`, or `out` with them and `base` in it: for kernels that make tensors of their own."""
    if out is None:
        return results
    for i, (given, result) in enumerate(zip(out, results)):
        if base is None:
            given.copy_(result)
        else:
            torch.add(result, base[i], out=given)
    return out
