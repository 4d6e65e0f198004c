import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import HessianVectorProduct, hessian_vector_product
from optim.closed_forms import ClosedForms


def normalize_and_activate(x, weight, bias):
    # The scale puts GELU's argument where its curvature is, and the first operation gives x a second derivative of its own.
    return F.gelu(3 * F.layer_norm(x * x + x, (16,), weight, bias, 1e-3), approximate="tanh")


def derivatives(inputs, counted):
    """Value, gradients, and second derivatives by way of those gradients that count."""
    x, weight, bias = inputs
    generator = torch.Generator().manual_seed(1)

    def weighted(y):
        return (y.sin() * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()

    loss = weighted(normalize_and_activate(x, weight, bias))
    given = [t for t in inputs if t is not None]
    gradients = torch.autograd.grad(loss, given, create_graph=True)
    directions = torch.stack([weighted(g) for g in gradients])
    second = torch.autograd.grad(directions[list(counted)].sum(), given)
    return [loss, *gradients, *second]


def make_inputs(bias=True):
    torch.manual_seed(0)
    shapes = [(3, 5, 16), (16,), (16,)][: 3 if bias else 2]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return inputs if bias else [*inputs, None]


@pytest.mark.parametrize("counted", [c for c in itertools.product((True, False), repeat=3) if any(c)])
def test_both_derivatives_are_autograds(counted):
    inputs = make_inputs()
    expected = derivatives(inputs, counted)
    with ClosedForms():
        got = derivatives(inputs, counted)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)  # fp64: other orders of the same sums


def test_without_bias():
    inputs = make_inputs(bias=False)
    expected = derivatives(inputs, (True, True))
    with ClosedForms():
        got = derivatives(inputs, (True, True))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_other_forms_are_left_alone():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    for function in (
        F.gelu,
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.layer_norm(x, (3, 4), torch.ones(3, 4).double()),
    ):
        with ClosedForms():
            y = function(x)
        assert torch.equal(y, function(x)) and type(y.grad_fn) is type(function(x).grad_fn)


def test_narrow_dtypes_are_rounded_once():
    """Of bf16 values: no further from the truth than PyTorch's, whose second derivative of GELU rounds each operation."""
    torch.manual_seed(0)
    narrow = (4 * torch.randn(4096)).bfloat16()

    def derivatives(x):
        x = x.detach().requires_grad_()
        y = F.gelu(x, approximate="tanh")
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, g, torch.autograd.grad(g.sum(), x)[0]

    exact = derivatives(narrow.double())
    theirs = derivatives(narrow)
    with ClosedForms():
        ours = derivatives(narrow)
    for i, (x, other, truth) in enumerate(zip(ours, theirs, exact)):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(
            x.double(), truth, rtol=2**-8, atol=1e-6
        )  # half a unit of bf16, and fp32's
        assert (x - truth).norm() <= 1.001 * (other - truth).norm(), i
    with ClosedForms():
        assert torch.equal(F.gelu(input=narrow, approximate="tanh"), ours[0])
    # Far out on the left GELU is tiny, not zero.
    with ClosedForms():
        assert F.gelu(torch.tensor(-6.0), approximate="tanh") < 0


class Tied(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.embedding = nn.Embedding(7, 8, padding_idx=padding_idx)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = F.gelu(self.norm(self.embedding(tokens)), approximate="tanh")
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_a_tied_weights_gradient_takes_the_embeddings_rows(padding_idx):
    torch.manual_seed(0)
    model = Tied(padding_idx).double()
    hvp = HessianVectorProduct(model, lambda m, tokens: m(tokens))
    z = [torch.randn_like(p) for p in hvp.params]
    tokens = torch.randint(7, (2, 5))
    targets = [node.target for node in hvp._trace(hvp._inputs(z, (tokens,))).graph.nodes]
    in_place = padding_idx is None  # a row that gets no gradient keeps PyTorch's operation
    assert (torch.ops.aten.index_put.default in targets) == in_place
    assert (torch.ops.aten.embedding_dense_backward.default in targets) != in_place

    loss, gradients, products = hvp(z, tokens)
    value = model(tokens)
    expected = value.detach(), *hessian_vector_product(value, hvp.params, z)
    for got, truth in zip((loss, *gradients, *products), (expected[0], *expected[1], *expected[2])):
        torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-12)
