import pytest
import torch
from torch import nn

from optim import build_adamw, parameter_groups


@pytest.fixture
def model():
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    model[2].bias.requires_grad_(False)
    return model


def test_matrices_decay_and_vectors_do_not(model):
    decay, no_decay = parameter_groups(model.named_parameters(), 0.1)
    assert [id(p) for p in decay["params"]] == [id(model[0].weight), id(model[2].weight)]
    assert [id(p) for p in no_decay["params"]] == [id(model[1].weight), id(model[1].bias)]
    assert decay["weight_decay"] == 0.1 and no_decay["weight_decay"] == 0.0


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False).named_parameters(), 0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_first_step_against_its_formula(model, fused):
    """At step 1 the bias-corrected moments are g and g², so θ ← θ (1 − η λ) − η g / (|g| + ε)."""
    model.double()
    lr, eps = 0.01, 1e-8
    optimizer = build_adamw(parameter_groups(model.named_parameters(), 0.1), lr, (0.9, 0.95), eps, fused)
    model(torch.arange(7)).square().sum().backward()
    expected = {}
    for p in model.parameters():
        if p.requires_grad:
            decay = 0.1 if p.dim() >= 2 else 0.0
            expected[p] = p.detach() * (1 - lr * decay) - lr * p.grad / (p.grad.abs() + eps)
    optimizer.step()
    for p, value in expected.items():
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-14)  # fp64 rounding


def test_where_found_inf_is_one_a_step_changes_nothing(model):
    """What PyTorch promises its gradient scaler, and the trainer counts on."""
    optimizer = build_adamw(parameter_groups(model.named_parameters(), 0.1), 0.01, (0.9, 0.95), 1e-8)
    params = [p for p in model.parameters() if p.requires_grad]
    for value, found_inf in ((1.0, 0.0), (float("nan"), 1.0)):
        before = [p.detach().clone() for p in params]
        states = [{name: x.clone() for name, x in optimizer.state[p].items()} for p in params]
        for p in params:
            p.grad = torch.full_like(p, value)
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
    for p, value, state in zip(params, before, states):
        assert torch.equal(p, value) and state["step"] == 1
        assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)


def test_a_state_of_steps_that_were_not_fused_goes_on(model):
    """PyTorch stores how it took its steps; an optimizer that is not fused refuses `found_inf`."""
    groups = parameter_groups(model.named_parameters(), 0.1)
    stored, loaded = (
        build_adamw([{**g} for g in groups], 0.01, (0.9, 0.95), 1e-8, fused=fused) for fused in (False, True)
    )
    params = [p for group in groups for p in group["params"]]
    for p in params:
        p.grad = torch.ones_like(p)
    stored.step()
    state_dict = stored.state_dict()
    loaded.load_state_dict(state_dict)
    assert not any(group["fused"] for group in state_dict["param_groups"])  # the caller's, as it was
    before = [p.detach().clone() for p in params]
    for found_inf in (1.0, 0.0):
        loaded.found_inf = torch.tensor(found_inf)
        loaded.step()
        assert all(torch.equal(p, q) for p, q in zip(params, before)) == bool(found_inf)
    assert all(loaded.state[p]["step"] == 2 for p in params)
