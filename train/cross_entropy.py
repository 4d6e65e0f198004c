"""Cross-entropy of a linear head, in chunks of tokens and twice differentiable: no tensor [tokens, vocabulary] is ever whole.

With logits z = x Wᵀ, p = softmax(z), one-hot targets y, the mean over the n tokens that count, and δ = p − y:

    loss = Σ (log Σ exp z − z_y) / n        G = δ / n        dx = G W        dW = Gᵀ x

The first derivative is made together with the loss, from the same chunk of logits. The second, from cotangents U_x and U_W
of dx and dW, makes the logits again, beside their change M = U_x Wᵀ + x U_Wᵀ:

    H = p ⊙ (M − Σ p M) / n        x̃ = H W + G U_W        W̃ = Hᵀ x + Gᵀ U_x

which are ten products where storing the logits takes nine. The Hessian is symmetric: H's outputs with ẋ and Ẇ for U_x and U_W are
also the tangents of dx and dW, which is forward over reverse. On a CUDA device softmax, δ and H are one Triton kernel each, in
place; elsewhere they are PyTorch operations. Sums are fp32 (fp64 for fp64); dW and W̃ are summed over chunks in that.

Nothing here is FlashBoB's; fusing the head with its loss is due to Liger-Kernel and others, which have no second derivative.
"""

# Triton's annotations are for its compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function, forward_ad

IGNORED = -100  # a target that counts for nothing, as in PyTorch
# The operators take any strides. Otherwise Inductor would make an input such as W's cast to bf16 once more for each of them.
_ANY_LAYOUT = (torch.Tag.flexible_layout,)
_BLOCK = 4096  # logits that a program of the kernels works on at a time


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int) -> Tensor:
    """Mean cross-entropy of x weightᵀ, like `F.cross_entropy((x @ weight.T)[:, :vocab_size].float(), targets)`.

    Args:
        x: [T, D], floating point; under `torch.autocast` the products are in its dtype, as a linear layer's.
        weight: [V, D] with V ≥ vocab_size; the rows beyond (padding) take no part.
        targets: int64 [T], in [0, vocab_size) or -100, which is left out of the mean.
        chunk: tokens at a time.

    Returns a scalar in fp32 (fp64 for fp64). Twice differentiable with respect to x and weight (reverse over reverse, forward
    over reverse, reverse over forward), eager or traced by `make_fx`; inside `torch.compile` once, in reverse.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return _loss(x, weight, targets, vocab_size, chunk)
    if torch.compiler.is_compiling():
        return _loss_and_gradient(x, weight, targets, vocab_size, chunk)[0]
    return _Loss.apply(x, weight, targets, vocab_size, chunk)[0]


@torch.library.custom_op("flashbob_train::loss", mutates_args=(), tags=_ANY_LAYOUT)
def _loss(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int) -> Tensor:
    total = x.new_zeros((), dtype=_wide(x))
    for rows in _chunks(x, chunk):
        lse, target_logits = _normalize(x[rows] @ weight.T, targets[rows], None, vocab_size)
        total += torch.where(targets[rows] != IGNORED, lse - target_logits, 0.0).sum()
    return total / (targets != IGNORED).sum()


@_loss.register_fake
def _(x, weight, targets, vocab_size, chunk):
    return x.new_empty((), dtype=_wide(x))


@torch.library.custom_op("flashbob_train::loss_and_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _loss_and_gradient(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, log Σ exp z [T], dx, dW)."""
    total = x.new_zeros((), dtype=_wide(x))
    share = 1.0 / (targets != IGNORED).sum().to(_wide(x))
    lse = x.new_empty(x.shape[0], dtype=_wide(x))
    dx = torch.empty_like(x)
    dw = torch.zeros_like(weight, dtype=_wide(x))
    for rows in _chunks(x, chunk):
        logits = x[rows] @ weight.T
        lse[rows], target_logits = _normalize(logits, targets[rows], share, vocab_size)  # logits are G now
        total += torch.where(targets[rows] != IGNORED, lse[rows] - target_logits, 0.0).sum()
        torch.mm(logits, weight, out=dx[rows])
        dw += logits.T @ x[rows]
    return total * share, lse, dx, dw.to(weight.dtype)


@_loss_and_gradient.register_fake
def _(x, weight, targets, vocab_size, chunk):
    wide = _wide(x)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape[0], dtype=wide),
        torch.empty_like(x),
        torch.empty_like(weight),
    )


@torch.library.custom_op("flashbob_train::scaled_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _scaled_gradient(
    c: Tensor,
    dx: Tensor,
    dw: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    vocab_size: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(c dx, c dW): the first derivative from the loss's cotangent c, as a function of x and W too."""
    return (c * dx).to(dx.dtype), (c * dw).to(dw.dtype)


@_scaled_gradient.register_fake
def _(c, dx, dw, *_):
    return torch.empty_like(dx), torch.empty_like(dw)


@torch.library.custom_op("flashbob_train::second_gradient", mutates_args=(), tags=_ANY_LAYOUT)
def _second_gradient(
    u_x: Tensor | None,
    u_w: Tensor | None,
    c: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    vocab_size: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(x̃, W̃), c times those of the formulas above; one of u_x and u_w may be None, which is zero."""
    share = c.to(_wide(x)) / (targets != IGNORED).sum()
    grad_x = torch.zeros_like(x)
    grad_w = torch.zeros_like(weight, dtype=_wide(x))
    for rows in _chunks(x, chunk):
        logits = x[rows] @ weight.T
        if u_x is None:
            change = x[rows] @ u_w.T  # type: ignore[union-attr]
        else:
            change = u_x[rows] @ weight.T
            if u_w is not None:
                change = change.addmm_(x[rows], u_w.T)
        _differentiate(logits, change, targets[rows], lse[rows], share, vocab_size)  # these are G and H now
        torch.mm(change, weight, out=grad_x[rows])
        if u_w is not None:
            grad_x[rows].addmm_(logits, u_w)
        grad_w += change.T @ x[rows]
        if u_x is not None:
            grad_w += logits.T @ u_x[rows]
    return grad_x, grad_w.to(weight.dtype)


@_second_gradient.register_fake
def _(u_x, u_w, c, x, weight, *_):
    return torch.empty_like(x), torch.empty_like(weight)


def _refuse(ctx, *_):
    raise RuntimeError(
        "the chunked cross-entropy is differentiable twice, and a third derivative was asked for; set model.loss_chunk=null"
    )


class _SecondGradient(Function):
    @staticmethod
    def forward(*args):
        return _second_gradient(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(_refuse)


class _ScaledGradient(Function):
    @staticmethod
    def forward(*args):
        return _scaled_gradient(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.vocab_size, ctx.chunk = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, u_x, u_w):
        if u_x is None and u_w is None:
            return (None,) * 9
        c, dx, dw, *rest = ctx.saved_tensors
        grad_c = sum(
            (u.to(c.dtype) * d.to(c.dtype)).sum() for u, d in ((u_x, dx), (u_w, dw)) if u is not None
        )
        grad_x, grad_w = _SecondGradient.apply(u_x, u_w, c, *rest, ctx.vocab_size, ctx.chunk)
        return grad_c, None, None, grad_x, grad_w, None, None, None, None

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
        _, lse, dx, dw = output
        ctx.mark_non_differentiable(lse, dx, dw)
        ctx.set_materialize_grads(False)
        saved = dx, dw, x, weight, targets, lse
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
        return sum(along[1:], along[0]), None, None, None


# The same formulas for operators in a graph that is differentiated: inside torch.compile, or traced.
_loss_and_gradient.register_autograd(_Loss.backward, setup_context=_Loss.setup_context)
_scaled_gradient.register_autograd(_ScaledGradient.backward, setup_context=_ScaledGradient.setup_context)
_second_gradient.register_autograd(_refuse)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, x.shape[0])) for start in range(0, x.shape[0], chunk)]


# --- softmax, G and H of a chunk, in place ---------------------------------------------------------------------------


def _normalize(
    logits: Tensor, targets: Tensor, share: Tensor | None, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """(log Σ exp z, z_y), [rows]; with `share` = 1 / n the logits become G."""
    if logits.is_cuda or INTERPRETED_ON_CPU:
        lse, target_logits = (
            torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2)
        )
        _normalize_kernel[(len(logits),)](
            logits, targets, share, lse, target_logits, logits.stride(0), logits.shape[1], vocab_size,
            SHARE=share is not None, IGNORED=IGNORED, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return lse, target_logits
    wide = logits[:, :vocab_size].to(_wide(logits))
    lse = wide.logsumexp(-1)
    kept = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(-1)
    target_logits = wide.gather(-1, index).squeeze(-1)
    if share is not None:
        _write_g(logits, (wide - lse.unsqueeze(-1)).exp(), index, kept, share, vocab_size)
    return lse, target_logits


def _differentiate(
    logits: Tensor, change: Tensor, targets: Tensor, lse: Tensor, share: Tensor, vocab_size: int
) -> None:
    """Logits become G, their change M becomes H."""
    if logits.is_cuda or INTERPRETED_ON_CPU:
        _differentiate_kernel[(len(logits),)](
            logits, change, targets, lse, share, logits.stride(0), change.stride(0), logits.shape[1], vocab_size,
            IGNORED=IGNORED, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return
    p = (logits[:, :vocab_size].to(_wide(logits)) - lse.unsqueeze(-1)).exp()
    m = change[:, :vocab_size].to(p.dtype)
    kept = targets != IGNORED
    h = p * (m - (p * m).sum(-1, keepdim=True)) * (kept * share).unsqueeze(-1)
    change.zero_()
    change[:, :vocab_size] = h
    _write_g(logits, p, targets.clamp(min=0).unsqueeze(-1), kept, share, vocab_size)


def _write_g(logits: Tensor, p: Tensor, index: Tensor, kept: Tensor, share: Tensor, vocab_size: int) -> None:
    p.scatter_add_(-1, index, torch.full_like(index, -1, dtype=p.dtype))
    logits.zero_()
    logits[:, :vocab_size] = p * (kept * share).unsqueeze(-1)


@triton.jit
def _normalize_kernel(
    z_ptr,
    targets_ptr,
    share_ptr,
    lse_ptr,
    target_logits_ptr,
    stride,
    columns,
    vocab_size,
    SHARE: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * stride
    target = tl.load(targets_ptr + row)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        new = tl.maximum(maximum, z)
        # -inf minus -inf, where a lane has seen nothing yet
        total = total * tl.where(new == float("-inf"), 0.0, tl.exp(maximum - new)) + tl.where(
            z == float("-inf"), 0.0, tl.exp(z - new)
        )
        maximum = new
    top = tl.max(maximum, 0)
    lse = top + tl.log(tl.sum(total * tl.where(maximum == float("-inf"), 0.0, tl.exp(maximum - top)), 0))
    tl.store(lse_ptr + row, lse)
    kept = target != IGNORED
    tl.store(target_logits_ptr + row, tl.load(z_ptr + tl.where(kept, target, 0)).to(tl.float32))
    if SHARE:
        share = tl.where(kept, tl.load(share_ptr), 0.0)
        for start in range(0, columns, BLOCK):
            index = start + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
            g = (tl.exp(z - lse) - tl.where(index == target, 1.0, 0.0)) * share
            tl.store(z_ptr + index, g.to(z_ptr.dtype.element_ty), mask=index < columns)


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
):
    """One row a program."""
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * z_stride
    m_ptr += row.to(tl.int64) * m_stride
    target = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    share = tl.where(target != IGNORED, tl.load(share_ptr), 0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        m = tl.load(m_ptr + index, mask=index < vocab_size, other=0.0).to(tl.float32)
        total += tl.exp(z - lse) * m
    mean = tl.sum(total, 0)
    for start in range(0, columns, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        m = tl.load(m_ptr + index, mask=index < vocab_size, other=0.0).to(tl.float32)
        p = tl.exp(z - lse)
        g = (p - tl.where(index == target, 1.0, 0.0)) * share
        h = p * (m - mean) * share
        tl.store(z_ptr + index, g.to(z_ptr.dtype.element_ty), mask=index < columns)
        tl.store(m_ptr + index, h.to(m_ptr.dtype.element_ty), mask=index < columns)


INTERPRETED_ON_CPU = False  # the kernels' test sets it, under TRITON_INTERPRET=1
