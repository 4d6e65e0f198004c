"""Attention's forward: O and the row sums' logarithm L, by the online softmax.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ahead import compile_derivatives
from .common import (
    DO_NOT_SPECIALIZE,
    LN2,
    LOG2E,
    Problem,
    add_product,
    head_pointer,
    keep_mask,
    key_range,
    load_padding,
    load_tile,
    program_block,
    store_tile,
    tile_offsets,
    visible,
)
from .launch import launch


@triton.jit
def _key_tile(
    n0,
    maximum,
    total,
    acc,
    q,
    k_head,
    v_head,
    k_strides,
    v_strides,
    k_offsets,
    v_offsets,
    padding,
    padding_strides,
    seed,
    seed_offset,
    threshold,
    keep_scale,
    scale,
    window,
    batch,
    batch_head,
    m0,
    N_q,
    N_k,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax. `maximum` is in units of log2(e)."""
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        keys = n0 + tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), s, float("-inf"))
    if PADDING:
        key_valid = load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)
        s = tl.where(key_valid[None, :], s, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(s, 1) * (scale * LOG2E))
    reference = new_maximum
    if MASKED or PADDING:
        # A row without a key so far keeps the maximum -inf; subtracting 0 gives exp2(-inf) = 0 and not NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = tl.math.exp2(s * (scale * LOG2E) - reference[:, None])
    correction = tl.math.exp2(maximum - reference)
    total = total * correction + tl.sum(p, 1)
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, False)
        p = tl.where(keep, p * keep_scale, 0.0)
    v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    acc = add_product(p.to(v.dtype), v, acc * correction[:, None], PRECISION)
    return new_maximum, total, acc


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    padding,
    padding_strides,
    seed,
    threshold,
    keep_scale,
    scale,
    window,
    H,
    GROUP,
    N_q,
    N_k,
    num_heads,
    section,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(N_q, BLOCK_M)
    block, batch_head = program_block(num_blocks, num_heads, section)
    if CAUSAL:
        block = num_blocks - 1 - block  # the last rows see most keys: first
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)

    q_head = head_pointer(q_ptr, q_strides, batch, head)
    k_head = head_pointer(k_ptr, k_strides, batch, kv_head)
    v_head = head_pointer(v_ptr, v_strides, batch, kv_head)
    q_offsets = tile_offsets(q_strides, BLOCK_M, BLOCK_D, WIDE)
    k_offsets = tile_offsets(k_strides, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = tile_offsets(v_strides, BLOCK_N, BLOCK_D, WIDE)
    q = load_tile(q_head, q_strides, q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_begin, full_end, hi = key_range(m0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    if WINDOW:
        for n0 in range(lo, full_begin, BLOCK_N):
            maximum, total, acc = _key_tile(
                n0, maximum, total, acc, q, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
                padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    for n0 in range(full_begin, full_end, BLOCK_N):
        maximum, total, acc = _key_tile(
            n0, maximum, total, acc, q, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            False, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n0 in range(full_end, hi, BLOCK_N):
        maximum, total, acc = _key_tile(
            n0, maximum, total, acc, q, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            True, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("inf"), (maximum + tl.math.log2(total)) * LN2)
    tl.store(lse_ptr + tl.cast(batch_head, tl.int64) * N_q + rows, lse, mask=rows < N_q)
    o_head = head_pointer(o_ptr, o_strides, batch, head)
    store_tile(o_head, o_strides, acc / total[:, None], m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(O like q, L fp32 [B, H, N_q], natural log; rows without keys have O = 0 and L = +inf)."""
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        compile_derivatives(problem, q, k, v, lse)
    tensors = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "lse_ptr": lse, **problem.side_tensors}

    def prepare(tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.heads
        streamed = 2 * problem.num_keys * problem.head_dim * q.element_size()
        heads = {"num_heads": num_heads, "section": problem.section(streamed, num_heads)}
        programs = triton.cdiv(problem.num_rows, tile["BLOCK_M"]) * num_heads
        return programs, problem.arguments(tensors.values()) | heads | tile

    launch(_forward, problem, tensors, prepare, "forward")
    return o, lse
