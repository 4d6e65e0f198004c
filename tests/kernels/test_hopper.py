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


def problem_of(monkeypatch, *, length: int, window: int | None):
    """A call of 48 heads on a GPU with 60 MB of L2 cache."""
    kernels = pytest.importorskip("flashbob.kernels.common")
    monkeypatch.setattr(kernels, "_l2_cache_bytes", lambda device: 60 * 10**6)
    return kernels.Problem(
        batch=4, heads=12, kv_heads=12, num_rows=length, num_keys=length, head_dim=64, dtype=torch.bfloat16,
        device=torch.device("cuda"), scale=0.125, is_causal=True, window_size=window, key_padding_mask=None,
        dropout_p=0.0, dropout_seed=None,
    )  # fmt: skip


def test_sections_are_of_like_size(monkeypatch):
    """45 MB hold 22 heads of 2 MB: three sections of 16 heads, not two of 22 and one of 4."""
    problem = problem_of(monkeypatch, length=4096, window=None)
    assert problem.section(2 * 10**6, 48) == 16
    assert problem.section(10**6 // 2, 48) == 48
    assert problem.section(10**9, 48) == 1


def test_a_window_leaves_room_for_more_heads(monkeypatch):
    problem = problem_of(monkeypatch, length=8192, window=1024)
    assert problem.section(4 * 10**6, 48) == 24  # 1 MB a head: 45 fit
    assert problem_of(monkeypatch, length=8192, window=None).section(4 * 10**6, 48) == 10
