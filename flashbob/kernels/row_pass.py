"""Row pass of the second backward: a block of rows streams the keys once and writes Q̃, dÕ, α and E.

With A = g ⊙ dP (dropout; g = 1 without), per row block

    α = Σ P F      E° = Σ P P̃°      Ω = (P⊙P̃°) K + dS U_K      B = P K      dÕ° = (g⊙P) U_V + (g⊙P⊙F) V
    Q̃ = τ (Ω − E° B) − α dQ                                          dÕ = dÕ° − α O

which reads dQ in place of the paper's sixth product R = (P⊙A) K. With USE_DQ = False, the paper's form:

    E = E° − α D       Q̃ = τ (Ω − α R − E B)

Beyond 128 columns three fp32 sums do not fit into registers, and three launches do this with one sum each (STEP): "vectors"
writes α and E° alone; "q" and "do" read them and know h = F − α and S̃ = P ⊙ (P̃ − E), as the column pass does:

    Q̃ = τ Σ (S̃ K + dS U_K)      dÕ = Σ ((g⊙P) U_V + (g⊙P⊙h) V)

Source: FlashBoB (arXiv 2609.24089), section 4.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false

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
    store_tile,
    streamed_head,
    tile_offsets,
    visible,
)
from .launch import launch
from .tuning import FORCED, hopper_tile

# Row vectors that the column pass reads: log2(e)·L, D, α, α D + E.
NUM_VECTORS = 4


@triton.jit
def _key_tile(
    n0,
    alpha,
    e0,
    omega,
    b,
    r,
    do_sum,
    q,
    do,
    u_q,
    lse2,
    delta,
    k_head,
    v_head,
    u_k_head,
    u_v_head,
    k_strides,
    v_strides,
    u_k_strides,
    u_v_strides,
    k_offsets,
    v_offsets,
    u_k_offsets,
    u_v_offsets,
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
    HAS_U_Q: tl.constexpr,
    HAS_U_K: tl.constexpr,
    HAS_U_V: tl.constexpr,
    USE_DQ: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the step's sums, of six. Where α and E° = α D + E are known they stay as they are."""
    HAS_F: tl.constexpr = HAS_U_Q or HAS_U_K
    KNOWN: tl.constexpr = STEP == "q" or STEP == "do"
    WITH_Q: tl.constexpr = STEP == "all" or STEP == "q"
    WITH_DO: tl.constexpr = STEP == "all" or STEP == "do"
    WITH_P_TILDE: tl.constexpr = STEP != "do"
    dtype = q.dtype
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)
    v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)
    if HAS_U_K:
        u_k = load_tile(u_k_head, u_k_strides, u_k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)
    if HAS_U_V:
        u_v = load_tile(u_v_head, u_v_strides, u_v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED, TMA)

    # All score products first: they are in flight together while the first of them is worked on.
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if WITH_P_TILDE:
        a = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # dP
    if HAS_U_Q:
        f = tl.dot(u_q, tl.trans(k), input_precision=PRECISION)
        if HAS_U_K:
            f = tl.dot(q, tl.trans(u_k), f, input_precision=PRECISION)
    elif HAS_U_K:
        f = tl.dot(q, tl.trans(u_k), input_precision=PRECISION)
    if HAS_U_V and WITH_P_TILDE:
        c = tl.dot(do, tl.trans(u_v), input_precision=PRECISION)

    p = tl.math.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
    if MASKED:
        rows = m0 + tl.arange(0, BLOCK_M)[:, None]
        keys = n0 + tl.arange(0, BLOCK_N)[None, :]
        p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)[None, :], p, 0.0)
    pg = p
    if DROPOUT:
        keep = keep_mask(seed, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, False)
        pg = tl.where(keep, p * keep_scale, 0.0)
        if WITH_P_TILDE:
            a = tl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
            if HAS_U_V:
                c = tl.where(keep, c * keep_scale, 0.0)  # C = g ⊙ (dO U_Vᵀ)
    if STEP == "all":
        b = add_product(p.to(dtype), k, b, PRECISION)
    if HAS_U_V and WITH_DO:
        do_sum = add_product(pg.to(dtype), u_v, do_sum, PRECISION)
    if WITH_P_TILDE:
        centered = a - delta[:, None]
    if HAS_U_K and WITH_Q:
        omega = add_product((p * centered).to(dtype), u_k, omega, PRECISION)
    if HAS_F:
        f = f * scale  # F = τ (U_Q Kᵀ + Q U_Kᵀ)
        if KNOWN:
            f = f - alpha[:, None]  # h = F − α
        pf = p * f
        if not KNOWN:
            alpha += tl.sum(pf, 1)
        if DROPOUT:
            pf = tl.where(keep, pf * keep_scale, 0.0)
        if WITH_DO:
            do_sum = add_product(pf.to(dtype), v, do_sum, PRECISION)
        if WITH_P_TILDE:
            p_tilde = f * centered  # P̃° = C + F ⊙ (A − D)
            if HAS_U_V:
                p_tilde = p_tilde + c
    elif WITH_P_TILDE:
        p_tilde = c
    if WITH_P_TILDE:
        if KNOWN:
            p_tilde = p_tilde - e0[:, None]  # P̃ − E = C + h ⊙ (A − D) − (α D + E)
        p_p_tilde = p * p_tilde
        if not KNOWN:
            e0 += tl.sum(p_p_tilde, 1)
        if WITH_Q:
            omega = add_product(p_p_tilde.to(dtype), k, omega, PRECISION)
    if HAS_F:
        if not USE_DQ:
            r = add_product((p * a).to(dtype), k, r, PRECISION)
    return alpha, e0, omega, b, r, do_sum


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _row_pass(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    o_ptr,
    lse_ptr,
    dq_ptr,
    u_q_ptr,
    u_k_ptr,
    u_v_ptr,
    grad_q_ptr,
    grad_do_ptr,
    vectors_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    o_strides,
    dq_strides,
    u_q_strides,
    u_k_strides,
    u_v_strides,
    grad_q_strides,
    grad_do_strides,
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
    USE_DQ: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HAS_F: tl.constexpr = HAS_U_Q or HAS_U_K
    KNOWN: tl.constexpr = STEP == "q" or STEP == "do"
    WITH_Q: tl.constexpr = STEP == "all" or STEP == "q"
    WITH_DO: tl.constexpr = STEP == "all" or STEP == "do"
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
    do, u_q = q, q
    if STEP != "do":
        do = load_tile(do_head, do_strides, do_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    u_k_head, u_k_offsets = k_head, k_offsets
    u_v_head, u_v_offsets = v_head, v_offsets
    if HAS_U_Q:
        u_q_head = head_pointer(u_q_ptr, u_q_strides, batch, head)
        u_q_offsets = tile_offsets(u_q_strides, BLOCK_M, BLOCK_D, WIDE)
        u_q = load_tile(u_q_head, u_q_strides, u_q_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
    if HAS_U_K:
        u_k_head = streamed_head(u_k_ptr, u_k_strides, batch, kv_head, TMA)
        u_k_offsets = tile_offsets(u_k_strides, BLOCK_N, BLOCK_D, WIDE)
    if HAS_U_V:
        u_v_head = streamed_head(u_v_ptr, u_v_strides, batch, kv_head, TMA)
        u_v_offsets = tile_offsets(u_v_strides, BLOCK_N, BLOCK_D, WIDE)
    seed_value, seed_offset = 0, 0
    if DROPOUT:
        seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)

    vectors = vectors_ptr + tl.cast(batch_head, tl.int64) * padded_rows + rows
    vector_stride = tl.cast(vector_stride, tl.int64)
    if KNOWN:
        lse2 = tl.load(vectors)
        delta = tl.load(vectors + vector_stride)
        alpha = tl.load(vectors + 2 * vector_stride)
        e0 = tl.load(vectors + 3 * vector_stride)
    else:
        # L = +inf beyond the last row: P is 0 there.
        lse_pointers = lse_ptr + tl.cast(batch_head, tl.int64) * N_q + rows
        lse2 = tl.load(lse_pointers, mask=rows < N_q, other=float("inf")) * LOG2E
        o = load_tile(o_head, o_strides, o_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # D = ⟨dO, O⟩
        alpha = tl.zeros([BLOCK_M], tl.float32)
        e0 = tl.zeros([BLOCK_M], tl.float32)

    omega, b, do_sum = delta, delta, delta  # placeholders of the sums that other steps have
    if WITH_Q:
        omega = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if STEP == "all":
        b = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WITH_DO:
        do_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_F and not USE_DQ:
        r = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    else:
        r = tl.zeros([BLOCK_M], tl.float32)  # unused

    lo, full_begin, full_end, hi = key_range(m0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    if WINDOW:
        for n0 in range(lo, full_begin, BLOCK_N):
            alpha, e0, omega, b, r, do_sum = _key_tile(
                n0, alpha, e0, omega, b, r, do_sum, q, do, u_q, lse2, delta,
                k_head, v_head, u_k_head, u_v_head, k_strides, v_strides, u_k_strides, u_v_strides,
                k_offsets, v_offsets, u_k_offsets, u_v_offsets,
                padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k,
                True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, USE_DQ, STEP, TMA,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
    for n0 in range(full_begin, full_end, BLOCK_N):
        alpha, e0, omega, b, r, do_sum = _key_tile(
            n0, alpha, e0, omega, b, r, do_sum, q, do, u_q, lse2, delta,
            k_head, v_head, u_k_head, u_v_head, k_strides, v_strides, u_k_strides, u_v_strides,
            k_offsets, v_offsets, u_k_offsets, u_v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            False, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, USE_DQ, STEP, TMA,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n0 in range(full_end, hi, BLOCK_N):
        alpha, e0, omega, b, r, do_sum = _key_tile(
            n0, alpha, e0, omega, b, r, do_sum, q, do, u_q, lse2, delta,
            k_head, v_head, u_k_head, u_v_head, k_strides, v_strides, u_k_strides, u_v_strides,
            k_offsets, v_offsets, u_k_offsets, u_v_offsets,
            padding, padding_strides, seed_value, seed_offset, threshold, keep_scale, scale, window,
            batch, batch_head, m0, N_q, N_k,
            True, CAUSAL, WINDOW, PADDING, DROPOUT, HAS_U_Q, HAS_U_K, HAS_U_V, USE_DQ, STEP, TMA,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip

    e = e0 - alpha * delta  # E = E° − α D
    if not KNOWN:
        tl.store(vectors, lse2)
        tl.store(vectors + vector_stride, delta)
        tl.store(vectors + 2 * vector_stride, alpha)
        tl.store(vectors + 3 * vector_stride, e0)  # α D + E = E°

    if WITH_Q:
        if KNOWN:
            grad_q = scale * omega
        elif HAS_F:
            grad_q = omega - e0[:, None] * b
            if USE_DQ:
                dq_head = head_pointer(dq_ptr, dq_strides, batch, head)
                dq_offsets = tile_offsets(dq_strides, BLOCK_M, BLOCK_D, WIDE)
                dq = load_tile(dq_head, dq_strides, dq_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
                grad_q = scale * grad_q - alpha[:, None] * dq.to(tl.float32)  # τ (Ω − E° B) − α dQ
            else:
                grad_q = scale * (omega - alpha[:, None] * r - e[:, None] * b)  # τ (Ω − α R − E B)
        else:
            grad_q = scale * (omega - e0[:, None] * b)
        grad_q_head = head_pointer(grad_q_ptr, grad_q_strides, batch, head)
        store_tile(grad_q_head, grad_q_strides, grad_q, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)
    if WITH_DO:
        if HAS_F and not KNOWN:
            o = load_tile(o_head, o_strides, o_offsets, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, True)
            do_sum = do_sum - alpha[:, None] * o.to(tl.float32)  # dÕ = dÕ° − α O
        grad_do_head = head_pointer(grad_do_ptr, grad_do_strides, batch, head)
        store_tile(grad_do_head, grad_do_strides, do_sum, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)


def row_pass(
    problem: Problem,
    u_q: Tensor | None,
    u_k: Tensor | None,
    u_v: Tensor | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(Q̃ like q, dÕ like do, row vectors fp32 [4, B·H, padded rows]: L·log2(e), D, α, α D + E).

    All tensors but `lse` [B, H, N_q] are [B, H or H_kv, N, d]. At least one of u_q, u_k, u_v is given.
    Without `dq` the paper's form runs, which computes R in its place. Q̃ is written to `out` if given, of any strides.
    """
    grad_q = torch.empty_like(q) if out is None else out
    own = None if "row_pass" in FORCED else hopper(q.device)
    if own is not None and own.able(problem, (q, k, v, do, o, dq, u_q, u_k, u_v), dropout=False):
        tile = hopper_tile("row_pass", problem.head_dim)
        return own.row_pass(problem, u_q, u_k, u_v, do, q, k, v, o, lse, dq, grad_q, tile=tile)
    grad_do, vectors = torch.empty_like(do), problem.row_vectors(NUM_VECTORS)
    tensors = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "o_ptr": o, "lse_ptr": lse.contiguous(), "dq_ptr": dq,
        "u_q_ptr": u_q, "u_k_ptr": u_k, "u_v_ptr": u_v, "grad_q_ptr": grad_q, "grad_do_ptr": grad_do,
        "vectors_ptr": vectors, **problem.side_tensors,
    }  # fmt: skip

    streamed_names = ("k_ptr", "v_ptr", "u_k_ptr", "u_v_ptr")

    def prepare(step: str, tile: dict) -> tuple[int, dict]:
        num_heads = problem.batch * problem.heads
        num_streamed = 2 + (u_k is not None) + (u_v is not None)
        streamed = num_streamed * problem.num_keys * problem.head_dim * q.element_size()
        more = {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(streamed, num_heads),
            "HAS_U_Q": u_q is not None, "HAS_U_K": u_k is not None, "HAS_U_V": u_v is not None, "USE_DQ": dq is not None,
            "STEP": step, **problem.streamed(tensors, streamed_names if step != "all" else (), tile["BLOCK_N"]),
        }  # fmt: skip
        programs = problem.padded_rows // tile["BLOCK_M"] * num_heads
        return programs, problem.arguments(tensors.values()) | more | tile

    if dq is not None and problem.one_sum and "row_pass" not in FORCED:
        for step in ("vectors", "q", "do"):
            launch(_row_pass, problem, tensors, partial(prepare, step), f"row_pass_{step}")
    else:
        launch(_row_pass, problem, tensors, partial(prepare, "all"), "row_pass")
    return grad_q, grad_do, vectors
