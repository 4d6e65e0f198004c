"""Tangent of the forward: a block of rows streams the keys once and writes Ȯ, the derivative of O along (Q̇, K̇, V̇).

With Ṡ = τ (Q̇ Kᵀ + Q K̇ᵀ), P = exp(S − L) from the forward's L, and g the dropout mask (1 without), per row block

    α = Σ P Ṡ      Ȯ = (g⊙P⊙Ṡ) V + (g⊙P) V̇ − α O

five products of which each is left out with the tangent that it needs. It is dÕ of the second backward with cotangents
(Q̇, K̇, V̇): the Hessian of ⟨G, O⟩ in (Q, K, V, G) is symmetric.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    DO_NOT_SPECIALIZE,
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
    alpha,
    acc,
    q,
    t_q,
    lse2,
    k_head,
    v_head,
    t_k_head,
    t_v_head,
    k_strides,
    v_strides,
    t_k_strides,
    t_v_strides,
    k_offsets,
    v_offsets,
    t_k_offsets,
    t_v_offsets,
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
    HAS_T_Q: tl.constexpr,
    HAS_T_K: tl.constexpr,
    HAS_T_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to both sums."""
    dtype = q.dtype
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_T_Q:
        t_s = tl.dot(t_q, tl.trans(k), input_precision=PRECISION)
        if HAS_T_K:
            t_k = load_tile(t_k_head, t_k_strides, t_k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
            t_s = tl.dot(q, tl.trans(t_k), t_s, input_precision=PRECISION)
    elif HAS_T_K:
        t_k = load_tile(t_k_head, t_k_strides, t_k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        t_s = tl.dot(q, tl.trans(t_k), input_precision=PRECISION)

    p = tl.math.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
    if MASKED:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        keys = n0 + tl.arange(0, BLOCK_N)[None, :]
        p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)[None, :], p, 0.0)
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, False)
    if HAS_T_Q or HAS_T_K:
        t_p = p * (t_s * scale)  # P ⊙ Ṡ
        alpha += tl.sum(t_p, 1)
        if DROPOUT:
            t_p = tl.where(keep, t_p * keep_scale, 0.0)
        v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        acc = add_product(t_p.to(dtype), v, acc, PRECISION)
    if HAS_T_V:
        if DROPOUT:
            p = tl.where(keep, p * keep_scale, 0.0)
        t_v = load_tile(t_v_head, t_v_strides, t_v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        acc = add_product(p.to(dtype), t_v, acc, PRECISION)
    return alpha, acc


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _tangent(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    t_q_ptr,
    t_k_ptr,
    t_v_ptr,
    t_o_ptr,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    t_q_strides,
    t_k_strides,
    t_v_strides,
    t_o_strides,
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
    HAS_T_Q: tl.constexpr,
    HAS_T_K: tl.constexpr,
    HAS_T_V: tl.constexpr,
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
    t_q = q
    t_k_head, t_k_offsets = k_head, k_offsets
    t_v_head, t_v_offsets = v_head, v_offsets
    if HAS_T_Q:
        t_q_head = head_pointer(t_q_ptr, t_q_strides, batch, head)
        t_q_offsets = tile_offsets(t_q_strides, BLOCK_M, BLOCK_D, WIDE)
        t_q = load_tile(t_q_head, t_q_strides, t_q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    if HAS_T_K:
        t_k_head = head_pointer(t_k_ptr, t_k_strides, batch, kv_head)
        t_k_offsets = tile_offsets(t_k_strides, BLOCK_N, BLOCK_D, WIDE)
    if HAS_T_V:
        t_v_head = head_pointer(t_v_ptr, t_v_strides, batch, kv_head)
        t_v_offsets = tile_offsets(t_v_strides, BLOCK_N, BLOCK_D, WIDE)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)
    # L = +inf beyond the last row: P is 0 there.
    lse_pointers = lse_ptr + tl.cast(batch_head, tl.int64) * N_q + rows
    lse2 = tl.load(lse_pointers, mask=rows < N_q, other=float("inf")) * LOG2E

    alpha = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_begin, full_end, hi = key_range(m0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    if WINDOW:
        for n0 in range(lo, full_begin, BLOCK_N):
            alpha, acc = _key_tile(
                n0, alpha, acc, q, t_q, lse2, k_head, v_head, t_k_head, t_v_head,
                k_strides, v_strides, t_k_strides, t_v_strides, k_offsets, v_offsets, t_k_offsets, t_v_offsets,
                padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_T_Q, HAS_T_K, HAS_T_V,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    for n0 in range(full_begin, full_end, BLOCK_N):
        alpha, acc = _key_tile(
            n0, alpha, acc, q, t_q, lse2, k_head, v_head, t_k_head, t_v_head,
            k_strides, v_strides, t_k_strides, t_v_strides, k_offsets, v_offsets, t_k_offsets, t_v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            False, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_T_Q, HAS_T_K, HAS_T_V,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n0 in range(full_end, hi, BLOCK_N):
        alpha, acc = _key_tile(
            n0, alpha, acc, q, t_q, lse2, k_head, v_head, t_k_head, t_v_head,
            k_strides, v_strides, t_k_strides, t_v_strides, k_offsets, v_offsets, t_k_offsets, t_v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_T_Q, HAS_T_K, HAS_T_V,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip

    if HAS_T_Q or HAS_T_K:
        o_head = head_pointer(o_ptr, o_strides, batch, head)
        o_offsets = tile_offsets(o_strides, BLOCK_M, BLOCK_D, WIDE)
        o = load_tile(o_head, o_strides, o_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
        acc = acc - alpha[:, None] * o.to(tl.float32)
    t_o_head = head_pointer(t_o_ptr, t_o_strides, batch, head)
    store_tile(t_o_head, t_o_strides, acc, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)


def tangent(
    problem: Problem,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
) -> Tensor:
    """Ȯ like q. All tensors but `lse` [B, H, N_q] are [B, H or H_kv, N, d]; at least one of t_q, t_k, t_v is given."""
    t_o = torch.empty_like(q)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "lse_ptr": lse.contiguous(),
        "t_q_ptr": t_q, "t_k_ptr": t_k, "t_v_ptr": t_v, "t_o_ptr": t_o, **problem.side_tensors,
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.heads
        num_streamed = 2 + (t_k is not None) + (t_v is not None)
        streamed = num_streamed * problem.num_keys * problem.head_dim * q.element_size()
        more = {
            "num_heads": num_heads, "section": problem.section(streamed, num_heads),
            "HAS_T_Q": t_q is not None, "HAS_T_K": t_k is not None, "HAS_T_V": t_v is not None,
        }  # fmt: skip
        programs = triton.cdiv(problem.num_rows, tile["BLOCK_M"]) * num_heads
        return programs, problem.arguments(tensors.values()) | more | tile

    launch(_tangent, problem, tensors, prepare, "tangent")
    return t_o
