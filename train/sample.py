"""Evaluate a checkpoint and sample text from it.

    python -m train.sample runs/NAME --prompt "ROMEO:" --tokens 300

The argument is a run directory (its newest checkpoint) or a checkpoint. The validation loss, over the same fixed batches
as in training, goes to stderr; the text to stdout.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch

from data import DataError, TokenizerError, open_data
from train import checkpoint
from train.config import Config, ConfigError, build_config
from train.model import GPT, GPTConfig, attention_function


def load_model(path: str | Path, device: torch.device) -> tuple[GPT, Config, int]:
    """The model of the checkpoint (or run directory) `path` in evaluation mode, its configuration and its step."""
    contents = checkpoint.load(checkpoint.locate(path))
    config = build_config(contents["config"])
    m = config.model
    model = GPT(
        GPTConfig(
            m.block_size, contents["vocab_size"], m.num_layers, m.num_heads, m.embed_dim, m.dropout, m.bias
        ),
        attention_function(config.attention.backend),
    )
    model.load_state_dict(contents["model"])
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    return model.to(device, dtype).eval(), config, contents["step"]


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="run directory or checkpoint")
    parser.add_argument("--prompt", default="\n", help="text to continue")
    parser.add_argument(
        "--tokens", type=int, default=300, help="tokens to sample; 0: evaluate only (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="default %(default)s")
    parser.add_argument("--top-k", type=int, help="sample from the k most likely tokens only")
    parser.add_argument("--seed", type=int, default=1337, help="default %(default)s")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default %(default)s"
    )
    parser.add_argument("--no-eval", action="store_true", help="do not compute the validation loss")
    options = parser.parse_args(arguments)
    if options.tokens < 0 or options.temperature <= 0 or (options.top_k is not None and options.top_k < 1):
        parser.error("--tokens must be >= 0, --temperature > 0 and --top-k >= 1")

    device = torch.device(options.device)
    model, config, step = load_model(options.path, device)
    data = open_data(config.data, config.model.block_size, config.seed)
    autocast = (
        torch.autocast(device.type, torch.bfloat16)
        if config.train.precision == "bf16"
        else contextlib.nullcontext()
    )
    with autocast:
        if not options.no_eval:
            batch_size = config.train.eval_batch_size or config.train.micro_batch_size
            total, count = 0.0, 0
            for tokens, targets in data.validation_batches(batch_size, config.train.eval_batches):
                total += model(tokens.to(device), targets.to(device))[1].item() * len(tokens)
                count += len(tokens)
            print(f"{config.run.name}, step {step}: validation loss {total / count:.4f}", file=sys.stderr)
        if options.tokens:
            prompt = torch.tensor([data.tokenizer.encode(options.prompt)], device=device)
            if not prompt.numel():
                parser.error("--prompt must have at least one token")
            generator = torch.Generator(device).manual_seed(options.seed)
            tokens = model.generate(
                prompt,
                options.tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                generator=generator,
            )
            print(data.tokenizer.decode(tokens[0].tolist()))


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, checkpoint.CheckpointError, DataError, TokenizerError) as error:
        sys.exit(f"train.sample: error: {error}")
