"""Sophia-H (arXiv 2305.14342, Algorithm 3), with the update rule as below and no bias correction.

For parameters θ with gradient g, step t from 1, m₀ = h₀ = 0:

    m ← β1 m + (1 − β1) g
    h ← β2 h + (1 − β2) ĥ        when (t − 1) mod k = 0, with ĥ an estimate of the Hessian's diagonal
    θ ← θ − η λ θ
    θ ← θ − η clip(m / max(γ h, ε), −1, 1)

Where the curvature is not positive the denominator is ε, and the step is the sign of m.
"""

# The foreach operators are PyTorch's own optimizers' tools, private by name:
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .hutchinson import HutchinsonEstimator
from .sophia_kernel import FusedStep, able

_STATE = ("momentum", "hessian_diagonal")


class SophiaH(Optimizer):
    """Sophia with Hutchinson's estimate of the Hessian's diagonal.

        if optimizer.hessian_due:
            optimizer.update_hessian(estimate)   # e.g. from HutchinsonEstimator
        optimizer.step()                         # with the gradients in .grad

    `lr` is η, `betas` (β1, β2), `eps` ε, `gamma` γ, `weight_decay` λ, `hessian_interval` k. Groups may have
    their own, but for k, which is one for all. m and h are fp32, fp64 for fp64 parameters, and appear at a
    parameter's first use. `fused` takes the step in one Triton kernel instead of PyTorch's foreach operators, with the
    same result up to fp32 rounding; None does so for parameters on a CUDA device (fp32, bf16, fp16). Where the attribute
    `found_inf`, a 0-dim fp32 tensor on their device, is 1, `step` changes nothing but its count of steps; the kernel reads it
    there, the foreach operators on the host. (PyTorch's fused optimizers do not count such a step. Here the host counts, to know
    when a Hessian is due: one that was due in such a step comes k steps later.) Raises ValueError for a hyperparameter outside
    its range and for parameters that are not floating point.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.96, 0.99),
        eps: float = 1e-12,
        gamma: float = 0.01,
        weight_decay: float = 0.2,
        hessian_interval: int = 10,
        *,
        fused: bool | None = None,
    ) -> None:
        self.found_inf: Tensor | None = None
        self._fused = fused
        self._fused_steps: dict[tuple, FusedStep] = {}  # by group and bucket
        self._sums: list[FusedStep] | None = None  # of the last step, if all of it was fused
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "gamma": gamma,
            "weight_decay": weight_decay,
            "hessian_interval": hessian_interval,
        }
        _check_hyperparameters(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. It joins the count of steps that the others share."""
        group = {**self.defaults, **param_group}
        _check_hyperparameters(group)
        group["step"] = 0
        if self.param_groups:
            first = self.param_groups[0]
            if group["hessian_interval"] != first["hessian_interval"]:
                raise ValueError(
                    f"hessian_interval must be the same in every group, "
                    f"got {group['hessian_interval']} beside {first['hessian_interval']}"
                )
            group["step"] = first["step"]
        if not isinstance(group["params"], Tensor | set):  # PyTorch refuses a set, whose order is not fixed
            group["params"] = list(group["params"])
            for index, p in enumerate(group["params"]):
                p = p[1] if isinstance(p, tuple) else p
                if isinstance(p, Tensor) and not p.is_floating_point():
                    raise ValueError(f"params[{index}] must be floating point, got {p.dtype}")
        super().add_param_group(group)

    @property
    def hessian_parameters(self) -> list[Tensor]:
        """The parameters that require a gradient, in the order that `update_hessian` takes."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def hessian_due(self) -> bool:
        """Whether the coming step t refreshes the Hessian: (t − 1) mod k = 0."""
        group = self.param_groups[0]
        return group["step"] % group["hessian_interval"] == 0

    @torch.no_grad()
    def update_hessian(
        self, estimate: Sequence[Tensor], *, check_finite: bool = True, skip: Tensor | None = None
    ) -> None:
        """h ← β2 h + (1 − β2) ĥ.

        `estimate` is ĥ: one tensor for each of `hessian_parameters`, in shape and device like it. Raises
        ValueError, with h as it was, if it does not match or is not finite. That last check waits for the
        device once; `check_finite=False` is for a caller who has looked already
        (`HutchinsonEstimator.all_finite`).

        With `skip`, a 0-dim bool on the parameters' device, h stays as it is where that is true, and nothing waits for it;
        `estimate` is overwritten then, and is not checked.
        """
        params = self.hessian_parameters
        if len(estimate) != len(params):
            raise ValueError(
                f"estimate must be one tensor for each of {len(params)} parameters, got {len(estimate)}"
            )
        for index, (x, p) in enumerate(zip(estimate, params)):
            if (x.shape, x.device) != (p.shape, p.device):
                raise ValueError(
                    f"estimate[{index}] must be of shape {tuple(p.shape)} on {p.device}, "
                    f"got {tuple(x.shape)} on {x.device}"
                )
        if check_finite and skip is None and not HutchinsonEstimator.all_finite(estimate):
            index = next(i for i, x in enumerate(estimate) if not x.isfinite().all())
            raise ValueError(
                f"estimate[{index}] must be finite, got NaN or infinity; the Hessian is unchanged"
            )
        estimate_of = dict(zip(params, estimate))
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for bucket in _buckets([p for p in group["params"] if p in estimate_of]):
                h = [self._state_of(p)["hessian_diagonal"] for p in bucket]
                new = [estimate_of[p].to(x.dtype) for p, x in zip(bucket, h)]
                if skip is None:
                    torch._foreach_lerp_(h, new, 1.0 - beta2)
                    continue
                weight = (1.0 - beta2) * (~skip).to(h[0].dtype)
                for x, end in zip(h, new):
                    x.lerp_(end.masked_fill_(skip, 0.0), weight)  # without a NaN, which times 0 is one

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step for the parameters that have a gradient; the others, with their m and h, stay as they are.

        Raises ValueError for a closure and RuntimeError for a sparse gradient.
        """
        if closure is not None:
            raise ValueError(
                "closure must be None: SophiaH evaluates no loss; compute the gradients, then call step()"
            )
        gradient_of = {
            p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        if any(g.is_sparse for g in gradient_of.values()):
            raise RuntimeError("SophiaH does not support sparse gradients")
        self._sums = []
        for index, group in enumerate(self.param_groups):
            lr, (beta1, _) = group["lr"], group["betas"]
            group["step"] += 1
            for params in _buckets([p for p in group["params"] if p in gradient_of]):
                m = [self._state_of(p)["momentum"] for p in params]
                h = [self._state_of(p)["hessian_diagonal"] for p in params]
                if step := self._fused_step(index, params, [gradient_of[p] for p in params], m, h):
                    step(
                        [gradient_of[p] for p in params],
                        lr=lr,
                        beta1=beta1,
                        gamma=group["gamma"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        found_inf=self.found_inf,
                    )
                    if self._sums is not None:
                        self._sums.append(step)
                    continue
                self._sums = None
                if self.found_inf is not None and self.found_inf:
                    continue
                torch._foreach_lerp_(m, [gradient_of[p].to(x.dtype) for p, x in zip(params, m)], 1.0 - beta1)
                update = torch._foreach_div(m, _denominators(h, group["gamma"], group["eps"]))
                torch._foreach_clamp_min_(update, -1.0)
                torch._foreach_clamp_max_(update, 1.0)
                if group["weight_decay"] != 0:
                    torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
                torch._foreach_add_(params, update, alpha=-lr)

    def _fused_step(
        self, index: int, params: list[Tensor], gradients: list[Tensor], m: list[Tensor], h: list[Tensor]
    ) -> FusedStep | None:
        """The kernel for a bucket of group `index`; None where the foreach operators are to run."""
        wanted = params[0].is_cuda if self._fused is None else self._fused
        if not (wanted and able(params, gradients)):
            return None
        key = index, params[0].device, params[0].dtype
        step = self._fused_steps.get(key)
        if step is None or not step.serves(params, m, h):
            step = self._fused_steps[key] = FusedStep(params, m, h)
        return step

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """What to log, as 0-dim tensors; waits for no device. Call it after `step`: it looks at its m and h.

        clip_fraction: share of elements with |m / max(γ h, ε)| >= 1, which moved by a whole η.
        momentum_norm, hessian_norm: L2 norms of m and h.
        negative_hessian_fraction: share of elements with h < 0.

        Raises RuntimeError before the first step.
        """
        if self._sums:  # the kernel has left them behind
            numel = sum(step.numel for step in self._sums)
            m2, h2, negatives, within = (
                torch.stack([step.sums.double().sum(0) for step in self._sums]).sum(0).float()
            )
            return {
                "clip_fraction": 1.0 - within / numel,
                "momentum_norm": m2.sqrt(),
                "hessian_norm": h2.sqrt(),
                "negative_hessian_fraction": negatives / numel,
            }
        unclipped, negative, m_norms, h_norms, numel = [], [], [], [], 0
        for group in self.param_groups:
            for params in _buckets([p for p in group["params"] if p in self.state]):
                m = [self.state[p]["momentum"] for p in params]
                h = [self.state[p]["hessian_diagonal"] for p in params]
                m_norms += torch._foreach_norm(m)
                h_norms += torch._foreach_norm(h)
                negative += _count_negative(h)
                excess = list(torch._foreach_abs(m))
                torch._foreach_sub_(excess, _denominators(h, group["gamma"], group["eps"]))
                unclipped += _count_negative(excess)
                numel += sum(p.numel() for p in params)
        if not numel:
            raise RuntimeError("statistics needs at least one step with a gradient")
        return {
            "clip_fraction": 1.0 - _gather(unclipped).sum() / numel,
            "momentum_norm": torch.linalg.vector_norm(_gather(m_norms)),
            "hessian_norm": torch.linalg.vector_norm(_gather(h_norms)),
            "negative_hessian_fraction": _gather(negative).sum() / numel,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit for bit; copies the tensors.

        Raises ValueError, with nothing changed, if it is another optimizer's or of other shapes.
        """
        for index, group in enumerate(state_dict["param_groups"]):
            missing = sorted({*self.defaults, "step"} - group.keys())
            if missing:
                raise ValueError(
                    f"state_dict is not SophiaH's: param_groups[{index}] lacks {', '.join(missing)}"
                )
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        loaded = [
            (p, key, state_dict["state"][key]) for p, key in zip(params, keys) if key in state_dict["state"]
        ]
        for p, key, state in loaded:
            if set(state) != set(_STATE):
                raise ValueError(
                    f"state_dict is not SophiaH's: parameter {key} has {', '.join(sorted(state))}, "
                    f"not {', '.join(_STATE)}"
                )
            for name in _STATE:
                if state[name].shape != p.shape:
                    raise ValueError(
                        f"state_dict does not fit: {name} of parameter {key} has shape "
                        f"{tuple(state[name].shape)}, the parameter {tuple(p.shape)}"
                    )
        super().load_state_dict(state_dict)
        self._fused_steps, self._sums = {}, None
        # PyTorch gives the state the parameter's dtype, and may share the tensors with the dictionary.
        for p, _, state in loaded:
            self.state[p] = {
                name: state[name].to(device=p.device, dtype=_state_dtype(p), copy=True) for name in _STATE
            }

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            for name in _STATE:
                state[name] = torch.zeros_like(p, dtype=_state_dtype(p), memory_format=torch.preserve_format)
        return state


def _check_hyperparameters(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        if not (math.isfinite(group[name]) and group[name] >= 0):
            raise ValueError(f"{name} must be finite and >= 0, got {group[name]}")
    for name in ("eps", "gamma"):
        if not (math.isfinite(group[name]) and group[name] > 0):
            raise ValueError(f"{name} must be finite and > 0, got {group[name]}")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas must be two numbers, got {group['betas']}")
    for index, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{index}] must be in [0, 1), got {beta}")
    interval = group["hessian_interval"]
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ValueError(f"hessian_interval must be an integer >= 1, got {interval}")


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _buckets(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one device and dtype together: the foreach operators are fast only on such lists."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        buckets.setdefault((p.device, p.dtype), []).append(p)
    return list(buckets.values())


def _denominators(h: list[Tensor], gamma: float, eps: float) -> list[Tensor]:
    """max(γ h, ε)"""
    denominators = list(torch._foreach_mul(h, gamma))
    torch._foreach_clamp_min_(denominators, eps)
    return denominators


def _count_negative(tensors: list[Tensor]) -> list[Tensor]:
    """The number of negative elements of each tensor; NaN if one is NaN."""
    signs = torch._foreach_sign(tensors)
    torch._foreach_clamp_max_(signs, 0.0)
    return list(torch._foreach_norm(signs, 1))


def _gather(scalars: Sequence[Tensor]) -> Tensor:
    device, dtype = scalars[0].device, scalars[0].dtype
    return torch.stack([x.to(device, dtype, non_blocking=True) for x in scalars])
