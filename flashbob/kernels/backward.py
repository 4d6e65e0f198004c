"""Attention's first backward: dQ over row blocks, then dK and dV over key blocks.

    dP = dO Vᵀ      A = g ⊙ dP      D = ⟨dO, O⟩      dS = P ⊙ (A − D)
    dQ = τ dS K     dK = τ dSᵀ Q    dV = (g ⊙ P)ᵀ dO

The first kernel computes D from the dO tile that it holds anyway, and stores it for the second. Two kernels
compute the scores twice, and need no atomics: dQ has the same bits on every run. Beyond 128 columns dK and dV, whose sums
do not fit into registers together, are a launch each (STEP).

Source: FlashAttention-2 (arXiv 2307.08691), section 3.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false

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
    key_range,
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

# Up to that many tokens the plain kernels are as fast on Hopper, or faster: their programs start sooner (docs/kernels.md).
HOPPER_BEYOND = 512
# Row vectors that the second kernel reads: log2(e)·L and D.
NUM_VECTORS = 2


@triton.jit
def _key_tile(
    n0,
    dq,
    q,
    do,
    lse2,
    delta,
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
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to dQ / τ."""
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)
    v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.math.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
    if MASKED:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        keys = n0 + tl.arange(0, BLOCK_N)[None, :]
        p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)[None, :], p, 0.0)
    a = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # dP
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, False)
        a = tl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
    ds = p * (a - delta[:, None])
    return add_product(ds.to(k.dtype), k, dq, PRECISION)


@triton.jit
def _row_tile(
    m0,
    dk,
    dv,
    k,
    v,
    key_valid,
    vectors,
    vector_stride,
    q_head,
    do_head,
    q_strides,
    do_strides,
    q_offsets,
    do_offsets,
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
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of rows to dK / τ and dV, or to the step's. Score tiles are [BLOCK_N, BLOCK_M]: see `column_pass`."""
    dtype = k.dtype
    q = load_tile(q_head, q_strides, q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED, TMA)
    do = load_tile(do_head, do_strides, do_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED, TMA)
    # The vectors exist beyond the last row, with L = +inf: P is 0 there, and needs no mask.
    row_vectors = vectors + m0 + tl.arange(0, BLOCK_M)
    lse2 = tl.load(row_vectors)
    delta = tl.load(row_vectors + vector_stride)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.math.exp2(s * (scale * LOG2E) - lse2[None, :])  # P = exp(S − L)
    if MASKED and CAUSAL:
        rows = m0 + tl.arange(0, BLOCK_M)[None, :]
        keys = n0 + tl.arange(0, BLOCK_N)[:, None]
        p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(key_valid[:, None], p, 0.0)
    if STEP != "v":
        a = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # dP
    pg = p
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, True)
        pg = tl.where(keep, p * keep_scale, 0.0)
        if STEP != "v":
            a = tl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
    if STEP != "k":
        dv = add_product(pg.to(dtype), do, dv, PRECISION)
    if STEP != "v":
        ds = p * (a - delta[None, :])
        dk = add_product(ds.to(dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    o_ptr,
    lse_ptr,
    dq_ptr,
    base_ptr,
    vectors_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    o_strides,
    dq_strides,
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
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    BASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = padded_rows // BLOCK_M
    block, batch_head = program_block(num_blocks, num_heads, section)
    if CAUSAL:
        block = num_blocks - 1 - block  # the last rows see most keys: first
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)

    q_head = head_pointer(q_ptr, q_strides, batch, head)
    do_head = head_pointer(do_ptr, do_strides, batch, head)
    o_head = head_pointer(o_ptr, o_strides, batch, head)
    k_head = streamed_head(k_ptr, k_strides, batch, kv_head, TMA)
    v_head = streamed_head(v_ptr, v_strides, batch, kv_head, TMA)
    q_offsets = tile_offsets(q_strides, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = tile_offsets(do_strides, BLOCK_M, BLOCK_D, WIDE)
    o_offsets = tile_offsets(o_strides, BLOCK_M, BLOCK_D, WIDE)
    k_offsets = tile_offsets(k_strides, BLOCK_N, BLOCK_D, WIDE)
    v_offsets = tile_offsets(v_strides, BLOCK_N, BLOCK_D, WIDE)
    q = load_tile(q_head, q_strides, q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    do = load_tile(do_head, do_strides, do_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    o = load_tile(o_head, o_strides, o_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)

    # L = +inf beyond the last row: P is 0 there.
    lse_pointers = lse_ptr + tl.cast(batch_head, tl.int64) * N_q + rows
    lse2 = tl.load(lse_pointers, mask=rows < N_q, other=float("inf")) * LOG2E
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # D = ⟨dO, O⟩
    vectors = vectors_ptr + tl.cast(batch_head, tl.int64) * padded_rows + rows
    tl.store(vectors, lse2)
    tl.store(vectors + tl.cast(vector_stride, tl.int64), delta)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_begin, full_end, hi = key_range(m0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    if WINDOW:
        for n0 in range(lo, full_begin, BLOCK_N):
            dq = _key_tile(
                n0, dq, q, do, lse2, delta, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
                padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    for n0 in range(full_begin, full_end, BLOCK_N):
        dq = _key_tile(
            n0, dq, q, do, lse2, delta, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            False, CAUSAL, WINDOW, PADDING, DROPOUT, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n0 in range(full_end, hi, BLOCK_N):
        dq = _key_tile(
            n0, dq, q, do, lse2, delta, k_head, v_head, k_strides, v_strides, k_offsets, v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            True, CAUSAL, WINDOW, PADDING, DROPOUT, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    dq *= scale
    if BASE:
        base_head = head_pointer(base_ptr, dq_strides, batch, head)
        offsets = tile_offsets(dq_strides, BLOCK_M, BLOCK_D, WIDE)
        dq += load_tile(base_head, dq_strides, offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    dq_head = head_pointer(dq_ptr, dq_strides, batch, head)
    store_tile(dq_head, dq_strides, dq, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    dk_ptr,
    dv_ptr,
    dk_base_ptr,
    dv_base_ptr,
    vectors_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
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
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    BASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_blocks = tl.cdiv(N_k, BLOCK_N)
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
    key_valid = 0
    if PADDING:
        key_valid = load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)
    vector_stride = tl.cast(vector_stride, tl.int64)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_begin, full_end, hi = row_range(n0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        batch_head = batch * H + head
        vectors = vectors_ptr + tl.cast(batch_head, tl.int64) * padded_rows
        q_head = streamed_head(q_ptr, q_strides, batch, head, TMA)
        do_head = streamed_head(do_ptr, do_strides, batch, head, TMA)
        if CAUSAL:
            for m0 in range(lo, full_begin, BLOCK_M):
                dk, dv = _row_tile(
                    m0, dk, dv, k, v, key_valid, vectors, vector_stride,
                    q_head, do_head, q_strides, do_strides, q_offsets, do_offsets,
                    seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                    True, CAUSAL, WINDOW, PADDING, DROPOUT, STEP, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
                )  # fmt: skip
        for m0 in range(full_begin, full_end, BLOCK_M):
            dk, dv = _row_tile(
                m0, dk, dv, k, v, key_valid, vectors, vector_stride,
                q_head, do_head, q_strides, do_strides, q_offsets, do_offsets,
                seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                False, CAUSAL, WINDOW, PADDING, DROPOUT, STEP, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        for m0 in range(full_end, hi, BLOCK_M):
            dk, dv = _row_tile(
                m0, dk, dv, k, v, key_valid, vectors, vector_stride,
                q_head, do_head, q_strides, do_strides, q_offsets, do_offsets,
                seed_value, seed_offset, threshold, keep_scale, scale, window, batch_head, n0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, STEP, TMA, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip

    if STEP != "v":
        dk *= scale
        if BASE:
            dk_base = head_pointer(dk_base_ptr, dk_strides, batch, kv_head)
            dk_offsets = tile_offsets(dk_strides, BLOCK_N, BLOCK_D, WIDE)
            dk += load_tile(dk_base, dk_strides, dk_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        dk_head = head_pointer(dk_ptr, dk_strides, batch, kv_head)
        store_tile(dk_head, dk_strides, dk, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, WIDE)
    if STEP != "k":
        if BASE:
            dv_base = head_pointer(dv_base_ptr, dv_strides, batch, kv_head)
            dv_offsets = tile_offsets(dv_strides, BLOCK_N, BLOCK_D, WIDE)
            dv += load_tile(dv_base, dv_strides, dv_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        dv_head = head_pointer(dv_ptr, dv_strides, batch, kv_head)
        store_tile(dv_head, dv_strides, dv, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, WIDE)


def backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    out: Sequence[Tensor] | None = None,
    base: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ like q, dK like k, dV like v). They are written to `out` if given, of any strides, and `base`, of `out`'s, is added."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v)) if out is None else out
    forced = FORCED.keys() & {"backward_rows", "backward_keys"}
    long = max(problem.num_rows, problem.num_keys) > HOPPER_BEYOND
    own = hopper(q.device) if long and not forced else None
    if own is not None and own.able(problem, (q, k, v, do, o)):
        tile = hopper_tile("backward_rows", problem.head_dim)
        vectors = own.backward_rows(problem, do, q, k, v, o, lse, dq, base and base[0], tile=tile)
        tile = hopper_tile("backward_keys", problem.head_dim)
        own.backward_keys(problem, do, q, k, v, vectors, (dk, dv), base and base[1:], tile=tile)
        return dq, dk, dv
    vectors = problem.row_vectors(NUM_VECTORS)
    row_bytes = problem.head_dim * q.element_size()

    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "o_ptr": o, "lse_ptr": lse.contiguous(), "dq_ptr": dq,
        "base_ptr": base and base[0], "vectors_ptr": vectors, **problem.side_tensors,
    }  # fmt: skip

    def prepare_rows(tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.heads
        more = {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(2 * problem.num_keys * row_bytes, num_heads),
            "BASE": base is not None,
            **problem.streamed(tensors, ("k_ptr", "v_ptr") if problem.one_sum else (), tile["BLOCK_N"]),
        }  # fmt: skip
        programs = problem.padded_rows // tile["BLOCK_M"] * num_heads
        return programs, problem.arguments(tensors.values()) | more | tile

    launch(_backward_rows, problem, tensors, prepare_rows, "backward_rows")

    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "dk_ptr": dk, "dv_ptr": dv,
        "dk_base_ptr": base and base[1], "dv_base_ptr": base and base[2], "vectors_ptr": vectors, **problem.side_tensors,
    }  # fmt: skip

    def prepare_keys(step: str, tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.kv_heads
        group = problem.heads // problem.kv_heads
        streamed = 2 * group * problem.num_rows * row_bytes
        more = {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(streamed, num_heads), "BASE": base is not None,
            "STEP": step, **problem.streamed(tensors, ("q_ptr", "do_ptr") if step != "all" else (), tile["BLOCK_M"]),
        }  # fmt: skip
        programs = triton.cdiv(problem.num_keys, tile["BLOCK_N"]) * num_heads
        return programs, problem.arguments(tensors.values()) | more | tile

    if problem.one_sum and "backward_keys" not in FORCED:
        for step in ("k", "v"):
            launch(_backward_keys, problem, tensors, partial(prepare_keys, step), f"backward_keys_{step}")
    else:
        launch(_backward_keys, problem, tensors, partial(prepare_keys, "all"), "backward_keys")
    return dq, dk, dv
