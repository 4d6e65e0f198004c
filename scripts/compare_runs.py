"""Compare runs: loss against wall time, tokens and steps, what it takes to reach a loss, and what a step costs.

    python -m scripts.compare_runs runs/a runs/b --baseline a --out runs/comparison
    python -m scripts.compare_runs runs/a/wandb/offline-run-20261202_120000-1a2b3c4d wandb:entity/project/run_id

A RUN is a run directory, one of wandb's offline directories, or a run at wandb's server. Runs that differ in their seeds
alone are shown as one, with mean and standard deviation. Writes one self-contained page, `report.html`, its pictures and
`summary.json` into --out, and prints a table.
"""

import argparse
import base64
import html
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.load_runs import (
    Comparison,
    Group,
    Run,
    Value,
    best_loss,
    build_comparison,
    final_loss,
    hessian_events,
    hessian_steps,
    is_of_no_effect,
    last,
    load_runs,
    mean_step,
    median,
    ordinary_steps,
    reach,
    tokens_per_second,
)
from scripts.plot_runs import (
    Figure,
    Unit,
    and_seeds,
    count_unit,
    figures,
    labels,
    peak_memory,
    save_figure,
    save_overview,
    show,
    style,
    time_unit,
)

# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    key: str  # in summary.json
    title: str
    value: Callable[[Group], Value | None]
    show: Callable[[Value | None], str]
    is_ratio: bool = False  # to the baseline


def columns(c: Comparison) -> tuple[list[Column], list[Column]]:
    """Of the two tables: what it takes to reach the target, and what a step costs."""

    def measured(
        key: str, title: str, measure: Callable[[Run], float | None], unit: Unit | None = None, decimals=None
    ):
        return Column(key, title, lambda g: g.value(measure), lambda v: show(v, unit, decimals))

    def against(key: str, title: str, measure: Callable[[Run], float | None], inverse: bool = False):
        def ratio(group: Group) -> Value | None:
            mine, base = group.value(measure), c.baseline.value(measure)
            if mine is None or base is None or not mine.mean or not base.mean:
                return None
            if group is c.baseline:
                return Value(1.0, None)
            return mine / base if inverse else base / mine

        return Column(
            key, title, ratio, lambda v: "–" if v is None else f"{show(v, decimals=2)}×", is_ratio=True
        )

    def of_target(axis: str) -> Callable[[Run], float | None]:
        return lambda run: reach(run, c.loss, c.target, axis)

    runs = [run for group in c.groups for run in group.runs]

    def scale(unit: Callable[[Iterable[float]], Unit], measure: Callable[[Run], float | None]) -> Unit:
        return unit(value for run in runs if (value := measure(run)) is not None)

    seconds, tokens = of_target("time/elapsed_s"), of_target("tokens")
    whole = lambda run: last(run, "time/elapsed_s")  # noqa: E731
    time, total = scale(time_unit, seconds), scale(time_unit, whole)
    count = scale(lambda x: count_unit(x, "tokens"), tokens)
    kinds = (ordinary_steps, hessian_steps)
    step = time_unit(s for run in runs for kind in kinds if (s := median(kind(run))) is not None)
    reaching = [
        measured("target_s", f"time to {c.target:.3f} ({time.name})", seconds, time),
        against("target_speedup", "speedup", seconds),
        measured("target_tokens", f"{count.name} to it", tokens, count, decimals=0 if count.size == 1 else None),
        measured("target_steps", "steps to it", of_target("step"), decimals=0),
        measured("best_loss", f"best {c.loss_name}", lambda r: best_loss(r, c.loss), decimals=3),
        measured("final_loss", f"last {c.loss_name}", lambda r: final_loss(r, c.loss), decimals=3),
        measured("steps", "steps in all", lambda r: last(r, "step"), decimals=0),
        measured("elapsed_s", f"whole run ({total.name})", whole, total),
    ]  # fmt: skip
    cost = [
        measured("step_s", f"ordinary step ({step.name})", lambda r: median(ordinary_steps(r)), step),
        measured("hessian_step_s", f"Hessian step ({step.name})", lambda r: median(hessian_steps(r)), step),
        measured("hessian_event_s", f"of it, Hessian event ({step.name})", lambda r: median(hessian_events(r)), step),
        measured("mean_step_s", f"mean step ({step.name})", mean_step, step),
        against("step_speedup", "speedup", mean_step),
        measured("tokens_per_s", "tokens/s", tokens_per_second),
        measured("mfu", "MFU (%)", lambda r: median([100 * x for x in r.values("throughput/mfu")])),
        measured("peak_gib", "peak memory (GiB)", peak_memory),
        against("memory_ratio", "of the baseline's", peak_memory, inverse=True),
    ]  # fmt: skip

    return reaching, cost


def tables(c: Comparison) -> list[list[Column]]:
    """The columns that are shown: those that a group fills, and always whether the target was reached."""

    def is_shown(column: Column) -> bool:
        if column.is_ratio and len(c.groups) == 1:
            return False
        return column.key == "target_s" or any(column.value(group) is not None for group in c.groups)

    return [list(filter(is_shown, table)) for table in columns(c)]


def summary(c: Comparison) -> dict[str, Any]:
    """What summary.json holds: plain numbers in seconds, GiB, tokens; percent for MFU. None: at least one run lacks it."""
    every = [column for table in columns(c) for column in table]
    groups = []
    for group in c.groups:
        values = {column.key: column.value(group) for column in every}
        groups.append(
            {"name": group.name, "runs": [run.name for run in group.runs]}
            | {key: v and {"mean": v.mean, "deviation": v.deviation} for key, v in values.items()}
        )
    return {"loss": c.loss, "target": c.target, "baseline": c.baseline.name, "groups": groups}


def print_tables(c: Comparison) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    for table in tables(c):
        printed = Table()
        printed.add_column("run", no_wrap=True)
        for column in table:
            printed.add_column(column.title, justify="right")
        for label, group in zip(labels(c), c.groups):
            printed.add_row(and_seeds(label, group), *(_cell(column, group) for column in table))
        console.print(printed)


# --- the page ---------------------------------------------------------------------------------------------------------

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:78rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere}
h1{margin-bottom:.2rem}h2{margin:2.4rem 0 .4rem}p{max-width:48rem;margin:.4rem 0 .8rem}.lead{font-size:1.1rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:.5rem 1rem;align-items:start}
img{width:100%;height:auto;max-width:34rem}.scroll{overflow-x:auto}pre{white-space:pre-wrap}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.35rem .7rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
td{white-space:nowrap}th{font-weight:600;vertical-align:bottom}td.wide{white-space:normal;min-width:12rem}
th:first-child,td:first-child,.text td,.text th{text-align:left}
td:first-child{white-space:normal;min-width:min(13rem,36vw);max-width:18rem;overflow-wrap:anywhere}
.key{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.5em}.note{color:#555;font-size:.92rem}
"""


def headline(c: Comparison) -> str:
    """The result in a sentence or two."""
    times = [(g.value(lambda r: reach(r, c.loss, c.target, "time/elapsed_s")), g) for g in c.groups]
    known = [(value, group) for value, group in times if value is not None]
    target = f"a {c.loss_name} of {c.target:.3f}"
    if not known:
        seeds = " with every seed" if any(len(group.runs) > 1 for group in c.groups) else ""
        return f"No run reaches {target}{seeds}."
    unit = time_unit(value.mean for value, _ in known)
    value, fastest = min(known, key=lambda pair: pair[0].mean)
    took = f"{show(value, unit)} {unit.name}"
    if len(c.groups) == 1:
        return f"{fastest.name} reaches {target} after {took}."
    every = ", which every run reaches" if len(known) == len(c.groups) else ""
    name = dict(zip((group.name for group in c.groups), labels(c)))
    text = f"{name[fastest.name]} is the fastest to {target}{every}: {took}"
    baseline = name[c.baseline.name]
    if fastest is c.baseline:
        return f"{text}. It is the baseline."
    base = next((v for v, group in known if group is c.baseline), None)
    if base is None:
        return f"{text}. The baseline, {baseline}, does not reach it."
    text += f", against {show(base, unit)} {unit.name} of {baseline}, the baseline"
    text += f": {base.mean / value.mean:.2f}× as fast." if value.mean else "."
    if base.mean - value.mean < math.hypot(base.deviation or 0.0, value.deviation or 0.0):
        text += " That is within the deviation over seeds."
    return text


def write_page(
    c: Comparison, pictures: dict[str, tuple[Figure, Path]], path: Path, sample: str | None
) -> None:
    runs = [run for group in c.groups for run in group.runs]
    reaching, cost = tables(c)
    several = len(c.groups) > 1
    has_seeds = any(len(group.runs) > 1 for group in c.groups)
    has_hessian = any(hessian_events(run) for run in runs)
    baseline = html.escape(labels(c)[c.groups.index(c.baseline)])

    def images(*prefixes: str) -> str:
        chosen = [pictures[name] for name in pictures if name.startswith(prefixes)]
        return (
            '<div class="figures">' + "".join(_image(figure, file, c) for figure, file in chosen) + "</div>"
        )

    def when(condition: bool, text: str) -> str:
        return f" {text}" if condition else ""

    curves = (
        "Dots and thick lines are the validation loss; thin lines are the training loss, smoothed over about ten steps."
        if c.loss == "val/loss"
        else "Lines are the training loss, smoothed over about ten steps."
    )
    target = (
        "the best loss of the run that came down least, so that every run reaches it"
        if c.target_is_default
        else "as given on the command line"
    )
    parts = [
        "<h1>Comparison of runs</h1>",
        f'<p class="lead">{html.escape(headline(c))}</p>',
        _warnings(c),
        "<h2>Loss</h2>",
        f"<p>{curves} The dotted line is the target, {c.target:.4f}: {target}."
        + when(has_seeds, "Lines and numbers are means over a group's seeds; bands and ± are standard deviations.")
        + "</p>",
        images("loss-"),
        "<h2>What it takes to reach the target</h2>",
        "<p>Where the loss first came down to the target, on a straight line between two values. Shorter is better.</p>",
        images("target-"),
        _table("reaching", c, reaching),
        '<p class="note">Times are wall time since the run began, evaluation and checkpoints included.'
        + when(several, f"Speedup: the time of {baseline}, the baseline, divided by the group's; above 1 is faster.")
        + "</p>",
        "<h2>What a step costs</h2>",
        "<p>Boxes are the middle half of all steps, the black line is the median, whiskers reach from 5 % to 95 %."
        + when(
            has_hessian,
            "A Hessian step also refreshes the estimate of the Hessian's diagonal; the Hessian event is the part of it that "
            "computes Hessian-vector products, with the gradient where that comes along.",
        )
        + "</p>",
        images("step-time", "hessian-time", "memory"),
        _table("cost", c, cost),
        '<p class="note">Step times are medians over a run.'
        + when(has_hessian, "The mean step counts ordinary and Hessian steps as often as they occurred.")
        + when(several, f"Speedup: the mean step of {baseline}, the baseline, divided by the group's.")
        + " Peak memory: what PyTorch had allocated on a GPU at most; on a CPU the whole process, libraries included.</p>",
        "<h2>What differs in the configurations</h2>",
        _differences(c),
        "<h2>What the runs ran on</h2>",
        _origins(c),
    ]  # fmt: skip
    if sample is not None:
        parts.append(f"<h2>Sampled text</h2><pre>{html.escape(sample)}</pre>")
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Comparison of runs</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n",
        encoding="utf-8",
    )


def _image(figure: Figure, picture: Path, c: Comparison) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    text = html.escape(f"{figure.title}: {', '.join(labels(c))}", quote=True)
    return f'<img id="{figure.name}" alt="{text}" src="data:image/png;base64,{data}">'


def _key(c: Comparison, group: Group) -> str:
    return f'<span class="key" style="background:{style(c, group)["color"]}"></span>'


def _table(name: str, c: Comparison, table: list[Column]) -> str:
    head = "<th>run</th>" + "".join(f"<th>{html.escape(column.title)}</th>" for column in table)
    body = "".join(
        f"<tr><td>{_key(c, group)}{html.escape(and_seeds(label, group))}</td>"
        + "".join(f"<td>{html.escape(_cell(column, group))}</td>" for column in table)
        + "</tr>"
        for label, group in zip(labels(c), c.groups)
    )
    return f'<div class="scroll"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: Column, group: Group) -> str:
    value = column.value(group)
    return "not reached" if value is None and column.key == "target_s" else column.show(value)


def _warnings(c: Comparison) -> str:
    lines = [f"{run.name}: {'; '.join(run.remarks)}." for g in c.groups for run in g.runs if run.remarks]
    systems = [entry for group in c.groups for run in group.runs for entry in run.system]
    hardware = {_hardware_line(entry.get("hardware")) for entry in systems}
    if len(hardware) > 1:
        lines.append("The runs did not all use the same hardware: their times compare the hardware, too.")
    if any(not _has_loss(c, group) for group in c.groups):
        lines.append(f"Some runs have no {c.loss_name}; they are in the tables, with what they have.")
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _has_loss(c: Comparison, group: Group) -> bool:
    return all(run.values(c.loss) for run in group.runs)


def _differences(c: Comparison) -> str:
    """A row for each key of the configuration in which the groups differ."""
    if any(not group.runs[0].config for group in c.groups):
        return "<p>Not all runs recorded their configuration.</p>"
    configs = [group.runs[0].config for group in c.groups]
    keys = [key for key in dict.fromkeys(k for config in configs for k in config) if not is_of_no_effect(key)]
    rows = [[key, *(_plain(config.get(key, "–")) for config in configs)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return (
            "<p>Nothing: "
            + ("there is one." if len(configs) == 1 else "seeds, code or machines differ.")
            + "</p>"
        )
    return _text_table("differences", ["key", *labels(c)], rows)


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _origins(c: Comparison) -> str:
    """A row for each run, with an arrow between what held before and after it went on elsewhere."""
    head = ["run", "shown as", "seed", "hardware", "versions", "commit", "started"]
    rows = []
    for label, group in zip(labels(c), c.groups):
        for run in group.runs:
            entries = run.system or [{}]
            found = [
                [_hardware_line(entry.get("hardware")) for entry in entries],
                [_versions_line(entry.get("versions")) for entry in entries],
                [_commit(entry) for entry in entries],
            ]
            started = entries[0].get("started", "–").replace("T", " ").replace("+00:00", " UTC")
            seed = _plain(run.config.get("seed", "–"))
            rows.append(
                [run.name, label, seed, *(" → ".join(dict.fromkeys(part)) for part in found), started]
            )
    return _text_table("origins", head, rows)


def _hardware_line(hardware: dict[str, Any] | None) -> str:
    if not hardware:
        return "not recorded"
    processes, hosts, gpus = hardware["processes"], hardware["hosts"], hardware["gpus"]
    parts = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    parts.append(f"{hardware['cpu']}, {hardware['cpu_count']} cores")
    many = f"{hosts} hosts, each with " if hosts > 1 else ""
    return f"{many}{'; '.join(parts)}; {processes} {'process' if processes == 1 else 'processes'}"


def _versions_line(versions: dict[str, str | None] | None) -> str:
    known = [f"{name} {value}" for name, value in (versions or {}).items() if value and name != "wandb"]
    return ", ".join(known) or "not recorded"


def _commit(entry: dict[str, Any]) -> str:
    if not entry.get("commit"):
        return "not recorded"
    return entry["commit"][:10] + (" and changes" if entry["uncommitted"] else "")


def _text_table(name: str, head: list[str], rows: list[list[str]]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=wide' if len(x) > 30 else ''}>{html.escape(x)}</td>" for x in row)
        + "</tr>"
        for row in rows
    )
    table = f'<table id="{name}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll text">{table}</div>'


# --- the program ------------------------------------------------------------------------------------------------------


def compare(
    sources: Iterable[str | Path],
    out: Path,
    sample: str | None = None,
    baseline: str | None = None,
    target: float | None = None,
    separate: bool = False,
) -> Path:
    """Write report.html, its pictures, overview.png and summary.json into `out`; returns the page's path."""
    c = build_comparison(load_runs(sources), baseline, target, separate)
    out.mkdir(parents=True, exist_ok=True)
    rows = figures(c)
    pictures = {figure.name: (figure, out / f"{figure.name}.png") for row in rows for figure in row}
    for figure, path in pictures.values():
        save_figure(figure, c, path)
    save_overview(rows, c, out / "overview.png")
    (out / "summary.json").write_text(json.dumps(summary(c), indent=1) + "\n")
    write_page(c, pictures, out / "report.html", sample)
    print_tables(c)
    return out / "report.html"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="compare_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"), help="default: %(default)s")
    parser.add_argument(
        "--baseline", metavar="NAME", help="what speedups are against; default: the first RUN"
    )
    parser.add_argument(
        "--target-loss", type=float, metavar="LOSS",
        help="default: the best loss of the run that came down least, so that every run reaches it",
    )  # fmt: skip
    parser.add_argument("--separate", action="store_true", help="do not group the seeds of a configuration")
    a = parser.parse_args(arguments)
    print("report:", compare(a.runs, a.out, None, a.baseline, a.target_loss, a.separate))


if __name__ == "__main__":
    main()
