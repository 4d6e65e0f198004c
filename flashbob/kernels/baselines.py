"""Kernels of the baselines `three_pass` and `single_pass_atomic`, in plain Triton.

`three_pass`: a pass for α alone, a row pass that knows α, and the column pass of the library. With α at hand the row pass
needs no dQ and no R:

    h = F − α      P̃ = C + h ⊙ (A − D) − α D      E = Σ P P̃      B = P K      Ω = (P ⊙ P̃) K + dS U_K
    Q̃ = τ (Ω − E B)      dÕ = (g ⊙ P) U_V + (g ⊙ P ⊙ h) V

`single_pass_atomic`: one kernel, parallel over rows. A block of rows streams the keys for α and E°, then streams them again
with S̃ = P ⊙ (P̃ − E) complete, keeps Q̃ and dÕ and adds its shares of K̃ and Ṽ to device memory with atomics: whose order
changes from run to run, and the last bits with it.

Missing cotangents are zeros here: these kernels are for comparison.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .column_pass import column_pass
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

NUM_VECTORS = 4  # log2(e)·L, D, α, α D + E


@triton.jit
def _tile_scores(
    n0,
    q,
    do,
    u_q,
    lse2,
    heads,
    strides,
    padding,
    padding_strides,
    seed,
    threshold,
    keep_scale,
    scale,
    window,
    batch,
    batch_head,
    m0,
    N_q,
    N_k,
    ALPHA_ONLY: tl.constexpr,
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
    """(P, F, A, C, g) of one tile, and its K, V, U_K, U_V. With ALPHA_ONLY A and C are P, and V and U_V K."""
    k_head, v_head, u_k_head, u_v_head = heads
    k_strides, v_strides, u_k_strides, u_v_strides = strides
    k_offsets = tile_offsets(k_strides, BLOCK_N, BLOCK_D, WIDE)
    u_k_offsets = tile_offsets(u_k_strides, BLOCK_N, BLOCK_D, WIDE)
    k = load_tile(k_head, k_strides, k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    u_k = load_tile(u_k_head, u_k_strides, u_k_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    f = tl.dot(u_q, tl.trans(k), input_precision=PRECISION)
    f = tl.dot(q, tl.trans(u_k), f, input_precision=PRECISION) * scale
    p = tl.math.exp2(s * (scale * LOG2E) - lse2[:, None])
    rows = m0 + tl.arange(0, BLOCK_M)[:, None]
    keys = n0 + tl.arange(0, BLOCK_N)[None, :]
    p = tl.where(visible(rows, keys, N_q, N_k, window, CAUSAL, WINDOW), p, 0.0)
    if PADDING:
        p = tl.where(load_padding(padding, padding_strides, batch, n0, N_k, BLOCK_N)[None, :], p, 0.0)
    v, u_v, a, c = k, k, p, p
    g = tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32)
    if not ALPHA_ONLY:
        v_offsets = tile_offsets(v_strides, BLOCK_N, BLOCK_D, WIDE)
        u_v_offsets = tile_offsets(u_v_strides, BLOCK_N, BLOCK_D, WIDE)
        v = load_tile(v_head, v_strides, v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        u_v = load_tile(u_v_head, u_v_strides, u_v_offsets, n0, N_k, BLOCK_N, BLOCK_D, HEAD_DIM, True)
        if DROPOUT:
            seed_value, seed_offset = tl.load(seed), tl.load(seed + 1)
            keep = keep_mask(seed_value, seed_offset, threshold, batch_head, m0, n0, BLOCK_M, BLOCK_N, False)
            g = tl.where(keep, keep_scale, 0.0)
        a = g * tl.dot(do, tl.trans(v), input_precision=PRECISION)
        c = g * tl.dot(do, tl.trans(u_v), input_precision=PRECISION)
    return p, f, a, c, g, k, v, u_k, u_v


@triton.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _rows(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    o_ptr,
    lse_ptr,
    u_q_ptr,
    u_k_ptr,
    u_v_ptr,
    grad_q_ptr,
    grad_do_ptr,
    grad_k_ptr,
    grad_v_ptr,
    vectors_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    o_strides,
    u_q_strides,
    u_k_strides,
    u_v_strides,
    grad_q_strides,
    grad_do_strides,
    grad_k_strides,
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
    STEP: tl.constexpr,
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
    """STEP "alpha": α. "rows": Q̃, dÕ and E with α known. "atomic": everything."""
    num_blocks = padded_rows // BLOCK_M
    block, batch_head = program_block(num_blocks, num_heads, section)
    if CAUSAL:
        block = num_blocks - 1 - block  # the last rows see most keys: first
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    q_offsets = tile_offsets(q_strides, BLOCK_M, BLOCK_D, WIDE)
    do_offsets = tile_offsets(do_strides, BLOCK_M, BLOCK_D, WIDE)
    u_q_offsets = tile_offsets(u_q_strides, BLOCK_M, BLOCK_D, WIDE)
    o_offsets = tile_offsets(o_strides, BLOCK_M, BLOCK_D, WIDE)
    q = load_tile(
        head_pointer(q_ptr, q_strides, batch, head),
        q_strides,
        q_offsets,
        m0,
        N_q,
        BLOCK_M,
        BLOCK_D,
        HEAD_DIM,
        True,
    )
    do = load_tile(
        head_pointer(do_ptr, do_strides, batch, head),
        do_strides,
        do_offsets,
        m0,
        N_q,
        BLOCK_M,
        BLOCK_D,
        HEAD_DIM,
        True,
    )
    u_q = load_tile(
        head_pointer(u_q_ptr, u_q_strides, batch, head),
        u_q_strides,
        u_q_offsets,
        m0,
        N_q,
        BLOCK_M,
        BLOCK_D,
        HEAD_DIM,
        True,
    )
    o = load_tile(
        head_pointer(o_ptr, o_strides, batch, head),
        o_strides,
        o_offsets,
        m0,
        N_q,
        BLOCK_M,
        BLOCK_D,
        HEAD_DIM,
        True,
    )
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)  # D
    lse_pointers = lse_ptr + tl.cast(batch_head, tl.int64) * N_q + rows
    lse2 = (
        tl.load(lse_pointers, mask=rows < N_q, other=float("inf")) * LOG2E
    )  # +inf beyond the last row: P is 0 there
    heads = (
        head_pointer(k_ptr, k_strides, batch, kv_head),
        head_pointer(v_ptr, v_strides, batch, kv_head),
        head_pointer(u_k_ptr, u_k_strides, batch, kv_head),
        head_pointer(u_v_ptr, u_v_strides, batch, kv_head),
    )
    strides = (k_strides, v_strides, u_k_strides, u_v_strides)
    vectors = vectors_ptr + tl.cast(batch_head, tl.int64) * padded_rows + rows
    vector_stride = tl.cast(vector_stride, tl.int64)
    lo, _begin, _end, hi = key_range(m0, N_q, N_k, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)

    alpha = tl.zeros([BLOCK_M], tl.float32)
    e0 = tl.zeros([BLOCK_M], tl.float32)
    if STEP != "rows":
        for n0 in range(lo, hi, BLOCK_N):
            p, f, a, c, _g, _k, _v, _u_k, _u_v = _tile_scores(
                n0, q, do, u_q, lse2, heads, strides, padding, padding_strides, seed, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k, STEP == "alpha", CAUSAL, WINDOW, PADDING, DROPOUT,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            alpha += tl.sum(p * f, 1)
            if STEP == "atomic":
                e0 += tl.sum(p * (c + f * (a - delta[:, None])), 1)
    if STEP == "alpha":
        tl.store(vectors, lse2)
        tl.store(vectors + vector_stride, delta)
        tl.store(vectors + 2 * vector_stride, alpha)
    else:
        e = e0 - alpha * delta
        if STEP == "rows":
            alpha = tl.load(vectors + 2 * vector_stride)
        omega = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        do_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n0 in range(lo, hi, BLOCK_N):
            p, f, a, c, g, k, v, u_k, u_v = _tile_scores(
                n0, q, do, u_q, lse2, heads, strides, padding, padding_strides, seed, threshold, keep_scale, scale, window,
                batch, batch_head, m0, N_q, N_k, False, CAUSAL, WINDOW, PADDING, DROPOUT,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WIDE, PRECISION,
            )  # fmt: skip
            h = f - alpha[:, None]
            ds = (p * (a - delta[:, None])).to(q.dtype)
            p_tilde = c + f * (a - delta[:, None]) - alpha[:, None] * a
            gph = (g * p * h).to(q.dtype)
            do_sum = add_product((g * p).to(q.dtype), u_v, do_sum, PRECISION)
            do_sum = add_product(gph, v, do_sum, PRECISION)
            omega = add_product(ds, u_k, omega, PRECISION)
            if STEP == "rows":
                e += tl.sum(p * p_tilde, 1)
                omega = add_product((p * p_tilde).to(q.dtype), k, omega, PRECISION)
                b = add_product(p.to(q.dtype), k, b, PRECISION)
            else:
                s_tilde = (p * (p_tilde - e[:, None])).to(q.dtype)
                omega = add_product(s_tilde, k, omega, PRECISION)
                k_part = tl.dot(tl.trans(s_tilde), q, input_precision=PRECISION)
                k_part = tl.dot(tl.trans(ds), u_q, k_part, input_precision=PRECISION)
                v_part = tl.dot(tl.trans(gph), do, input_precision=PRECISION)
                mask = (n0 + tl.arange(0, BLOCK_N) < N_k)[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[
                    None, :
                ]
                # Both sums are contiguous: the same offsets.
                offsets = tl.cast(n0, tl.int64) * grad_k_strides[2] + tile_offsets(
                    grad_k_strides, BLOCK_N, BLOCK_D, WIDE
                )
                k_pointers = head_pointer(grad_k_ptr, grad_k_strides, batch, kv_head) + offsets
                v_pointers = head_pointer(grad_v_ptr, grad_k_strides, batch, kv_head) + offsets
                tl.atomic_add(k_pointers, k_part * scale, mask=mask, sem="relaxed")
                tl.atomic_add(v_pointers, v_part, mask=mask, sem="relaxed")
        if STEP == "rows":
            omega -= e[:, None] * b
            tl.store(vectors + 3 * vector_stride, alpha * delta + e)
        grad_q_head = head_pointer(grad_q_ptr, grad_q_strides, batch, head)
        grad_do_head = head_pointer(grad_do_ptr, grad_do_strides, batch, head)
        store_tile(grad_q_head, grad_q_strides, omega * scale, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)
        store_tile(grad_do_head, grad_do_strides, do_sum, m0, N_q, BLOCK_M, BLOCK_D, HEAD_DIM, WIDE)


class _Call:
    """Tensors of one second backward, and launches of `_rows` on them."""

    def __init__(
        self,
        problem: Problem,
        cotangents: Sequence[Tensor | None],
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        sums: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.problem = problem
        self.cotangents = [torch.zeros_like(x) if u is None else u for u, x in zip(cotangents, (q, k, v))]
        self.grad_q, self.grad_do = torch.empty_like(q), torch.empty_like(do)
        self.vectors = problem.row_vectors(NUM_VECTORS)
        self.tensors = {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "o_ptr": o, "lse_ptr": lse.contiguous(),
            **dict(zip(("u_q_ptr", "u_k_ptr", "u_v_ptr"), self.cotangents)),
            "grad_q_ptr": self.grad_q, "grad_do_ptr": self.grad_do, "grad_k_ptr": sums[0], "grad_v_ptr": sums[1],
            "vectors_ptr": self.vectors, **problem.side_tensors,
        }  # fmt: skip

    def run(self, step: str) -> None:
        problem = self.problem

        def prepare(tile: dict) -> tuple[int, dict]:
            num_heads = problem.batch * problem.heads
            streamed = 4 * problem.num_keys * problem.head_dim * problem.dtype.itemsize
            more = {
                "vector_stride": self.vectors.stride(0), "padded_rows": problem.padded_rows, "STEP": step,
                "num_heads": num_heads, "section": problem.section(streamed, num_heads),
            }  # fmt: skip
            programs = problem.padded_rows // tile["BLOCK_M"] * num_heads
            return programs, problem.arguments(self.tensors.values()) | more | tile

        launch(_rows, problem, self.tensors, prepare, "baseline_rows", step)


def three_pass(
    problem: Problem,
    cotangents: Sequence[Tensor | None],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(Q̃, K̃, Ṽ, dÕ), each like its input; `cotangents` are U_Q, U_K, U_V."""
    call = _Call(problem, cotangents, do, q, k, v, o, lse)
    call.run("alpha")
    call.run("rows")
    u_q, u_k, u_v = call.cotangents
    grad_k, grad_v = column_pass(problem, u_q, u_k, u_v, do, q, k, v, call.vectors)
    return call.grad_q, grad_k, grad_v, call.grad_do


def single_pass_atomic(
    problem: Problem,
    cotangents: Sequence[Tensor | None],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `three_pass`; K̃ and Ṽ are summed in fp32, 8 bytes for an element of K of extra memory."""
    sums = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
    call = _Call(problem, cotangents, do, q, k, v, o, lse, (sums[0], sums[1]))
    call.run("atomic")
    return call.grad_q, sums[0].to(k.dtype), sums[1].to(v.dtype), call.grad_do
