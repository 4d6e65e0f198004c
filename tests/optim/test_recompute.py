import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import flashbob
from optim import HessianVectorProduct, recompute
from optim.recomputation import _stages


class Block(nn.Module):
    """A pre-LN residual MLP, with dropout if asked."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(self.norm(x)))), self.dropout, self.training)


class Small(nn.Module):
    """Quick to compile."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, blocks, recomputed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = recompute(block, x) if self.recomputed else block(x)
        return x.square().mean()


def stack(recomputed: bool, layers: int = 3, width: int = 8, dtype=torch.float64, dropout=0.0) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(width, dropout) for _ in range(layers)], recomputed).to(dtype)


def small(recomputed: bool, layers: int, dtype=torch.float64) -> Stack:
    torch.manual_seed(0)
    return Stack([Small() for _ in range(layers)], recomputed).to(dtype)


def inputs(rows: int = 5, width: int = 8, dtype=torch.float64) -> Tensor:
    """The same numbers in each dtype."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, dtype=torch.float64, generator=generator).to(dtype)


def second_order(model, *batch, compile=False):
    hvp = HessianVectorProduct(model, lambda m, *batch: m(*batch), compile=compile)
    generator = torch.Generator().manual_seed(2)
    z = [torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype) for p in hvp.params]
    return hvp(z, *batch)


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "frozen weights", "frozen block", "tied blocks"])
def test_loss_gradient_and_product_are_those_of_the_plain_call(case):
    results = []
    for recomputed in (False, True):
        model = stack(recomputed)
        if case == "frozen weights":
            for block in model.blocks:
                block.up.weight.requires_grad_(False)
        if case == "frozen block":
            model.blocks[1].requires_grad_(False)
        if case == "tied blocks":
            model.blocks[2] = model.blocks[0]
            model.blocks[0].up.bias = nn.Parameter(torch.ones(32, dtype=torch.float64))
            model.blocks[1].up.weight = model.blocks[0].up.weight
        results.append(second_order(model, inputs()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-15)
    assert sum(float(hz.abs().sum()) for hz in results[0][2]) > 0.1


def test_gradients_of_the_input_and_of_some_parameters_only():
    """autograd asks each backward for other gradients than the one before."""
    results = []
    for recomputed in (False, True):
        model, x = stack(recomputed), inputs().requires_grad_()
        params = list(model.parameters())
        gradients = torch.autograd.grad(model(x), [x, *params], create_graph=True)
        total = sum(g.square().sum() for g in gradients[: len(params) // 2])
        some = [x, *model.blocks[2].parameters()]
        results.append([*gradients, *torch.autograd.grad(total, some, create_graph=True)])
        third = torch.autograd.grad(sum(g.square().sum() for g in results[-1][-4:]), params)
        results[-1] += third
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_backward_accumulates_and_nothing_is_recorded_without_gradients():
    plain, recomputed = stack(False), stack(True)
    for model in (plain, recomputed):
        model(inputs()).backward()
        model(inputs()).backward()
    for p, q in zip(plain.parameters(), recomputed.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-13, atol=1e-15)
    with torch.no_grad():
        assert recomputed(inputs()).grad_fn is None


def test_arguments_and_results_in_any_nesting():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.unused = nn.Parameter(torch.ones(2))
            self.register_buffer("scale", torch.tensor(3.0))

        def forward(self, ids, pair, *, power, extra=None):
            a, b = pair["pair"]
            y = self.table(ids) * a.pow(power) * self.scale
            return {"y": y + b, "ids": ids + 1, "none": extra}, [y.sin(), "text"], b

    torch.manual_seed(0)
    module = Mixed().double()
    ids = torch.tensor([1, 6, 1])
    a, b = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = []
    for call in (module, lambda *args, **kwargs: recompute(module, *args, **kwargs)):
        first, (second, text), same = call(ids, {"pair": (a, b)}, power=3)
        assert text == "text" and first["none"] is None and torch.equal(first["ids"], ids + 1)
        # `same` and `second` are not used at first: their cotangents are None
        loss = first["y"].square().sum() + same.sum()
        gradients = torch.autograd.grad(loss, [a, b, module.table.weight], create_graph=True)
        products = torch.autograd.grad(
            sum(g.square().sum() for g in gradients) + second.sum(), [a, b, module.table.weight]
        )
        results.append([*gradients, *products])
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


def relative_errors(results, exact) -> list[float]:
    """Of gradient and product, each as one vector."""
    return [
        float(
            torch.stack([(x - y).norm() for x, y in zip(results[part], exact[part])]).norm()
            / torch.stack([y.norm() for y in exact[part]]).norm()
        )
        for part in (1, 2)
    ]


def test_autocast_is_that_of_the_call():
    """Loss and gradient to the bit: the same roundings. The product's sums are in another order."""
    results, x = [], inputs(dtype=torch.float32)
    for recomputed in (False, True):
        model = stack(recomputed, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(second_order(model, x))  # which leaves autocast for the derivatives
            # A cast without a graph, left in autocast's cache by the block, would be used here.
            model(x)
            again = F.linear(x, model.blocks[0].up.weight).sum()
            assert torch.autograd.grad(again, model.blocks[0].up.weight)[0].any()
            loss = model(x)
        gradients = torch.autograd.grad(loss, list(model.parameters()))  # and here after it
        for g, h in zip(gradients, results[0][1]):
            assert torch.equal(g, h)
    assert torch.equal(results[1][0], results[0][0])
    exact = second_order(stack(False), inputs())
    (gradient, product), (_, recomputed_product) = (relative_errors(r, exact) for r in results)
    assert 1e-5 < gradient < 0.05  # bf16 rounds at 4e-3
    assert recomputed_product < 1.2 * product


def test_dropout_repeats_and_the_generator_goes_on():
    class Attention(Block):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.up(self.norm(x)).unflatten(-1, (2, -1)).transpose(0, 1).unsqueeze(0)
            return super().forward(x) + flashbob.sdpa_bob(
                heads, heads, heads, is_causal=True, dropout_p=0.5
            ).mean((0, 1, 3)).unsqueeze(-1)

    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = Stack([Attention(dropout=0.4) for _ in range(3)], recomputed).double()
        torch.manual_seed(3)
        results.append([*second_order(model, inputs()), torch.rand(3)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-15)


def test_backend_is_that_of_the_call():
    seen = []

    class Watching(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(flashbob.get_backend())
            return super().forward(x)

    block = Watching()
    with flashbob.set_backend("math"):
        y = recompute(block, torch.ones(2, 8))
    g = torch.autograd.grad(y.square().sum(), list(block.parameters()), create_graph=True)
    torch.autograd.grad(g[0].sum(), list(block.parameters()), allow_unused=True)
    assert len(seen) > 3 and set(seen) == {"math"} and flashbob.get_backend() == "auto"


def test_a_foreign_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    class Recomputed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args, **kwargs):
            return recompute(self.block, *args, **kwargs)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager",
                        bos_token_id=0, eos_token_id=0, use_cache=False)  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    tokens = torch.randint(50, (2, 16))
    loss = lambda m, x: m(input_ids=x, labels=x).loss  # noqa: E731
    hvp = HessianVectorProduct(model, loss, compile=False)
    z = [torch.randn_like(p) for p in hvp.params]
    torch.manual_seed(1)  # dropout is on
    expected = hvp(z, tokens)
    model.transformer.h = nn.ModuleList(map(Recomputed, model.transformer.h))
    torch.manual_seed(1)
    got = HessianVectorProduct(model, loss, params=hvp.params, compile=False)(z, tokens)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_a_block_that_changes_a_buffer_is_refused():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"Sequential changes its buffer 1\.num_batches_tracked"):
        recompute(block, torch.randn(3, 4))
    recompute(block.eval(), torch.randn(3, 4)).sum().backward()


# --- memory -----------------------------------------------------------------------------------------------------------


class PeakMemory(TorchDispatchMode):
    """The most bytes at a time in storages that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return tree_map_only(Tensor, self.count, func(*args, **(kwargs or {})))

    def count(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.freed, key, size)
        return x

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def growth_per_layer(recomputed: bool) -> float:
    """Of the peak of a Hessian-vector product, in tensors [rows, width]."""
    peaks = []
    for layers in (4, 12):
        model, x = stack(recomputed, layers, width=8), inputs(rows=1024)
        with PeakMemory() as memory:
            second_order(model, x)
        peaks.append(memory.peak)
    return (peaks[1] - peaks[0]) / 8 / (x.numel() * x.element_size())


def test_a_layer_costs_its_input_and_one_cotangent():
    """By derivation two, and the parameters' vector, gradient and product. Kept whole, a layer takes sixteen."""
    assert growth_per_layer(True) < 2.5
    assert growth_per_layer(False) > 15


# --- traced and compiled ----------------------------------------------------------------------------------------------


def test_blocks_are_compiled_once():
    expected = second_order(small(False, layers=5), inputs())
    before = len(_stages)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no fall back to eager
        got = second_order(small(True, layers=5), inputs(), compile=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    # Three stages; the first block's input needs no gradient, which makes its two derivatives others.
    assert len(_stages) - before == 5


def test_autocast_compiled():
    exact = second_order(small(False, 2), inputs())
    model, x = small(True, 2, dtype=torch.float32), inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager, compiled = second_order(model, x), second_order(model, x, compile=True)
    for of_eager, of_compiled in zip(relative_errors(eager, exact), relative_errors(compiled, exact)):
        assert 1e-5 < of_eager < 0.05 and of_compiled < 1.2 * of_eager  # fused operations round less often


def test_dropout_cannot_be_traced_and_runs_eagerly():
    torch.manual_seed(3)
    expected = second_order(stack(False, dropout=0.4), inputs())
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="a recomputed block draws random numbers"):
        got = second_order(stack(True, dropout=0.4), inputs(), compile=True)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_blocks_with_constants_of_their_own_are_not_taken_for_each_other():
    class Shifted(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight + torch.tensor([self.shift] * 4, dtype=torch.float64)).sin()

    make = lambda recomputed: Stack([Shifted(0.1), Shifted(0.7)], recomputed)  # noqa: E731
    x = torch.linspace(-1, 1, 4, dtype=torch.float64)
    got = second_order(make(True), x, compile=True)
    torch.testing.assert_close(got, second_order(make(False), x), rtol=1e-12, atol=1e-14)


def test_under_torch_compile_it_is_pytorchs_own():
    plain, recomputed = stack(False, dropout=0.3), stack(True, dropout=0.3)
    compiled = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    gradients = []
    for model in (plain, compiled):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(model(inputs()), list(model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)


def test_forward_mode_is_refused():
    block = nn.Linear(3, 3)
    hvp = HessianVectorProduct(
        block, lambda m, x: recompute(m, x).square().sum(), compile=False, method="forward"
    )
    with pytest.raises(NotImplementedError, match="method='reverse'"):
        hvp([torch.ones_like(p) for p in block.parameters()], torch.ones(2, 3))
