"""Cross-entropy of a linear head, in chunks of tokens and twice differentiable: no tensor [tokens, vocabulary] is ever whole,
unless one chunk takes all tokens.

With logits z = x Wᵀ, p = softmax(z), one-hot targets y, the mean over the n tokens that count, and δ = p − y:

    loss = Σ (log Σ exp z − z_y) / n        G = δ / n        dx = G W        dW = Gᵀ x

The first derivative is made together with the loss, from the same chunk of logits. The second, from cotangents U_x and U_W
of dx and dW, makes the logits again, beside their change M = U_x Wᵀ + x U_Wᵀ:

    H = p ⊙ (M − Σ p M) / n        x̃ = H W + G U_W        W̃ = Hᵀ x + Gᵀ U_x

which are ten products where storing the logits takes nine, made as seven: those that share W, and those of one sum, are one.
Where one chunk takes all tokens its G is kept instead, and these are the nine: p = n G, and at the target exp(−the token's loss),
since p − 1 in a narrow dtype says nothing of a small p.

The Hessian is symmetric: H's outputs with ẋ and Ẇ for U_x and U_W are also the tangents of dx and dW, which is forward over
reverse. On a CUDA device softmax, δ and H are one Triton kernel each, in place; elsewhere they are PyTorch operations. Sums are
fp32 (fp64 for fp64). dW and W̃ are summed over chunks inside the products and leave their operators in that: who takes them
rounds them, with their factor c, in the same pass over memory.

Nothing here is FlashBoB's; fusing the head with its loss is due to Liger-Kernel and others, which have no second derivative.
"""

# Triton's annotations are for its compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function, forward_ad

IGNORED = -100  # a target that counts for nothing, as in PyTorch
# The operators take any strides. Otherwise Inductor would make an input such as W's cast to bf16 once more for each of them.
_ANY_LAYOUT = (torch.Tag.flexible_layout,)


class _Launch(NamedTuple):
    block: int  # logits that a program works on at a time; a multiple of _RUN
    num_warps: int


# A program reads its row twice. The fewer programs share a multiprocessor, the fewer rows are in work, and they stay in the
# caches in between: by their registers on an H200 two of the first kernel and one of the second, 26 MB each, where L2 holds 50.
_NORMALIZE = _Launch(block=4096, num_warps=16)
_DIFFERENTIATE = _Launch(block=8192, num_warps=32)
_RUN = 8  # neighbours in a row, which one thread loads at once (16 bytes of bf16) and sums


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int) -> Tensor:
    """Mean cross-entropy of x weightᵀ, like `F.cross_entropy((x @ weight.T)[:, :vocab_size].float(), targets)`.

    Args:
        x: [T, D], bf16, fp32 or fp64; under `torch.autocast` the products are in its dtype, as a linear layer's. fp16 is
            refused: it has no room for p / n.
        weight: [V, D] with V ≥ vocab_size; the rows beyond (padding) take no part.
        targets: int64 [T], in [0, vocab_size) or -100, which is left out of the mean.
        chunk: tokens at a time. From T on, [T, V] numbers are kept for the second derivative, which is then faster.

    Returns a scalar in fp32 (fp64 for fp64). Twice differentiable with respect to x and weight (reverse over reverse, forward
    over reverse, reverse over forward), eager or traced by `make_fx`; inside `torch.compile` once, in reverse.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype == torch.float16:
        raise ValueError(
            "the chunked cross-entropy takes bfloat16, float32 or float64, got float16, whose smallest number is larger than "
            "a probability over the number of tokens; set model.loss_chunk=null"
        )
    targets = targets.contiguous()
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return _loss(x, weight, targets, vocab_size, chunk)
    if torch.compiler.is_compiling():
        return _loss_and_gradient(x, weight, targets, vocab_size, chunk)[0]
    return _Loss.apply(x, weight, targets, vocab_size, chunk)[0]


@torch.library.custom_op("flashbob_train::loss", mutates_args=(), tags=_ANY_LAYOUT)
def _loss(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int) -> Tensor:
    lse, losses = x.new_empty((2, x.shape[0]), dtype=_wide(x))
    for rows in _chunks(x, chunk):
        _normalize(x[rows] @ weight.T, targets[rows], None, vocab_size, lse[rows], losses[rows])
    return losses.sum() / (targets != IGNORED).sum()


@_loss.register_fake
def _(x, weight, targets, vocab_size, chunk):
    return x.new_empty((), dtype=_wide(x))


@torch.library.custom_op("flashbob_train::loss_with_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _loss_and_gradient(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, [2, T] log Σ exp z and the loss of each token, dx, dW in fp32 or fp64, G [T, V] of a single chunk, else empty).

    All but dx and G are fp32, or fp64 for fp64.
    """
    share = 1.0 / (targets != IGNORED).sum().to(_wide(x))
    of_tokens = x.new_empty((2, len(x)), dtype=_wide(x))
    lse, losses = of_tokens
    dx = torch.empty_like(x)
    dw = weight.new_empty(weight.shape, dtype=_wide(x))
    for rows in _chunks(x, chunk):
        logits = x[rows] @ weight.T
        _normalize(logits, targets[rows], share, vocab_size, lse[rows], losses[rows])  # logits are G now
        torch.mm(logits, weight, out=dx[rows])
        _sum_product(dw, logits.T, x[rows], first=rows.start == 0)
    return losses.sum() * share, of_tokens, dx, dw, logits if len(x) <= chunk else x.new_empty(0)


@_loss_and_gradient.register_fake
def _(x, weight, targets, vocab_size, chunk):
    wide = _wide(x)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty((2, x.shape[0]), dtype=wide),
        torch.empty_like(x),
        weight.new_empty(weight.shape, dtype=wide),
        x.new_empty((x.shape[0], weight.shape[0]) if x.shape[0] <= chunk else (0,)),
    )


@torch.library.custom_op("flashbob_train::second_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _second_gradient(
    u_x: Tensor | None,
    u_w: Tensor | None,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    of_tokens: Tensor,
    kept_g: Tensor,
    vocab_size: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(x̃, W̃ in fp32 or fp64); one of u_x and u_w may be None, which is zero."""
    share = 1.0 / (targets != IGNORED).sum().to(_wide(x))
    lse, losses = of_tokens
    grad_x = torch.empty_like(x)
    grad_w = weight.new_empty(weight.shape, dtype=_wide(x))
    if len(x) <= chunk:
        change = x @ u_w.T if u_x is None else u_x @ weight.T  # type: ignore[union-attr]
        if u_x is not None and u_w is not None:
            change.addmm_(x, u_w.T)
        _differentiate_from(kept_g, change, targets, losses, share, vocab_size)  # this is H now
        torch.mm(change, weight, out=grad_x)
        if u_w is not None:
            grad_x.addmm_(kept_g, u_w)
        _sum_product(grad_w, change.T, x, first=True)
        if u_x is not None:
            _sum_product(grad_w, kept_g.T, u_x, first=False)
        return grad_x, grad_w
    for rows in _chunks(x, chunk):
        here = x[rows]
        # One product for all that W multiplies: the logits, and below them U_x Wᵀ.
        sides = here if u_x is None else torch.cat([here, u_x[rows]])
        products = sides @ weight.T
        logits = products[: len(here)]
        if u_x is None:
            change = here @ u_w.T  # type: ignore[union-attr]
        else:
            change = products[len(here) :]
            if u_w is not None:
                change.addmm_(here, u_w.T)
        # H takes the logits' place and G their change's: x is beside H then, and U_x beside G, and W̃ is one product too.
        _differentiate(logits, change, targets[rows], lse[rows], share, vocab_size)
        torch.mm(logits, weight, out=grad_x[rows])
        if u_w is not None:
            grad_x[rows].addmm_(change, u_w)
        _sum_product(grad_w, products.T, sides, first=rows.start == 0)
    return grad_x, grad_w


@_second_gradient.register_fake
def _(u_x, u_w, x, weight, *_):
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=_wide(x))


def _refuse(ctx, *_):
    raise RuntimeError(
        "the chunked cross-entropy is differentiable twice, and a third derivative was asked for; set model.loss_chunk=null"
    )


class _SecondGradient(Function):
    """(c x̃, c W̃), c as in `_ScaledGradient`."""

    @staticmethod
    def forward(u_x, u_w, c, x, weight, *rest):
        grad_x, grad_w = _second_gradient(u_x, u_w, x, weight, *rest)
        return (c * grad_x).to(x.dtype), (c * grad_w).to(weight.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(_refuse)


class _ScaledGradient(Function):
    """(c dx, c dW): the first derivative from the loss's cotangent c, as a function of x and W too.

    Plain operations: a compiler drops a factor of 1, and does the rest where the results are used.
    """

    @staticmethod
    def forward(c, dx, dw, x, weight, *_):
        return (c * dx).to(dx.dtype), (c * dw).to(weight.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.vocab_size, ctx.chunk = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, u_x, u_w):
        if u_x is None and u_w is None:
            return (None,) * 10
        c, dx, dw, *rest = ctx.saved_tensors
        grad_c = sum(
            (u.to(c.dtype) * d.to(c.dtype)).sum() for u, d in ((u_x, dx), (u_w, dw)) if u is not None
        )
        grad_x, grad_w = _SecondGradient.apply(u_x, u_w, c, *rest, ctx.vocab_size, ctx.chunk)
        return grad_c, None, None, grad_x, grad_w, None, None, None, None, None

    @staticmethod
    def jvp(ctx, t_c, t_dx, t_dw, t_x, t_w, *_):
        # dx and dw are functions of x and weight: their tangents' share comes from these.
        c, dx, dw, *rest = ctx.saved_tensors
        numbers = ctx.vocab_size, ctx.chunk
        if t_x is None and t_w is None:
            return _ScaledGradient.apply(t_c, dx, dw, *rest, *numbers)
        tangents = _SecondGradient.apply(t_x, t_w, c, *rest, *numbers)
        if t_c is None:
            return tangents
        return tuple(
            t + more for t, more in zip(tangents, _ScaledGradient.apply(t_c, dx, dw, *rest, *numbers))
        )


class _Loss(Function):
    @staticmethod
    def forward(*args):
        return _loss_and_gradient(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, targets, ctx.vocab_size, ctx.chunk = inputs
        _, of_tokens, dx, dw, kept_g = output
        ctx.mark_non_differentiable(of_tokens, dx, dw, kept_g)
        ctx.set_materialize_grads(False)
        saved = dx, dw, x, weight, targets, of_tokens, kept_g
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx, c, *_):
        if c is None:
            return (None,) * 5
        dx, dw = _ScaledGradient.apply(c, *ctx.saved_tensors, ctx.vocab_size, ctx.chunk)
        return dx, dw, None, None, None

    @staticmethod
    def jvp(ctx, t_x, t_w, *_):
        _, _, x, *_ = ctx.saved_tensors
        one = x.new_ones((), dtype=_wide(x))
        gradients = _ScaledGradient.apply(one, *ctx.saved_tensors, ctx.vocab_size, ctx.chunk)
        along = [
            (g.to(one.dtype) * t.to(one.dtype)).sum() for g, t in zip(gradients, (t_x, t_w)) if t is not None
        ]
        return sum(along[1:], along[0]), None, None, None, None


# The same formulas for operators in a graph that is differentiated: inside torch.compile, or traced. What a trace shows of
# _ScaledGradient are its plain operations; so dx and dW of the operator have derivatives of their own.


def _setup_operator(ctx, inputs, output):
    x, weight, targets, ctx.vocab_size, ctx.chunk = inputs
    _, of_tokens, dx, dw, kept_g = output
    ctx.mark_non_differentiable(of_tokens, kept_g)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dx, dw, x, weight, targets, of_tokens, kept_g)


def _backward_of_operator(ctx, c, _, u_x, u_w, __):
    dx, dw, *rest = ctx.saved_tensors
    numbers = ctx.vocab_size, ctx.chunk
    parts = []
    if c is not None:
        parts.append(_ScaledGradient.apply(c, dx, dw, *rest, *numbers))
    if u_x is not None or u_w is not None:
        x, weight, *_ = rest
        one = x.new_ones((), dtype=_wide(x))
        u_w = None if u_w is None else u_w.to(weight.dtype)
        parts.append(_SecondGradient.apply(u_x, u_w, one, *rest, *numbers))
    if not parts:
        return (None,) * 5
    grad_x, grad_w = parts[0] if len(parts) == 1 else (a + b for a, b in zip(*parts))
    return grad_x, grad_w, None, None, None


_loss_and_gradient.register_autograd(_backward_of_operator, setup_context=_setup_operator)
_second_gradient.register_autograd(_refuse)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, chunk: int) -> list[slice]:
    """Of no tokens one chunk, which is empty: sums are written by the first."""
    return [slice(start, min(start + chunk, len(x))) for start in range(0, max(len(x), 1), chunk)]


def _sum_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total = a b if `first`, else total + a b. On a CUDA device the product's own sums start from total, in its dtype."""
    if total.is_cuda:
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


# --- softmax, G and H of a chunk, in place ---------------------------------------------------------------------------


def _normalize(
    logits: Tensor, targets: Tensor, share: Tensor | None, vocab_size: int, lse: Tensor, losses: Tensor
) -> None:
    """Write log Σ exp z and the loss of each row, [rows]; with `share` = 1 / n the logits become G."""
    if logits.is_cuda or INTERPRETED_ON_CPU:
        _normalize_kernel[(len(logits),)](
            logits, targets, share, lse, losses, logits.stride(0), logits.shape[1], vocab_size,
            SHARE=share is not None, IGNORED=IGNORED, BLOCK=_NORMALIZE.block, RUN=_RUN, num_warps=_NORMALIZE.num_warps,
        )  # fmt: skip
        return
    wide = logits[:, :vocab_size].to(lse.dtype)
    torch.logsumexp(wide, -1, out=lse)
    kept = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(-1)
    losses.copy_(torch.where(kept, lse - wide.gather(-1, index).squeeze(-1), 0.0))
    if share is not None:
        _write_g(logits, (wide - lse.unsqueeze(-1)).exp(), index, kept, share, vocab_size)


def _differentiate(
    logits: Tensor, change: Tensor, targets: Tensor, lse: Tensor, share: Tensor, vocab_size: int
) -> None:
    """Logits become H, their change M becomes G."""
    if logits.is_cuda or INTERPRETED_ON_CPU:
        _differentiate_kernel[(len(logits),)](
            logits, change, targets, lse, share, logits.stride(0), change.stride(0), logits.shape[1], vocab_size,
            IGNORED=IGNORED, BLOCK=_DIFFERENTIATE.block, RUN=_RUN, num_warps=_DIFFERENTIATE.num_warps,
        )  # fmt: skip
        return
    p = (logits[:, :vocab_size].to(lse.dtype) - lse.unsqueeze(-1)).exp()
    m = change[:, :vocab_size].to(p.dtype)
    kept = targets != IGNORED
    h = p * (m - (p * m).sum(-1, keepdim=True)) * (kept * share).unsqueeze(-1)
    logits.zero_()
    logits[:, :vocab_size] = h
    _write_g(change, p, targets.clamp(min=0).unsqueeze(-1), kept, share, vocab_size)


def _differentiate_from(
    g: Tensor, change: Tensor, targets: Tensor, losses: Tensor, share: Tensor, vocab_size: int
) -> None:
    """The change M of logits becomes H, from their G."""
    if g.is_cuda or INTERPRETED_ON_CPU:
        _differentiate_from_kernel[(len(g),)](
            g, change, targets, losses, share, g.stride(0), change.stride(0), g.shape[1], vocab_size,
            IGNORED=IGNORED, BLOCK=_DIFFERENTIATE.block, RUN=_RUN, num_warps=_DIFFERENTIATE.num_warps,
        )  # fmt: skip
        return
    kept = targets != IGNORED
    p = g[:, :vocab_size].to(share.dtype) / share
    p.scatter_(-1, targets.clamp(min=0).unsqueeze(-1), (-losses).exp().unsqueeze(-1))
    m = change[:, :vocab_size].to(p.dtype)
    h = p * (m - (p * m).sum(-1, keepdim=True)) * (kept * share).unsqueeze(-1)
    change.zero_()
    change[:, :vocab_size] = h


def _write_g(out: Tensor, p: Tensor, index: Tensor, kept: Tensor, share: Tensor, vocab_size: int) -> None:
    p.scatter_add_(-1, index, torch.full_like(index, -1, dtype=p.dtype))
    out.zero_()
    out[:, :vocab_size] = p * (kept * share).unsqueeze(-1)


@triton.jit
def _normalize_kernel(
    z_ptr,
    targets_ptr,
    share_ptr,
    lse_ptr,
    losses_ptr,
    stride,
    columns,
    vocab_size,
    SHARE: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * stride
    target = tl.load(targets_ptr + row)
    kept = target != IGNORED
    target_logit = tl.load(z_ptr + tl.where(kept, target, 0)).to(tl.float32)
    # Of each run of lanes the maximum so far, and the sum of exponentials beside it. Finite from the start: no inf − inf.
    maximum = tl.full([BLOCK // RUN], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK // RUN], tl.float32)
    lanes = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for start in range(0, vocab_size, BLOCK):
        z = _logits(z_ptr, start + lanes, columns, vocab_size, "evict_last")
        new = tl.maximum(maximum, tl.max(z, 1))
        total = total * tl.exp(maximum - new) + tl.sum(tl.exp(z - new[:, None]), 1)
        maximum = new
    top = tl.max(maximum, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(maximum - top), 0))
    tl.store(lse_ptr + row, lse)
    tl.store(losses_ptr + row, tl.where(kept, lse - target_logit, 0.0))
    if SHARE:
        share = tl.where(kept, tl.load(share_ptr), 0.0)
        for start in range(0, columns, BLOCK):
            index = start + lanes
            z = _logits(z_ptr, index, columns, vocab_size, "evict_first")
            g = (tl.exp(z - lse) - tl.where(index == target, 1.0, 0.0)) * share
            tl.store(
                z_ptr + index,
                g.to(z_ptr.dtype.element_ty),
                mask=index < columns,
                eviction_policy="evict_first",
            )


@triton.jit
def _differentiate_kernel(
    z_ptr,
    m_ptr,
    targets_ptr,
    lse_ptr,
    share_ptr,
    z_stride,
    m_stride,
    columns,
    vocab_size,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * z_stride
    m_ptr += row.to(tl.int64) * m_stride
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    share = tl.where(target != IGNORED, tl.load(share_ptr), 0.0)
    total = tl.zeros([BLOCK // RUN], tl.float32)
    lanes = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for start in range(0, vocab_size, BLOCK):
        index = start + lanes
        z = _logits(z_ptr, index, columns, vocab_size, "evict_last")
        m = _changes(m_ptr, index, columns, vocab_size, "evict_last")
        total += tl.sum(tl.exp(z - lse) * m, 1)
    mean = tl.sum(total, 0)
    for start in range(0, columns, BLOCK):
        index = start + lanes
        z = _logits(z_ptr, index, columns, vocab_size, "evict_first")
        m = _changes(m_ptr, index, columns, vocab_size, "evict_first")
        p = tl.exp(z - lse)
        g = (p - tl.where(index == target, 1.0, 0.0)) * share
        h = p * (m - mean) * share
        inside = index < columns
        tl.store(z_ptr + index, h.to(z_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
        tl.store(m_ptr + index, g.to(m_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def _differentiate_from_kernel(
    g_ptr,
    m_ptr,
    targets_ptr,
    losses_ptr,
    share_ptr,
    g_stride,
    m_stride,
    columns,
    vocab_size,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    g_ptr += row.to(tl.int64) * g_stride
    m_ptr += row.to(tl.int64) * m_stride
    target = tl.load(targets_ptr + row)
    kept = target != IGNORED
    target_p = tl.exp(-tl.load(losses_ptr + row))
    share = tl.load(share_ptr)
    number = tl.where(kept, 1.0 / share, 0.0)
    share = tl.where(kept, share, 0.0)
    total = tl.zeros([BLOCK // RUN], tl.float32)
    lanes = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for start in range(0, vocab_size, BLOCK):
        index = start + lanes
        g = _changes(g_ptr, index, columns, vocab_size, "evict_last")
        m = _changes(m_ptr, index, columns, vocab_size, "evict_last")
        p = tl.where(index == target, target_p, g * number)
        total += tl.sum(p * m, 1)
    mean = tl.sum(total, 0)
    for start in range(0, columns, BLOCK):
        index = start + lanes
        g = _changes(g_ptr, index, columns, vocab_size, "evict_first")
        m = _changes(m_ptr, index, columns, vocab_size, "evict_first")
        p = tl.where(index == target, target_p, g * number)
        h = p * (m - mean) * share
        tl.store(
            m_ptr + index, h.to(m_ptr.dtype.element_ty), mask=index < columns, eviction_policy="evict_first"
        )


@triton.jit
def _logits(ptr, index, columns, vocab_size, EVICTION: tl.constexpr):
    """Padding as −∞. Its memory is read: where a row's length is a multiple of 16, as `columns`, loads are 16 bytes wide."""
    z = tl.load(ptr + index, mask=index < columns, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return tl.where(index < vocab_size, z, float("-inf"))


@triton.jit
def _changes(ptr, index, columns, vocab_size, EVICTION: tl.constexpr):
    """Padding as 0."""
    m = tl.load(ptr + index, mask=index < columns, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return tl.where(index < vocab_size, m, 0.0)


INTERPRETED_ON_CPU = False  # the kernels' test sets it, under TRITON_INTERPRET=1
