"""The fused step against the foreach operators, which tests/optim/test_sophia.py compares with the rule itself."""

import copy

import pytest
import torch
from torch import nn

from optim import SophiaH, sophia_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(70, 3), (5,), (1,), (33, 2, 2), (16,)]


def pair(dtype=torch.float32, **hyper):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=DEVICE, dtype=dtype)) for shape in SHAPES]
    twins = copy.deepcopy(params)
    groups = lambda ps: [{"params": ps[:3]}, {"params": ps[3:], "weight_decay": 0.0, "lr": 0.02}]  # noqa: E731
    hyper = {"lr": 0.01, "gamma": 0.5, "eps": 1e-3, "hessian_interval": 2} | hyper
    return (
        SophiaH(groups(params), fused=True, **hyper),
        SophiaH(groups(twins), fused=False, **hyper),
        params,
        twins,
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sophia_kernel, "BLOCK", 64)  # tensors of several blocks, and ends inside one


def take_steps(optimizer, params, count=3, missing=()):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        draws = [torch.randn(p.shape, generator=generator).to(p) for p in params]
        curvature = [torch.randn(p.shape, generator=generator).to(p) for p in params]
        if optimizer.hessian_due:
            optimizer.update_hessian(curvature)
        for i, (p, g) in enumerate(zip(params, draws)):
            p.grad = None if i in missing else g
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [(), (1,)])
def test_parameters_and_state_are_those_of_the_foreach_step(dtype, missing):
    fused, foreach, params, twins = pair(dtype)
    take_steps(fused, params, missing=missing)
    take_steps(foreach, twins, missing=missing)
    assert len(fused._fused_steps) == 2
    # bf16: a unit (2⁻⁷) for each of three steps, where foreach rounds twice a step.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.5e-2}[dtype]
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        for name in fused.state[p]:
            torch.testing.assert_close(fused.state[p][name], foreach.state[q][name], rtol=1e-6, atol=1e-7)


def test_the_statistics_are_those_of_the_foreach_step():
    fused, foreach, params, twins = pair()
    take_steps(fused, params)
    take_steps(foreach, twins)
    expected = foreach.statistics()
    assert 0 < expected["clip_fraction"] < 1 and expected["negative_hessian_fraction"] > 0
    for name, value in fused.statistics().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_nan_is_not_hidden_by_the_clipping():
    fused, _, params, _ = pair()
    take_steps(fused, params)
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    fused.step()
    assert all(p.isnan().all() for p in params)


def test_what_the_kernel_does_not_take_goes_the_other_way():
    p = nn.Parameter(torch.randn(6, 4, dtype=torch.float64, device=DEVICE))
    q = nn.Parameter(torch.randn(6, 4, device=DEVICE).T)
    optimizer = SophiaH([p, q], fused=True)
    for x in (p, q):
        x.grad = torch.randn_like(x)
    optimizer.step()
    assert not optimizer._fused_steps
    optimizer.statistics()


def test_a_loaded_state_is_the_one_that_the_kernel_changes():
    fused, _, params, _ = pair()
    take_steps(fused, params)
    other, _, others, _ = pair()
    take_steps(other, others, count=1)
    with torch.no_grad():
        for p, q in zip(params, others):
            q.copy_(p)
    other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for x in (*params, *others):
        x.grad = torch.ones_like(x)
    fused.step()
    other.step()
    for p, q in zip(params, others):
        assert torch.equal(p, q) and torch.equal(fused.state[p]["momentum"], other.state[q]["momentum"])


@pytest.mark.parametrize("fused", [True, False])
def test_where_found_inf_is_one_a_step_changes_nothing(fused):
    optimizer = pair()[0 if fused else 1]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    take_steps(optimizer, params)
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    for p in params:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.found_inf = torch.ones((), device=DEVICE)
    count = optimizer.param_groups[0]["step"]
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [count + 1] * len(optimizer.param_groups)
    for p, (value, state) in zip(params, before):
        assert torch.equal(p, value)
        assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)
    # Its first step may be one, too; and 0 is as None.
    for found_inf in (None, torch.zeros((), device=DEVICE)):
        twins = [nn.Parameter(value.clone()) for value, _ in before]
        other = SophiaH(twins, fused=fused)
        for p in twins:
            p.grad = torch.full_like(p, torch.nan)
        other.found_inf = torch.ones((), device=DEVICE)
        other.step()
        assert set(other.statistics()) == set(optimizer.statistics())
        other.found_inf = found_inf
        take_steps(other, twins)
        results = [p.detach().clone() for p in twins]
        if found_inf is None:
            expected = results
    assert all(map(torch.equal, results, expected))
