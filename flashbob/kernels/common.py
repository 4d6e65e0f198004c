"""What the kernels share: loop bounds, masks, tile loads, dropout bits; on the host, a kernel's arguments.

Names in the kernels: M counts rows (queries), N counts keys, D the head dimension. A *row block* is BLOCK_M
rows of one query head, a *key block* BLOCK_N keys of one key-value head. BLOCK_D is the head dimension
rounded up to a power of two; the columns beyond HEAD_DIM are read as 0.
"""

# Triton's annotations are for its compiler: a literal is a constexpr, and a launch takes more than its names.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# --- work distribution --------------------------------------------------------------------------------------


@triton.jit
def program_block(num_blocks, num_heads, section):
    """(block, head) of this program, out of num_blocks x num_heads.

    `section` heads at a time: their streamed tensors share the L2 cache. Within a section, block 0 of every
    head starts before block 1 of any, so that the caller can put the blocks with most work first.
    """
    pid = tl.program_id(0)
    first = pid // (section * num_blocks) * section
    size = tl.minimum(section, num_heads - first)
    rest = pid - first * num_blocks
    return rest // size, first + rest % size


@triton.jit
def key_range(
    m0,
    N_q,
    N_k,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Keys that the row block starting at m0 sees, as (lo, a, b, hi).

    Tiles of [a, b) need no mask; those of [lo, a) and [b, hi) are crossed by the window's edge, the diagonal
    or the end of the keys. lo, a and b are multiples of BLOCK_N.
    """
    lo = 0 * N_k
    hi = N_k
    full_end = N_k // BLOCK_N * BLOCK_N
    if CAUSAL:
        shift = N_k - N_q
        # Row i sees keys up to i + shift; the clamps keep // away from negative numbers.
        hi = tl.maximum(tl.minimum(m0 + BLOCK_M, N_q) + shift, 0)
        full_end = tl.maximum(tl.minimum(m0 + shift + 1, N_k), 0) // BLOCK_N * BLOCK_N
    # A block beyond the last row, there to fill the padding of the row vectors, sees nothing.
    hi = tl.where(m0 < N_q, hi, 0)
    full_end = tl.minimum(full_end, hi)
    a = lo
    b = full_end
    if WINDOW:
        shift = N_k - N_q
        lo = tl.maximum(m0 + shift - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = (tl.maximum(m0 + BLOCK_M + shift - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        a = tl.where(full_begin < full_end, full_begin, lo)
        b = tl.where(full_begin < full_end, full_end, lo)
    return lo, a, b, hi


@triton.jit
def row_range(
    n0,
    N_q,
    N_k,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Rows that see the key block starting at n0, as (lo, a, b, hi): the transpose of `key_range`."""
    lo = 0 * N_q
    hi = N_q
    full_begin = 0 * N_q
    full_end = N_q // BLOCK_M * BLOCK_M
    if CAUSAL:
        shift = N_k - N_q
        # Key j is seen by rows from j - shift on.
        lo = tl.maximum(n0 - shift, 0) // BLOCK_M * BLOCK_M
        full_begin = (tl.maximum(n0 + BLOCK_N - 1 - shift, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if WINDOW:
        shift = N_k - N_q
        hi = tl.minimum(N_q, tl.maximum(tl.minimum(n0 + BLOCK_N, N_k) - 1 - shift + window, 0))
        full_end = tl.minimum(full_end, tl.maximum(n0 - shift + window, 0) // BLOCK_M * BLOCK_M)
    a = tl.where(full_begin < full_end, full_begin, lo)
    b = tl.where(full_begin < full_end, full_end, lo)
    return lo, a, b, hi


@triton.jit
def visible(rows, keys, N_q, N_k, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys which rows see, for index tiles that broadcast together in either order."""
    valid = keys < N_k
    if CAUSAL:
        distance = rows + (N_k - N_q) - keys
        valid = valid & (distance >= 0)
        if WINDOW:
            valid = valid & (distance < window)
    return valid


# --- memory -------------------------------------------------------------------------------------------------


@triton.jit
def head_pointer(pointer, strides, batch, head):
    """Start of one head; in 64 bits, for B·H·N·d passes 2³¹ at B=4, H=12, N=2¹⁸, d=256."""
    return pointer + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def streamed_head(x, strides, batch, head, TMA: tl.constexpr):
    """What `load_tile` takes of a head whose tiles are streamed: its start, or with TMA the descriptor and which head."""
    if TMA:
        return x, batch, head
    else:
        return head_pointer(x, strides, batch, head)


@triton.jit
def tile_offsets(strides, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Offsets inside a [BLOCK, BLOCK_D] tile; 32 bits unless WIDE, which costs registers."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows * strides[2] + columns * strides[3]


@triton.jit
def load_tile(
    pointer,
    strides,
    offsets,
    start,
    end,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr = False,
):
    """BLOCK rows from `start` on of one head. With RAGGED those from `end` on, which may not exist, are 0.

    `pointer` is the head's start, or with TMA as `streamed_head` gives it: neither addresses nor masks take registers then.
    """
    if TMA:
        descriptor, batch, head = pointer
        return tl.reshape(descriptor.load([batch, head, start, 0]), (BLOCK, BLOCK_D))
    elif RAGGED:
        pointers = pointer + tl.cast(start, tl.int64) * strides[2] + offsets
        mask = (start + tl.arange(0, BLOCK) < end)[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        pointers = pointer + tl.cast(start, tl.int64) * strides[2] + offsets
        if BLOCK_D != HEAD_DIM:
            return tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(
    pointer,
    strides,
    tile,
    start,
    end,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the tile's existing rows (below `end`) and columns, rounded to the output's type."""
    offsets = tile_offsets(strides, BLOCK, BLOCK_D, WIDE)
    mask = (start + tl.arange(0, BLOCK) < end)[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    pointers = pointer + tl.cast(start, tl.int64) * strides[2] + offsets
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_padding(pointer, strides, batch, start, N_k, BLOCK_N: tl.constexpr):
    """Bool [BLOCK_N] of the key padding mask (bytes): True = attend."""
    keys = start + tl.arange(0, BLOCK_N)
    pointers = pointer + tl.cast(batch, tl.int64) * strides[0] + tl.cast(keys, tl.int64) * strides[1]
    return tl.load(pointers, mask=keys < N_k, other=0) != 0


# --- sums ---------------------------------------------------------------------------------------------------


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr):
    """a b + total, for a sum that runs over a whole sequence.

    In fp32 every term's addition to the total rounds like the total: a tile is summed up before it is added, which is one
    rounding of the total's size a tile. Tensor cores, for the narrow types, sum a tile's terms inside.
    """
    if a.dtype == tl.float32:
        # Any limit on imprecise additions has this meaning, and fp32 products ignore it otherwise; without one Triton
        # rewrites the addition into a product that starts from the total.
        return total + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


# --- dropout ------------------------------------------------------------------------------------------------


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """The words (uint32) of `tl.philox`, Philox-4x32-10, from counters of uint32.

    A round's two products are taken with all of their 64 bits, an instruction each; `tl.philox` takes two for each, of which
    the one for the high words is slow.
    """
    seed = seed.to(tl.uint64)
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):  # pyright: ignore[reportGeneralTypeIssues]
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (b & 0xFFFFFFFF).to(tl.uint32)
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, (a & 0xFFFFFFFF).to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keep_mask(
    seed,
    offset,
    threshold,
    batch_head,
    m0,
    n0,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """The bits of `flashbob.masking.dropout_keep_mask` for one tile, [BLOCK_M, BLOCK_N] or transposed.

    One Philox call gives the words of four neighbouring keys, so the calls form a tile BLOCK_N / 4 wide,
    which two joins widen: index (a, b) of the joined dimensions holds word 2a + b.
    """
    quads = (n0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)
    rows = (m0 + tl.arange(0, BLOCK_M)).to(tl.uint32)
    head = tl.cast(batch_head, tl.uint32)
    counter3 = offset.to(tl.uint32)  # the low word
    if TRANSPOSED:
        w0, w1, w2, w3 = philox(seed, quads[:, None], rows[None, :], head, counter3)
    else:
        w0, w1, w2, w3 = philox(seed, quads[None, :], rows[:, None], head, counter3)
    limit = tl.cast(threshold, tl.uint32)
    # Bytes, so that the tile's way to the layout of the scores moves a quarter of the words' bits.
    k0, k1 = (w0 >= limit).to(tl.int8), (w1 >= limit).to(tl.int8)
    k2, k3 = (w2 >= limit).to(tl.int8), (w3 >= limit).to(tl.int8)
    keep = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    if TRANSPOSED:
        keep = tl.reshape(tl.permute(keep, (0, 2, 3, 1)), (BLOCK_N, BLOCK_M))
    else:
        keep = tl.reshape(keep, (BLOCK_M, BLOCK_N))
    return keep != 0


# --- host ---------------------------------------------------------------------------------------------------

# Under TRITON_INTERPRET=1 `triton.jit` gives something else than a JITFunction, and kernels run on CPU
# tensors. The variable is read when a function is decorated: Triton's own when triton is imported, ours when
# this module is.
INTERPRETED = not isinstance(keep_mask, triton.runtime.JITFunction)

# The row vectors that one kernel hands to the next are padded to a multiple of this, and the padding is
# written (L = +inf, so that P is 0 there): the reader then needs no mask. Every BLOCK_M divides it.
ROW_PADDING = 128
_MAX_BLOCK = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """One attention call as the kernels see it."""

    batch: int
    heads: int
    kv_heads: int
    num_rows: int
    num_keys: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    is_causal: bool
    window_size: int | None
    key_padding_mask: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        is_causal: bool = False,
        window_size: int | None = None,
        key_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Tensor | None = None,
    ) -> "Problem":
        check_device(q.device)
        if q.dtype not in _DTYPES:
            raise TypeError(f"q is {q.dtype}; the triton backend takes {', '.join(map(str, _DTYPES))}")
        batch, heads, num_rows, head_dim = q.shape
        if window_size is not None and window_size >= k.shape[2]:
            window_size = None  # the last row sees all keys, and no other row sees more
        if dropout_p == 0.0:
            dropout_seed = None
        return cls(
            batch=batch,
            heads=heads,
            kv_heads=k.shape[1],
            num_rows=num_rows,
            num_keys=k.shape[2],
            head_dim=head_dim,
            dtype=q.dtype,
            device=q.device,
            scale=scale,
            is_causal=is_causal,
            window_size=window_size,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
        )

    @property
    def one_sum(self) -> bool:
        """Whether kernels are launched once for each fp32 sum of the head dimension's width: two do not fit into registers.

        Not in fp32, whose products are no matter of registers.
        """
        return self.head_dim > 128 and self.dtype.itemsize == 2

    @property
    def padded_rows(self) -> int:
        return triton.cdiv(self.num_rows, ROW_PADDING) * ROW_PADDING

    def row_vectors(self, count: int) -> Tensor:
        """Uninitialized fp32 [count, B·H, padded rows]."""
        shape = (count, self.batch * self.heads, self.padded_rows)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    @functools.cached_property
    def tickets(self) -> Tensor:
        """A zero, int32: how many of its blocks a kernel has handed out. Each starts from zero and ends with it.

        For launches one after the other: a problem is of one call, on one stream, captured as a whole or not at all.
        """
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def section(self, streamed_bytes_per_head: int, heads: int) -> int:
        """How many heads to work on at a time, so that what they stream stays in three quarters of the L2 cache.

        With a window that is a part of the sequence, of two windows' length for the blocks that are in work.
        """
        if self.device.type != "cuda":
            return heads
        if self.window_size is not None:
            streamed_bytes_per_head = (
                streamed_bytes_per_head * min(2 * self.window_size, self.num_keys) // self.num_keys
            )
        section = max(1, min(heads, _l2_cache_bytes(self.device) * 3 // 4 // max(1, streamed_bytes_per_head)))
        return triton.cdiv(heads, triton.cdiv(heads, section))  # sections of like size

    @property
    def side_tensors(self) -> dict[str, Tensor | None]:
        """Tensors that every kernel takes."""
        mask, seed = self.key_padding_mask, self.dropout_seed
        return {
            "padding": None if mask is None else mask.view(torch.uint8),
            "seed": None if seed is None else seed.contiguous(),
        }

    def arguments(self, tensors: Iterable[Tensor | None]) -> dict:
        """The other arguments that every plain kernel takes. `tensors` are the call's."""
        mask, seed = self.key_padding_mask, self.dropout_seed
        return {
            "padding_strides": (0, 0) if mask is None else mask.stride(),
            "threshold": threshold(self.dropout_p),
            "keep_scale": 1.0 / (1.0 - self.dropout_p),
            "scale": self.scale,
            "window": 0 if self.window_size is None else self.window_size,
            "H": self.heads,
            "GROUP": self.heads // self.kv_heads,
            "N_q": self.num_rows,
            "N_k": self.num_keys,
            "CAUSAL": self.is_causal,
            "WINDOW": self.window_size is not None,
            "PADDING": mask is not None,
            "DROPOUT": seed is not None,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "WIDE": any(_needs_wide_offsets(x) for x in tensors if x is not None and x.dim() == 4),
            # fp32 products in full precision; the narrow types ignore it.
            "PRECISION": "ieee",
        }

    def streamed(self, tensors: dict[str, Tensor | None], names: Iterable[str], block: int) -> dict[str, Any]:
        """Arguments for the tensors that a kernel streams in tiles of `block` rows: TMA, and if it is true their descriptors."""
        found = {name: x for name in names if (x := tensors[name]) is not None}
        tma = bool(found) and _has_tma(self.device) and all(map(tma_takes, found.values()))
        if not tma:
            return {"TMA": False}
        tile = [1, 1, block, max(16, triton.next_power_of_2(self.head_dim))]
        return {"TMA": True} | {
            name: TensorDescriptor(x, list(x.shape), tma_strides(x), tile) for name, x in found.items()
        }

    @property
    def key(self) -> tuple:
        """All of it but the tensors."""
        return (
            self.batch, self.heads, self.kv_heads, self.num_rows, self.num_keys, self.head_dim, self.dtype, self.device,
            self.scale, self.is_causal, self.window_size, self.dropout_p,
        )  # fmt: skip


def threshold(dropout_p: float) -> int:
    """Below it a word of Philox drops its score; 2³² itself does not fit into a word."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tma_takes(x: Tensor) -> bool:
    """Whether TMA can read and write [B, H, N, d] of two bytes an element."""
    return x.data_ptr() % 16 == 0 and _aligned_strides(x.shape, x.stride())


@functools.cache
def _aligned_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for size, stride in zip(shape[:3], strides) if size > 1]
    return strides[3] == 1 and all(s > 0 and s % 8 == 0 for s in outer)


def tma_strides(x: Tensor) -> list[int]:
    """A dimension of size 1 has any stride."""
    return [*(stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride())), 1]


@functools.cache
def _l2_cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


# Arguments whose value must not enter a kernel's specialization: a new length would compile a new kernel.
DO_NOT_SPECIALIZE = ["threshold", "window", "N_q", "N_k", "num_heads", "section"]


@functools.cache
def hopper(device: torch.device) -> ModuleType | None:
    """The module of Hopper's own kernels where `device` is one, None elsewhere; without Gluon None after a warning."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from . import hopper
    except (ImportError, AttributeError) as error:  # Gluon is experimental: names move
        warnings.warn(
            f"flashbob's kernels for Hopper do not fit triton {triton.__version__} ({error}); slower ones run",
            stacklevel=2,
        )
        return None
    return hopper


def check_device(device: torch.device) -> None:
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return
    raise RuntimeError(
        f"the triton backend needs CUDA tensors and got tensors on {device}; on a CPU its kernels run in "
        "Triton's interpreter only: set TRITON_INTERPRET=1 in the environment before triton is imported"
    )


def strides_of(x: Tensor | None) -> tuple[int, ...]:
    """Strides for a kernel; an absent tensor needs none."""
    return (0, 0, 0, 0) if x is None else x.stride()


def _needs_wide_offsets(x: Tensor) -> bool:
    # The largest offset within one tile, of at most _MAX_BLOCK rows and columns.
    return (x.stride(2) + x.stride(3)) * _MAX_BLOCK >= math.pow(2, 31)
