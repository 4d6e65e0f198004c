"""Several trainings, one after the other, by one set of ranks: `torchrun … -m tests.train.jobs JOBS.json`.

JOBS.json is a list of {"name": …, "overrides": […], "faults": […]}. Each job writes its run directory, `name`, and beside
it what every rank has measured, `name.RANK.json`. A fault, {"kind": …, "rank": …, "step": …, "life": …}, befalls a rank
after a step, in a life of its that torchrun counts from 0: "kill" and "raise" end it; anything else names what it changes
by one ulp.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from tests.train.launch import build_trainer
from train import distributed
from train.step_record import StepRecord
from train.trainer import Trainer, TrainingStopped


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
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
