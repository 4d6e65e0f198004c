"""sdpa_bob under torch.func, make_fx and torch.compile; what is not supported raises and never returns zeros."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from flashbob import operators, sdpa_bob, set_backend
from flashbob.backends import tiled

OPTIONS = [
    {"is_causal": True},
    {"is_causal": True, "window_size": 5, "scale": 0.3},
    {"dropout_p": 0.4, "dropout_seed": torch.tensor([7, 9])},
    {"key_padding_mask": torch.arange(20).expand(2, 20) < torch.tensor([[20], [13]])},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=["causal", "window", "dropout", "padding"])


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    q, z = torch.randn(2, 4, 20, 16, dtype=torch.float64), torch.randn(2, 4, 20, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 20, 16, dtype=torch.float64), torch.randn(2, 2, 20, 16, dtype=torch.float64)
    return q, k, v, z


def assert_equals_math(function):
    with set_backend("math"):
        expected = function()
    torch.testing.assert_close(function(), expected, rtol=1e-10, atol=1e-11)


def loss(q, k, v, **options):
    return (sdpa_bob(q, k, v, **options) ** 3).sum()


@options
def test_func_grad(tensors, options):
    q, k, v, _ = tensors
    assert_equals_math(lambda: grad(loss, argnums=(0, 1, 2))(q, k, v, **options))


@options
def test_func_grad_nested(tensors, options):
    q, k, v, z = tensors

    def directional(q, k, v):
        return (grad(loss)(q, k, v, **options) * z).sum()

    assert_equals_math(lambda: grad(directional, argnums=(0, 1, 2))(q, k, v))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (1, 0)])
def test_vmap(tensors, in_dims):
    q, k, _, _ = tensors
    k = k if in_dims[1] == 0 else k[0]
    mapped = vmap(lambda q, k: sdpa_bob(q[None], k[None], k[None], is_causal=True)[0], in_dims=in_dims)
    q = q.expand(2, 4, 20, 16) if in_dims[0] == 0 else q.transpose(0, 1)
    assert_equals_math(lambda: mapped(q, k))


def test_vmap_of_second_derivatives(tensors):
    """Per-sample Hessian-vector products."""
    q, k, v, z = tensors

    def directional(q, k, v, z):
        return (grad(lambda q: loss(q[None], k[None], v[None], is_causal=True))(q) * z).sum()

    assert_equals_math(
        lambda: vmap(grad(directional, argnums=(0, 1, 2)), in_dims=(0, 0, None, 0))(q, k, v[0], z)
    )


def test_vmap_maps_the_padding(tensors):
    q, k, v, _ = tensors
    padding = OPTIONS[3]["key_padding_mask"]
    mapped = vmap(lambda q, k, v, m: sdpa_bob(q[None], k[None], v[None], key_padding_mask=m[None])[0])
    torch.testing.assert_close(mapped(q, k, v, padding), sdpa_bob(q, k, v, key_padding_mask=padding))


def test_vmap_with_dropout_follows_randomness(tensors):
    q, k, v, _ = tensors
    twice = torch.stack([q[0], q[0]])

    def mapped(randomness):
        one = lambda q: sdpa_bob(q[None], k[:1], v[:1], dropout_p=0.5)[0]  # noqa: E731
        return vmap(one, randomness=randomness)(twice)

    with pytest.raises(RuntimeError, match="randomness"):
        mapped("error")
    assert torch.equal(*mapped("same"))
    assert not torch.equal(*mapped("different"))


def test_vmap_with_a_dropout_seed_is_what_each_slice_gives_alone(tensors):
    q, k, v, _ = tensors
    one = lambda q, k, v: sdpa_bob(q[None], k[None], v[None], **OPTIONS[2])[0]  # noqa: E731
    alone = torch.stack([one(*qkv) for qkv in zip(q, k, v, strict=True)])
    torch.testing.assert_close(vmap(one)(q, k, v), alone)


def hessian_product(q, k, v, z, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    gradient = torch.autograd.grad(loss(q, k, v, **options), (q, k, v), create_graph=True)
    return torch.autograd.grad((gradient[0] * z).sum(), (q, k, v))


@options
def test_make_fx_traces_the_double_gradient(tensors, options):
    q, k, v, z = tensors
    traced = make_fx(lambda *x: hessian_product(*x, **options))(q, k, v, z)
    calls = [node.target.name() for node in traced.graph.nodes if "flashbob" in str(node.target)]
    assert "flashbob::backward_backward" in calls
    fresh = tuple(torch.randn_like(x) for x in tensors)
    with set_backend("math"):
        expected = hessian_product(*fresh, **options)
    torch.testing.assert_close(traced(*fresh), expected, rtol=1e-10, atol=1e-11)


@options
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_without_graph_break(tensors, options, compiler):
    q, k, v, z = tensors
    compiled = torch.compile(lambda *x: sdpa_bob(*x, **options), fullgraph=True, backend=compiler)

    def gradient(attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*inputs), inputs, z)

    with set_backend("math"):
        expected = gradient(lambda *x: sdpa_bob(*x, **options))
    torch.testing.assert_close(gradient(compiled), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    ["forward", "backward", "backward_backward", "tangent", "backward_packed", "backward_backward_packed"],
)
def test_operators_are_registered_correctly(tensors, name):
    q, k, v, do = tensors
    if name.endswith("packed"):  # for as many heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    tail = (OPTIONS[3]["key_padding_mask"], None, 0.25, True, 7, 0.0, "tiled")
    o, lse = operators.forward(q, k, v, *tail)
    dq, _, _ = operators.backward(do, q, k, v, o, lse, *tail)
    arguments = {
        "forward": (q, k, v),
        "backward": (do, q, k, v, o, lse),
        "backward_backward": (q, None, v, do, q, k, v, o, lse, dq),
        "tangent": (q, None, v, q, k, v, o, lse),
        "backward_packed": (torch.ones(2, 20, 3, 4, 16, dtype=q.dtype), do, q, k, v, o, lse),
        "backward_backward_packed": (q, None, v, do, q, k, v, o, lse, dq),
    }[name]
    arguments = tuple(
        x.detach().requires_grad_(name in ("forward", "backward", "tangent")) if x is not None else x
        for x in arguments
    )
    torch.library.opcheck(getattr(torch.ops.flashbob, name).default, (*arguments, *tail))


def test_third_derivative_raises(tensors):
    q, k, v, _ = tensors
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x, k, v), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable twice and a third derivative"):
        torch.autograd.grad(second.sum(), x)
    square = lambda f: lambda q: (grad(f)(q) ** 2).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="differentiable twice and a third derivative"):
        grad(square(square(lambda q: loss(q, k, v))))(q)


class TestCompiledForwardMode:
    """Each of these gives zeros, or no tangent, through a naively registered operator. Eager: test_forward_mode.py."""

    raises = pytest.raises(NotImplementedError, match=r"no forward-mode derivative .* under torch\.compile")

    def test_compiled_jvp_breaks_the_graph(self, tensors):
        """The refusal is raised while tracing, and what cannot be traced runs eagerly."""
        q, k, v, z = tensors
        compiled = torch.compile(lambda q: jvp(lambda q: loss(q, k, v), (q,), (z,)), backend="aot_eager")
        assert_equals_math(lambda: compiled(q))

    def test_compiled_jvp_without_graph_break(self, tensors):
        q, k, v, z = tensors
        compiled = torch.compile(
            lambda q: jvp(lambda q: loss(q, k, v), (q,), (z,)), backend="aot_eager", fullgraph=True
        )
        with pytest.raises(Exception, match=r"Observed exception|no forward-mode derivative"):
            compiled(q)

    @pytest.mark.parametrize("compiled_before", [False, True])
    @pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
    def test_dual_tensor_into_a_compiled_function(self, tensors, compiled_before, compiler):
        q, k, v, z = tensors
        torch._dynamo.reset()
        compiled = torch.compile(lambda q: sdpa_bob(q, k, v), backend=compiler)
        if compiled_before:
            compiled(q)
        with forward_ad.dual_level(), self.raises:
            compiled(forward_ad.make_dual(q, z))


def test_compiled_func_grad_raises(tensors):
    """An operator with a registered formula refuses torch.func; eager torch.func.grad is the way."""
    q, k, v, _ = tensors
    with pytest.raises(Exception, match="functorch"):
        torch.compile(grad(lambda q: loss(q, k, v)), backend="aot_eager")(q)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "make_fx"])
def test_each_pass_runs_once_in_a_second_derivative(traced, monkeypatch):
    # The graph of the second backward passes through the forward by way of O, whose gradient is None there.
    calls = []
    for name in ("forward", "backward", "backward_backward"):
        body = getattr(tiled, name)
        monkeypatch.setattr(
            tiled, name, lambda *a, _name=name, _body=body, **k: (calls.append(_name), _body(*a, **k))[1]
        )

    def second(q, k, v, u):
        first = torch.autograd.grad(sdpa_bob(q, k, v).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(first, (q, k, v), (u, u, u))

    inputs = [torch.randn(1, 2, 8, 16, requires_grad=i < 3) for i in range(4)]
    run = make_fx(second)(*inputs) if traced else second
    calls.clear()
    run(*inputs)
    # `square` differentiates O a second time: that backward is needed.
    assert sorted(calls) == ["backward", "backward", "backward_backward", "forward"]
    calls.clear()

    def linear(q, k, v, u):  # its gradient does not depend on O
        first = torch.autograd.grad(sdpa_bob(q, k, v), (q, k, v), u, create_graph=True)
        return torch.autograd.grad(first, (q, k, v), (u, u, u))

    run = make_fx(linear)(*inputs) if traced else linear
    calls.clear()
    run(*inputs)
    assert sorted(calls) == ["backward", "backward_backward", "forward"]
