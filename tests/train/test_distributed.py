"""Several ranks against one process, which is the oracle: losses, states, checkpoints, and what happens when a rank fails."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.launch import ROOT, SMALL, environment, rows, series
from train.checkpoint import list_checkpoints

ARMS = ("adamw", "sophia-math", "sophia-hybrid", "sophia-paper", "sophia-flashbob")
WORLDS = (1, 2, 4)
REPLAYED = (1, 2)
COMPILED = 2
# Eight micro-batches of two sequences: 8, 4 or 2 rounds. Three batches of validation do not divide over the ranks.
SETTING = (*SMALL, "train.global_batch_size=16", "train.eval_batches=3", "train.checkpoint_every=4")
IN_FP32 = ("adamw", "sophia-flashbob")  # what differs between the arms is compared in fp64
FP32 = ("train.precision=fp32", "train.max_steps=5", "train.checkpoint_every=0")
# Two, one or no rounds of a Hessian step come from the Hessian's own pass … and the others from an ordinary one.
MIXED = ("optim.hessian_batch_size=8",)
SHARDS = {"adamw": ("zero1", "fsdp2"), "sophia-flashbob": ("zero1",)}


def arm(name: str) -> tuple[str, ...]:
    return (f"arm={name}", *(("optim.hessian_interval=3",) if name != "adamw" else ()))


# What befalls one rank of the run `apart`, by world size, and what is then said.
APART = {
    2: ("parameter", 1, "zero1", "h.1.mlp.c_fc.bias of rank 1 is not that of rank 0"),
    4: (
        "momentum",
        0,
        "none",
        "the optimizer's momentum of h.1.mlp.c_fc.bias of rank 0 is not that of rank 1",
    ),
}


def job(name: str, *overrides: str, faults: tuple[dict, ...] = (), replayed: bool = False) -> dict:
    return {"name": name, "overrides": [*SETTING, *overrides], "faults": faults, "replayed": replayed}


def run(jobs: list[dict], folder: Path, processes: int, *options: str, expect: int = 0) -> str:
    """Run `jobs` in `folder` by `processes` ranks of one launch; returns what they printed."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *options]
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.train.jobs", "jobs.json"],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=400,
    )  # fmt: skip
    assert result.returncode == expect, result.stdout
    return result.stdout


def measured(folder: Path, name: str, processes: int) -> list[dict]:
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """The same trainings by 1, 2 and 4 ranks: world size -> directory of the runs."""
    folder = tmp_path_factory.mktemp("worlds")
    for size in WORLDS:
        compared = () if size == 1 else ("train.check_ranks_every=1",)
        jobs = [job(name, *arm(name), *compared) for name in ARMS]
        jobs += [job(f"{name}-fp32", *arm(name), *FP32) for name in IN_FP32]
        jobs.append(job("mixed", *arm("sophia-flashbob"), *MIXED, *compared))
        if size in REPLAYED:
            jobs.append(job("mixed-replayed", *arm("sophia-flashbob"), *MIXED, *compared, replayed=True))
        if size > 1:
            jobs.append(job("mixed-zero1", *arm("sophia-flashbob"), *MIXED, "train.shard=zero1", *compared))
            jobs += [
                job(f"{name}-{shard}", *arm(name), f"train.shard={shard}")
                for name, shards in SHARDS.items()
                for shard in shards
            ]
            if size == COMPILED:
                compiled = ("train.compile=true", "train.shard=zero1")
                jobs.append(job("adamw-compiled", *arm("adamw"), *FP32, *compiled))
            kind, rank, shard, _ = APART[size]
            every_two = ("train.check_ranks_every=2", f"train.shard={shard}")
            fault = {"kind": kind, "rank": rank, "step": 6}
            jobs.append(job("apart", *arm("sophia-flashbob"), *every_two, faults=(fault,)))
        run(jobs, folder / str(size), size)
    return {size: folder / str(size) for size in WORLDS}


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", WORLDS[1:])
@pytest.mark.parametrize("name", [*ARMS, "mixed"])
def test_ranks_train_as_one_process(name, size, worlds):
    """fp64: sums over rounds and ranks come in another order, 1e-16 each; 12 steps keep what grows of it below 1e-10.

    A sign step does not amplify more here: the elements whose sign is rounding are the key biases, on which no loss depends.
    """
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        one = series(worlds[1] / name, key)
        assert len(one) == (2 if key == "val/loss" else 12)
        assert series(worlds[size] / name, key) == pytest.approx(one, rel=1e-10)
    hessian = series(worlds[1] / name, "hessian/norm")
    assert len(hessian) == (0 if name == "adamw" else 12)
    assert series(worlds[size] / name, "hessian/norm") == pytest.approx(hessian, rel=1e-8)


@pytest.mark.parametrize("size", WORLDS[1:])
@pytest.mark.parametrize("name", IN_FP32)
def test_ranks_begin_as_one_process_in_fp32(name, size, worlds):
    """The first loss is before any step: fp32 rounding of a mean. Then signs of small momenta turn with rounding, each of
    which moves an element by 2 lr, up to 6e-3 of 0.02: five steps at 1e-4, a thousand roundings."""
    one, several = (series(worlds[w] / f"{name}-fp32", "train/loss") for w in (1, size))
    assert len(one) == 5
    assert several[0] == pytest.approx(one[0], rel=1e-6)
    assert several == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("size", REPLAYED)
def test_steps_for_cuda_graphs_are_those_without(size, worlds):
    """Gradients stay in place and are averaged at the end of the step, not while the last backward pass runs."""
    for key in ("train/loss", "val/loss", "train/grad_norm", "hessian/norm"):
        expected = series(worlds[1] / "mixed", key)
        assert series(worlds[size] / "mixed-replayed", key) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("size", WORLDS[1:])
@pytest.mark.parametrize("name", ["adamw-zero1", "adamw-fsdp2", "sophia-flashbob-zero1", "mixed-zero1"])
def test_sharding_changes_no_result(name, size, worlds):
    """An update is of each element alone: ZeRO-1 takes the very steps of DDP. FSDP2 sums gradients in another order."""
    whole = worlds[size] / name.rpartition("-")[0]
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        expected = series(whole, key)
        assert series(worlds[size] / name, key) == pytest.approx(expected, rel=1e-12)
    for key in ("hessian/norm", "hessian/clip_fraction", "hessian/negative_fraction", "train/momentum_norm"):
        assert series(worlds[size] / name, key) == pytest.approx(series(whole, key), rel=1e-12)


@pytest.mark.parametrize("size", WORLDS[1:])
def test_a_rank_holds_its_share_of_the_optimizer_and_one_copy_of_the_gradients(size, worlds):
    for name, shards in SHARDS.items():
        for rank in measured(worlds[size], name, size):
            assert rank["optimizer_elements"] == 2 * rank["parameters"]
            # Every gradient is a view of one of DDP's few buckets.
            assert rank["gradients"] == 28 and rank["gradient_storages"] < 5
        for shard in shards:
            held = [rank["optimizer_elements"] for rank in measured(worlds[size], f"{name}-{shard}", size)]
            parameters = measured(worlds[size], name, size)[0]["parameters"]
            assert sum(held) == 2 * parameters
            # Equal up to what aligns a share (zero1) and to rows of a parameter (fsdp2).
            assert max(held) <= 2 * parameters / size + 2 * 28 * 64


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_in_any_world_and_sharding(worlds, tmp_path):
    """What four steps of another world add to the first eight is what the first would have added."""
    went_on = {1: [], 2: []}
    for origin, name, size, shard in (
        (2, "sophia-flashbob-zero1", 1, "none"),
        (2, "adamw-fsdp2", 1, "none"),
        (1, "sophia-flashbob", 2, "zero1"),
        (1, "adamw", 2, "fsdp2"),
        (4, "sophia-flashbob-zero1", 2, "zero1"),
        (4, "adamw-zero1", 2, "fsdp2"),
        (2, "adamw-fsdp2", 2, "zero1"),
    ):
        target = tmp_path / str(size) / f"{name}-{origin}-{shard}"
        shutil.copytree(worlds[origin] / name, target)
        list_checkpoints(target / "checkpoints")[-1].unlink()
        base = name.removesuffix("-zero1").removesuffix("-fsdp2")
        went_on[size].append((target, base, job(target.name, *arm(base), f"train.shard={shard}")))
    for size, targets in went_on.items():
        printed = run([job for _, _, job in targets], tmp_path / str(size), size)
        assert printed.count("continues after step 8") == len(targets)
        for target, base, _ in targets:
            assert [row["step"] for row in rows(target)] == list(range(1, 13))
            for key in ("train/loss", "val/loss", "hessian/norm"):
                expected = series(worlds[1] / base, key)
                assert series(target, key) == pytest.approx(expected, rel=1e-8 if "norm" in key else 1e-10)


@pytest.mark.parametrize("name", ["adamw-zero1", "adamw-fsdp2", "sophia-flashbob-zero1"])
def test_a_checkpoint_is_that_of_one_process(name, worlds):
    one, sharded = (
        torch.load(list_checkpoints(worlds[size] / run / "checkpoints")[-1], weights_only=True)
        for size, run in ((1, name.rpartition("-")[0]), (2, name))
    )
    assert list(sharded["model"]) == list(one["model"])
    assert sharded["optimizer"]["param_groups"] == one["optimizer"]["param_groups"]
    assert sharded["optimizer"]["state"].keys() == one["optimizer"]["state"].keys()
    for index, state in one["optimizer"]["state"].items():
        assert {k: (x.shape, x.dtype) for k, x in sharded["optimizer"]["state"][index].items()} == {
            k: (x.shape, x.dtype) for k, x in state.items()
        }
    tied = {sharded["model"][key].untyped_storage().data_ptr() for key in ("wte.weight", "lm_head.weight")}
    assert len(tied) == 1


# --- ranks that come apart, and ranks that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("size", APART)
def test_ranks_that_have_come_apart_stop(size, worlds):
    *_, line = APART[size]
    for rank in measured(worlds[size], "apart", size):
        assert rank["stopped"].startswith(f"step 6: the ranks have come apart: {line}. No checkpoint")
    assert [path.stem for path in list_checkpoints(worlds[size] / "apart" / "checkpoints")] == [
        "step-00000004"
    ]


def test_torchrun_restarts_ranks_from_the_last_checkpoint_and_shows_the_error_that_ends_them(
    worlds, tmp_path
):
    faults = (
        {"kind": "kill", "rank": 1, "step": 6, "life": 0},
        {"kind": "raise", "rank": 1, "step": 10, "life": 1},
    )
    jobs = [job("run", *arm("sophia-flashbob"), "train.shard=zero1", faults=faults)]
    printed = run(jobs, tmp_path, 2, "--max-restarts=1", expect=1)
    assert "continues after step 4" in printed
    assert "RuntimeError: a fault of rank 1" in printed
    steps = [path.stem for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps == ["step-00000004", "step-00000008"]
    undisturbed = worlds[2] / "sophia-flashbob-zero1"
    for key in ("step", "train/loss", "train/grad_norm", "hessian/norm"):
        assert series(tmp_path / "run", key)[:9] == series(undisturbed, key)[:9]


def test_a_compiled_model_over_ranks(worlds):
    """DDP's buckets cut the compiled graph. C++ sums in another order: fp32 rounding, as between worlds."""
    eager = series(worlds[COMPILED] / "adamw-fp32", "train/loss")
    assert series(worlds[COMPILED] / "adamw-compiled", "train/loss") == pytest.approx(eager, rel=1e-4)
