"""The program: command line -> configuration -> `train.trainer`. Everything that is wrong ends as one line on stderr."""

import atexit
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from train import distributed
from train.config import (
    GROUPS,
    Config,
    ConfigError,
    build_config,
    may_change_on_resume,
    unknown_key,
    validate,
    validate_machine,
)

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_used_directories: set[str] = set()  # of the sweep that this process runs
_reported: list[str] = []  # errors that were printed


def main() -> None:
    """Run the command line of this process. Exits with status 1 after a line on stderr, or 130 after Ctrl-C."""
    distributed.catch_stop_signals(starting=True)
    register_resolvers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through: they are reported here
    try:
        hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")(_job)()
    except (HydraException, OmegaConfBaseException) as error:
        _report(_hydra_line(error))
    finally:
        distributed.ignore_stop_signals()
        distributed.shutdown()
    if _reported:
        sys.exit(1)


def register_resolvers() -> None:
    """What the configuration files may call inside ${...}."""
    OmegaConf.register_new_resolver("scratch_dir", _scratch_dir, use_cache=True, replace=True)
    # A preset serves every arm, and a good learning rate is an optimizer's own.
    OmegaConf.register_new_resolver("for_optimizer", lambda name, values: values[name], replace=True)


def _job(values: DictConfig) -> None:
    """One run: the whole command, or one job of a sweep, whose other jobs go on after an error."""
    try:
        _train(values)
    except _expected_errors() as error:
        _report(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _report(
            f"{error.filename or 'the run directory'}: the disk is full; the last checkpoint is as it was"
        )


def _train(values: DictConfig) -> None:
    config = build_config(_resolved(values))
    world = distributed.environment()
    validate(config, world.size)
    name_run(config)
    validate_machine(config, world.local_rank)
    from train.trainer import (
        Trainer,
    )  # torch and the model only now, when the configuration is known to be good

    trainer = Trainer(config)
    distributed.catch_stop_signals()
    trainer.run()


def _expected_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is for the user; anything else is a defect and keeps its traceback."""
    expected: tuple[type[Exception], ...] = (ConfigError,)
    if "train.trainer" in sys.modules:
        from data import DataError, TokenizerError
        from train.checkpoint import CheckpointError
        from train.trainer import TrainingStopped

        expected += (CheckpointError, TrainingStopped, DataError, TokenizerError)
    return expected


def _resolved(values: DictConfig) -> dict[str, Any]:
    try:
        container = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value; give one, or choose a preset") from None
    except InterpolationResolutionError as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


# --- the name of a run ------------------------------------------------------------------------------------------------


def name_run(config: Config) -> None:
    """Fill in run.name and run.dir from the command line: the same command always finds the same directory.

    In a sweep a name or directory that was given gets each job's own name added, so that no two jobs share one.
    """
    hydra_config = HydraConfig.get()
    sweep = hydra_config.mode == RunMode.MULTIRUN
    automatic = default_name(config, list(hydra_config.overrides.task))
    if config.run.dir is not None:
        config.run.name = config.run.name or Path(config.run.dir).name
        config.run.dir = str(Path(config.run.dir).expanduser() / (automatic if sweep else ""))
    else:
        if config.run.name is None:
            config.run.name = automatic
        elif sweep:
            config.run.name = f"{config.run.name}-{automatic}"
        if "/" in config.run.name or config.run.name in ("", ".", ".."):
            raise ConfigError(
                f"run.name={config.run.name}: expected the name of a folder; use run.dir for a path"
            )
        config.run.dir = str(Path("runs") / config.run.name)
    if config.run.dir in _used_directories:
        raise ConfigError(
            f"run.dir={config.run.dir}: another job of this sweep has it; sweep keys that change the training"
        )
    _used_directories.add(config.run.dir)


def default_name(config: Config, overrides: list[str]) -> str:
    """arm-model-data, then every other override that changes what is computed."""
    parts = [config.arm, config.model.name, config.data.name]
    if config.preset != "shakespeare":
        parts.append(config.preset)
    cut = []
    for override in sorted(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        key = key.partition("@")[0]
        if key in ("arm", "model", "data", "preset") or may_change_on_resume(key):
            continue
        shown = f"{key.rpartition('.')[2]}={value}"
        safe = re.sub(r"[^A-Za-z0-9._=+-]+", "_", shown.rpartition("/")[2] if "/" in shown else shown).strip(
            "_"
        )
        parts.append(safe)
        if safe != shown:
            cut.append(override)
    name = "-".join(parts)
    if len(name) > 120:
        cut, name = overrides, name[:110]
    return f"{name}-{hashlib.sha256(' '.join(cut).encode()).hexdigest()[:6]}" if cut else name


# --- one line for every error -----------------------------------------------------------------------------------------


def _report(line: str) -> None:
    """Print `line`, on rank 0."""
    rank = distributed.environment().rank
    if rank != 0:
        # Every rank finds the same fault, and torchrun ends the others when the first one exits: leave it to rank 0 to say
        # what is wrong. If it has not failed by then, the fault is this rank's alone.
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if distributed.stop_signal():
                _reported.append(line)
                return
            time.sleep(0.1)
        line = f"rank {rank}: {line}"
    print(f"train.py: error: {line}", file=sys.stderr, flush=True)
    _reported.append(line)


def _hydra_line(error: Exception) -> str:
    """Hydra's and OmegaConf's errors, which take several lines, in one of ours."""
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, MissingConfigException) and (
        match := re.search(r"Could not find '(\w+)/([^']*)'", text)
    ):
        group, option = match.groups()
        options = ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
        return f"{group}={option}: expected one of {options}"
    if match := re.search(r"Could not (?:override|append to config)[^']*'([\w.@/-]+)'", text):
        return str(unknown_key(match.group(1)))
    if match := re.search(r"Key '([\w.@/-]+)' is not in struct", text):
        full = re.search(r"full_key: (\S+)", text)
        return str(unknown_key(full.group(1) if full else match.group(1)))
    if isinstance(error, ConfigCompositionException) and (match := re.search(r"'([\w/]+)'", text)):
        if match.group(1) in GROUPS:
            return f"{match.group(1)}: {_first_line(error)}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())


def _scratch_dir() -> str:
    """Where Hydra's sweeper writes its multirun.yaml, which nobody needs: gone when the process ends."""
    directory = tempfile.mkdtemp(prefix="train-sweep-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
