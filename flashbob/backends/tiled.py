"""The operators in PyTorch operations over tiles: O(N) memory, any device, any dtype, every feature.

The reference for the Triton kernels in structure as well: the second backward is the same two passes (specification,
section 1; paper, section 4). No tensor is larger than its inputs, apart from one tile's temporaries.

Tiles are [B, K, G·R, C]: K key-value heads, G query heads to each of them, R rows and C keys. A product of all the
group's rows with the group's keys needs no copy of the keys, and a product contracted over rows sums over the group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masking import causal_mask, dropout_keep_mask
from . import written

# Elements of one score tile over all batches and heads: a tile's temporaries stay in a CPU's cache, and fill a GPU.
_TILE_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
_MIN_TILE = 64


@dataclass(frozen=True)
class _Problem:
    """Shapes, masks and tiling of one attention call."""

    batch: int
    heads: int
    kv_heads: int
    num_rows: int
    num_keys: int
    device: torch.device
    dtype: torch.dtype  # of the accumulators
    scale: float
    is_causal: bool
    window_size: int | None
    key_padding_mask: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, **options) -> "_Problem":
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.device, dtype, **options)

    @property
    def tile(self) -> int:
        per_head = _TILE_ELEMENTS[self.device.type] // (self.batch * self.heads)
        return max(_MIN_TILE, 2 ** (per_head.bit_length() // 2))

    def row_blocks(self, start: int = 0, stop: int | None = None) -> Iterator[range]:
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        for begin in range(max(start, 0) // self.tile * self.tile, stop, self.tile):
            yield range(begin, min(begin + self.tile, self.num_rows))

    def key_blocks(self, rows: range | None = None) -> Iterator[range]:
        """Key tiles of which `rows` see at least one key (all tiles without rows)."""
        start, stop = 0, self.num_keys
        if rows is not None and self.is_causal:
            shift = self.num_keys - self.num_rows
            stop = min(stop, rows.stop + shift)
            if self.window_size is not None:
                start = max(0, rows.start + shift - self.window_size + 1)
        for begin in range(start // self.tile * self.tile, stop, self.tile):
            yield range(begin, min(begin + self.tile, self.num_keys))

    def row_blocks_seeing(self, keys: range) -> Iterator[range]:
        if not self.is_causal:
            return self.row_blocks()
        shift = self.num_keys - self.num_rows
        stop = None if self.window_size is None else keys.stop - shift + self.window_size - 1
        return self.row_blocks(keys.start - shift, stop)

    def rows(self, x: Tensor, rows: range) -> Tensor:
        """Rows of x [B, H, N_q, ...] as [B, K, G·R, ...] in the accumulators' dtype; a vector per row gets a last 1."""
        x = x[:, :, rows.start : rows.stop]
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return x.reshape(self.batch, self.kv_heads, -1, x.shape[-1]).to(self.dtype)

    def keys(self, x: Tensor, keys: range) -> Tensor:
        """Keys of x [B, K, N_k, d] as [B, K, C, d] in the accumulators' dtype."""
        return x[:, :, keys.start : keys.stop].to(self.dtype)

    def store_rows(self, out: Tensor, rows: range, tile: Tensor) -> None:
        view = out[:, :, rows.start : rows.stop]
        view.copy_(tile.reshape(view.shape))

    def row_zeros(self, rows: range, width: int) -> Tensor:
        group_rows = self.heads // self.kv_heads * len(rows)
        return torch.zeros(self.batch, self.kv_heads, group_rows, width, dtype=self.dtype, device=self.device)

    def scores(self, q_tile: Tensor, k_tile: Tensor, rows: range, keys: range) -> Tensor:
        """S = τ Q Kᵀ + mask; only tiles that the mask's border crosses pay for it."""
        s = (q_tile @ k_tile.mT).mul_(self.scale)
        shift = self.num_keys - self.num_rows
        crossed = self.is_causal and (
            rows.start + shift < keys.stop - 1
            or (self.window_size is not None and rows.stop - 1 + shift - keys.start >= self.window_size)
        )
        valid = None
        if crossed:
            valid = causal_mask(rows, keys, self.num_rows, self.num_keys, self.window_size, self.device)
        if self.key_padding_mask is not None:
            padding = self.key_padding_mask[:, None, None, None, keys.start : keys.stop]
            valid = padding if valid is None else valid & padding
        if valid is not None:
            s.view(self.batch, self.kv_heads, -1, len(rows), len(keys)).masked_fill_(~valid, -math.inf)
        return s

    def dropout(self, rows: range, keys: range) -> Tensor | None:
        """g, the keep mask divided by 1 - p, as a tile; None without dropout."""
        if self.dropout_p == 0.0:
            return None
        assert self.dropout_seed is not None
        keep = dropout_keep_mask(self.dropout_seed, self.dropout_p, self.batch, self.heads, rows, keys)
        return keep.reshape(self.batch, self.kv_heads, -1, len(keys)).to(self.dtype) / (1.0 - self.dropout_p)


def _dropped(x: Tensor, g: Tensor | None) -> Tensor:
    return x if g is None else x * g


def forward(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """O [B, H, N_q, d] in q's dtype and layout; L [B, H, N_q], natural log, fp32 (fp64 for fp64). Online softmax."""
    problem = _Problem.of(q, k, **options)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=problem.dtype, device=q.device)
    for rows in problem.row_blocks():
        q_tile = problem.rows(q, rows)
        maximum = problem.row_zeros(rows, 1).fill_(-math.inf)
        total = problem.row_zeros(rows, 1)
        acc = problem.row_zeros(rows, q.shape[-1])
        for keys in problem.key_blocks(rows):
            s = problem.scores(q_tile, problem.keys(k, keys), rows, keys)
            new_maximum = torch.maximum(maximum, s.amax(-1, keepdim=True))
            # A row without a key so far keeps the maximum -inf; subtracting 0 instead gives exp(-inf) = 0, not NaN.
            reference = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)
            p = s.sub_(reference).exp_()
            correction = (maximum - reference).exp()
            total = total * correction + p.sum(-1, keepdim=True)
            acc = acc * correction + _dropped(p, problem.dropout(rows, keys)) @ problem.keys(v, keys)
            maximum = new_maximum
        empty = total == 0.0
        problem.store_rows(o, rows, acc / total.masked_fill(empty, 1.0))
        problem.store_rows(lse, rows, (maximum + total.log()).masked_fill(empty, math.inf))
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    base: Sequence[Tensor] | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtype and layout of q, k, v (or in `out`, added to `base`)."""
    problem = _Problem.of(q, k, **options)
    dq_sum = torch.zeros(q.shape, dtype=problem.dtype, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    delta = _delta(do, o, problem.dtype)
    for keys in problem.key_blocks():
        k_tile, v_tile = problem.keys(k, keys), problem.keys(v, keys)
        dk_sum, dv_sum = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in problem.row_blocks_seeing(keys):
            q_tile, do_tile = problem.rows(q, rows), problem.rows(do, rows)
            p = (problem.scores(q_tile, k_tile, rows, keys) - problem.rows(lse, rows)).exp_()
            g = problem.dropout(rows, keys)
            dv_sum += _dropped(p, g).mT @ do_tile
            ds = p * (_dropped(do_tile @ v_tile.mT, g) - problem.rows(delta, rows))
            dk_sum += ds.mT @ q_tile
            dq_rows = dq_sum[:, :, rows.start : rows.stop]
            dq_rows += (ds @ k_tile).view(dq_rows.shape)
        dk[:, :, keys.start : keys.stop] = dk_sum * problem.scale
        dv[:, :, keys.start : keys.stop] = dv_sum
    dq = torch.empty_like(q).copy_(dq_sum.mul_(problem.scale))
    dq, dk, dv = written(out, base, (dq, dk, dv))
    return dq, dk, dv


def backward_backward(
    u_q: Tensor | None,
    u_k: Tensor | None,
    u_v: Tensor | None,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    *,
    out: Sequence[Tensor] | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of Φ = ⟨dQ, U_Q⟩ + ⟨dK, U_K⟩ + ⟨dV, U_V⟩ with respect to Q, K, V and dO, like them; three in `out`."""
    problem = _Problem.of(q, k, **options)
    scale = problem.scale
    delta = _delta(do, o, problem.dtype)
    alpha = torch.empty_like(lse)
    e = torch.empty_like(lse)
    grad_q, grad_k, grad_v, grad_do = (torch.empty_like(x) for x in (q, k, v, do))

    def row_tiles(rows: range):
        u_q_tile = None if u_q is None else problem.rows(u_q, rows)
        return problem.rows(q, rows), problem.rows(do, rows), u_q_tile

    def key_tiles(keys: range):
        u_k_tile, u_v_tile = (None if u is None else problem.keys(u, keys) for u in (u_k, u_v))
        return problem.keys(k, keys), problem.keys(v, keys), u_k_tile, u_v_tile

    def score_tiles(rows: range, keys: range, row_side, key_side):
        """P, F, A - D, P̃° = C + F ⊙ (A - D), A = g ⊙ dP, and g."""
        (q_tile, do_tile, u_q_tile), (k_tile, v_tile, u_k_tile, u_v_tile) = row_side, key_side
        p = (problem.scores(q_tile, k_tile, rows, keys) - problem.rows(lse, rows)).exp_()
        g = problem.dropout(rows, keys)
        a = _dropped(do_tile @ v_tile.mT, g)
        centered = a - problem.rows(delta, rows)
        f = torch.zeros_like(p)
        if u_q_tile is not None:
            f += u_q_tile @ k_tile.mT
        if u_k_tile is not None:
            f += q_tile @ u_k_tile.mT
        f *= scale
        p_tilde = f * centered
        if u_v_tile is not None:
            p_tilde += _dropped(do_tile @ u_v_tile.mT, g)
        return p, f, centered, p_tilde, a, g

    for rows in problem.row_blocks():
        row_side = row_tiles(rows)
        alpha_sum, e0_sum = problem.row_zeros(rows, 1), problem.row_zeros(rows, 1)
        omega, b, do_sum = (problem.row_zeros(rows, q.shape[-1]) for _ in range(3))
        for keys in problem.key_blocks(rows):
            key_side = key_tiles(keys)
            k_tile, v_tile, u_k_tile, u_v_tile = key_side
            p, f, centered, p_tilde, _, g = score_tiles(rows, keys, row_side, key_side)
            pf = p * f
            p_p_tilde = p * p_tilde
            alpha_sum += pf.sum(-1, keepdim=True)
            e0_sum += p_p_tilde.sum(-1, keepdim=True)
            omega += p_p_tilde @ k_tile
            b += p @ k_tile
            do_sum += _dropped(pf, g) @ v_tile
            if u_k_tile is not None:
                omega += (p * centered) @ u_k_tile
            if u_v_tile is not None:
                do_sum += _dropped(p, g) @ u_v_tile
        problem.store_rows(alpha, rows, alpha_sum)
        problem.store_rows(e, rows, e0_sum - alpha_sum * problem.rows(delta, rows))
        problem.store_rows(grad_do, rows, do_sum - alpha_sum * problem.rows(o, rows))
        # R = Σ (P ⊙ dP) K of the paper is dQ / τ + D B, and dQ is at hand.
        problem.store_rows(grad_q, rows, scale * (omega - e0_sum * b) - alpha_sum * problem.rows(dq, rows))

    for keys in problem.key_blocks():
        key_side = key_tiles(keys)
        k_sum, v_sum = torch.zeros_like(key_side[0]), torch.zeros_like(key_side[1])
        for rows in problem.row_blocks_seeing(keys):
            row_side = row_tiles(rows)
            q_tile, do_tile, u_q_tile = row_side
            p, f, centered, p_tilde, a, g = score_tiles(rows, keys, row_side, key_side)
            alpha_tile = problem.rows(alpha, rows)
            s_tilde = p * (p_tilde - alpha_tile * a - problem.rows(e, rows))
            k_sum += s_tilde.mT @ q_tile
            if u_q_tile is not None:
                k_sum += (p * centered).mT @ u_q_tile
            v_sum += _dropped(p * (f - alpha_tile), g).mT @ do_tile
        grad_k[:, :, keys.start : keys.stop] = k_sum * scale
        grad_v[:, :, keys.start : keys.stop] = v_sum
    grad_q, grad_k, grad_v = written(out, None, (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_do


def tangent(
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    **options,
) -> Tensor:
    """Derivative of O along (t_q, t_k, t_v), like q: Ȯ = (P ⊙ Ṡ) V + P V̇ − α O with Ṡ = τ (Q̇ Kᵀ + Q K̇ᵀ), α = Σ P Ṡ."""
    problem = _Problem.of(q, k, **options)
    t_o = torch.empty_like(q)
    for rows in problem.row_blocks():
        q_tile = problem.rows(q, rows)
        alpha, acc = problem.row_zeros(rows, 1), problem.row_zeros(rows, q.shape[-1])
        for keys in problem.key_blocks(rows):
            k_tile = problem.keys(k, keys)
            p = (problem.scores(q_tile, k_tile, rows, keys) - problem.rows(lse, rows)).exp_()
            g = problem.dropout(rows, keys)
            if t_v is not None:
                acc += _dropped(p, g) @ problem.keys(t_v, keys)
            if t_q is None and t_k is None:
                continue
            t_s = torch.zeros_like(p)
            if t_q is not None:
                t_s += problem.rows(t_q, rows) @ k_tile.mT
            if t_k is not None:
                t_s += q_tile @ problem.keys(t_k, keys).mT
            t_p = t_s.mul_(problem.scale).mul_(p)
            alpha += t_p.sum(-1, keepdim=True)
            acc += _dropped(t_p, g) @ problem.keys(v, keys)
        problem.store_rows(t_o, rows, acc - alpha * problem.rows(o, rows))
    return t_o


def _delta(do: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
    """D_i = ⟨dO_i, O_i⟩, [B, H, N_q]."""
    return (do.to(dtype) * o.to(dtype)).sum(-1)
