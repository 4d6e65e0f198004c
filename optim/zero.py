"""ZeRO-1: each rank holds the optimizer's state of its share of the parameters alone (arXiv 1910.02054, section 5.1).

PyTorch's ZeroRedundancyOptimizer takes SophiaH too, but it deals out whole tensors, so that of 8 ranks training GPT-2
Small the one with the embedding holds 31 % of the state instead of 12.5 %; collects a checkpoint by broadcasting each
rank's state, pickled, to the devices of all; and holds the state on the device twice once it has loaded one. Here
every rank has an equal share, and what is saved is what an optimizer that is not sharded saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .sophia import SophiaH

# torch 2.13 has given it a new name, and warns about the one that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_ALIGNMENT = 64  # elements: no tensor and no share begins where vector loads would not


@dataclass(frozen=True)
class _Piece:
    """The elements [begin, end) of a flattened parameter that lie in this rank's share, from `place` on."""

    index: int  # of the parameter, over all groups
    begin: int
    end: int
    place: int
    tensor: nn.Parameter  # shares the parameter's memory


class ShardedParameters:
    """Parameters in one flat buffer, of which every rank of the default process group updates an equal share.

        sharded = ShardedParameters(parameter_groups(model.named_parameters(), 0.1))
        optimizer = SophiaH(sharded.groups)     # or any optimizer that treats each element alone, like AdamW
        sharded.attach(optimizer)
        ...                                     # the same gradients in .grad on every rank
        optimizer.step()                        # this rank's share, then everybody's to everybody

    `groups` are like the given ones, with this rank's flat pieces of the parameters in their place. The parameters keep
    their identity, shape and values, and move into the buffer: make this before anything that remembers their address.
    Raises ValueError for parameters that are 0-dim or differ in dtype or device, and for more ranks than there are shares.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self._counts = [len(group["params"]) for group in groups]
        kinds = {(p.dtype, p.device) for p in self.params}
        if len(kinds) != 1:
            raise ValueError(f"params must be of one dtype and device, got {sorted(map(str, kinds))}")
        ((dtype, device),) = kinds
        if scalars := [index for index, p in enumerate(self.params) if not p.dim()]:
            raise ValueError(
                f"params[{scalars[0]}] must have a dimension: a 0-dim state counts as one for all parameters"
            )
        self._offsets, total = [], 0
        for p in self.params:
            self._offsets.append(total)
            total += _align(p.numel())
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._share = _align(-(-total // self.world_size))
        if (self.world_size - 1) * self._share >= total:
            raise ValueError(
                f"params have {total} elements, which give {self.world_size} ranks no share of {_ALIGNMENT} each"
            )
        self._flat = torch.zeros(self.world_size * self._share, dtype=dtype, device=device)
        start = self.rank * self._share
        self._pieces: list[_Piece] = []
        for index, (p, offset) in enumerate(zip(self.params, self._offsets)):
            view = self._flat[offset : offset + p.numel()]
            view.copy_(p.detach().reshape(-1))
            p.data = view.view(p.shape)
            begin, end = max(0, start - offset), min(p.numel(), start + self._share - offset)
            if begin < end:
                piece = nn.Parameter(view[begin:end])
                self._pieces.append(_Piece(index, begin, end, offset + begin - start, piece))
        self.groups: list[dict[str, Any]] = []
        first = 0
        for group, count in zip(groups, self._counts):
            mine = [piece.tensor for piece in self._pieces if first <= piece.index < first + count]
            self.groups.append({**group, "params": mine})
            first += count

    def attach(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` take the gradients of the whole parameters, and gather the whole parameters."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._gather_parameters())

    def pieces_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's pieces of `tensors`, one for each of `params`: e.g. of an estimate, for `update_hessian`."""
        return [tensors[piece.index].reshape(-1)[piece.begin : piece.end] for piece in self._pieces]

    def _take_gradients(self) -> None:
        for piece in self._pieces:
            gradient = self.params[piece.index].grad
            piece.tensor.grad = None if gradient is None else gradient.reshape(-1)[piece.begin : piece.end]

    def _gather_parameters(self) -> None:
        for piece in self._pieces:
            piece.tensor.grad = None
        start = self.rank * self._share
        _all_gather(self._flat, self._flat[start : start + self._share])

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """What `optimizer.state_dict()` would be without shares, on rank 0's CPU; None on the others. A collective.

        The state travels between CPUs: no device needs room for it. 0-dim states (Adam's count of steps) are one for all.
        """
        state: dict[int, dict[str, Any]] = {index: {} for index in range(len(self.params))}
        states = [optimizer.state.get(piece.tensor, {}) for piece in self._pieces]
        for name, value in states[0].items():
            if not value.dim():
                for values in state.values():
                    values[name] = value.cpu().clone()
                continue
            share = torch.zeros(self._share, dtype=value.dtype)
            for piece, values in zip(self._pieces, states):
                share[piece.place : piece.place + piece.tensor.numel()].copy_(values[name])
            shares = [torch.empty_like(share) for _ in range(self.world_size)] if self.rank == 0 else None
            dist.gather(share, shares, dst=0)
            if shares is not None:
                flat = torch.cat(shares)
                for index, (p, offset) in enumerate(zip(self.params, self._offsets)):
                    state[index][name] = flat[offset : offset + p.numel()].view(p.shape)
        if self.rank != 0:
            return None
        groups, first = [], 0
        for group, count in zip(optimizer.state_dict()["param_groups"], self._counts):
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        return {"state": {i: values for i, values in state.items() if values}, "param_groups": groups}

    def load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of the state of an optimizer without shares, or of `state_dict` on any number of ranks.

        Raises ValueError if the state is not that of parameters of these shapes.
        """
        state: dict[int, dict[str, Any]] = {}
        for number, piece in enumerate(self._pieces):
            shape = self.params[piece.index].shape
            for name, value in state_dict["state"].get(piece.index, {}).items():
                if value.dim():
                    if value.shape != shape:
                        raise ValueError(
                            f"state_dict does not fit: {name} of parameter {piece.index} has shape {tuple(value.shape)}, "
                            f"the parameter {tuple(shape)}"
                        )
                    value = value.reshape(-1)[piece.begin : piece.end].clone()  # not the memory of the whole
                state.setdefault(number, {})[name] = value
        groups = [
            {**stored, "params": own["params"]}
            for stored, own in zip(state_dict["param_groups"], optimizer.state_dict()["param_groups"])
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def statistics(self, optimizer: SophiaH) -> dict[str, Tensor]:
        """`optimizer.statistics()` over the shares of all ranks. A collective."""
        mine = optimizer.statistics()
        numel = sum(piece.tensor.numel() for piece in self._pieces)
        fractions = ("clip_fraction", "negative_hessian_fraction")
        sums = [
            value.double() * numel if name in fractions else value.double() ** 2
            for name, value in mine.items()
        ]
        total = torch.stack([*sums, torch.full_like(sums[0], numel)])
        dist.all_reduce(total)
        return {
            name: value / total[-1] if name in fractions else value.sqrt() for name, value in zip(mine, total)
        }


def _align(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
