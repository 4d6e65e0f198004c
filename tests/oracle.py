"""The judge of every attention derivative: textbook attention in plain PyTorch, differentiated by autograd."""

import itertools
import math

import torch


def reference_attention(
    q,
    k,
    v,
    *,
    is_causal=False,
    scale=None,
    window_size=None,
    key_padding_mask=None,
    dropout_p=0.0,
    keep=None,
):
    """Attention with N×N tensors. `keep` is the dropout mask, bool [B, H, N_q, N_k], given from outside."""
    heads, num_rows, head_dim = q.shape[1:]
    num_keys = k.shape[2]
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(head_dim) if scale is None else scale)
    valid = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device)
    if is_causal:
        for i in range(num_rows):
            last = i + num_keys - num_rows
            first = 0 if window_size is None else last - window_size + 1
            valid[i] = False
            valid[i, max(first, 0) : max(last + 1, 0)] = True
    valid = valid.expand(q.shape[0], 1, num_rows, num_keys)
    if key_padding_mask is not None:
        valid = valid & key_padding_mask[:, None, None, :]
    weights = torch.where(valid, scores - scores.amax(-1, keepdim=True).detach(), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total == 0, 1.0, total)
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return p @ v


def second_order(attention, q, k, v, do, cotangents):
    """(o, dq, dk, dv, and the gradients of ⟨(dq, dk, dv), cotangents⟩ with respect to q, k, v, do)."""
    q, k, v, do = (x.detach().requires_grad_() for x in (q, k, v, do))
    o = attention(q, k, v)
    first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(first, (q, k, v, do), cotangents)
    return tuple(x.detach() for x in (o, *first, *second))


NAMES = ("o", "dq", "dk", "dv", "q~", "k~", "v~", "do~")


def feature_grid():
    """Every combination of mask, heads, lengths, padding and dropout, as keyword dictionaries with readable ids."""
    masks = {"full": {}, "causal": {"is_causal": True}, "window": {"is_causal": True, "window_size": 3}}
    heads = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}
    lengths = {"square": (6, 6), "wide": (4, 7), "tall": (7, 4)}
    for mask, head, length, padding, dropout in itertools.product(
        masks, heads, lengths, (False, True), (False, True)
    ):
        name = "-".join([mask, head, length] + ["padding"] * padding + ["dropout"] * dropout)
        yield name, masks[mask], heads[head], lengths[length], padding, dropout


def make_inputs(heads, lengths, *, batch=2, head_dim=16, dtype=torch.float64, device="cpu", seed=0):
    """q, k, v, do and cotangents of dq, dk, dv, standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(num_heads, length):
        x = torch.randn(batch, num_heads, length, head_dim, generator=generator, dtype=torch.float64)
        return x.to(device, dtype)

    (h_q, h_kv), (n_q, n_k) = heads, lengths
    q, k, v = normal(h_q, n_q), normal(h_kv, n_k), normal(h_kv, n_k)
    return q, k, v, normal(h_q, n_q), (normal(h_q, n_q), normal(h_kv, n_k), normal(h_kv, n_k))
