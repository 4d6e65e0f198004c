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
    common_arguments,
    copies_read,
    copy_rows,
    exchange_places,
    init_barriers,
    keys_of_rows,
    load_lse,
    load_padding,
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
def _sum_over_rows(
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
    BY_COPY: gl.constexpr,
):
    """The computing warps of the column pass."""
    held, rings, vectors_ring, exchange, barriers, items, sizes, padding, scale, outputs = arguments
    k_ring, v_ring, u_k_ring, u_v_ring = held
    q_ring, do_ring, u_q_ring = rings
    MEMBERS, N_q, N_k, window = sizes
    (
        grad_k_ptr,
        grad_v_ptr,
        grad_k_strides,
        grad_v_strides,
        grad_k_desc,
        grad_v_desc,
        split_stride,
    ) = outputs
    dtype: gl.constexpr = q_ring.dtype
    GROUPS: gl.constexpr = 2 if PAIR else 1
    OTHER: gl.constexpr = 1 - ME
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    DIMS: gl.constexpr = BLOCK_D // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    GIVEN: gl.constexpr = 2 * STAGES + 2
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    HELD_STAGES: gl.constexpr = u_k_ring.shape[0]
    gl.static_assert(
        HELD_OPERANDS >= 2, "K and V are in registers: their places are free for the next item's"
    )
    held_free = barriers.index(2 * STAGES + 1)
    columns = ME * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_N, ROWS], gl.float32, SCORES)

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
        copies_read(BY_COPY)
        release(held_free)  # the next item's may come
        m0 = lo
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
                    valid = distance >= 0
                    if WINDOW:
                        valid = valid & (distance < window)
                    p = gl.where(valid, p, 0.0)
            if PADDING:
                p = gl.where(attended[:, None], p, 0.0)
            a = warpgroup_mma_wait(3, deps=[a])
            centered = a - _part(vectors.slice(1, 1), ME, PAIR, 1).load(SCORES)
            pc = (p * centered).to(dtype)
            if PAIR:  # the other has done with what it took of the tile before
                mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            _give(pc, mine[0], 0, PAIR)
            pc = gl.convert_layout(pc, OPERAND)
            k_sum = warpgroup_mma(pc, _part(my_u_q, ME, PAIR, 1), k_sum, is_async=True)  # dSᵀ U_Q
            f = warpgroup_mma_wait(2, deps=[f])
            h = f * scale - _part(vectors.slice(2, 1), ME, PAIR, 1).load(SCORES)  # h = F − α
            ph = (p * h).to(dtype)
            _give(ph, mine[0], 1, PAIR)
            ph = gl.convert_layout(ph, OPERAND)
            v_sum = warpgroup_mma(ph, _part(my_do, ME, PAIR, 1), v_sum, is_async=True)  # (P ⊙ h)ᵀ dO
            _given(barriers.index(GIVEN + 2 * ME), PAIR)
            c = warpgroup_mma_wait(2, deps=[c])
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
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            m0 = gl.where(m0 + BLOCK_M >= hi, lo, m0 + BLOCK_M)
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
        if PAIR and BY_COPY:
            mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
        if BY_COPY:
            places = (exchange[2 * ME], exchange[2 * ME + 1])
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
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 6, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers, 0, STAGES, 1)
    init_barriers(barriers, STAGES, 2 * STAGES, GROUPS)
    init_barriers(barriers, 2 * STAGES, 2 * STAGES + 1, 1)
    init_barriers(barriers, 2 * STAGES + 1, 2 * STAGES + 2, GROUPS)
    init_barriers(barriers, 2 * STAGES + 2, 2 * STAGES + 6, 1)  # what one warpgroup has given the other

    items = gl.allocate_shared_memory(gl.int32, [ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held_descs = (k_desc, v_desc, u_k_desc, u_v_desc)
    held = (k_ring, v_ring, u_k_ring, u_v_ring)
    descs = (q_desc, do_desc, u_q_desc)
    rings = (q_ring, do_ring, u_q_ring)
    work = (num_heads, section, H, GROUP, MEMBERS, N_q, N_k, window)
    sizes = (MEMBERS, N_q, N_k, window)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    outputs = (
        grad_k_ptr, grad_v_ptr, grad_k_strides, grad_v_strides, grad_k_desc, grad_v_desc, split_stride
    )  # fmt: skip
    arguments = (held, rings, vectors_ring, exchange, barriers, items, sizes, padding_row, scale, outputs)
    if PAIR:
        gl.warp_specialize(
            [
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, BY_COPY)),
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 1, BY_COPY)),
                (stream_rows, (held_descs, held, descs, rings, vectors_desc, vectors_ring, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [COMPUTING_REGISTERS, COPYING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_over_rows, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, BY_COPY)),
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
        }  # fmt: skip

    launch(_column_pass, problem, tensors, prepare, tile, by_copy)
    sums.finish()
    return out


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
    held, rings, exchange, sums, barriers, items, sizes, lse_ptr, padding, scale, outputs = arguments
    gl.static_assert(
        not PAIR or (HELD_OPERANDS < 2 and HELD_STAGES == 1), "a pair streams dO and U_Q from one stage"
    )
    q_ring, do_ring, u_q_ring, o_ring = held
    k_ring, v_ring, u_k_ring, u_v_ring = rings
    H, N_q, N_k, window = sizes
    grads, vectors_ptr, vector_stride, padded_rows = outputs
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
    dq_barrier, q_read = (
        barriers.index(2 * STAGES + 2 * HELD_STAGES),
        barriers.index(2 * STAGES + 2 * HELD_STAGES + 1),
    )
    GIVEN: gl.constexpr = 2 * STAGES + 2 * HELD_STAGES + 2
    keys = ME * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([BLOCK_M, KEYS], gl.float32, SCORES)

    r, stage, phase = 0 * N_q, 0 * N_q, 0 * N_q
    last, last_phase, turn = 0 * N_q - 1, 0 * N_q, 0 * N_q
    mbarrier.wait(barriers.index(2 * STAGES), 0)
    block = published(items, 0, 0)
    while block >= 0:
        copies_read(BY_COPY)
        held_stage = r % HELD_STAGES
        batch, head = published(items, held_stage, 1), published(items, held_stage, 2)
        batch_head = batch * H + head
        m0 = block * BLOCK_M
        lo, hi, full_begin, full_end = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        total = gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_N)
        rows = m0 + gl.arange(0, BLOCK_M, layout=ROWS)
        lse2 = load_lse(lse_ptr, batch_head, rows, N_q) * LOG2E
        if PADDING:
            padding_row = padding[0] + batch.to(gl.int64) * padding[1]

        q_smem = q_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        o_smem = o_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        do = do_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        u_q = u_q_ring.index(held_stage).reshape([BLOCK_M, BLOCK_D])
        q = q_smem.load(HELD)
        mbarrier.wait(barriers.index(stage), phase, pred=total > 0)
        first_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(
            q, _part(first_k, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False, is_async=True
        )
        do_tile = do.load(HELD)
        delta = gl.sum(do_tile.to(gl.float32) * o_smem.load(HELD).to(gl.float32), 1)
        delta = gl.convert_layout(delta, ROWS)  # D = <dO, O>
        if HELD_OPERANDS >= 2:
            do = do_tile
        if HELD_OPERANDS >= 3:
            u_q = u_q.load(HELD)
        release(q_read)

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
            v = v_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            u_k = u_k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            u_v = u_v_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            zero = _zero(stage, PAIR)
            mine = _places(exchange, ME, zero, PAIR)
            its = _places(exchange, OTHER, zero, PAIR)
            if PAIR:
                do = do_ring.index(zero).reshape([BLOCK_M, BLOCK_D])
                u_q = u_q_ring.index(zero).reshape([BLOCK_M, BLOCK_D])
            my_k, my_v = _part(k, ME, PAIR, 0), _part(v, ME, PAIR, 0)
            my_u_k, my_u_v = _part(u_k, ME, PAIR, 0), _part(u_v, ME, PAIR, 0)
            a = warpgroup_mma(do, my_v.permute([1, 0]), nothing, use_acc=False, is_async=True)  # dP
            f = warpgroup_mma(u_q, my_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
            f = warpgroup_mma(q, my_u_k.permute([1, 0]), f, is_async=True)
            c = warpgroup_mma(do, my_u_v.permute([1, 0]), nothing, use_acc=False, is_async=True)

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
            if PAIR:  # the other has done with what it took of the tile before
                mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
            pb = p.to(dtype)
            _give(pb, mine[0], 0, PAIR)
            pb = gl.convert_layout(pb, OPERAND)
            b = warpgroup_mma(pb, _part(my_k, ME, PAIR, 1), b, is_async=True)  # P K
            do_sum = warpgroup_mma(pb, _part(my_u_v, ME, PAIR, 1), do_sum, is_async=True)  # P U_V
            a = warpgroup_mma_wait(5, deps=[a])
            centered = a - delta[:, None]
            pc = (p * centered).to(dtype)
            _give(pc, mine[0], 1, PAIR)
            pc = gl.convert_layout(pc, OPERAND)
            omega = warpgroup_mma(pc, _part(my_u_k, ME, PAIR, 1), omega, is_async=True)  # dS U_K
            _given(barriers.index(GIVEN + 2 * ME), PAIR)
            f = warpgroup_mma_wait(4, deps=[f])
            f = f * scale  # F = τ (U_Q Kᵀ + Q U_Kᵀ)
            pf = p * f
            alpha += gl.sum(pf, 1)
            pf = pf.to(dtype)
            _give(pf, mine[1], 0, PAIR)
            pf = gl.convert_layout(pf, OPERAND)
            do_sum = warpgroup_mma(pf, _part(my_v, ME, PAIR, 1), do_sum, is_async=True)  # (P ⊙ F) V
            c = warpgroup_mma_wait(4, deps=[c])
            ps = p * (f * centered + c)  # P ⊙ P̃°
            e0 += gl.sum(ps, 1)
            ps = ps.to(dtype)
            _give(ps, mine[1], 1, PAIR)
            ps = gl.convert_layout(ps, OPERAND)
            omega = warpgroup_mma(ps, _part(my_k, ME, PAIR, 1), omega, is_async=True)  # (P ⊙ P̃°) K
            _given(barriers.index(GIVEN + 2 * ME + 1), PAIR)
            if PAIR:  # the other half of the tile
                its_k, its_v = _part(k, OTHER, PAIR, 0), _part(v, OTHER, PAIR, 0)
                its_u_k, its_u_v = _part(u_k, OTHER, PAIR, 0), _part(u_v, OTHER, PAIR, 0)
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
            phase = gl.where(stage == STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            # The next tile's first product runs in the shadow of this one's last.
            mbarrier.wait(barriers.index(stage), phase, pred=it + 1 < total)
            next_k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
            s = warpgroup_mma(
                q, _part(next_k, ME, PAIR, 0).permute([1, 0]), nothing, use_acc=False, is_async=True
            )
            b, do_sum, omega, s = warpgroup_mma_wait(0, deps=[b, do_sum, omega, s])
            mbarrier.arrive(barriers.index(used), count=1)

        mbarrier.wait(dq_barrier, r & 1)
        dq = _part(q_smem, ME, PAIR, 1).load(SUMS)
        o = _part(o_smem, ME, PAIR, 1).load(SUMS)
        release(barriers.index(HELD_BARRIERS + HELD_STAGES + held_stage))
        if PAIR:  # each has seen half of the keys
            mine_at, its_at = r % 2 * 4 + 2 * ME, r % 2 * 4 + 2 * OTHER
            sums.index(mine_at).store(alpha)
            sums.index(mine_at + 1).store(e0)
            mbarrier.arrive(barriers.index(GIVEN + 4 + ME), count=1)
            mbarrier.wait(barriers.index(GIVEN + 4 + OTHER), r & 1)
            alpha += sums.index(its_at).load(ROWS)
            e0 += sums.index(its_at + 1).load(ROWS)
        alpha_rows = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        e0_rows = gl.convert_layout(e0, gl.SliceLayout(1, SUMS))[:, None]
        grad_q = scale * (omega - e0_rows * b) - alpha_rows * dq.to(gl.float32)  # Q̃ = τ (Ω − E° B) − α dQ
        grad_do = do_sum - alpha_rows * o.to(gl.float32)  # dÕ = dÕ° − α O
        if PAIR and BY_COPY:
            mbarrier.wait(barriers.index(last), last_phase, pred=last >= 0)
        if BY_COPY:
            places = (exchange[2 * ME], exchange[2 * ME + 1])
            copy_rows((grad_q, grad_do), (grad_q_desc, grad_do_desc), places, batch, head, m0, ME * DIMS)
        else:
            write_rows(grad_q, grad_q_ptr, grad_q_strides, batch, head, m0, N_q, ME * DIMS, HEAD_DIM, SUMS)
            write_rows(grad_do, grad_do_ptr, grad_do_strides, batch, head, m0, N_q, ME * DIMS, HEAD_DIM, SUMS)
        if ME == 0:
            # Last, for fences wait for stores.
            vectors = vectors_ptr + batch_head.to(gl.int64) * padded_rows + rows
            stride = vector_stride.to(gl.int64)
            gl.store(vectors, lse2)
            gl.store(vectors + stride, delta)
            gl.store(vectors + 2 * stride, alpha)
            gl.store(vectors + 3 * stride, e0)  # α D + E = E°
        r += 1
        mbarrier.wait(barriers.index(HELD_BARRIERS + r % HELD_STAGES), r // HELD_STAGES & 1)
        block = published(items, r % HELD_STAGES, 0)
    copies_read(BY_COPY)


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
    HELD_STAGES: gl.constexpr = 1 if PAIR else 2
    q_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], do_desc.layout)
    u_q_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], u_q_desc.layout)
    o_ring = gl.allocate_shared_memory(dtype, [HELD_STAGES, 1, 1, BLOCK_M, BLOCK_D], o_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    u_k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], u_k_desc.layout)
    u_v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], u_v_desc.layout)
    exchange = (q_ring, q_ring)  # unused
    sums = q_ring
    if PAIR or BY_COPY:
        exchange = exchange_places(grad_q_desc, GROUPS)
    if PAIR:
        sums = gl.allocate_shared_memory(gl.float32, [8, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    FIRST: gl.constexpr = 2 * STAGES
    LAST: gl.constexpr = 2 * STAGES + 2 * HELD_STAGES + 2
    barriers = gl.allocate_shared_memory(gl.int64, [LAST + 6, 1], mbarrier.MBarrierLayout())
    init_barriers(barriers, 0, STAGES, 1)
    init_barriers(barriers, STAGES, FIRST, GROUPS)
    init_barriers(barriers, FIRST, FIRST + HELD_STAGES, 1)
    init_barriers(barriers, FIRST + HELD_STAGES, FIRST + 2 * HELD_STAGES, GROUPS)
    init_barriers(barriers, LAST - 2, LAST - 1, 1)
    init_barriers(barriers, LAST - 1, LAST, GROUPS)
    init_barriers(barriers, LAST, LAST + 6, 1)  # what one warpgroup has given the other

    items = gl.allocate_shared_memory(gl.int32, [HELD_STAGES * ITEM_SIZE, 1], mbarrier.MBarrierLayout())
    schedule = (tickets_ptr, items)
    held_descs = (q_desc, do_desc, u_q_desc, o_desc)
    held = (q_ring, do_ring, u_q_ring, o_ring)
    descs = (k_desc, v_desc, u_k_desc, u_v_desc)
    rings = (k_ring, v_ring, u_k_ring, u_v_ring)
    work = (padded_rows // BLOCK_M, num_heads, section, H, GROUP, N_q, N_k, window)
    sizes = (H, N_q, N_k, window)
    padding_row = (padding, padding_strides[0], padding_strides[1])
    grads = (grad_q_ptr, grad_do_ptr, grad_q_strides, grad_do_strides, grad_q_desc, grad_do_desc)
    outputs = (grads, vectors_ptr, vector_stride, padded_rows)
    arguments = (held, rings, exchange, sums, barriers, items, sizes, lse_ptr, padding_row, scale, outputs)
    if PAIR:
        gl.warp_specialize(
            [
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, HELD_STAGES, BY_COPY)),
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 1, HELD_STAGES, BY_COPY)),
                (stream_keys, (held_descs, held, dq_desc, descs, rings, barriers, schedule, work,
                 CAUSAL, WINDOW, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, HELD_STAGES, True)),
            ],
            [4, 1],
            [COMPUTING_REGISTERS, COPYING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_over_keys, (arguments, CAUSAL, WINDOW, PADDING, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                 HELD_OPERANDS, PAIR, 0, HELD_STAGES, BY_COPY)),
                (stream_keys, (held_descs, held, dq_desc, descs, rings, barriers, schedule, work,
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
    tensors = {
        "q_desc": q, "do_desc": do, "u_q_desc": u_q, "o_desc": o, "dq_desc": dq,
        "k_desc": k, "v_desc": v, "u_k_desc": u_k, "u_v_desc": u_v,
        "grad_q_desc": grad_q if by_copy else q, "grad_do_desc": grad_do if by_copy else q,
        "lse_ptr": lse.contiguous(), "grad_q_ptr": grad_q, "grad_do_ptr": grad_do,
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
        for name in ("grad_q_desc", "grad_do_desc"):
            descriptors[name] = tile_descriptor(tensors[name], block_m, RESULT_COLUMNS)
        for name, x in (("k", k), ("v", v), ("u_k", u_k), ("u_v", u_v)):
            descriptors[f"{name}_desc"] = tile_descriptor(x, block_n)
        items = problem.padded_rows // block_m * num_heads
        order = {"num_heads": num_heads, "section": problem.section(streamed, num_heads)}
        programs = number_of_programs(problem, items, tile["PAIR"])
        return programs, descriptors | common_arguments(problem) | order | tile | {
            "vector_stride": vectors.stride(0), "padded_rows": problem.padded_rows,
            "maxnreg": share_of_registers(tile["PAIR"]), "BY_COPY": by_copy,
        }  # fmt: skip

    launch(_row_pass, problem, tensors, prepare, tile, by_copy)
    return grad_q, grad_do, vectors
