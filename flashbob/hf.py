"""FlashBoB as an attention implementation of Hugging Face's `transformers`.

import flashbob.hf
flashbob.hf.register()
model = AutoModelForCausalLM.from_config(config, attn_implementation="bob")
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .attention import sdpa_bob

# What a layer may hand to its attention that changes the result and is not here.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


def register(name: str = "bob") -> None:
    """Make `attn_implementation=name` mean `sdpa_bob`, for models that are made or switched afterwards.

    Causal and bidirectional attention, grouped queries, sliding windows, dropout and padding (a 2-d `attention_mask`) are
    supported; rows of padding give zeros. A model is refused at its first call, with NotImplementedError, for what is not:
    masks of another kind (chunks, images, prefixes), 4-d masks, several sequences packed into a row, caches of a fixed
    size, soft-capped scores, attention sinks, position biases, and attention weights as an output. In a traced graph
    (`torch.compile`, `make_fx`), where positions are not known, packed sequences fail as an assertion on the device.

    Needs transformers 5. Raises ValueError for a name with "flash" in it, which transformers takes for its own.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if "flash" in name:
        raise ValueError(
            f"name is {name!r}; transformers takes names with 'flash' in them for its own kernels"
        )
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _padding_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H_q, N_q, d], key and value [B, H_kv, N_k, d] → ([B, N_q, H_q, d], no weights)."""
    layer = type(module).__name__
    for name in _REFUSED:
        if others.get(name) is not None:
            raise NotImplementedError(f"{layer}: sdpa_bob has no {name}; use another attn_implementation")
    if others.get("output_attentions"):
        raise NotImplementedError(
            f"{layer}: sdpa_bob gives no attention weights; leave output_attentions out"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"{layer}: attention_mask must be [batch, keys] for sdpa_bob, got shape {tuple(attention_mask.shape)}"
        )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if sliding_window is not None and not is_causal:
        raise NotImplementedError(f"{layer}: sdpa_bob has no sliding window without causal attention")
    out = sdpa_bob(
        query, key, value, is_causal=is_causal, scale=scaling, window_size=sliding_window,
        key_padding_mask=attention_mask, dropout_p=dropout,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """What `_attention` gets as its mask: bool [B, N_k], or None if every key counts.

    `mask_function` is what else transformers wants masked. Layers know their causality and window themselves; anything
    else is refused.
    """
    _check(mask_function)
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise NotImplementedError(
            "sdpa_bob takes the last query for the last key's; use a cache that grows (DynamicCache), or none"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]
    if mask.shape[1] != kv_length:
        raise NotImplementedError(
            f"attention_mask has {mask.shape[1]} keys where the layer has {kv_length}; give one for each"
        )
    return mask


@torch.compiler.disable
def _check(mask_function: Callable) -> None:
    """By the names of transformers' functions, which it puts together: one that is not known is refused."""
    from transformers import masking_utils

    for part in _parts(mask_function):
        kind = _kind(part)
        if kind == "packed_sequence_mask_function":
            _refuse_packed(_held_by(part, "packed_sequence_mask"))
        elif kind != "sliding_window_overlay" and part not in (
            masking_utils.causal_mask_function,
            masking_utils.bidirectional_mask_function,
        ):
            raise NotImplementedError(
                f"sdpa_bob has no attention mask of the kind {kind}; use another attn_implementation"
            )


def _parts(mask_function: Callable) -> Iterator[Callable]:
    """The masks whose intersection it is."""
    kind = _kind(mask_function)
    if kind == "and_masks":
        for part in _held_by(mask_function, "mask_functions"):
            yield from _parts(part)
    elif kind == "remap_positions_for_packed_sequence":  # beside the mask of packed sequences, which decides
        yield from _parts(_held_by(mask_function, "mask_function"))
    else:
        yield mask_function


def _kind(mask_function: Any) -> str:
    """The function that made it, or its own name."""
    return mask_function.__qualname__.partition(".")[0]


def _held_by(function: Callable, name: str) -> Any:
    return inspect.getclosurevars(function).nonlocals[name]


def _refuse_packed(index: Tensor) -> None:
    """`index` [B, N]: the number of the sequence, in its row, that a token belongs to. While tracing it is always there."""
    from transformers.utils.import_utils import is_tracing

    message = "sdpa_bob has no mask for several sequences packed into a row (position_ids that start again)"
    if is_tracing(index):
        torch._assert_async((index == 0).all(), message)  # pyright: ignore[reportPrivateImportUsage]
    elif index.any():
        raise NotImplementedError(message)
