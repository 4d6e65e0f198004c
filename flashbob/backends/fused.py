"""PyTorch's fused forward and first backward (cuDNN's or flash-attention's), and our second backward.

The operators are PyTorch's private ones, for the public function gives no L and no separate backward. Their signatures are
compared with those that this module was written for; if one differs, `triton` runs instead, after one warning. So it does
for whatever they lack: dropout, windows, padding, fewer key heads, rectangular causal masks (theirs are aligned to the top
left), fp32, and head dimensions that are no multiple of 8 or above 128.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import triton, with_strides_of, written
from .triton import backward_backward, tangent

__all__ = ["able", "backward", "backward_backward", "forward", "operator_names", "tangent"]

_aten = torch.ops.aten
# name: (compute capability from which on it is taken, forward, backward), the best first
_OPERATORS = {
    "cuDNN": (9, "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
    "flash": (8, "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
}
_SCHEMAS = {
    "_scaled_dot_product_cudnn_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
        "Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        "Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


@functools.cache
def operator_names(device: torch.device) -> tuple[str, str, str] | None:
    """("cuDNN" or "flash", its forward, its backward) for a device, None where there is none."""
    if device.type != "cuda":
        return None
    major, _ = torch.cuda.get_device_capability(device)
    for library, (capability, forward_name, backward_name) in _OPERATORS.items():
        available = library != "cuDNN" or torch.backends.cudnn.is_available()
        if major >= capability and available and _as_expected(forward_name) and _as_expected(backward_name):
            return library, forward_name, backward_name
    return None


def _as_expected(name: str) -> bool:
    expected = f"aten::{name}{_SCHEMAS[name]}"
    actual = str(getattr(_aten, name).default._schema) if hasattr(_aten, name) else "missing"
    if actual != expected:
        warnings.warn(
            f"flashbob does not use PyTorch's {name}: its signature in torch {torch.__version__} is not the one that "
            "flashbob was written for; the triton backend runs instead",
            stacklevel=2,
        )
    return actual == expected


def able(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    """Whether the fused operators take the call."""
    plain = (
        options["window_size"] is None and options["key_padding_mask"] is None and options["dropout_p"] == 0.0
    )
    return (
        plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[1] == k.shape[1]
        and not (options["is_causal"] and q.shape[2] != k.shape[2])
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 128
        and all(x.stride(3) == 1 and x.data_ptr() % 16 == 0 for x in (q, k, v))
        and operator_names(q.device) is not None
    )


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(O like q, L fp32 [B, H, N_q])."""
    if not able(q, k, v, **options):
        return triton.forward(q, k, v, **options)
    library, name, _ = operator_names(q.device)  # type: ignore[misc]
    bias = {"attn_bias": None, "compute_log_sumexp": True} if library == "cuDNN" else {}
    with torch.cuda.device_of(q):
        o, lse, *_ = getattr(_aten, name)(
            q, k, v, is_causal=options["is_causal"], scale=options["scale"], **bias
        )
    return with_strides_of(q, o), lse.reshape(q.shape[:3])


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
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV), like q, k, v (or copied to `out`, with `base` added: PyTorch's operators allocate their results)."""
    if not able(q, k, v, **options):
        return triton.backward(do, q, k, v, o, lse, out=out, base=base, **options)
    library, _, name = operator_names(q.device)  # type: ignore[misc]
    seed, offset = _no_dropout(q.device)
    num_rows, num_keys = q.shape[2], k.shape[2]
    do, lse = do.to(q.dtype).contiguous(), lse.contiguous()
    scale, causal = options["scale"], options["is_causal"]
    with torch.cuda.device_of(q):
        if library == "cuDNN":
            grads = getattr(_aten, name)(
                do,
                q,
                k,
                v,
                o,
                lse.unsqueeze(-1),
                seed,
                offset,
                None,
                None,
                None,
                num_rows,
                num_keys,
                0.0,
                causal,
                scale=scale,
            )
        else:
            grads = getattr(_aten, name)(
                do, q, k, v, o, lse, None, None, num_rows, num_keys, 0.0, causal, seed, offset, scale=scale
            )
    if out is None:
        grads = [with_strides_of(x, g) for g, x in zip(grads, (q, k, v))]
    dq, dk, dv = written(out, base, grads)
    return dq, dk, dv


@functools.cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset, which nothing reads at p = 0."""
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros(
        (), dtype=torch.int64, device=device
    )
