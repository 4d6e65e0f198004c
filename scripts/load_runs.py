"""Runs as they were recorded, in groups over seeds, and what is measured of them. `scripts.compare_runs` shows it."""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from train.config import flatten
from train.wandb_log import read_offline

AXES = ("time/elapsed_s", "tokens", "step")
# Keys in which the runs of one group may differ: names, and what is shown or kept.
OF_NO_EFFECT = (
    "seed",
    "run.",
    "logger.",
    "profile",
    "train.resume",
    "train.log_every",
    "train.keep_checkpoints",
)


def fail(message: str) -> SystemExit:
    return SystemExit(f"compare_runs: error: {message}")


@dataclass
class Run:
    """One run's record: a row of numbers a step, in order of step, the configuration, and what it ran on.

    `path` is where it was read from; `config` is flat (`optim.lr`), empty if none was recorded; `system` has an entry for
    each change of machine or version, empty for runs that did not record it.
    """

    name: str
    path: Path
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    system: list[dict[str, Any]]
    remarks: list[str]  # what a reader must know: cut short, steps that were skipped

    @classmethod
    def load(cls, source: str | Path) -> "Run":
        """A run directory, one of wandb's offline directories, or `wandb:entity/project/run_id`. SystemExit: there is none."""
        if str(source).startswith("wandb:"):
            return _from_server(str(source).removeprefix("wandb:"))
        path = Path(source)
        if (path / "metrics.jsonl").is_file():
            return _from_directory(path)
        files = sorted(path.glob("*.wandb")) or sorted(path.glob("wandb/*run-*/*.wandb"))
        if files:
            run, rows = read_offline(files)
            return _checked(run.get("name") or path.name, path, rows, run["config"], [])
        what = "has neither metrics.jsonl nor wandb's files" if path.is_dir() else "is not a directory"
        raise fail(
            f"{source} {what}; expected a run directory, one of wandb's (wandb/offline-run-…), or wandb:entity/project/run_id"
        )

    def series(self, x: str, y: str) -> tuple[list[float], list[float]]:
        pairs = [(row[x], row[y]) for row in self.rows if x in row and y in row]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]

    def losses(self, key: str) -> list[dict[str, float]]:
        """The rows that have this loss. Training losses are smoothed: those of single batches are too noisy to compare."""
        rows = [row for row in self.rows if key in row]
        values = [row[key] for row in rows]
        if key == "train/loss":
            values = smooth(values)
        return [row | {key: value} for row, value in zip(rows, values)]


def _from_directory(path: Path) -> Run:
    rows, remarks = [], []
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
            rows.append(row)
        except ValueError:
            if number < len(lines):
                raise fail(f"{path / 'metrics.jsonl'}, line {number}: not a JSON object") from None
            remarks.append("its last line was cut short and is left out")
    config = path / "config.yaml"
    values: Any = OmegaConf.to_container(OmegaConf.load(config)) if config.is_file() else {}
    system = path / "system.json"
    if system.is_file():
        values["system"] = json.loads(system.read_text())
    return _checked(path.resolve().name, path, rows, values, remarks)


def _from_server(path: str) -> Run:
    import wandb
    from wandb.errors import Error

    if path.count("/") != 2:
        raise fail(f"wandb:{path}: expected wandb:entity/project/run_id")
    try:
        run = wandb.Api().run(path)
        rows = list(run.scan_history())
        return _checked(run.name or path, Path(path), rows, dict(run.config), [])
    except (Error, ValueError, OSError) as error:
        raise fail(f"wandb:{path}: {' '.join(str(error).split())}") from None


def _checked(name: str, path: Path, rows: list[dict], config: dict, remarks: list[str]) -> Run:
    """The numbers of each step once. A step that was taken again after a kill counts as it was taken last."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if _is_number(row.get("step")):
            steps[int(row["step"])] = row
    kept = [{key: x for key, x in steps[step].items() if _is_number(x)} for step in sorted(steps)]
    if not any("train/loss" in row for row in kept):
        raise fail(f"{path} has no step with a training loss: nothing was recorded yet")
    system = config.pop("system", [])
    system = system if isinstance(system, list) else [system]
    flat = flatten({key: value for key, value in config.items() if not key.startswith("_")})

    remarks = list(remarks)
    max_steps = flat.get("train.max_steps")
    if max_steps and kept[-1]["step"] < max_steps:
        remarks.append(f"ends at step {kept[-1]['step']:,} of {max_steps:,}")
    if bad := sum("train/loss" not in row for row in kept):
        remarks.append(f"{bad} {'step' if bad == 1 else 'steps'} without a finite training loss")
    remarks += [f"another machine or version from step {entry['first_step']:,} on" for entry in system[1:]]
    return Run(name, path, kept, flat, system, remarks)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without start-up bias."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
        smoothed.append(total / norm)
    return smoothed


def load_runs(sources: Iterable[str | Path]) -> list[Run]:
    """The runs, each with a name of its own: those that share one are called by as much of their paths as it takes."""
    sources = [str(source) for source in sources]
    places = [source if source.startswith("wandb:") else str(Path(source).resolve()) for source in sources]
    for place, count in Counter(places).items():
        if count > 1:
            raise fail(f"{place} is given {count} times")
    runs = [Run.load(source) for source in sources]
    parts = [Path(place.removeprefix("wandb:")).parts for place in places]
    for name, count in Counter(run.name for run in runs).items():
        same = [index for index, run in enumerate(runs) if run.name == name]
        depth = 1
        while count > 1 and len({parts[index][-depth:] for index in same}) < count:
            depth += 1
        for index in same if count > 1 else []:
            runs[index].name = "/".join(parts[index][-max(depth, 2) :])
    return runs


# --- groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """Mean over the runs of a group and, of two or more, the sample's standard deviation."""

    mean: float
    deviation: float | None

    def __truediv__(self, other: "Value") -> "Value":
        """A quotient of two means; deviations add up to first order, as of independent quantities."""
        ratio = self.mean / other.mean
        relative = [v.deviation / v.mean for v in (self, other) if v.deviation is not None]
        return Value(ratio, abs(ratio) * math.hypot(*relative) if relative else None)


@dataclass
class Group:
    """Runs that differ in their seeds alone."""

    name: str
    runs: list[Run]

    def value(self, measure: Callable[[Run], float | None]) -> Value | None:
        """None: at least one of the runs does not have it."""
        values = [measure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        return Value(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def curve(self, x: str, key: str) -> tuple[list[float], list[Value]]:
        """The loss at the steps that all runs have, at the mean of where on the axis `x` they had it."""
        of_run = [{row["step"]: row for row in run.losses(key) if x in row} for run in self.runs]
        steps = sorted(set.intersection(*(set(rows) for rows in of_run)))
        places, losses = [], []
        for step in steps:
            places.append(statistics.fmean(rows[step][x] for rows in of_run))
            values = [rows[step][key] for rows in of_run]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            losses.append(Value(statistics.fmean(values), deviation))
        return places, losses

    def pooled(self, measure: Callable[[Run], list[float]]) -> list[float]:
        return [value for run in self.runs for value in measure(run)]


def group_runs(runs: list[Run], separate: bool = False) -> list[Group]:
    """In order of first appearance. Runs of other code, versions or hardware, or of a seed once more, make other groups."""
    groups: list[tuple[str, Group]] = []
    for run in runs:
        same = [
            group
            for key, group in groups
            if not separate and run.config and key == _group_key(run)
            if run.config.get("seed") not in [other.config.get("seed") for other in group.runs]
        ]
        if same:
            same[0].runs.append(run)
        else:
            groups.append((_group_key(run), Group(run.name, [run])))
    found = [group for _, group in groups]
    for group in found:
        if len(group.runs) > 1:
            without_seed = {re.sub(r"[-_./ ]?seed[=_-]?\d+", "", run.name) for run in group.runs}
            if len(without_seed) == 1 and without_seed != {""}:
                group.name = without_seed.pop()
            else:
                group.name = f"{group.runs[0].name} and {len(group.runs) - 1} more"
    for name, count in Counter(group.name for group in found).items():
        if count > 1:
            for number, group in enumerate((g for g in found if g.name == name), 1):
                group.name = f"{name} ({number})"
    return found


def _group_key(run: Run) -> str:
    config = {key: value for key, value in run.config.items() if not is_of_no_effect(key)}
    system = [
        (
            entry.get("commit"),
            entry.get("uncommitted"),
            entry.get("versions"),
            _alike(entry.get("hardware") or {}),
        )
        for entry in run.system
    ]
    return json.dumps([config, system], sort_keys=True, default=str)


def _alike(hardware: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hardware.items() if key != "memory_gib"}


def is_of_no_effect(key: str) -> bool:
    return any(key == entry or (entry.endswith(".") and key.startswith(entry)) for entry in OF_NO_EFFECT)


# --- what is measured of a run ----------------------------------------------------------------------------------------


def best_loss(run: Run, key: str) -> float | None:
    return min((row[key] for row in run.losses(key)), default=None)


def final_loss(run: Run, key: str) -> float | None:
    losses = run.losses(key)
    return losses[-1][key] if losses else None


def reach(run: Run, key: str, target: float, axis: str) -> float | None:
    """Where on `axis` the loss first came down to `target`, by a straight line from the value before. None: it did not."""
    before = None
    for row in run.losses(key):
        if axis not in row:
            continue
        if row[key] <= target:
            if before is None:
                return row[axis]
            share = (before[key] - target) / (before[key] - row[key])
            return before[axis] + share * (row[axis] - before[axis])
        before = row
    return None


def ordinary_steps(run: Run) -> list[float]:
    return [row["time/step_s"] for row in run.rows if "time/step_s" in row and "hessian/event_s" not in row]


def hessian_steps(run: Run) -> list[float]:
    return [row["time/step_s"] for row in run.rows if "time/step_s" in row and "hessian/event_s" in row]


def hessian_events(run: Run) -> list[float]:
    return run.values("hessian/event_s")


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def mean_step(run: Run) -> float | None:
    """Seconds of a step in the mean over ordinary and Hessian steps, each kind by its median: what warms up does not count."""
    kinds = [kind for kind in (ordinary_steps(run), hessian_steps(run)) if kind]
    if not kinds:
        return None
    return sum(statistics.median(kind) * len(kind) for kind in kinds) / sum(map(len, kinds))


def tokens_per_second(run: Run) -> float | None:
    seconds, (steps, tokens) = mean_step(run), run.series("step", "tokens")
    return tokens[-1] / steps[-1] / seconds if seconds and tokens else None


def last(run: Run, key: str) -> float | None:
    return max(run.values(key), default=None)


# --- a comparison -----------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """What the figures and tables are about. `target` is a loss of the kind `loss`, validation's if any run has it."""

    groups: list[Group]
    baseline: Group
    loss: str
    target: float
    target_is_default: bool

    @property
    def loss_name(self) -> str:
        return "validation loss" if self.loss == "val/loss" else "training loss (smoothed)"


def build_comparison(
    runs: list[Run], baseline: str | None = None, target: float | None = None, separate: bool = False
) -> Comparison:
    """SystemExit: a baseline that is none of the runs."""
    groups = group_runs(runs, separate)
    loss = "val/loss" if any(run.values("val/loss") for run in runs) else "train/loss"
    best = [value for run in runs if (value := best_loss(run, loss)) is not None]
    chosen = groups[0]
    if baseline is not None:
        named = [g for g in groups if baseline == g.name or baseline in [run.name for run in g.runs]]
        if not named:
            allowed = ", ".join(group.name for group in groups)
            raise fail(
                f"--baseline {baseline}: no run or group of runs has this name; expected one of {allowed}"
            )
        chosen = named[0]
    return Comparison(groups, chosen, loss, max(best) if target is None else target, target is None)
