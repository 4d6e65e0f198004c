"""The training loop on a CUDA device: nothing in a step waits for it."""

import math

import pytest
import torch

from tests.train.launch import ADAMW, SMALL, SOPHIA, build_trainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("arm", [ADAMW, SOPHIA])
@pytest.mark.parametrize(
    "compiled", [(), ("train.compile=true",), ("train.compile=true", "train.cuda_graph=true")]
)
def test_steps_do_not_wait_for_the_device(arm, compiled, tmp_path):
    trainer = build_trainer(
        *SMALL, *arm, *compiled, "device=cuda", "train.precision=bf16", f"run.dir={tmp_path}"
    )
    records = []
    for step in range(1, 9):  # compiled, and each kind of step taken once, by step 4
        trainer.step = step
        if step == 5:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            records.append(trainer._take_step())
        finally:
            if step == 8:
                torch.cuda.set_sync_debug_mode("default")
    rows = [trainer._finish(record) for record in records]
    assert all(math.isfinite(row["train/loss"]) and row["time/step_s"] > 0 for row in rows)
    assert [row["step"] for row in rows if "hessian/event_s" in row] == ([1, 4, 7] if arm == SOPHIA else [])


@pytest.mark.parametrize("arm", [ADAMW, SOPHIA])
def test_a_step_that_is_not_finite_is_left_out_on_the_device(arm, tmp_path):
    trainer = build_trainer(
        *SMALL, *arm, "device=cuda", "train.precision=fp32", "optim.on_nonfinite=skip", f"run.dir={tmp_path}"
    )
    for step in (1, 2):
        trainer.step = step
        before = [p.detach().clone() for p in trainer.params]
        if step == 2:
            with torch.no_grad():
                trainer.model.ln_f.bias[3] = torch.nan
                before = [p.detach().clone() for p in trainer.params]
        row = trainer._finish(trainer._take_step())
    assert row["train/nonfinite"] == "train/loss" and trainer.skipped_in_a_row == 1
    assert all(torch.equal(p.nan_to_num(9.0), q.nan_to_num(9.0)) for p, q in zip(trainer.params, before))
    assert all(x.isfinite().all() for state in trainer.optimizer.state.values() for x in state.values())


@pytest.mark.parametrize("arm", [ADAMW, SOPHIA])
def test_replayed_steps_are_the_steps_without_a_graph(arm, tmp_path):
    """Of a graph, and where gradients, which it depends on, move."""
    losses = {}
    for graph in ("false", "true"):
        trainer = build_trainer(
            *SMALL, *arm, "device=cuda", "train.precision=fp32", "train.compile=true", f"train.cuda_graph={graph}",
            f"run.dir={tmp_path / graph}",
        )  # fmt: skip
        losses[graph] = []
        for step in range(1, 9):
            trainer.step = step
            if step == 6:
                trainer.model.zero_grad(set_to_none=True)
            losses[graph].append(trainer._finish(trainer._take_step())["train/loss"])
        assert (trainer.gradient_graph is not None) == (graph == "true")
    # The embedding's gradient is summed with atomics, in another order on every run.
    torch.testing.assert_close(losses["true"], losses["false"], rtol=1e-5, atol=0.0)
    assert losses["true"][-1] < losses["true"][0]
