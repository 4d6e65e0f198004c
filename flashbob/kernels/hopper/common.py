"""What the kernels for Hopper share: which calls they take, tiles by TMA, who works on which block.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import Problem, threshold, tma_strides, tma_takes
from ..common import philox as plain_philox
from ..launch import compiles_ahead

# Their names in triton 3.9, and in 3.6.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
philox = gluon.jit(plain_philox.fn)  # in Gluon's language
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOG2E = gl.constexpr(1.4426950408889634)
ITEM_SIZE = gl.constexpr(4)  # numbers that tell an item
COPYING_REGISTERS = gl.constexpr(24)  # of the copying warp; the others get what it leaves
COMPUTING_REGISTERS = gl.constexpr(240)  # of each warpgroup where two share a block
RESULT_COLUMNS = gl.constexpr(64)  # of a result that a warpgroup holds


@gluon.jit
def init_barriers(barriers, first: gl.constexpr, end: gl.constexpr, count: gl.constexpr):
    """Those from `first` to before `end`; each waits for `count` arrivals, one of each warpgroup that has a say."""
    for i in gl.static_range(first, end):
        mbarrier.init(barriers.index(i), count=count)


@gluon.jit
def draw(tickets_ptr, num_items):
    """An item that no program has begun. Every program begins with the item of its own number; after it whoever is free takes
    the next; within a section the longest are first. Each program draws once for each item it begins; the last draw sets
    the count back.

    The copying warp waits for the answer, about a microsecond: so it asks when it has ordered all tiles of its item.
    """
    ticket = gl.atomic_add(tickets_ptr, 1, sem="relaxed")
    gl.store(tickets_ptr, 0, ticket == num_items - 1)
    return gl.num_programs(0) + ticket


@gluon.jit
def publish(values, items, stage):
    """The copying warp tells the computing ones about the next item, before it arrives at the barrier that they wait for: so they
    need not divide. A first value below zero: there is none.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(len(values)):
        items.index(stage * ITEM_SIZE + i).store(gl.full([1], values[i], gl.int32, ONE))
    thread_barrier()


@gluon.jit
def published(items, stage, i: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    value = gl.max(items.index(stage * ITEM_SIZE + i).load(ONE), 0)
    # The same for all threads, which lets compilers use uniform registers.
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], gl.int32, True, 1
    )


@gluon.jit
def item_block(item, num_blocks, num_heads, section):
    """(block, head) of an item: `common.program_block`."""
    first = item // (section * num_blocks) * section
    size = gl.minimum(section, num_heads - first)
    rest = item - first * num_blocks
    return rest // size, first + rest % size


@gluon.jit
def row_block(item, num_blocks, num_heads, section, H, GROUP, CAUSAL: gl.constexpr):
    """((block of rows, batch, head), key head) of an item."""
    block, batch_head = item_block(item, num_blocks, num_heads, section)
    if CAUSAL:
        block = num_blocks - 1 - block  # the last rows see most keys: first
    head = batch_head % H
    return (block, batch_head // H, head), head // GROUP


@gluon.jit
def keys_of_rows(
    m0,
    N_q,
    N_k,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """(first and last key that rows from m0 on need, first and last tile start that needs no mask)."""
    lo = 0 * N_k
    hi = N_k
    full_begin = lo
    full_end = N_k - BLOCK_N
    if CAUSAL:
        hi = gl.maximum(gl.minimum(m0 + BLOCK_M, N_q) + (N_k - N_q), 0)
        full_end = gl.minimum(full_end, m0 + (N_k - N_q) + 1 - BLOCK_N)
        if WINDOW:
            lo = gl.maximum(m0 + (N_k - N_q) - window + 1, 0) // BLOCK_N * BLOCK_N
            full_begin = m0 + BLOCK_M + (N_k - N_q) - window
    hi = gl.where(m0 < N_q, hi, 0)
    return lo, hi, full_begin, full_end


@gluon.jit
def key_block(item, num_heads, section, H, GROUP, MEMBERS, N_k, BLOCK_N: gl.constexpr):
    """((first key, batch, key head, part), the part's first query head) of an item.

    A "head" of the grid is a key head and MEMBERS of its group's query heads: all of them, or one part of several.
    """
    block, part = item_block(item, gl.cdiv(N_k, BLOCK_N), num_heads, section)
    splits = GROUP // MEMBERS
    batch_kv_head, split = part // splits, part % splits
    kv_heads = H // GROUP
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    return (block * BLOCK_N, batch, kv_head, split), kv_head * GROUP + split * MEMBERS


@gluon.jit
def rows_of_keys(
    n0,
    N_q,
    N_k,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """(first and last row that see keys from n0 on, first and last row that see all of the block)."""
    lo = 0 * N_q
    full_begin = lo
    hi = N_q
    full_end = N_q
    if CAUSAL:
        shift = N_k - N_q
        lo = gl.maximum(n0 - shift, 0) // BLOCK_M * BLOCK_M
        full_begin = n0 + BLOCK_N - 1 - shift
        if WINDOW:
            full_end = n0 - shift + window
            hi = gl.maximum(gl.minimum(N_q, gl.minimum(n0 + BLOCK_N, N_k) - 1 - shift + window), 0)
    return lo, hi, full_begin, full_end


@gluon.jit
def sees(distance, window, WINDOW: gl.constexpr):
    """Whether a row sees a key that is `distance` before its last one."""
    if WINDOW:
        return distance.to(gl.uint32, bitcast=True) < window.to(gl.uint32, bitcast=True)
    else:
        return distance >= 0


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring, and the phase of its barriers."""
    return gl.where(stage == STAGES - 1, 0, stage + 1), gl.where(stage == STAGES - 1, phase ^ 1, phase)


@gluon.jit
def fetch(desc, batch, head, start, barrier, buffer):
    async_load(desc, [batch, head, start, 0], barrier, buffer)


@gluon.jit
def stream_keys(
    held_descs,
    held,
    late_desc,
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
    HELD_STAGES: gl.constexpr,
    LATE: gl.constexpr,
):
    """The copying warp of programs that hold blocks of rows: `held` once an item, then the tiles of its keys.

    Barrier i says that tile i has come, STAGES + i that all warpgroups have used it up; then, for each of HELD_STAGES, that the
    rows have come and what is published of them (or that there are no more), and that they are used up. With LATE two more: that
    the rows of `late_desc` have come, in the place of the first of `held`, and that these have been read.
    """
    gl.static_assert(STAGES > 1, "a tile is released after the next one has come")
    tickets_ptr, items = schedule
    num_blocks, num_heads, section, H, GROUP, N_q, N_k, window = work
    ROWS_BYTES: gl.constexpr = BLOCK_M * BLOCK_D * 2
    HELD: gl.constexpr = 2 * STAGES
    slot, phase = 0 * N_q, 0 * N_q + 1  # the phase before a barrier's first counts as complete
    r = 0 * N_q
    num_items = num_blocks * num_heads
    item = gl.program_id(0)
    while item < num_items:
        place, kv_head = row_block(item, num_blocks, num_heads, section, H, GROUP, CAUSAL)
        block, batch, head = place
        m0 = block * BLOCK_M
        lo, hi, _, _ = keys_of_rows(m0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        held_stage = r % HELD_STAGES
        have = barriers.index(HELD + held_stage)
        mbarrier.wait(barriers.index(HELD + HELD_STAGES + held_stage), (r // HELD_STAGES & 1) ^ 1)
        publish(place, items, held_stage)
        mbarrier.expect(have, len(held) * ROWS_BYTES)
        for i in gl.static_range(len(held)):
            fetch(held_descs[i], batch, head, m0, have, held[i].index(held_stage))
        for n0 in range(lo, hi, BLOCK_N):
            mbarrier.wait(barriers.index(STAGES + slot), phase)
            here = barriers.index(slot)
            mbarrier.expect(here, len(rings) * BLOCK_N * BLOCK_D * 2)
            for i in gl.static_range(len(rings)):
                fetch(descs[i], batch, kv_head, n0, here, rings[i].index(slot))
            slot, phase = next_stage(slot, phase, STAGES)
        if LATE:
            late = barriers.index(HELD + 2 * HELD_STAGES)
            mbarrier.wait(barriers.index(HELD + 2 * HELD_STAGES + 1), r & 1)
            mbarrier.expect(late, ROWS_BYTES)
            fetch(late_desc, batch, head, m0, late, held[0].index(held_stage))
        item = draw(tickets_ptr, num_items)
        r += 1
    last = r % HELD_STAGES
    mbarrier.wait(barriers.index(HELD + HELD_STAGES + last), (r // HELD_STAGES & 1) ^ 1)
    publish((-1,), items, last)
    mbarrier.arrive(barriers.index(HELD + last), count=1)


@gluon.jit
def stream_rows(
    held_descs,
    held,
    descs,
    rings,
    vectors_desc,
    vectors_ring,
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
    """The copying warp of programs that hold blocks of keys: `held` once an item, then the tiles of its rows.

    Barriers as in `stream_keys`, with one for all of `held`: it says that what has one stage is in registers, and what has two
    may come into the one that the item before used.
    """
    gl.static_assert(STAGES > 1, "a tile is released after the next one has come")
    tickets_ptr, items = schedule
    num_heads, section, H, GROUP, MEMBERS, N_q, N_k, window = work
    TILE_BYTES: gl.constexpr = len(rings) * BLOCK_M * BLOCK_D * 2 + vectors_ring.shape[1] * BLOCK_M * 4
    have, used = barriers.index(2 * STAGES), barriers.index(2 * STAGES + 1)
    slot, phase = 0 * N_q, 0 * N_q + 1
    r = 0 * N_q
    num_items = gl.cdiv(N_k, BLOCK_N) * num_heads
    item = gl.program_id(0)
    while item < num_items:
        place, head = key_block(item, num_heads, section, H, GROUP, MEMBERS, N_k, BLOCK_N)
        n0, batch, kv_head, _ = place
        lo, hi, _, _ = rows_of_keys(n0, N_q, N_k, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        mbarrier.wait(used, (r & 1) ^ 1)
        publish(place, items, 0)
        mbarrier.expect(have, len(held) * BLOCK_N * BLOCK_D * 2)
        for i in gl.static_range(len(held)):
            fetch(held_descs[i], batch, kv_head, n0, have, held[i].index(r % held[i].shape[0]))
        m0 = lo
        for _ in range(gl.cdiv(gl.maximum(hi - lo, 0), BLOCK_M) * MEMBERS):
            mbarrier.wait(barriers.index(STAGES + slot), phase)
            here = barriers.index(slot)
            mbarrier.expect(here, TILE_BYTES)
            for i in gl.static_range(len(rings)):
                fetch(descs[i], batch, head, m0, here, rings[i].index(slot))
            async_load(vectors_desc, [0, batch * H + head, m0], here, vectors_ring.index(slot))
            m0, head = next_tile(m0, head, lo, hi, BLOCK_M)
            slot, phase = next_stage(slot, phase, STAGES)
        item = draw(tickets_ptr, num_items)
        r += 1
    mbarrier.wait(used, (r & 1) ^ 1)
    publish((-1,), items, 0)
    mbarrier.arrive(have, count=1)


@gluon.jit
def release(barrier):
    """What these warps have read from shared memory may be overwritten by copies. Loads that wait behind the stores of an item's
    end are overtaken by the barriers alone: the fence waits for them."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def rows_of(
    pointer,
    strides,
    batch,
    head,
    first,
    end,
    shape: gl.constexpr,
    first_dim: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Pointers, in 64 bits, to the rows of one head from `first` on, and which of them exist: below `end` and HEAD_DIM."""
    rows = first + gl.arange(0, shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dims = first_dim + gl.arange(0, shape[1], layout=gl.SliceLayout(0, LAYOUT))
    exists = (rows < end)[:, None]
    if first_dim + shape[1] > HEAD_DIM:
        exists = exists & (dims < HEAD_DIM)[None, :]
    pointer += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    return pointer + rows.to(gl.int64)[:, None] * strides[2] + dims[None, :] * strides[3], exists


@gluon.jit
def add_rows(tile, pointer, strides, batch, head, first, end, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """The fp32 tile plus the rows of a tensor that it stands for."""
    pointers, exists = rows_of(pointer, strides, batch, head, first, end, tile.shape, 0, HEAD_DIM, LAYOUT)
    return tile + gl.load(pointers, exists, 0.0).to(gl.float32)


@gluon.jit
def write_rows(
    tile,
    pointer,
    strides,
    batch,
    head,
    first,
    end,
    first_dim: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Write the rows [first, end) of an output that a tile holds."""
    pointers, exists = rows_of(
        pointer, strides, batch, head, first, end, tile.shape, first_dim, HEAD_DIM, LAYOUT
    )
    gl.store(pointers, tile.to(pointer.dtype.element_ty), exists)


@gluon.jit
def exchange_places(desc, GROUPS: gl.constexpr):
    """Two places in shared memory for each of GROUPS warpgroups, [1, *tile of the descriptor]: for what it gives another one
    while it computes, and for its results, which are copied from there."""
    shape: gl.constexpr = [1, 1, 1, desc.block_type.shape[2], desc.block_type.shape[3]]
    a = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    b = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    if GROUPS == 2:
        c = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        d = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        return (a, b, c, d)
    else:
        return (a, b)


@gluon.jit
def place_rows(tiles, places):
    """Store two tiles of results in two places in shared memory."""
    for i in gl.static_range(2):
        places[i].index(0).reshape(tiles[i].shape).store(tiles[i].to(places[i].dtype))


@gluon.jit
def hand_over(place, results, barriers, PLACED: gl.constexpr, ME: gl.constexpr):
    """The results of warpgroup ME lie in their places in shared memory: its sending warp may order copies of them to the rows and
    head that `place` tells. A first number below zero: there are no more."""
    fence_async_shared()
    publish(place, results, ME)
    mbarrier.arrive(barriers.index(PLACED + ME), count=1)


@gluon.jit
def copy_rows(tiles, descs, places, batch, head, first, first_dim: gl.constexpr):
    """Write the rows from `first` on, and the columns from `first_dim` on, of two outputs, which two tiles hold, by way of two
    places in shared memory: they are free for other things after `copies_read` only."""
    place_rows(tiles, places)
    fence_async_shared()
    thread_barrier()
    for i in gl.static_range(2):
        async_store(descs[i], [batch, head, first, first_dim], places[i].index(0))


@gluon.jit
def copies_read(BY_COPY: gl.constexpr):
    """Wait until the copies of `copy_rows` have read what they write."""
    if BY_COPY:
        tma.store_wait(0)
        thread_barrier()


@gluon.jit
def load_lse(lse_ptr, batch_head, rows, N_q):
    """L of rows; +inf beyond the last: P is 0 there."""
    return gl.load(lse_ptr + batch_head.to(gl.int64) * N_q + rows, rows < N_q, float("inf"))


@gluon.jit
def load_padding(row, stride, keys, N_k):
    """Bool, like `keys`: a batch's row of the key padding mask (bytes), True = attend."""
    return gl.load(row + keys.to(gl.int64) * stride, keys < N_k, 0) != 0


@gluon.constexpr_function
def _quads_layout(columns, transposed):
    """Layout of Philox' calls, each for four neighbouring keys, of a tile of 64 × `columns` scores."""
    wider = [1 << bit for bit in range(5, columns.bit_length() - 1)]
    if transposed:
        registers = [[0, 8], [0, 16], *([0, x] for x in wider)]
        lanes, warps, shape = [[0, 2], [0, 4], [0, 1], [2, 0], [1, 0]], [[4, 0], [8, 0]], [16, columns]
    else:
        registers = [[0, 2], [0, 4], *([0, x // 4] for x in wider)]
        lanes, warps, shape = [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [64, columns // 4]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def _halfway_layout(columns):
    """One exchange between lanes away from both a transposed tile of quads and a product's result."""
    wider = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    registers, lanes = [[0, 1], [2, 0], [0, 8], [0, 16], *wider], [[0, 2], [0, 4], [1, 0], [8, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def keep_mask(
    dice, batch_head, m0, n0, COLUMNS: gl.constexpr, SCORES: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """The bits of `flashbob.masking.dropout_keep_mask` for a tile of 64 × COLUMNS scores (32 or more) in the layout of a
    product's result, of rows from m0 and keys from n0 on; [keys, rows] if TRANSPOSED. `dice` are seed, offset and threshold.

    Each thread makes the words of four neighbouring keys, as Philox gives them, none of them twice, and gets some of
    its scores' bits from its neighbours: one exchange between lanes, two if TRANSPOSED (both at once would take shared memory).
    """
    seed, offset, threshold = dice
    QUADS: gl.constexpr = _quads_layout(COLUMNS, TRANSPOSED)
    if TRANSPOSED:
        quads = n0 // 4 + gl.arange(0, 16, layout=gl.SliceLayout(1, QUADS))[:, None]
        rows = m0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, QUADS))[None, :]
    else:
        quads = n0 // 4 + gl.arange(0, COLUMNS // 4, layout=gl.SliceLayout(0, QUADS))[None, :]
        rows = m0 + gl.arange(0, 64, layout=gl.SliceLayout(1, QUADS))[:, None]
    counters = (quads.to(gl.uint32), rows.to(gl.uint32), batch_head.to(gl.uint32), offset.to(gl.uint32))
    w0, w1, w2, w3 = philox(seed, *counters)
    limit = threshold.to(gl.uint32)
    k0, k1 = (w0 >= limit).to(gl.int32), (w1 >= limit).to(gl.int32)
    k2, k3 = (w2 >= limit).to(gl.int32), (w3 >= limit).to(gl.int32)
    # Index (a, b) of the joined dimensions holds word 2a + b.
    keep = gl.join(gl.join(k0, k2), gl.join(k1, k3))
    if TRANSPOSED:
        keep = gl.reshape(gl.permute(keep, [0, 2, 3, 1]), [64, COLUMNS])
        keep = gl.convert_layout(keep, _halfway_layout(COLUMNS))
    else:
        keep = gl.reshape(keep, [64, COLUMNS])
    return gl.convert_layout(keep, SCORES) != 0


@gluon.jit
def next_tile(start, head, first, end, BLOCK: gl.constexpr):
    """The tile after this one: the next BLOCK rows, or the first ones of the next head."""
    start += BLOCK
    wrap = start >= end
    return gl.where(wrap, first, start), gl.where(wrap, head + 1, head)


class KeySums:
    """Where programs of key blocks write two sums over rows, whose results are given.

    Where there are few key heads a group's query heads are shared out over programs, enough to fill the GPU twice; their
    parts are fp32 and added up in a fixed order, so that results stay the same on every run.
    """

    def __init__(self, problem: Problem, results: tuple[Tensor, Tensor], block_n: int) -> None:
        group, heads = problem.heads // problem.kv_heads, problem.batch * problem.kv_heads
        blocks = triton.cdiv(problem.num_keys, block_n)
        splits = number_of_parts(blocks * heads, group, problem.device)
        self.results = results
        self.members = group // splits  # query heads of a part
        self.num_heads = heads * splits  # of the grid
        self.items = blocks * self.num_heads
        self.written: tuple[Tensor, Tensor] = self.results
        self.split_stride = 0
        if splits > 1:
            shape, device = (2, splits, *results[0].shape), problem.device
            k_parts, v_parts = torch.empty(shape, dtype=torch.float32, device=device)
            self.written, self.split_stride = (k_parts, v_parts), k_parts.stride(0)

    def arguments(self, problem: Problem, streamed: int) -> dict:
        """Arguments of the launch; `streamed` are the bytes of a row of a head that its programs stream."""
        section = problem.section(streamed * self.members * problem.num_rows, self.num_heads)
        return {
            "split_stride": self.split_stride,
            "MEMBERS": self.members,
            "num_heads": self.num_heads,
            "section": section,
        }

    def finish(self) -> None:
        if self.written is not self.results and not compiles_ahead():
            for result, parts in zip(self.results, self.written):
                result.copy_(parts.sum(0))


def number_of_parts(programs: int, group: int, device: torch.device) -> int:
    enough = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return next((n for n in range(1, group + 1) if group % n == 0 and programs * n >= enough), group)


def number_of_programs(problem: Problem, items: int, pair: bool) -> int:
    """As many as run at once: one that two warpgroups share on a multiprocessor, or two of one. They go from item to item."""
    return min(
        items, torch.cuda.get_device_properties(problem.device).multi_processor_count * (1 if pair else 2)
    )


def share_of_registers(pair: bool) -> int:
    """Registers a thread when the kernel starts, with the four warps among which the copying one is: for as many programs on a
    multiprocessor as `number_of_programs` counts. The copying warp then hands most of its share over."""
    return 168 if pair else 128


def common_arguments(problem: Problem) -> dict:
    """Arguments that every kernel takes."""
    mask = problem.key_padding_mask
    return {
        "padding_strides": (0, 0) if mask is None else mask.stride(),
        "PADDING": mask is not None,
        "scale": problem.scale,
        "window": problem.window_size or 0,
        "H": problem.heads,
        "GROUP": problem.heads // problem.kv_heads,
        "N_q": problem.num_rows,
        "N_k": problem.num_keys,
        "CAUSAL": problem.is_causal,
        "WINDOW": problem.window_size is not None,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": _block_d(problem.head_dim),
    }


def dropout_arguments(problem: Problem) -> dict:
    """Arguments of the kernels that know dropout, beside the seed."""
    return {
        "DROPOUT": problem.dropout_seed is not None,
        "threshold": threshold(problem.dropout_p),
        "keep_scale": 1.0 / (1.0 - problem.dropout_p),
    }


def _block_d(head_dim: int) -> int:
    return max(32, triton.next_power_of_2(head_dim))


def tile_descriptor(x: Tensor, block: int, columns: int | None = None) -> TensorDescriptor:
    """TMA's view of [B, H, N, d] in tiles of `block` rows and as many columns (default: all); those beyond d are read as 0."""
    width = _block_d(x.shape[3])
    shape = [1, 1, block, min(width, int(columns or width))]
    return TensorDescriptor(x, list(x.shape), tma_strides(x), shape, _shared_layout(*shape, dtype=x.dtype))


@functools.cache
def _shared_layout(*shape: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)


def vectors_descriptor(vectors: Tensor, block: int, count: int | None = None) -> TensorDescriptor:
    """TMA's view of the row vectors [4, B·H, padded rows], `count` of them (default: all) and `block` rows at a time."""
    shape = [count or vectors.shape[0], 1, block]
    layout = _shared_layout(*shape, dtype=torch.float32)
    return TensorDescriptor(vectors, list(vectors.shape), list(vectors.stride()), shape, layout)


def rows_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of numbers of rows [B·H, rows], `block` rows at a time."""
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), [1, block], _shared_layout(1, block, dtype=x.dtype)
    )


def aligned_rows(x: Tensor) -> Tensor:
    """[B, H, rows] as [B·H, rows], of strides that TMA takes: a multiple of four numbers for fp32."""
    x = x.flatten(0, 1)
    if x.shape[1] % 4:
        return torch.nn.functional.pad(x, (0, -x.shape[1] % 4))
    return (
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )


def able(problem: Problem, tensors: tuple[Tensor | None, ...], *, dropout: bool = True) -> bool:
    """Whether these kernels take the call: bf16 or fp16, d from 17 to 128, and TMA's alignment; with `dropout` such calls too."""
    return (
        (problem.dropout_seed is None or dropout)
        and problem.dtype in (torch.bfloat16, torch.float16)
        and 16 < problem.head_dim <= 128
        and all(x is not None and tma_takes(x) for x in tensors)
    )
