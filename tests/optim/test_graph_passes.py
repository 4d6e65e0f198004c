import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from optim import HessianVectorProduct, hessian_vector_product
from optim.graph_passes import add_products_in_place

add_product_ = torch.ops.flashbob_optim.add_product_.default
aten = torch.ops.aten


def traced(function, *shapes):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    add_products_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, inputs


def count(graph, target):
    return len(graph.graph.find_nodes(op="call_function", target=target))


def tangent(x, w, dx, dw, b):
    return b.view(1, -1).expand(5, 3) + (x @ dw).t().t() + dx @ w


def test_a_sum_of_products_and_a_bias_is_made_where_the_first_product_is():
    graph, inputs = traced(tangent, (5, 4), (4, 3), (5, 4), (4, 3), (3,))
    assert (count(graph, aten.addmm.default), count(graph, add_product_)) == (1, 1)
    assert count(graph, aten.mm.default) == count(graph, aten.add.Tensor) == 0
    torch.testing.assert_close(graph(*inputs), tangent(*inputs), rtol=1e-13, atol=1e-13)


def test_of_three_products_the_first_two_are_made_in_one_place():
    def total(x, w):
        return x @ (2 * w) + (3 * x) @ w + x @ w.exp()

    graph, inputs = traced(total, (5, 4), (4, 3))
    assert (count(graph, aten.mm.default), count(graph, add_product_)) == (2, 1)
    torch.testing.assert_close(graph(*inputs), total(*inputs), rtol=1e-13, atol=1e-13)


def first_read_elsewhere(x, w):
    first = x @ w
    return first + x.sin() @ w, first


def first_read_through_a_view(x, w):
    first = x @ w
    return first + x.sin() @ w, first.t() * 2


def twice_the_same(x, w):
    product = x @ w
    return (product + product,)


def scaled(x, w):
    return (torch.add(x @ w, x.sin() @ w, alpha=2),)


def broadcast(x, w):
    return (x @ w + x[:1] @ w,)


def widened(x, w):
    return ((x @ w).float() @ w.float() + (x @ w) @ w,)


def a_column(x, w):
    return (x[:, :1].expand(4, 4) + x @ w,)


def a_number(x, w):
    return (x @ w + 1,)


@pytest.mark.parametrize(
    "function",
    [
        first_read_elsewhere,
        first_read_through_a_view,
        twice_the_same,
        scaled,
        broadcast,
        widened,
        a_column,
        a_number,
    ],
)
def test_other_sums_are_left_alone(function):
    graph, inputs = traced(function, (4, 4), (4, 4))
    assert count(graph, add_product_) == count(graph, aten.addmm.default) == 0
    for got, expected in zip(graph(*inputs), function(*inputs), strict=True):
        assert torch.equal(got, expected)


def test_inputs_are_not_written():
    graph, inputs = traced(lambda a, x, w: (a + x @ w, (a + x) + x @ w), (4, 4), (4, 4), (4, 4))
    assert count(graph, add_product_) == 0
    before = [x.clone() for x in inputs]
    graph(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_product_is_autograds(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 8), nn.Tanh()).double()
    hvp = HessianVectorProduct(model, lambda m, x: m(x).sin().square().sum())
    z = [torch.randn_like(p) for p in hvp.params]
    x = torch.randn(5, 6, dtype=torch.float64)
    loss, gradients, products = hessian_vector_product_of(model, hvp.params, z, x)
    if compiled:
        got = hvp(z, x)
        assert hvp.compile  # it was not answered eagerly
        got = [got[0], *got[1], *got[2]]
    else:
        graph = hvp._trace(hvp._inputs(z, (x,)))
        assert count(graph, add_product_) > 0
        with torch.no_grad():
            got = graph(*hvp._inputs(z, (x,)))
    torch.testing.assert_close(list(got), [loss, *gradients, *products], rtol=1e-11, atol=1e-12)


def hessian_vector_product_of(model, params, z, x):
    loss = model(x).sin().square().sum()
    return loss.detach(), *hessian_vector_product(loss, params, z)
