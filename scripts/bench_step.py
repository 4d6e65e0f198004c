"""What an optimizer's step costs beside PyTorch's fused AdamW: the parameters of a GPT-2, random gradients.

    python -m scripts.bench_step [--model gpt2-small] [--out docs/results/step.json]

Times are CUDA events around the step alone, with the host ahead; `host_ms` is what the host spends on it.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path

import torch
import triton
from omegaconf import OmegaConf
from rich.console import Console

from optim import SophiaH
from scripts.tune_attention import median_ms
from train.model import GPT, GPTConfig, attention_function


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--commit", help="recorded in each row (default: git's)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/step.json"))
    arguments = parser.parse_args()
    c = OmegaConf.load(
        Path(__file__).resolve().parent.parent / "configs" / "model" / f"{arguments.model}.yaml"
    )
    with torch.device("cuda"):
        model = GPT(
            GPTConfig(1024, 50257, c.num_layers, c.num_heads, c.embed_dim), attention_function("auto")
        )
    params = list(model.parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    optimizers = {
        "adamw-fused": lambda: torch.optim.AdamW(params, lr=1e-5, fused=True),
        "adamw-foreach": lambda: torch.optim.AdamW(params, lr=1e-5, foreach=True),
        "sophia-foreach": lambda: SophiaH(params, lr=1e-5, fused=False),
        "sophia-fused": lambda: SophiaH(params, lr=1e-5, fused=True),
    }
    console, rows = Console(width=120), []
    for name, build in optimizers.items():
        optimizer = build()
        if isinstance(optimizer, SophiaH):
            optimizer.update_hessian([torch.rand_like(p) for p in params])
        steps = {name: optimizer.step}
        if isinstance(optimizer, SophiaH):

            def with_statistics(optimizer: SophiaH = optimizer) -> None:
                optimizer.step()
                optimizer.statistics()

            steps[f"{name}+statistics"] = with_statistics
        for label, step in steps.items():
            ms = median_ms(step)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                step()
            host = (time.perf_counter() - start) * 100
            torch.cuda.synchronize()
            rows.append({
                "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                "commit": arguments.commit or subprocess.getoutput("git rev-parse --short HEAD"),
                "model": arguments.model, "parameters": sum(p.numel() for p in params), "step": label,
                "ms": ms, "host_ms": host, "ratio_to_adamw_fused": ms / rows[0]["ms"] if rows else 1.0,
            })  # fmt: skip
            console.print(
                f"{label:28} {ms:7.3f} ms  {rows[-1]['ratio_to_adamw_fused']:5.2f} ×  host {host:.2f} ms"
            )
        del optimizer
        torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
