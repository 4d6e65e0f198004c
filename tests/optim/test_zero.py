"""How parameters are dealt out. That training is the same: tests/train/test_distributed.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optim import ShardedParameters, parameter_groups


def as_rank(monkeypatch, rank, size):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 33), nn.Linear(33, 65), nn.LayerNorm(65), nn.Linear(65, 7))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_element_is_one_ranks_and_shares_are_equal(size, monkeypatch):
    reference = [
        p for group in parameter_groups(make_model().named_parameters(), 0.1) for p in group["params"]
    ]
    owners = [torch.zeros_like(p) for p in reference]
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        sharded = ShardedParameters(parameter_groups(make_model().named_parameters(), 0.1))
        assert all(torch.equal(p, q) for p, q in zip(sharded.params, reference))
        for piece in sharded.pieces_of(owners):
            piece += 1
        mine = [p for group in sharded.groups for p in group["params"]]
        assert [x.numel() for x in sharded.pieces_of(owners)] == [p.numel() for p in mine]
        total = sum(p.numel() for p in reference)
        assert sum(p.numel() for p in mine) <= total / size + 64 * (len(reference) + 1)
        assert [group["weight_decay"] for group in sharded.groups] == [0.1, 0.0]
        with torch.no_grad():  # a piece is the parameter's own memory
            mine[0].fill_(7.0)
        assert sum(int((p == 7).sum()) for p in sharded.params) == mine[0].numel()
    assert all((x == 1).all() for x in owners)


def test_wrong_parameters(monkeypatch):
    as_rank(monkeypatch, 0, 8)
    p = nn.Parameter(torch.zeros(1000))
    for params, message in (
        ([p, nn.Parameter(torch.zeros(3, dtype=torch.float64))], "must be of one dtype and device"),
        ([p, nn.Parameter(torch.zeros(()))], r"params\[1\] must have a dimension"),
        ([nn.Parameter(torch.zeros(100))], "have 128 elements, which give 8 ranks no share of 64 each"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedParameters([{"params": params}])


def test_a_state_of_other_shapes_is_refused(monkeypatch):
    as_rank(monkeypatch, 0, 1)
    sharded = ShardedParameters([{"params": [nn.Parameter(torch.zeros(10, 20))]}])
    optimizer = torch.optim.AdamW(sharded.groups)
    groups = optimizer.state_dict()["param_groups"]
    other = {"state": {0: {"exp_avg": torch.zeros(20, 10)}}, "param_groups": groups}
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 0 has shape \(20, 10\), the parameter \(10, 20\)"
    ):
        sharded.load_state_dict(optimizer, other)
