"""Several processes against one: every arm, what is shared out between ranks, and ranks that come apart."""

import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf

from tests.train.launch import ROOT, SMALL, environment, rows, series, train
from train.checkpoint import list_checkpoints, load

ARMS = ("adamw", "sophia-math", "sophia-hybrid", "sophia-paper", "sophia-flashbob")


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Every arm in fp64 and fp32 on 1, 2 and 4 ranks: (ranks, arm, precision) -> run directory."""
    runs = {}
    for ranks in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        settings = [setting for setting in SMALL if not setting.startswith("train.precision")]
        sweep = ("-m", f"arm={','.join(ARMS)}", "train.precision=fp64,fp32", "run.dir=runs")
        train(*sweep, *settings, cwd=folder, processes=0 if ranks == 1 else ranks)
        for path in folder.glob("runs/*/config.yaml"):
            config = OmegaConf.load(path)
            runs[ranks, config.arm, config.train.precision] = path.parent
    return runs


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("arm", ARMS)
def test_ranks_train_as_one_process(arm, ranks, sweeps):
    """The same batches, probes and steps, and sums in another order: 1e-16 each in fp64, which 12 steps amplify to 1e-13.

    In fp32 it is 1e-7 each, and where m / h is near the clip or h near zero Sophia turns a rounding into a step of the whole
    learning rate: the first losses agree to rounding, later ones need not.
    """
    one, several = (sweeps[n, arm, "fp64"] for n in (1, ranks))
    assert len(rows(several)) == 12  # written once, by rank 0
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        assert series(several, key) == pytest.approx(series(one, key), rel=1e-10)
    if arm != "adamw":
        assert series(several, "hessian/norm") == pytest.approx(series(one, "hessian/norm"), rel=1e-8)
        # The loss does not depend on the 64 key biases of 33 000 parameters: the sign of their curvature is rounding.
        for key in ("hessian/clip_fraction", "hessian/negative_fraction"):
            assert series(several, key) == pytest.approx(series(one, key), abs=64 / 33e3)
    one, several = (sweeps[n, arm, "fp32"] for n in (1, ranks))
    assert series(several, "train/loss")[:3] == pytest.approx(series(one, "train/loss")[:3], rel=1e-5)


@pytest.mark.parametrize(
    ("arm", "shard"), [("adamw", "zero1"), ("sophia-flashbob", "zero1"), ("adamw", "fsdp2")]
)
def test_what_is_shared_out_changes_no_loss(arm, shard, sweeps, tmp_path):
    """Two ranks, sharded for 8 steps and then not; one process goes on from the same checkpoints."""
    whole = sweeps[2, arm, "fp64"]
    sharded = (*SMALL, f"arm={arm}", "run.dir=run")
    check = ("train.check_ranks_every=3",) if shard == "zero1" else ()
    train(*sharded, f"train.shard={shard}", *check, cwd=tmp_path, processes=2)
    run = tmp_path / "run"
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        assert series(run, key) == pytest.approx(series(whole, key), rel=1e-10)
    # A checkpoint is what it would be without shards.
    ends = [load(list_checkpoints(folder / "checkpoints")[-1]) for folder in (whole, run)]
    for name, x in ends[0]["model"].items():
        torch.testing.assert_close(ends[1]["model"][name], x, rtol=1e-9, atol=1e-11)
    states = [end["optimizer"]["state"] for end in ends]
    assert states[0].keys() == states[1].keys()
    for index, values in states[0].items():
        for name, x in values.items():
            torch.testing.assert_close(states[1][index][name], x, rtol=1e-7, atol=1e-9)
    # So one process, which shares out nothing, goes on from it.
    list_checkpoints(run / "checkpoints")[-1].unlink()
    result = train(*sharded, cwd=tmp_path)
    assert "continues after step 8" in result.stdout
    assert series(run, "train/loss") == pytest.approx(series(whole, "train/loss"), rel=1e-10)


DISTURBED = """
from train import trainer
from train.main import main

evaluate = trainer.Trainer.evaluate
def disturbing(self):
    loss = evaluate(self)
    if self.world.rank == 1 and self.step == 6:
        list(self.model.parameters())[3].data.view(-1)[2] += 1e-9
    return loss
trainer.Trainer.evaluate = disturbing
main()
"""


def test_ranks_that_come_apart_are_stopped(tmp_path):
    """A weight of rank 1 changed after step 6: found at step 6, before its checkpoint."""
    program = tmp_path / "disturbed.py"
    program.write_text(DISTURBED)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    result = subprocess.run(
        [*launcher, str(program), *SMALL, "arm=adamw", "train.check_ranks_every=3", "run.dir=run"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode != 0
    message = "step 6: the ranks have come apart: "
    assert message in result.stderr, result.stderr
    assert "of rank 1 is not that of rank 0" in result.stderr
    steps = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps == ["step-00000004.pt"]
