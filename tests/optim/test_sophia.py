import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from optim import HutchinsonEstimator, SophiaH

ROOT = Path(__file__).resolve().parents[2]


def scalar_sophia(theta, gradients, estimates, *, lr, betas, eps, gamma, weight_decay, interval):
    """The rule of optim/sophia.py's docstring on one number, in Python floats."""
    m = h = 0.0
    path = []
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        if (t - 1) % interval == 0:
            h = betas[1] * h + (1 - betas[1]) * estimates[t - 1]
        theta -= lr * weight_decay * theta
        theta -= lr * min(1.0, max(-1.0, m / max(gamma * h, eps)))
        path.append(theta)
    return path, m, h


@pytest.mark.parametrize("interval", [1, 3])
def test_rule_on_scalars_of_every_curvature(interval):
    """Curvature strong enough not to clip, weak, zero, negative; and changing sign."""
    hyper = dict(lr=0.05, betas=(0.9, 0.8), eps=1e-12, gamma=0.4, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    curvatures = torch.tensor([50.0, 1.0, 1e-3, 0.0, -1.0, -50.0], dtype=torch.float64)
    thetas = torch.randn(6, dtype=torch.float64, generator=generator)
    gradients = torch.randn(9, 6, dtype=torch.float64, generator=generator)
    estimates = curvatures * torch.rand(9, 6, dtype=torch.float64, generator=generator)
    estimates[4:, 1] *= -3
    p = nn.Parameter(thetas.clone())
    optimizer = SophiaH([p], hessian_interval=interval, **hyper)
    for t in range(9):
        assert optimizer.hessian_due == (t % interval == 0)
        if optimizer.hessian_due:
            optimizer.update_hessian([estimates[t]])
        p.grad = gradients[t].clone()
        optimizer.step()
        for i in range(6):
            path, m, h = scalar_sophia(
                thetas[i].item(),
                gradients[: t + 1, i].tolist(),
                estimates[:, i].tolist(),
                interval=interval,
                **hyper,
            )
            assert p[i].item() == pytest.approx(path[-1], rel=1e-12)
            assert optimizer.state[p]["momentum"][i].item() == pytest.approx(m, rel=1e-12)
            assert optimizer.state[p]["hessian_diagonal"][i].item() == pytest.approx(h, rel=1e-12, abs=1e-300)


def test_where_curvature_is_not_positive_the_step_is_a_sign_step():
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = SophiaH([p], lr=0.5, weight_decay=0.0)
    optimizer.update_hessian([torch.tensor([-1.0, 0.0, -5.0, 0.0], dtype=torch.float64)])
    p.grad = torch.tensor([1e-6, -1e-6, 3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert p.tolist() == [-0.5, 0.5, -0.5, 0.0]
    statistics = optimizer.statistics()
    assert statistics["clip_fraction"] == 0.75
    assert statistics["negative_hessian_fraction"] == 0.5


def test_statistics_against_their_definitions():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4, dtype=torch.float64))]
    optimizer = SophiaH([{"params": params[:1], "gamma": 2.0}, {"params": params[1:]}])
    estimate = [10 * torch.randn_like(p) for p in params]
    optimizer.update_hessian(estimate)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    m = torch.cat([0.04 * p.grad.double().flatten() for p in params])
    h = torch.cat([0.01 * e.double().flatten() for e in estimate])
    gamma = torch.cat([torch.full((15,), 2.0), torch.full((4,), 0.01)]).double()
    statistics = {name: value.item() for name, value in optimizer.statistics().items()}
    assert statistics == pytest.approx(
        {
            "clip_fraction": ((m / (gamma * h).clamp(min=1e-12)).abs() >= 1).double().mean().item(),
            "momentum_norm": m.norm().item(),
            "hessian_norm": h.norm().item(),
            "negative_hessian_fraction": (h < 0).double().mean().item(),
        },
        rel=1e-6,
    )


def test_quadratic_contracts_at_the_rate_of_theory():
    """f = Σ a θ²/2 with exact curvature, γ = 1, β1 = β2 = 0: θ ← (1 − η) θ whatever a is, once nothing is clipped."""
    a = torch.logspace(-2, 4, 7, dtype=torch.float64)
    p = nn.Parameter(torch.ones(7, dtype=torch.float64))
    optimizer = SophiaH([p], lr=0.25, betas=(0.0, 0.0), gamma=1.0, weight_decay=0.0, hessian_interval=4)
    for t in range(1, 41):
        (0.5 * a * p * p).sum().backward()
        if optimizer.hessian_due:
            optimizer.update_hessian([a])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(p, torch.full_like(p, 0.75**t), rtol=1e-10, atol=0)


def test_quadratic_with_hutchinson_beats_the_condition_number():
    """A rotated quadratic of condition 1e4: Rademacher probes, no exact curvature; 300 steps reach 1e-6 of the start."""
    torch.manual_seed(0)
    n = 12
    noise = 0.05 * torch.randn(n, n, dtype=torch.float64)
    scale = torch.logspace(-2, 2, n, dtype=torch.float64).sqrt()
    matrix = scale[:, None] * (torch.eye(n, dtype=torch.float64) + noise @ noise.T) * scale
    p = nn.Parameter(torch.randn(n, dtype=torch.float64))
    optimizer = SophiaH([p], lr=0.3, betas=(0.0, 0.9), gamma=10.0, weight_decay=0.0, hessian_interval=1)
    estimator = HutchinsonEstimator([p], seed=1, distribution="rademacher")
    loss = lambda: 0.5 * p @ matrix @ p  # noqa: E731
    start = loss().item()
    for step in range(1, 301):
        (p.grad,) = estimator.accumulate(loss(), step=step, micro_batch=0)
        optimizer.update_hessian(estimator.reduce())
        optimizer.step()
    assert loss().item() < 1e-6 * start


def trained(optimizer_steps, model, optimizer, estimator, first_step=1):
    for step in range(first_step, first_step + optimizer_steps):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        if optimizer.hessian_due:
            gradients = estimator.accumulate(loss, step=step, micro_batch=0)
            for p, g in zip(optimizer.hessian_parameters, gradients):
                p.grad = g
            optimizer.update_hessian(estimator.reduce())
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def setting(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    optimizer = SophiaH(model.parameters(), lr=0.01, hessian_interval=3)
    return model, optimizer, HutchinsonEstimator(optimizer.hessian_parameters, seed=5)


def test_state_dict_round_trip_continues_bit_for_bit(tmp_path):
    model, optimizer, estimator = setting()
    trained(5, model, optimizer, estimator)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    trained(5, model, optimizer, estimator, first_step=6)

    other, other_optimizer, other_estimator = setting(seed=1)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    trained(5, other, other_optimizer, other_estimator, first_step=6)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


def test_loading_copies_and_keeps_fp32_states_of_bf16_parameters():
    p = nn.Parameter(torch.randn(3).bfloat16())
    optimizer = SophiaH([p])
    p.grad = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    optimizer.update_hessian([torch.full((3,), 1 / 3)])
    optimizer.step()
    stored = copy.deepcopy(optimizer.state_dict())
    other = SophiaH([nn.Parameter(p.detach().clone())])
    other.load_state_dict(stored)
    (state,) = other.state.values()
    for name in ("momentum", "hessian_diagonal"):
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], stored["state"][0][name])
        assert state[name].data_ptr() != stored["state"][0][name].data_ptr()


@pytest.mark.parametrize("wrong", ["adamw", "shape"])
def test_a_foreign_state_dict_is_refused_and_changes_nothing(wrong):
    model, optimizer, estimator = setting()
    trained(2, model, optimizer, estimator)
    before = copy.deepcopy(optimizer.state_dict())
    if wrong == "adamw":
        foreign_optimizer = torch.optim.AdamW(model.parameters())
        foreign = foreign_optimizer.state_dict()
        message = "state_dict is not SophiaH's: param_groups[0] lacks gamma, hessian_interval, step"
    else:
        foreign = copy.deepcopy(before)
        foreign["state"][0]["momentum"] = torch.zeros(2, 2)
        message = "momentum of parameter 0 has shape (2, 2), the parameter (7, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(foreign)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][index][name]) for name in state)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and >= 0, got -1.0"),
        ({"lr": math.nan}, "lr must be finite and >= 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be finite and >= 0, got -0.1"),
        ({"eps": 0.0}, "eps must be finite and > 0, got 0.0"),
        ({"gamma": 0.0}, "gamma must be finite and > 0, got 0.0"),
        ({"gamma": math.inf}, "gamma must be finite and > 0, got inf"),
        ({"betas": (1.0, 0.99)}, "betas[0] must be in [0, 1), got 1.0"),
        ({"betas": (0.9, -0.1)}, "betas[1] must be in [0, 1), got -0.1"),
        ({"betas": (0.9,)}, "betas must be two numbers, got (0.9,)"),
        ({"hessian_interval": 0}, "hessian_interval must be an integer >= 1, got 0"),
        ({"hessian_interval": 2.0}, "hessian_interval must be an integer >= 1, got 2.0"),
    ],
)
def test_every_hyperparameter_is_checked_for_the_optimizer_and_for_groups(hyper, message):
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=re.escape(message)):
        SophiaH([p], **hyper)
    with pytest.raises(ValueError, match=re.escape(message)):
        SophiaH([{"params": [p], **hyper}])


def test_errors_of_the_calls():
    p = nn.Parameter(torch.zeros(2))
    optimizer = SophiaH([p])
    with pytest.raises(ValueError, match="closure must be None"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="at least one step"):
        optimizer.statistics()
    with pytest.raises(ValueError, match=re.escape("one tensor for each of 1 parameters, got 2")):
        optimizer.update_hessian([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match=re.escape("estimate[0] must be of shape (2,)")):
        optimizer.update_hessian([torch.zeros(3)])
    optimizer.update_hessian([torch.ones(2)])
    with pytest.raises(ValueError, match=re.escape("estimate[0] must be finite")):
        optimizer.update_hessian([torch.tensor([1.0, math.inf])])
    assert torch.equal(optimizer.state[p]["hessian_diagonal"], torch.full((2,), 0.01))
    with pytest.raises(ValueError, match=re.escape("params[0] must be floating point, got torch.int64")):
        SophiaH([torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="hessian_interval must be the same in every group"):
        SophiaH([{"params": [p]}, {"params": [nn.Parameter(torch.zeros(1))], "hessian_interval": 3}])


def test_parameters_without_gradient_stay():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = SophiaH([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2)) and not torch.equal(used, torch.ones(2))


def test_the_documented_example_runs():
    """The code of docs/optimizer.md, as printed, lowers its loss."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optimizer.md").read_text(), re.DOTALL)
    namespace: dict = {}
    exec(compile(code, "docs/optimizer.md", "exec"), namespace)
    losses = namespace["losses"]
    assert all(map(math.isfinite, losses))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hessian_update_that_the_device_decides_on(dtype):
    """`skip` false is the same bits as no `skip`; true leaves h as it is, whatever the estimate holds."""
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 4), (5,))]
    with_skip, without = SophiaH(params), SophiaH(params)
    for skip in (False, True, False):
        estimate = [torch.randn_like(p) for p in params]
        if not skip:
            without.update_hessian([x.clone() for x in estimate])
        else:
            estimate[0][1, 2], estimate[1][0] = math.nan, math.inf
        with_skip.update_hessian(estimate, skip=torch.tensor(skip))
        for p in params:
            assert torch.equal(with_skip.state[p]["hessian_diagonal"], without.state[p]["hessian_diagonal"])
