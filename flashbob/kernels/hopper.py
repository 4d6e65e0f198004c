"""Column and row pass for Hopper (compute capability 9.0) in Gluon: explicit copies, products in flight, explicit waits.

The plain kernels leave the order of products to the compilers, and ptxas makes each of them wait for the one before. Here
a warpgroup issues all score products of a tile, works on the first while the others run, and issues each output product as
soon as its operand is ready; tiles arrive by TMA, ordered ahead of time. Formulas and results are those of
row_pass.py and column_pass.py, which serve everything that `able` refuses.

Runs with Gluon of triton 3.6; compiled for sm_90 with that of 3.9 too.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .common import DO_NOT_SPECIALIZE, Problem

# Their names in triton 3.9, and in 3.6.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _program_block(num_blocks, num_heads, section):
    """`common.program_block`."""
    pid = gl.program_id(0)
    first = pid // (section * num_blocks) * section
    size = gl.minimum(section, num_heads - first)
    rest = pid - first * num_blocks
    return rest // size, first + rest % size


@gluon.jit
def _fetch(desc, batch, head, start, barrier, buffer, pred):
    async_load(desc, [batch, head, start, 0], barrier, buffer, pred=pred)


@gluon.jit
def _fetch_vectors(desc, batch_head, start, barrier, buffer, pred):
    async_load(desc, [0, batch_head, start], barrier, buffer, pred=pred)


@gluon.jit
def _next_tile(start, head, first, end, BLOCK: gl.constexpr):
    """The tile after this one: the next BLOCK rows, or the first ones of the next head."""
    start += BLOCK
    wrap = start >= end
    return gl.where(wrap, first, start), gl.where(wrap, head + 1, head)


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
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    AHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)

    num_blocks = gl.cdiv(N_k, BLOCK_N)
    # A "head" of the grid is a key head and MEMBERS of its group's query heads: all of them, or one part of several.
    block, part = _program_block(num_blocks, num_heads, section)
    splits = GROUP // MEMBERS
    batch_kv_head, split = part // splits, part % splits
    kv_heads = H // GROUP
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    first_head = kv_head * GROUP + split * MEMBERS
    n0 = block * BLOCK_N
    lo = 0 * N_q
    full_begin = lo
    hi = N_q
    full_end = N_q
    if CAUSAL:
        shift = N_k - N_q
        lo = gl.maximum(n0 - shift, 0) // BLOCK_M * BLOCK_M
        full_begin = n0 + BLOCK_N - 1 - shift  # rows from here on see all keys of the block
        if WINDOW:
            full_end = n0 - shift + window  # and up to here
            hi = gl.maximum(gl.minimum(N_q, gl.minimum(n0 + BLOCK_N, N_k) - 1 - shift + window), 0)
    num_tiles = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M)
    total = num_tiles * MEMBERS

    k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    u_k_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], u_k_desc.layout)
    u_v_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, HEAD_DIM], u_v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    u_q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], u_q_desc.layout)
    vectors_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 1, BLOCK_M], vectors_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    TILE_BYTES: gl.constexpr = 3 * BLOCK_M * HEAD_DIM * 2 + 4 * BLOCK_M * 4
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    held_barrier = barriers.index(STAGES)
    mbarrier.expect(held_barrier, 4 * BLOCK_N * HEAD_DIM * 2)
    _fetch(k_desc, batch, kv_head, n0, held_barrier, k_smem, True)
    _fetch(v_desc, batch, kv_head, n0, held_barrier, v_smem, True)
    _fetch(u_k_desc, batch, kv_head, n0, held_barrier, u_k_smem, True)
    _fetch(u_v_desc, batch, kv_head, n0, held_barrier, u_v_smem, True)
    # The tile to fetch next: rows from next_m0 on of query head next_head, into slot.
    next_m0, next_head = lo, first_head
    for i in gl.static_range(STAGES - 1):
        pred = i < total
        mbarrier.expect(barriers.index(i), TILE_BYTES, pred=pred)
        _fetch(q_desc, batch, next_head, next_m0, barriers.index(i), q_ring.index(i), pred)
        _fetch(do_desc, batch, next_head, next_m0, barriers.index(i), do_ring.index(i), pred)
        _fetch(u_q_desc, batch, next_head, next_m0, barriers.index(i), u_q_ring.index(i), pred)
        _fetch_vectors(
            vectors_desc, batch * H + next_head, next_m0, barriers.index(i), vectors_ring.index(i), pred
        )
        next_m0, next_head = _next_tile(next_m0, next_head, lo, hi, BLOCK_M)
    slot = STAGES - 1 + 0 * total

    k = k_smem.reshape([BLOCK_N, HEAD_DIM])
    v = v_smem.reshape([BLOCK_N, HEAD_DIM])
    u_k = u_k_smem.reshape([BLOCK_N, HEAD_DIM])
    u_v = u_v_smem.reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(held_barrier, 0)
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
    k_sum = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)
    v_sum = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, SUMS)

    m0 = lo
    stage, phase = 0 * total, 0 * total
    s = nothing
    if AHEAD:
        mbarrier.wait(barriers.index(0), 0, pred=total > 0)
        s = warpgroup_mma(k, q_ring.index(0).reshape([BLOCK_M, HEAD_DIM]).permute([1, 0]), s, use_acc=False)
    for it in range(total):
        if not AHEAD:
            mbarrier.wait(barriers.index(stage), phase)
        q = q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        do = do_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        u_q = u_q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM])
        vectors = vectors_ring.index(stage).reshape([4, BLOCK_M])  # log2(e) L, D, α, α D + E
        if not AHEAD:
            s = warpgroup_mma(k, q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        a = warpgroup_mma(v, do.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
        f = warpgroup_mma(k, u_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        f = warpgroup_mma(u_k, q.permute([1, 0]), f, is_async=True)
        c = warpgroup_mma(u_v, do.permute([1, 0]), nothing, use_acc=False, is_async=True)

        if not AHEAD:
            s = warpgroup_mma_wait(4, deps=[s])
        thread_barrier()  # every warp is done with the tile before: its slot can be filled
        pred = it + STAGES - 1 < total
        bar = barriers.index(slot)
        mbarrier.expect(bar, TILE_BYTES, pred=pred)
        _fetch(q_desc, batch, next_head, next_m0, bar, q_ring.index(slot), pred)
        _fetch(do_desc, batch, next_head, next_m0, bar, do_ring.index(slot), pred)
        _fetch(u_q_desc, batch, next_head, next_m0, bar, u_q_ring.index(slot), pred)
        _fetch_vectors(vectors_desc, batch * H + next_head, next_m0, bar, vectors_ring.index(slot), pred)
        next_m0, next_head = _next_tile(next_m0, next_head, lo, hi, BLOCK_M)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

        p = gl.exp2(s * (scale * LOG2E) - vectors.slice(0, 1).load(SCORES))  # P = exp(S − L)
        if CAUSAL:
            if m0 < full_begin or (WINDOW and m0 + BLOCK_M > full_end):
                distance = m0 + columns[None, :] + (N_k - N_q) - keys[:, None]
                valid = distance >= 0
                if WINDOW:
                    valid = valid & (distance < window)
                p = gl.where(valid, p, 0.0)
        a = warpgroup_mma_wait(3, deps=[a])
        centered = a - vectors.slice(1, 1).load(SCORES)
        pc = gl.convert_layout((p * centered).to(dtype), OPERAND)
        k_sum = warpgroup_mma(pc, u_q, k_sum, is_async=True)  # dSᵀ U_Q
        f = warpgroup_mma_wait(2, deps=[f])
        h = f * scale - vectors.slice(2, 1).load(SCORES)  # h = F − α
        ph = gl.convert_layout((p * h).to(dtype), OPERAND)
        v_sum = warpgroup_mma(ph, do, v_sum, is_async=True)  # (P ⊙ h)ᵀ dO
        c = warpgroup_mma_wait(2, deps=[c])
        ps = gl.convert_layout(
            (p * (h * centered + (c - vectors.slice(3, 1).load(SCORES)))).to(dtype), OPERAND
        )  # S̃ = P ⊙ (P̃ − E)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        m0 = gl.where(m0 + BLOCK_M >= hi, lo, m0 + BLOCK_M)
        k_sum = warpgroup_mma(ps, q, k_sum, is_async=True)  # S̃ᵀ Q
        # Sums in flight across the loop's edge would make ptxas serialize every product.
        if AHEAD:
            # The next tile's first product runs in the shadow of this one's last.
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            s = warpgroup_mma(
                k,
                q_ring.index(stage).reshape([BLOCK_M, HEAD_DIM]).permute([1, 0]),
                nothing,
                use_acc=False,
                is_async=True,
            )
            k_sum, v_sum, s = warpgroup_mma_wait(0, deps=[k_sum, v_sum, s])
        else:
            k_sum, v_sum = warpgroup_mma_wait(0, deps=[k_sum, v_sum])

    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(barriers.index(i))
    out_keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    exists = (out_keys < N_k)[:, None]
    offset = split.to(gl.int64) * split_stride
    grad_k = _tile_pointers(grad_k_ptr + offset, grad_k_strides, batch, kv_head, out_keys, dims)
    gl.store(grad_k, (k_sum * scale).to(grad_k_ptr.dtype.element_ty), exists)
    grad_v = _tile_pointers(grad_v_ptr + offset, grad_v_strides, batch, kv_head, out_keys, dims)
    gl.store(grad_v, v_sum.to(grad_v_ptr.dtype.element_ty), exists)


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
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    num_heads = problem.batch * problem.kv_heads
    group = problem.heads // problem.kv_heads
    num_blocks = triton.cdiv(problem.num_keys, block_n)
    splits = _splits(num_blocks * num_heads, group, problem.device)
    sums_k, sums_v, split_stride = grad_k, grad_v, 0
    if splits > 1:
        sums_k, sums_v = torch.empty((2, splits, *k.shape), dtype=torch.float32, device=k.device)
        split_stride = sums_k.stride(0)
    streamed = 3 * group // splits * problem.num_rows * problem.head_dim * q.element_size()
    num_heads *= splits
    with torch.cuda.device_of(q):
        _column_pass[(num_blocks * num_heads,)](
            *(_descriptor(x, block_m) for x in (q, do, u_q)), *(_descriptor(x, block_n) for x in (k, v, u_k, u_v)),
            _vectors_descriptor(vectors, block_m), sums_k, sums_v, sums_k.stride()[-4:], sums_v.stride()[-4:], split_stride,
            scale=problem.scale, window=problem.window_size or 0, H=problem.heads, GROUP=group, MEMBERS=group // splits,
            N_q=problem.num_rows, N_k=problem.num_keys,
            num_heads=num_heads, section=problem.section(streamed, num_heads),
            CAUSAL=problem.is_causal, WINDOW=problem.window_size is not None, HEAD_DIM=problem.head_dim, **tile,
        )  # fmt: skip
    if splits > 1:
        grad_k.copy_(sums_k.sum(0))
        grad_v.copy_(sums_v.sum(0))
    return grad_k, grad_v


def _splits(programs: int, group: int, device: torch.device) -> int:
    """Parts of a group of query heads, each summed by programs of its own: enough to fill the GPU twice, where there are
    few key heads. The parts are added up in a fixed order, so that results stay the same on every run."""
    enough = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return next((n for n in range(1, group + 1) if group % n == 0 and programs * n >= enough), group)


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
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    AHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)

    num_blocks = padded_rows // BLOCK_M
    block, batch_head = _program_block(num_blocks, num_heads, section)
    if CAUSAL:
        block = num_blocks - 1 - block  # the last rows see most keys: first
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP
    m0 = block * BLOCK_M
    lo = 0 * N_k
    hi = N_k
    full_begin = lo  # tiles that start from here on
    full_end = N_k - BLOCK_N  # and up to here need no mask
    if CAUSAL:
        hi = gl.maximum(gl.minimum(m0 + BLOCK_M, N_q) + (N_k - N_q), 0)
        full_end = gl.minimum(full_end, m0 + (N_k - N_q) + 1 - BLOCK_N)
        if WINDOW:
            lo = gl.maximum(m0 + (N_k - N_q) - window + 1, 0) // BLOCK_N * BLOCK_N
            full_begin = m0 + BLOCK_M + (N_k - N_q) - window
    hi = gl.where(m0 < N_q, hi, 0)
    total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_N)

    q_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    u_q_smem = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_M, HEAD_DIM], u_q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    u_k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], u_k_desc.layout)
    u_v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], u_v_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(barriers.index(i), count=1)

    held_barrier = barriers.index(STAGES)
    mbarrier.expect(held_barrier, 3 * BLOCK_M * HEAD_DIM * 2)
    _fetch(q_desc, batch, head, m0, held_barrier, q_smem, True)
    _fetch(do_desc, batch, head, m0, held_barrier, do_smem, True)
    _fetch(u_q_desc, batch, head, m0, held_barrier, u_q_smem, True)
    for i in gl.static_range(STAGES - 1):
        pred = i < total
        mbarrier.expect(barriers.index(i), 4 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        _fetch(k_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), k_ring.index(i), pred)
        _fetch(v_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), v_ring.index(i), pred)
        _fetch(u_k_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), u_k_ring.index(i), pred)
        _fetch(u_v_desc, batch, kv_head, lo + i * BLOCK_N, barriers.index(i), u_v_ring.index(i), pred)
    slot = STAGES - 1 + 0 * total

    # D = <dO, O> in the sums' layout, and L = +inf beyond the last row: P is 0 there.
    out_rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, SUMS))
    exists = (out_rows < N_q)[:, None]
    do_tile = gl.load(_tile_pointers(do_ptr, do_strides, batch, head, out_rows, dims), exists, 0.0)
    o_tile = gl.load(_tile_pointers(o_ptr, o_strides, batch, head, out_rows, dims), exists, 0.0)
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
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    alpha = gl.zeros([BLOCK_M], gl.float32, ROWS)
    e0 = gl.zeros([BLOCK_M], gl.float32, ROWS)
    omega = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)
    b = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)
    do_sum = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, SUMS)

    stage, phase = 0 * total, 0 * total
    s = nothing
    if AHEAD:
        mbarrier.wait(barriers.index(0), 0, pred=total > 0)
        s = warpgroup_mma(q, k_ring.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]), s, use_acc=False)
    for it in range(total):
        n0 = lo + it * BLOCK_N
        if not AHEAD:
            mbarrier.wait(barriers.index(stage), phase)
        k = k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        u_k = u_k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        u_v = u_v_ring.index(stage).reshape([BLOCK_N, HEAD_DIM])
        if not AHEAD:
            s = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        a = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
        f = warpgroup_mma(u_q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        f = warpgroup_mma(q, u_k.permute([1, 0]), f, is_async=True)
        c = warpgroup_mma(do, u_v.permute([1, 0]), nothing, use_acc=False, is_async=True)

        if not AHEAD:
            s = warpgroup_mma_wait(4, deps=[s])
        thread_barrier()  # every warp is done with the tile before: its slot can be filled
        next_n0 = n0 + (STAGES - 1) * BLOCK_N
        pred = next_n0 < hi
        bar = barriers.index(slot)
        mbarrier.expect(bar, 4 * BLOCK_N * HEAD_DIM * 2, pred=pred)
        _fetch(k_desc, batch, kv_head, next_n0, bar, k_ring.index(slot), pred)
        _fetch(v_desc, batch, kv_head, next_n0, bar, v_ring.index(slot), pred)
        _fetch(u_k_desc, batch, kv_head, next_n0, bar, u_k_ring.index(slot), pred)
        _fetch(u_v_desc, batch, kv_head, next_n0, bar, u_v_ring.index(slot), pred)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

        p = gl.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
        if n0 > full_end or (WINDOW and n0 < full_begin):
            valid = (n0 + keys < N_k)[None, :]
            if CAUSAL:
                distance = rows[:, None] + (N_k - N_q) - n0 - keys[None, :]
                valid = valid & (distance >= 0)
                if WINDOW:
                    valid = valid & (distance < window)
            p = gl.where(valid, p, 0.0)
        pb = gl.convert_layout(p.to(dtype), OPERAND)
        b = warpgroup_mma(pb, k, b, is_async=True)  # P K
        do_sum = warpgroup_mma(pb, u_v, do_sum, is_async=True)  # P U_V
        a = warpgroup_mma_wait(5, deps=[a])
        centered = a - delta[:, None]
        pc = gl.convert_layout((p * centered).to(dtype), OPERAND)
        omega = warpgroup_mma(pc, u_k, omega, is_async=True)  # dS U_K
        f = warpgroup_mma_wait(4, deps=[f])
        f = f * scale  # F = τ (U_Q Kᵀ + Q U_Kᵀ)
        pf = p * f
        alpha += gl.sum(pf, 1)
        pf = gl.convert_layout(pf.to(dtype), OPERAND)
        do_sum = warpgroup_mma(pf, v, do_sum, is_async=True)  # (P ⊙ F) V
        c = warpgroup_mma_wait(4, deps=[c])
        ps = p * (f * centered + c)  # P ⊙ P̃°
        e0 += gl.sum(ps, 1)
        ps = gl.convert_layout(ps.to(dtype), OPERAND)
        phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        omega = warpgroup_mma(ps, k, omega, is_async=True)  # (P ⊙ P̃°) K
        if AHEAD:
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            s = warpgroup_mma(
                q,
                k_ring.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0]),
                nothing,
                use_acc=False,
                is_async=True,
            )
            b, do_sum, omega, s = warpgroup_mma_wait(0, deps=[b, do_sum, omega, s])
        else:
            b, do_sum, omega = warpgroup_mma_wait(0, deps=[b, do_sum, omega])

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
    dq = gl.load(_tile_pointers(dq_ptr, dq_strides, batch, head, out_rows, dims), exists, 0.0)
    grad_q = scale * (omega - e0 * b) - alpha * dq.to(gl.float32)  # Q̃ = τ (Ω − E° B) − α dQ
    gl.store(
        _tile_pointers(grad_q_ptr, grad_q_strides, batch, head, out_rows, dims), grad_q.to(dtype), exists
    )
    o_tile = gl.load(_tile_pointers(o_ptr, o_strides, batch, head, out_rows, dims), exists, 0.0)
    grad_do = do_sum - alpha * o_tile.to(gl.float32)  # dÕ = dÕ° − α O
    gl.store(
        _tile_pointers(grad_do_ptr, grad_do_strides, batch, head, out_rows, dims), grad_do.to(dtype), exists
    )


@gluon.jit
def _tile_pointers(pointer, strides, batch, head, rows, dims):
    """Pointers to [rows, dims] of one head, in 64 bits."""
    pointer += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    return pointer + rows.to(gl.int64)[:, None] * strides[2] + dims[None, :] * strides[3]


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
    num_heads = problem.batch * problem.heads
    streamed = 4 * problem.num_keys * problem.head_dim * q.element_size()
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    grid = (problem.padded_rows // block_m * num_heads,)
    outputs = (do, o, dq, grad_q, grad_do)
    with torch.cuda.device_of(q):
        _row_pass[grid](
            *(_descriptor(x, block_m) for x in (q, do, u_q)), *(_descriptor(x, block_n) for x in (k, v, u_k, u_v)),
            do, o, dq, lse.contiguous(), grad_q, grad_do, vectors, *(x.stride() for x in outputs),
            vectors.stride(0), problem.padded_rows,
            scale=problem.scale, window=problem.window_size or 0, H=problem.heads, GROUP=problem.heads // problem.kv_heads,
            N_q=problem.num_rows, N_k=problem.num_keys,
            num_heads=num_heads, section=problem.section(streamed, num_heads),
            CAUSAL=problem.is_causal, WINDOW=problem.window_size is not None, HEAD_DIM=problem.head_dim, **tile,
        )  # fmt: skip
    return grad_q, grad_do, vectors


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of [B, H, N, d] in tiles of `block` rows. A dimension of size 1 has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape, x.stride())]
    shape = [1, 1, block, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], shape, _shared_layout(*shape, dtype=x.dtype))


@functools.cache
def _shared_layout(*shape: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)


def _vectors_descriptor(vectors: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of the row vectors [4, B·H, padded rows], all four of `block` rows at a time."""
    shape = [4, 1, block]
    layout = _shared_layout(*shape, dtype=torch.float32)
    return TensorDescriptor(vectors, list(vectors.shape), list(vectors.stride()), shape, layout)


def able(problem: Problem, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether these kernels take the call: bf16 or fp16, d of 64 or 128, no padding or dropout, and TMA's alignment."""
    plain = problem.key_padding_mask is None and problem.dropout_seed is None
    return (
        plain
        and problem.dtype in (torch.bfloat16, torch.float16)
        and problem.head_dim in (64, 128)
        and all(x is not None and _aligned(x) for x in tensors)
    )


def _aligned(x: Tensor) -> bool:
    outer = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in outer)
