"""Column and row pass for Hopper (compute capability 9.0) in Gluon: explicit copies, products in flight, explicit waits.

The plain kernels leave the order of products to the compilers, and ptxas makes each of them wait for the one before. Here
a warpgroup issues all score products of a tile, works on the first while the others run, and issues each output product as
soon as its operand is ready; tiles arrive by TMA, ordered ahead of time. Formulas and results are those of
row_pass.py and column_pass.py, which serve everything that `able` refuses.

With d = 128 the sums alone would fill a warpgroup's registers. There two warpgroups (PAIR) share a block: each computes the
scores of half of the streamed tile and the sums of half of the columns, and the operands of the output products
(P and its like) pass between them through shared memory.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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


@gluon.jit
def _share(tile, operands, index: gl.constexpr, PAIR: gl.constexpr, OPERAND: gl.constexpr):
    """A tile of scores as the left operand of an output product: in registers; of a PAIR, in shared memory for both."""
    if PAIR:
        buffer = operands.index(index)
        buffer.store(tile)
        return buffer
    else:
        return gl.convert_layout(tile, OPERAND)


@gluon.jit
def _meet(PAIR: gl.constexpr):
    """Both warpgroups of a PAIR have stored their halves, and the tensor cores may read them."""
    if PAIR:
        fence_async_shared()
        thread_barrier()


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
    """The column pass's copying warp.

    Barrier i says that tile i has come, STAGES + i that it is used up, the last that K, V, U_K and U_V have come.
    """
    q_desc, do_desc, u_q_desc, k_desc, v_desc, u_k_desc, u_v_desc, vectors_desc = descs
    k_smem, v_smem, u_k_smem, u_v_smem = held
    q_ring, do_ring, u_q_ring, vectors_ring = rings
    batch, kv_head, _, n0 = place
    TILE_BYTES: gl.constexpr = 3 * BLOCK_M * HEAD_DIM * 2 + 4 * BLOCK_M * 4
    held_barrier = barriers.index(2 * STAGES)
    mbarrier.expect(held_barrier, 4 * BLOCK_N * HEAD_DIM * 2)
    fetch(k_desc, batch, kv_head, n0, held_barrier, k_smem, True)
    fetch(v_desc, batch, kv_head, n0, held_barrier, v_smem, True)
    fetch(u_k_desc, batch, kv_head, n0, held_barrier, u_k_smem, True)
    fetch(u_v_desc, batch, kv_head, n0, held_barrier, u_v_smem, True)
    m0, head = lo, first_head
    slot, phase = 0 * total, 0 * total + 1  # the phase before a barrier's first counts as complete
    for _ in range(total):
        mbarrier.wait(barriers.index(STAGES + slot), phase)
        here = barriers.index(slot)
        mbarrier.expect(here, TILE_BYTES)
        fetch(q_desc, batch, head, m0, here, q_ring.index(slot), True)
        fetch(do_desc, batch, head, m0, here, do_ring.index(slot), True)
        fetch(u_q_desc, batch, head, m0, here, u_q_ring.index(slot), True)
        fetch_vectors(vectors_desc, batch * H + head, m0, here, vectors_ring.index(slot), True)
        m0, head = next_tile(m0, head, lo, hi, BLOCK_M)
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _sum_over_rows(
    held,
    rings,
    operands,
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
    PAIR: gl.constexpr,
):
    """The computing warps of the column pass."""
    k_smem, v_smem, u_k_smem, u_v_smem = held
    q_ring, do_ring, u_q_ring, vectors_ring = rings
    n0 = place[3]
    lo, hi, full_begin, full_end, total, N_q, N_k = bounds
    dtype: gl.constexpr = q_ring.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_M // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, HEAD_DIM // GROUPS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    k = k_smem.reshape([BLOCK_N, HEAD_DIM])
    v = v_smem.reshape([BLOCK_N, HEAD_DIM])
    u_k = u_k_smem.reshape([BLOCK_N, HEAD_DIM])
    u_v = u_v_smem.reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    # Products of two operands in shared memory, 32 columns wide, are held up by it: keep what registers have room for.
    if HELD_OPERANDS >= 1:
        k = k.load(HELD)
    if HELD_OPERANDS >= 2:
        v = v.load(HELD)
    if HELD_OPERANDS >= 3:
        u_v = u_v.load(HELD)
    if HELD_OPERANDS >= 4:
        u_k = u_k.load(HELD)

    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SCORES)
    if PADDING:
        attended = load_padding(padding[0], padding[1], keys, N_k)
    k_sum = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)
    v_sum = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)

    m0 = lo
    stage, phase = 0 * total, 0 * total
    mbarrier.wait(barriers.index(0), 0, pred=total > 0)
    s = warpgroup_mma(k, q_ring.index(0).reshape([BLOCK_M, HEAD_DIM]).permute([1, 0]), nothing, use_acc=False)
    for it in range(total):
        q = q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        do = do_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        u_q = u_q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        vectors = vectors_ring.index(stage).reshape([4, BLOCK_M])  # log2(e) L, D, α, α D + E
        a = warpgroup_mma(v, do.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
        f = warpgroup_mma(k, u_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        f = warpgroup_mma(u_k, q.permute([1, 0]), f, is_async=True)
        c = warpgroup_mma(u_v, do.permute([1, 0]), nothing, use_acc=False, is_async=True)

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
        a = warpgroup_mma_wait(3, deps=[a])
        centered = a - vectors.slice(1, 1).load(SCORES)
        pc = _share((p * centered).to(dtype), operands, 0, PAIR, OPERAND)
        if not PAIR:
            k_sum = warpgroup_mma(pc, u_q, k_sum, is_async=True)  # dSᵀ U_Q
            f = warpgroup_mma_wait(2, deps=[f])
        else:
            f = warpgroup_mma_wait(1, deps=[f])
        h = f * scale - vectors.slice(2, 1).load(SCORES)  # h = F − α
        ph = _share((p * h).to(dtype), operands, 1, PAIR, OPERAND)
        _meet(PAIR)
        if PAIR:
            k_sum = warpgroup_mma(pc, u_q, k_sum, is_async=True)  # dSᵀ U_Q
        v_sum = warpgroup_mma(ph, do, v_sum, is_async=True)  # (P ⊙ h)ᵀ dO
        c = warpgroup_mma_wait(2, deps=[c])
        # S̃ = P ⊙ (P̃ − E)
        ps = (p * (h * centered + (c - vectors.slice(3, 1).load(SCORES)))).to(dtype)
        ps = _share(ps, operands, 2, PAIR, OPERAND)
        _meet(PAIR)
        used = STAGES + stage
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        m0 = gl.where(m0 + BLOCK_M >= hi, lo, m0 + BLOCK_M)
        k_sum = warpgroup_mma(ps, q, k_sum, is_async=True)  # S̃ᵀ Q
        # The next tile's first product runs in the shadow of this one's last. Sums in flight across the loop's edge would
        # make ptxas serialize every product.
        mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
        next_q = q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        s = warpgroup_mma(k, next_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        k_sum, v_sum, s = warpgroup_mma_wait(0, deps=[k_sum, v_sum, s])
        mbarrier.arrive(barriers.index(used), count=1)

    store_sums(k_sum, v_sum, outputs, place, scale, N_k, HEAD_DIM, BLOCK_N, SUMS)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _column_pass(
    q_desc,
    do_desc,
    u_q_desc,
    k_desc,
    v_desc,
    u_k_desc,
    u_v_desc,
    vectors_desc,
    grad_k_ptr,
    grad_v_ptr,
    grad_k_strides,
    grad_v_strides,
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
    PAIR: gl.constexpr = num_warps == 8
    place, first_head = key_block(num_heads, section, H, GROUP, MEMBERS, N_k, BLOCK_N)
    batch, _, _, n0 = place
    lo, hi, full_begin, full_end = rows_of_keys(n0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M) * MEMBERS
    padding_row = (lo, lo)  # unused
    if PADDING:
        padding_row = (padding + batch.to(gl.int64) * padding_strides[0], padding_strides[1])

    k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    u_k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], u_k_desc.layout)
    u_v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], u_v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    u_q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], u_q_desc.layout)
    vectors_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 1, BLOCK_M], vectors_desc.layout)
    operands = k_smem  # of a single warpgroup, unused
    if PAIR:
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        operands = gl.allocate_shared_memory(dtype, [3, BLOCK_N, BLOCK_M], SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    descs = (q_desc, do_desc, u_q_desc, k_desc, v_desc, u_k_desc, u_v_desc, vectors_desc)
    held = (k_smem, v_smem, u_k_smem, u_v_smem)
    rings = (q_ring, do_ring, u_q_ring, vectors_ring)
    bounds = (lo, hi, full_begin, full_end, total, N_q, N_k)
    outputs = (grad_k_ptr, grad_v_ptr, grad_k_strides, grad_v_strides, split_stride)
    gl.warp_specialize(
        [
            (
                _sum_over_rows,
                (held, rings, operands, barriers, place, bounds, padding_row, scale, window, outputs,
                 CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, HELD_OPERANDS, PAIR),
            ),
            (
                _stream_rows,
                (descs, held, rings, barriers, place, first_head, H, lo, hi, total, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES),
            ),
        ],
        [1],
        [24],  # registers of the copying warp; the others get what it leaves
    )  # fmt: skip


def column_pass(
    problem: Problem,
    u_q: Tensor,
    u_k: Tensor,
    u_v: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    vectors: Tensor,
    *,
    tile: dict,
) -> tuple[Tensor, Tensor]:
    """As `column_pass.column_pass`, of a call that `able` takes."""
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    sums = KeySums(problem, k, v, block_n)
    sums_k, sums_v = sums.written
    tensors = {
        "q_desc": q, "do_desc": do, "u_q_desc": u_q, "k_desc": k, "v_desc": v, "u_k_desc": u_k, "u_v_desc": u_v,
        "vectors_desc": vectors, "grad_k_ptr": sums_k, "grad_v_ptr": sums_v, "padding": problem.side_tensors["padding"],
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        descriptors = {
            f"{name}_desc": tile_descriptor(x, block_m) for name, x in (("q", q), ("do", do), ("u_q", u_q))
        }
        for name, x in (("k", k), ("v", v), ("u_k", u_k), ("u_v", u_v)):
            descriptors[f"{name}_desc"] = tile_descriptor(x, block_n)
        streamed = 3 * problem.head_dim * q.element_size()
        return sums.programs, descriptors | common_arguments(problem) | sums.arguments(problem, streamed) | tile | {
            "vectors_desc": vectors_descriptor(vectors, block_m),
            "grad_k_strides": sums_k.stride()[-4:], "grad_v_strides": sums_v.stride()[-4:],
            "maxnreg": _share_of_registers(tile["num_warps"]),
        }  # fmt: skip

    launch(_column_pass, problem, tensors, prepare, tile)
    return sums.finish()


def _share_of_registers(num_warps: int) -> int:
    """Registers a thread when the kernel starts, with the four warps among which the copying one is: two programs of four
    computing warps fit on a multiprocessor, or one of eight. The copying warp then hands most of its share over."""
    return 128 if num_warps == 4 else 168


@gluon.jit
def _sum_over_keys(tile, PAIR: gl.constexpr):
    """Row sums of a tile [rows, keys]; of a PAIR, each thread's share alone, which `_sum_over_threads` adds up at the end."""
    if PAIR:
        return gl.sum(gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 16, 8]), 2)
    else:
        return gl.sum(tile, 1)


@gluon.jit
def _sum_over_threads(sums, PAIR: gl.constexpr, ROWS: gl.constexpr):
    if PAIR:
        return gl.convert_layout(gl.sum(gl.sum(sums, 2), 1), ROWS)
    else:
        return sums


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _row_pass(
    q_desc,
    do_desc,
    u_q_desc,
    k_desc,
    v_desc,
    u_k_desc,
    u_v_desc,
    do_ptr,
    o_ptr,
    dq_ptr,
    lse_ptr,
    grad_q_ptr,
    grad_do_ptr,
    vectors_ptr,
    do_strides,
    o_strides,
    dq_strides,
    grad_q_strides,
    grad_do_strides,
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
    PAIR: gl.constexpr = num_warps == 8
    GROUPS: gl.constexpr = 2 if PAIR else 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_N // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, HEAD_DIM // GROUPS, 16])
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
    u_q_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], u_q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    u_k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], u_k_desc.layout)
    u_v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], u_v_desc.layout)
    operands = q_smem  # of a single warpgroup, unused
    if PAIR:
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
        operands = gl.allocate_shared_memory(dtype, [4, BLOCK_M, BLOCK_N], SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    held_barrier = barriers.index(STAGES)
    mbarrier.expect(held_barrier, 3 * BLOCK_M * HEAD_DIM * 2)
    fetch(q_desc, batch, head, m0, held_barrier, q_smem, True)
    fetch(do_desc, batch, head, m0, held_barrier, do_smem, True)
    fetch(u_q_desc, batch, head, m0, held_barrier, u_q_smem, True)
    for i in gl.static_range(STAGES - 1):
        pred = i < total
        mbarrier.expect(barriers.index(i), 4 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        fetch(k_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), k_ring.index(i), pred)
        fetch(v_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), v_ring.index(i), pred)
        fetch(u_k_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), u_k_ring.index(i), pred)
        fetch(u_v_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), u_v_ring.index(i), pred)
    slot = STAGES - 1 + 0 * total

    # D = <dO, O> in the sums' layout, and L = +inf beyond the last row: P is 0 there.
    out_rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    exists = (out_rows < N_q)[:, None]
    do_tile = gl.load(tile_pointers(do_ptr, do_strides, batch, head, out_rows, dims), exists, 0.0)
    o_tile = gl.load(tile_pointers(o_ptr, o_strides, batch, head, out_rows, dims), exists, 0.0)
    out_delta = gl.sum(do_tile.to(gl.float32) * o_tile.to(gl.float32), 1)
    delta = gl.convert_layout(out_delta, ROWS)
    rows = m0 + gl.arange(0, BLOCK_M, layout=ROWS)
    lse2 = gl.load(lse_ptr + batch_head.to(gl.int64) * N_q + rows, rows < N_q, float("inf")) * LOG2E

    q = q_smem.reshape([BLOCK_M, HEAD_DIM])
    do = do_smem.reshape([BLOCK_M, HEAD_DIM])
    u_q = u_q_smem.reshape([BLOCK_M, HEAD_DIM])
    mbarrier.wait(held_barrier, 0)
    if HELD_OPERANDS >= 1:
        q = q.load(HELD)
    if HELD_OPERANDS >= 2:
        do = do.load(HELD)
    if HELD_OPERANDS >= 3:
        u_q = u_q.load(HELD)

    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if PADDING:
        padding_row = padding + batch.to(gl.int64) * padding_strides[0]
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    alpha = _sum_over_keys(nothing, PAIR)
    e0 = alpha
    omega = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)
    b = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)
    do_sum = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)

    stage, phase = 0 * total, 0 * total
    mbarrier.wait(barriers.index(0), 0, pred=total > 0)
    s = warpgroup_mma(q, k_ring.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), nothing, use_acc=False)
    for it in range(total):
        n0 = lo + it * BLOCK_N
        k = k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        u_k = u_k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        u_v = u_v_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        a = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
        f = warpgroup_mma(u_q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        f = warpgroup_mma(q, u_k.permute([1, 0]), f, is_async=True)
        c = warpgroup_mma(do, u_v.permute([1, 0]), nothing, use_acc=False, is_async=True)

        thread_barrier()  # every warp is done with the tile before: its slot can be filled
        next_n0 = n0 + (STAGES - 1) * BLOCK_N
        pred = next_n0 < hi
        bar = barriers.index(slot)
        mbarrier.expect(bar, 4 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        fetch(k_desc, batch, kv_head, next_n0, bar, k_ring.index(slot), pred)
        fetch(v_desc, batch, kv_head, next_n0, bar, v_ring.index(slot), pred)
        fetch(u_k_desc, batch, kv_head, next_n0, bar, u_k_ring.index(slot), pred)
        fetch(u_v_desc, batch, kv_head, next_n0, bar, u_v_ring.index(slot), pred)
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
        pb = _share(p.to(dtype), operands, 0, PAIR, OPERAND)
        if not PAIR:
            b = warpgroup_mma(pb, k, b, is_async=True)  # P K
            do_sum = warpgroup_mma(pb, u_v, do_sum, is_async=True)  # P U_V
            a = warpgroup_mma_wait(5, deps=[a])
        else:
            a = warpgroup_mma_wait(3, deps=[a])
        centered = a - delta[:, None]
        pc = _share((p * centered).to(dtype), operands, 1, PAIR, OPERAND)
        _meet(PAIR)
        if PAIR:
            b = warpgroup_mma(pb, k, b, is_async=True)  # P K
            do_sum = warpgroup_mma(pb, u_v, do_sum, is_async=True)  # P U_V
        omega = warpgroup_mma(pc, u_k, omega, is_async=True)  # dS U_K
        f = warpgroup_mma_wait(4, deps=[f])
        f = f * scale  # F = τ (U_Q Kᵀ + Q U_Kᵀ)
        pf = p * f
        alpha += _sum_over_keys(pf, PAIR)
        pf = _share(pf.to(dtype), operands, 2, PAIR, OPERAND)
        if not PAIR:
            do_sum = warpgroup_mma(pf, v, do_sum, is_async=True)  # (P ⊙ F) V
            c = warpgroup_mma_wait(4, deps=[c])
        else:
            c = warpgroup_mma_wait(3, deps=[c])
        ps = p * (f * centered + c)  # P ⊙ P̃°
        e0 += _sum_over_keys(ps, PAIR)
        ps = _share(ps.to(dtype), operands, 3, PAIR, OPERAND)
        _meet(PAIR)
        if PAIR:
            do_sum = warpgroup_mma(pf, v, do_sum, is_async=True)  # (P ⊙ F) V
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        omega = warpgroup_mma(ps, k, omega, is_async=True)  # (P ⊙ P̃°) K
        # The next tile's first product runs in the shadow of this one's last.
        mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
        next_k = k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        s = warpgroup_mma(q, next_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        b, do_sum, omega, s = warpgroup_mma_wait(0, deps=[b, do_sum, omega, s])

    alpha = _sum_over_threads(alpha, PAIR, ROWS)
    e0 = _sum_over_threads(e0, PAIR, ROWS)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(barriers.index(i))
    vectors = vectors_ptr + batch_head.to(gl.int64) * padded_rows + rows
    vector_stride = vector_stride.to(gl.int64)
    gl.store(vectors, lse2)
    gl.store(vectors + vector_stride, delta)
    gl.store(vectors + 2 * vector_stride, alpha)
    gl.store(vectors + 3 * vector_stride, e0)  # α D + E = E°

    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    e0 = gl.convert_layout(e0, gl.SliceLayout(1, SUMS))[:, None]
    dq = gl.load(tile_pointers(dq_ptr, dq_strides, batch, head, out_rows, dims), exists, 0.0)
    grad_q = scale * (omega - e0 * b) - alpha * dq.to(gl.float32)  # Q̃ = τ (Ω − E° B) − α dQ
    gl.store(tile_pointers(grad_q_ptr, grad_q_strides, batch, head, out_rows, dims), grad_q.to(dtype), exists)
    o_tile = gl.load(tile_pointers(o_ptr, o_strides, batch, head, out_rows, dims), exists, 0.0)
    grad_do = do_sum - alpha * o_tile.to(gl.float32)  # dÕ = dÕ° − α O
    gl.store(
        tile_pointers(grad_do_ptr, grad_do_strides, batch, head, out_rows, dims), grad_do.to(dtype), exists
    )


def row_pass(
    problem: Problem,
    u_q: Tensor,
    u_k: Tensor,
    u_v: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    *,
    tile: dict,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `row_pass.row_pass`, of a call that `able` takes."""
    grad_q, grad_do = torch.empty_like(q), torch.empty_like(do)
    vectors = problem.row_vectors(4)
    tensors = {
        "q_desc": q, "do_desc": do, "u_q_desc": u_q, "k_desc": k, "v_desc": v, "u_k_desc": u_k, "u_v_desc": u_v,
        "do_ptr": do, "o_ptr": o, "dq_ptr": dq, "lse_ptr": lse.contiguous(), "grad_q_ptr": grad_q, "grad_do_ptr": grad_do,
        "vectors_ptr": vectors, "padding": problem.side_tensors["padding"],
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
        num_heads = problem.batch * problem.heads
        streamed = 4 * problem.num_keys * problem.head_dim * q.element_size()
        descriptors = {
            f"{name}_desc": tile_descriptor(x, block_m) for name, x in (("q", q), ("do", do), ("u_q", u_q))
        }
        for name, x in (("k", k), ("v", v), ("u_k", u_k), ("u_v", u_v)):
            descriptors[f"{name}_desc"] = tile_descriptor(x, block_n)
        return problem.padded_rows // block_m * num_heads, descriptors | common_arguments(problem) | tile | {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "num_heads": num_heads, "section": problem.section(streamed, num_heads),
        }  # fmt: skip

    launch(_row_pass, problem, tensors, prepare, tile)
    return grad_q, grad_do, vectors
