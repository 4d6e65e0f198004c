import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import flashbob
from optim import HessianVectorProduct, hessian_vector_product
from optim.graph_passes import PASSES, add_products_in_place, pack_qkv_gradients

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


# --- pack_qkv_gradients -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A packed projection, as train/model.py has it, after a layer that makes its input depend on parameters."""

    def __init__(self, attention):
        super().__init__()
        self.before, self.qkv, self.after = nn.Linear(32, 32), nn.Linear(32, 96), nn.Linear(32, 1)
        self.attention = attention

    def forward(self, x):
        packed = self.qkv(self.before(x)).unflatten(-1, (3, 2, 16))
        q, k, v = (y.transpose(1, 2) for y in packed.unbind(2))
        return self.after(self.attention(q, k, v).transpose(1, 2).flatten(2)).sin().square().sum()


def causal(q, k, v):
    return flashbob.sdpa_bob(q, k, v, is_causal=True)


def dropped(q, k, v):
    seed = torch.tensor([3, 4])
    return flashbob.sdpa_bob(q, k, v, is_causal=True, window_size=4, dropout_p=0.2, dropout_seed=seed)


def both_passes(attention, method="reverse", passes=None, module=Attention):
    """(graph, its results, autograd's results), fp64."""
    torch.manual_seed(0)
    model = module(attention).double()
    hvp = HessianVectorProduct(model, lambda m, x: m(x), method=method)
    z = [torch.randn_like(p) for p in hvp.params]
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    graph = hvp._trace(inputs := hvp._inputs(z, (x,)))
    graph.graph.lint()
    loss = model(x)
    gradients, products = hessian_vector_product(loss, hvp.params, z)
    with torch.no_grad():
        return graph, graph(*inputs), [loss.detach(), *gradients, *products]


def attention_calls(graph):
    names = ("backward", "backward_packed", "backward_backward", "backward_backward_packed")
    return [count(graph, getattr(torch.ops.flashbob, name).default) for name in names]


@pytest.mark.parametrize("method", ["reverse", "forward"])
@pytest.mark.parametrize("attention", [causal, dropped])
def test_attention_writes_packed_gradients(attention, method):
    graph, got, expected = both_passes(attention, method)
    assert attention_calls(graph) == [0, 2, 0, 1]
    assert count(graph, aten.stack.default) == 0
    torch.testing.assert_close(list(got), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", ["reverse", "forward"])
def test_without_the_pass_nothing_is_packed_and_the_result_is_the_same(method, monkeypatch):
    _, packed, _ = both_passes(causal, method)
    monkeypatch.setattr("optim.hvp.PASSES", [p for p in PASSES if p is not pack_qkv_gradients])
    graph, got, _ = both_passes(causal, method)
    assert attention_calls(graph) == [2, 0, 1, 0] and count(graph, aten.stack.default) > 0
    torch.testing.assert_close(list(got), list(packed), rtol=1e-12, atol=1e-13)


class GroupedQuery(Attention):
    def forward(self, x):
        packed = self.qkv(self.before(x)).unflatten(-1, (3, 2, 16))
        q, k, v = (y.transpose(1, 2) for y in packed.unbind(2))
        y = self.attention(q, k[:, :1], v[:, :1])
        return self.after(y.transpose(1, 2).flatten(2)).sin().square().sum()


class ReadTwice(Attention):
    """k and v are read by something else too: what is stacked are sums with other gradients, in the first sweep as well."""

    def forward(self, x):
        packed = self.qkv(self.before(x)).unflatten(-1, (3, 2, 16))
        q, k, v = (y.transpose(1, 2) for y in packed.unbind(2))
        y = self.after(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return y.sin().square().sum() + k.square().sum() * v.sin().sum()


@pytest.mark.parametrize("module", [GroupedQuery, ReadTwice])
def test_other_models_are_left_alone(module):
    graph, got, expected = both_passes(causal, module=module)
    assert attention_calls(graph) == [2, 0, 1, 0]
    torch.testing.assert_close(list(got), expected, rtol=1e-11, atol=1e-12)


def test_baselines_are_left_alone():
    with flashbob.set_backend("hybrid"):
        graph, got, expected = both_passes(causal)
    assert attention_calls(graph) == [2, 0, 1, 0]
    torch.testing.assert_close(list(got), expected, rtol=1e-10, atol=1e-11)


def first_backward(change):
    """The graph of `change` of (dq, dk, dv) after the pass, and how much it differs from that before."""
    options = None, None, 0.25, True, None, 0.0, "tiled"

    def function(q, k, v, do):
        o, lse = torch.ops.flashbob.forward(q, k, v, *options)
        return change(torch.ops.flashbob.backward(do, q, k, v, o, lse, *options))

    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 9, 16, dtype=torch.float64) for _ in range(4)]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    pack_qkv_gradients(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*inputs), function(*inputs), rtol=1e-13, atol=1e-14)
    return graph


def stacked(gradients, dim=2):
    return torch.stack([x.transpose(1, 2) for x in gradients], dim)


def test_a_stack_of_gradients_is_packed():
    assert attention_calls(first_backward(stacked)) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: (stacked(g), g[0] * 2),
        lambda g: (stacked(g), g[2].detach().sin()),
        lambda g: (stacked(g), g[1]),
        lambda g: stacked(g[::-1]),
        lambda g: stacked(g[:2]),
        lambda g: stacked(g, 0),
        lambda g: stacked([g[0], g[0], g[2]]),
        lambda g: stacked([x + 1 for x in g]),
        lambda g: stacked([torch.add(x, x.sin(), alpha=2) for x in g]),
        lambda g: torch.stack([x.transpose(2, 1).sin() for x in g], 2),
        lambda g: torch.stack(list(g), 2),
        lambda g: (parts := [x.transpose(1, 2) for x in g], torch.stack(parts, 2), parts[0] + 1)[1:],
    ],
)
def test_other_stacks_are_left_alone(change):
    assert attention_calls(first_backward(change)) == [1, 0, 0, 0]
