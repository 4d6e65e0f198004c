"""Forward mode through sdpa_bob, alone and over or under reverse mode, against fp64 through textbook attention."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from flashbob import operators, sdpa_bob, set_backend
from flashbob.backends import tiled
from tests.flashbob.test_derivatives import GRID, IDS, options_of
from tests.oracle import make_inputs, reference_attention

OPTIONS = [
    {"is_causal": True},
    {"is_causal": True, "window_size": 5, "scale": 0.3},
    {"dropout_p": 0.4, "dropout_seed": torch.tensor([7, 9])},
    {"key_padding_mask": torch.arange(20).expand(2, 20) < torch.tensor([[20], [13]])},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=["causal", "window", "dropout", "padding"])


def tangents_of_both_passes(attention, q, k, v, do, tangents):
    """(o, dq, dk, dv) and their derivatives along tangents of (q, k, v, do)."""

    def both(q, k, v, do):
        o, pull = vjp(attention, q, k, v)
        return o, *pull(do)

    return jvp(both, (q, k, v, do), tangents)


def assert_equals_math(function):
    with set_backend("math"):
        expected = function()
    torch.testing.assert_close(function(), expected, rtol=1e-10, atol=1e-11)


@pytest.fixture
def tensors():
    """q, k, v with two query heads for each key head, and tangents of them."""
    q, k, v, _, tangents = make_inputs((4, 2), (20, 20))
    return (q, k, v), tangents


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "_MIN_TILE", 4)
    monkeypatch.setitem(tiled._TILE_ELEMENTS, "cpu", 16)


def loss(q, k, v, **options):
    return (sdpa_bob(q, k, v, **options) ** 3).sum()


@pytest.mark.parametrize("backend", ["tiled", "hvp_materialized"])
@pytest.mark.parametrize("mask,heads,lengths,padding,dropout", [case[1:] for case in GRID], ids=IDS)
def test_equals_forward_mode_in_fp64(backend, mask, heads, lengths, padding, dropout, small_tiles):
    ours, reference = options_of(mask, heads, lengths, padding, dropout)
    q, k, v, do, tangents = make_inputs(heads, lengths)
    arguments = q, k, v, do, (*tangents, do.flip(2))
    expected = tangents_of_both_passes(lambda *x: reference_attention(*x, **reference), *arguments)
    with set_backend(backend):
        actual = tangents_of_both_passes(lambda *x: sdpa_bob(*x, **ours), *arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)  # a few hundred roundings


@pytest.mark.parametrize("mask,heads,lengths,padding,dropout", [case[1:] for case in GRID[::5]], ids=IDS[::5])
def test_finite_differences(mask, heads, lengths, padding, dropout, small_tiles):
    options, _ = options_of(mask, heads, lengths, padding, dropout)
    q, k, v, _, _ = make_inputs(heads, lengths)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    attention = lambda *qkv: sdpa_bob(*qkv, **options)  # noqa: E731
    torch.autograd.gradcheck(attention, inputs, fast_mode=True, check_forward_ad=True)
    torch.autograd.gradgradcheck(
        attention,
        inputs,
        fast_mode=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=False,
        check_undefined_grad=False,
    )


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_missing_tangents(tensors, used):
    """As when some projections are frozen."""
    qkv, tangents = tensors

    def along(function):
        def of_used(*given):
            full = list(qkv)
            for i, x in zip(used, given):
                full[i] = x
            return function(*full)

        return jvp(of_used, tuple(qkv[i] for i in used), tuple(tangents[i] for i in used))

    assert_equals_math(lambda: along(lambda *x: sdpa_bob(*x, is_causal=True)))
    assert_equals_math(lambda: along(grad(lambda *x: loss(*x, is_causal=True), argnums=(0, 1, 2))))


@options
def test_reverse_over_forward(tensors, options):
    qkv, tangents = tensors

    def directional(qkv, tangents):
        return jvp(lambda *x: loss(*x, **options), qkv, tangents)[1]

    assert_equals_math(lambda: grad(directional, argnums=(0, 1))(qkv, tangents))


@options
def test_dual_tensors_under_autograd(tensors, options):
    """Without torch.func: tangents in the leaves, then autograd in reverse."""
    qkv, tangents = tensors

    def run():
        leaves = [x.clone().requires_grad_() for x in qkv]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents)]
            value = loss(*duals, **options)
            gradients = torch.autograd.grad(value, duals)
            return [tuple(forward_ad.unpack_dual(x)) for x in (value.detach(), *gradients)]

    assert_equals_math(run)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=["causal", "window", "dropout"])
def test_jacfwd_and_hessian(options):
    q, k, v, _, _ = make_inputs((2, 1), (3, 4), batch=1)
    assert_equals_math(lambda: jacfwd(lambda *x: sdpa_bob(*x, **options), argnums=(0, 1, 2))(q, k, v))
    assert_equals_math(lambda: hessian(lambda q: loss(q, k, v, **options))(q))


def test_vmap_of_forward_over_reverse(tensors):
    qkv, tangents = tensors

    def one(qkv, tangents):
        return jvp(
            grad(lambda *x: loss(*(y[None] for y in x), is_causal=True), argnums=(0, 1, 2)), qkv, tangents
        )

    assert_equals_math(lambda: vmap(one)(qkv, tangents))


def test_attention_of_constants_has_no_tangent(tensors):
    (q, k, v), _ = tensors
    value, tangent = jvp(lambda x: (x * sdpa_bob(q, k, v)).sum(), (q,), (q,))
    torch.testing.assert_close(value, tangent)


# As test_derivatives has them: the rounding of the outputs, and of what a later pass reads.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((dtype, False) for dtype in TOLERANCE), (torch.bfloat16, True), (torch.float16, True)],
    ids=str,
)
def test_low_precision(dtype, autocast):
    rounded = make_inputs((4, 2), (128, 128), head_dim=64, dtype=dtype, batch=1)
    q, k, v, do, tangents = rounded
    tangents = *tangents, do.flip(2)
    exact = tangents_of_both_passes(
        lambda *x: reference_attention(*x, is_causal=True),
        *(x.double() for x in (q, k, v, do)),
        tuple(t.double() for t in tangents),
    )
    wide = torch.float32 if autocast else dtype
    arguments = [x.to(wide) for x in (q, k, v)], do, (*(t.to(wide) for t in tangents[:3]), tangents[3])
    with torch.autocast("cpu", dtype=dtype if autocast else torch.bfloat16, enabled=autocast):
        actual = tangents_of_both_passes(
            lambda *x: sdpa_bob(*x, is_causal=True), *arguments[0], *arguments[1:]
        )
    for got, expected in zip(actual, exact):
        for x, y in zip(got, expected):
            assert (x.double() - y).norm() <= TOLERANCE[dtype] * y.norm()


def forward_over_reverse(q, k, v, t_q, t_k, t_v, **options):
    gradient = grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2))
    return jvp(gradient, (q, k, v), (t_q, t_k, t_v))


@pytest.mark.parametrize(
    "options,mode", [*((o, "real") for o in OPTIONS[1:]), (OPTIONS[0], "fake")],
    ids=["window", "dropout", "padding", "causal-fake"],
)  # fmt: skip
def test_make_fx(tensors, options, mode):
    """The graph holds operators, and torch.compile takes it."""
    qkv, tangents = tensors
    traced = make_fx(lambda *x: forward_over_reverse(*x, **options), tracing_mode=mode)(*qkv, *tangents)
    names = [node.target.name() for node in traced.graph.nodes if "flashbob" in str(node.target)]
    assert [
        names.count(f"flashbob::{x}") for x in ("forward", "tangent", "backward", "backward_backward")
    ] == [1, 1, 2, 1]
    fresh = [x.flip(2) for x in (*qkv, *tangents)]
    with set_backend("math"):
        expected = forward_over_reverse(*fresh, **options)
    torch.testing.assert_close(traced(*fresh), expected, rtol=1e-10, atol=1e-11)
    compiled = torch.compile(traced, backend="aot_eager") if mode == "fake" else traced
    torch.testing.assert_close(compiled(*fresh), expected, rtol=1e-10, atol=1e-11)


def test_a_traced_tangent_has_a_gradient(tensors):
    """The operators in a traced graph have formulas of their own."""
    qkv, tangents = tensors
    directional = lambda *x: jvp(lambda *y: loss(*y, is_causal=True), x[:3], x[3:])[1]  # noqa: E731
    traced = make_fx(directional)(*qkv, *tangents)

    def gradients(function):
        inputs = [x.clone().requires_grad_() for x in (*qkv, *tangents)]
        return torch.autograd.grad(function(*inputs), inputs)

    with set_backend("math"):
        expected = gradients(directional)
    torch.testing.assert_close(gradients(traced), expected, rtol=1e-10, atol=1e-11)


def test_under_a_dispatch_mode(tensors):
    """Whatever watches the operators sees tensors whose tangents are taken care of."""
    (q, k, v), (z, _, _) = tensors

    def run():
        with FlopCounterMode(display=False), forward_ad.dual_level():
            value = sdpa_bob(forward_ad.make_dual(q, z), k, v)
            return tuple(forward_ad.unpack_dual(value))

    assert_equals_math(run)


def test_what_is_not_there_raises(tensors):
    (q, k, v), (z, _, _) = tensors
    along = lambda f: lambda q: jvp(f, (q,), (z,))[1]  # noqa: E731
    first = lambda q: loss(q, k, v)  # noqa: E731
    square = lambda f: lambda q: (f(q) ** 2).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="no forward-mode derivative of a forward-mode derivative"):
        along(along(first))(q)
    for third in (
        along(grad(square(grad(first)))),
        grad(square(along(grad(first)))),
        grad(square(grad(along(first)))),
    ):
        with pytest.raises(RuntimeError, match="differentiable twice and a third derivative"):
            third(q)


def test_a_dual_tensor_given_to_the_operator_itself_raises(tensors):
    """As a compiled graph gives it; its tangent would be lost."""
    (q, k, v), (z, _, _) = tensors
    tail = (None, None, 0.25, True, None, 0.0, "tiled")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"under torch\.compile"):
        operators.forward(forward_ad.make_dual(q, z), k, v, *tail)
