"""Hutchinson's probes of all parameters in one Triton kernel.

The same words as `optim.hutchinson.probe`, and the same numbers up to the last bit of fp64 logarithms and cosines: in PyTorch
operations, each an int64 or fp64 tensor, the probes of GPT-2 Small took several times as long as the product that they are for.
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


@triton.jit(do_not_specialize=["seed", "step", "micro_batch"])
def _fill(
    addresses_ptr,
    numels_ptr,
    indices_ptr,
    blocks_ptr,
    seed,
    step,
    micro_batch,
    RADEMACHER: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(blocks_ptr + 2 * program)
    block = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64)
    parameter = tl.load(indices_ptr + tensor)
    quads = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(
        seed, quads.to(tl.uint32), parameter.to(tl.uint32), micro_batch.to(tl.uint32), step.to(tl.uint32)
    )
    if RADEMACHER:
        v0 = 1.0 - 2.0 * (w0 & 1).to(tl.float32)
        v1 = 1.0 - 2.0 * (w1 & 1).to(tl.float32)
        v2 = 1.0 - 2.0 * (w2 & 1).to(tl.float32)
        v3 = 1.0 - 2.0 * (w3 & 1).to(tl.float32)
    else:
        # Half a unit above each word, then Box and Muller: fp64 holds the words whole.
        # The literals stand where they are used: as variables they would be fp32.
        u0 = (w0.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
        u1 = (w1.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        u2 = (w2.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        u3 = (w3.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        r0 = tl.sqrt(tl.log(u0) * -2.0)
        r2 = tl.sqrt(tl.log(u2) * -2.0)
        a1 = u1 * 6.283185307179586  # 2π
        a3 = u3 * 6.283185307179586
        v0 = (r0 * tl.cos(a1)).to(tl.float32)
        v1 = (r0 * tl.sin(a1)).to(tl.float32)
        v2 = (r2 * tl.cos(a3)).to(tl.float32)
        v3 = (r2 * tl.sin(a3)).to(tl.float32)
    # Index (a, b) of the joined dimensions holds word 2a + b, so that the values leave as one run.
    values = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (BLOCK,))
    index = block * BLOCK + tl.arange(0, BLOCK)
    out = tl.load(addresses_ptr + tensor).to(tl.pointer_type(TYPE))
    tl.store(out + index, values.to(TYPE), mask=index < tl.load(numels_ptr + tensor))


class ProbeFiller:
    """Probes for one list of parameters, of one device and dtype, with their indices among all parameters."""

    def __init__(self, params: Sequence[Tensor], indices: Sequence[int]) -> None:
        self.params = list(params)
        self.blocks = Blocks(params, BLOCK)
        self.indices = torch.tensor(indices, dtype=torch.int64).to(self.blocks.device)

    def __call__(
        self, *, seed: int, step: int, micro_batch: int, rademacher: bool, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Fills and returns `out`, contiguous and like the parameters, or new tensors."""
        if out is None:
            out = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.params]
        with torch.cuda.device_of(out[0]):
            _fill[(len(self.blocks),)](
                self.blocks.addresses(out), self.blocks.numels, self.indices, self.blocks.table,
                seed - 2**64 if seed >= 2**63 else seed, step, micro_batch,
                RADEMACHER=rademacher, TYPE=TYPES[out[0].dtype], BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        return out
