import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import hessian_vector_product


def quadratic(n=6, dtype=torch.float64):
    """L = ½ θᵀ A θ + bᵀ θ: its gradient is A θ + b and its Hessian A."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, dtype=dtype, generator=generator)
    a = a + a.T
    b = torch.randn(n, dtype=dtype, generator=generator)
    theta = torch.randn(n, dtype=dtype, generator=generator).requires_grad_()
    return a, b, theta


def test_quadratic_against_its_matrix():
    a, b, theta = quadratic()
    z = torch.linspace(-1, 1, 6, dtype=torch.float64)
    loss = 0.5 * theta @ a @ theta + b @ theta
    (g,), (hz,) = hessian_vector_product(loss, [theta], [z])
    torch.testing.assert_close(g, (a @ theta + b).detach(), rtol=1e-13, atol=1e-13)  # fp64 rounding
    torch.testing.assert_close(hz, a @ z, rtol=1e-13, atol=1e-13)


def test_several_parameters_against_the_full_hessian():
    torch.manual_seed(0)
    w, v = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss_of(flat):
        return ((x @ flat[:6].view(3, 2)).tanh() @ flat[6:]).exp().mean()

    full = torch.autograd.functional.hessian(loss_of, torch.cat([w.flatten(), v]))
    params = [w.requires_grad_(), v.requires_grad_()]
    vectors = [torch.randn_like(w), torch.randn_like(v)]
    _, products = hessian_vector_product(
        loss_of(torch.cat([p.flatten() for p in params])), params, [z.detach() for z in vectors]
    )
    expected = full @ torch.cat([z.flatten() for z in vectors]).detach()
    torch.testing.assert_close(torch.cat([p.flatten() for p in products]), expected, rtol=1e-12, atol=1e-12)


def test_unused_and_linear_parameters_give_zeros():
    used, linear, unused = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    params = [used, linear, unused]
    gradients, products = hessian_vector_product(
        used.pow(3).sum() + 5 * linear.sum(), params, [torch.ones_like(p).detach() for p in params]
    )
    assert [g.tolist() for g in gradients] == [[3, 3], [5, 5], [0, 0]]
    assert [hz.tolist() for hz in products] == [[6, 6], [0, 0], [0, 0]]
    # Linear in everything: no gradient has a graph.
    _, products = hessian_vector_product(linear.sum(), params, [torch.ones(2).double()] * 3)
    assert [hz.tolist() for hz in products] == [[0, 0]] * 3


def test_tied_weight_counts_both_uses():
    """L = (w² · w) with the two factors from two modules that share w: L'' = 6 w."""
    first, second = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    second.weight = first.weight
    params = list(nn.ModuleList([first, second]).parameters())
    assert len(params) == 1
    one = torch.ones(1, 1, dtype=torch.float64)
    (g,), (hz,) = hessian_vector_product(first(one).square().sum() * second(one).sum(), params, [one])
    w = first.weight.detach()
    torch.testing.assert_close(g, 3 * w**2)
    torch.testing.assert_close(hz, 6 * w)


def test_nothing_is_retained():
    """The graph of the gradient, and what it saved, is gone on return without a garbage collection."""
    saved: list[weakref.ref] = []

    class Remembered:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        box = Remembered(tensor)
        saved.append(weakref.ref(box))
        return box

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    params = list(model.parameters())
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            loss = F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
            results = hessian_vector_product(loss, params, [torch.ones_like(p).detach() for p in params])
        del loss
        assert saved and not any(ref() for ref in saved)
    finally:
        gc.enable()
    assert all(x.grad_fn is None and not x.requires_grad for part in results for x in part)


def test_attention_that_cannot_be_differentiated_twice_raises():
    qkv = torch.randn(3, 1, 1, 8, 16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        loss = F.scaled_dot_product_attention(*qkv).square().sum()
    with pytest.raises(RuntimeError, match="not implemented"):
        hessian_vector_product(loss, [qkv], [torch.ones(3, 1, 1, 8, 16)])


def test_errors_name_what_is_wrong():
    p = torch.ones(2, requires_grad=True)
    z = torch.ones(2)
    loss = p.square().sum()
    cases = [
        (p.square(), [p], [z], r"loss must be a scalar, got shape \(2,\)"),
        (loss.detach(), [p], [z], "loss must have a graph"),
        (loss, [], [], "params must hold at least one parameter, got none"),
        (loss, [torch.ones(2)], [z], r"params\[0\] must require a gradient"),
        (
            loss,
            [p, torch.ones(2, dtype=torch.int64)],
            [z, z],
            r"params\[1\] must be floating point, got torch.int64",
        ),
        (loss, [p, p], [z, z], r"params\[1\] is the same tensor as params\[0\]"),
        (loss, [p], [], "vectors must be one for each of the 1 parameters, got 0"),
        (
            loss,
            [p],
            [torch.ones(3)],
            r"vectors\[0\] must be like its parameter, shape \(2,\).*got shape \(3,\)",
        ),
        (
            loss,
            [p],
            [z.double()],
            r"vectors\[0\] must be like its parameter, .*got shape \(2,\) torch.float64",
        ),
    ]
    for bad_loss, params, vectors, message in cases:
        with pytest.raises(ValueError, match=message):
            hessian_vector_product(bad_loss, params, vectors)
    _, (hz,) = hessian_vector_product(loss, [p], [z])  # the refused calls have not used the graph up
    assert hz.tolist() == [2, 2]
