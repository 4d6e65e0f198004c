"""What the kernels for Hopper share: which calls they take, tiles by TMA, the order of programs.

Runs with Gluon of triton 3.6; compiled for sm_90 with that of 3.9 too.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import Problem

# Their names in triton 3.9, and in 3.6.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def program_block(num_blocks, num_heads, section):
    """`common.program_block`."""
    pid = gl.program_id(0)
    first = pid // (section * num_blocks) * section
    size = gl.minimum(section, num_heads - first)
    rest = pid - first * num_blocks
    return rest // size, first + rest % size


@gluon.jit
def fetch(desc, batch, head, start, barrier, buffer, pred):
    async_load(desc, [batch, head, start, 0], barrier, buffer, pred=pred)


@gluon.jit
def fetch_vectors(desc, batch_head, start, barrier, buffer, pred):
    async_load(desc, [0, batch_head, start], barrier, buffer, pred=pred)


@gluon.jit
def load_padding(row, stride, keys, N_k):
    """Bool, like `keys`: a batch's row of the key padding mask (bytes), True = attend."""
    return gl.load(row + keys.to(gl.int64) * stride, keys < N_k, 0) != 0


@gluon.jit
def next_tile(start, head, first, end, BLOCK: gl.constexpr):
    """The tile after this one: the next BLOCK rows, or the first ones of the next head."""
    start += BLOCK
    wrap = start >= end
    return gl.where(wrap, first, start), gl.where(wrap, head + 1, head)


def group_splits(programs: int, group: int, device: torch.device) -> int:
    """Parts of a group of query heads, each summed by programs of its own: enough to fill the GPU twice, where there are
    few key heads. The parts are added up in a fixed order, so that results stay the same on every run."""
    enough = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return next((n for n in range(1, group + 1) if group % n == 0 and programs * n >= enough), group)


@gluon.jit
def tile_pointers(pointer, strides, batch, head, rows, dims):
    """Pointers to [rows, dims] of one head, in 64 bits."""
    pointer += batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    return pointer + rows.to(gl.int64)[:, None] * strides[2] + dims[None, :] * strides[3]


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
    }


def tile_descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of [B, H, N, d] in tiles of `block` rows. A dimension of size 1 has any stride."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape, x.stride())]
    shape = [1, 1, block, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], shape, _shared_layout(*shape, dtype=x.dtype))


@functools.cache
def _shared_layout(*shape: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)


def vectors_descriptor(vectors: Tensor, block: int) -> TensorDescriptor:
    """TMA's view of the row vectors [count, B·H, padded rows], all of `block` rows at a time."""
    shape = [vectors.shape[0], 1, block]
    layout = _shared_layout(*shape, dtype=torch.float32)
    return TensorDescriptor(vectors, list(vectors.shape), list(vectors.stride()), shape, layout)


def able(problem: Problem, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether these kernels take the call: bf16 or fp16, d of 64 or 128, no dropout, and TMA's alignment."""
    return (
        problem.dropout_seed is None
        and problem.dtype in (torch.bfloat16, torch.float16)
        and problem.head_dim in (64, 128)
        and all(x is not None and _aligned(x) for x in tensors)
    )


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and _aligned_strides(x.shape, x.stride())


@functools.cache
def _aligned_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for size, stride in zip(shape[:3], strides) if size > 1]
    return strides[3] == 1 and all(s > 0 and s % 8 == 0 for s in outer)
