"""Attention's four operators: schema, fake implementation, autograd formula.

    flashbob::forward            (q, k, v)                               -> (o, lse)
    flashbob::backward           (do, q, k, v, o, lse)                   -> (dq, dk, dv)
    flashbob::backward_backward  (u_q, u_k, u_v, do, q, k, v, o, lse, dq) -> (gradients of q, k, v, do)
    flashbob::tangent            (t_q, t_k, t_v, q, k, v, o, lse)        -> derivative of o along (t_q, t_k, t_v)

each followed by the same options: key_padding_mask, dropout_seed, scale, is_causal, window_size, dropout_p, backend.

The last is forward mode's. With φ = ⟨do, O⟩, whose gradient in (q, k, v, do) is (dq, dk, dv, o), `backward_backward` is φ's
Hessian times (u_q, u_k, u_v, 0). A Hessian is symmetric, so all derivatives of a tangent are made of the same operators:

    derivative of o along (t_q, t_k, t_v)                       its part for do, which `tangent` computes alone
    derivative of (dq, dk, dv) along (t_do, t_q, t_k, t_v)      its parts for q, k, v with u = t, plus backward(t_do)
    gradient of ⟨do, tangent⟩ in (q, k, v), (t_q, t_k, t_v)     its parts for q, k, v with u = t; backward(do)

Two more, `backward_packed` and `backward_backward_packed`, write the gradients of q, k, v into one tensor [B, N, 3, H, d], as the
derivatives of a packed projection want them. Nothing calls them but graphs of derivatives that put them there.

`attention` calls them through autograd twice over. PyTorch has two mechanisms for that and needs both here: under
`torch.compile` an operator with a registered formula is one opaque node of the graph; in eager mode such an operator
refuses `torch.func`, which `autograd.Function`s with `setup_context` and `vmap` support. The formulas are the same.
"""

import functools
import importlib
import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_fwd_grad_enabled, _len_torch_dispatch_stack
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

_NUM_OPTIONS = 7
_NO_GRADIENTS = (None,) * _NUM_OPTIONS
_SCHEMA_OPTIONS = (
    "Tensor? key_padding_mask, Tensor? dropout_seed, float scale, bool is_causal, int? window_size, float dropout_p, "
    "str backend"
)


def _run(
    pass_name: str,
    device_type: str,
    tensors: tuple[Tensor | None, ...],
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    is_causal: bool,
    window_size: int | None,
    dropout_p: float,
    backend: str,
    **results: Any,
) -> Any:
    if backend == "auto":
        backend = _choose(pass_name, tensors, window_size, key_padding_mask, dropout_p)
    module = importlib.import_module(f".backends.{backend}", __package__)
    # A backward with create_graph=True may run inside the user's autocast region, which must not round our products.
    with torch.autocast(device_type, enabled=False):
        return getattr(module, pass_name)(
            *tensors,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            **results,
        )


def _run_operator(pass_name: str, tensors: tuple[Tensor | None, ...], *options, **results) -> Any:
    # A compiled function calls an operator with whatever it was given. `Function`s, which have a `jvp`, switch tangents off.
    if _is_fwd_grad_enabled() and any(x is not None and _has_tangent(x) for x in tensors):
        _refuse_compiled_forward_mode()
    return _run(pass_name, tensors[-1].device.type, tensors, *options, **results)  # type: ignore[union-attr]


# From how many tokens on cuDNN beats our own kernels, by pass and head dimension: docs/kernels.md has the figures (H200).
_CUDNN_FROM = {("forward", 64): 4096, ("backward", 64): 8192, ("forward", 128): 1024, ("backward", 128): 4096}


def _choose(
    pass_name: str, tensors: tuple[Tensor | None, ...], window_size, key_padding_mask, dropout_p
) -> str:
    """The backend of a pass. Every backend's O and L serve every other's derivatives: the same numbers, up to rounding."""
    if not tensors[-1].is_cuda:  # type: ignore[union-attr]  # v, L or dQ
        return "tiled"
    if (
        pass_name in ("backward_backward", "tangent")
        or window_size is not None
        or key_padding_mask is not None
        or dropout_p > 0.0
    ):
        return "triton"
    _, _, length, head_dim = tensors[0].shape  # type: ignore[union-attr]  # of Q or dO
    fused = length >= _CUDNN_FROM.get((pass_name, head_dim), math.inf) and _has_cudnn(tensors[0].device)  # type: ignore
    return "fused" if fused else "triton"


@functools.cache
def _has_cudnn(device: torch.device) -> bool:
    from .backends.fused import operator_names

    names = operator_names(device)
    return names is not None and names[0] == "cuDNN"


@torch.library.custom_op(
    "flashbob::forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor)",
)
def forward(q, k, v, *options):
    """O [B, H, N_q, d] like q, and L [B, H, N_q] in fp32 (fp64 for fp64)."""
    return _run_operator("forward", (q, k, v), *options)


@torch.library.custom_op(
    "flashbob::backward",
    mutates_args=(),
    schema=(
        f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def backward(do, q, k, v, o, lse, *options):
    """dQ, dK, dV, like q, k, v."""
    return _run_operator("backward", (do, q, k, v, o, lse), *options)


@torch.library.custom_op(
    "flashbob::backward_backward",
    mutates_args=(),
    schema=(
        "(Tensor? u_q, Tensor? u_k, Tensor? u_v, Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"Tensor dq, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def backward_backward(u_q, u_k, u_v, do, q, k, v, o, lse, dq, *options):
    """Gradients of ⟨dQ, u_q⟩ + ⟨dK, u_k⟩ + ⟨dV, u_v⟩ with respect to q, k, v and do, like them."""
    return _run_operator("backward_backward", (u_q, u_k, u_v, do, q, k, v, o, lse, dq), *options)


@torch.library.custom_op(
    "flashbob::tangent",
    mutates_args=(),
    schema=(
        "(Tensor? t_q, Tensor? t_k, Tensor? t_v, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{_SCHEMA_OPTIONS}) -> Tensor"
    ),
)
def tangent(t_q, t_k, t_v, q, k, v, o, lse, *options):
    """Derivative of O along (t_q, t_k, t_v), like q."""
    return _run_operator("tangent", (t_q, t_k, t_v, q, k, v, o, lse), *options)


def _empty_packed(q: Tensor) -> Tensor:
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, 3, heads, head_dim)


def _unpacked(packed: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in packed.unbind(2))


@torch.library.custom_op(
    "flashbob::backward_packed",
    mutates_args=(),
    schema=(
        "(Tensor? base, Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{_SCHEMA_OPTIONS}) -> Tensor"
    ),
)
def backward_packed(base, do, q, k, v, o, lse, *options):
    """(dQ, dK, dV) as one contiguous tensor [B, N, 3, H, d], added to `base` like it if given; q, k, v are of one shape.

    The backend is "auto", "fused", "triton" or "tiled"."""
    packed = _empty_packed(q)
    results = {"out": _unpacked(packed), "base": None if base is None else _unpacked(base.contiguous())}
    _run_operator("backward", (do, q, k, v, o, lse), *options, **results)
    return packed


@torch.library.custom_op(
    "flashbob::backward_backward_packed",
    mutates_args=(),
    schema=(
        "(Tensor? u_q, Tensor? u_k, Tensor? u_v, Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"Tensor dq, {_SCHEMA_OPTIONS}) -> (Tensor, Tensor)"
    ),
)
def backward_backward_packed(u_q, u_k, u_v, do, q, k, v, o, lse, dq, *options):
    """As `backward_backward`, the gradients of q, k, v as `backward_packed` has them; and that of do."""
    packed = _empty_packed(q)
    tensors = u_q, u_k, u_v, do, q, k, v, o, lse, dq
    *_, grad_do = _run_operator("backward_backward", tensors, *options, out=_unpacked(packed))
    return packed, grad_do


@forward.register_fake
def _(q, k, v, *options):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


@backward.register_fake
def _(do, q, k, v, o, lse, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@backward_backward.register_fake
def _(u_q, u_k, u_v, do, q, k, v, o, lse, dq, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(do)


@backward_packed.register_fake
def _(base, do, q, k, v, o, lse, *options):
    return _empty_packed(q)


@backward_backward_packed.register_fake
def _(u_q, u_k, u_v, do, q, k, v, o, lse, dq, *options):
    return _empty_packed(q), torch.empty_like(do)


@tangent.register_fake
def _(t_q, t_k, t_v, q, k, v, o, lse, *options):
    return torch.empty_like(q)


def _refuse_third_derivative(ctx: Any, *grad_outputs: Any):
    raise RuntimeError(
        "sdpa_bob is differentiable twice and a third derivative was asked for; "
        "flashbob.set_backend('math') differentiates any number of times, with N×N tensors"
    )


def _refuse_second_tangent(ctx: Any, *grad_inputs: Any):
    raise NotImplementedError(
        "sdpa_bob has no forward-mode derivative of a forward-mode derivative (jvp of jvp, jacfwd of jacfwd); take one of the "
        "two in reverse mode, or flashbob.set_backend('math')"
    )


def _refuse_compiled_forward_mode():
    raise NotImplementedError(
        "sdpa_bob has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad) under torch.compile; trace the derivative "
        "with make_fx and compile its graph, or do not compile"
    )


def _has_tangent(x: Tensor) -> bool:
    """Whether x carries a forward-mode tangent, which would be dropped without a word: the derivative would be zero."""
    try:
        return unpack_dual(x).tangent is not None
    except RuntimeError:  # inside an operator PyTorch refuses to unpack a dual tensor, and only a dual one
        return True


# --- eager: autograd.Function --------------------------------------------------------------------------------------


def _fold_batch(function: type[Function], info, in_dims, *args):
    """vmap: the mapped dimension becomes part of the batch, so that one launch serves all of it.

    With dropout every slice is a call of its own: the mask depends on the batch index, and a slice must get the mask
    that it would get alone.
    """
    size = info.batch_size
    if _options(args)["dropout_p"] > 0.0:
        slices = [
            function.apply(*(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)))
            for i in range(size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    else:

        def fold(x, d):
            if not isinstance(x, Tensor):
                return x
            x = x.unsqueeze(0).expand(size, *x.shape) if d is None else x.movedim(d, 0)
            return x.flatten(0, 1)

        folded = function.apply(*(fold(x, d) for x, d in zip(args, in_dims, strict=True)))
        outputs = tuple(y.unflatten(0, (size, -1)) for y in folded)
    return outputs, (0,) * len(outputs)


def _options(args: tuple) -> dict[str, Any]:
    names = ("key_padding_mask", "dropout_seed", "scale", "is_causal", "window_size", "dropout_p", "backend")
    return dict(zip(names, args[-_NUM_OPTIONS:], strict=True))


def _save(ctx, tensors: tuple, options: tuple) -> None:
    key_padding_mask, dropout_seed, *ctx.plain_options = options
    saved = *tensors, key_padding_mask, dropout_seed
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)  # until `jvp`, which comes at once or never


def _saved(ctx) -> tuple[tuple, tuple]:
    *tensors, key_padding_mask, dropout_seed = ctx.saved_tensors
    return tuple(tensors), (key_padding_mask, dropout_seed, *ctx.plain_options)


def _of_given(inputs: tuple, gradients: tuple) -> tuple:
    return tuple(None if x is None else g for x, g in zip(inputs, gradients))


def _setup_forward(ctx, inputs, output):
    (q, k, v), options = inputs[:3], inputs[3:]
    o, lse = output
    # The second backward's graph passes through the forward by way of O, whose share is in the formulas already: its
    # gradient is None there, and materialized it would cost a first backward of zeros.
    ctx.set_materialize_grads(False)
    _save(ctx, (q, k, v, o, lse), options)


def _setup_backward(ctx, inputs, output):
    tensors, options = inputs[:6], inputs[6:]
    ctx.set_materialize_grads(False)
    _save(ctx, (*tensors, output[0]), options)


def _setup_backward_backward(ctx, inputs, output):
    pass


def _setup_tangent(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    _save(ctx, inputs[:8], inputs[8:])


def _call(pass_name: str, args: tuple) -> Any:
    """The operator where something must see it as one node (tracing, fake tensors, `torch.func`), else its body.

    PyTorch's way from an operator to a body in Python costs more host time than a short sequence's kernels take.
    """
    tensors, options = args[:-_NUM_OPTIONS], args[-_NUM_OPTIONS:]
    plain = all(x is None or type(x) in (Tensor, Parameter) for x in tensors)
    if not plain or _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active():
        return getattr(torch.ops.flashbob, pass_name).default(*args)
    return _run(pass_name, tensors[-1].device.type, tensors, *options)


class _Forward(Function):
    @staticmethod
    def forward(*args):
        return _call("forward", args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        _setup_forward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, do, _):
        if do is None:
            return (None,) * (3 + _NUM_OPTIONS)
        tensors, options = _saved(ctx)
        return *_Backward.apply(do, *tensors, *options), *_NO_GRADIENTS

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold_batch(_Forward, info, in_dims, *args)

    @staticmethod
    def jvp(ctx, t_q, t_k, t_v, *_):
        tensors, options = _saved(ctx)
        (t_o,) = _Tangent.apply(t_q, t_k, t_v, *tensors, *options)
        return t_o, None


class _Backward(Function):
    @staticmethod
    def forward(*args):
        return _call("backward", args)

    setup_context = staticmethod(_setup_backward)

    @staticmethod
    def backward(ctx, u_q, u_k, u_v):
        tensors, options = _saved(ctx)
        dq_, dk_, dv_, ddo_ = _BackwardBackward.apply(u_q, u_k, u_v, *tensors, *options)
        return ddo_, dq_, dk_, dv_, None, None, *_NO_GRADIENTS

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold_batch(_Backward, info, in_dims, *args)

    @staticmethod
    def jvp(ctx, t_do, t_q, t_k, t_v, *_):
        # Nothing is added for the tangents of o and lse: their share is in the formulas, as in `backward`.
        tensors, options = _saved(ctx)
        if t_q is None and t_k is None and t_v is None:
            return _Backward.apply(t_do, *tensors[1:-1], *options)
        tangents = _BackwardBackward.apply(t_q, t_k, t_v, *tensors, *options)[:3]
        if t_do is None:
            return tangents
        return tuple(x + y for x, y in zip(tangents, _Backward.apply(t_do, *tensors[1:-1], *options)))


class _BackwardBackward(Function):
    @staticmethod
    def forward(*args):
        return _call("backward_backward", args)

    setup_context = staticmethod(_setup_backward_backward)
    backward = staticmethod(_refuse_third_derivative)
    jvp = staticmethod(_refuse_third_derivative)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold_batch(_BackwardBackward, info, in_dims, *args)


class _Tangent(Function):
    @staticmethod
    def forward(*args):
        return (_call("tangent", args),)

    setup_context = staticmethod(_setup_tangent)

    @staticmethod
    def backward(ctx, do):
        if do is None:
            return (None,) * (8 + _NUM_OPTIONS)
        (t_q, t_k, t_v, *tensors), options = _saved(ctx)
        first = _Backward.apply(do, *tensors, *options)
        second = _BackwardBackward.apply(t_q, t_k, t_v, do, *tensors, first[0], *options)[:3]
        return *_of_given((t_q, t_k, t_v), first), *second, None, None, *_NO_GRADIENTS

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold_batch(_Tangent, info, in_dims, *args)

    jvp = staticmethod(_refuse_second_tangent)


for _function in (_Forward, _Backward, _BackwardBackward, _Tangent):
    # `Function.apply` asks for it at every call.
    _function.forward.__signature__ = inspect.signature(_function.forward)


# --- torch.compile: formulas registered with the operators -------------------------------------------------------------


def _forward_formula(ctx, do, _):
    if do is None:
        return (None,) * (3 + _NUM_OPTIONS)
    tensors, options = _saved(ctx)
    return *backward(do, *tensors, *options), *_NO_GRADIENTS


def _backward_formula(ctx, u_q, u_k, u_v):
    tensors, options = _saved(ctx)
    dq_, dk_, dv_, ddo_ = backward_backward(u_q, u_k, u_v, *tensors, *options)
    return ddo_, dq_, dk_, dv_, None, None, *_NO_GRADIENTS


def _tangent_formula(ctx, do):
    if do is None:
        return (None,) * (8 + _NUM_OPTIONS)
    (t_q, t_k, t_v, *tensors), options = _saved(ctx)
    first = backward(do, *tensors, *options)
    second = backward_backward(t_q, t_k, t_v, do, *tensors, first[0], *options)[:3]
    return *_of_given((t_q, t_k, t_v), first), *second, None, None, *_NO_GRADIENTS


forward.register_autograd(_forward_formula, setup_context=_setup_forward)
backward.register_autograd(_backward_formula, setup_context=_setup_backward)
backward_backward.register_autograd(_refuse_third_derivative, setup_context=_setup_backward_backward)
tangent.register_autograd(_tangent_formula, setup_context=_setup_tangent)


def attention(q: Tensor, k: Tensor, v: Tensor, *options) -> Tensor:
    """O of checked arguments, twice differentiable with respect to q, k and v."""
    if torch.compiler.is_compiling():
        # While tracing; a tangent that comes later, to the compiled function, is found by the operator.
        if any(unpack_dual(x).tangent is not None for x in (q, k, v)):
            _refuse_compiled_forward_mode()
        return forward(q, k, v, *options)[0]
    return _Forward.apply(q, k, v, *options)[0]
