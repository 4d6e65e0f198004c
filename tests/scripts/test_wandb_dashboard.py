"""scripts/wandb_dashboard.py: its metrics are those that the trainer logs, and its specification is complete JSON."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces.internal import WorkspaceViewspec

from scripts.wandb_dashboard import specification, workspace
from tests.scripts.wandb_server import wandb_server
from tests.train.launch import ROOT, SMALL, SOPHIA, build_trainer, environment, rows


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel["config"] for section in sections for panel in section["panels"]]


def test_each_metric_is_logged_by_the_trainer(tmp_path, monkeypatch):
    from train import metrics

    # MFU is logged on devices whose peak is known; this one's is made up, and the trainer does the rest.
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)
    build_trainer(*SMALL, *SOPHIA, "train.max_steps=2", "train.eval_every=1", f"run.dir={tmp_path}").run()
    logged = {key for row in rows(tmp_path) for key in row}
    shown = panels(specification(workspace("entity", "project", "name")))
    used = {metric for panel in shown for metric in [*panel["metrics"], panel["xAxis"]]}
    assert used <= logged
    pinned = {c.removeprefix("summary:") for c in workspace("e", "p", "n").runset_settings.pinned_columns}
    assert {name for name in pinned if "/" in name} <= logged
    # What a reader of a second-order run asks for, against each axis for the losses.
    for x in ("time/elapsed_s", "tokens", "step"):
        assert {("train/loss",), ("val/loss",)} <= {tuple(p["metrics"]) for p in shown if p["xAxis"] == x}
    assert used >= {
        "hessian/event_s", "time/step_s", "time/tokens_per_s", "throughput/mfu", "memory/peak_gib", "hessian/clip_fraction",
        "hessian/norm", "train/momentum_norm", "train/grad_norm", "hessian/negative_fraction",
    }  # fmt: skip


def run(*arguments: str, expect: int, **env: str) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.wandb_dashboard", "--entity", "e", "--project", "p", *arguments],
        cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == expect, result.stderr
    return result


def test_dry_run_prints_a_specification_that_the_library_reads_back(tmp_path):
    spec = json.loads(run("--dry-run", expect=0, WANDB_API_KEY="", HOME=str(tmp_path)).stdout)
    assert (spec["entity"], spec["project"], spec["displayName"]) == ("e", "p", "FlashBoB")
    (runset,) = spec["spec"]["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["arm.value"]
    assert all(panel["groupBy"] == "arm.value" for panel in panels(spec))
    view = ws.internal.View(
        entity="e", project="p", display_name="FlashBoB", name="", id="",
        spec=WorkspaceViewspec.model_validate(spec["spec"]),
    )  # fmt: skip
    again = specification(ws.Workspace._from_model(view))
    assert panels(again) == panels(spec) and len(panels(spec)) == 18
    assert again["spec"]["section"]["runSets"] == spec["spec"]["section"]["runSets"]


def test_saving_sends_the_specification_and_prints_the_address(tmp_path):
    with wandb_server() as server:
        result = run(expect=0, HOME=str(tmp_path), **server.environment)
        assert result.stdout.strip() == f"{server.url}/e/p?nw=saved"
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["type"]) == ("e", "p", "project-view")
    sent, ours = {"spec": json.loads(view["spec"])}, specification(workspace("e", "p", "FlashBoB"))
    assert panels(sent) == panels(ours)


@pytest.mark.parametrize(("key", "what"), [("", "No API key configured"), ("0" * 40, "127.0.0.1:9")])
def test_no_login_and_no_network(key, what, tmp_path):
    result = run(
        expect=1, WANDB_API_KEY=key, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_HTTP_TIMEOUT="2", HOME=str(tmp_path)
    )  # fmt: skip
    (line,) = [x for x in result.stderr.splitlines() if x and not re.match("wandb: ", x)]
    assert line.startswith("wandb_dashboard: error: the view of e/p could not be saved: ") and what in line
