"""Column and row pass for Hopper (compute capability 9.0) in Gluon: explicit copies, products in flight, explicit waits.

The plain kernels leave the order of products to the compilers, and ptxas makes each of them wait for the one before. Here
a warpgroup issues all score products of a tile, works on the first while the others run, and issues each output product as
soon as its operand is ready; tiles arrive by TMA, ordered ahead of time. Formulas and results are those of
row_pass.py and column_pass.py, which serve everything that `able` refuses.

With d = 128 the sums alone would fill a warpgroup's registers. There two warpgroups (a PAIR) share a block: each computes the
scores of half of the streamed tile and the sums of half of the columns. What an output product needs of the tile's other half the
warpgroups give each other through shared memory. Each is a partition of the kernel, meets the other at barriers in memory only,
and takes what the other gives as late as it can, so that one may compute while the other's products run.

A program goes from block to block (an item each): its copying warp draws the next one, which `publish` passes on, and orders its
operands as soon as the place for them is free; results leave by TMA.
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
    COMPUTING_REGISTERS,
    COPYING_REGISTERS,
    ITEM_SIZE,
    LOG2E,
    RESULT_COLUMNS,
    KeySums,
    able,
    aligned_rows,
    async_load,
    async_store,
    common_arguments,
    copies_read,
    copy_rows,
    draw,
    dropout_arguments,
    exchange_places,
    fetch,
    hand_over,
    init_barriers,
    keep_mask,
    keys_of_rows,
    load_lse,
    load_padding,
    next_stage,
    next_tile,
    number_of_programs,
    place_rows,
    publish,
    published,
    reinterpret,
    release,
    row_block,
    rows_descriptor,
    rows_of_keys,
    sees,
    share_of_registers,
    stream_keys,
    stream_rows,
    thread_barrier,
    tile_descriptor,
    vectors_descriptor,
    write_rows,
)

PIECES = gl.constexpr(8)  # of a place of V and U_V, of a pair of the row pass
PAIR_ITEMS = gl.constexpr(4)  # of the row pass: an item may be told before the end of the one before the last


@gluon.jit
def _part(tile, i: gl.constexpr, PAIR: gl.constexpr, dim: gl.constexpr):
    """Half `i` of a tile's rows (dim 0) or columns (1), of a PAIR; else all of it."""
    if PAIR:
        return tile.slice(i * (tile.shape[dim] // 2), tile.shape[dim] // 2, dim)
    else:
        return tile


@gluon.jit
def _zero(stage, PAIR: gl.constexpr):
    """Zero, of a PAIR one that compilers do not see through: they would hold the addresses of all places in registers, which a
    PAIR has none left for, and spill them in its inner loop."""
    if PAIR:
        return stage >> 8
    else:
        return 0


@gluon.jit
def _places(exchange, i: gl.constexpr, zero, PAIR: gl.constexpr):
    """The two places, [block, 2 · half of a tile], for what warpgroup `i` of a PAIR gives the other."""
    if PAIR:
        shape: gl.constexpr = exchange[0].shape
        first, second = exchange[2 * i].index(zero), exchange[2 * i + 1].index(zero)
        return first.reshape([shape[3], shape[4]]), second.reshape([shape[3], shape[4]])
    else:
        return exchange[0], exchange[1]


@gluon.jit
def _give(tile, place, i: gl.constexpr, PAIR: gl.constexpr):
    """Store a tile of scores, the left operand of output products, in half `i` of a place for the other warpgroup of a PAIR."""
    if PAIR:
        _part(place, i, PAIR, 1).store(tile)


@gluon.jit
def _given(barrier, PAIR: gl.constexpr):
    """Both tiles of a place have been stored, and the other warpgroup's tensor cores may read them."""
    if PAIR:
        fence_async_shared()
        mbarrier.arrive(barrier, count=1)


@gluon.jit
def _row_vector(places, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Place `i` of four for numbers of rows, of which places [2, 2, 1, rows] hold two side by side."""
    ROWS: gl.constexpr = places.shape[3]
    pair = reinterpret(places.index(i // 2), gl.float32, [2, 1, 1, ROWS], LAYOUT)
    return pair.index(i % 2).reshape([ROWS])


@gluon.jit
def _row_products(a, b, LAYOUT: gl.constexpr):
    """<a_i, b_i> of each row."""
    return gl.convert_layout(gl.sum(a.to(gl.float32) * b.to(gl.float32), 1), LAYOUT)


@gluon.jit
def _send(sent, BLOCK_D: gl.constexpr, PLACED: gl.constexpr, ME: gl.constexpr, SENDER: gl.constexpr):
    """The sending warp of warpgroup ME: orders the copies of its results, each of which holds a warp up for some 400 cycles.

    Barrier PLACED + ME says that results are in their places and `hand_over` has told where they go, PLACED + 2 + ME that
    copies have read them. Without SENDER there is nothing to do."""
    descs, places, results, barriers = sent
    if SENDER:
        r = 0
        mbarrier.wait(barriers.index(PLACED + ME), 0)
        first = published(results, ME, 0)
        while first >= 0:
            batch, head = published(results, ME, 1), published(results, ME, 2)
            for i in gl.static_range(2):
                async_store(descs[i], [batch, head, first, BLOCK_D // 2 * ME], places[2 * ME + i].index(0))
            copies_read(True)
            mbarrier.arrive(barriers.index(PLACED + 2 + ME), count=1)
            r += 1
            mbarrier.wait(barriers.index(PLACED + ME), r & 1)
            first = published(results, ME, 0)


@gluon.jit
def _sum_over_rows(
    arguments,
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
    PAIR: gl.constexpr,
    ME: gl.constexpr,
    BY_COPY: gl.constexpr,
    SENDER: gl.constexpr,
):
    """The computing warps of the column pass."""
    held, rings, vectors_ring, exchange, barriers, items, results, sizes, padding, dropout, scale, outputs = (
        arguments
    )
    k_ring, v_ring, u_k_ring, u_v_ring = held
    q_ring, do_ring, u_q_ring = rings
    H, GROUP, MEMBERS, N_q, N_k, window = sizes
    seed_ptr, threshold, keep_scale = dropout
    grads, split_stride = outputs
    grad_k_ptr, grad_v_ptr, grad_k_strides, grad_v_strides, grad_k_desc, grad_v_desc = grads
    dtype: gl.constexpr = q_ring.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    OTHER: gl.constexpr = 1 - ME
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    DIMS: gl.constexpr = BLOCK_D // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    GIVEN: gl.constexpr = 2 * STAGES + 2
    PLACED: gl.constexpr = 2 * STAGES + 6
    SENT: gl.constexpr = PLACED + 2 + ME
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    HELD_STAGES: gl.constexpr = u_k_ring.shape[0]
    gl.static_assert(
        HELD_OPERANDS >= 2, "K and V are in registers: their places are free for the next item's"
    )
    held_free = barriers.index(2 * STAGES + 1)
    columns = ME * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_N, ROWS], gl.float32, SCORES)

    if DROPOUT:
        dice = (gl.load(seed_ptr), gl.load(seed_ptr + 1), threshold)
    r, stage, phase = 0 * N_q, 0 * N_q, 0 * N_q
    last, last_phase, turn = 0 * N_q - 1, 0 * N_q, 0 * N_q
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    n0 = published(items, 0, 0)
    while n0 >= 0:
        batch, kv_head, split = published(items, 0, 1), published(items, 0, 2), published(items, 0, 3)
        lo, hi, full_begin, full_end = rows_of_keys(n0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M) * MEMBERS
        keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
        if PADDING:
            attended = load_padding(padding[0] + batch.to(gl.int64) * padding[1], padding[2], keys, N_k)
        k_sum = gl.zeros([BLOCK_N, DIMS], gl.float32, SUMS)
        v_sum = gl.zeros([BLOCK_N, DIMS], gl.float32, SUMS)

        # Products of two operands in shared memory, 32 columns wide, are held up by it: keep what registers have room for.
        k = k_ring.index(0).reshape([BLOCK_N, BLOCK_D]).load(HELD)
        v = v_ring.index(0).reshape([BLOCK_N, BLOCK_D]).load(HELD)
        u_k = u_k_ring.index(r % HELD_STAGES).reshape([BLOCK_N, BLOCK_D])
        u_v = u_v_ring.index(r % HELD_STAGES).reshape([BLOCK_N, BLOCK_D])
        if HELD_OPERANDS >= 3:
            u_v = u_v.load(HELD)
        if HELD_OPERANDS >= 4:
            u_k = u_k.load(HELD)
        if SENDER:  # tells when the places for what the other gets, and for results, are free
            last, last_phase = 0 * N_q + SENT, (r & 1) ^ 1
        else:
            copies_read(BY_COPY)
        release(held_free)  # the next item's may come
        m0, head = lo, kv_head * GROUP + split * MEMBERS
        mbarrier.wait(barriers.index(stage), phase, pred=total > 0)
        first_q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
        s = warpgroup_mma(k, _part(first_q, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False)
        thread_barrier()
        for it in range(total):
            q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            do = do_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            u_q = u_q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            vectors = vectors_ring.index(stage).reshape([4, BLOCK_M])  # log2(e) L, D, α, α D + E
            zero = _zero(stage, PAIR)
            mine = _places(exchange, ME, zero, PAIR)
            its = _places(exchange, OTHER, zero, PAIR)
            my_q, my_do, my_u_q = _part(q, ME, PAIR, 0), _part(do, ME, PAIR, 0), _part(u_q, ME, PAIR, 0)
            a = warpgroup_mma(v, my_do.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
            f = warpgroup_mma(k, my_u_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
            f = warpgroup_mma(u_k, my_q.permute([1, 0]), f, is_async=True)
            c = warpgroup_mma(u_v, my_do.permute([1, 0]), nothing, use_acc=False, is_async=True)

            p = gl.exp2(
                s * (scale * LOG2E) - _part(vectors.slice(0, 1), ME, PAIR, 1).load(SCORES)
            )  # P = exp(S − L)
            if CAUSAL:
                if m0 < full_begin or (WINDOW and m0 + BLOCK_M > full_end):
                    distance = m0 + columns[None, :] + (N_k - N_q) - keys[:, None]
                    p = gl.where(sees(distance, window, WINDOW), p, 0.0)
            if PADDING:
                p = gl.where(attended[:, None], p, 0.0)
            if DROPOUT:
                keep = keep_mask(dice, batch * H + head, m0 + ME * ROWS, n0, ROWS, SCORES, True)
            a = warpgroup_mma_wait(3, deps=[a])
            if DROPOUT:
                a = gl.where(keep, a * keep_scale, 0.0)  # A = g ⊙ dP
            centered = a - _part(vectors.slice(1, 1), ME, PAIR, 1).load(SCORES)
            pc = (p * centered).to(dtype)
            if PAIR:  # the other has done with what it took of the tile before, or copies with the item before's results
                mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            _give(pc, mine[0], 0, PAIR)
            pc = gl.convert_layout(pc, OPERAND)
            k_sum = warpgroup_mma(pc, _part(my_u_q, ME, PAIR, 1), k_sum, is_async=True)  # dSᵀ U_Q
            f = warpgroup_mma_wait(2, deps=[f])
            h = f * scale - _part(vectors.slice(2, 1), ME, PAIR, 1).load(SCORES)  # h = F − α
            ph = p * h
            if DROPOUT:
                ph = gl.where(keep, ph * keep_scale, 0.0)
            ph = ph.to(dtype)
            _give(ph, mine[0], 1, PAIR)
            ph = gl.convert_layout(ph, OPERAND)
            v_sum = warpgroup_mma(ph, _part(my_do, ME, PAIR, 1), v_sum, is_async=True)  # (P ⊙ h)ᵀ dO
            _given(barriers.index(GIVEN + 2 * ME), PAIR)
            c = warpgroup_mma_wait(2, deps=[c])
            if DROPOUT:
                c = gl.where(keep, c * keep_scale, 0.0)
            # S̃ = P ⊙ (P̃ − E)
            ps = (p * (h * centered + (c - _part(vectors.slice(3, 1), ME, PAIR, 1).load(SCORES)))).to(dtype)
            _give(ps, mine[1], 0, PAIR)
            ps = gl.convert_layout(ps, OPERAND)
            _given(barriers.index(GIVEN + 2 * ME + 1), PAIR)
            k_sum = warpgroup_mma(ps, _part(my_q, ME, PAIR, 1), k_sum, is_async=True)  # S̃ᵀ Q
            if PAIR:  # the other half of the tile
                its_q, its_do = _part(q, OTHER, PAIR, 0), _part(do, OTHER, PAIR, 0)
                its_u_q = _part(u_q, OTHER, PAIR, 0)
                mbarrier.wait(barriers.index(GIVEN + 2 * OTHER), turn)
                k_sum = warpgroup_mma(
                    _part(its[0], 0, PAIR, 1), _part(its_u_q, ME, PAIR, 1), k_sum, is_async=True
                )
                v_sum = warpgroup_mma(
                    _part(its[0], 1, PAIR, 1), _part(its_do, ME, PAIR, 1), v_sum, is_async=True
                )
                mbarrier.wait(barriers.index(GIVEN + 2 * OTHER + 1), turn)
                k_sum = warpgroup_mma(
                    _part(its[1], 0, PAIR, 1), _part(its_q, ME, PAIR, 1), k_sum, is_async=True
                )
                last, last_phase, turn = STAGES + stage, phase, turn ^ 1
            used = STAGES + stage
            stage, phase = next_stage(stage, phase, STAGES)
            m0, head = next_tile(m0, head, lo, hi, BLOCK_M)
            # The next tile's first product runs in the shadow of this one's last. Sums in flight across the loop's edge would
            # make ptxas serialize every product.
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            next_q = q_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            s = warpgroup_mma(
                k, _part(next_q, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False, is_async=True
            )
            k_sum, v_sum, s = warpgroup_mma_wait(0, deps=[k_sum, v_sum, s])
            mbarrier.arrive(barriers.index(used), count=1)

        offset = split.to(gl.int64) * split_stride
        k_sum *= scale
        if BY_COPY:
            places = (exchange[2 * ME], exchange[2 * ME + 1])
            if PAIR:
                mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            if SENDER:
                place_rows((k_sum, v_sum), places)
                hand_over((n0, batch, kv_head), results, barriers, PLACED, ME)
            else:
                copy_rows((k_sum, v_sum), (grad_k_desc, grad_v_desc), places, batch, kv_head, n0, ME * DIMS)
        else:
            write_rows(
                k_sum, grad_k_ptr + offset, grad_k_strides, batch, kv_head, n0, N_k, ME * DIMS, HEAD_DIM, SUMS
            )
            write_rows(
                v_sum, grad_v_ptr + offset, grad_v_strides, batch, kv_head, n0, N_k, ME * DIMS, HEAD_DIM, SUMS
            )
        r += 1
        mbarrier.wait(barriers.index(2 * STAGES), r & 1)
        n0 = published(items, 0, 0)
    if SENDER:
        mbarrier.wait(barriers.index(SENT), (r & 1) ^ 1)
        hand_over((-1,), results, barriers, PLACED, ME)
    else:
        copies_read(BY_COPY)


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
    grad_k_desc,
    grad_v_desc,
    grad_k_ptr,
    grad_v_ptr,
    grad_k_strides,
    grad_v_strides,
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
    BY_COPY: gl.constexpr,
    SENDER: gl.constexpr,
    PAIR: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    # Of what stays in shared memory to an item's end: the next item's comes before.
    HELD_STAGES: gl.constexpr = 1 if HELD_OPERANDS == 4 else 2
    k_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    u_k_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_N, BLOCK_D], u_k_desc.layout)
    u_v_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_N, BLOCK_D], u_v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    u_q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], u_q_desc.layout)
    vectors_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4, 1, BLOCK_M], vectors_desc.layout)
    exchange = (k_ring, k_ring)  # unused
    if PAIR or BY_COPY:
        exchange = exchange_places(grad_k_desc, GROUPS)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 10, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers, 0, STAGES, 1)
    init_barriers(barriers, STAGES, 2 * STAGES, GROUPS)
    init_barriers(barriers, 2 * STAGES, 2 * STAGES + 1, 1)
    init_barriers(barriers, 2 * STAGES + 1, 2 * STAGES + 2, GROUPS)
    # What one warpgroup has given the other; that results are in their places, and have been read.
    init_barriers(barriers, 2 * STAGES + 2, 2 * STAGES + 10, 1)

    results = gl.allocate_shared_memory(gl.int32, [GROUPS * ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    items = gl.allocate_shared_memory(gl.int32, [ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held_descs = (k_desc, v_desc, u_k_desc, u_v_desc)
    held = (k_ring, v_ring, u_k_ring, u_v_ring)
    descs = (q_desc, do_desc, u_q_desc)
    rings = (q_ring, do_ring, u_q_ring)
    work = (num_heads, section, H, GROUP, MEMBERS, N_q, N_k, window)
    sizes = (H, GROUP, MEMBERS, N_q, N_k, window)
    dropout = (seed_ptr, threshold, keep_scale)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    grads = (grad_k_ptr, grad_v_ptr, grad_k_strides, grad_v_strides, grad_k_desc, grad_v_desc)
    outputs = (grads, split_stride)
    arguments = (
        held, rings, vectors_ring, exchange, barriers, items, results, sizes, padding_row, dropout, scale, outputs
    )  # fmt: skip
    sent = ((grad_k_desc, grad_v_desc), exchange, results, barriers)
    if PAIR:
        gl.warp_specialize(
            [
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, BY_COPY, SENDER)),
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 1, BY_COPY, SENDER)),
                (stream_rows, (held_descs, held, descs, rings, vectors_desc, vectors_ring, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES)),
                (_send, (sent, BLOCK_D, 2 * STAGES + 6, 0, SENDER)),
                (_send, (sent, BLOCK_D, 2 * STAGES + 6, 1, SENDER)),
            ],
            [4, 1, 1, 1],
            [COMPUTING_REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, BY_COPY, SENDER)),
                (stream_rows, (held_descs, held, descs, rings, vectors_desc, vectors_ring, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [1],
            [COPYING_REGISTERS],
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
    out: tuple[Tensor, Tensor],
    *,
    tile: dict,
) -> tuple[Tensor, Tensor]:
    """As `column_pass.column_pass`, of a call that `able` takes."""
    block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
    sums = KeySums(problem, out, block_n)
    sums_k, sums_v = sums.written
    by_copy = sums_k is sums.results[0] and able(problem, (sums_k, sums_v))
    tensors = {
        "q_desc": q, "do_desc": do, "u_q_desc": u_q, "k_desc": k, "v_desc": v, "u_k_desc": u_k, "u_v_desc": u_v,
        "vectors_desc": vectors, "grad_k_desc": sums_k if by_copy else k, "grad_v_desc": sums_v if by_copy else k,
        "grad_k_ptr": sums_k, "grad_v_ptr": sums_v, "padding": problem.side_tensors["padding"],
        "seed_ptr": problem.side_tensors["seed"],
        "tickets_ptr": problem.tickets,
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        descriptors = {
            f"{name}_desc": tile_descriptor(x, block_m) for name, x in (("q", q), ("do", do), ("u_q", u_q))
        }
        for name, x in (("k", k), ("v", v), ("u_k", u_k), ("u_v", u_v)):
            descriptors[f"{name}_desc"] = tile_descriptor(x, block_n)
        for name in ("grad_k_desc", "grad_v_desc"):
            descriptors[name] = tile_descriptor(tensors[name], block_n, RESULT_COLUMNS)
        streamed = 3 * problem.head_dim * q.element_size()
        programs = number_of_programs(problem, sums.items, tile["PAIR"])
        return programs, descriptors | common_arguments(problem) | sums.arguments(problem, streamed) | tile | {
            "vectors_desc": vectors_descriptor(vectors, block_m),
            "grad_k_strides": sums_k.stride()[-4:], "grad_v_strides": sums_v.stride()[-4:],
            "maxnreg": share_of_registers(tile["PAIR"]), "BY_COPY": by_copy,
            **dropout_arguments(problem),
            # Measured: windows 4 % faster, causal 1 %; not causal 2.5 % slower.
            "SENDER": by_copy and tile["PAIR"] and problem.is_causal,
        }  # fmt: skip

    launch(_column_pass, problem, tensors, prepare, tile, by_copy)
    sums.finish()
    return out


@gluon.jit
def _fetch_by_columns(desc, batch, head, m0, here, ring, slot, half: gl.constexpr, BLOCK_M: gl.constexpr):
    """Rows into half of the place of V and U_V."""
    LAYOUT: gl.constexpr = desc.layout
    places = reinterpret(ring.index(slot), desc.dtype, [4, 1, 1, BLOCK_M, RESULT_COLUMNS], LAYOUT)
    for i in gl.static_range(2):
        async_load(desc, [batch, head, m0, i * RESULT_COLUMNS], here, places.index(2 * i + half))


@gluon.jit
def _fetch_rows(descs, held, rings, place, H, here, stage, slot, BLOCK_M: gl.constexpr):
    """What a pair begins a block of rows with: dO, U_Q and L in their places, Q in that of U_K, O in half of V's and U_V's."""
    q_desc, do_desc, u_q_desc, o_desc, _, lse_desc = descs
    do_ring, u_q_ring, lse_ring = held
    block, batch, head = place
    m0 = block * BLOCK_M
    fetch(q_desc, batch, head, m0, here, rings[2].index(slot))
    fetch(do_desc, batch, head, m0, here, do_ring.index(stage))
    _fetch_by_columns(o_desc, batch, head, m0, here, rings[1], slot, 1, BLOCK_M)
    fetch(u_q_desc, batch, head, m0, here, u_q_ring.index(stage))
    async_load(lse_desc, [batch * H + head, m0], here, lse_ring.index(stage))


@gluon.jit
def _stream_keys(
    row_descs,
    held,
    descs,
    rings,
    barriers,
    schedule,
    work,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp of a pair of the row pass, which has no place for the rows of two items.

    Barrier i says that place i of the ring is filled, STAGES + i that both warpgroups have used it up. Before the tiles of an
    item's keys a place holds its Q and O, after them dQ and O; between two items one place holds both. dO and U_Q, which
    stay to the item's end, have two places of their own and come with Q.
    """
    gl.static_assert(STAGES == 2, "dO of an item without keys comes when that of the last but one is used up")
    tickets_ptr, items = schedule
    k_desc, v_desc, u_k_desc, u_v_desc = descs
    num_blocks, num_heads, section, H, GROUP, N_q, N_k, window = work
    PIECE: gl.constexpr = v_desc.layout
    ROWS_BYTES: gl.constexpr = BLOCK_M * BLOCK_D * 2
    BEGIN_BYTES: gl.constexpr = 4 * ROWS_BYTES + BLOCK_M * 4
    num_items = num_blocks * num_heads
    item = gl.program_id(0)
    place, kv_head = row_block(item, num_blocks, num_heads, section, H, GROUP, CAUSAL)
    block, batch, head = place
    publish(place, items, 0)
    mbarrier.expect(barriers.index(0), BEGIN_BYTES)
    _fetch_rows(row_descs, held, rings, place, H, barriers.index(0), 0, 0, BLOCK_M)
    slot, phase = 0 * N_q + 1, 0 * N_q + 1  # the phase before a barrier's first counts as complete
    r = 0 * N_q
    while item < num_items:
        m0 = block * BLOCK_M
        lo, hi, _, _ = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        for n0 in range(lo, hi, BLOCK_N):
            mbarrier.wait(barriers.index(STAGES + slot), phase)
            here = barriers.index(slot)
            mbarrier.expect(here, len(descs) * BLOCK_N * BLOCK_D * 2)
            fetch(k_desc, batch, kv_head, n0, here, rings[0].index(slot))
            pieces = reinterpret(
                rings[1].index(slot), v_desc.dtype, [PIECES, 1, 1, BLOCK_N // 2, RESULT_COLUMNS], PIECE
            )
            for i in gl.static_range(PIECES):  # 64 columns of half of V's rows, of U_V's, …
                rows, columns = n0 + i % 4 // 2 * (BLOCK_N // 2), i // 4 * RESULT_COLUMNS
                async_load(
                    v_desc if i % 2 == 0 else u_v_desc, [batch, kv_head, rows, columns], here, pieces.index(i)
                )
            fetch(u_k_desc, batch, kv_head, n0, here, rings[2].index(slot))
            slot, phase = next_stage(slot, phase, STAGES)
        item = draw(tickets_ptr, num_items)
        next_place, kv_head = row_block(item, num_blocks, num_heads, section, H, GROUP, CAUSAL)
        next_block, next_batch, next_head = next_place
        r += 1
        mbarrier.wait(barriers.index(STAGES + slot), phase)
        here = barriers.index(slot)
        publish((gl.where(item < num_items, next_block, -1), next_batch, next_head), items, r % PAIR_ITEMS)
        if item < num_items:
            mbarrier.expect(here, 2 * ROWS_BYTES + BEGIN_BYTES)
        else:
            mbarrier.expect(here, 2 * ROWS_BYTES)
        fetch(row_descs[4], batch, head, m0, here, rings[0].index(slot))  # dQ
        _fetch_by_columns(row_descs[3], batch, head, m0, here, rings[1], slot, 0, BLOCK_M)  # O
        if item < num_items:
            _fetch_rows(row_descs, held, rings, next_place, H, here, r & 1, slot, BLOCK_M)
        block, batch, head = next_block, next_batch, next_head
        slot, phase = next_stage(slot, phase, STAGES)


@gluon.jit
def _sum_over_keys(
    arguments,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    PAIR: gl.constexpr,
    ME: gl.constexpr,
    HELD_STAGES: gl.constexpr,
    BY_COPY: gl.constexpr,
):
    """The computing warps of the row pass."""
    held, rings, exchange, row_places, barriers, items, sizes, lse_ptr, padding, scale, outputs = arguments
    gl.static_assert(
        not PAIR or (HELD_OPERANDS < 2 and BLOCK_M == BLOCK_N),
        "a pair's rows come in places of tiles of keys",
    )
    do_ring, u_q_ring, q_ring, o_ring = held
    lse_ring, vector_places = row_places
    VECTORS: gl.constexpr = vector_places.layout
    k_ring, v_ring, u_k_ring, u_v_ring = rings
    H, N_q, N_k, window = sizes
    grads, vectors_ptr, vectors_desc, vector_stride, padded_rows = outputs
    grad_q_ptr, grad_do_ptr, grad_q_strides, grad_do_strides, grad_q_desc, grad_do_desc = grads
    dtype: gl.constexpr = k_ring.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    OTHER: gl.constexpr = 1 - ME
    KEYS: gl.constexpr = BLOCK_N // GROUPS
    DIMS: gl.constexpr = BLOCK_D // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    HELD_BARRIERS: gl.constexpr = 2 * STAGES
    GIVEN: gl.constexpr = 2 * STAGES
    ITEM_STAGES: gl.constexpr = PAIR_ITEMS if PAIR else HELD_STAGES
    keys = ME * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_M, KEYS], gl.float32, SCORES)
    nothing_both = gl.zeros([BLOCK_M, DIMS], gl.float32, SUMS)

    r, stage, phase = 0 * N_q, 0 * N_q, 0 * N_q
    last, last_phase, turn, sums_turn = 0 * N_q - 1, 0 * N_q, 0 * N_q, 0 * N_q
    mbarrier.wait(barriers.index(0 if PAIR else HELD_BARRIERS), 0)
    block = published(items, 0, 0)
    while block >= 0:
        held_stage = r % HELD_STAGES
        batch, head = published(items, r % ITEM_STAGES, 1), published(items, r % ITEM_STAGES, 2)
        m0 = block * BLOCK_M
        lo, hi, full_begin, full_end = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_N)
        rows = m0 + gl.arange(0, BLOCK_M, layout=ROWS)
        if PADDING:
            padding_row = padding[0] + batch.to(gl.int64) * padding[1]

        do = do_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        u_q = u_q_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        if PAIR:
            # Q and O came in a tile's place, and those of the tile's to come may.
            lse = gl.where(rows < N_q, lse_ring.index(held_stage).reshape([BLOCK_M]).load(ROWS), float("inf"))
            q_smem = u_k_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            o_smem = v_ring.index(stage).slice(BLOCK_M, BLOCK_M, 0)
            q = q_smem.load(HELD)
            do_tile = do.load(HELD)
            delta = _row_products(do_tile, o_smem.load(HELD), ROWS)  # D = <dO, O>
            copies_read(True)
            release(barriers.index(STAGES + stage))
            stage, phase = next_stage(stage, phase, STAGES)
        else:
            copies_read(BY_COPY)
            lse = load_lse(lse_ptr, batch * H + head, rows, N_q)
            q_smem = q_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
            o_smem = o_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
            q = q_smem.load(HELD)
        lse2 = lse * LOG2E
        mbarrier.wait(barriers.index(stage), phase, pred=total > 0)
        first_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(
            q, _part(first_k, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        if not PAIR:
            do_tile = do.load(HELD)
            delta = _row_products(do_tile, o_smem.load(HELD), ROWS)
            if HELD_OPERANDS >= 2:
                do = do_tile
            if HELD_OPERANDS >= 3:
                u_q = u_q.load(HELD)
            release(barriers.index(HELD_BARRIERS + 2 * HELD_STAGES + 1))

        alpha = gl.sum(nothing, 1)
        e0 = alpha
        omega = gl.zeros([BLOCK_M, DIMS], gl.float32, SUMS)
        b = gl.zeros([BLOCK_M, DIMS], gl.float32, SUMS)
        do_sum = gl.zeros([BLOCK_M, DIMS], gl.float32, SUMS)
        s = warpgroup_mma_wait(0, deps=[s])
        thread_barrier()
        for it in range(total):
            n0 = lo + it * BLOCK_N
            k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            u_k = u_k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            zero = _zero(stage, PAIR)
            mine = _places(exchange, ME, zero, PAIR)
            its = _places(exchange, OTHER, zero, PAIR)
            if PAIR:
                do = do_ring.index(held_stage + zero).reshape([BLOCK_M, BLOCK_D])
                u_q = u_q_ring.index(held_stage + zero).reshape([BLOCK_M, BLOCK_D])
            my_k, my_u_k = _part(k, ME, PAIR, 0), _part(u_k, ME, PAIR, 0)
            if PAIR:  # one product of 64 columns: two of 32 take half as long again
                both = v_ring.index(stage)
                my_both = both.slice(ME * BLOCK_N, BLOCK_N, 0)
                my_v, my_u_v = my_both.slice(0, KEYS, 0), my_both.slice(KEYS, KEYS, 0)
                ac = warpgroup_mma(do, my_both.permute([1, 0]), nothing_both, use_acc=False, is_async=True)
            else:
                my_v = v_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
                my_u_v = u_v_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
                a = warpgroup_mma(do, my_v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
            f = warpgroup_mma(u_q, my_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
            f = warpgroup_mma(q, my_u_k.permute([1, 0]), f, is_async=True)
            if not PAIR:
                c = warpgroup_mma(do, my_u_v.permute([1, 0]), nothing, use_acc=False, is_async=True)

            if PADDING:
                attended = load_padding(padding_row, padding[2], n0 + keys, N_k)
            p = gl.exp2(s * (scale * LOG2E) - lse2[:, None])  # P = exp(S − L)
            if n0 > full_end or (WINDOW and n0 < full_begin):
                valid = (n0 + keys < N_k)[None, :]
                if CAUSAL:
                    distance = rows[:, None] + (N_k - N_q) - n0 - keys[None, :]
                    valid = valid & sees(distance, window, WINDOW)
                p = gl.where(valid, p, 0.0)
            if PADDING:
                p = gl.where(attended[None, :], p, 0.0)
            if PAIR:  # the other has done with what it took of the tile before
                mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            pb = p.to(dtype)
            _give(pb, mine[0], 0, PAIR)
            pb = gl.convert_layout(pb, OPERAND)
            b = warpgroup_mma(pb, _part(my_k, ME, PAIR, 1), b, is_async=True)  # P K
            do_sum = warpgroup_mma(pb, _part(my_u_v, ME, PAIR, 1), do_sum, is_async=True)  # P U_V
            if PAIR:
                ac = warpgroup_mma_wait(4, deps=[ac])
                a, c = gl.split(gl.permute(gl.reshape(ac, [BLOCK_M, 2, KEYS]), [0, 2, 1]))
                a, c = gl.convert_layout(a, SCORES), gl.convert_layout(c, SCORES)
            else:
                a = warpgroup_mma_wait(5, deps=[a])
            centered = a - delta[:, None]
            pc = (p * centered).to(dtype)
            _give(pc, mine[0], 1, PAIR)
            pc = gl.convert_layout(pc, OPERAND)
            omega = warpgroup_mma(pc, _part(my_u_k, ME, PAIR, 1), omega, is_async=True)  # dS U_K
            _given(barriers.index(GIVEN + 2 * ME), PAIR)
            f = warpgroup_mma_wait(3 if PAIR else 4, deps=[f])
            f = f * scale  # F = τ (U_Q Kᵀ + Q U_Kᵀ)
            pf = p * f
            alpha += gl.sum(pf, 1)
            pf = pf.to(dtype)
            _give(pf, mine[1], 0, PAIR)
            pf = gl.convert_layout(pf, OPERAND)
            do_sum = warpgroup_mma(pf, _part(my_v, ME, PAIR, 1), do_sum, is_async=True)  # (P ⊙ F) V
            if not PAIR:
                c = warpgroup_mma_wait(4, deps=[c])
            ps = p * (f * centered + c)  # P ⊙ P̃°
            e0 += gl.sum(ps, 1)
            ps = ps.to(dtype)
            _give(ps, mine[1], 1, PAIR)
            ps = gl.convert_layout(ps, OPERAND)
            omega = warpgroup_mma(ps, _part(my_k, ME, PAIR, 1), omega, is_async=True)  # (P ⊙ P̃°) K
            _given(barriers.index(GIVEN + 2 * ME + 1), PAIR)
            if PAIR:  # the other half of the tile
                its_k, its_u_k = _part(k, OTHER, PAIR, 0), _part(u_k, OTHER, PAIR, 0)
                its_both = both.slice(OTHER * BLOCK_N, BLOCK_N, 0)
                its_v, its_u_v = its_both.slice(0, KEYS, 0), its_both.slice(KEYS, KEYS, 0)
                mbarrier.wait(barriers.index(GIVEN + 2 * OTHER), turn)
                b = warpgroup_mma(_part(its[0], 0, PAIR, 1), _part(its_k, ME, PAIR, 1), b, is_async=True)
                do_sum = warpgroup_mma(
                    _part(its[0], 0, PAIR, 1), _part(its_u_v, ME, PAIR, 1), do_sum, is_async=True
                )
                omega = warpgroup_mma(
                    _part(its[0], 1, PAIR, 1), _part(its_u_k, ME, PAIR, 1), omega, is_async=True
                )
                mbarrier.wait(barriers.index(GIVEN + 2 * OTHER + 1), turn)
                do_sum = warpgroup_mma(
                    _part(its[1], 0, PAIR, 1), _part(its_v, ME, PAIR, 1), do_sum, is_async=True
                )
                omega = warpgroup_mma(
                    _part(its[1], 1, PAIR, 1), _part(its_k, ME, PAIR, 1), omega, is_async=True
                )
                last, last_phase, turn = STAGES + stage, phase, turn ^ 1
            used = STAGES + stage
            stage, phase = next_stage(stage, phase, STAGES)
            # The next tile's first product runs in the shadow of this one's last.
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            next_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            s = warpgroup_mma(
                q, _part(next_k, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False, is_async=True
            )
            b, do_sum, omega, s = warpgroup_mma_wait(0, deps=[b, do_sum, omega, s])
            mbarrier.arrive(barriers.index(used), count=1)

        if PAIR:
            # dQ and O came in the next tile's place, with the next item's Q and O.
            mbarrier.wait(barriers.index(stage), phase)
            q_smem = k_ring.index(stage).reshape([BLOCK_M, BLOCK_D])
            o_smem = v_ring.index(stage).slice(0, BLOCK_M, 0)
        else:
            mbarrier.wait(barriers.index(HELD_BARRIERS + 2 * HELD_STAGES), r & 1)  # dQ in Q's place
        dq = _part(q_smem, ME, PAIR, 1).load(SUMS)
        o = _part(o_smem, ME, PAIR, 1).load(SUMS)
        if PAIR:
            if total > 0:  # each has seen half of the keys
                _row_vector(vector_places, 2 * ME, VECTORS).store(alpha)
                _row_vector(vector_places, 2 * ME + 1, VECTORS).store(e0)
                mbarrier.arrive(barriers.index(GIVEN + 4 + ME), count=1)
                mbarrier.wait(barriers.index(GIVEN + 4 + OTHER), sums_turn)
                alpha += _row_vector(vector_places, 2 * OTHER, VECTORS).load(ROWS)
                e0 += _row_vector(vector_places, 2 * OTHER + 1, VECTORS).load(ROWS)
                sums_turn ^= 1
        else:
            release(barriers.index(HELD_BARRIERS + HELD_STAGES + held_stage))
        alpha_rows = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        e0_rows = gl.convert_layout(e0, gl.SliceLayout(1, SUMS))[:, None]
        grad_q = scale * (omega - e0_rows * b) - alpha_rows * dq.to(gl.float32)  # Q̃ = τ (Ω − E° B) − α dQ
        grad_do = do_sum - alpha_rows * o.to(gl.float32)  # dÕ = dÕ° − α O
        if PAIR:
            mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            last = 0 * N_q - 1
            # Half of the row vectors, in the places that it alone has read from: L·log2(e), D | α, α D + E = E°
            _row_vector(vector_places, 2 * OTHER, VECTORS).store(alpha if ME == 0 else lse2)
            _row_vector(vector_places, 2 * OTHER + 1, VECTORS).store(e0 if ME == 0 else delta)
        if BY_COPY:
            places = (exchange[2 * ME], exchange[2 * ME + 1])
            copy_rows((grad_q, grad_do), (grad_q_desc, grad_do_desc), places, batch, head, m0, ME * DIMS)
        else:
            write_rows(grad_q, grad_q_ptr, grad_q_strides, batch, head, m0, N_q, ME * DIMS, HEAD_DIM, SUMS)
            write_rows(grad_do, grad_do_ptr, grad_do_strides, batch, head, m0, N_q, ME * DIMS, HEAD_DIM, SUMS)
            if PAIR:
                fence_async_shared()
                thread_barrier()
        if PAIR:
            async_store(vectors_desc, [2 * OTHER, batch * H + head, m0], vector_places.index(OTHER))
        else:
            # Last, for fences wait for stores.
            vectors = vectors_ptr + (batch * H + head).to(gl.int64) * padded_rows + rows
            stride = vector_stride.to(gl.int64)
            gl.store(vectors, lse2)
            gl.store(vectors + stride, delta)
            gl.store(vectors + 2 * stride, alpha)
            gl.store(vectors + 3 * stride, e0)  # α D + E = E°
        r += 1
        if not PAIR:
            mbarrier.wait(barriers.index(HELD_BARRIERS + r % HELD_STAGES), r // HELD_STAGES & 1)
        block = published(items, r % ITEM_STAGES, 0)
    copies_read(PAIR or BY_COPY)


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE)
def _row_pass(
    q_desc,
    do_desc,
    u_q_desc,
    o_desc,
    dq_desc,
    k_desc,
    v_desc,
    u_k_desc,
    u_v_desc,
    grad_q_desc,
    grad_do_desc,
    lse_desc,
    vectors_desc,
    lse_ptr,
    grad_q_ptr,
    grad_do_ptr,
    vectors_ptr,
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
    tickets_ptr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PADDING: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HELD_OPERANDS: gl.constexpr,
    BY_COPY: gl.constexpr,
    PAIR: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    HELD_STAGES: gl.constexpr = 2
    do_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    u_q_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], u_q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    u_k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], u_k_desc.layout)
    q_ring, o_ring, exchange, u_v_ring = u_k_ring, u_k_ring, (u_k_ring, u_k_ring), u_k_ring  # unused
    lse_ring, vector_places = u_k_ring, u_k_ring
    if PAIR or BY_COPY:
        exchange = exchange_places(grad_q_desc, GROUPS)
    if PAIR:
        # V and U_V: half of V's rows, of U_V's, the other halves
        v_ring = gl.allocate_shared_memory(
            dtype, [STAGES, 2 * BLOCK_N, BLOCK_D], gl.NVMMASharedLayout(128, 16, 2)
        )
        lse_ring = gl.allocate_shared_memory(gl.float32, [HELD_STAGES, 1, BLOCK_M], lse_desc.layout)
        vector_places = gl.allocate_shared_memory(gl.float32, [2, 2, 1, BLOCK_M], vectors_desc.layout)
        # Tiles, whether they have come and are used up; what one warpgroup has given the other.
        barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 6, 1], mbarrier.MBarrierLayout())
        init_barriers(barriers, 0, STAGES, 1)
        init_barriers(barriers, STAGES, 2 * STAGES, GROUPS)
        init_barriers(barriers, 2 * STAGES, 2 * STAGES + 6, 1)
        items = gl.allocate_shared_memory(gl.int32, [PAIR_ITEMS * ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    else:
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
        u_v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], u_v_desc.layout)
        q_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
        o_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], o_desc.layout)
        barriers = gl.allocate_shared_memory(
            gl.int64, [2 * STAGES + 2 * HELD_STAGES + 2, 1], mbarrier.MBarrierLayout()
        )
        init_barriers(barriers, 0, 2 * STAGES + 2 * HELD_STAGES + 2, 1)
        items = gl.allocate_shared_memory(gl.int32, [HELD_STAGES * ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held = (do_ring, u_q_ring, q_ring, o_ring)
    descs = (k_desc, v_desc, u_k_desc, u_v_desc)
    rings = (k_ring, v_ring, u_k_ring, u_v_ring)
    work = (padded_rows // BLOCK_M, num_heads, section, H, GROUP, N_q, N_k, window)
    sizes = (H, N_q, N_k, window)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    grads = (grad_q_ptr, grad_do_ptr, grad_q_strides, grad_do_strides, grad_q_desc, grad_do_desc)
    outputs = (grads, vectors_ptr, vectors_desc, vector_stride, padded_rows)
    row_places = (lse_ring, vector_places)
    arguments = (
        held,
        rings,
        exchange,
        row_places,
        barriers,
        items,
        sizes,
        lse_ptr,
        padding_row,
        scale,
        outputs,
    )
    if PAIR:
        gl.warp_specialize(
            [
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, HELD_STAGES, BY_COPY)),
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 1, HELD_STAGES, BY_COPY)),
                (_stream_keys, ((q_desc, do_desc, u_q_desc, o_desc, dq_desc, lse_desc), (do_ring, u_q_ring, lse_ring),
                 descs, (k_ring, v_ring, u_k_ring), barriers, schedule, work, CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [COMPUTING_REGISTERS, COPYING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, HELD_STAGES, BY_COPY)),
                (stream_keys, ((q_desc, do_desc, u_q_desc, o_desc), (q_ring, do_ring, u_q_ring, o_ring), dq_desc, descs,
                 rings, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HELD_STAGES, True)),
            ],
            [1],
            [COPYING_REGISTERS],
        )  # fmt: skip


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
    out: Tensor,
    *,
    tile: dict,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `row_pass.row_pass`, of a call that `able` takes."""
    grad_q, grad_do = out, torch.empty_like(do)
    by_copy = able(problem, (grad_q, grad_do))
    vectors = problem.row_vectors(4)
    lse = aligned_rows(lse) if tile["PAIR"] else lse.contiguous()
    tensors = {
        "q_desc": q, "do_desc": do, "u_q_desc": u_q, "o_desc": o, "dq_desc": dq,
        "k_desc": k, "v_desc": v, "u_k_desc": u_k, "u_v_desc": u_v,
        "grad_q_desc": grad_q if by_copy else q, "grad_do_desc": grad_do if by_copy else q,
        "lse_desc": lse, "vectors_desc": vectors, "lse_ptr": lse, "grad_q_ptr": grad_q, "grad_do_ptr": grad_do,
        "vectors_ptr": vectors, "padding": problem.side_tensors["padding"],
        "tickets_ptr": problem.tickets,
    }  # fmt: skip

    def prepare(tile: dict) -> tuple[int, dict]:
        block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
        num_heads = problem.batch * problem.heads
        streamed = 4 * problem.num_keys * problem.head_dim * q.element_size()
        descriptors = {
            f"{name}_desc": tile_descriptor(x, block_m)
            for name, x in (("q", q), ("do", do), ("u_q", u_q), ("o", o), ("dq", dq))
        }
        for name, x in (("k", k), ("v", v), ("u_k", u_k), ("u_v", u_v)):
            descriptors[f"{name}_desc"] = tile_descriptor(x, block_n)
        for name in ("grad_q_desc", "grad_do_desc"):
            descriptors[name] = tile_descriptor(tensors[name], block_m, RESULT_COLUMNS)
        if tile["PAIR"]:  # in pieces, for the place of V and U_V
            descriptors["o_desc"] = tile_descriptor(o, block_m, RESULT_COLUMNS)
            descriptors["v_desc"] = tile_descriptor(v, block_n // 2, RESULT_COLUMNS)
            descriptors["u_v_desc"] = tile_descriptor(u_v, block_n // 2, RESULT_COLUMNS)
            descriptors["lse_desc"] = rows_descriptor(lse, block_m)
            descriptors["vectors_desc"] = vectors_descriptor(vectors, block_m, 2)
        items = problem.padded_rows // block_m * num_heads
        order = {"num_heads": num_heads, "section": problem.section(streamed, num_heads)}
        programs = number_of_programs(problem, items, tile["PAIR"])
        return programs, descriptors | common_arguments(problem) | order | tile | {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "maxnreg": share_of_registers(tile["PAIR"]), "BY_COPY": by_copy,
        }  # fmt: skip

    launch(_row_pass, problem, tensors, prepare, tile, by_copy)
    return grad_q, grad_do, vectors
