import math

import pytest
import torch
import torch.nn.functional as F

import flashbob
from optim import hessian_vector_product
from train.model import GPT, GPTConfig, attention_function

CONFIG = GPTConfig(block_size=16, vocab_size=131, num_layers=2, num_heads=2, embed_dim=32)
# fp64 round-off through two blocks; the models differ only in the order of their sums
FP64 = {"rtol": 1e-10, "atol": 1e-12}


def gpt(backend="math", dtype=torch.float64, seed=0, scale=6.0, **changes):
    """A model whose weights, `scale` times those at the start of training, make every part of it count."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**vars(CONFIG), **changes}), attention_function(backend))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif name != "wte.weight":
                p.mul_(scale)
    return model.to(dtype)  # last: the same weights in each dtype


def batch(config=CONFIG, size=3, length=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (size, (length or config.block_size) + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def hugging_face(dtype=torch.float64, **changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    keys = {"n_positions": 16, "vocab_size": 131, "n_layer": 2, "n_head": 2, "n_embd": 32}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**{**keys, **rates, "bos_token_id": None, "eos_token_id": None, **changes})
    model = GPT2LMHeadModel(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def conv1d(name):
    return any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))


# --- against transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "math", "tiled"])
def test_logits_loss_and_gradients_of_hugging_face(backend):
    theirs = hugging_face()
    ours = GPT.from_transformers(theirs, attention_function(backend))
    tokens, targets = batch()
    logits, loss = ours(tokens, targets)
    assert ours.wte.weight.shape[0] == 192 and logits.shape == (3, 16, 131)

    their_logits = theirs(tokens).logits
    their_loss = F.cross_entropy(their_logits.reshape(-1, 131), targets.reshape(-1))
    torch.testing.assert_close(logits, their_logits, **FP64)
    torch.testing.assert_close(loss, their_loss, **FP64)

    loss.backward()
    their_loss.backward()
    gradients = {f"transformer.{name}": p.grad for name, p in ours.named_parameters()}
    for name, p in theirs.named_parameters():
        gradient = gradients.pop(name)
        torch.testing.assert_close(
            gradient[: p.shape[0]] if "wte" in name else gradient, _like(name, p.grad), **FP64
        )
    assert not gradients  # each of ours was compared
    assert not ours.wte.weight.grad[131:].any()


def _like(name, value):
    return value.T if conv1d(name) else value


def test_to_transformers_and_back_through_files(tmp_path):
    from transformers import GPT2LMHeadModel

    model = gpt(dropout=0.1).eval()
    tokens, _ = batch()
    converted = model.to_transformers()
    assert not converted.training
    converted.save_pretrained(tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert theirs.config.vocab_size == 131 and theirs.config.attn_pdrop == 0.1
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens)[0], **FP64)

    back = GPT.from_transformers(str(tmp_path), attention_function("math"))
    assert back.config == model.config and not back.training
    for (name, p), (_, q) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(p, q) and p.dtype == q.dtype, name


def test_conversion_copies():
    model = gpt()
    theirs = model.to_transformers()
    before = model.wte.weight.detach().clone()
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    assert torch.equal(model.wte.weight, before)
    assert theirs.training


def test_without_biases_to_transformers():
    model = gpt(bias=False).eval()
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    tokens, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(model.to_transformers().eval()(tokens).logits, model(tokens)[0], **FP64)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("activation_function", "relu", "gelu_new"),
        ("n_inner", 64, "128"),
        ("layer_norm_epsilon", 1e-6, "1e-05"),
        ("scale_attn_weights", False, "True"),
        ("scale_attn_by_inverse_layer_idx", True, "False"),
        ("attn_pdrop", 0.2, "0.0"),
        ("embd_pdrop", 0.2, "0.0"),
        ("tie_word_embeddings", False, "True"),
    ],
)
def test_other_configurations_are_refused(key, value, allowed):
    with pytest.raises(ValueError, match=rf"{key} is {value!r}; allowed is .*{allowed}"):
        GPT.from_transformers(hugging_face(**{key: value}), attention_function("math"))


def test_another_architecture_is_refused(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is 'llama'; allowed is 'gpt2'"):
        GPT.from_transformers(tmp_path, attention_function("math"))


# --- the vocabulary's padding -------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 64), (64, 64), (65, 128), (131, 192), (50257, 50304)])
def test_padded_vocab_size(vocab_size, padded):
    assert GPTConfig(8, vocab_size, 1, 1, 16).padded_vocab_size == padded


def test_padding_rows_take_no_part():
    model = gpt()
    assert not model.wte.weight[131:].any()
    tokens, targets = batch()
    logits, loss = model(tokens, targets)
    with torch.no_grad():
        model.wte.weight[131:] = 50 * torch.randn(61, 32, dtype=torch.float64)
    other_logits, other_loss = model(tokens, targets)
    assert torch.equal(loss, other_loss) and torch.equal(logits, other_logits)


# --- derivatives, dtypes, attention -------------------------------------------------------------------------


def test_hessian_vector_product_of_tiled_equals_that_of_math():
    products = []
    for backend in ("math", "tiled"):
        model = gpt(backend)
        params = list(model.parameters())
        generator = torch.Generator().manual_seed(3)
        z = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params]
        _, hz = hessian_vector_product(model(*batch())[1], params, z)
        products.append(hz)
    for (name, _), expected, hz in zip(model.named_parameters(), *products, strict=True):
        assert expected.any(), name
        torch.testing.assert_close(hz, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())


def test_hessian_vector_product_against_finite_differences():
    model = gpt("tiled")
    params = list(model.parameters())
    tokens, targets = batch()
    z = [torch.randn_like(p) for p in params]
    _, hz = hessian_vector_product(model(tokens, targets)[1], params, z)

    def gradients_at(step):
        with torch.no_grad():
            for p, direction in zip(params, z):
                p.add_(direction, alpha=step)
        gradients = torch.autograd.grad(model(tokens, targets)[1], params)
        with torch.no_grad():
            for p, direction in zip(params, z):
                p.sub_(direction, alpha=step)
        return gradients

    step = 1e-6  # the error of the central difference is about step² + fp64's epsilon / step
    for h, plus, minus in zip(hz, gradients_at(step), gradients_at(-step)):
        torch.testing.assert_close(
            h, (plus - minus) / (2 * step), rtol=1e-5, atol=1e-6 * h.abs().max().item()
        )


def test_attention_functions_agree_and_are_causal():
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 131
    with torch.no_grad():
        logits = {name: gpt(name).eval()(tokens)[0] for name in ("sdpa", "math", "tiled")}
        other = gpt("sdpa").eval()(changed)[0]
    torch.testing.assert_close(logits["math"], logits["sdpa"], **FP64)
    torch.testing.assert_close(logits["tiled"], logits["sdpa"], **FP64)
    assert torch.equal(other[:, :9], logits["sdpa"][:, :9])
    assert not torch.isclose(other[:, 9:], logits["sdpa"][:, 9:]).all(-1).any()


def test_attention_function_chooses_the_backend():
    attention_function("math")
    assert flashbob.get_backend() == "math"
    assert attention_function("sdpa") is F.scaled_dot_product_attention
    assert flashbob.get_backend() == "math"
    assert attention_function("auto") is flashbob.sdpa_bob
    assert flashbob.get_backend() == "auto"
    with pytest.raises(ValueError, match="backend is 'flash'"):
        attention_function("flash")


def test_heads_are_views_of_the_packed_projection():
    seen = []

    def attention(q, k, v, **_):
        seen.append((q, k, v))
        return v

    GPT(CONFIG, attention)(batch()[0])
    for q, k, v in seen:
        assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
        assert q.shape == k.shape == v.shape == (3, 2, 16, 16)
        assert q.stride() == (16 * 96, 16, 96, 1)


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_bf16_autocast_keeps_loss_and_gradients_in_fp32(backend):
    tokens, targets = batch()
    model = gpt(backend, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, targets)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    exact = gpt(backend)
    exact_loss = exact(tokens, targets)[1]
    exact_loss.backward()
    # bf16 has 8 bits: 2^-8 for each of the rounded factors, over a few dozen roundings
    torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-2, atol=0)
    for p, q in zip(model.parameters(), exact.parameters()):
        assert (p.grad - q.grad).norm() < 0.1 * q.grad.norm()


def test_bf16_autocast_can_be_differentiated_twice():
    model = gpt("tiled", torch.float32)
    params = list(model.parameters())
    z = [torch.ones_like(p) for p in params]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*batch())[1]
    _, hz = hessian_vector_product(loss, params, z)
    exact = gpt("tiled")
    _, expected = hessian_vector_product(
        exact(*batch())[1], list(exact.parameters()), [x.double() for x in z]
    )
    norm = math.sqrt(sum(x.square().sum().item() for x in expected))
    error = math.sqrt(sum((x - y).square().sum().item() for x, y in zip(hz, expected)))
    assert all(x.dtype == torch.float32 for x in hz)
    assert error < 0.1 * norm  # bf16's 2^-8, amplified by two derivatives


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_loss_is_at_least_fp32(dtype, rtol):
    tokens, targets = batch()
    logits, loss = gpt("sdpa", dtype)(tokens, targets)
    assert logits.dtype == dtype and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), gpt()(tokens, targets)[1], rtol=rtol, atol=0)


# --- parameters, dropout, errors ----------------------------------------------------------------------------


def test_embedding_and_head_are_one_tensor():
    model = gpt().to(torch.float32)
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()
    names = [name for name, _ in model.named_parameters()]
    assert "wte.weight" in names and "lm_head.weight" not in names
    restored = gpt(dtype=torch.float32, seed=9)
    restored.load_state_dict(model.state_dict())
    assert restored.lm_head.weight.data_ptr() == restored.wte.weight.data_ptr()
    assert torch.equal(restored.wte.weight, model.wte.weight)


@pytest.mark.parametrize(
    ("layers", "heads", "width", "published"),
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080)],
)
def test_parameters_of_gpt2(layers, heads, width, published):
    with torch.device("meta"):
        model = GPT(GPTConfig(1024, 50257, layers, heads, width), attention_function("sdpa"))
    assert model.num_parameters() == published
    assert model.num_parameters(position_embeddings=False) == published - 1024 * width


def test_flops_are_those_of_the_matrix_products():
    """As PyTorch counts them in a forward and backward pass, with a vocabulary that needs no padding."""
    from torch.utils.flop_counter import FlopCounterMode

    config = GPTConfig(block_size=64, vocab_size=128, num_layers=2, num_heads=2, embed_dim=64, bias=False)
    model = GPT(config, attention_function("math"))
    tokens, targets = batch(config, size=2)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets)[1].backward()
    vectors = (
        6 * (2 * config.num_layers + 1) * config.embed_dim
    )  # LayerNorm weights are in P and multiply no matrix
    assert (model.flops_per_token(64) - vectors) * tokens.numel() == counter.get_total_flops()


def test_initial_weights():
    torch.manual_seed(0)
    model = GPT(GPTConfig(256, 2048, 8, 4, 256), attention_function("math"))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # √(2 · 8) = 4
            # the deviation of n samples has relative error 1/√(2n); five of these
            assert abs(p.std().item() / expected - 1) < 5 / math.sqrt(2 * p.numel()), name
    tokens, targets = batch(model.config, size=2)
    assert abs(model(tokens, targets)[1].item() - math.log(2048)) < 0.1  # as good as guessing


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_dropout_is_for_training_only(backend):
    tokens, targets = batch()
    model = gpt(backend, dropout=0.5).train()
    torch.manual_seed(0)
    assert model(tokens, targets)[1] != model(tokens, targets)[1]
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    torch.testing.assert_close(model(tokens)[0], gpt(backend)(tokens)[0], **FP64)


def test_dropout_is_on_the_embeddings_and_both_branches():
    model = gpt(dropout=0.25)
    outputs = {}
    model.h[0].register_forward_pre_hook(lambda _, x: outputs.setdefault("embeddings", []).append(x[0]))
    for name in ("attn", "mlp"):
        branch = getattr(model.h[0], name)
        branch.register_forward_hook(lambda _, __, y, name=name: outputs.setdefault(name, []).append(y))
    tokens, _ = batch(size=16)
    model.eval()(tokens)
    model.train()(tokens)
    kept, dropped = outputs["embeddings"]
    torch.testing.assert_close(dropped[dropped != 0], kept[dropped != 0] / 0.75, **FP64)
    for name in ("embeddings", "attn", "mlp"):
        evaluated, trained = outputs[name]
        assert (evaluated != 0).all()
        # 8192 draws; five deviations of √(0.25 · 0.75 / 8192)
        assert abs((trained == 0).double().mean().item() - 0.25) < 0.024, name


def test_attention_gets_its_dropout_in_training_only():
    rates = []

    def attention(q, k, v, *, is_causal, dropout_p):
        rates.append((is_causal, dropout_p))
        return v

    model = GPT(GPTConfig(**{**vars(CONFIG), "dropout": 0.25}), attention)
    model.train()(batch()[0])
    model.eval()(batch()[0])
    assert rates == [(True, 0.25)] * 2 + [(True, 0.0)] * 2


def test_too_long_a_sequence():
    with pytest.raises(ValueError, match=r"17 tokens; block_size=16"):
        gpt()(torch.zeros(1, 17, dtype=torch.int64))


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match=r"embed_dim is 30; a multiple of num_heads=4"):
        GPTConfig(16, 131, 2, 4, 30)


def test_masked_targets_are_left_out():
    model = gpt()
    tokens, targets = batch()
    masked = targets.clone()
    masked[:, 5:] = -100
    torch.testing.assert_close(model(tokens, masked)[1], model(tokens[:, :5], targets[:, :5])[1], **FP64)


# --- generation ---------------------------------------------------------------------------------------------


def test_generate_is_decided_by_its_generator():
    model = gpt()
    tokens, _ = batch(length=4)

    def sample(seed, **arguments):
        return model.generate(tokens, 8, generator=torch.Generator().manual_seed(seed), **arguments)

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))
    assert torch.equal(sample(0)[:, :4], tokens) and sample(0).shape == (3, 12)
    assert sample(0).max() < 131


def test_top_k_of_one_is_argmax_and_the_context_is_cropped():
    model = gpt()
    tokens, _ = batch(length=4)
    expected = tokens
    with torch.no_grad():
        for _ in range(30):
            logits = model(expected[:, max(0, expected.shape[1] - 16) :])[0]
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    contexts = []
    model.register_forward_pre_hook(lambda _, arguments: contexts.append(arguments[0]))
    assert torch.equal(model.generate(tokens, 30, top_k=1), expected)
    for length, context in zip(range(4, 34), contexts, strict=True):
        assert torch.equal(context, expected[:, max(0, length - 16) : length])
    assert torch.equal(model.generate(tokens, 30, temperature=1e-9), expected)


def test_samples_have_the_model_s_distribution():
    model = gpt(vocab_size=5)
    tokens = torch.zeros(40_000, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = model(tokens[:1])[0][0, -1]
    sampled = model.generate(tokens, 1, temperature=2.0, top_k=3, generator=generator)[:, 1]
    top = logits.topk(3).indices
    expected = torch.zeros(5, dtype=torch.float64).index_copy(0, top, (logits[top] / 2).softmax(0))
    observed = sampled.bincount(minlength=5) / len(sampled)
    assert (observed - expected).abs().max() < 0.0125  # five deviations of at most √(1/4 / 40000)
    assert not observed[expected == 0].any()


def test_generate_ignores_dropout_and_restores_the_mode():
    model = gpt(dropout=0.5).train()
    tokens, _ = batch(length=4)
    expected = gpt().generate(tokens, 6, top_k=1)
    assert torch.equal(model.generate(tokens, 6, top_k=1), expected)
    assert model.training


@pytest.mark.parametrize("arguments", [{"temperature": 0.0}, {"temperature": math.nan}, {"top_k": 0}])
def test_generate_refuses(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} is"):
        gpt().generate(batch()[0], 1, **arguments)


# --- recomputed blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", ["tiled", "math"])
def test_recomputed_blocks_change_nothing(backend, dropout):
    models = [gpt(backend, dropout=dropout, recompute_blocks=recomputed) for recomputed in (False, True)]
    results = []
    for model in models:
        model.h[1].mlp.c_fc.weight.requires_grad_(False)
        params = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(3)
        loss = model(*batch())[1]
        z = [torch.randn(p.shape, generator=torch.Generator().manual_seed(4)).double() for p in params]
        results.append((loss.detach(), *hessian_vector_product(loss, params, z)))
    torch.testing.assert_close(results[1], results[0], **FP64)
    assert torch.equal(models[0].eval()(batch()[0])[0], models[1].eval()(batch()[0])[0])


def test_recomputed_blocks_in_a_compiled_step():
    plain, model = (gpt("tiled", recompute_blocks=recomputed) for recomputed in (False, True))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(m(*batch())[1], list(m.parameters())) for m in (plain, compiled)]
    torch.testing.assert_close(gradients[1], gradients[0], **FP64)


def test_a_run_with_recomputed_blocks_is_the_same_run(tmp_path):
    from tests.train.launch import SMALL, SOPHIA, series, train_here

    run = (*SMALL, *SOPHIA, "model.dropout=0.1", "train.max_steps=6")
    for recomputed in ("false", "true"):
        train_here(*run, f"model.recompute_blocks={recomputed}", run=tmp_path / f"recomputed-{recomputed}")
    for key in ("train/loss", "val/loss", "hessian/norm"):
        got, expected = (
            series(tmp_path / f"recomputed-{recomputed}", key) for recomputed in ("true", "false")
        )
        assert got == pytest.approx(expected, rel=1e-9)
