"""Kernels that write gradients of q, k, v where they are told to, against the same kernels without."""

import pytest
import torch

from flashbob.backends import fused, triton
from tests.kernels.test_kernels import CAUSAL, DEVICE, FEATURES, LOW_PRECISION, WINDOW, complete, padding_mask
from tests.oracle import make_inputs

ON_A_GPU = DEVICE.type == "cuda"
# (length, head dimension, dtype, backend). cuDNN's bits differ from run to run: tests/gpu.
KINDS = [(33, 16, dtype, triton) for dtype in (torch.float32, *LOW_PRECISION)]
KINDS += [(40, 24, torch.float32, triton), (33, 16, torch.float32, fused)]
if ON_A_GPU:  # the longer ones by the Gluon kernels
    sizes = ((65, 16), (33, 24), (1000, 64), (600, 128))
    KINDS = [(*size, dtype, triton) for size in sizes for dtype in (torch.float32, *LOW_PRECISION)]
SELF_ATTENTION = {"full": {}, "causal": CAUSAL, "window-dropout": FEATURES["window-mha-wide-dropout"][0]}
SELF_ATTENTION["window-padding"] = WINDOW | {"key_padding_mask": 1}


def packed(q):
    """Not one NaN may be left of it; its parts like q."""
    whole = q.new_full((q.shape[0], q.shape[2], 3, q.shape[1], q.shape[3]), float("nan"))
    return whole, [x.transpose(1, 2) for x in whole.unbind(2)]


@pytest.mark.parametrize("options", SELF_ATTENTION.values(), ids=SELF_ATTENTION)
@pytest.mark.parametrize(("length", "head_dim", "dtype", "backend"), KINDS)
def test_results_are_the_same_and_a_base_is_added_before_they_are_rounded(
    length, head_dim, dtype, backend, options
):
    q, k, v, do, us = make_inputs((2, 2), (length, length), head_dim=head_dim, dtype=dtype, device=DEVICE)
    if "key_padding_mask" in options:
        options = options | {"key_padding_mask": padding_mask(2, length)}
    options = complete(head_dim, **options)
    o, lse = backend.forward(q, k, v, **options)
    first = backend.backward(do, q, k, v, o, lse, **options)
    second = backend.backward_backward(*us, do, q, k, v, o, lse, first[0], **options)

    _, parts = packed(q)
    results = backend.backward(do, q, k, v, o, lse, out=parts, **options)
    assert all(x.data_ptr() == part.data_ptr() for x, part in zip(results, parts))
    assert all(torch.equal(x, y) for x, y in zip(parts, first))
    second_whole, second_parts = packed(q)
    *_, grad_do = backend.backward_backward(*us, do, q, k, v, o, lse, parts[0], out=second_parts, **options)
    assert all(torch.equal(x, y) for x, y in zip([*second_parts, grad_do], second))

    before = second_whole.clone()
    sum_whole, sums = packed(q)
    backend.backward(do, q, k, v, o, lse, out=sums, base=second_parts, **options)
    assert torch.equal(second_whole, before)
    epsilon = torch.finfo(dtype).eps
    for total, x, y in zip(sums, first, second):
        # x is rounded here and was not there: half a unit in the last place of either.
        bound = epsilon * (x.abs() + total.abs()).double()
        assert ((total.double() - x.double() - y.double()).abs() <= bound).all()
    assert sum_whole.isfinite().all()


def test_no_cotangent_gives_zeros():
    q, k, v, do, _ = make_inputs((2, 2), (33, 33), head_dim=16, dtype=torch.float32, device=DEVICE)
    options = complete(16)
    o, lse = triton.forward(q, k, v, **options)
    whole, parts = packed(q)
    triton.backward_backward(None, None, None, do, q, k, v, o, lse, q, out=parts, **options)
    assert not whole.any()
