import itertools
import math
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import optim.hutchinson
from flashbob.philox import philox_4x32
from optim import HutchinsonEstimator, probe

KEY = {"seed": 17, "step": 3, "micro_batch": 5, "parameter": 2}
DISTRIBUTIONS = ["gaussian", "rademacher"]

# --- probes ---------------------------------------------------------------------------------------------


def test_probe_follows_its_definition_word_by_word():
    seed = (5 << 32) + 17
    gaussian, rademacher = (
        probe((3, 7), **{**KEY, "seed": seed}, distribution=d, dtype=torch.float64).flatten()
        for d in DISTRIBUTIONS
    )
    for element in range(21):
        words = [int(w) for w in philox_4x32((element // 4, 2, 5, 3), (17, 5))]
        word = element % 4
        assert rademacher[element] == (-1 if words[word] & 1 else 1)
        radius_word, angle_word = words[word // 2 * 2], words[word // 2 * 2 + 1]
        radius = math.sqrt(-2 * math.log((radius_word + 0.5) / 2**32))
        angle = 2 * math.pi * (angle_word + 0.5) / 2**32
        expected = radius * (math.sin(angle) if word % 2 else math.cos(angle))
        assert gaussian[element].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probe_repeats_and_only_rounds_to_its_dtype(distribution, dtype):
    x = probe((5, 9), **KEY, distribution=distribution, dtype=dtype)
    assert x.shape == (5, 9) and x.dtype == dtype and x.is_contiguous()
    assert torch.equal(x, probe((5, 9), **KEY, distribution=distribution, dtype=dtype))
    assert torch.equal(x, probe((5, 9), **KEY, distribution=distribution, dtype=torch.float64).to(dtype))
    assert torch.equal(x.flatten()[:6], probe((6,), **KEY, distribution=distribution, dtype=dtype))
    assert probe((), **KEY).shape == () and probe((0, 3), **KEY).shape == (0, 3)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_probe_moments(distribution):
    """Mean 0, variance 1, third moment 0, fourth 3 or 1, within five standard errors."""
    n = 2**19
    x = probe((n,), **KEY, distribution=distribution, dtype=torch.float64)
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15 / n)
    if distribution == "rademacher":
        assert torch.equal(x.abs(), torch.ones_like(x))
    else:
        assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / n)
        assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
        # Kolmogorov's distance to the normal distribution: above 1.95 / sqrt(n) once in a thousand.
        ideal = torch.special.ndtr(x.sort().values)
        grid = torch.arange(n, dtype=torch.float64) / n
        assert (ideal - grid).abs().max() < 1.95 / math.sqrt(n) + 1 / n


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_probes_of_different_keys_are_uncorrelated(distribution):
    n = 2**14
    keys = [KEY] + [{**KEY, name: KEY[name] + offset} for name in KEY for offset in (1, 2)]
    keys.append({**KEY, "seed": KEY["seed"] + 2**32})
    keys.append({"seed": 17, "step": 5, "micro_batch": 3, "parameter": 2})  # the same numbers, exchanged
    x = torch.stack([probe((n,), **key, distribution=distribution, dtype=torch.float64) for key in keys])
    correlation = x @ x.T / n - torch.eye(len(keys), dtype=torch.float64) * x.square().mean(1)
    assert correlation.abs().max() < 5 / math.sqrt(n)  # five standard errors
    # Within one probe: neighbours, and elements of one counter, do not know each other.
    for lag in (1, 2, 3, 4, 8):
        assert abs((x[:, lag:] * x[:, :-lag]).mean()) < 5 / math.sqrt(len(keys) * (n - lag))


def test_every_key_and_element_has_its_own_value():
    grid = itertools.product(range(2), range(3), range(3), range(3))
    x = torch.cat(
        [probe((64,), seed=s, step=t, micro_batch=b, parameter=p, dtype=torch.float64) for s, t, b, p in grid]
    )
    assert x.unique().numel() == x.numel() == 54 * 64


def test_probe_errors():
    for change, message in [
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\), got -1"),
        ({"seed": 2**64}, "seed must be in"),
        ({"step": 2**32}, r"step must be in \[0, 2\*\*32\), got 4294967296"),
        ({"micro_batch": -1}, "micro_batch must be in"),
        ({"parameter": -2}, "parameter must be in"),
        ({"distribution": "uniform"}, "distribution must be one of gaussian, rademacher, got 'uniform'"),
    ]:
        with pytest.raises(ValueError, match=message):
            probe((2,), **{**KEY, **change})
    with pytest.raises(ValueError, match=r"at most 2\*\*34 elements"):
        probe((2**34 + 1,), **KEY)


# --- the estimate against full Hessians -----------------------------------------------------------------


def make_transformer(vocab=5, dim=4, block=4, heads=2, hidden=8):
    """Shapes and fp64 weights of a one-layer pre-norm GPT with a tied head: 252 parameters."""
    shapes = {
        "embedding": (vocab, dim),
        "position": (block, dim),
        "norm1": (dim,),
        "qkv": (3 * dim, dim),
        "projection": (dim, dim),
        "norm2": (dim,),
        "up": (hidden, dim),
        "up_bias": (hidden,),
        "down": (dim, hidden),
        "norm3": (dim,),
    }
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) * 0.6
        for name, shape in shapes.items()
    }
    return weights, heads


def transformer_loss(weights: dict[str, Tensor], heads: int, tokens_BN: Tensor) -> Tensor:
    """Mean next-token cross-entropy, with softmax attention written out."""
    dim = weights["embedding"].shape[1]
    inputs, targets = tokens_BN[:, :-1], tokens_BN[:, 1:]
    x = weights["embedding"][inputs] + weights["position"][: inputs.shape[1]]
    normed = F.layer_norm(x, (dim,), weights["norm1"])
    q, k, v = (
        part.unflatten(-1, (heads, dim // heads)).transpose(1, 2)
        for part in (normed @ weights["qkv"].T).chunk(3, dim=-1)
    )
    scores = q @ k.mT / math.sqrt(dim // heads)
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    attended = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v
    x = x + attended.transpose(1, 2).flatten(2) @ weights["projection"].T
    hidden = F.gelu(F.layer_norm(x, (dim,), weights["norm2"]) @ weights["up"].T + weights["up_bias"])
    x = x + hidden @ weights["down"].T
    logits = F.layer_norm(x, (dim,), weights["norm3"]) @ weights["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def full_hessian(weights, heads, tokens):
    sizes = [w.numel() for w in weights.values()]

    def loss_of(flat):
        parts = dict(zip(weights, flat.split(sizes)))
        return transformer_loss(
            {name: parts[name].view(w.shape) for name, w in weights.items()}, heads, tokens
        )

    flat = torch.cat([w.flatten() for w in weights.values()])
    return torch.autograd.functional.hessian(loss_of, flat, vectorize=True)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_estimate_is_unbiased_on_a_transformer(distribution):
    """Over 1500 probes, the error of every element's mean in units of its measured standard error."""
    weights, heads = make_transformer()
    tokens = torch.randint(0, 5, (3, 5), generator=torch.Generator().manual_seed(2))
    diagonal = full_hessian(weights, heads, tokens).diagonal()
    assert (diagonal < 0).sum() > 20 and (diagonal > 0).sum() > 100  # both signs are tested

    params = [w.requires_grad_() for w in weights.values()]
    estimator = HutchinsonEstimator(params, seed=17, distribution=distribution)
    num_probes = 1500
    samples = []
    for step in range(num_probes):
        estimator.accumulate(transformer_loss(weights, heads, tokens), step=step, micro_batch=0)
        samples.append(torch.cat([x.flatten() for x in estimator.reduce()]))
    samples = torch.stack(samples)
    error = samples.mean(0) - diagonal
    standard_error = samples.std(0) / math.sqrt(num_probes)
    z = error / standard_error
    assert z.abs().max() < 4.5  # 252 normals stay below with probability 0.998
    # Elements of one probe share their Hessian rows, so z² averages over fewer than 252 independent ones.
    assert 0.5 < z.square().mean() < 1.6
    # The estimate is sharp enough to tell: the mean is near the diagonal on the diagonal's own scale.
    assert error.norm() / diagonal.norm() < 0.2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_variance_is_what_theory_says(distribution):
    """Var[(u ⊙ H u)_i] = Σ_{j≠i} H_ij², plus 2 H_ii² for the Gaussian."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    h = h + h.T
    theta = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    estimator = HutchinsonEstimator([theta], seed=17, distribution=distribution)
    samples = []
    for step in range(4000):
        estimator.accumulate(0.5 * theta @ h @ theta, step=step, micro_batch=0)
        samples.append(estimator.reduce()[0])
    expected = h.square().sum(1) - h.diagonal().square()
    if distribution == "gaussian":
        expected += 2 * h.diagonal().square()
    # The relative standard error of a variance is sqrt((kurtosis − 1) / n), with a kurtosis below 15 here.
    torch.testing.assert_close(torch.stack(samples).var(0), expected, rtol=5 * math.sqrt(14 / 4000), atol=0)


def test_expectation_over_all_rademacher_probes_is_the_diagonal(monkeypatch):
    """Every one of the 2⁹ sign vectors once: the mean is diag(H) to fp64 rounding."""
    torch.manual_seed(0)
    w, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 1])

    def loss_of(flat):
        return F.cross_entropy((x @ flat[:6].view(2, 3)).sin() + flat[6:].square(), y)

    diagonal = torch.autograd.functional.hessian(loss_of, torch.cat([w.flatten(), b])).diagonal()
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=9)), dtype=torch.float64)
    parts = [signs[:, :6].view(-1, 2, 3), signs[:, 6:]]
    monkeypatch.setattr(
        optim.hutchinson, "probe", lambda shape, *, micro_batch, parameter, **_: parts[parameter][micro_batch]
    )
    params = [w.requires_grad_(), b.requires_grad_()]
    estimator = HutchinsonEstimator(params, seed=0, distribution="rademacher")
    for index in range(512):
        loss = loss_of(torch.cat([p.flatten() for p in params]))
        estimator.accumulate(loss, step=1, micro_batch=index)
    estimate = torch.cat([e.flatten() for e in estimator.reduce()])
    torch.testing.assert_close(estimate, diagonal, rtol=1e-12, atol=1e-13)


# --- accumulation ---------------------------------------------------------------------------------------


def micro_batch_loss(params, index):
    """Data of micro-batch `index`, with curvature of its own. Index 2 leaves the second parameter out."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(index)).to(params[0].dtype)
    y = (x @ params[0]).tanh().square().mean()
    return y if index == 2 else y * params[1].exp().sum()


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(3, 4, dtype=dtype).requires_grad_(), torch.randn(2, dtype=dtype).requires_grad_()]


WEIGHTS = [3.0, 1.0, 2.0, 5.0]


def estimate_over(params, indices, weights=WEIGHTS):
    estimator = HutchinsonEstimator(params, seed=17)
    for index in indices:
        estimator.accumulate(
            micro_batch_loss(params, index), step=1, micro_batch=index, weight=weights[index]
        )
    return estimator.reduce()


def test_estimate_is_the_weighted_mean_of_u_times_hu():
    params = make_params(torch.float64)
    expected = [torch.zeros_like(p) for p in params]
    for index, weight in enumerate(WEIGHTS):
        full = torch.autograd.functional.hessian(
            lambda flat, index=index: micro_batch_loss([flat[:12].view(3, 4), flat[12:]], index),
            torch.cat([p.detach().flatten() for p in params]),
        )
        u = torch.cat(
            [
                probe(p.shape, seed=17, step=1, micro_batch=index, parameter=i, dtype=p.dtype).flatten()
                for i, p in enumerate(params)
            ]
        )
        sample = weight * u * (full @ u)
        expected[0] += sample[:12].view(3, 4)
        expected[1] += sample[12:]
    for x, e in zip(estimate_over(params, range(4)), expected):
        torch.testing.assert_close(x, e / sum(WEIGHTS), rtol=1e-12, atol=1e-13)


def test_gradients_are_those_of_the_loss_whatever_the_weight():
    params = make_params(torch.float64)
    expected = torch.autograd.grad(micro_batch_loss(params, 0), params)
    estimator = HutchinsonEstimator(params, seed=17)
    gradients = estimator.accumulate(micro_batch_loss(params, 0), step=1, micro_batch=0, weight=7.0)
    for g, e in zip(gradients, expected):
        torch.testing.assert_close(g, e, rtol=1e-13, atol=1e-15)
        assert not g.requires_grad


def test_reduce_starts_anew():
    params = make_params()
    estimator = HutchinsonEstimator(params, seed=17)
    with pytest.raises(RuntimeError, match="at least one micro-batch"):
        estimator.reduce()
    first = []
    for _ in range(2):
        estimator.accumulate(micro_batch_loss(params, 1), step=1, micro_batch=1, weight=4.0)
        first.append([x.clone() for x in estimator.reduce()])
    assert all(torch.equal(a, b) for a, b in zip(*first))
    with pytest.raises(RuntimeError, match="at least one micro-batch"):
        estimator.reduce()


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_sums_are_at_least_fp32(dtype, expected):
    params = [
        torch.ones(3, dtype=dtype, requires_grad=True),
        torch.ones(2, dtype=torch.float64, requires_grad=True),
    ]
    estimator = HutchinsonEstimator(params, seed=17, distribution="rademacher")
    for index in range(3):
        # H = 2 · diag(1, 1, 1) and 6 θ: u² = 1 makes the estimate exact.
        loss = params[0].double().square().sum() + params[1].pow(3).sum()
        estimator.accumulate(loss, step=1, micro_batch=index)
    first, second = estimator.reduce()
    assert first.dtype == expected and second.dtype == torch.float64
    assert first.tolist() == [2, 2, 2] and second.tolist() == [6, 6]


def test_estimator_errors():
    p = torch.ones(2, requires_grad=True)
    for params, arguments, message in [
        ([], {"seed": 1}, "params must hold at least one parameter"),
        ([torch.ones(2)], {"seed": 1}, r"params\[0\] must require a gradient"),
        ([p, p], {"seed": 1}, r"params\[1\] is the same tensor"),
        ([p], {"seed": -1}, "seed must be in"),
        ([p], {"seed": 1, "distribution": "normal"}, "distribution must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            HutchinsonEstimator(params, **arguments)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight must be finite and > 0"):
            HutchinsonEstimator([p], seed=1).accumulate(
                p.square().sum(), step=1, micro_batch=0, weight=weight
            )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite(bad):
    estimate = [torch.ones(3), torch.ones(2, 2)]
    assert bool(HutchinsonEstimator.all_finite(estimate))
    estimate[1][0, 1] = bad
    result = HutchinsonEstimator.all_finite(estimate)
    assert result.shape == () and result.dtype == torch.bool and not bool(result)


def test_reduce_makes_no_further_copy():
    """No operation inside it has an output in new memory of a parameter's size."""
    params = make_params()
    estimator = HutchinsonEstimator(params, seed=17)
    estimator.accumulate(micro_batch_loss(params, 0), step=1, micro_batch=0)
    storages = {x.untyped_storage().data_ptr() for x in estimator._buffers}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(x, Tensor):
                    assert x.numel() <= 1 or x.untyped_storage().data_ptr() in storages, func
            return out

    with Watch():
        estimate = estimator.reduce()
    assert {x.untyped_storage().data_ptr() for x in estimate} <= storages
    assert not estimator._buffers and not estimator._sums  # nothing is held until the next micro-batch


def test_probes_are_freed_when_accumulate_returns(monkeypatch):
    drawn = []

    def remembered(*args, **kwargs):
        u = probe(*args, **kwargs)
        drawn.append(weakref.ref(u))
        return u

    monkeypatch.setattr(optim.hutchinson, "probe", remembered)
    params = make_params()
    estimator = HutchinsonEstimator(params, seed=17)
    gradients = estimator.accumulate(micro_batch_loss(params, 0), step=1, micro_batch=0)
    assert len(drawn) == len(gradients) == 2 and not any(ref() for ref in drawn)


# --- ranks ----------------------------------------------------------------------------------------------

# Micro-batches of rank 0 and of rank 1.
SHARES = {"even": ([0, 2], [1, 3]), "uneven": ([1], [3, 0, 2]), "one rank has none": ([0, 1, 2, 3], [])}


def _rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for name, shares in SHARES.items():
        results[name] = estimate_over(make_params(), shares[rank])
    alone = dist.new_group([0])
    params = make_params()
    if rank == 0:
        estimator = HutchinsonEstimator(params, seed=17)
        estimator.accumulate(micro_batch_loss(params, 1), step=1, micro_batch=1)
        results["subgroup"] = estimator.reduce(alone)
    nothing = HutchinsonEstimator(params, seed=17)
    results["nothing"] = nothing.reduce()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_estimate_what_one_process_does(tmp_path):
    mp.spawn(_rank_main, args=(str(tmp_path),), nprocs=2)
    rank0, rank1 = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    expected = estimate_over(make_params(), range(4))
    for name in SHARES:
        for a, b, e in zip(rank0[name], rank1[name], expected):
            assert torch.equal(a, b)  # every rank has the same bits
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)  # fp32 sums in another order
    for a, e in zip(rank0["subgroup"], estimate_over(make_params(), [1])):
        torch.testing.assert_close(a, e)
    for rank in (rank0, rank1):
        assert not HutchinsonEstimator.all_finite(rank["nothing"])
