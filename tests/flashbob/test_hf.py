"""`transformers` models with sdpa_bob against the same models with their own eager attention."""

from functools import partial

import pytest
import torch
import transformers
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import flashbob.hf
from optim import hessian_vector_product

COMMON = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
          "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
CONFIGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=40,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "pythia": transformers.GPTNeoXConfig(**COMMON),
    "llama, grouped queries": transformers.LlamaConfig(**COMMON, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**COMMON, num_key_value_heads=1),
    "granite, experts": transformers.GraniteMoeConfig(
        **COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.2
    ),
    "mistral, window of 5": transformers.MistralConfig(
        **COMMON, num_key_value_heads=2, sliding_window=5, head_dim=16
    ),
}


@pytest.fixture(autouse=True)
def registered():
    flashbob.hf.register()


def models(config, kind=transformers.AutoModelForCausalLM):
    """The same weights with sdpa_bob and with eager attention, fp64 (their norms compute in fp32 all the same)."""
    torch.manual_seed(0)
    eager, bob = (
        kind.from_config(config, attn_implementation=name, experts_implementation="eager").double()
        for name in ("eager", "bob")
    )
    bob.load_state_dict(eager.state_dict())
    assert bob.config._attn_implementation == "bob"
    return bob, eager


def batch(length=17):
    torch.manual_seed(1)
    return torch.randint(1, 40, (2, length))


def second_order(model, **batch):
    params = list(model.parameters())
    loss = model(**batch, use_cache=False).loss
    torch.manual_seed(2)
    return loss.detach(), *hessian_vector_product(loss, params, [torch.randn_like(p) for p in params])


def assert_close(got, expected):
    """To the rounding of the fp32 that models compute norms and losses in."""
    for a, b in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_gradient_and_product_are_those_of_eager_attention(name, padding):
    bob, eager = models(CONFIGS[name])
    tokens = batch()
    mask, labels = torch.ones_like(tokens), tokens.clone()
    if padding != "none":
        mask[1, :6] = 0
        mask = mask if padding == "left" else mask.flip(1)
        labels[mask == 0] = -100
    given = {"input_ids": tokens, "labels": labels, "attention_mask": None if padding == "none" else mask}
    assert_close(second_order(bob, **given), second_order(eager, **given))
    with torch.no_grad():
        logits = [
            m(input_ids=tokens, attention_mask=given["attention_mask"]).logits[mask.bool()]
            for m in (bob, eager)
        ]
    assert_close(*logits)


def test_bidirectional_attention():
    config = transformers.BertConfig(**COMMON, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    bob, eager = models(config, transformers.AutoModelForMaskedLM)
    tokens = batch()
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    given = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    got, expected = (hessian_product_of(m, given) for m in (bob, eager))
    assert_close(got, expected)


def hessian_product_of(model, given):
    params = [p for p in model.parameters()]
    torch.manual_seed(2)
    vectors = [torch.randn_like(p) for p in params]
    return hessian_vector_product(model(**given).loss, params, vectors)


def test_dropout_is_drawn_anew_and_only_in_training():
    config = transformers.GPT2Config(vocab_size=40, n_positions=64, n_embd=64, n_layer=1, n_head=4, attn_pdrop=0.5,
                                     resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    bob, _ = models(config)
    tokens = batch()
    assert not torch.equal(bob.train()(tokens).logits, bob(tokens).logits)
    assert torch.equal(bob.eval()(tokens).logits, bob(tokens).logits)


@pytest.mark.parametrize("name", ["llama, grouped queries", "mistral, window of 5"])
def test_generation_with_a_cache(name):
    bob, eager = models(CONFIGS[name])
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    tokens = batch(7)
    assert torch.equal(bob.eval().generate(tokens, **options), eager.eval().generate(tokens, **options))


def test_a_traced_product_and_packed_sequences_in_it():
    """What HessianVectorProduct compiles. A trace does not know the positions: packed sequences fail as an assertion in it."""
    bob, eager = models(CONFIGS["llama, grouped queries"])
    tokens, positions = batch(), torch.arange(17).expand(2, -1).contiguous()
    vectors = [torch.randn_like(p) for p in bob.parameters()]

    def product(model, params, tokens, positions):
        given = {"input_ids": tokens, "position_ids": positions, "labels": tokens, "use_cache": False}
        values = dict(zip((name for name, _ in model.named_parameters()), params))
        loss = functional_call(model, values, kwargs=given).loss
        return hessian_vector_product(loss, params, vectors)

    leaves = lambda model: [p.detach().requires_grad_() for p in model.parameters()]  # noqa: E731
    traced = make_fx(partial(product, bob), tracing_mode="fake", _allow_non_fake_inputs=True)(
        leaves(bob), tokens, positions
    )
    traced.graph.eliminate_dead_code()
    assert_close(traced(leaves(bob), tokens, positions), product(eager, leaves(eager), tokens, positions))
    packed = positions.clone()
    packed[1, 8:] -= 8
    with pytest.raises(RuntimeError, match="several sequences packed into a row"):
        traced(leaves(bob), tokens, packed)


def test_a_compiled_model():
    bob, eager = models(transformers.Qwen2Config(**{**COMMON, "num_hidden_layers": 1}, num_key_value_heads=1))
    tokens = batch()
    compiled = torch.compile(bob, backend="aot_eager")
    assert_close(compiled(tokens, use_cache=False).logits, eager(tokens, use_cache=False).logits)


@pytest.mark.parametrize("given", ["packed", "four dimensions", "static cache", "weights"])
def test_what_is_not_supported_is_refused(given):
    bob, _ = models(CONFIGS["llama, grouped queries"])
    tokens = batch()
    positions = torch.arange(17).expand(2, -1).clone()
    positions[0, 5:] -= 5
    arguments, message = {
        "packed": ({"position_ids": positions, "use_cache": False}, "packed into a row"),
        "four dimensions": ({"attention_mask": torch.ones(2, 1, 17, 17)}, r"must be \[batch, keys\].*\(2, 1, 17, 17\)"),
        "static cache": (
            {"past_key_values": transformers.StaticCache(config=bob.config, max_cache_len=32)}, "a cache that grows"
        ),
        "weights": ({"output_attentions": True}, "no attention weights"),
    }[given]  # fmt: skip
    with pytest.raises(NotImplementedError, match=message):
        bob(tokens, **arguments)


def test_models_that_are_not_supported_are_refused():
    gemma = transformers.Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=16, sliding_window=8)
    sinks = transformers.GptOssConfig(**COMMON, num_key_value_heads=2, head_dim=16, num_local_experts=2)
    chunks = transformers.Llama4TextConfig(
        **COMMON, num_key_value_heads=2, head_dim=16, attention_chunk_size=8
    )
    for config, message in (
        (gemma, "no softcap"),
        (sinks, "no s_aux"),
        (chunks, "of the kind chunked_overlay"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            models(config)[0](batch())
    with pytest.raises(ValueError, match="with 'flash' in them"):
        flashbob.hf.register("flashbob")
