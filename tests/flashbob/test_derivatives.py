"""Values and derivatives of sdpa_bob against fp64 autograd through textbook attention, and against finite differences."""

import importlib

import pytest
import torch

from flashbob import sdpa_bob, set_backend
from flashbob.backends import tiled
from flashbob.masking import dropout_keep_mask
from tests.oracle import NAMES, feature_grid, make_inputs, reference_attention, second_order

GRID = list(feature_grid())
IDS = [case[0] for case in GRID]
SEED = torch.tensor([0x123456789ABCDEF, 42])


def options_of(mask, heads, lengths, padding, dropout, batch=2):
    """(options of sdpa_bob, options of the oracle)."""
    ours, reference = dict(mask), dict(mask)
    if padding:
        keys = torch.ones(batch, lengths[1], dtype=torch.bool)
        keys[0, 1::2] = False
        keys[1] = False  # no key at all: rows of zeros
        ours["key_padding_mask"] = reference["key_padding_mask"] = keys
    if dropout:
        keep = dropout_keep_mask(SEED, 0.3, batch, heads[0], range(lengths[0]), range(lengths[1]))
        ours |= {"dropout_p": 0.3, "dropout_seed": SEED}
        reference |= {"dropout_p": 0.3, "keep": keep}
    return ours, reference


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled, "_MIN_TILE", 4)
    monkeypatch.setitem(tiled._TILE_ELEMENTS, "cpu", 16)


@pytest.mark.parametrize("backend", ["tiled", "math", "hybrid", "hvp_materialized"])
@pytest.mark.parametrize("mask,heads,lengths,padding,dropout", [case[1:] for case in GRID], ids=IDS)
def test_equals_autograd_in_fp64(backend, mask, heads, lengths, padding, dropout, small_tiles):
    ours, reference = options_of(mask, heads, lengths, padding, dropout)
    inputs = make_inputs(heads, lengths)
    expected = second_order(lambda *qkv: reference_attention(*qkv, **reference), *inputs)
    with set_backend(backend):
        actual = second_order(lambda *qkv: sdpa_bob(*qkv, **ours), *inputs)
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        # A few hundred roundings of numbers of order 1 to 10.
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("mask,heads,lengths,padding,dropout", [case[1:] for case in GRID], ids=IDS)
def test_finite_differences(mask, heads, lengths, padding, dropout, small_tiles):
    options, _ = options_of(mask, heads, lengths, padding, dropout)
    q, k, v, _, _ = make_inputs(heads, lengths)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    attention = lambda *qkv: sdpa_bob(*qkv, **options)  # noqa: E731
    assert torch.autograd.gradcheck(attention, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, inputs, fast_mode=True)


@pytest.mark.parametrize("head_dim,scale", [(16, None), (17, 0.7), (24, 0.05)])
def test_finite_differences_of_every_element(head_dim, scale):
    """The slow, complete form of the check, with head dimensions that are no power of two and other scales."""
    q, k, v, _, _ = make_inputs((2, 1), (3, 4), batch=1, head_dim=head_dim)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    attention = lambda *qkv: sdpa_bob(*qkv, is_causal=True, scale=scale)  # noqa: E731
    assert torch.autograd.gradcheck(attention, inputs)
    assert torch.autograd.gradgradcheck(attention, inputs)


# Relative L2 against fp64 on the same rounded inputs: the rounding of the outputs and of dq, which the second pass reads.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision(dtype, length, is_causal):
    inputs = make_inputs((4, 2), (length, length), head_dim=64, dtype=dtype, batch=1)
    q, k, v, do, us = inputs
    doubles = [x.double() for x in (q, k, v, do)]
    expected = second_order(
        lambda *qkv: reference_attention(*qkv, is_causal=is_causal), *doubles, tuple(u.double() for u in us)
    )
    actual = second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=is_causal), *inputs)
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        assert x.dtype == dtype
        error = (x.double() - y).norm() / y.norm()
        assert error <= TOLERANCE[dtype], f"{name}: relative L2 error {error:.2e}"


def test_one_key_has_no_second_derivative_of_scores():
    """With a single key P is 1 whatever the scores: only dO and V matter, and only linearly."""
    inputs = make_inputs((2, 2), (1, 1))
    _, dq, dk, _, q2, k2, v2, _ = second_order(lambda *qkv: sdpa_bob(*qkv), *inputs)
    for x in (dq, dk, q2, k2, v2):
        assert x.abs().max() < 1e-15


@pytest.mark.parametrize("backend", ["tiled", "math", "hybrid", "hvp_materialized"])
def test_rows_without_keys_are_zero(backend):
    inputs = make_inputs((2, 2), (9, 4), dtype=torch.float32)
    with set_backend(backend):
        results = second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=True), *inputs)
    for name, x in zip(NAMES, results, strict=True):
        assert x.isfinite().all(), name
        if name in ("o", "dq", "q~", "do~"):
            assert (x[:, :, :5] == 0).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_scores_stay_finite(dtype):
    q, k, v, do, us = make_inputs((2, 2), (64, 64), head_dim=16, dtype=dtype)
    results = second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=True), q * 50, k * 50, v, do, us)
    assert (q * 50 @ (k * 50).mT).abs().max() / 4 > 1e4
    for name, x in zip(NAMES, results, strict=True):
        assert x.isfinite().all(), name


def test_strides():
    """Views of a packed projection, expanded heads and a reversed layout give what contiguous tensors give."""
    packed = torch.randn(2, 10, 3 * 4 * 16, dtype=torch.float64)
    q, k, v = (x.view(2, 10, 4, 16).transpose(1, 2) for x in packed.split(64, dim=-1))
    k = k[:, :1].expand(2, 4, 10, 16)
    v = v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    do, us = torch.randn_like(q), tuple(torch.randn(2, 4, 10, 16, dtype=torch.float64) for _ in range(3))
    actual = second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=True), q, k, v, do, us)
    contiguous = [x.contiguous() for x in (q, k, v, do)]
    expected = second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=True), *contiguous, us)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    # The output keeps q's order of strides, so that merging the heads afterwards is a view.
    assert sdpa_bob(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_missing_cotangents(used):
    """Differentiating only some of dq, dk, dv, as when a projection is frozen."""
    q, k, v, do, us = make_inputs((4, 2), (6, 6))

    def partial_second_order(attention):
        inputs = [x.detach().requires_grad_() for x in (q, k, v, do)]
        o = attention(*inputs[:3])
        first = torch.autograd.grad(o, inputs[:3], inputs[3], create_graph=True)
        outputs, cotangents = [first[i] for i in used], [us[i] for i in used]
        return torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)

    actual = partial_second_order(lambda *qkv: sdpa_bob(*qkv, is_causal=True))
    expected = partial_second_order(lambda *qkv: reference_attention(*qkv, is_causal=True))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_autocast_changes_the_inputs_and_not_the_products():
    """fp32 inputs are rounded once, as PyTorch's attention does; a backward inside the region loses nothing more."""
    q, k, v, do, us = make_inputs((2, 2), (128, 128), dtype=torch.float32, head_dim=32)
    rounded = [x.bfloat16() for x in (q, k, v, do)]
    expected = second_order(lambda *qkv: sdpa_bob(*qkv), *rounded, tuple(u.bfloat16() for u in us))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = second_order(lambda *qkv: sdpa_bob(*qkv), q, k, v, do.bfloat16(), us)
        assert sdpa_bob(q.double(), k.double(), v.double()).dtype == torch.float64
    assert actual[0].dtype == torch.bfloat16
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        torch.testing.assert_close(
            x.float(), y.float(), rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", ["tiled", "hybrid", "hvp_materialized"])
@pytest.mark.parametrize("packed", [False, True])
def test_results_have_the_strides_that_compiled_code_expects(name, packed):
    """Those of empty_like of the inputs, as the operators' fake implementations say."""
    backend = importlib.import_module(f"flashbob.backends.{name}")
    q, k, v, do = (torch.randn(2, 3, 20, 16) for _ in range(4))
    if packed:
        q, k, v = torch.randn(2, 20, 3, 3, 16).permute(2, 0, 3, 1, 4)
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    us = [torch.randn_like(x) for x in (q, k, v)]
    options = {
        "scale": 0.25,
        "is_causal": True,
        "window_size": None,
        "key_padding_mask": None,
        "dropout_p": 0.0,
        "dropout_seed": None,
    }
    o, lse = backend.forward(q, k, v, **options)
    first = backend.backward(do, q, k, v, o, lse, **options)
    second = backend.backward_backward(*us, do, q, k, v, o, lse, first[0], **options)
    for result, x in zip((o, *first, *second), (q, q, k, v, q, k, v, do), strict=True):
        assert result.stride() == torch.empty_like(x).stride()
