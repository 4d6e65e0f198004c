"""Hessian-vector products on a CUDA device: the CUDA graph and the chunked cross-entropy against eager autograd."""

import pytest
import torch
import torch.nn.functional as F

from optim import HessianVectorProduct
from train.cross_entropy import linear_cross_entropy
from train.model import GPT, GPTConfig, attention_function

pytestmark = pytest.mark.gpu


def models(**changes):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(128, 331, 2, 2, 128, **changes), attention_function("auto"))
        tokens, targets = torch.randint(331, (2, 2, 128))
    return model, tokens, targets


def assert_equal_to_rounding(got, expected):
    """(loss, gradient, H z): sums may run in another order, those of the embedding's gradient on every run."""
    for name, x, y in zip(("loss", "gradient", "H z"), got, expected, strict=True):
        for i, (a, b) in enumerate(zip([x], [y]) if name == "loss" else zip(x, y, strict=True)):
            error = (a - b).norm() / b.norm()
            assert error <= 1e-5, f"{name} {i}: {error:.1e}"


def product(model, vectors, *batch, **options):
    hvp = HessianVectorProduct(model, lambda m, x, y: m(x, y)[1], **options)
    return hvp, hvp(vectors, *batch)


def test_a_replayed_graph_gives_what_the_compiled_pass_gives():
    model, tokens, targets = models()
    vectors = [torch.randn_like(p) for p in model.parameters()]
    _, expected = product(model, vectors, tokens, targets)
    hvp, got = product(model, vectors, tokens, targets, cuda_graph=True)
    assert_equal_to_rounding(got, expected)
    # Other inputs, and parameters changed in place, as an optimizer does.
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    batch = tokens.flip(0), targets.flip(1)
    others = [torch.randn_like(p) for p in model.parameters()]
    _, expected = product(model, others, *batch)
    assert_equal_to_rounding(hvp(others, *batch), expected)
    # Parameters whose memory is another one.
    for p in model.parameters():
        p.data = p.data * 1.01
    _, expected = product(model, others, *batch)
    assert_equal_to_rounding(hvp(others, *batch), expected)


def test_vectors_filled_where_the_graph_reads_them():
    model, tokens, targets = models()
    hvp, _ = product(
        model, [torch.zeros_like(p) for p in model.parameters()], tokens, targets, cuda_graph=True
    )
    own = hvp.empty_vectors(tokens, targets)
    assert all(a is b for a, b in zip(own, hvp.empty_vectors(targets, tokens), strict=True))
    for seed in range(2):
        torch.manual_seed(seed)
        vectors = [torch.randn_like(p) for p in model.parameters()]
        kept = [v.clone() for v in vectors]
        for a, b in zip(own, vectors, strict=True):
            a.copy_(b)
        _, expected = product(model, vectors, tokens, targets)
        assert_equal_to_rounding(hvp(own, tokens, targets), expected)
        torch.testing.assert_close(own, kept, rtol=0, atol=0)  # u ⊙ H u comes afterwards
        # Some of the graph's own, others from elsewhere; nothing else is written.
        mixed = [a if i % 2 else 2 * b for i, (a, b) in enumerate(zip(own, vectors))]
        _, expected = product(model, [x.clone() for x in mixed], tokens, targets)
        assert_equal_to_rounding(hvp(mixed, tokens, targets), expected)
        torch.testing.assert_close(vectors, kept, rtol=0, atol=0)
    # They are still the graph's when it has been captured again.
    for p in model.parameters():
        p.data = p.data * 1.01
    for a, b in zip(own, vectors, strict=True):
        a.copy_(b)
    _, expected = product(model, vectors, tokens, targets)
    assert_equal_to_rounding(hvp(own, tokens, targets), expected)
    assert all(a is b for a, b in zip(own, hvp.empty_vectors(tokens, targets), strict=True))
    # Another shape has no graph yet.
    assert not set(map(id, own)) & set(map(id, hvp.empty_vectors(tokens[:1], targets[:1])))


@pytest.mark.parametrize("chunk", [128, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_cross_entropy(dtype, chunk):
    torch.manual_seed(0)
    vocab = 50257
    x = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.1 * torch.randn(50304, 64, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (300,), device="cuda")
    targets[::5] = -100
    u = torch.randn_like(x), torch.randn_like(weight)

    def derivatives(loss, x, weight, u):
        value = loss(x, weight)
        first = torch.autograd.grad(value, (x, weight), create_graph=True)
        return value, *first, *torch.autograd.grad(first, (x, weight), u)

    got = derivatives(lambda x, w: linear_cross_entropy(x, w, targets, vocab, chunk), x, weight, u)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = lambda x, w: F.cross_entropy((x @ w.T)[:, :vocab], targets)  # noqa: E731
    expected = derivatives(exact, *wide, [t.double() for t in u])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_the_model_with_a_chunked_loss():
    model, tokens, targets = models()
    chunked, _, _ = models(loss_chunk=100)
    chunked.load_state_dict(model.state_dict())
    vectors = [torch.randn_like(p) for p in model.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        _, (loss, gradients, products) = product(model, vectors, tokens, targets)
        _, (loss2, gradients2, products2) = product(chunked, vectors, tokens, targets)
    assert abs(loss - loss2) <= 1e-3
    for a, b in zip([*gradients2, *products2], [*gradients, *products], strict=True):
        assert (a - b).norm() <= 3e-2 * b.norm() + 1e-6
