"""LayerNorm and GELU with both derivatives written down, for traced Hessian-vector products.

Autograd differentiates PyTorch's formula of a first derivative operation by operation. The graph that this leaves has more sums
over rows and more special functions than the second derivative needs, and a compiler does not find them. `ClosedForms`
puts functions of the same values in the place of the model's own calls:

    with ClosedForms():
        loss = model(x)

LayerNorm of rows x, with x̂ = (x − μ)/σ, r = 1/σ, ⟨·⟩ the mean over a row and J a = r (a − ⟨a⟩ − x̂ ⟨x̂ a⟩), which is dx̂/dx and
symmetric:

    y = γ x̂ + β        g = γ ȳ        dx = J g        dγ = Σ ȳ x̂        dβ = Σ ȳ

and from cotangents u, u_γ, u_β of (dx, dγ, dβ), with w = u_γ ȳ − r (⟨x̂ u⟩ g + ⟨x̂ g⟩ u), the cotangent of x̂:

    of ȳ: γ J u + u_γ x̂ + u_β        of γ: Σ ȳ J u        of x: J w − r x̂ ⟨u dx⟩

Its row sums do not depend on each other: one pass over a row makes them all.

GELU (tanh): with v = √(2/π) (x + 0.044715 x³) and s = ½ (1 + tanh v) = sigmoid(2 v) it is x s, whose two derivatives need s and
1 − s = sigmoid(−2 v). For very negative x, where 1 + tanh cancels, this is the more accurate form.

Formulas are evaluated in fp32 for narrower dtypes (fp64 in fp64) and rounded at the end.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode


class ClosedForms(TorchFunctionMode):
    """Inside, `F.layer_norm` over the last dimension and `F.gelu(approximate="tanh")` are differentiable exactly twice."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        if func is F.gelu and kwargs.get("approximate") == "tanh":
            return _Gelu.apply(*args or [kwargs["input"]])
        return func(*args, **kwargs)


def _layer_norm(
    input: Tensor,
    normalized_shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    tensors = [x for x in (input, weight, bias) if x is not None]
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        # As autocast has it, for the whole of the operation: it does not look into a `Function`'s derivatives.
        tensors = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]
    if len(normalized_shape) != 1 or weight is None or len({x.dtype for x in tensors}) > 1:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    x, weight, *rest = tensors
    return _LayerNorm.apply(x, weight, rest[0] if rest else None, eps)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _to_columns(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0)


@torch.library.custom_op("flashbob_optim::keep", mutates_args=())
def _keep(x: Tensor, apart: bool) -> Tensor:
    """x, which Inductor writes to memory where it is made, once, instead of making it again wherever it is read."""
    return x.clone()


@_keep.register_fake
def _(x, apart):
    return torch.empty_like(x)


@torch.library.custom_op("flashbob_optim::touch", mutates_args=("x",))
def _touch(x: Tensor) -> None:
    """Nothing, to x. Inductor cannot know: what makes x does not wait for, and is not merged with, what reads it."""


@_touch.register_fake
def _(x):
    return None


# For torch.compile: every operation stays where autograd has put it. Moved next to its first reader (the default), the second
# half of a second derivative would leave the kernel of the first, whose inputs it shares, and read them all again.
# No column sums beside LayerNorm's row sums: PyTorch would finish them, 96 launches of 11 µs (docs/hvp.md).
INDUCTOR_OPTIONS: dict[str, Any] = {"reorder_for_locality": False, "triton.mix_order_reduction": False}


@functools.cache
def register_lowerings() -> None:
    """Tell Inductor what `_keep` means. To be called before a graph that has it is compiled."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.flashbob_optim.keep.default, type_promotion_kind=None)
    def _(x, apart):
        x.realize()
        if apart:
            FallbackKernel.create(torch.ops.flashbob_optim.touch.default, x)
        return x


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = torch.native_layer_norm(_keep(x, False), weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dweight, dbias = _LayerNormBackward.apply(dy, *ctx.saved_tensors)
        return dx, dweight, dbias if ctx.has_bias else None, None


class _LayerNormBackward(Function):
    @staticmethod
    def forward(ctx, dy, x, weight, mean, rstd):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dy, x, weight, mean, rstd)
        dy, normal, r, gamma = _wide(dy), (_wide(x) - mean) * rstd, rstd, _wide(weight)
        g = gamma * dy
        dx = r * (g - _mean(g) - normal * _mean(normal * g))
        return dx.to(x.dtype), _to_columns(dy * normal).to(weight.dtype), _to_columns(dy).to(weight.dtype)

    @staticmethod
    def backward(ctx, u, u_weight, u_bias):
        dy, x, weight, mean, r = ctx.saved_tensors
        dtypes = dy.dtype, x.dtype, weight.dtype
        dy, normal, gamma = _wide(dy), (_wide(x) - mean) * r, _wide(weight)
        along_dy, of_normal, of_weight, of_x = 0.0, 0.0, None, 0.0
        mean_w, mean_normal_w = 0.0, 0.0
        if u is not None:
            u, g = _wide(_keep(u, False)), gamma * dy
            mean_u, mean_g = _mean(u), _mean(g)
            normal_u, normal_g = _mean(normal * u), _mean(normal * g)
            projected = r * (u - mean_u - normal * normal_u)  # J u
            along_dy = gamma * projected
            of_weight = _to_columns(dy * projected).to(dtypes[2])
            of_normal = -r * (normal_u * g + normal_g * u)
            mean_w, mean_normal_w = -r * (normal_u * mean_g + normal_g * mean_u), -2 * r * normal_u * normal_g
            of_x = -r * r * normal * (_mean(u * g) - mean_u * mean_g - normal_u * normal_g)
        if u_weight is not None:
            along_dy = along_dy + _wide(u_weight) * normal
            of_normal = of_normal + _wide(u_weight) * dy
            mean_w = mean_w + _mean(_wide(u_weight) * dy)
            mean_normal_w = mean_normal_w + _mean(_wide(u_weight) * dy * normal)
        if u_bias is not None:
            along_dy = (along_dy + _wide(u_bias)).expand_as(dy)
        if u is not None or u_weight is not None:
            of_x = _keep((of_x + r * (of_normal - mean_w - normal * mean_normal_w)).to(dtypes[1]), True)
        return (
            along_dy.to(dtypes[0]) if isinstance(along_dy, Tensor) else None,
            of_x if isinstance(of_x, Tensor) else None,
            of_weight,
            None,
            None,
        )


_A, _B = math.sqrt(2 / math.pi), 0.044715


def _gelu_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x s, its first and its second derivative."""
    twice_v = 2 * _A * (x + _B * x * x * x)
    s, rest = torch.sigmoid(twice_v), torch.sigmoid(-twice_v)  # 1 − s would cancel where s is near 1
    slope = 2 * _A * (1 + 3 * _B * x * x)
    ds = slope * s * rest
    dds = 2 * _A * 6 * _B * x * s * rest + slope * ds * (rest - s)
    return x * s, s + x * ds, 2 * ds + x * dds


class _Gelu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _gelu_derivatives(_wide(x))[0].to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return _GeluBackward.apply(dy, *ctx.saved_tensors)


class _GeluBackward(Function):
    @staticmethod
    def forward(ctx, dy, x):
        ctx.save_for_backward(dy, x)
        return (_wide(dy) * _gelu_derivatives(_wide(x))[1]).to(x.dtype)

    @staticmethod
    def backward(ctx, u):
        dy, x = ctx.saved_tensors
        _, first, second = _gelu_derivatives(_wide(x))
        return (_wide(u) * first).to(dy.dtype), _keep((_wide(u) * _wide(dy) * second).to(x.dtype), True)
