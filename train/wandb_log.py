"""Weights & Biases: every step of a run once, also when the run was killed and goes on.

A step that is taken again after a kill may be there already, and the last ones before the kill may have got lost on their way.
So what counts when a run goes on is what is there: on the server, or in the run's offline files.
"""

import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError, WandbConfig, public_dict

# That the server has to answer when a run starts.
SECONDS_FOR_THE_SERVER = float(os.environ.get("WANDB_INIT_TIMEOUT", 30))


class WandbLog:
    """The run's log at Weights & Biases. `rows` are those of its earlier processes that still count.

    wandb's configuration is the run's, and under `system` what it runs on. The group is the arm, unless one is given.
    """

    def __init__(
        self, config: Config, directory: Path, rows: list[dict[str, Any]], system: dict[str, Any]
    ) -> None:
        import wandb
        from wandb.errors import CommError, UsageError

        assert isinstance(config.logger, WandbConfig)
        # The run's id lies in its directory, so that whoever resumes it continues the same run.
        id_file = directory / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n")
        run_id = id_file.read_text().strip()
        there = last_offline_step(directory, run_id)
        public = public_dict(config)
        start = partial(
            wandb.init,
            project=config.logger.project,
            entity=config.logger.entity,
            group=config.logger.group or config.arm,
            tags=list(dict.fromkeys([*public["logger"]["tags"], config.arm, config.model.name])),
            name=config.run.name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config={**public, "system": system},
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=False, init_timeout=SECONDS_FOR_THE_SERVER
            ),
        )
        try:
            self._run = start(mode=config.logger.mode)
        except UsageError as error:
            raise ConfigError(
                f"logger=wandb: {' '.join(str(error).split())} Or give logger.mode=offline, and `wandb sync` later"
            ) from None
        except CommError as error:
            # A run is worth more than its curves being there at once.
            reason = str(error).strip().splitlines()[0]
            print(
                f"warning: wandb's server cannot be reached ({reason}); the run records offline: "
                f"wandb sync {directory}/wandb/offline-run-*",
                flush=True,
            )
            wandb.teardown()  # its service still holds the run's id
            self._run = start(mode="offline")
        # Any of the three can be put on the horizontal axis; the default is the step.
        for name in ("step", "tokens", "time/elapsed_s"):
            self._run.define_metric(name, hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("val/loss", step_metric="step", summary="min")
        self._last = max(
            there, self._run.starting_step - 1
        )  # a resumed run starts after the server's last step
        for row in rows:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        if row["step"] > self._last:
            self._run.log(row, step=row["step"])
            self._last = row["step"]

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def last_offline_step(directory: Path, run_id: str) -> int:
    """The last step in the offline files of a run, 0 if there is none."""
    _, rows = read_offline(directory.glob(f"wandb/offline-run-*-{run_id}/*.wandb"))
    return max((int(row["step"]) for row in rows if "step" in row), default=0)


def read_offline(paths: Iterable[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is in `.wandb` files, in the order given: name, id, group, tags and config of the run, and its rows of metrics."""
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {"config": {}}
    rows = []
    for path in paths:
        for data in records(path):
            record = wandb_internal_pb2.Record.FromString(data)  # pyright: ignore[reportAttributeAccessIssue]
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            elif record.HasField("run"):
                config = {i.key: json.loads(i.value_json) for i in record.run.config.update}
                run["config"] |= config
                run |= {"name": record.run.display_name, "id": record.run.run_id}
                run |= {"group": record.run.run_group, "tags": list(record.run.tags)}
    return run, rows


def records(path: Path) -> Iterator[bytes]:
    """Records of an offline file: LevelDB's log format after a header of 7 bytes. One that a kill cut short is left out."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:  # too little for a header: the rest of the block is filled up
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4) and position <= len(data):  # a whole record, or the last part of one
            yield parts
            parts = b""
