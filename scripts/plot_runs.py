"""The figures of a comparison, drawn with matplotlib: one by one, and all in one picture."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from scripts.load_runs import (
    Comparison,
    Group,
    Run,
    Value,
    hessian_events,
    last,
    median,
    ordinary_steps,
    reach,
)

# Okabe and Ito's colours: distinct for colour-blind readers too. Beyond seven groups dashes and markers tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")


def style(c: Comparison, group: Group) -> dict[str, Any]:
    index = c.groups.index(group)
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


# --- numbers and units ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    size: float
    name: str


def time_unit(seconds: Iterable[float]) -> Unit:
    largest = max(seconds, default=0.0)
    if largest >= 3 * 3600:
        return Unit(3600, "h")
    if largest >= 600:
        return Unit(60, "min")
    return Unit(1, "s") if largest >= 0.5 or largest == 0 else Unit(1e-3, "ms")


def count_unit(counts: Iterable[float], what: str) -> Unit:
    largest = max(counts, default=0.0)
    for size, name in ((1e9, "billion "), (1e6, "million "), (1e4, "thousand ")):
        if largest >= size:
            return Unit(1e3 if size == 1e4 else size, name + what)
    return Unit(1, what)


def number(value: float, like: float | None = None) -> str:
    """Three significant digits, all those before the point; `like` lends its number of decimals to a deviation."""
    scale = abs(value if like is None else like)
    decimals = 0 if scale == 0 else max(0, 2 - math.floor(math.log10(scale)))
    return f"{value:,.{min(decimals, 6)}f}"


def show(value: Value | None, unit: Unit | None = None, decimals: int | None = None) -> str:
    """`41.2 ± 1.3`, without a deviation for a single run; `–` for what a run does not have."""
    if value is None:
        return "–"
    size = unit.size if unit else 1.0
    mean, deviation = value.mean / size, value.deviation / size if value.deviation else None
    if decimals is not None:
        return f"{mean:,.{decimals}f}" + ("" if deviation is None else f" ± {deviation:,.{decimals}f}")
    return number(mean) + ("" if deviation is None else f" ± {number(deviation, mean)}")


# --- figures ----------------------------------------------------------------------------------------------------------


def plot_loss(
    axis: Axes, c: Comparison, key: str, unit: Callable[[Iterable[float]], Unit], label: str
) -> None:
    scale = unit(x for group in c.groups for run in group.runs for x in run.values(key))
    tops, bottoms = [c.target], [c.target]
    for group in c.groups:
        look = style(c, group)
        if c.loss != "train/loss":
            x, values = group.curve(key, "train/loss")
            axis.plot(
                [v / scale.size for v in x], [v.mean for v in values],
                color=look["color"], linestyle=look["linestyle"], linewidth=0.9, alpha=0.5,
            )  # fmt: skip
            bottoms += [v.mean for v in values]
        x, values = group.curve(key, c.loss)
        x, mean = [v / scale.size for v in x], [v.mean for v in values]
        if len(x) > 60:
            look["marker"] = ""
        axis.plot(x, mean, **look, markersize=3.5, linewidth=1.7)
        if any(v.deviation is not None for v in values):
            deviation = [v.deviation or 0.0 for v in values]
            low, high = ([m + s * d for m, d in zip(mean, deviation)] for s in (-1, 1))
            axis.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
            bottoms += low
        bottoms += mean
        # The steep start would flatten everything that matters.
        tops += mean if c.loss == "val/loss" else mean[len(mean) // 20 :]
    axis.axhline(c.target, color="0.35", linewidth=1, linestyle=(0, (2, 2)))
    bottom, top = min(bottoms), max(tops)
    if top > 10 * bottom > 0:
        axis.set_yscale("log")
        axis.set_ylim(bottom * 0.95, top * 1.05)
    else:
        margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.05
        axis.set_ylim(bottom - margin, top + margin)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"{label} ({scale.name})" if label else scale.name)
    axis.set_ylabel("loss (nats a token)")
    axis.grid(alpha=0.25)


def plot_bars(
    axis: Axes, c: Comparison, measure: Callable[[Run], float | None], scale: Unit, label: str, absent: str
) -> None:
    values = [group.value(measure) for group in c.groups]
    widest = max(((v.mean + (v.deviation or 0)) / scale.size for v in values if v is not None), default=1.0)
    for row, (group, value) in enumerate(zip(c.groups, values)):
        if value is None:
            axis.text(0.02 * widest, row, absent, va="center", color="0.35", fontsize=9)
            continue
        mean, deviation = value.mean / scale.size, (value.deviation or 0.0) / scale.size
        axis.barh(
            row,
            mean,
            height=0.62,
            color=style(c, group)["color"],
            xerr=deviation or None,
            ecolor="0.2",
            capsize=3,
        )
        axis.text(mean + deviation + 0.02 * widest, row, show(value, scale), va="center", fontsize=9)
    axis.set_xlim(0, widest * 1.5)  # room for the numbers
    _name_rows(axis, c, label)


def plot_times(axis: Axes, c: Comparison, measure: Callable[[Run], list[float]], label: str) -> None:
    samples = [group.pooled(measure) for group in c.groups]
    scale = time_unit(median(sample) or 0.0 for sample in samples)
    for row, (group, sample) in enumerate(zip(c.groups, samples)):
        if not sample:
            axis.text(
                0.02, row, "none", va="center", color="0.35", fontsize=9, transform=axis.get_yaxis_transform()
            )
            continue
        colour = style(c, group)["color"]
        axis.boxplot(
            [value / scale.size for value in sample], positions=[row], orientation="horizontal", widths=0.55,
            whis=(5, 95), showfliers=False, patch_artist=True, manage_ticks=False,
            boxprops={"facecolor": colour, "alpha": 0.55, "edgecolor": colour},
            whiskerprops={"color": colour}, capprops={"color": colour}, medianprops={"color": "black", "linewidth": 1.6},
        )  # fmt: skip
    axis.set_xlim(left=0)
    _name_rows(axis, c, f"{label} ({scale.name})")


def _name_rows(axis: Axes, c: Comparison, label: str) -> None:
    axis.set_yticks(range(len(c.groups)), labels(c))
    axis.set_ylim(len(c.groups) - 0.4, -0.6)  # the first on top
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.25)


def labels(c: Comparison) -> list[str]:
    """What the groups are called in figures and tables, in order: their names, shortened where they are long."""
    return short_names([group.name for group in c.groups])


def short_names(names: list[str], length: int = 22) -> list[str]:
    """From long names the parts go that all of them begin or end with, parts being between hyphens; then the middle.

    Where that makes two alike, they get a number.
    """
    parts = [re.split(r"(?<!\de)-", name) for name in names]  # the hyphen of 1e-4 is none
    shared = min(map(len, parts)) - 1
    if len(names) > 1 and max(map(len, names)) > length:
        start = min(shared, _alike(parts))
        end = min(shared - start, _alike([part[::-1] for part in parts]))
        names = [
            "…" * (start > 0) + "-".join(part[start : len(part) - end]) + "…" * (end > 0) for part in parts
        ]
    short = [n if len(n) <= length else f"{n[: length // 2]}…{n[-(length // 2 - 1) :]}" for n in names]
    return [
        f"{position}: {name}" if short.count(name) > 1 else name for position, name in enumerate(short, 1)
    ]


def _alike(parts: list[list[str]]) -> int:
    """How many of the first parts all have in common."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*parts)))


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    draw: Callable[[Axes], None]
    has_legend: bool = False


def figures(c: Comparison) -> list[list[Figure]]:
    """Rows of figures. Those without any data are left out."""
    runs = [run for group in c.groups for run in group.runs]

    def reached(axis: str) -> Callable[[Run], float | None]:
        return lambda run: reach(run, c.loss, c.target, axis)

    def values(measure: Callable[[Run], float | None]) -> list[float]:
        return [value for run in runs if (value := measure(run)) is not None]

    loss, target = c.loss_name, f"{c.target:.3f}"
    rows: list[list[Figure]] = [[], [], []]
    for key, word, unit, label in (
        ("time/elapsed_s", "time", time_unit, "wall time"),
        ("tokens", "tokens", lambda x: count_unit(x, "tokens"), ""),
        ("step", "steps", lambda x: count_unit(x, "steps"), ""),
    ):
        if not any(run.values(key) for run in runs):
            continue
        title = {"time": "wall time", "tokens": "tokens", "steps": "steps"}[word]
        rows[0].append(
            Figure(
                f"loss-{word}", f"Loss against {title}",
                lambda axis, key=key, unit=unit, label=label: plot_loss(axis, c, key, unit, label), has_legend=True,
            )
        )  # fmt: skip
        scale = unit(values(reached(key)))
        label = f"{label} ({scale.name})" if label else scale.name
        rows[1].append(
            Figure(
                f"target-{word}", f"{title.capitalize()} to a {loss} of {target}",
                lambda axis, key=key, scale=scale, label=label: plot_bars(
                    axis, c, reached(key), scale, label, "not reached"
                ),
            )
        )  # fmt: skip
    for name, title, measure, label in (
        ("step-time", "Ordinary steps", ordinary_steps, "time of a step"),
        ("hessian-time", "Hessian events", hessian_events, "time of an event"),
    ):
        if any(measure(run) for run in runs):
            rows[2].append(
                Figure(
                    name, title,
                    lambda axis, measure=measure, label=label: plot_times(axis, c, measure, label),
                )
            )  # fmt: skip
    if values(peak_memory):
        rows[2].append(
            Figure(
                "memory", "Peak memory",
                lambda axis: plot_bars(axis, c, peak_memory, Unit(1, "GiB"), "peak memory (GiB)", "not recorded"),
            )
        )  # fmt: skip
    return [row for row in rows if row]


def peak_memory(run: Run) -> float | None:
    return last(run, "memory/peak_gib")


def legend_handles(c: Comparison) -> list[Line2D]:
    handles = [
        Line2D([], [], **style(c, group), markersize=4, linewidth=1.7, label=and_seeds(label, group))
        for group, label in zip(c.groups, labels(c))
    ]
    if c.loss == "val/loss":
        handles.append(
            Line2D([], [], color="0.4", linewidth=0.9, alpha=0.7, label="thin: training, smoothed")
        )
    handles.append(
        Line2D([], [], color="0.35", linewidth=1, linestyle=(0, (2, 2)), label=f"target: {c.target:.3f}")
    )
    return handles


def and_seeds(label: str, group: Group) -> str:
    return label if len(group.runs) == 1 else f"{label}, {len(group.runs)} seeds"


def save_figure(figure: Figure, c: Comparison, path: Path) -> None:
    height = 3.3 if figure.has_legend else 1.3 + 0.36 * len(c.groups)
    legend = legend_handles(c) if figure.has_legend else []
    canvas, axis = plt.subplots(figsize=(4.8, height + 0.21 * len(legend)), layout="constrained")
    figure.draw(axis)
    axis.set_title(figure.title, fontsize=11, loc="left")
    if legend:
        canvas.legend(handles=legend, loc="outside lower left", frameon=False, fontsize=9)
    canvas.savefig(path, dpi=170)
    plt.close(canvas)


def save_overview(rows: list[list[Figure]], c: Comparison, path: Path) -> None:
    """All figures in one picture."""
    columns = max(map(len, rows))
    bar_height = 1.1 + 0.3 * len(c.groups)
    heights = [3.4 if row[0].has_legend else bar_height for row in rows]
    canvas, axes = plt.subplots(
        len(rows), columns, figsize=(4.6 * columns, sum(heights) + 0.5), layout="constrained", squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for row, row_axes in zip(rows, axes):
        for axis in row_axes[len(row) :]:
            axis.axis("off")
        for figure, axis in zip(row, row_axes):
            figure.draw(axis)
            axis.set_title(figure.title, fontsize=11, loc="left")
            if axis is not row_axes[0] and not figure.has_legend:
                axis.set_yticklabels([])
    canvas.legend(
        handles=legend_handles(c),
        loc="outside upper left",
        frameon=False,
        fontsize=9.5,
        ncols=min(5, len(c.groups) + 2),
    )
    canvas.savefig(path, dpi=120)
    plt.close(canvas)
