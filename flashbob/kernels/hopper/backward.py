"""The first backward for Hopper (compute capability 9.0) in Gluon, in the manner of passes.py; formulas and results are
those of ../backward.py, which serves everything that `able` refuses.

A warpgroup holds a block of rows (for dQ) or of keys (for dK and dV) and streams the other side's tiles, which arrive by TMA.
Its products run while it works on the scores of the tile: the next tile's S in the shadow of the last product.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..common import DO_NOT_SPECIALIZE, Problem
from ..launch import launch
from .common import (
    LOG2E,
    KeySums,
    common_arguments,
    fetch,
    fetch_vectors,
    key_block,
    keys_of_rows,
    load_padding,
    next_tile,
    row_block,
    rows_of_keys,
    store_sums,
    thread_barrier,
    tile_descriptor,
    tile_pointers,
    vectors_descriptor,
)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_rows(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    do_ptr,
    o_ptr,
    lse_ptr,
    dq_ptr,
    vectors_ptr,
    do_strides,
    o_strides,
    dq_strides,
    vector_stride,
    padded_rows,
    padding,
    padding_strides,
    scale,
    window,
    H,
    GROUP,
    N_q,
    N_k,
    num_heads,
    section,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)

    block, batch_head, batch, head, kv_head = row_block(
        padded_rows // BLOCK_M, num_heads, section, H, GROUP, CAUSAL
    )
    m0 = block * BLOCK_M
    lo, hi, full_begin, full_end = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_N)

    q_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    held_barrier = barriers.index(STAGES)
    mbarrier.expect(held_barrier, 2 * BLOCK_M * HEAD_DIM * 2)
    fetch(q_desc, batch, head, m0, held_barrier, q_smem, True)
    fetch(do_desc, batch, head, m0, held_barrier, do_smem, True)
    for i in gl.static_range(STAGES - 1):
        pred = i < total
        mbarrier.expect(barriers.index(i), 2 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        fetch(k_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), k_ring.index(i), pred)
        fetch(v_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), v_ring.index(i), pred)
    slot = STAGES - 1 + 0 * total

    # D = <dO, O> in the sums' layout, and L = +inf beyond the last row: P is 0 there.
    out_rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    exists = (out_rows < N_q)[:, None]
    do_tile = gl.load(tile_pointers(do_ptr, do_strides, batch, head, out_rows, dims), exists, 0.0)
    o_tile = gl.load(tile_pointers(o_ptr, o_strides, batch, head, out_rows, dims), exists, 0.0)
    delta = gl.convert_layout(gl.sum(do_tile.to(gl.float32) * o_tile.to(gl.float32), 1), ROWS)
    rows = m0 + gl.arange(0, BLOCK_M, layout=ROWS)
    lse2 = gl.load(lse_ptr + batch_head.to(gl.int64) * N_q + rows, rows < N_q, float("inf")) * LOG2E
    vectors = vectors_ptr + batch_head.to(gl.int64) * padded_rows + rows
    gl.store(vectors, lse2)
    gl.store(vectors + vector_stride.to(gl.int64), delta)

    q = q_smem.reshape([BLOCK_M, HEAD_DIM])
    do = do_smem.reshape([BLOCK_M, HEAD_DIM])
    mbarrier.wait(held_barrier, 0)
    if HELD_OPERANDS >= 1:
        q = q.load(HELD)
    if HELD_OPERANDS >= 2:
        do = do.load(HELD)

    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if PADDING:
        padding_row = padding + batch.to(gl.int64) * padding_strides[0]
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    dq = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)
    stage, phase = 0 * total, 0 * total
    mbarrier.wait(barriers.index(0), 0, pred=total > 0)
    s = warpgroup_mma(q, k_ring.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), nothing, use_acc=False)
    for it in range(total):
        n0 = lo + it * BLOCK_N
        k = k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        a = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP

        thread_barrier()  # every warp is done with the tile before: its slot can be filled
        next_n0 = n0 + (STAGES - 1) * BLOCK_N
        pred = next_n0 < hi
        bar = barriers.index(slot)
        mbarrier.expect(bar, 2 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        fetch(k_desc, batch, kv_head, next_n0, bar, k_ring.index(slot), pred)
        fetch(v_desc, batch, kv_head, next_n0, bar, v_ring.index(slot), pred)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

        if PADDING:
            attended = load_padding(padding_row, padding_strides[1], n0 + keys, N_k)
        p = gl.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
        if n0 > full_end or (WINDOW and n0 < full_begin):
            valid = (n0 + keys < N_k)[None, :]
            if CAUSAL:
                distance = rows[:, None] + (N_k - N_q) - n0 - keys[None, :]
                valid = valid & (distance >= 0)
                if WINDOW:
                    valid = valid & (distance < window)
            p = gl.where(valid, p, 0.0)
        if PADDING:
            p = gl.where(attended[None, :], p, 0.0)
        a = warpgroup_mma_wait(0, deps=[a])
        ds = gl.convert_layout((p * (a - delta[:, None])).to(dtype), OPERAND)
        dq = warpgroup_mma(ds, k, dq, is_async=True)  # dS K
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
        next_k = k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        s = warpgroup_mma(q, next_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        dq, s = warpgroup_mma_wait(0, deps=[dq, s])

    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(barriers.index(i))
    gl.store(tile_pointers(dq_ptr, dq_strides, batch, head, out_rows, dims), (dq * scale).to(dtype), exists)


@gluon.jit
def _stream_rows(
    descs,
    held,
    rings,
    barriers,
    place,
    first_head,
    H,
    lo,
    hi,
    total,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp of `_backward_keys`; barriers as in passes.py."""
    q_desc, do_desc, k_desc, v_desc, vectors_desc = descs
    k_smem, v_smem = held
    q_ring, do_ring, vectors_ring = rings
    batch, kv_head, _, n0 = place
    TILE_BYTES: gl.constexpr = 2 * BLOCK_M * HEAD_DIM * 2 + 2 * BLOCK_M * 4
    held_barrier = barriers.index(2 * STAGES)
    mbarrier.expect(held_barrier, 2 * BLOCK_N * HEAD_DIM * 2)
    fetch(k_desc, batch, kv_head, n0, held_barrier, k_smem, True)
    fetch(v_desc, batch, kv_head, n0, held_barrier, v_smem, True)
    m0, head = lo, first_head
    slot, phase = 0 * total, 0 * total + 1  # the phase before a barrier's first counts as complete
    for _ in range(total):
        mbarrier.wait(barriers.index(STAGES + slot), phase)
        here = barriers.index(slot)
        mbarrier.expect(here, TILE_BYTES)
        fetch(q_desc, batch, head, m0, here, q_ring.index(slot), True)
        fetch(do_desc, batch, head, m0, here, do_ring.index(slot), True)
        fetch_vectors(vectors_desc, batch * H + head, m0, here, vectors_ring.index(slot), True)
        m0, head = next_tile(m0, head, lo, hi, BLOCK_M)
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _sum_over_rows(
    held,
    rings,
    barriers,
    place,
    bounds,
    padding,
    scale,
    window,
    outputs,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
):
    """The computing warps of `_backward_keys`."""
    k_smem, v_smem = held
    q_ring, do_ring, vectors_ring = rings
    n0 = place[3]
    lo, hi, full_begin, full_end, total, N_q, N_k = bounds
    dtype: gl.constexpr = q_ring.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    k = k_smem.reshape([BLOCK_N, HEAD_DIM])
    v = v_smem.reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    if HELD_OPERANDS >= 1:
        k = k.load(HELD)
    if HELD_OPERANDS >= 2:
        v = v.load(HELD)

    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    if PADDING:
        attended = load_padding(padding[0], padding[1], keys, N_k)
    dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)
    dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)

    m0 = lo
    stage, phase = 0 * total, 0 * total
    mbarrier.wait(barriers.index(0), 0, pred=total > 0)
    s = warpgroup_mma(k, q_ring.index(0).reshape([BLOCK_M, HEAD_DIM]).permute([1, 0]), nothing, use_acc=False)
    for it in range(total):
        q = q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        do = do_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        vectors = vectors_ring.index(stage).reshape([2, BLOCK_M])  # log2(e) L, D
        a = warpgroup_mma(v, do.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
        p = gl.exp2(s * (scale * LOG2E) - vectors.slice(0, 1).load(SCORES))  # P = exp(S − L)
        if CAUSAL:
            if m0 < full_begin or (WINDOW and m0 + BLOCK_M > full_end):
                distance = m0 + columns[None, :] + (N_k - N_q) - keys[:, None]
                valid = distance >= 0
                if WINDOW:
                    valid = valid & (distance < window)
                p = gl.where(valid, p, 0.0)
        if PADDING:
            p = gl.where(attended[:, None], p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), OPERAND), do, dv, is_async=True)  # Pᵀ dO
        a = warpgroup_mma_wait(1, deps=[a])
        ds = (p * (a - vectors.slice(1, 1).load(SCORES))).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)  # dSᵀ Q
        m0 = gl.where(m0 + BLOCK_M >= hi, lo, m0 + BLOCK_M)
        used = STAGES + stage
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
        next_q = q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        s = warpgroup_mma(k, next_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        dk, dv, s = warpgroup_mma_wait(0, deps=[dk, dv, s])
        mbarrier.arrive(barriers.index(used), count=1)

    store_sums(dk, dv, outputs, place, scale, N_k, HEAD_DIM, BLOCK_N, SUMS)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_keys(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    vectors_desc,
    dk_ptr,
    dv_ptr,
    dk_strides,
    dv_strides,
    split_stride,
    padding,
    padding_strides,
    scale,
    window,
    H,
    GROUP,
    MEMBERS,
    N_q,
    N_k,
    num_heads,
    section,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    place, first_head = key_block(num_heads, section, H, GROUP, MEMBERS, N_k, BLOCK_N)
    batch, _, _, n0 = place
    lo, hi, full_begin, full_end = rows_of_keys(n0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M) * MEMBERS
    padding_row = (lo, lo)  # unused
    if PADDING:
        padding_row = (padding + batch.to(gl.int64) * padding_strides[0], padding_strides[1])

    k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    vectors_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 1, BLOCK_M], vectors_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    descs = (q_desc, do_desc, k_desc, v_desc, vectors_desc)
    held = (k_smem, v_smem)
    rings = (q_ring, do_ring, vectors_ring)
    bounds = (lo, hi, full_begin, full_end, total, N_q, N_k)
    outputs = (dk_ptr, dv_ptr, dk_strides, dv_strides, split_stride)
    gl.warp_specialize(
        [
            (
                _sum_over_rows,
                (held, rings, barriers, place, bounds, padding_row, scale, window, outputs,
                 CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, HELD_OPERANDS),
            ),
            (
                _stream_rows,
                (descs, held, rings, barriers, place, first_head, H, lo, hi, total,
                 HEAD_DIM, BLOCK_M, BLOCK_N, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def backward_rows(
    problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, tile: dict
) -> tuple[Tensor, Tensor]:
    """(dQ like q, row vectors fp32 [2, B·H, padded rows]: L·log2(e), D), of a call that `able` takes."""
    dq = torch.empty_like(q)
    vectors = problem.row_vectors(2)
    tensors = {
        "q_desc": q, "do_desc": do, "k_desc": k, "v_desc": v, "do_ptr": do, "o_ptr": o, "lse_ptr": lse.contiguous(),
        "dq_ptr": dq, "vectors_ptr": vectors, "padding": problem.side_tensors["padding"],
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
        num_heads = problem.batch * problem.heads
        streamed = 2 * problem.num_keys * problem.head_dim * q.element_size()
        return problem.padded_rows // block_m * num_heads, common_arguments(problem) | tile | {
            "q_desc": tile_descriptor(q, block_m), "do_desc": tile_descriptor(do, block_m),
            "k_desc": tile_descriptor(k, block_n), "v_desc": tile_descriptor(v, block_n),
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(streamed, num_heads),
        }  # fmt: skip

    launch(_backward_rows, problem, tensors, prepare, tile)
    return dq, vectors


def backward_keys(
    problem: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, *, tile: dict
) -> tuple[Tensor, Tensor]:
    """(dK like k, dV like v), with `backward_rows`' row vectors."""
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    sums = KeySums(problem, k, v, block_n)
    sums_k, sums_v = sums.written
    tensors = {
        "q_desc": q, "do_desc": do, "k_desc": k, "v_desc": v, "vectors_desc": vectors, "dk_ptr": sums_k, "dv_ptr": sums_v,
        "padding": problem.side_tensors["padding"],
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        streamed = 2 * problem.head_dim * q.element_size()
        return sums.programs, common_arguments(problem) | sums.arguments(problem, streamed) | tile | {
            "q_desc": tile_descriptor(q, block_m), "do_desc": tile_descriptor(do, block_m),
            "k_desc": tile_descriptor(k, block_n), "v_desc": tile_descriptor(v, block_n),
            "vectors_desc": vectors_descriptor(vectors, block_m),
            "dk_strides": sums_k.stride()[-4:], "dv_strides": sums_v.stride()[-4:],
        }  # fmt: skip

    launch(_backward_keys, problem, tensors, prepare, tile)
    return sums.finish()
