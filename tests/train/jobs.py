"""Several trainings, one after the other, by one set of ranks: `torchrun … -m tests.train.jobs JOBS.json`.

JOBS.json is a list of {"name": …, "overrides": […], "faults": […], "replayed": …}. Each job writes its run directory, `name`,
and beside it what every rank has measured, `name.RANK.json`. A fault, {"kind": …, "rank": …, "step": …, "life": …}, befalls a
rank after a step, in a life of its that torchrun counts from 0: "kill" and "raise" end it; anything else names what it changes
by one ulp. A job that is replayed takes its ordinary steps as with CUDA graphs, on a CPU.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.train.launch import build_trainer
from train import distributed
from train.step_record import StepRecord
from train.trainer import Trainer, TrainingStopped


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        with as_replayed() if job["replayed"] else nullcontext():
            trainer = build_trainer(*job["overrides"], f"run.dir={job['name']}")
        for fault in job["faults"]:
            befall(trainer, **fault)
        measured: dict[str, Any] = {"stopped": ""}
        try:
            trainer.run()
        except TrainingStopped as error:
            measured["stopped"] = str(error)
        measured["parameters"] = sum(p.numel() for p in trainer.params)
        measured["optimizer_elements"] = sum(
            (x.to_local() if hasattr(x, "to_local") else x).numel()
            for state in trainer.optimizer.state.values()
            for x in state.values()
            if x.dim()
        )
        gradients = [p.grad for p in trainer.params if p.grad is not None]
        measured["gradients"] = len(gradients)
        measured["gradient_storages"] = len({g.untyped_storage().data_ptr() for g in gradients})
        Path(f"{job['name']}.{trainer.world.rank}.json").write_text(json.dumps(measured))
    distributed.shutdown()


@contextmanager
def as_replayed() -> Iterator[None]:
    """Within the block, trainers are built for CUDA graphs of ordinary steps, and run without them what these would replay."""
    with (
        mock.patch.object(Trainer, "_replays_gradients", lambda self: True),
        mock.patch("train.trainer.GradientGraph", Unreplayed),
    ):
        yield


class Unreplayed:
    """A GradientGraph that replays nothing, and checks what a replay would need: gradients that stay where they are."""

    def __init__(self, add_gradient: Callable[..., Tensor], params: Sequence[Tensor]) -> None:
        self.add_gradient = add_gradient
        self.params = params
        self.gradients: list[int] = []

    def __call__(self, *batch: Tensor) -> Tensor:
        loss = self.add_gradient(*batch)
        gradients = [p.grad.data_ptr() for p in self.params if p.grad is not None]
        assert gradients == (self.gradients or gradients)
        self.gradients = gradients
        return loss


def befall(trainer: Trainer, kind: str, rank: int, step: int, life: int = 0) -> None:
    if (trainer.world.rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])) != (rank, life):
        return
    take_step = trainer._take_step

    @torch.no_grad()
    def disturbed(self: Trainer) -> StepRecord:
        with torch.enable_grad():
            record = take_step()
        if self.step == step:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise RuntimeError(f"a fault of rank {rank}")
            p = self.model.h[1].mlp.c_fc.bias
            x = (p if kind == "parameter" else self.optimizer.state[p][kind])[-1:]
            x.copy_(torch.nextafter(x, torch.full_like(x, 9.0)))
        return record

    trainer._take_step = MethodType(disturbed, trainer)


if __name__ == "__main__":
    main()
