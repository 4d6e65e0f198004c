"""The tangent kernel against fp64 forward mode: compiled on a CUDA device, interpreted without one."""

import importlib
import math

import pytest
import torch
from torch.func import jvp, vjp

from flashbob.masking import dropout_keep_mask
from tests.kernels.test_kernels import (
    CAUSAL,
    DEVICE,
    DTYPES,
    FEATURES,
    LOW_PRECISION,
    TOLERANCE,
    WITH_DROPOUT,
    complete,
    feature,
    kernels,
)
from tests.oracle import make_inputs, reference_attention


def compare(
    heads, lengths, head_dim=16, dtype=torch.float32, batch=2, used=(0, 1, 2), backend=None, **options
):
    inputs = make_inputs(heads, lengths, batch=batch, head_dim=head_dim, dtype=dtype, device=DEVICE)
    *qkv, _, tangents = inputs
    backend = backend or kernels()
    ours = complete(head_dim, **options)
    o, lse = backend.forward(*qkv, **ours)
    given = [t if i in used else None for i, t in enumerate(tangents)]
    actual = backend.tangent(*given, *qkv, o, lse, **ours)

    seed = options.pop("dropout_seed", None)
    if seed is not None:
        options["keep"] = dropout_keep_mask(seed, options["dropout_p"], batch, heads[0], *map(range, lengths))
    exact = [t.double() if i in used else torch.zeros_like(t).double() for i, t in enumerate(tangents)]
    attention = lambda *x: reference_attention(*x, **options)  # noqa: E731
    _, expected = jvp(attention, tuple(x.double() for x in qkv), tuple(exact))
    assert actual.dtype == dtype and actual.stride() == torch.empty_like(qkv[0]).stride()
    assert actual.isfinite().all()
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[dtype], f"relative L2 error {error:.2e}"


@pytest.mark.parametrize("mask,heads,lengths", FEATURES.values(), ids=FEATURES)
def test_features(mask, heads, lengths):
    compare(heads, lengths, **feature(mask, lengths[1]))


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("name", ["causal-gqa-square", "window-mha-wide-dropout"])
def test_features_in_low_precision(name, dtype):
    mask, heads, lengths = FEATURES[name]
    compare(heads, lengths, head_dim=32, dtype=dtype, **feature(mask, lengths[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
def test_head_dimensions(head_dim, dtype):
    compare((2, 1), (35, 45), head_dim=head_dim, dtype=dtype, batch=1, is_causal=True)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("dropout", [False, True])
def test_missing_tangents(used, dropout):
    compare((2, 1), (40, 40), batch=1, used=used, scale=0.4, **(CAUSAL | WITH_DROPOUT if dropout else {}))


def test_rows_without_keys_are_zero():
    q, k, v, _, tangents = make_inputs((2, 2), (70, 30), dtype=torch.float32, device=DEVICE)
    options = complete(16, is_causal=True)
    o, lse = kernels().forward(q, k, v, **options)
    t_o = kernels().tangent(*tangents, q, k, v, o, lse, **options)
    assert t_o.isfinite().all() and (t_o[:, :, :40] == 0).all() and (t_o[:, :, 40:] != 0).any()


# The exponential of a masked score may overflow; a select drops it. NumPy, in the interpreter, says so.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_large_scores_stay_finite():
    q, k, v, _, tangents = make_inputs((2, 2), (64, 64), dtype=torch.float16, device=DEVICE)
    options = complete(16, is_causal=True)
    o, lse = kernels().forward(q * 50, k * 50, v, **options)
    assert lse.isfinite().all() and lse.max() > 1e4 / math.sqrt(16)
    assert kernels().tangent(*tangents, q * 50, k * 50, v, o, lse, **options).isfinite().all()


def test_strides_and_no_tangent():
    packed = torch.randn(2, 45, 3 * 2 * 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q, k, v = (x.view(2, 45, 2, 32).transpose(1, 2) for x in packed.split(64, dim=-1))
    t_q, t_k, t_v = q.flip(2).mT.contiguous().mT, k[:, :1].expand(2, 2, 45, 32), v.flip(3)
    options = complete(32, is_causal=True)
    o, lse = kernels().forward(q, k, v, **options)
    got = kernels().tangent(t_q, t_k, t_v, q, k, v, o, lse, **options)
    assert got.transpose(1, 2).is_contiguous()  # q's order of strides
    contiguous = [x.contiguous() for x in (t_q, t_k, t_v, q, k, v)]
    assert torch.equal(got, kernels().tangent(*contiguous, o, lse, **options))
    assert not kernels().tangent(None, None, None, q, k, v, o, lse, **options).any()


@pytest.mark.parametrize("name", ["triton", "fused", "three_pass", "single_pass_atomic", "paper", "hybrid"])
def test_every_backend_has_it(name):
    compare(
        (2, 1),
        (40, 40),
        batch=1,
        is_causal=True,
        backend=importlib.import_module(f"flashbob.backends.{name}"),
    )


@pytest.mark.parametrize("backend", ["triton", "three_pass"])
def test_through_sdpa_bob_forward_over_reverse(backend):
    import flashbob

    q, k, v, do, tangents = make_inputs((2, 1), (20, 35), batch=1, dtype=torch.float32, device=DEVICE)

    def both(attention, *tensors):
        def run(q, k, v, do):
            o, pull = vjp(attention, q, k, v)
            return o, *pull(do)

        return jvp(run, tensors[:4], tensors[4:])

    with flashbob.set_backend(backend):
        got = both(lambda *x: flashbob.sdpa_bob(*x, is_causal=True), q, k, v, do, *tangents, do.flip(2))
    exact = [x.double() for x in (q, k, v, do, *tangents, do.flip(2))]
    expected = both(lambda *x: reference_attention(*x, is_causal=True), *exact)
    for x, y in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert (x.double() - y).norm() <= TOLERANCE[torch.float32] * y.norm()
