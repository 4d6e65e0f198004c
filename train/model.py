"""GPT-2, after nanoGPT: pre-LN blocks, learned positions, GELU (tanh), tied token embedding and head.

Shape suffixes: B sequences, N tokens in each, D = embed_dim, H heads, d = D / H, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashbob
from optim import recompute

from .cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

# What Hugging Face's GPT-2 can be configured to and this model has no switch for.
_HF_FIXED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new",),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_HF_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass(frozen=True)
class GPTConfig:
    block_size: int  # the longest sequence
    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float = 0.0  # on embeddings, residual branches and attention probabilities
    bias: bool = True  # in every Linear and LayerNorm
    loss_chunk: int | None = (
        None  # tokens whose logits exist at a time when there are targets; None: all of them
    )
    recompute_blocks: bool = False  # of each block only its input is kept for the derivatives

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim is {self.embed_dim}; a multiple of num_heads={self.num_heads} is needed"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: a multiple of 64, which the head's matrix products are faster with."""
        return -(-self.vocab_size // 64) * 64


def attention_function(backend: str) -> Callable[..., Tensor]:
    """The attention of `GPT`: `attention(q, k, v, is_causal=..., dropout_p=...)` of [B, H, N, d] tensors.

    "sdpa" is PyTorch's own, which can be differentiated once. Any other name is a backend of `flashbob`, or
    "auto", and is chosen for the whole process: of several models, all have the one chosen last. ValueError
    for a name that is neither.
    """
    if backend == "sdpa":
        return F.scaled_dot_product_attention
    flashbob.set_backend(backend)
    return flashbob.sdpa_bob


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.embed_dim, config.embed_dim, bias=config.bias)
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention = attention

    def forward(self, x_BND: Tensor) -> Tensor:
        # Strided views of the packed projection: no kernel here needs the heads to be contiguous.
        qkv = self.c_attn(x_BND).unflatten(-1, (3, self.num_heads, -1))
        q_BHNd, k_BHNd, v_BHNd = (x.transpose(1, 2) for x in qkv.unbind(2))
        dropout = self.dropout if self.training else 0.0  # the functions have no training flag
        y_BHNd = self.attention(q_BHNd, k_BHNd, v_BHNd, is_causal=True, dropout_p=dropout)
        return F.dropout(self.c_proj(y_BHNd.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.embed_dim, 4 * config.embed_dim, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.embed_dim, config.embed_dim, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = self.c_proj(F.gelu(self.c_fc(x_BND), approximate="tanh"))
        return F.dropout(x_BND, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.attn = CausalSelfAttention(config, attention)
        self.ln_2 = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x_BND: Tensor) -> Tensor:
        x_BND = x_BND + self.attn(self.ln_1(x_BND))
        return x_BND + self.mlp(self.ln_2(x_BND))


class GPT(nn.Module):
    """GPT-2 with random weights, on PyTorch's current default device and in its default dtype.

    `attention` is what `attention_function` returns. Parameters are named as in `transformers`, without its
    leading "transformer.".
    """

    def __init__(self, config: GPTConfig, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.embed_dim)
        self.wpe = nn.Embedding(config.block_size, config.embed_dim)
        self.h = nn.ModuleList(Block(config, attention) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.lm_head = nn.Linear(config.embed_dim, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # The residual stream sums 2·num_layers projections; this keeps its scale whatever the depth.
                shrink = math.sqrt(2 * self.config.num_layers) if name.endswith("c_proj.weight") else 1.0
                p.normal_(std=0.02 / shrink)
            elif name.endswith("bias"):
                p.zero_()  # the weights of LayerNorm are 1 already
        self._zero_padding()

    @torch.no_grad()
    def _zero_padding(self) -> None:
        # No gradient reaches these rows; at zero, no weight decay moves them either.
        self.wte.weight[self.config.vocab_size :].zero_()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the next token at every position, and the loss if there are targets.

        Args:
            tokens: int64 [B, N], N ≤ block_size.
            targets: int64 [B, N]; a target of -100 is left out of the loss.

        Returns:
            logits [B, N, vocab_size] in the dtype of the head's product (bf16 under bf16 autocast), None where
            they were never whole (targets with loss_chunk), and the
            mean cross entropy in nats over the targets, a scalar in fp32 (fp64 with fp64 weights), or None.

        Raises ValueError for a sequence that is longer than block_size.
        """
        length = tokens.shape[1]
        if length > self.config.block_size:
            raise ValueError(
                f"the sequence has {length} tokens; block_size={self.config.block_size} is the most"
            )
        x_BND = self.wte(tokens) + self.wpe.weight[:length]
        x_BND = F.dropout(x_BND, self.config.dropout, self.training)
        for block in self.h:
            x_BND = recompute(block, x_BND) if self.config.recompute_blocks else block(x_BND)
        if targets is not None and self.config.loss_chunk is not None:
            loss = linear_cross_entropy(
                self.ln_f(x_BND).flatten(0, 1),
                self.lm_head.weight,
                targets.flatten(),
                self.config.vocab_size,
                self.config.loss_chunk,
            )
            return None, loss
        # The padding rows only round the product's shape: as logits they would take part in the softmax.
        logits_BNV = self.lm_head(self.ln_f(x_BND))[..., : self.config.vocab_size]
        if targets is None:
            return logits_BNV, None
        wide = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
        return logits_BNV, F.cross_entropy(wide.flatten(0, 1), targets.flatten())

    def num_parameters(self, *, position_embeddings: bool = True) -> int:
        """Distinct parameters of the model that `config` describes.

        The tied matrix counts once and without its padding rows, so that the number is the published one
        (124,439,808 for GPT-2 small).
        """
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.embed_dim
        total = sum(p.numel() for p in self.parameters()) - padding
        return total if position_embeddings else total - self.wpe.weight.numel()

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations per token, forward and backward: 6·P + 12·num_layers·embed_dim·N.

        PaLM's convention (arXiv 2204.02311, appendix B): a multiplication and an addition are two
        operations; P is every parameter but the position embeddings (the tied matrix counts once, as the
        head); attention counts all N × N scores, not halved for those that a causal kernel skips.
        Recomputation and Hessian-vector products are not in it.
        """
        attention = 12 * self.config.num_layers * self.config.embed_dim * sequence_length
        return 6 * self.num_parameters(position_embeddings=False) + attention

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens`, int64 [B, N ≥ 1], followed by `num_new_tokens` samples: int64 [B, N + num_new_tokens].

        Each token is drawn given at most the last block_size ones, without dropout, from the `top_k` most
        probable (None: all) at `temperature`. `generator` is on the model's device. ValueError if
        `temperature` is not positive or `top_k` is below 1.
        """
        if not temperature > 0:
            raise ValueError(
                f"temperature is {temperature}; a positive number is needed (top_k=1 for the most probable)"
            )
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; a positive integer, or None, is needed")
        was_training = self.training
        self.eval()
        for _ in range(num_new_tokens):
            logits, _ = self(tokens[:, -self.config.block_size :])
            logits, ids = (
                logits[:, -1].float().topk(min(top_k or self.config.vocab_size, self.config.vocab_size))
            )
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, ids.gather(1, chosen)], dim=1)
        self.train(was_training)
        return tokens

    # --- Hugging Face ---------------------------------------------------------------------------------------

    def to_transformers(self) -> "GPT2LMHeadModel":
        """The same model as `transformers` has it: a copy with the same dtype, device and mode.

        Its vocabulary has no padding; with `bias=False`, its biases (it always has them) are zero.
        """
        from transformers import GPT2Config, GPT2LMHeadModel

        config = self.config
        end_of_text = (
            50256 if config.vocab_size == 50257 else None
        )  # GPT-2's own; else the tokenizer is not known
        hf_config = GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_embd=config.embed_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
        model = GPT2LMHeadModel(hf_config)
        model.to(self.wte.weight)  # type: ignore[arg-type]  # its decorator hides `self` from type checkers
        ours = dict(self.named_parameters())
        with torch.no_grad():
            for name, theirs in model.named_parameters():
                p = ours.get(name.removeprefix("transformer."))
                if p is None:
                    theirs.zero_()
                else:
                    theirs.copy_(p.T if name.endswith(_HF_CONV1D) else p[: len(theirs)])
        return model.train(self.training)

    @classmethod
    def from_transformers(
        cls, source: "GPT2LMHeadModel | str | Path", attention: Callable[..., Tensor]
    ) -> "GPT":
        """A copy of a `GPT2LMHeadModel`, given as such or as what its `from_pretrained` takes.

        The copy has the source's dtype, device and mode (a stored model comes in evaluation mode).
        ValueError, naming the key, for a configuration that this model does not have.
        """
        from transformers import AutoConfig, GPT2LMHeadModel

        if isinstance(source, (str, Path)):
            _check_hf_config(AutoConfig.from_pretrained(source))  # before another architecture fails to load
            source = GPT2LMHeadModel.from_pretrained(source)
        hf = source.config
        _check_hf_config(hf)
        config = GPTConfig(
            block_size=hf.n_positions,
            vocab_size=hf.vocab_size,
            num_layers=hf.n_layer,
            num_heads=hf.n_head,
            embed_dim=hf.n_embd,
            dropout=hf.resid_pdrop,
        )
        weight = source.transformer.wte.weight
        model = cls(config, attention).to(weight.device, weight.dtype)
        theirs = dict(source.named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                value = theirs[f"transformer.{name}"]
                p[: config.vocab_size if name == "wte.weight" else None].copy_(
                    value.T if name.endswith(_HF_CONV1D) else value
                )
        return model.train(source.training)


def _check_hf_config(config) -> None:
    allowed = dict(_HF_FIXED)
    if config.model_type == "gpt2":
        allowed["n_inner"] = (None, 4 * config.n_embd)
        # One rate here, three there.
        allowed["embd_pdrop"] = allowed["attn_pdrop"] = (config.resid_pdrop,)
    for key, values in allowed.items():
        if getattr(config, key, None) not in values:
            raise ValueError(
                f"{key} is {getattr(config, key, None)!r}; allowed is {' or '.join(map(repr, values))}"
                + (", as resid_pdrop has it" if key.endswith("_pdrop") else "")
            )
