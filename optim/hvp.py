"""Hessian-vector products of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor


def hessian_vector_product(
    loss: Tensor, params: Sequence[Tensor], vectors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient g = ∇L and the product H z = ∇⟨g, z⟩, by differentiating twice (Pearlmutter 1994).

    `loss` is a scalar with its graph, which is used up: no further gradient can be taken from it. `vectors`
    is z, each like its parameter in shape, dtype and device. Returns (gradients, products), both detached,
    each like its parameter; where the loss does not depend on a parameter, or only linearly, zeros.

    Raises ValueError for a loss that is no scalar or has no graph, for parameters that are missing,
    repeated, not floating point or do not require a gradient, and for vectors that do not match. An
    operation that cannot be differentiated twice (PyTorch's fused attention, for one) raises PyTorch's own
    error.
    """
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError("loss must have a graph, got a tensor that does not require a gradient")
    check_parameters(params)
    if len(vectors) != len(params):
        raise ValueError(f"vectors must be one for each of the {len(params)} parameters, got {len(vectors)}")
    for index, (vector, p) in enumerate(zip(vectors, params)):
        if (vector.shape, vector.dtype, vector.device) != (p.shape, p.dtype, p.device):
            raise ValueError(
                f"vectors[{index}] must be like its parameter, {_describe(p)}, got {_describe(vector)}"
            )
    gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    # A gradient without a graph is constant: it adds nothing to the product.
    curved = [(g, z) for g, z in zip(gradients, vectors) if g is not None and g.requires_grad]
    products: Sequence[Tensor | None] = [None] * len(params)
    if curved:
        outputs, cotangents = zip(*curved)
        products = torch.autograd.grad(outputs, params, cotangents, allow_unused=True)
    return (
        [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(gradients, params)],
        [torch.zeros_like(p) if hz is None else hz for hz, p in zip(products, params)],
    )


def check_parameters(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless `params` are distinct floating-point tensors that require a gradient."""
    if not params:
        raise ValueError("params must hold at least one parameter, got none")
    first_index: dict[int, int] = {}
    for index, p in enumerate(params):
        if not p.is_floating_point():
            raise ValueError(f"params[{index}] must be floating point, got {p.dtype}")
        if not p.requires_grad:
            raise ValueError(
                f"params[{index}] must require a gradient, got one that does not ({_describe(p)})"
            )
        if first_index.setdefault(id(p), index) != index:
            raise ValueError(
                f"params[{index}] is the same tensor as params[{first_index[id(p)]}]; give it once"
            )


def _describe(x: Tensor) -> str:
    return f"shape {tuple(x.shape)} {x.dtype} on {x.device}"
