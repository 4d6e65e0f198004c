"""Hutchinson's estimate of the Hessian's diagonal.

E[u ⊙ (H u)] = diag(H) for a vector u of independent elements with mean 0 and variance 1.

Source: Bekas, Kokiopoulou and Saad (2007); in an optimizer, Sophia (arXiv 2305.14342, Algorithm 1).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flashbob.philox import philox_4x32

from .hvp import check_parameters, check_vectors, hessian_vector_product
from .multi_tensor import TYPES
from .probe_kernel import ProbeFiller

Distribution = Literal["gaussian", "rademacher"]
DISTRIBUTIONS = ("gaussian", "rademacher")

_WORD = 0xFFFFFFFF


def probe(
    shape: Sequence[int],
    *,
    seed: int,
    step: int,
    micro_batch: int,
    parameter: int,
    distribution: Distribution = "gaussian",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The random vector u of one parameter on one micro-batch: [*shape], of `dtype`, mean 0, variance 1.

    A pure function of its arguments: the same on any number of ranks, and again when a run resumes.
    Philox-4x32-10 with key (low word of `seed`, high word of `seed`) and counter (element // 4,
    `parameter`, `micro_batch`, `step`) gives four words; word number (element % 4) belongs to the element.
    `parameter` is the parameter's index, `micro_batch` its index in the global batch. "rademacher" takes
    the word's lowest bit. "gaussian" makes two normals of two words (Box and Muller) in fp64 before
    rounding to `dtype`; the largest possible value is 6.8.

    Raises ValueError for a seed outside [0, 2⁶⁴), another index outside [0, 2³²), more than 2³⁴ elements or
    an unknown distribution.
    """
    check_seed(seed)
    check_step(step, micro_batch)
    if not 0 <= parameter <= _WORD:
        raise ValueError(f"parameter must be in [0, 2**32), got {parameter}")
    check_distribution(distribution)
    numel = math.prod(shape)
    if numel > 4 * (_WORD + 1):
        raise ValueError(f"shape must have at most 2**34 elements, got {tuple(shape)}")
    quads = torch.arange((numel + 3) // 4, device=device)
    words = philox_4x32((quads, parameter, micro_batch, step), (seed & _WORD, seed >> 32))
    if distribution == "rademacher":
        values = torch.stack([(1 - 2 * (word & 1)).to(dtype) for word in words], dim=-1)
    else:
        # Half a unit above each word: the uniform is never 0, whose logarithm is infinite.
        uniforms = [(word.to(torch.float64) + 0.5) * 2.0**-32 for word in words]
        normals = []
        for radius_uniform, angle_uniform in (uniforms[:2], uniforms[2:]):
            radius = (-2.0 * radius_uniform.log()).sqrt()
            angle = 2.0 * math.pi * angle_uniform
            normals += [(radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)]
        values = torch.stack(normals, dim=-1)
    return values.flatten()[:numel].view(tuple(shape))


class HutchinsonEstimator:
    """Estimates the Hessian's diagonal over the micro-batches of a step, on every rank, and averages.

        estimator = HutchinsonEstimator(optimizer.hessian_parameters, seed=17)
        gradients = estimator.accumulate(loss, step=step, micro_batch=index)   # for each micro-batch
        estimate = estimator.reduce()

    `params` are distinct floating-point tensors that require a gradient; their order gives the index that
    the probes are keyed by, so keep it fixed. `distribution` is that of the probes: "gaussian", or
    "rademacher", whose estimate has the smaller variance. Between `reduce` and the next `accumulate` the
    estimator holds no memory.
    """

    def __init__(
        self, params: Iterable[Tensor], *, seed: int, distribution: Distribution = "gaussian"
    ) -> None:
        self.params = list(params)
        check_parameters(self.params)
        check_seed(seed)
        check_distribution(distribution)
        self.seed = seed
        self.distribution: Distribution = distribution
        self._sums: list[Tensor] = []  # per parameter, views of the buffers
        self._buffers: list[Tensor] = []  # one flat tensor per device and dtype, the weight at its end
        self._weight = 0.0
        self._kernels: list[tuple[ProbeFiller, list[int]]] | None = None

    def accumulate(self, loss: Tensor, *, step: int, micro_batch: int, weight: float = 1.0) -> list[Tensor]:
        """Add weight · u ⊙ (H u) of this micro-batch, and return the gradients of `loss` from the same pass.

        `loss` is the scalar mean over the micro-batch; its graph is used up. `micro_batch` is the index in
        the global batch, over all ranks; `weight` is positive, in proportion to the sequences (or tokens)
        that the mean is over. Returns one detached gradient per parameter, without the weight. Sums are
        fp32, fp64 for fp64 parameters. Waits for no device.

        Raises ValueError as `hessian_vector_product` and `probe` do, and for a weight that is not finite
        and positive.
        """
        _check_weight(weight)
        probes = self.probes(step=step, micro_batch=micro_batch)
        gradients, products = hessian_vector_product(loss, self.params, probes)
        self.add(probes, products, weight)
        return gradients

    def probes(self, *, step: int, micro_batch: int, out: Sequence[Tensor] | None = None) -> list[Tensor]:
        """u of this micro-batch: one `probe` for each parameter, like it. For products that are computed elsewhere.

        They are written into `out` if it is given (`HessianVectorProduct.empty_vectors`), else into new tensors. On a CUDA
        device they come from one Triton kernel: the same words, and the same numbers up to fp64 rounding.

        Raises ValueError as `probe` does, and for `out` that is not contiguous and like the parameters.
        """
        check_step(step, micro_batch)
        if out is not None:
            check_vectors(self.params, out)
            for index, x in enumerate(out):
                if not x.is_contiguous():
                    raise ValueError(f"out[{index}] must be contiguous, got strides {x.stride()}")
        probes: dict[int, Tensor] = {}
        for filler, indices in self._fillers():
            filled = filler(
                seed=self.seed,
                step=step,
                micro_batch=micro_batch,
                rademacher=self.distribution == "rademacher",
                out=None if out is None else [out[i] for i in indices],
            )
            probes |= dict(zip(indices, filled, strict=True))
        for index, p in enumerate(self.params):
            if index not in probes:
                values = probe(
                    p.shape,
                    seed=self.seed,
                    step=step,
                    micro_batch=micro_batch,
                    parameter=index,
                    distribution=self.distribution,
                    dtype=p.dtype,
                    device=p.device,
                )
                probes[index] = values if out is None else out[index].copy_(values)
        return [probes[index] for index in range(len(self.params))]

    def _fillers(self) -> list[tuple[ProbeFiller, list[int]]]:
        """The kernels for parameters on CUDA devices, one a device and dtype, with the parameters' indices."""
        if self._kernels is None:
            buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index, p in enumerate(self.params):
                if p.is_cuda and p.dtype in TYPES:
                    buckets.setdefault((p.device, p.dtype), []).append(index)
            self._kernels = [
                (ProbeFiller([self.params[i] for i in ids], ids), ids) for ids in buckets.values()
            ]
        return self._kernels

    @torch.no_grad()
    def add(self, probes: Sequence[Tensor], products: Sequence[Tensor], weight: float = 1.0) -> None:
        """Add weight · u ⊙ (H u), given u and H u: the second half of `accumulate`. Waits for no device."""
        _check_weight(weight)
        if not self._buffers:
            self._allocate()
        # One call for all tensors of a dtype: their loop would launch a kernel for each.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, total in enumerate(self._sums):
            by_dtype.setdefault(total.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            torch._foreach_addcmul_(  # pyright: ignore[reportPrivateImportUsage]
                [self._sums[i] for i in indices],
                [probes[i].to(dtype) for i in indices],
                [products[i].to(dtype) for i in indices],
                weight,
            )
        self._weight += weight

    def reduce(self, process_group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """The estimate: the weighted mean over all micro-batches since the last call, on all ranks.

        Starts anew. Returns one tensor per parameter, fp32 (fp64 for fp64 parameters): the sums themselves,
        divided in place, so that no further copy of the model's size exists. With torch.distributed
        initialized it is a collective over `process_group` (None: all ranks), one all-reduce per device and
        dtype, and gives every rank the same bits; a rank that had no micro-batch takes part with nothing.
        If no rank had one the estimate is NaN, which `all_finite` reports.

        Raises RuntimeError in a single process without a micro-batch.
        """
        distributed = dist.is_available() and dist.is_initialized()
        if not self._buffers:
            if not distributed:
                raise RuntimeError("reduce needs at least one micro-batch: call accumulate first")
            self._allocate()
        for buffer in self._buffers:
            buffer[-1].fill_(self._weight)
            if distributed:
                dist.all_reduce(buffer, group=process_group)
            buffer[:-1].div_(buffer[-1])
        estimate, self._sums, self._buffers, self._weight = self._sums, [], [], 0.0
        return estimate

    @staticmethod
    def all_finite(estimate: Sequence[Tensor]) -> Tensor:
        """0-dim bool tensor on the first tensor's device: whether all is finite. Waits for no device."""
        device = estimate[0].device
        return torch.stack([x.isfinite().all().to(device, non_blocking=True) for x in estimate]).all()

    def _allocate(self) -> None:
        buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, p in enumerate(self.params):
            buckets.setdefault((p.device, torch.promote_types(p.dtype, torch.float32)), []).append(index)
        sums: dict[int, Tensor] = {}
        for (device, dtype), indices in buckets.items():
            numels = [self.params[index].numel() for index in indices]
            buffer = torch.zeros(sum(numels) + 1, dtype=dtype, device=device)
            for index, part in zip(indices, buffer[:-1].split(numels)):
                sums[index] = part.view(self.params[index].shape)
            self._buffers.append(buffer)
        self._sums = [sums[index] for index in range(len(self.params))]


def _check_weight(weight: float) -> None:
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"weight must be finite and > 0, got {weight}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")


def check_step(step: int, micro_batch: int) -> None:
    for name, value in (("step", step), ("micro_batch", micro_batch)):
        if not 0 <= value <= _WORD:
            raise ValueError(f"{name} must be in [0, 2**32), got {value}")


def check_distribution(distribution: str) -> None:
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
