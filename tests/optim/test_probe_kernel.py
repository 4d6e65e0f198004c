"""The probes' kernel against `probe`, which tests/optim/test_hutchinson.py and test_philox.py hold to the specification."""

import pytest
import torch

from optim import probe_kernel
from optim.hutchinson import HutchinsonEstimator, probe
from optim.probe_kernel import ProbeFiller

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(7, 11), (1,), (64,), (130, 3), (2, 2, 2)]
INDICES = [4, 0, 2**31 + 5, 9, 1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(probe_kernel, "BLOCK", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("seed", [17, 2**64 - 3, 2**40])
@pytest.mark.parametrize("place", [(0, 0), (12, 5), (2**32 - 1, 2**32 - 1)])
def test_the_kernel_draws_the_same_numbers(dtype, distribution, seed, place):
    step, micro_batch = place
    params = [torch.empty(shape, dtype=dtype, device=DEVICE) for shape in SHAPES]
    filler = ProbeFiller(params, INDICES)
    got = filler(seed=seed, step=step, micro_batch=micro_batch, rademacher=distribution == "rademacher")
    for x, p, index in zip(got, params, INDICES, strict=True):
        expected = probe(p.shape, seed=seed, step=step, micro_batch=micro_batch, parameter=index,
                         distribution=distribution, dtype=dtype, device=DEVICE)  # fmt: skip
        # fp64 libraries may differ by a unit in the last place, which rounding shows only next to a tie.
        tolerance = {torch.float32: 2.4e-7, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(x, expected, rtol=tolerance, atol=0)
        assert (x != expected).float().mean() <= 0.01


def test_the_estimator_uses_it_for_what_it_takes(monkeypatch):
    """As on a CUDA device: fp64 parameters keep to PyTorch operations, and the order stays."""
    params = [
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(3, 4),
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(9),
    ]
    params = [p.to(DEVICE).requires_grad_() for p in params]
    estimator = HutchinsonEstimator(params, seed=3)
    expected = [
        probe(p.shape, seed=3, step=2, micro_batch=1, parameter=i, dtype=p.dtype, device=DEVICE)
        for i, p in enumerate(params)
    ]
    estimator._kernels = [(ProbeFiller([params[1], params[3]], [1, 3]), [1, 3])]
    out = [torch.empty_like(p, requires_grad=False) for p in params]
    for given in (None, out):
        got = estimator.probes(step=2, micro_batch=1, out=given)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2.4e-7, atol=0)
    assert all(x is y for x, y in zip(got, out, strict=True))
    with pytest.raises(ValueError, match="must be one for each"):
        estimator.probes(step=2, micro_batch=1, out=out[:3])
    out[1] = torch.empty(4, 3, device=DEVICE).T
    with pytest.raises(ValueError, match=r"out\[1\] must be contiguous"):
        estimator.probes(step=2, micro_batch=1, out=out)
