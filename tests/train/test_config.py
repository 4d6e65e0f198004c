"""Wrong command lines: each ends with one line on stderr and status 1, before torch or the data are touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Command line -> what stderr holds. README.md shows the same list.
WRONG = {
    ("optim.lrr=1e-3",): "optim.lrr is not a key of the configuration; did you mean optim.lr?",
    (
        "trian.max_steps=5",
    ): "trian.max_steps is not a key of the configuration; did you mean train.max_steps?",
    ("optim.lr=fast",): "optim.lr=fast: expected a number",
    ("train.max_steps=1.5",): "train.max_steps=1.5: expected an integer",
    ("train.max_steps=0",): "train.max_steps=0: expected a positive integer",
    ("train.precision=fp8",): "train.precision=fp8: expected one of fp64, fp32, bf16",
    ("model=gpt3",): "model=gpt3: expected one of gpt2-large, gpt2-medium, gpt2-small, gpt2-tiny, gpt2-xl",
    ("model.num_heads=5",): (
        "model.embed_dim=128 is not divisible by model.num_heads=5; give a width that is a multiple of the number of heads"
    ),
    ("model.num_heads=16",): (
        "model.embed_dim=128 over model.num_heads=16 is a head dimension of 8; flashbob takes 16 to 256"
    ),
    ("train.global_batch_size=12",): (
        "train.global_batch_size=12 does not divide over 1 rank × train.micro_batch_size=8; give a multiple of 8"
    ),
    ("arm=adamw", "optim.gamma=1"): "optim.gamma does not exist with this choice of optim; its keys are ",
    ("arm=sophia-flashbob", "attention=sdpa"): (
        "optim.name=sophia needs attention that is differentiable twice, and attention.backend=sdpa is not; "
        "use attention.backend=auto, math, hybrid or tiled"
    ),
    (
        "attention.backend=tield",
    ): "attention.backend=tield: did you mean tiled? expected one of sdpa, auto, fused, triton, ",
    ("optim.hessian_batch_size=32",): (
        "optim.hessian_batch_size=32 exceeds train.global_batch_size=16; give at most the whole batch"
    ),
    ("arm=sophia-flashbob", "train.shard=fsdp2"): (
        "optim.name=sophia differentiates gradients, and the gradients of train.shard=fsdp2 have no graph; "
        "use train.shard=zero1, which shares out the optimizer's states"
    ),
    ("arm=adamw", "train.shard=fsdp2", "train.check_ranks_every=1"): (
        "train.check_ranks_every=1 compares what every rank holds alike, and with train.shard=fsdp2 nothing is; "
        "give 0, or train.shard=none or zero1"
    ),
    ("optim.hessian_method=forward", "model.recompute_blocks=true"): (
        "model.recompute_blocks=true has no forward mode; with optim.hessian_method=forward give model.recompute_blocks=false"
    ),
    ("optim.hessian_method=tangents",): "optim.hessian_method=tangents: expected one of reverse, forward",
    ("train.shard=zero3",): "train.shard=zero3: expected one of none, zero1, fsdp2",
    ("train.check_ranks_every=-1",): "train.check_ranks_every=-1: expected 0 (never) or a positive integer",
    ("optim.betas=[0.9,1.0]",): "optim.betas=[0.9, 1.0]: expected two numbers in [0, 1)",
    ("optim.probe=uniform",): "optim.probe=uniform: expected one of gaussian, rademacher",
    ("optim.min_lr=1",): "optim.min_lr=1 exceeds optim.lr=",
    ("device=tpu",): "device=tpu: expected auto, cpu, cuda or cuda:N",
    ("seed=-1",): "seed=-1: expected an integer in [0, 2^63)",
    ("preset=none",): "train.max_steps has no value; give one, or choose a preset",
    ("train.resume=/nowhere/step-00000001.pt",): (
        "train.resume=/nowhere/step-00000001.pt: no such file; expected auto, never, a checkpoint or a run directory"
    ),
    ("data.path=/nowhere",): "data.path=/nowhere: no such file or directory",
    ("run.name=a/b",): "run.name=a/b: expected the name of a folder; use run.dir for a path",
}


def train(*arguments, cwd=ROOT, env=None, timeout=120):
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_configuration_gets_one_line(arguments, tmp_path):
    result = train(*arguments, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("train.py: error: ")
    assert WRONG[arguments] in line
    assert list(tmp_path.iterdir()) == []


def test_of_several_ranks_one_speaks(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=3",
            str(ROOT / "train.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert "does not divide over 3 ranks × train.micro_batch_size=8; give a multiple of 24" in line
