"""SophiaH's step as one Triton kernel over all parameters: each tensor is read and written once.

With m, h, p and g of four bytes that is 24 bytes an element where the foreach operators move 76.
"""

# Triton's annotations are for its compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .multi_tensor import TYPES, Blocks

BLOCK = 4096  # elements of a program
# Sums that every block leaves behind, for the statistics: m², h², h < 0, and not clipped.
NUM_SUMS = 4


@triton.jit
def _step(
    addresses_ptr,
    numels_ptr,
    blocks_ptr,
    sums_ptr,
    found_inf_ptr,
    num_tensors,
    lr,
    beta1,
    gamma,
    eps,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Addresses are [p, g, m, h] × tensors; the rest is as in `multi_tensor.Blocks`. Where found_inf is 1 nothing is changed."""
    program = tl.program_id(0)
    tensor = tl.load(blocks_ptr + 2 * program)
    index = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(numels_ptr + tensor)
    if found_inf_ptr is not None:
        numel = tl.where(tl.load(found_inf_ptr) == 0.0, numel, 0)
    mask = index < numel
    p_ptr = tl.load(addresses_ptr + tensor).to(tl.pointer_type(PARAM))
    g_ptr = tl.load(addresses_ptr + num_tensors + tensor).to(tl.pointer_type(GRAD))
    m_ptr = tl.load(addresses_ptr + 2 * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    h_ptr = tl.load(addresses_ptr + 3 * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    p = tl.load(p_ptr + index, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + index, mask=mask, other=0.0)
    h = tl.load(h_ptr + index, mask=mask, other=0.0)
    m = m + (1.0 - beta1) * (g - m)
    # NaN stays NaN, as in torch.clamp: a step that hides one would be a silent wrong.
    ratio = m / tl.maximum(gamma * h, eps, propagate_nan=tl.PropagateNan.ALL)
    update = tl.clamp(ratio, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    p = p * (1.0 - lr * weight_decay) - lr * update
    tl.store(m_ptr + index, m, mask=mask)
    tl.store(p_ptr + index, p.to(PARAM), mask=mask)
    sums_ptr += 4 * program
    tl.store(sums_ptr, tl.sum(m * m, 0))
    tl.store(sums_ptr + 1, tl.sum(h * h, 0))
    tl.store(sums_ptr + 2, tl.sum(tl.where(h < 0.0, 1.0, 0.0), 0))
    tl.store(sums_ptr + 3, tl.sum(tl.where(mask & (tl.abs(ratio) < 1.0), 1.0, 0.0), 0))


class FusedStep:
    """The step of one list of parameters (one device, one dtype), whose layout it prepares once."""

    def __init__(
        self, params: Sequence[Tensor], momenta: Sequence[Tensor], hessians: Sequence[Tensor]
    ) -> None:
        self.params, self.momenta, self.hessians = list(params), list(momenta), list(hessians)
        self.blocks = Blocks(params, BLOCK)
        self.numel = sum(p.numel() for p in params)
        self.sums = torch.zeros(len(self.blocks), NUM_SUMS, dtype=torch.float32, device=params[0].device)

    def serves(self, params: Sequence[Tensor], momenta: Sequence[Tensor], hessians: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that it was made for; their memory may be another."""
        mine = (*self.params, *self.momenta, *self.hessians)
        return len(mine) == 3 * len(params) and all(
            a is b for a, b in zip(mine, (*params, *momenta, *hessians))
        )

    def __call__(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        beta1: float,
        gamma: float,
        eps: float,
        weight_decay: float,
        found_inf: Tensor | None = None,
    ) -> None:
        """Change parameters and m in place, unless `found_inf`, fp32 on their device, is 1. The sums then are 0."""
        addresses = self.blocks.addresses(self.params, gradients, self.momenta, self.hessians)
        with torch.cuda.device_of(self.params[0]):
            _step[(len(self.blocks),)](
                addresses, self.blocks.numels, self.blocks.table, self.sums, found_inf, len(self.params),
                lr, beta1, gamma, eps, weight_decay,
                PARAM=TYPES[self.params[0].dtype], GRAD=TYPES[gradients[0].dtype], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def able(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether the kernel takes a list: narrow or single precision, and contiguous."""
    return (
        params[0].dtype in TYPES
        and len({g.dtype for g in gradients}) == 1
        and gradients[0].dtype in TYPES
        and all(p.is_contiguous() and g.is_contiguous() for p, g in zip(params, gradients))
    )
