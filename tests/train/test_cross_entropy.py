"""The chunked cross-entropy against PyTorch's, in value and both derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from optim import HessianVectorProduct
from train import cross_entropy
from train.cross_entropy import linear_cross_entropy
from train.model import GPT, GPTConfig, attention_function

VOCAB, PADDED = 37, 40


def plain(x, weight, targets):
    logits = (x @ weight.T)[:, :VOCAB]
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def inputs(tokens=23, dim=8, dtype=torch.float64, ignored=True):
    torch.manual_seed(0)
    x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCAB, (tokens,))
    if ignored:
        targets[::4] = -100
    return x, weight, targets


def derivatives(loss, x, weight, targets, u_x, u_w):
    """Loss, gradient, and the gradient of ⟨gradient, u⟩: with a factor, so that the loss's cotangent is not 1."""
    value = 3.0 * loss(x, weight, targets)
    first = torch.autograd.grad(value, (x, weight), create_graph=True)
    pairs = [(g, u) for g, u in zip(first, (u_x, u_w)) if u is not None]
    second = torch.autograd.grad([g for g, _ in pairs], (x, weight), [u for _, u in pairs])
    return value, *first, *second


@pytest.mark.parametrize("chunk", [5, 23, 1000])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("used", ["both", "x", "weight"])
def test_both_derivatives_equal_pytorchs(chunk, ignored, used):
    x, weight, targets = inputs(ignored=ignored)
    u_x = torch.randn_like(x) if used != "weight" else None
    u_w = torch.randn_like(weight) if used != "x" else None
    chunked = lambda *t: linear_cross_entropy(*t, VOCAB, chunk)  # noqa: E731
    got = derivatives(chunked, x, weight, targets, u_x, u_w)
    expected = derivatives(plain, x, weight, targets, u_x, u_w)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [3, 4])
def test_against_finite_differences(chunk):
    x, weight, targets = inputs(tokens=4, dim=2)
    function = lambda x, w: linear_cross_entropy(x, w, targets, VOCAB, chunk)  # noqa: E731
    torch.autograd.gradcheck(function, (x, weight), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (x, weight), check_fwd_over_rev=True)


@pytest.mark.parametrize("chunk", [6, 23])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_forward_mode_equals_pytorchs(used, chunk):
    """Of the loss (with and without a graph of it), over its gradient, and under reverse; squared, so that c has a tangent."""
    *tensors, targets = inputs()
    points, tangents = (
        tuple(tensors[i].detach() for i in used),
        tuple(torch.randn_like(tensors[i]) for i in used),
    )

    def results(loss):
        def square(*given):
            full = [x.detach() for x in tensors]
            for i, x in zip(used, given):
                full[i] = x
            return loss(*full, targets) ** 2

        along = lambda *points: jvp(square, points, tangents)[1]  # noqa: E731
        argnums = tuple(range(len(used)))
        with torch.no_grad():
            forward = jvp(square, points, tangents)
        return forward, jvp(grad(square, argnums), points, tangents), grad(along, argnums)(*points)

    got = results(lambda *t: linear_cross_entropy(*t, VOCAB, chunk))
    torch.testing.assert_close(got, results(plain), rtol=1e-11, atol=1e-13)


def test_the_losss_own_cotangent_is_differentiated():
    """loss² has a second derivative through the factor 2 · loss."""
    x, weight, targets = inputs()
    u = torch.randn_like(x), torch.randn_like(weight)
    square = lambda loss: lambda *t: loss(*t) ** 2  # noqa: E731
    got = derivatives(square(lambda *t: linear_cross_entropy(*t, VOCAB, 6)), x, weight, targets, *u)
    for a, b in zip(got, derivatives(square(plain), x, weight, targets, *u), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_without_gradients_only_the_loss_is_made(monkeypatch):
    x, weight, targets = inputs()
    monkeypatch.setattr(cross_entropy, "_loss_and_gradient", None)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(x, weight, targets, VOCAB, 6), plain(x, weight, targets)
        )


def test_float16_is_refused():
    x, weight, targets = inputs(dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"):
        linear_cross_entropy(x, weight, targets, VOCAB, 6)


def test_targets_with_any_strides(monkeypatch):
    monkeypatch.setattr(cross_entropy, "INTERPRETED_ON_CPU", True)
    x, weight, targets = inputs(dtype=torch.float32)
    spread = torch.stack([targets, targets.flip(0)], dim=1)[:, 0]
    assert not spread.is_contiguous()
    loss = linear_cross_entropy(x, weight, spread, VOCAB, 6)
    torch.testing.assert_close(loss, plain(x, weight, targets))


def test_other_numbers_of_tokens_compile_nothing_new():
    """Once for one number of tokens, once for any in several chunks, once for any in one."""
    _, weight, _ = inputs()
    compiles = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, targets: linear_cross_entropy(x, weight, targets, VOCAB, 8), backend=compiles
    )
    for tokens in (20, 24, 28, 33, 41):
        x, _, targets = inputs(tokens=tokens)
        torch.testing.assert_close(compiled(x, targets), plain(x, weight, targets))
    assert compiles.frame_count <= 2


def test_no_target_that_counts_gives_nan_as_in_pytorch():
    x, weight, targets = inputs()
    targets[:] = -100
    assert linear_cross_entropy(x, weight, targets, VOCAB, 6).isnan() and plain(x, weight, targets).isnan()


def test_no_tokens_at_all_give_what_pytorch_gives():
    x, weight, targets = inputs(tokens=0)
    u = torch.randn_like(x), torch.randn_like(weight)
    got = derivatives(lambda *t: linear_cross_entropy(*t, VOCAB, 6), x, weight, targets, *u)
    value, _, first, _, second = got
    assert value.isnan() and (first == 0).all() and (second == 0).all()


@pytest.mark.parametrize("chunk", [6, 23])
def test_huge_padding_takes_no_part(chunk):
    """Neither rows of W beyond the vocabulary nor those of its cotangent."""
    x, weight, targets = inputs()
    u_w = torch.randn_like(weight)
    u_w[VOCAB:] = 1e300
    huge = weight.detach().clone()
    huge[VOCAB:] = 1e300
    huge.requires_grad_()
    chunked = lambda *t: linear_cross_entropy(*t, VOCAB, chunk)  # noqa: E731
    u_x = torch.randn_like(x)
    for a, b in zip(
        derivatives(chunked, x, huge, targets, u_x, u_w), derivatives(plain, x, weight, targets, u_x, u_w)
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [6, 23])
def test_a_traced_first_derivative_can_be_differentiated(chunk):
    """Also at a cotangent that has a graph itself."""
    x, weight, targets = inputs()
    u = torch.randn_like(x), torch.randn_like(weight)

    def first(x, weight, c):
        return torch.autograd.grad(linear_cross_entropy(x, weight, targets, VOCAB, chunk) * c, (x, weight))

    c = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    traced = make_fx(first)(x.detach().requires_grad_(), weight.detach().requires_grad_(), c.detach())
    got = torch.autograd.grad(traced(x, weight, c), (x, weight, c), u)
    value = 3.0 * plain(x, weight, targets)
    exact = torch.autograd.grad(value, (x, weight), create_graph=True)
    expected = [
        *torch.autograd.grad(exact, (x, weight), u, retain_graph=True),
        sum((g * v).sum() for g, v in zip(exact, u)) / 3.0,
    ]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_third_derivative_is_refused():
    x, weight, targets = inputs()
    first = torch.autograd.grad(linear_cross_entropy(x, weight, targets, VOCAB, 6), x, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="third derivative"):
        torch.autograd.grad(second.sum(), x)
    loss = lambda x: linear_cross_entropy(x, weight.detach(), targets, VOCAB, 6)  # noqa: E731
    along = lambda f: lambda x: jvp(f, (x,), (x,))[1]  # noqa: E731
    with pytest.raises(RuntimeError, match="third derivative"):
        along(along(grad(loss)))(x.detach())


@pytest.mark.parametrize("chunk", [4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_in_the_interpreter(monkeypatch, dtype, chunk):
    """Rows longer than a program's block, and a vocabulary that ends inside one."""
    monkeypatch.setattr(cross_entropy, "INTERPRETED_ON_CPU", True)
    for name in ("_NORMALIZE", "_DIFFERENTIATE"):
        monkeypatch.setattr(cross_entropy, name, cross_entropy._Launch(block=16, num_warps=1))
    x, weight, targets = inputs(tokens=9, dtype=dtype)
    u_x, u_w = torch.randn_like(x), torch.randn_like(weight)
    got = derivatives(lambda *t: linear_cross_entropy(*t, VOCAB, chunk), x, weight, targets, u_x, u_w)
    wide = [t.detach().double() for t in (x, weight, u_x, u_w)]
    x64, w64 = (t.requires_grad_() for t in wide[:2])
    expected = derivatives(plain, x64, w64, targets, *wide[2:])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # G and H are rounded to the dtype
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_a_kept_gradient_is_as_good_as_logits_made_again():
    """In bf16, with targets of small probability: p − 1 says nothing of p there."""
    torch.manual_seed(0)
    vocab = 3000
    x = torch.randn(100, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.1 * torch.randn(vocab, 64)).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (100,))
    u = torch.randn_like(x), torch.randn_like(weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = lambda x, w, t: F.cross_entropy(x @ w.T, t)  # noqa: E731
    expected = derivatives(exact, *wide, targets, *(t.double() for t in u))
    errors = []
    for chunk in (40, 100):
        loss = lambda *t, chunk=chunk: linear_cross_entropy(*t, vocab, chunk)  # noqa: E731
        got = derivatives(loss, x, weight, targets, *u)
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, expected)])
    again, kept = errors
    assert max(again) < 1e-2 and all(b <= 1.1 * a + 1e-4 for a, b in zip(again, kept)), errors


def models(dtype=torch.float64):
    config = dict(block_size=16, vocab_size=VOCAB, num_layers=1, num_heads=2, embed_dim=32)
    torch.manual_seed(0)
    one = GPT(GPTConfig(**config), attention_function("tiled")).to(dtype)
    two = GPT(GPTConfig(**config, loss_chunk=7), attention_function("tiled")).to(dtype)
    two.load_state_dict(one.state_dict())
    return one, two, torch.randint(VOCAB, (2, 16)), torch.randint(VOCAB, (2, 16))


@pytest.mark.parametrize("compile,method", [(False, "reverse"), (True, "reverse"), (False, "forward")])
def test_hessian_vector_products_of_a_model_with_tied_weights(compile, method):
    one, two, tokens, targets = models()
    loss = lambda m, x, y: m(x, y)[1]  # noqa: E731
    vectors = [torch.randn_like(p) for p in one.parameters()]
    expected = HessianVectorProduct(one, loss, compile=False)(vectors, tokens, targets)
    got = HessianVectorProduct(two, loss, compile=compile, method=method)(vectors, tokens, targets)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_traced_and_compiled_and_under_autocast():
    one, two, tokens, targets = models(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(one(tokens, targets)[1], list(one.parameters()))
        got = torch.autograd.grad(two(tokens, targets)[1], list(two.parameters()))
        compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
        again = torch.autograd.grad(compiled(tokens, targets)[1], list(two.parameters()))
    for a, b, c in zip(got, expected, again, strict=True):
        torch.testing.assert_close(a, c)
        assert (a - b).norm() <= 2e-2 * b.norm()  # bf16 products
    x, weight, targets = inputs()

    def second(x, weight, targets):
        first = torch.autograd.grad(
            linear_cross_entropy(x, weight, targets, VOCAB, 6), (x, weight), create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    for a, b in zip(
        make_fx(second, tracing_mode="fake")(x, weight, targets)(x, weight, targets),
        second(x, weight, targets),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_run_with_a_chunked_loss_is_the_same_run(tmp_path):
    from tests.train.launch import SMALL, SOPHIA, series, train_here

    for name, chunk in (("whole", "null"), ("chunked", "20")):
        train_here(*SMALL, *SOPHIA, f"model.loss_chunk={chunk}", run=tmp_path / name)
    for key in ("train/loss", "val/loss", "hessian/norm"):
        assert series(tmp_path / "chunked", key) == pytest.approx(series(tmp_path / "whole", key), rel=1e-9)
