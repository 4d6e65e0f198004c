"""The first backward for Hopper (compute capability 9.0) in Gluon, in the manner of passes.py; formulas and results are
those of ../backward.py, which serves everything that `able` refuses.

A warpgroup holds a block of rows (for dQ) or of keys (for dK and dV) and streams the other side's tiles, which arrive by TMA.
Its products run while it works on the scores of the tile: the next tile's S in the shadow of the last product.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..common import DO_NOT_SPECIALIZE, Problem
from ..launch import launch
from .common import (
    COPYING_REGISTERS,
    ITEM_SIZE,
    LOG2E,
    KeySums,
    add_rows,
    common_arguments,
    dropout_arguments,
    init_barriers,
    keep_mask,
    keys_of_rows,
    load_lse,
    load_padding,
    next_tile,
    number_of_programs,
    published,
    release,
    rows_of_keys,
    share_of_registers,
    stream_keys,
    stream_rows,
    thread_barrier,
    tile_descriptor,
    vectors_descriptor,
    write_rows,
)


@gluon.jit
def _sum_over_keys(
    held,
    rings,
    barriers,
    items,
    sizes,
    lse_ptr,
    padding,
    dropout,
    scale,
    outputs,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BASE: gl.constexpr,
):
    """The computing warps of `_backward_rows`."""
    q_ring, do_ring, o_ring = held
    k_ring, v_ring = rings
    H, N_q, N_k, window = sizes
    dq_ptr, dq_strides, vectors_ptr, vector_stride, padded_rows, base_ptr = outputs
    dtype: gl.constexpr = k_ring.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_smem = q_ring.index(0).reshape([BLOCK_M, BLOCK_D])
    do_smem = do_ring.index(0).reshape([BLOCK_M, BLOCK_D])
    o_smem = o_ring.index(0).reshape([BLOCK_M, BLOCK_D])
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)

    seed_ptr, threshold, keep_scale = dropout
    if DROPOUT:
        dice = (gl.load(seed_ptr), gl.load(seed_ptr + 1), threshold)
    r, stage, phase = 0 * N_q, 0 * N_q, 0 * N_q
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    block = published(items, 0, 0)
    while block >= 0:
        batch, head = published(items, 0, 1), published(items, 0, 2)
        batch_head = batch * H + head
        m0 = block * BLOCK_M
        lo, hi, full_begin, full_end = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_N)
        rows = m0 + gl.arange(0, BLOCK_M, layout=ROWS)
        lse2 = load_lse(lse_ptr, batch_head, rows, N_q) * LOG2E
        if PADDING:
            padding_row = padding[0] + batch.to(gl.int64) * padding[1]
        q = q_smem.load(HELD)
        do = do_smem.load(HELD)
        delta = gl.sum(do.to(gl.float32) * o_smem.load(HELD).to(gl.float32), 1)
        delta = gl.convert_layout(delta, ROWS)  # D = <dO, O>
        release(barriers.index(2 * STAGES + 1))  # the next item's may come
        vectors = vectors_ptr + batch_head.to(gl.int64) * padded_rows + rows
        gl.store(vectors, lse2)
        gl.store(vectors + vector_stride.to(gl.int64), delta)

        dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, SUMS)
        mbarrier.wait(barriers.index(stage), phase, pred=total > 0)
        first_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(q, first_k.permute([1, 0]), nothing, use_acc=False)
        thread_barrier()
        for it in range(total):
            n0 = lo + it * BLOCK_N
            k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            v = v_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            a = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP

            if PADDING:
                attended = load_padding(padding_row, padding[2], n0 + keys, N_k)
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
            if DROPOUT:
                keep = keep_mask(dice, batch_head, m0, n0, BLOCK_N, SCORES, False)
            a = warpgroup_mma_wait(0, deps=[a])
            if DROPOUT:
                a = gl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
            ds = gl.convert_layout((p * (a - delta[:, None])).to(dtype), OPERAND)
            dq = warpgroup_mma(ds, k, dq, is_async=True)  # dS K
            used = STAGES + stage
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            next_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            s = warpgroup_mma(q, next_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
            dq, s = warpgroup_mma_wait(0, deps=[dq, s])
            mbarrier.arrive(barriers.index(used), count=1)

        dq *= scale
        if BASE:
            dq = add_rows(dq, base_ptr, dq_strides, batch, head, m0, N_q, HEAD_DIM, SUMS)
        write_rows(dq, dq_ptr, dq_strides, batch, head, m0, N_q, 0, HEAD_DIM, SUMS)
        r += 1
        mbarrier.wait(barriers.index(2 * STAGES), r & 1)
        block = published(items, 0, 0)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_rows(
    q_desc,
    do_desc,
    o_desc,
    k_desc,
    v_desc,
    lse_ptr,
    dq_ptr,
    base_ptr,
    vectors_ptr,
    dq_strides,
    vector_stride,
    padded_rows,
    padding,
    padding_strides,
    seed_ptr,
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
    tickets_ptr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,  # of every tile; both are held here
    BASE: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    o_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_M, BLOCK_D], o_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers, 0, 2 * STAGES + 2, 1)

    items = gl.allocate_shared_memory(gl.int32, [ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held_descs = (q_desc, do_desc, o_desc)
    held = (q_ring, do_ring, o_ring)
    descs = (k_desc, v_desc)
    rings = (k_ring, v_ring)
    work = (padded_rows // BLOCK_M, num_heads, section, H, GROUP, N_q, N_k, window)
    sizes = (H, N_q, N_k, window)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    outputs = (dq_ptr, dq_strides, vectors_ptr, vector_stride, padded_rows, base_ptr)
    gl.warp_specialize(
        [
            (
                _sum_over_keys,
                (held, rings, barriers, items, sizes, lse_ptr, padding_row, (seed_ptr, threshold, keep_scale), scale, outputs,
                 CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, BASE),
            ),
            (
                stream_keys,
                (held_descs, held, q_desc, descs, rings, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, 1, False),
            ),
        ],
        [1],
        [COPYING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _sum_over_rows(
    held,
    rings,
    vectors_ring,
    barriers,
    items,
    sizes,
    padding,
    dropout,
    scale,
    outputs,
    bases,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    BASE: gl.constexpr,
):
    """The computing warps of `_backward_keys`."""
    k_ring, v_ring = held
    q_ring, do_ring = rings
    H, GROUP, MEMBERS, N_q, N_k, window = sizes
    dk_ptr, dv_ptr, dk_strides, dv_strides, split_stride = outputs
    dtype: gl.constexpr = q_ring.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    held_used = barriers.index(2 * STAGES + 1)
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)

    seed_ptr, threshold, keep_scale = dropout
    if DROPOUT:
        dice = (gl.load(seed_ptr), gl.load(seed_ptr + 1), threshold)
    r, stage, phase = 0 * N_q, 0 * N_q, 0 * N_q
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    n0 = published(items, 0, 0)
    while n0 >= 0:
        batch, kv_head, split = published(items, 0, 1), published(items, 0, 2), published(items, 0, 3)
        lo, hi, full_begin, full_end = rows_of_keys(n0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M) * MEMBERS
        keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
        if PADDING:
            attended = load_padding(padding[0] + batch.to(gl.int64) * padding[1], padding[2], keys, N_k)
        dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, SUMS)
        dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, SUMS)

        k = k_ring.index(0).reshape([BLOCK_N, BLOCK_D]).load(HELD)
        v = v_ring.index(r % v_ring.shape[0]).reshape([BLOCK_N, BLOCK_D])
        if HELD_OPERANDS >= 2:
            v = v.load(HELD)
        release(held_used)  # the next item's may come

        m0, head = lo, kv_head * GROUP + split * MEMBERS
        mbarrier.wait(barriers.index(stage), phase, pred=total > 0)
        first_q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
        s = warpgroup_mma(k, first_q.permute([1, 0]), nothing, use_acc=False)
        thread_barrier()
        for it in range(total):
            q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            do = do_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
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
            pg = p
            if DROPOUT:
                keep = keep_mask(dice, batch * H + head, m0, n0, BLOCK_M, SCORES, True)
                pg = gl.where(keep, p * keep_scale, 0.0)
            dv = warpgroup_mma(gl.convert_layout(pg.to(dtype), OPERAND), do, dv, is_async=True)  # (g ⊙ P)ᵀ dO
            a = warpgroup_mma_wait(1, deps=[a])
            if DROPOUT:
                a = gl.where(keep, a * keep_scale, 0.0)
            ds = (p * (a - vectors.slice(1, 1).load(SCORES))).to(dtype)
            dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)  # dSᵀ Q
            m0, head = next_tile(m0, head, lo, hi, BLOCK_M)
            used = STAGES + stage
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            next_q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            s = warpgroup_mma(k, next_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
            dk, dv, s = warpgroup_mma_wait(0, deps=[dk, dv, s])
            mbarrier.arrive(barriers.index(used), count=1)

        dk *= scale
        if BASE:
            dk = add_rows(dk, bases[0], dk_strides, batch, kv_head, n0, N_k, HEAD_DIM, SUMS)
            dv = add_rows(dv, bases[1], dv_strides, batch, kv_head, n0, N_k, HEAD_DIM, SUMS)
        offset = split.to(gl.int64) * split_stride
        write_rows(dk, dk_ptr + offset, dk_strides, batch, kv_head, n0, N_k, 0, HEAD_DIM, SUMS)
        write_rows(dv, dv_ptr + offset, dv_strides, batch, kv_head, n0, N_k, 0, HEAD_DIM, SUMS)
        r += 1
        mbarrier.wait(barriers.index(2 * STAGES), r & 1)
        n0 = published(items, 0, 0)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _backward_keys(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    vectors_desc,
    dk_ptr,
    dv_ptr,
    dk_base_ptr,
    dv_base_ptr,
    dk_strides,
    dv_strides,
    split_stride,
    padding,
    padding_strides,
    seed_ptr,
    threshold,
    keep_scale,
    scale,
    window,
    H,
    GROUP,
    MEMBERS,
    N_q,
    N_k,
    num_heads,
    section,
    tickets_ptr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    BASE: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    V_STAGES: gl.constexpr = 1 if HELD_OPERANDS == 2 else 2  # V in shared memory stays there to an item's end
    k_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    vectors_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, 1, BLOCK_M], vectors_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers, 0, 2 * STAGES + 2, 1)

    items = gl.allocate_shared_memory(gl.int32, [ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held_descs = (k_desc, v_desc)
    held = (k_ring, v_ring)
    descs = (q_desc, do_desc)
    rings = (q_ring, do_ring)
    work = (num_heads, section, H, GROUP, MEMBERS, N_q, N_k, window)
    sizes = (H, GROUP, MEMBERS, N_q, N_k, window)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    outputs = (dk_ptr, dv_ptr, dk_strides, dv_strides, split_stride)
    gl.warp_specialize(
        [
            (
                _sum_over_rows,
                (held, rings, vectors_ring, barriers, items, sizes, padding_row, (seed_ptr, threshold, keep_scale), scale,
                 outputs, (dk_base_ptr, dv_base_ptr),
                 CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HELD_OPERANDS, BASE),
            ),
            (
                stream_rows,
                (held_descs, held, descs, rings, vectors_desc, vectors_ring, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES),
            ),
        ],
        [1],
        [COPYING_REGISTERS],
    )  # fmt: skip


def backward_rows(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    base: Tensor | None,
    *,
    tile: dict,
) -> Tensor:
    """Writes dQ, plus `base`, of dq's strides, if given. Returns row vectors fp32 [2, B·H, padded rows]: L·log2(e), D.

    Of a call that `able` takes.
    """
    vectors = problem.row_vectors(2)
    tensors = {
        "q_desc": q, "do_desc": do, "o_desc": o, "k_desc": k, "v_desc": v, "lse_ptr": lse.contiguous(),
        "dq_ptr": dq, "base_ptr": base, "vectors_ptr": vectors, "padding": problem.side_tensors["padding"],
        "seed_ptr": problem.side_tensors["seed"],
        "tickets_ptr": problem.tickets,
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
        num_heads = problem.batch * problem.heads
        streamed = 2 * problem.num_keys * problem.head_dim * q.element_size()
        order = {"num_heads": num_heads, "section": problem.section(streamed, num_heads)}
        items = problem.padded_rows // block_m * num_heads
        programs = number_of_programs(problem, items, False)
        return programs, common_arguments(problem) | order | tile | {
            "q_desc": tile_descriptor(q, block_m), "do_desc": tile_descriptor(do, block_m), "o_desc": tile_descriptor(o, block_m),
            "k_desc": tile_descriptor(k, block_n), "v_desc": tile_descriptor(v, block_n),
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "maxnreg": share_of_registers(False), "BASE": base is not None, **dropout_arguments(problem),
        }  # fmt: skip

    launch(_backward_rows, problem, tensors, prepare, tile)
    return vectors


def backward_keys(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Tensor,
    out: tuple[Tensor, Tensor],
    base: Sequence[Tensor] | None,
    *,
    tile: dict,
) -> None:
    """Writes dK and dV, with `backward_rows`' row vectors; plus `base`, of their strides, where k has as many heads as q."""
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    sums = KeySums(problem, out, block_n)
    sums_k, sums_v = sums.written
    base_k, base_v = base or (None, None)
    tensors = {
        "q_desc": q, "do_desc": do, "k_desc": k, "v_desc": v, "vectors_desc": vectors, "dk_ptr": sums_k, "dv_ptr": sums_v,
        "dk_base_ptr": base_k, "dv_base_ptr": base_v, "padding": problem.side_tensors["padding"],
        "seed_ptr": problem.side_tensors["seed"],
        "tickets_ptr": problem.tickets,
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        streamed = 2 * problem.head_dim * q.element_size()
        programs = number_of_programs(problem, sums.items, False)
        return programs, common_arguments(problem) | sums.arguments(problem, streamed) | tile | {
            "q_desc": tile_descriptor(q, block_m), "do_desc": tile_descriptor(do, block_m),
            "k_desc": tile_descriptor(k, block_n), "v_desc": tile_descriptor(v, block_n),
            "vectors_desc": vectors_descriptor(vectors, block_m),
            "dk_strides": sums_k.stride()[-4:], "dv_strides": sums_v.stride()[-4:],
            "maxnreg": share_of_registers(False), "BASE": base is not None, **dropout_arguments(problem),
        }  # fmt: skip

    launch(_backward_keys, problem, tensors, prepare, tile)
    sums.finish()
