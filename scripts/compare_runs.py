"""Compare runs: loss against steps, tokens and wall time, and a table of what each step cost.

    python -m scripts.compare_runs runs/a runs/b --out runs/comparison

Reads `metrics.jsonl` and `config.yaml` of each run directory; writes `losses.png`, `summary.json` and one self-contained
page, `report.html`, into --out, and prints the table.
"""

import argparse
import base64
import html
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

AXES = (("step", "step"), ("tokens", "tokens"), ("time/elapsed_s", "wall time (s)"))
# Okabe and Ito's colours: distinct for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Run:
    """One run's rows of metrics.jsonl, in order of step."""

    name: str
    rows: list[dict]

    @classmethod
    def load(cls, directory: str | Path) -> "Run":
        path = Path(directory) / "metrics.jsonl"
        if not path.is_file():
            raise SystemExit(f"{directory} is no run directory: it has no metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not any("train/loss" in row for row in rows):
            raise SystemExit(f"{path} has no row with train/loss: the run has not taken a step")
        return cls(Path(directory).name, rows)

    def series(self, x: str, y: str) -> tuple[list[float], list[float]]:
        pairs = [(row[x], row[y]) for row in self.rows if x in row and y in row]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def summary(self) -> dict[str, float | str | None]:
        """Final losses, median times in seconds, peak memory in GiB. None: the run has no such step."""
        ordinary = [r["time/step_s"] for r in self.rows if "time/step_s" in r and "hessian/event_s" not in r]
        hessian = [r["time/step_s"] for r in self.rows if "time/step_s" in r and "hessian/event_s" in r]
        validation = self.series("step", "val/loss")[1]
        memory = self.series("step", "memory/peak_gib")[1]
        return {
            "run": self.name,
            "steps": max(row["step"] for row in self.rows),
            "train_loss": self.series("step", "train/loss")[1][-1],
            "val_loss": validation[-1] if validation else None,
            "step_s": statistics.median(ordinary) if ordinary else None,
            "hessian_step_s": statistics.median(hessian) if hessian else None,
            "elapsed_s": max(row["time/elapsed_s"] for row in self.rows if "time/elapsed_s" in row),
            "peak_gib": max(memory) if memory else None,
        }


COLUMNS = (
    ("run", "run", "{}"),
    ("steps", "steps", "{:,}"),
    ("train_loss", "training loss", "{:.4f}"),
    ("val_loss", "validation loss", "{:.4f}"),
    ("step_s", "step (s)", "{:.3f}"),
    ("hessian_step_s", "Hessian step (s)", "{:.3f}"),
    ("elapsed_s", "whole run (s)", "{:,.0f}"),
    ("peak_gib", "peak memory (GiB)", "{:.2f}"),
)


def cells(summary: dict) -> list[str]:
    return ["–" if summary[key] is None else form.format(summary[key]) for key, _, form in COLUMNS]


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without start-up bias: single-batch losses are too noisy to compare by eye."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
        smoothed.append(total / norm)
    return smoothed


def plot_losses(runs: list[Run], path: Path) -> None:
    figure, axes = plt.subplots(1, len(AXES), figsize=(14, 4.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, AXES, strict=True):
        for run, colour in zip(runs, COLOURS * (len(runs) // len(COLOURS) + 1), strict=False):
            x, y = run.series(key, "train/loss")
            axis.plot(x, smooth(y), color=colour, alpha=0.45, linewidth=1)
            x, y = run.series(key, "val/loss")
            axis.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.6, label=run.name)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5))
    axes[0].set_ylabel("loss (thin: training, smoothed; dots: validation)")
    axes[-1].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_page(runs: list[Run], picture: Path, path: Path, sample: str | None = None) -> None:
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title, _ in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(run.summary())) + "</tr>"
        for run in runs
    )
    image = base64.b64encode(picture.read_bytes()).decode()
    text = "" if sample is None else f"<h2>Sampled text</h2><pre>{html.escape(sample)}</pre>"
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison of runs</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}th,td{{padding:.3rem .8rem;border-bottom:1px solid #ddd;text-align:right}}
th:first-child,td:first-child{{text-align:left}}img{{max-width:100%}}pre{{white-space:pre-wrap}}</style>
<h1>Comparison of runs</h1>
<img alt="Loss against steps, tokens and wall time" src="data:image/png;base64,{image}">
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<p>Times are medians over a run's steps: an ordinary step, and a step that refreshes the Hessian estimate. The whole run
includes evaluation.</p>{text}</html>
"""
    )


def print_table(runs: list[Run]) -> None:
    table = Table()
    for _, title, _ in COLUMNS:
        table.add_column(title, justify="left" if title == "run" else "right")
    for run in runs:
        table.add_row(*cells(run.summary()))
    Console(width=None if Console().is_terminal else 120).print(table)


def compare(directories: list[Path], out: Path, sample: str | None = None) -> Path:
    """Write losses.png, summary.json and report.html into `out`; returns the page's path."""
    runs = [Run.load(directory) for directory in directories]
    out.mkdir(parents=True, exist_ok=True)
    plot_losses(runs, out / "losses.png")
    (out / "summary.json").write_text(json.dumps([run.summary() for run in runs], indent=1) + "\n")
    write_page(runs, out / "losses.png", out / "report.html", sample)
    print_table(runs)
    return out / "report.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"), help="default: %(default)s")
    arguments = parser.parse_args()
    print("report:", compare(arguments.runs, arguments.out))
