"""`sdpa_bob` on a CUDA device against fp64 autograd.

python -m pytest tests/gpu            features × dtypes × lengths × strides, pairs of them: minutes, mostly compiling
FULL=1 python -m pytest tests/gpu     every combination
"""

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flashbob
from flashbob import sdpa_bob
from flashbob.backends import triton
from flashbob.kernels.backward import backward
from flashbob.kernels.column_pass import column_pass
from flashbob.kernels.common import Problem
from flashbob.kernels.row_pass import row_pass
from flashbob.masking import dropout_keep_mask
from tests.oracle import NAMES, make_inputs, second_order

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 4096)
# Specification, section 3: of the result from N = 128 on; below, terms cancel and the scale is that of the terms.
# Between 128 and 512 a tenth more is allowed: the first rows' cancellation still shows (3.1e-3 at N = 200, d = 80, bf16).
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}
FEATURES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_size": 40},
    "padding": {"padding": True},
    "dropout": {"is_causal": True, "dropout_p": 0.2},
}
FULL = bool(os.environ.get("FULL"))


def oracle(q, k, v, *, is_causal=False, window_size=None, key_padding_mask=None, keep=None, dropout_p=0.0):
    """Textbook attention in fp64; like tests/oracle.py's, without its Python loop over rows."""
    heads, num_rows, num_keys = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    distance = (
        torch.arange(num_rows, device=q.device)[:, None]
        + (num_keys - num_rows)
        - torch.arange(num_keys, device=q.device)
    )
    valid = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        valid = distance >= 0
    if window_size is not None:
        valid = valid & (distance < window_size)
    valid = valid[None, None]
    if key_padding_mask is not None:
        valid = valid & key_padding_mask[:, None, None, :]
    weights = torch.where(valid, scores - scores.amax(-1, keepdim=True).detach(), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total == 0, 1.0, total)
    return (p if keep is None else p * keep / (1 - dropout_p)) @ v


def check(dtype, heads, lengths, head_dim, feature, *, batch=2, packed=False):
    options = dict(FEATURES[feature])
    q, k, v, do, cotangents = make_inputs(
        heads, lengths, batch=batch, head_dim=head_dim, dtype=dtype, device=DEVICE
    )
    if (
        packed
    ):  # q, k and v as views of one projection [B, N, 3, H, d]: no copy may be needed, and no other result
        q, k, v = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
        assert not q.is_contiguous()
    reference = {}
    if options.pop("padding", False):
        mask = torch.rand(batch, lengths[1], device=DEVICE) < 0.7
        mask[-1] = False  # a batch element without any key
        options["key_padding_mask"] = reference["key_padding_mask"] = mask
    if "dropout_p" in options:
        options["dropout_seed"] = torch.tensor([12345, 67], device=DEVICE)
        reference["keep"] = dropout_keep_mask(
            options["dropout_seed"],
            options["dropout_p"],
            batch,
            heads[0],
            range(lengths[0]),
            range(lengths[1]),
        )
    reference |= {
        key: value for key, value in options.items() if key in ("is_causal", "window_size", "dropout_p")
    }
    got = second_order(lambda *x: sdpa_bob(*x, **options), q, k, v, do, cotangents)
    expected = second_order(
        lambda *x: oracle(*x, **reference),
        *(x.double() for x in (q, k, v, do)),
        tuple(u.double() for u in cotangents),
    )
    for name, x, y in zip(NAMES, got, expected):
        assert x.isfinite().all(), name
        error = (x.double() - y).norm()
        if min(lengths) >= 128:
            tolerance = TOLERANCE[dtype] * (1.0 if min(lengths) >= 512 else 1.1)
            assert error <= tolerance * y.norm() + 1e-30, f"{name}: {error / y.norm():.1e}"
        else:
            # Sums whose terms cancel: as large as the terms, products of up to four unit-normal tensors.
            scale = max(y.norm().item(), math.sqrt(y.numel()) * 2)
            assert error <= 2 * TOLERANCE[dtype] * scale, f"{name}: {error / scale:.1e}"


def cases():
    if FULL:
        yield from itertools.product(TOLERANCE, LENGTHS, (64, 128), FEATURES, ((4, 4), (4, 2)), (False, True))
        return
    for length in LENGTHS:  # the kernels of the commonest case, at every length
        yield torch.bfloat16, length, 64, "causal", (4, 4), False
    for feature in FEATURES:
        yield torch.bfloat16, 1000, 64, feature, (4, 2), False
        yield torch.float32, 200, 64, feature, (4, 4), False
    for length in (17, 1000):
        yield torch.bfloat16, length, 128, "causal", (4, 4), False
        yield torch.bfloat16, length, 128, "full", (4, 1), False
        yield torch.bfloat16, length, 128, "padding", (4, 1), False
    yield torch.float32, 4096, 64, "causal", (4, 2), False  # sums over many tokens
    yield torch.float16, 1000, 64, "causal", (4, 4), False
    yield torch.bfloat16, 1000, 64, "causal", (4, 4), True


@pytest.mark.parametrize(("dtype", "length", "head_dim", "feature", "heads", "packed"), list(cases()))
def test_derivatives(dtype, length, head_dim, feature, heads, packed):
    if packed and heads[0] != heads[1]:
        pytest.skip("a packed projection has as many key heads as query heads")
    batch = 2
    if length >= 4096:  # the oracle's N×N tensors in fp64 are 128 MiB a head each
        heads, batch = (heads[0] // 2, heads[1] // 2), 2 if feature == "padding" else 1
    check(dtype, heads, (length, length), head_dim, feature, batch=batch, packed=packed)


@pytest.mark.parametrize("lengths", [(300, 500), (500, 300)])
def test_rectangular(lengths):
    check(torch.bfloat16, (4, 2), lengths, 64, "causal")


def test_one_key_head_for_many_query_heads():
    """Few key heads: a group's query heads are shared out over programs, and their sums added up."""
    check(torch.bfloat16, (8, 1), (1000, 1000), 64, "causal", batch=1)
    check(torch.bfloat16, (8, 1), (1000, 1000), 128, "window", batch=1)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("feature", "lengths"),
    [
        ("causal", (530, 530)),
        ("window", (530, 530)),
        ("dropout", (530, 530)),
        ("causal", (1100, 300)),
        ("window", (300, 1100)),
    ],
)
def test_many_blocks_for_each_program(head_dim, feature, lengths):
    """Of ragged sequences, in heads that share keys, some without a key or a row that sees them: the Hopper kernels' programs
    go from block to block."""
    check(torch.bfloat16, (12, 6), lengths, head_dim, feature, batch=16)


def test_counts_of_blocks_end_at_zero():
    """So that the next kernel of the same problem can count from there."""
    q, k, v, do = torch.randn(4, 4, 12, 600, 64, device=DEVICE, dtype=torch.bfloat16)
    problem = Problem.of(q, k, scale=0.125, is_causal=True)
    o, lse = triton.forward(q, k, v, scale=0.125, is_causal=True)
    for _ in range(2):
        dq, _, _ = backward(problem, do, q, k, v, o, lse)
        assert problem.tickets.item() == 0
        _, _, vectors = row_pass(problem, q, k, v, do, q, k, v, o, lse, dq)
        assert problem.tickets.item() == 0
        column_pass(problem, q, k, v, do, q, k, v, vectors)
        assert problem.tickets.item() == 0


def test_a_thread_that_has_not_used_the_device():
    """Like autograd's: TMA descriptors need the device's context, which nothing has made current there."""
    q, k, v, do = torch.randn(4, 2, 4, 600, 64, device=DEVICE, dtype=torch.bfloat16)
    options = {"scale": 0.125, "is_causal": True}
    o, lse = triton.forward(q, k, v, **options)
    expected = triton.backward(do, q, k, v, o, lse, **options)  # compiled and loaded here
    with ThreadPoolExecutor(1) as other:
        got = other.submit(triton.backward, do, q, k, v, o, lse, **options).result()
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 80, 96, 256])
@pytest.mark.parametrize("feature", ["causal", "dropout"])
def test_head_dimensions(head_dim, feature):
    check(torch.bfloat16, (2, 2), (600, 600), head_dim, feature)


@pytest.mark.parametrize("head_dim", [132, 160, 256])
@pytest.mark.parametrize(
    ("feature", "heads", "lengths", "packed"),
    [
        ("full", (4, 4), (1000, 1000), True),
        ("causal", (4, 2), (300, 500), False),
        ("causal", (4, 1), (500, 300), False),
        ("window", (4, 2), (530, 530), False),
        ("padding", (4, 2), (530, 700), False),
        ("dropout", (4, 2), (530, 530), False),
    ],
)
def test_wide_heads(head_dim, feature, heads, lengths, packed):
    """One sum a launch; TMA takes no rows of 132 numbers, which are no multiple of 16 bytes."""
    check(torch.bfloat16, heads, lengths, head_dim, feature, packed=packed)


def inputs(batch=4, heads=12, length=1024, head_dim=64, dtype=torch.bfloat16, scale=1.0):
    torch.manual_seed(0)
    shape = (batch, heads, length, head_dim)
    return [scale * torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(7)]


def whole(q, k, v, do, u_q, u_k, u_v, **options):
    return second_order(lambda *x: sdpa_bob(*x, is_causal=True, **options), q, k, v, do, (u_q, u_k, u_v))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_run_gives_the_same_bits(head_dim):
    x = inputs(head_dim=head_dim)
    first = whole(*x)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, whole(*x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_stay_finite(dtype):
    q, k, *rest = inputs(length=300, dtype=dtype)
    q, k = q * 35, k * 35  # scores of up to about 1e4
    assert all(x.isfinite().all() for x in whole(q, k, *rest))


def test_memory():
    """B=4, H=12, N=8192, d=64: the second backward allocates its outputs, and little else (specification, section 3)."""
    from flashbob.backends import triton

    q, k, v, do, u_q, u_k, u_v = inputs(length=8192)
    options = {"scale": 0.125, "is_causal": True}
    o, lse = triton.forward(q, k, v, **options)
    dq, _, _ = triton.backward(do, q, k, v, o, lse, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    outputs = triton.backward_backward(u_q, u_k, u_v, do, q, k, v, o, lse, dq, **options)
    torch.cuda.synchronize()
    tensors = [q, k, v, do, u_q, u_k, u_v, o, lse, dq, *outputs]
    held = sum(x.numel() * x.element_size() for x in tensors)
    assert torch.cuda.max_memory_allocated() <= 1.2 * held


def test_compiled_and_traced():
    """Under torch.compile one opaque node, and under make_fx the whole second derivative: the results of eager mode."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v, do, u_q, u_k, u_v = inputs(batch=1, heads=2, length=256)
    weights = [x.requires_grad_() for x in (q, k, v)]
    loss = lambda q, k, v: (sdpa_bob(q, k, v, is_causal=True) * do).sum()  # noqa: E731
    eager = torch.autograd.grad(loss(*weights), weights)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*weights), weights)
    for a, b in zip(eager, compiled):
        assert torch.equal(a, b)

    def hvp(q, k, v, *vectors):
        first = torch.autograd.grad(loss(q, k, v), (q, k, v), create_graph=True)
        return torch.autograd.grad(first, (q, k, v), vectors)

    traced = make_fx(hvp)(*weights, u_q, u_k, u_v)
    for a, b in zip(hvp(*weights, u_q, u_k, u_v), traced(*weights, u_q, u_k, u_v)):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_262144_tokens():
    """B=4, H=12, N=262 144, d=64; rows of three heads, and all keys' gradients they touch, against fp64 on samples."""
    q, k, v, do, u_q, u_k, u_v = inputs(length=262_144)
    from flashbob.backends import triton

    options = {"scale": 0.125, "is_causal": True}
    o, lse = triton.forward(q, k, v, **options)
    dq, _, _ = triton.backward(do, q, k, v, o, lse, **options)
    q2, _, _, do2 = triton.backward_backward(u_q, u_k, u_v, do, q, k, v, o, lse, dq, **options)
    rows = torch.tensor([0, 1, 100_003, 262_143], device=DEVICE)
    for b, h in ((0, 0), (3, 11)):
        for i in rows.tolist():
            x = {n: t[b, h].double() for n, t in dict(k=k[..., : i + 1, :], v=v[..., : i + 1, :], u_k=u_k[..., : i + 1, :],
                                                      u_v=u_v[..., : i + 1, :]).items()}  # fmt: skip
            q_i, do_i, u_q_i = (t[b, h, i].double() for t in (q, do, u_q))
            p = (x["k"] @ q_i * 0.125).softmax(0)
            dp = x["v"] @ do_i
            ds = p * (dp - p @ dp)
            f = 0.125 * (x["k"] @ u_q_i + x["u_k"] @ q_i)
            alpha = p @ f
            p_tilde = x["u_v"] @ do_i + f * (dp - p @ dp) - alpha * dp
            s_tilde = p * (p_tilde - p @ p_tilde)
            exact = {
                "o": p @ x["v"],
                "dq": 0.125 * ds @ x["k"],
                "q~": 0.125 * (s_tilde @ x["k"] + ds @ x["u_k"]),
                "do~": p @ x["u_v"] + (p * (f - alpha)) @ x["v"],
            }
            # In the first rows terms cancel (row 0: exactly); they are what rounding is relative to.
            centered, spread = (p * (dp.abs() + (p @ dp).abs()), p * (p_tilde.abs() + (p @ p_tilde).abs()))
            terms = {
                "dq": 0.125 * centered @ x["k"].abs(),
                "q~": 0.125 * (spread @ x["k"].abs() + centered @ x["u_k"].abs()),
                "do~": p @ x["u_v"].abs() + (p * (f.abs() + alpha.abs())) @ x["v"].abs(),
            }
            for name, got in (("o", o), ("dq", dq), ("q~", q2), ("do~", do2)):
                error = (got[b, h, i].double() - exact[name]).norm()
                assert error <= 1e-2 * terms.get(name, exact[name]).norm(), (name, i, error)


def test_backend_choice():
    assert flashbob.resolve_backend(DEVICE).startswith("triton")
