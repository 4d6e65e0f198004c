"""The Triton kernels against fp64 autograd: compiled on a CUDA device, interpreted without one."""

import importlib
import math

import pytest
import torch

from flashbob.masking import dropout_keep_mask
from tests.oracle import NAMES, make_inputs, reference_attention, second_order

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (seed, offset), each more than a word: only the low word of the offset counts.
SEED = torch.tensor([0x123456789ABCDEF, (5 << 32) + 42])
DROPOUT = 0.3

# Relative L2 error against fp64 on the same rounded inputs. fp32: each result is a product of a few sums of
# up to 257 terms, each rounded to 6e-8; errors grow like the square root of the number of roundings, and 3e-7
# is typical. fp16 and bf16: P, dS and the like are rounded to the dtype before they enter a product (half a
# unit in the last place, 2.4e-4 at most and 1.4e-4 on average for fp16), o and dq before the second pass
# reads them, and every result at the end.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
# The interpreter's bf16 product is wrong.
LOW_PRECISION = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
DTYPES = [torch.float32, *LOW_PRECISION]


@pytest.fixture(autouse=True)
def exact_reference_products():
    """The oracle is fp64; nothing here may run in TF32 either."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(previous)


def kernels():
    from flashbob.backends import triton

    return triton


def complete(head_dim, **options):
    """The options as `sdpa_bob` passes them on."""
    defaults = {
        "scale": 1 / math.sqrt(head_dim),
        "is_causal": False,
        "window_size": None,
        "key_padding_mask": None,
        "dropout_p": 0.0,
        "dropout_seed": None,
    }
    return defaults | options


def padding_mask(batch, num_keys):
    """The last batch element has no key at all."""
    mask = torch.rand(batch, num_keys, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[-1] = False
    return mask.to(DEVICE)


def run(q, k, v, do, cotangents, *, reuse_dq=True, backend=None, **options):
    """(o, dq, dk, dv, q~, k~, v~, do~) by the kernels."""
    backend = backend or kernels()
    options = complete(q.shape[-1], **options)
    o, lse = backend.forward(q, k, v, **options)
    first = backend.backward(do, q, k, v, o, lse, **options)
    dq = first[0] if reuse_dq else None
    second = backend.backward_backward(*cotangents, do, q, k, v, o, lse, dq, **options)
    return o, *first, *second


def oracle(q, k, v, do, cotangents, *, dropout_seed=None, **options):
    doubles = [x.double() for x in (q, k, v, do)]
    if dropout_seed is not None:
        lengths = range(q.shape[2]), range(k.shape[2])
        options["keep"] = dropout_keep_mask(dropout_seed, options["dropout_p"], *q.shape[:2], *lengths)
    cotangents = tuple(
        torch.zeros_like(x) if u is None else u.double() for u, x in zip(cotangents, (q, k, v))
    )
    return second_order(lambda *qkv: reference_attention(*qkv, **options), *doubles, cotangents)


def check(actual, expected, dtype, inputs):
    for name, x, y, like in zip(NAMES, actual, expected, inputs, strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape, name
        assert x.isfinite().all(), name
        error = ((x.double() - y).norm() / y.norm()).item() if y.norm() > 0 else x.abs().max().item()
        assert error <= TOLERANCE[dtype], f"{name}: relative L2 error {error:.2e}"


def compare(
    heads,
    lengths,
    head_dim=16,
    dtype=torch.float32,
    batch=2,
    reuse_dq=True,
    used=(0, 1, 2),
    backend=None,
    **options,
):
    inputs = make_inputs(heads, lengths, batch=batch, head_dim=head_dim, dtype=dtype, device=DEVICE)
    q, k, v, do, us = inputs
    us = tuple(u if i in used else None for i, u in enumerate(us))
    actual = run(q, k, v, do, us, reuse_dq=reuse_dq, backend=backend, **options)
    expected = oracle(q, k, v, do, us, **options)
    check(actual, expected, dtype, (q, q, k, v, q, k, v, do))


CAUSAL = {"is_causal": True}
WINDOW = {"is_causal": True, "window_size": 41}
WITH_DROPOUT = {"dropout_p": DROPOUT, "dropout_seed": SEED.to(DEVICE)}

# Every pair of features meets: mask, heads, lengths, padding, dropout. Tiles are 32 by 32 in the interpreter
# and up to 128 on a device, so that lengths around 16, 64 and 128 have ragged, single and missing tiles.
FEATURES = {
    "full-mha-square": ({}, (2, 2), (65, 65)),
    "full-gqa-wide-padding": ({"key_padding_mask": 1}, (4, 2), (33, 130)),
    "full-mqa-tall-dropout": (WITH_DROPOUT, (2, 1), (130, 33)),
    "full-gqa-square-padding-dropout": (WITH_DROPOUT | {"key_padding_mask": 1}, (4, 2), (64, 64)),
    "causal-mha-tall-padding": (CAUSAL | {"key_padding_mask": 1}, (2, 2), (127, 64)),
    "causal-gqa-square": (CAUSAL, (4, 2), (127, 127)),
    "causal-mqa-wide-dropout": (CAUSAL | WITH_DROPOUT, (2, 1), (65, 129)),
    "window-mha-wide-dropout": (WINDOW | WITH_DROPOUT, (2, 2), (65, 130)),
    "window-gqa-tall": (WINDOW, (4, 2), (127, 96)),
    "window-mqa-square-padding": (WINDOW | {"key_padding_mask": 1}, (2, 1), (129, 129)),
}


def feature(mask, num_keys):
    """What `compare` takes of a feature. Two sequences where padding, and once dropout with it, tells them apart."""
    padded = "key_padding_mask" in mask
    return mask | ({"batch": 2, "key_padding_mask": padding_mask(2, num_keys)} if padded else {"batch": 1})


@pytest.mark.parametrize("mask,heads,lengths", FEATURES.values(), ids=FEATURES)
def test_features(mask, heads, lengths):
    compare(heads, lengths, **feature(mask, lengths[1]))


def test_what_launches_of_one_sum_compute_in_fp64():
    """Each launch's formula, from α and α D + E known, on whole matrices."""
    q, k, v, do, (u_q, u_k, u_v) = make_inputs((2, 2), (9, 12))
    tau, keep = 0.25, dropout_keep_mask(SEED, DROPOUT, 2, 2, range(9), range(12))
    options = {"is_causal": True, "window_size": 7, "dropout_p": DROPOUT}
    expected = second_order(
        lambda *qkv: reference_attention(*qkv, keep=keep, **options), q, k, v, do, (u_q, u_k, u_v)
    )
    distance = torch.arange(9)[:, None] + 3 - torch.arange(12)
    p = torch.where((distance >= 0) & (distance < 7), tau * q @ k.mT, -torch.inf).softmax(-1)
    g = keep.double() / (1 - DROPOUT)
    f, a, c = tau * (u_q @ k.mT + q @ u_k.mT), g * (do @ v.mT), g * (do @ u_v.mT)
    delta = (do * ((g * p) @ v)).sum(-1, keepdim=True)
    alpha = (p * f).sum(-1, keepdim=True)  # vectors
    e0 = (p * (c + f * (a - delta))).sum(-1, keepdim=True)
    h, ds = f - alpha, p * (a - delta)
    s_tilde = p * (c + h * (a - delta) - e0)
    results = (
        tau * (s_tilde @ k + ds @ u_k),
        tau * (s_tilde.mT @ q + ds.mT @ u_q),
        (g * p * h).mT @ do,
        (g * p) @ u_v + (g * p * h) @ v,
    )
    for name, x, y in zip(NAMES[4:], results, expected[4:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def one_sum(monkeypatch):
    """Launches of one sum each, as for wide heads, whatever the head dimension and type."""
    from flashbob.kernels.common import Problem

    monkeypatch.setattr(Problem, "one_sum", True)


# Half of them with tiles by TMA, whose descriptors the interpreter reads too.
@pytest.mark.parametrize(
    "name,tma",
    [
        ("full-gqa-wide-padding", True),
        ("full-mqa-tall-dropout", False),
        ("causal-mha-tall-padding", False),
        ("causal-gqa-square", True),
        ("window-mha-wide-dropout", True),
        ("window-gqa-tall", False),
    ],
)
def test_features_with_one_sum_a_launch(one_sum, monkeypatch, name, tma):
    from flashbob.kernels import common

    if DEVICE.type != "cuda":
        monkeypatch.setattr(common, "_has_tma", lambda device: tma)
    mask, heads, lengths = FEATURES[name]
    lengths = tuple(length // 2 for length in lengths)
    compare(heads, lengths, head_dim=24, **feature(mask, lengths[1]))


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_missing_cotangents_with_one_sum_a_launch(one_sum, used):
    compare((2, 1), (20, 20), batch=1, used=used, is_causal=True, **WITH_DROPOUT)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize(
    "name,head_dim",
    [
        ("causal-gqa-square", 160),
        ("full-gqa-square-padding-dropout", 160),
        ("window-mqa-square-padding", 256),
    ],
)
def test_features_of_wide_heads(name, head_dim, dtype):
    mask, heads, lengths = FEATURES[name]
    if DEVICE.type != "cuda":
        lengths = (40, 40)  # for time
    compare(heads, lengths, head_dim=head_dim, dtype=dtype, **feature(mask, lengths[1]))


def test_results_of_wide_heads_are_written_where_they_are_wanted():
    """Of any strides, and on every run with the same bits."""
    from flashbob.kernels.column_pass import column_pass
    from flashbob.kernels.common import Problem
    from flashbob.kernels.row_pass import row_pass

    q, k, v, do, us = make_inputs((2, 1), (20, 33), batch=1, head_dim=136, dtype=torch.float16, device=DEVICE)
    options = complete(136, is_causal=True)
    problem = Problem.of(q, k, **options)
    o, lse = kernels().forward(q, k, v, **options)
    dq, _, _ = kernels().backward(do, q, k, v, o, lse, **options)

    def both(outs):
        grad_q, grad_do, vectors = row_pass(problem, *us, do, q, k, v, o, lse, dq, outs and outs[0])
        return grad_q, grad_do, *column_pass(problem, *us, do, q, k, v, vectors, outs and outs[1:])

    outs = [torch.empty_like(x.mT.contiguous()).mT for x in (q, k, v)]
    expected, got = both(None), both(outs)
    assert [got[i] is out for i, out in zip((0, 2, 3), outs)] == [True] * 3
    assert all(map(torch.equal, expected, got))


@pytest.mark.parametrize("head_dim", [128, 160])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_which_launches_are_made(monkeypatch, head_dim, dtype):
    """A sum each for wide heads of narrow types, but for the paper's form."""
    from flashbob.kernels import backward, column_pass, row_pass, tuning

    made = []
    for module in (backward, column_pass, row_pass):
        monkeypatch.setattr(module, "launch", lambda *arguments: made.append(arguments[4]))
    q, k, v, do, us = make_inputs((2, 1), (5, 5), head_dim=head_dim, dtype=dtype, device=DEVICE)
    lse = torch.zeros(q.shape[:3], device=DEVICE)
    problem = backward.Problem.of(q, k, **complete(head_dim))

    def second(dq):
        made.clear()
        _, _, vectors = row_pass.row_pass(problem, *us, do, q, k, v, q, lse, dq)
        column_pass.column_pass(problem, *us, do, q, k, v, vectors)
        return made.copy()

    with tuning.forced("forward", 16, 16, 1, 1):  # which is no reason to launch anything else
        backward.backward(problem, do, q, k, v, q, lse)
        first = made.copy()
        with_dq, paper = second(q), second(None)
    with tuning.forced("row_pass", 16, 16, 1, 1):
        whole = second(q)
    if head_dim == 160 and dtype == torch.float16:
        assert first == ["backward_rows", "backward_keys_k", "backward_keys_v"]
        columns = ["column_pass_k", "column_pass_v"]
        assert with_dq == ["row_pass_vectors", "row_pass_q", "row_pass_do", *columns]
        assert paper == whole == ["row_pass", *columns]
        assert {*with_dq, *first} <= {*tuning.SEARCHED}
    else:
        assert first == ["backward_rows", "backward_keys"]
        assert with_dq == paper == whole == ["row_pass", "column_pass"]


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize(
    "name", ["causal-gqa-square", "full-gqa-square-padding-dropout", "window-mha-wide-dropout"]
)
def test_features_in_low_precision(name, dtype):
    mask, heads, lengths = FEATURES[name]
    compare(heads, lengths, head_dim=32, dtype=dtype, **feature(mask, lengths[1]))


@pytest.mark.parametrize("length", [2, 15, 16, 17, 63, 64, 257])
def test_lengths(length):
    compare((1, 1), (length, length), batch=1, is_causal=True)


@pytest.mark.parametrize("lengths", [(1, 70), (70, 1), (33, 1), (1, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_single_rows_and_keys(lengths, is_causal):
    """A step of decoding, and its transpose. With one key, what is exactly zero is compared absolutely."""
    inputs = make_inputs((2, 1), lengths, device=DEVICE, dtype=torch.float32)
    q, k, v, do, us = inputs
    actual = run(q, k, v, do, us, is_causal=is_causal)
    expected = oracle(q, k, v, do, us, is_causal=is_causal)
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        # Sums of up to 70 products of order 10.
        torch.testing.assert_close(
            x.double(), y, rtol=1e-5, atol=5e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_one_key_has_no_second_derivative_of_scores():
    q, k, v, do, us = make_inputs((2, 2), (1, 1), device=DEVICE, dtype=torch.float32)
    _, dq, dk, _, q2, k2, v2, _ = run(q, k, v, do, us)
    for x in (dq, dk, q2, k2, v2):
        assert x.abs().max() < 2e-5  # cancelled terms are of order 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
def test_head_dimensions(head_dim, dtype):
    """Both sides of a tile's border; a dimension that is no power of two is padded in the kernel."""
    compare((2, 1), (35, 45), head_dim=head_dim, dtype=dtype, batch=1, is_causal=True)


@pytest.mark.parametrize("scale", [0.05, 0.9])
def test_scale(scale):
    compare((1, 1), (40, 40), batch=1, scale=scale)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("dropout", [False, True])
def test_missing_cotangents(used, dropout):
    compare((2, 1), (40, 40), batch=1, used=used, is_causal=True, **(WITH_DROPOUT if dropout else {}))


def test_no_cotangent_gives_zeros():
    q, k, v, do, _ = make_inputs((2, 1), (5, 6), device=DEVICE, dtype=torch.float32)
    second = run(q, k, v, do, (None, None, None))[4:]
    assert all((x == 0).all() for x in second)


@pytest.mark.parametrize("options", [CAUSAL, WINDOW | WITH_DROPOUT], ids=["causal", "window-dropout"])
@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (2,)])
def test_the_form_without_dq_agrees(options, used):
    """R = dQ / τ + D B: both forms are right, and their difference is rounding."""
    compare((2, 1), (70, 70), batch=1, used=used, reuse_dq=False, **options)


@pytest.mark.parametrize("num_keys", [64, 70])
@pytest.mark.parametrize("dropout_p", [DROPOUT, 0.9])
def test_dropout_keeps_what_the_mask_says(num_keys, dropout_p):
    """With q = 0 all weights are equal, and with v = 1 in one place per key, o shows which keys were kept."""
    batch, heads, num_rows, head_dim = 2, 2, 40, 128
    q = torch.zeros(batch, heads, num_rows, head_dim, device=DEVICE)
    v = torch.zeros(batch, heads, num_keys, head_dim, device=DEVICE)
    v[:, :, torch.arange(num_keys), torch.arange(num_keys)] = 1.0
    options = complete(head_dim, dropout_p=dropout_p, dropout_seed=SEED.to(DEVICE))
    o, lse = kernels().forward(q, torch.zeros_like(v), v, **options)
    expected = dropout_keep_mask(SEED.to(DEVICE), dropout_p, batch, heads, range(num_rows), range(num_keys))
    assert torch.equal(o[..., :num_keys] > 0, expected)
    # The same bits in the transposed tiles: dV of do = 1 in a single place per row.
    do = torch.zeros_like(q)
    do[:, :, torch.arange(num_rows), torch.arange(num_rows)] = 1.0
    _, _, dv = kernels().backward(do, q, torch.zeros_like(v), v, o, lse, **options)
    assert torch.equal(dv[..., :num_rows].mT > 0, expected)


def test_strides():
    """Views of a packed projection, expanded heads, reversed layouts: the same bits as contiguous copies."""
    packed = torch.randn(2, 45, 3 * 2 * 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q, k, v = (x.view(2, 45, 2, 32).transpose(1, 2) for x in packed.split(64, dim=-1))
    _, _, _, do, us = make_inputs((2, 2), (45, 45), head_dim=32, dtype=torch.float32, device=DEVICE)
    k = k[:, :1].expand(2, 2, 45, 32)
    v = v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    do = do.mT.contiguous().mT
    us = (us[0], torch.cat([us[1], us[1]], -1)[..., ::2], us[2][:1].expand(2, 2, 45, 32))
    actual = run(q, k, v, do, us, is_causal=True)
    expected = run(
        *(x.contiguous() for x in (q, k, v, do)), tuple(u.contiguous() for u in us), is_causal=True
    )
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(x, y), name
    # The output keeps q's order of strides, so that merging the heads afterwards is a view.
    assert actual[0].transpose(1, 2).is_contiguous()


def test_a_noncontiguous_mask_and_seed():
    mask = padding_mask(2, 80)[:, ::2]
    seed = torch.stack([SEED, SEED + 1], dim=1).to(DEVICE)[:, 0]
    assert not mask.is_contiguous() and not seed.is_contiguous()
    compare((1, 1), (20, 40), key_padding_mask=mask, dropout_p=DROPOUT, dropout_seed=seed)


def test_rows_without_keys_are_zero():
    q, k, v, do, us = make_inputs((2, 2), (70, 30), dtype=torch.float32, device=DEVICE)
    _, lse = kernels().forward(q, k, v, **complete(16, is_causal=True))
    assert (lse[:, :, :40] == math.inf).all() and lse[:, :, 40:].isfinite().all()
    results = run(q, k, v, do, us, is_causal=True)
    for name, x in zip(NAMES, results, strict=True):
        assert x.isfinite().all(), name
        if name in ("o", "dq", "q~", "do~"):
            assert (x[:, :, :40] == 0).all(), name


def test_lse_is_the_natural_logarithm():
    q, k, v, _, _ = make_inputs((2, 1), (40, 50), dtype=torch.float32, device=DEVICE)
    _, lse = kernels().forward(q, k, v, **complete(16))
    expected = (q.double() @ k.double().mT / 4).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=2e-6)


# The exponential of a masked score may overflow; a select drops it. NumPy, in the interpreter, says so.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_stay_finite(dtype):
    q, k, v, do, us = make_inputs((2, 2), (64, 64), dtype=dtype, device=DEVICE)
    for name, x in zip(NAMES, run(q * 50, k * 50, v, do, us, is_causal=True), strict=True):
        assert x.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_same_bits_on_every_run(dtype):
    inputs = make_inputs((2, 1), (40, 75), batch=1, dtype=dtype, device=DEVICE)
    first, second = (run(*inputs, is_causal=True, **WITH_DROPOUT) for _ in range(2))
    for name, x, y in zip(NAMES, first, second, strict=True):
        assert torch.equal(x, y), name


def test_a_window_over_all_keys_is_no_window():
    inputs = make_inputs((2, 1), (40, 50), dtype=torch.float32, device=DEVICE)
    for x, y in zip(run(*inputs, is_causal=True, window_size=50), run(*inputs, is_causal=True), strict=True):
        assert torch.equal(x, y)


def test_fp64_is_refused():
    q, k, v, _, _ = make_inputs((1, 1), (4, 4), device=DEVICE)
    with pytest.raises(TypeError, match="float64"):
        kernels().forward(q, k, v, **complete(16))


def test_row_offsets_in_64_bits():
    """A head that starts beyond 2³¹ elements; on a CPU the pages in between are never touched."""
    from flashbob.kernels.common import Problem

    far = 2**31 + 2**20
    if DEVICE.type == "cuda" and torch.cuda.get_device_properties(DEVICE).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    storage = torch.empty(far + 64 * 16, dtype=torch.float16, device=DEVICE)

    def spread(x):
        view = storage.as_strided(x.shape, (far, far, 16, 1))
        return view.copy_(x)

    q, k, v, do, us = make_inputs((2, 2), (20, 20), batch=1, dtype=torch.float16, device=DEVICE)
    expected = run(q, k, v, do, us)
    options = complete(16)
    o, lse = kernels().forward(spread(q), k, v, **options)
    assert torch.equal(o, expected[0])
    problem = Problem.of(q, k, **options)
    assert not problem.arguments((q,))["WIDE"]
    # Neighbouring rows that far apart: offsets inside a tile need 64 bits too.
    assert problem.arguments((storage.as_strided((1, 1, 2, 16), (1, 1, far, 1)),))["WIDE"]
    dq, _, _ = kernels().backward(do, spread(q), k, v, o, lse, **options)
    assert torch.equal(dq, expected[1])


BASELINES = ["three_pass", "single_pass_atomic"]
SOME_FEATURES = [
    "full-gqa-square-padding-dropout",
    "causal-gqa-square",
    "window-mha-wide-dropout",
    "causal-mha-tall-padding",
]


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("features", SOME_FEATURES)
def test_baselines(name, features):
    mask, heads, lengths = FEATURES[features]
    backend = importlib.import_module(f"flashbob.backends.{name}")
    compare(heads, lengths, backend=backend, **feature(mask, lengths[1]))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("used", [(0,), (1, 2)])
def test_baselines_with_missing_cotangents_and_padded_head_dimensions(name, used):
    backend = importlib.import_module(f"flashbob.backends.{name}")
    compare((2, 1), (40, 40), head_dim=24, batch=1, used=used, is_causal=True, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "paper", "fused", *BASELINES])
def test_through_sdpa_bob_and_autograd(backend):
    """The backends by their names, under autograd twice over, with grouped heads and a rectangular causal mask."""
    import flashbob

    inputs = make_inputs((4, 2), (40, 50), batch=1, dtype=torch.float32, device=DEVICE)
    with flashbob.set_backend(backend):
        got = second_order(lambda *qkv: flashbob.sdpa_bob(*qkv, is_causal=True), *inputs)
    *tensors, cotangents = inputs
    exact = [x.double() for x in tensors], tuple(u.double() for u in cotangents)
    expected = second_order(lambda *qkv: reference_attention(*qkv, is_causal=True), *exact[0], exact[1])
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert (x.double() - y).norm() <= TOLERANCE[torch.float32] * y.norm(), name
