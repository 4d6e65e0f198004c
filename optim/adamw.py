"""AdamW, and the parameter groups that every optimizer here shares."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings (dim >= 2), which decay, then biases and norms, which do not.

    `named_parameters` is what `module.named_parameters()` gives; parameters that do not require a gradient
    are left out. Either group may be empty. Raises ValueError when there is nothing to train.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ValueError("named_parameters has no parameter that requires a gradient")
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_adamw(
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    fused: bool = True,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over groups such as `parameter_groups` gives.

    `fused` takes PyTorch's one-kernel step, which reads `optimizer.found_inf` on the device: where that is 1, all stays as it is.
    It stays what it is here when a state is loaded.
    """
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)

    def keep_fused(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        # PyTorch would take it from the stored groups, and by it the device that `step` is moved to.
        return {**state_dict, "param_groups": [{**g, "fused": fused} for g in state_dict["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(keep_fused)
    return optimizer
