"""Column pass of the second backward: a block of keys streams the rows and writes K̃ and Ṽ, each once.

    h = F − α        P̃ − E = C + h ⊙ (A − D) − (α D + E)        S̃ = P ⊙ (P̃ − E)        dS = P ⊙ (A − D)
    K̃ = τ (S̃ᵀ Q + dSᵀ U_Q)        Ṽ = (g ⊙ P ⊙ h)ᵀ dO

The scores are computed transposed (Sᵀ = K Qᵀ), so that S̃ᵀ and (P⊙h)ᵀ come out as the left operands of their
products. A group's query heads are summed before the write.

Beyond 128 columns two fp32 sums do not fit into registers, and two launches compute one each (STEP): "k" K̃, "v" Ṽ.

Source: FlashBoB (arXiv 2609.24089), section 4.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Sequence
from functools import partial

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
    hopper,
    keep_mask,
    load_padding,
    load_tile,
    program_block,
    row_range,
    store_tile,
    streamed_head,
    tile_offsets,
    visible,
)
from .launch import launch
from .tuning import FORCED, hopper_tile


@triton.jit
def _row_tile(
    m0,
    k_sum,
    v_sum,
    k,
    v,
    u_k,
    u_v,
    key_valid,
    vectors,
    vector_stride,
    q_head,
    do_head,
    u_q_head,
    q_strides,
    do_strides,
    u_q_strides,
    q_offsets,
    do_offsets,
    u_q_offsets,
    seed,
    seed_offset,
    threshold,
    keep_scale,
    scale,
    window,
    batch_head,
    n0,
    N_q,
    N_k,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDING: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_U_Q: tl.constexpr,
    HAS_U_K: tl.constexpr,
    HAS_U_V: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of rows to K̃ / τ and Ṽ, or to the step's. Score tiles are [BLOCK_N, BLOCK_M]."""
    HAS_F: tl.constexpr = HAS_U_Q or HAS_U_K
    WITH_K: tl.constexpr = STEP != "v"
    WITH_V: tl.constexpr = STEP != "k"
    dtype = k.dtype
    q = load_tile(q_head, q_strides, q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED, TMA)
    do = load_tile(do_head, do_strides, do_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED, TMA)
    # The vectors exist beyond the last row, with L = +inf: P is 0 there, and needs no mask.
    row_vectors = vectors + m0 + tl.arange(0, BLOCK_M)
    lse2 = tl.load(row_vectors)
    delta = tl.load(row_vectors + vector_stride)
    e0 = tl.load(row_vectors + 3 * vector_stride)  # α D + E

    # All score products first: they are in flight together while the first of them is worked on.
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if HAS_U_Q:
        u_q = load_tile(u_q_head, u_q_strides, u_q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED, TMA)
        f = tl.dot(k, tl.trans(u_q), input_precision=PRECISION)
        if HAS_U_K:
            f = tl.dot(u_k, tl.trans(q), f, input_precision=PRECISION)
    elif HAS_U_K:
        f = tl.dot(u_k, tl.trans(q), input_precision=PRECISION)
    if HAS_F and WITH_K:
        a = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # dP
    if HAS_U_V and WITH_K:
        c = tl.dot(u_v, tl.trans(do), input_precision=PRECISION)

    p = tl.math.exp2(s * (scale * LOG2E) - lse2[None, :])  # P = exp(S − L)
    if MASKED and CAUSAL:
        rows = m0 + tl.arange(0, BLOCK_M)[None, :]
        keys = n0 + tl.arange(0, BLOCK_N)[:, None]
        p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(key_valid[:, None], p, 0.0)
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, True)

    if HAS_F:
        alpha = tl.load(row_vectors + 2 * vector_stride)
        h = f * scale - alpha[None, :]  # h = F − α
        if WITH_V:
            ph = p * h
            if DROPOUT:
                ph = tl.where(keep, ph * keep_scale, 0.0)
            v_sum = add_product(ph.to(dtype), do, v_sum, PRECISION)
        if WITH_K:
            if DROPOUT:
                a = tl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
            centered = a - delta[None, :]
            p_tilde = h * centered - e0[None, :]  # P̃ − E, without C
            if HAS_U_Q:
                k_sum = add_product((p * centered).to(dtype), u_q, k_sum, PRECISION)
    if WITH_K:
        if HAS_U_V:
            if DROPOUT:
                c = tl.where(keep, c * keep_scale, 0.0)  # C = g ⊙ (dO U_Vᵀ)
            if HAS_F:
                p_tilde = p_tilde + c
            else:
                p_tilde = c - e0[None, :]
        k_sum = add_product((p * p_tilde).to(dtype), q, k_sum, PRECISION)
    return k_sum, v_sum


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _column_pass(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    u_q_ptr,
    u_k_ptr,
    u_v_ptr,
    grad_k_ptr,
    grad_v_ptr,
    vectors_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    u_q_strides,
    u_k_strides,
    u_v_strides,
    grad_k_strides,
    grad_v_strides,
    vector_stride,
    padded_rows,
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
    HAS_U_Q: tl.constexpr,
    HAS_U_K: tl.constexpr,
    HAS_U_V: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(N_k, BLOCK_N)
    # Under a causal mask the first keys are seen by most rows, and block 0 is first already.
    block, batch_kv_head = program_block(num_blocks, num_heads, section)
    kv_heads = H // GROUP
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    n0 = block * BLOCK_N

    k_head = head_pointer(k_ptr, k_strides, batch, kv_head)
    v_head = head_pointer(v_ptr, v_strides, batch, kv_head)
    k_offsets = tile_offsets(k_strides, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = tile_offsets(v_strides, BLOCK_N, BLOCK_D, WIDE)
    q_offsets = tile_offsets(q_strides, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = tile_offsets(do_strides, BLOCK_M, BLOCK_D, WIDE)
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    u_k, u_v, u_q_offsets = k, v, q_offsets
    if HAS_U_K:
        u_k_head = head_pointer(u_k_ptr, u_k_strides, batch, kv_head)
        u_k_offsets = tile_offsets(u_k_strides, BLOCK_N, BLOCK_D, WIDE)
        u_k = load_tile(u_k_head, u_k_strides, u_k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    if HAS_U_V:
        u_v_head = head_pointer(u_v_ptr, u_v_strides, batch, kv_head)
        u_v_offsets = tile_offsets(u_v_strides, BLOCK_N, BLOCK_D, WIDE)
        u_v = load_tile(u_v_head, u_v_strides, u_v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    if HAS_U_Q:
        u_q_offsets = tile_offsets(u_q_strides, BLOCK_M, BLOCK_D, WIDE)
    key_valid = 0
    if PADDING:
        key_valid = load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)
    vector_stride = tl.cast(vector_stride, tl.int64)

    # One that the step does not have stays zero, and in no register.
    k_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    v_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_begin, full_end, hi = row_range(n0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        batch_head = batch * H + head
        vectors = vectors_ptr + tl.cast(batch_head, tl.int64) * padded_rows
        q_head = streamed_head(q_ptr, q_strides, batch, head, TMA)
        do_head = streamed_head(do_ptr, do_strides, batch, head, TMA)
        u_q_head = q_head
        if HAS_U_Q:
            u_q_head = streamed_head(u_q_ptr, u_q_strides, batch, head, TMA)
        if CAUSAL:
            for m0 in range(lo, full_begin, BLOCK_M):
                k_sum, v_sum = _row_tile(
                    m0, k_sum, v_sum, k, v, u_k, u_v, key_valid, vectors, vector_stride,
                    q_head, do_head, u_q_head, q_strides, do_strides, u_q_strides,
                    q_offsets, do_offsets, u_q_offsets,
                    seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                    True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, STEP, TMA,
                    HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
                )  # fmt: skip
        for m0 in range(full_begin, full_end, BLOCK_M):
            k_sum, v_sum = _row_tile(
                m0, k_sum, v_sum, k, v, u_k, u_v, key_valid, vectors, vector_stride,
                q_head, do_head, u_q_head, q_strides, do_strides, u_q_strides,
                q_offsets, do_offsets, u_q_offsets,
                seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                False, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, STEP, TMA,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        for m0 in range(full_end, hi, BLOCK_M):
            k_sum, v_sum = _row_tile(
                m0, k_sum, v_sum, k, v, u_k, u_v, key_valid, vectors, vector_stride,
                q_head, do_head, u_q_head, q_strides, do_strides, u_q_strides,
                q_offsets, do_offsets, u_q_offsets,
                seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, STEP, TMA,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip

    if STEP != "v":
        grad_k_head = head_pointer(grad_k_ptr, grad_k_strides, batch, kv_head)
        store_tile(grad_k_head, grad_k_strides, k_sum * scale, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, WIDE)
    if STEP != "k":
        grad_v_head = head_pointer(grad_v_ptr, grad_v_strides, batch, kv_head)
        store_tile(grad_v_head, grad_v_strides, v_sum, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, WIDE)


def column_pass(
    problem: Problem,
    u_q: Tensor | None,
    u_k: Tensor | None,
    u_v: Tensor | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Tensor,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(K̃ like k, Ṽ like v), written to `out` if given, of any strides. `vectors` are the row pass's, of the same call."""
    grad_k, grad_v = (torch.empty_like(k), torch.empty_like(v)) if out is None else out
    own = None if "column_pass" in FORCED else hopper(q.device)
    if own is not None and own.able(problem, (q, k, v, do, u_q, u_k, u_v)):
        tile = hopper_tile("column_pass", problem.head_dim)
        return own.column_pass(problem, u_q, u_k, u_v, do, q, k, v, vectors, (grad_k, grad_v), tile=tile)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "u_q_ptr": u_q, "u_k_ptr": u_k, "u_v_ptr": u_v,
        "grad_k_ptr": grad_k, "grad_v_ptr": grad_v, "vectors_ptr": vectors, **problem.side_tensors,
    }  # fmt: skip

    streamed_names = ("q_ptr", "do_ptr", "u_q_ptr")

    def prepare(step: str, tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.kv_heads
        group = problem.heads // problem.kv_heads
        streamed = (2 + (u_q is not None)) * group * problem.num_rows * problem.head_dim * q.element_size()
        more = {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(streamed, num_heads),
            "HAS_U_Q": u_q is not None, "HAS_U_K": u_k is not None, "HAS_U_V": u_v is not None,
            "STEP": step, **problem.streamed(tensors, streamed_names if step != "all" else (), tile["BLOCK_M"]),
        }  # fmt: skip
        programs = triton.cdiv(problem.num_keys, tile["BLOCK_N"]) * num_heads
        return programs, problem.arguments(tensors.values()) | more | tile

    if problem.one_sum and "column_pass" not in FORCED:
        for step in ("k", "v"):
            launch(_column_pass, problem, tensors, partial(prepare, step), f"column_pass_{step}")
    else:
        launch(_column_pass, problem, tensors, partial(prepare, "all"), "column_pass")
    return grad_k, grad_v
