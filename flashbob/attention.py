"""`sdpa_bob`: argument checks and the choice of a backend."""

import math

import torch
from torch import Tensor

from . import operators
from .backends import math as math_backend

BACKENDS = (
    "fused", "triton", "tiled", "math",
    "hybrid", "hvp_materialized", "single_pass_atomic", "three_pass", "paper",
)  # fmt: skip
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256
_DTYPES = {
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}
_chosen: str | None = None


class set_backend:
    """Choose the backend of later calls: one of `BACKENDS`; "auto" or None let each call choose by its device.

    Takes effect at once, for the whole process; as a context manager it ends with the block:

        flashbob.set_backend("tiled")
        with flashbob.set_backend("math"):
            ...

    A call's derivatives run on the backend that ran the call.
    """

    def __init__(self, name: str | None) -> None:
        global _chosen
        if name not in (None, "auto", *BACKENDS):
            raise ValueError(f"backend is {name!r}; allowed are 'auto', {', '.join(map(repr, BACKENDS))}")
        self._previous = _chosen
        _chosen = None if name == "auto" else name

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_) -> None:
        global _chosen
        _chosen = self._previous


def get_backend() -> str:
    """The name last set with `set_backend`; "auto" when each call chooses."""
    return _chosen or "auto"


def resolve_backend(device: torch.device | str) -> str:
    """What the current choice runs on `device`, in words for a log: "tiled", "hybrid (forward and first backward: tiled)"."""
    device = torch.device(device)
    if device.type != "cuda":
        own = "tiled"
        fast = "tiled" if _chosen in ("hybrid", "hvp_materialized") else "triton"
    else:
        from .backends.fused import operator_names

        operators = operator_names(device)
        fast = "triton" if operators is None else f"fused ({operators[0]})"
        own = (
            "triton"
            if operators is None
            else f"triton (with {operators[0]}'s forward and backward where they are faster)"
        )
    if _chosen is None:
        return own
    if _chosen in ("hybrid", "hvp_materialized", "single_pass_atomic", "three_pass"):
        return f"{_chosen} (forward and first backward: {fast})"
    return fast if _chosen == "fused" else _chosen


def sdpa_bob(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: int | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention, softmax(scale · q kᵀ + mask) v, exactly and twice differentiable in O(N) memory.

    Twice means reverse over reverse, forward over reverse and reverse over forward: `torch.autograd.grad`, `torch.autograd.
    forward_ad`, and `torch.func`'s grad, vjp, jvp, jacfwd, hessian and vmap of them.

    Args:
        q: [B, H_q, N_q, d], bf16, fp16, fp32 or (on a CPU) fp64; any strides, nothing is copied. 16 ≤ d ≤ 256.
        k, v: [B, H_kv, N_k, d] like q; H_q is a multiple of H_kv (grouped-query attention).
        is_causal: mask aligned to the bottom right: the last row sees every key. A row that sees no key gives 0.
        scale: positive; 1/√d when None.
        window_size: with is_causal, the number of latest keys that a row sees, itself included.
        key_padding_mask: bool [B, N_k], True = attend.
        dropout_p: probability in [0, 1) of dropping an attention weight. There is no training flag: pass 0 to evaluate.
        dropout_seed: int64 [2] on q's device, (seed, offset); equal seeds give equal masks. Drawn from the device's
            default generator when None.

    Returns:
        [B, H_q, N_q, d] in q's dtype and stride order (under `torch.autocast`, the autocast dtype).

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, its value and what is allowed.
        RuntimeError: when a third derivative is taken.
        NotImplementedError: when forward mode is taken of forward mode (jvp of jvp), or inside `torch.compile`; a graph that
            `make_fx` traced of a jvp does compile.

    Source: FlashBoB (arXiv 2609.24089), sections 3 and 4.
    """
    device_type = q.device.type if isinstance(q, Tensor) else "cpu"
    if device_type in _DTYPES and torch.is_autocast_enabled(device_type):
        q, k, v = (_autocast(x, device_type) for x in (q, k, v))
    _check_tensors(q, k, v)
    _check_options(q, k, is_causal, scale, window_size, key_padding_mask, dropout_p, dropout_seed)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if dropout_p == 0.0:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = torch.randint(2**62, (2,), device=q.device)

    backend = _chosen or "auto"
    if backend == "math":
        return math_backend.attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )
    return operators.attention(
        q, k, v, key_padding_mask, dropout_seed, scale, is_causal, window_size, dropout_p, backend
    )


def _autocast(x: Tensor, device_type: str) -> Tensor:
    """As PyTorch's own autocast of attention does: everything but fp64 becomes the autocast dtype."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a tensor [B, H, N, d] is needed")
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; four dimensions [B, H, N, d], none empty, are needed"
            )
        if x.device != q.device or x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} and q is {q.dtype} on {q.device}; q, k and v must agree in both"
            )
    allowed = _DTYPES.get(q.device.type)
    if allowed is None:
        raise ValueError(f"q is on {q.device}; allowed are {', '.join(_DTYPES)}")
    if q.dtype not in allowed:
        raise TypeError(f"q is {q.dtype}; allowed on {q.device.type} are {', '.join(map(str, allowed))}")
    batch, heads, _, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"q, k, v have shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; "
            "[B, H_q, N_q, d], [B, H_kv, N_k, d] and k's own shape are needed"
        )
    if heads % k.shape[1] != 0:
        raise ValueError(
            f"q has {heads} heads and k has {k.shape[1]}; the first must be a multiple of the second"
        )
    if not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"head dimension is {head_dim}; allowed are {_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}")


def _check_options(q, k, is_causal, scale, window_size, key_padding_mask, dropout_p, dropout_seed) -> None:
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {is_causal!r}; True or False is needed")
    if scale is not None and not (isinstance(scale, int | float) and 0.0 < scale < math.inf):
        raise ValueError(f"scale is {scale!r}; a positive finite number, or None for 1/√d, is needed")
    if window_size is not None:
        if not isinstance(window_size, int) or isinstance(window_size, bool) or window_size < 1:
            raise ValueError(f"window_size is {window_size!r}; a positive integer, or None, is needed")
        if not is_causal:
            raise ValueError(
                f"window_size is {window_size} with is_causal=False; a window needs is_causal=True"
            )
    if not (isinstance(dropout_p, int | float) and 0.0 <= dropout_p < 1.0):
        raise ValueError(f"dropout_p is {dropout_p!r}; a number in [0, 1) is needed")
    expected = (q.shape[0], k.shape[2])
    _check_side_tensor("key_padding_mask", key_padding_mask, torch.bool, expected, q.device)
    _check_side_tensor("dropout_seed", dropout_seed, torch.int64, (2,), q.device)


def _check_side_tensor(name: str, x, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a tensor {list(shape)} of {dtype} is needed")
    if x.dtype != dtype or x.shape != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; {dtype} {list(shape)} on {device} is needed"
        )
