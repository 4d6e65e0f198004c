"""What the Hopper kernels' host code decides; the kernels themselves run in tests/gpu."""

import pytest
import torch

common = pytest.importorskip("flashbob.kernels.hopper.common")


@pytest.mark.parametrize("rows", [1, 16, 777, 1000])
def test_row_vectors_have_strides_that_tma_takes(rows):
    """TMA reads from multiples of 16 bytes only: elsewhere the kernel stops with an illegal instruction."""
    whole = torch.randn(2, 3, rows + 5)
    for x in (whole[..., :rows].contiguous(), whole[..., :rows]):
        aligned = common.aligned_rows(x)
        assert aligned.stride(0) * 4 % 16 == 0 and aligned.stride(1) == 1 and aligned.data_ptr() % 16 == 0
        torch.testing.assert_close(aligned[:, :rows], x.flatten(0, 1), rtol=0, atol=0)
        assert common.rows_descriptor(aligned, 64).block_shape == [1, 64]


def test_row_vectors_that_tma_takes_are_not_copied():
    x = torch.randn(2, 3, 64)
    assert common.aligned_rows(x).data_ptr() == x.data_ptr()
