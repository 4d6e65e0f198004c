"""Make the project's dashboard at Weights & Biases: a saved view of its workspace, with the runs grouped by arm.

    python -m scripts.wandb_dashboard --entity ENTITY --project PROJECT        # saves it, and prints its address
    python -m scripts.wandb_dashboard --entity ENTITY --project PROJECT --dry-run    # prints what would be saved, as JSON

Every call saves a new view. The metrics are those that `train.trainer` logs.
"""

import argparse
import json
import logging
import sys
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

STEP, TOKENS, TIME = "step", "tokens", "time/elapsed_s"
AXES = {STEP: "steps", TOKENS: "tokens", TIME: "wall time (s)"}


def panel(title: str, metric: str, unit: str, x: str = STEP, **options: Any) -> wr.LinePlot:
    """One metric of all arms: the mean over an arm's runs, and the range from the least to the largest."""
    return wr.LinePlot(
        title=title, x=x, y=[metric], title_x=AXES[x], title_y=unit,
        groupby=wr.Config("arm"), groupby_aggfunc="mean", groupby_rangefunc="minmax", **options,
    )  # fmt: skip


def losses(x: str) -> list[wr.LinePlot]:
    smooth = {"smoothing_type": "exponential", "smoothing_factor": 0.9, "smoothing_show_original": False}
    return [
        panel(f"Validation loss against {AXES[x]}", "val/loss", "nats a token", x),
        panel(f"Training loss against {AXES[x]}, smoothed", "train/loss", "nats a token", x, **smooth),
    ]


def workspace(entity: str, project: str, name: str) -> ws.Workspace:
    """The view's specification; needs no network."""
    sections = {
        "Loss against wall time": losses(TIME),
        "Loss against tokens": losses(TOKENS),
        "Loss against steps": losses(STEP),
        "Speed": [
            panel("Step", "time/step_s", "s", ignore_outliers=True),
            panel("Hessian event", "hessian/event_s", "s", ignore_outliers=True),
            panel("Tokens per second", "time/tokens_per_s", "tokens/s"),
            panel("MFU of ordinary steps", "throughput/mfu", "share of the peak rate"),
            panel("Waiting for data", "time/data_wait_s", "s", ignore_outliers=True),
        ],
        "Memory": [panel("Peak memory of rank 0", "memory/peak_gib", "GiB")],
        "Second order": [
            panel("Clipped share of the update", "hessian/clip_fraction", "share of the parameters", range_y=(0, 1)),
            panel("Negative curvature", "hessian/negative_fraction", "share of the parameters", range_y=(0, 1)),
            panel("Norm of the Hessian's diagonal h", "hessian/norm", "norm", log_y=True),
        ],
        "Norms and learning rate": [
            panel("Gradient before clipping", "train/grad_norm", "norm", log_y=True),
            panel("Momentum m", "train/momentum_norm", "norm", log_y=True),
            panel("Learning rate", "train/lr", "rate"),
        ],
    }  # fmt: skip
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(
                name=title,
                panels=list(panels),
                is_open=True,
                layout_settings=ws.SectionLayoutSettings(
                    columns=min(3, len(panels)), rows=-(-len(panels) // 3)
                ),
            )
            for title, panels in sections.items()
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=50),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config("arm")],
            pinned_columns=["config:arm", "config:model.name", "config:seed", "summary:val/loss", f"summary:{TIME}"],
        ),
    )  # fmt: skip


def specification(view: ws.Workspace) -> dict[str, Any]:
    """What is sent to the server: the view's own JSON."""
    model = view._to_model()  # the library has no public way to it
    return {
        "entity": model.entity,
        "project": model.project,
        "displayName": model.display_name,
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="wandb_dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entity", required=True, help="a user or team at wandb")
    parser.add_argument("--project", required=True, help="as logger.project of the runs")
    parser.add_argument("--name", default="FlashBoB", help="of the view; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the specification as JSON; no network")
    a = parser.parse_args(arguments)
    view = workspace(a.entity, a.project, a.name)
    if a.dry_run:
        print(json.dumps(specification(view), indent=1))
        return
    logging.disable(logging.WARNING)
    try:
        view.save()
    except Exception as error:  # the library lets through whatever its transport raises
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.exit(f"wandb_dashboard: error: the view of {a.entity}/{a.project} could not be saved: {reason}")
    print(view.url)


if __name__ == "__main__":
    main()
