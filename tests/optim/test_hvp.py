import gc
import itertools
import warnings
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import HessianVectorProduct, hessian_vector_product
from optim.hvp import _Replay, check_vectors


def quadratic(n=6, dtype=torch.float64):
    """L = ½ θᵀ A θ + bᵀ θ: its gradient is A θ + b and its Hessian A."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, dtype=dtype, generator=generator)
    a = a + a.T
    b = torch.randn(n, dtype=dtype, generator=generator)
    theta = torch.randn(n, dtype=dtype, generator=generator).requires_grad_()
    return a, b, theta


def test_quadratic_against_its_matrix():
    a, b, theta = quadratic()
    z = torch.linspace(-1, 1, 6, dtype=torch.float64)
    loss = 0.5 * theta @ a @ theta + b @ theta
    (g,), (hz,) = hessian_vector_product(loss, [theta], [z])
    torch.testing.assert_close(g, (a @ theta + b).detach(), rtol=1e-13, atol=1e-13)  # fp64 rounding
    torch.testing.assert_close(hz, a @ z, rtol=1e-13, atol=1e-13)


def test_several_parameters_against_the_full_hessian():
    torch.manual_seed(0)
    w, v = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss_of(flat):
        return ((x @ flat[:6].view(3, 2)).tanh() @ flat[6:]).exp().mean()

    full = torch.autograd.functional.hessian(loss_of, torch.cat([w.flatten(), v]))
    params = [w.requires_grad_(), v.requires_grad_()]
    vectors = [torch.randn_like(w), torch.randn_like(v)]
    _, products = hessian_vector_product(
        loss_of(torch.cat([p.flatten() for p in params])), params, [z.detach() for z in vectors]
    )
    expected = full @ torch.cat([z.flatten() for z in vectors]).detach()
    torch.testing.assert_close(torch.cat([p.flatten() for p in products]), expected, rtol=1e-12, atol=1e-12)


def test_unused_and_linear_parameters_give_zeros():
    used, linear, unused = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    params = [used, linear, unused]
    gradients, products = hessian_vector_product(
        used.pow(3).sum() + 5 * linear.sum(), params, [torch.ones_like(p).detach() for p in params]
    )
    assert [g.tolist() for g in gradients] == [[3, 3], [5, 5], [0, 0]]
    assert [hz.tolist() for hz in products] == [[6, 6], [0, 0], [0, 0]]
    # Linear in everything: no gradient has a graph.
    _, products = hessian_vector_product(linear.sum(), params, [torch.ones(2).double()] * 3)
    assert [hz.tolist() for hz in products] == [[0, 0]] * 3


def test_tied_weight_counts_both_uses():
    """L = (w² · w) with the two factors from two modules that share w: L'' = 6 w."""
    first, second = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    second.weight = first.weight
    params = list(nn.ModuleList([first, second]).parameters())
    assert len(params) == 1
    one = torch.ones(1, 1, dtype=torch.float64)
    (g,), (hz,) = hessian_vector_product(first(one).square().sum() * second(one).sum(), params, [one])
    w = first.weight.detach()
    torch.testing.assert_close(g, 3 * w**2)
    torch.testing.assert_close(hz, 6 * w)


def test_nothing_is_retained():
    """The graph of the gradient, and what it saved, is gone on return without a garbage collection."""
    saved: list[weakref.ref] = []

    class Remembered:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        box = Remembered(tensor)
        saved.append(weakref.ref(box))
        return box

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    params = list(model.parameters())
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            loss = F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
            results = hessian_vector_product(loss, params, [torch.ones_like(p).detach() for p in params])
        del loss
        assert saved and not any(ref() for ref in saved)
    finally:
        gc.enable()
    assert all(x.grad_fn is None and not x.requires_grad for part in results for x in part)


def test_attention_that_cannot_be_differentiated_twice_raises():
    qkv = torch.randn(3, 1, 1, 8, 16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        loss = F.scaled_dot_product_attention(*qkv).square().sum()
    with pytest.raises(RuntimeError, match="not implemented"):
        hessian_vector_product(loss, [qkv], [torch.ones(3, 1, 1, 8, 16)])


def test_errors_name_what_is_wrong():
    p = torch.ones(2, requires_grad=True)
    z = torch.ones(2)
    loss = p.square().sum()
    cases = [
        (p.square(), [p], [z], r"loss must be a scalar, got shape \(2,\)"),
        (loss.detach(), [p], [z], "loss must have a graph"),
        (loss, [], [], "params must hold at least one parameter, got none"),
        (loss, [torch.ones(2)], [z], r"params\[0\] must require a gradient"),
        (
            loss,
            [p, torch.ones(2, dtype=torch.int64)],
            [z, z],
            r"params\[1\] must be floating point, got torch.int64",
        ),
        (loss, [p, p], [z, z], r"params\[1\] is the same tensor as params\[0\]"),
        (loss, [p], [], "vectors must be one for each of the 1 parameters, got 0"),
        (
            loss,
            [p],
            [torch.ones(3)],
            r"vectors\[0\] must be like its parameter, shape \(2,\).*got shape \(3,\)",
        ),
        (
            loss,
            [p],
            [z.double()],
            r"vectors\[0\] must be like its parameter, .*got shape \(2,\) torch.float64",
        ),
    ]
    for bad_loss, params, vectors, message in cases:
        with pytest.raises(ValueError, match=message):
            hessian_vector_product(bad_loss, params, vectors)
    _, (hz,) = hessian_vector_product(loss, [p], [z])  # the refused calls have not used the graph up
    assert hz.tolist() == [2, 2]


# --- HessianVectorProduct: one pass of a model, compiled -------------------------------------------------


def tiny_gpt(dtype=torch.float64, layers=2):
    from train.model import GPT, GPTConfig, attention_function

    torch.manual_seed(0)
    return GPT(GPTConfig(16, 50, layers, 2, 32), attention_function("tiled")).to(dtype)


def gpt_loss(model, tokens, targets):
    return model(tokens, targets)[1]


def batch(sequences=2, length=16):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(50, (sequences, length), generator=generator) for _ in range(2))


def assert_close(got, expected, tolerance):
    for x, y in zip((got[0], *got[1], *got[2]), (expected[0], *expected[1], *expected[2]), strict=True):
        assert (x - y).norm() <= tolerance * y.norm() + tolerance


def test_empty_vectors_are_like_the_parameters_and_new_without_a_graph():
    for hvp in (HessianVectorProduct(tiny_gpt(), gpt_loss, compile=c) for c in (False, True)):
        one, two = hvp.empty_vectors(*batch()), hvp.empty_vectors(*batch())
        check_vectors(hvp.params, one)
        assert all(v.is_contiguous() and not v.requires_grad for v in one)
        assert not {v.data_ptr() for v in one} & {v.data_ptr() for v in two}


def test_a_replay_copies_only_what_it_does_not_read(monkeypatch):
    """CUDA's graph is replaced by one that calls the function again; tests/gpu/test_hvp_gpu.py has the real one."""

    class Graph:
        def replay(self):
            for out, new in zip(replay._outputs, function(*replay.inputs)):
                out.copy_(new)

    def function(fixed, a, b):
        return [fixed * a, a - b]

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    copies = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, x: (copies.append(len(to)), copy(to, x)))

    fixed, a, b = (torch.randn(3) for _ in range(3))
    replay = _Replay(function, (fixed, a, b), frozenset([0]))
    own = replay.inputs
    assert own[0] is fixed and own[1] is not a and own[2] is not b
    torch.testing.assert_close(list(replay(fixed, a, b)), function(fixed, a, b))
    own[1].fill_(2.0)
    torch.testing.assert_close(list(replay(fixed, own[1], own[2])), function(fixed, own[1], b))
    torch.testing.assert_close(list(replay(fixed, own[1], 3 * b)), function(fixed, own[1], 3 * b))
    assert copies == [2, 1]
    moved = fixed + 1  # captured again; what was handed out stays the graph's
    own[1].fill_(5.0)
    torch.testing.assert_close(list(replay(moved, own[1], b)), function(moved, own[1], b))
    assert replay.inputs[0] is moved and replay.inputs[1] is own[1] and own[1].eq(5.0).all()


@pytest.mark.parametrize("method", ["reverse", "forward"])
def test_compiled_product_is_the_eager_one_with_tied_frozen_and_unused_parameters(method):
    model = tiny_gpt(layers=1)
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    frozen = next(p for name, p in model.named_parameters() if name.endswith("c_fc.weight"))
    frozen.requires_grad_(False)
    compiled = HessianVectorProduct(model, gpt_loss, method=method)
    assert (
        len(compiled.params) == len({id(p) for p in model.parameters()}) - 1
    )  # tied once, frozen not at all
    z = [torch.randn_like(p) for p in compiled.params]
    got = compiled(z, *batch())
    assert len(compiled.trace_s) == len(compiled.compile_s) == 1
    loss = gpt_loss(model, *batch())
    expected = (loss.detach(), *hessian_vector_product(loss, compiled.params, z))
    assert_close(got, expected, 1e-12)  # fp64: other orders of the same sums
    assert all(not x.requires_grad for x in (got[0], *got[1], *got[2]))
    position = next(i for i, p in enumerate(compiled.params) if p is model.unused)
    assert not got[1][position].any() and not got[2][position].any()

    # New weights in place, as an optimizer leaves them, need no new trace; a new shape does.
    with torch.no_grad():
        for p in compiled.params:
            p.add_(0.01 * torch.randn_like(p))
    loss = gpt_loss(model, *batch())
    expected = (loss.detach(), *hessian_vector_product(loss, compiled.params, z))
    assert_close(compiled(z, *batch()), expected, 1e-12)
    assert len(compiled.trace_s) == 1


def test_forward_over_reverse_is_reverse_over_reverse_with_tied_frozen_and_unused_parameters():
    """Eager. A parameter that the loss is linear in, and buffers, are in it too."""
    model = tiny_gpt()
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.linear = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    next(p for name, p in model.named_parameters() if name.endswith("c_fc.weight")).requires_grad_(False)
    loss = lambda m, x, y: m(x, y)[1] + m.linear @ m.weights  # noqa: E731
    hvp = HessianVectorProduct(model, loss, compile=False, method="forward")
    z = [torch.randn_like(p) for p in hvp.params]
    got = hvp(z, *batch())
    value = loss(model, *batch())
    assert_close(got, (value.detach(), *hessian_vector_product(value, hvp.params, z)), 1e-12)
    assert all(not x.requires_grad for x in (got[0], *got[1], *got[2]))
    assert all(not torch.autograd.forward_ad.unpack_dual(p).tangent for p in hvp.params)


def test_forward_over_reverse_names_what_has_no_forward_mode():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    model = nn.Linear(3, 1)
    loss = lambda m, x: Square.apply(m(x)).sum()  # noqa: E731
    hvp = HessianVectorProduct(model, loss, compile=False, method="forward")
    with pytest.raises(RuntimeError, match="forward mode AD"):
        hvp([torch.ones_like(p) for p in hvp.params], torch.ones(2, 3))


def test_autocast_is_the_eager_one():
    model = tiny_gpt(torch.float32, layers=1)
    z = None
    results = []
    for compile, method in ((False, "reverse"), (True, "reverse"), (False, "forward")):
        hvp = HessianVectorProduct(model, gpt_loss, compile=compile, method=method)
        z = z or [torch.randn_like(p) for p in hvp.params]
        with torch.autocast("cpu", torch.bfloat16):
            results.append(hvp(z, *batch()))
    exact = HessianVectorProduct(model.double(), gpt_loss, compile=False)([x.double() for x in z], *batch())
    eager, *others = results
    # bf16 rounds at 4e-3; what the compiler fuses it does not round in between, which is no worse.
    for part, other in itertools.product((1, 2), others):
        norm = torch.stack([y.norm() for y in exact[part]]).norm()
        errors = [
            torch.stack([(x - y).norm() for x, y in zip(r[part], exact[part])]).norm() / norm
            for r in (eager, other)
        ]
        assert errors[0] < 0.05 and errors[1] < 1.2 * errors[0]
    assert all(r[0].dtype == torch.float32 for r in results)


@pytest.mark.parametrize("method", ["reverse", "forward"])
def test_a_transformers_model(method):
    """GPT-2 of transformers with eager attention. Its loss is computed in fp32 whatever the weights are."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_implementation="eager",
                        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    compile = method == "reverse"
    loss = lambda m, x: m(input_ids=x, labels=x, use_cache=False).loss  # noqa: E731
    hvp = HessianVectorProduct(model, loss, compile=compile, method=method)
    z = [torch.randn_like(p) for p in hvp.params]
    x = batch()[0]
    got = hvp(z, x)
    assert len(hvp.compile_s) == compile
    value = loss(model, x)
    assert_close(got, (value.detach(), *hessian_vector_product(value, hvp.params, z)), 1e-6)


def test_shapes_that_were_not_prepared_run_eagerly_if_asked():
    hvp = HessianVectorProduct(tiny_gpt(), gpt_loss, on_new_shape="eager")
    z = [torch.randn_like(p) for p in hvp.params]
    hvp(z, *batch())
    assert hvp.trace_s == []


def test_a_model_that_cannot_be_traced_runs_eagerly_with_one_warning():
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))

        def forward(self, x):
            return (self.weight**3 * x).sum() if self.weight.sum().item() > 0 else self.weight.sum()

    model = Branching()
    hvp = HessianVectorProduct(model, lambda m, x: m(x))
    x, z = torch.tensor([1.0, 2.0], dtype=torch.float64), [torch.ones(2, dtype=torch.float64)]
    with pytest.warns(UserWarning, match="Branching run eagerly: it cannot be traced"):
        loss, (g,), (hz,) = hvp(z, x)
    assert loss == 8 + 54 and g.tolist() == [12.0, 54.0] and hz.tolist() == [12.0, 36.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvp(z, x)


def test_errors_of_the_class():
    model = tiny_gpt()
    with pytest.raises(ValueError, match="on_new_shape must be 'compile' or 'eager', got 'never'"):
        HessianVectorProduct(model, gpt_loss, on_new_shape="never")
    with pytest.raises(ValueError, match="method must be 'reverse' or 'forward', got 'both'"):
        HessianVectorProduct(model, gpt_loss, method="both")
    with pytest.raises(ValueError, match=r"params\[0\] is not a parameter of GPT"):
        HessianVectorProduct(model, gpt_loss, params=[torch.nn.Parameter(torch.ones(1))])
    hvp = HessianVectorProduct(model, lambda m, x, y: m(x, y)[0], compile=False)
    z = [torch.randn_like(p) for p in hvp.params]
    with pytest.raises(ValueError, match="loss must be a scalar"):
        hvp(z, *batch())
    with pytest.raises(ValueError, match="vectors must be one for each of the"):
        hvp(z[1:], *batch())
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="params must hold at least one parameter"):
        HessianVectorProduct(model, gpt_loss)


def test_a_cuda_graph_needs_a_gpu_and_compilation():
    model = nn.Linear(3, 1)
    with pytest.raises(
        ValueError, match=r"cuda_graph=True needs compile=True and parameters on a CUDA device, got .* on cpu"
    ):
        HessianVectorProduct(model, lambda m, x: m(x).sum(), cuda_graph=True)
