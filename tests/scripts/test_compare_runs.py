"""scripts/compare_runs.py on runs of the real trainer, and its page in a real browser."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from scripts.compare_runs import compare
from scripts.load_runs import Run, build_comparison, group_runs, load_runs, reach
from tests.scripts.browser import look_at
from tests.scripts.wandb_server import wandb_server
from tests.train.launch import ADAMW, ROOT, SMALL, SOPHIA, environment, rows, series, train

SHORT = (*SMALL, "train.eval_every=2", "train.precision=fp32", "optim.lr=3e-3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Twelve steps each: AdamW, and Sophia with two seeds, of which the first is logged to wandb's offline files, too."""
    folder = tmp_path_factory.mktemp("trained")
    train(*SHORT, *ADAMW, "run.dir=adamw", cwd=folder)
    train(
        *SHORT, *SOPHIA, "seed=1", "logger=wandb", "logger.mode=offline", "run.dir=sophia-seed1", cwd=folder
    )
    train(*SHORT, *SOPHIA, "seed=2", "run.dir=sophia-seed2", cwd=folder)
    return folder


@pytest.fixture
def copies(trained, tmp_path):
    """Copies that a test may change."""
    for name in ("adamw", "sophia-seed1", "sophia-seed2"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def all_of(folder: Path) -> list[Path]:
    return [folder / name for name in ("adamw", "sophia-seed1", "sophia-seed2")]


def rewrite(run: Path, change) -> None:
    """Every row through `change`, which returns the row, or None to drop it."""
    changed = [row for old in rows(run) if (row := change(old)) is not None]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_wandbs_files_hold_what_the_json_lines_hold(copies):
    lines = Run.load(copies / "sophia-seed1")
    (offline,) = (copies / "sophia-seed1").glob("wandb/offline-run-*")
    (copies / "sophia-seed1" / "metrics.jsonl").unlink()
    for source in (copies / "sophia-seed1", offline):
        run = Run.load(source)
        assert run.name == "sophia-seed1" and run.system == lines.system
        assert run.config == lines.config
        assert len(run.rows) == 12
        for ours, theirs in zip(lines.rows, run.rows):
            assert ours.items() <= theirs.items()


def test_a_row_for_each_step_of_a_run_that_was_killed_and_went_on(copies):
    path = copies / "adamw" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    again = json.dumps(json.loads(lines[3]) | {"train/loss": 1.25})
    path.write_text("\n".join([*lines[:6], again, *lines[4:]]) + '\n{"step": 13, "train/lo')
    run = Run.load(copies / "adamw")
    assert [row["step"] for row in run.rows] == list(range(1, 13))
    assert run.rows[3]["train/loss"] == 1.25
    assert run.remarks == ["its last line was cut short and is left out"]


def test_a_run_that_stopped_early_and_had_nan(copies):
    path = copies / "adamw" / "metrics.jsonl"
    lines = path.read_text().splitlines()[:9]
    row = json.loads(lines[4]) | {"train/loss": math.nan}
    lines[4] = json.dumps(
        row
    )  # Python's JSON writes NaN, which others' loggers do; the trainer leaves the value out
    assert "NaN" in lines[4]
    row = json.loads(lines[6])
    del row["train/loss"], row["train/grad_norm"]
    lines[6] = json.dumps(row | {"train/nonfinite": "train/loss"})
    path.write_text("\n".join(lines) + "\n")
    run = Run.load(copies / "adamw")
    assert run.remarks == ["ends at step 9 of 12", "2 steps without a finite training loss"]
    page = compare(all_of(copies), copies / "out").read_text()
    assert "adamw: ends at step 9 of 12; 2 steps without a finite training loss." in page
    assert "nan" not in (copies / "out" / "summary.json").read_text().lower()


# --- groups -----------------------------------------------------------------------------------------------------------


def names(runs: list[Run], **options) -> dict[str, list[str]]:
    return {group.name: [run.name for run in group.runs] for group in group_runs(runs, **options)}


def test_seeds_are_one_group_and_nothing_else_is(copies):
    runs = load_runs(all_of(copies))
    assert names(runs) == {"adamw": ["adamw"], "sophia": ["sophia-seed1", "sophia-seed2"]}
    assert len(names(runs, separate=True)) == 3

    for name, file, old, new in (
        ("lr", "config.yaml", "  lr: 0.003", "  lr: 0.004"),
        ("commit", "system.json", runs[0].system[0]["commit"], "0" * 40),
        ("hardware", "system.json", '"processes": 1', '"processes": 8'),
        ("again", "config.yaml", "seed: 2", "seed: 1"),
    ):
        shutil.copytree(copies / "sophia-seed2", copies / name)
        edit(copies / name / file, old, new)
        found = names(load_runs([copies / "sophia-seed1", copies / name]))
        assert found == {"sophia-seed1": ["sophia-seed1"], name: [name]}, name


def test_runs_of_one_name_get_their_paths(copies):
    for folder in ("a", "b"):
        shutil.copytree(copies / "adamw", copies / folder / "run")
    shutil.copytree(copies / "adamw", copies / "other" / "a" / "run")
    found = load_runs([copies / "a" / "run", copies / "b" / "run", copies / "sophia-seed1"])
    assert [run.name for run in found] == ["a/run", "b/run", "sophia-seed1"]
    found = load_runs([copies / "a" / "run", copies / "other" / "a" / "run"])
    assert [run.name for run in found] == [f"{copies.name}/a/run", "other/a/run"]


# --- figures and numbers ----------------------------------------------------------------------------------------------


def first_at(run: Path, target: float, axis: str) -> float:
    """The oracle: NumPy's interpolation on the running minimum, which crosses the target where the loss first does."""
    loss = np.minimum.accumulate([row["val/loss"] for row in rows(run) if "val/loss" in row])
    place = [row[axis] for row in rows(run) if "val/loss" in row]
    return float(np.interp(-target, -loss, place))


def test_what_it_takes_to_reach_the_target(trained, tmp_path):
    compare(all_of(trained), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = {run.name: min(series(run, "val/loss")) for run in all_of(trained)}
    assert summary["target"] == max(best.values()) and summary["loss"] == "val/loss"
    adamw, sophia = summary["groups"]
    for key, axis in (("target_s", "time/elapsed_s"), ("target_tokens", "tokens"), ("target_steps", "step")):
        one, *two = (first_at(run, summary["target"], axis) for run in all_of(trained))
        assert adamw[key] == {"mean": pytest.approx(one), "deviation": None}
        assert sophia[key]["mean"] == pytest.approx(statistics.fmean(two))
        assert sophia[key]["deviation"] == pytest.approx(statistics.stdev(two))
        if axis == "time/elapsed_s":
            assert sophia["target_speedup"]["mean"] == pytest.approx(one / statistics.fmean(two))
            relative = statistics.stdev(two) / statistics.fmean(two)
            assert sophia["target_speedup"]["deviation"] == pytest.approx(
                one / statistics.fmean(two) * relative
            )
    assert adamw["target_speedup"] == {"mean": 1.0, "deviation": None}

    ordinary = [[r["time/step_s"] for r in rows(run) if r["step"] % 3 != 1] for run in all_of(trained)[1:]]
    assert sophia["step_s"]["mean"] == pytest.approx(statistics.fmean(map(statistics.median, ordinary)))
    events = [statistics.median(series(run, "hessian/event_s")) for run in all_of(trained)[1:]]
    assert sophia["hessian_event_s"]["mean"] == pytest.approx(statistics.fmean(events))
    assert "hessian_event_s" in adamw and adamw["hessian_event_s"] is None
    assert adamw["peak_gib"]["mean"] == max(series(trained / "adamw", "memory/peak_gib"))


def test_a_target_that_some_seeds_do_not_reach(trained, tmp_path):
    first, second = (min(series(trained / f"sophia-seed{seed}", "val/loss")) for seed in (1, 2))
    target = (first + second) / 2
    page = compare(all_of(trained), tmp_path, target=target).read_text()
    sophia = json.loads((tmp_path / "summary.json").read_text())["groups"][1]
    assert sophia["target_s"] is None and sophia["best_loss"]["mean"] == pytest.approx((first + second) / 2)
    assert "not reached" in page
    page = compare(all_of(trained), tmp_path, target=0.5).read_text()
    assert "No run reaches a validation loss of 0.500 with every seed." in page


def test_the_crossing_is_the_first(copies):
    """Loss 4, 3, 5, 2 at steps 2, 4, 6, 8: down to 3.5 at step 3, not at step 7."""
    losses = {2: 4.0, 4: 3.0, 6: 5.0, 8: 2.0}

    def change(row: dict) -> dict:
        row.pop("val/loss", None)
        return row | ({"val/loss": losses[row["step"]]} if row["step"] in losses else {})

    rewrite(copies / "adamw", change)
    run = Run.load(copies / "adamw")
    assert reach(run, "val/loss", 3.5, "step") == 3.0
    assert reach(run, "val/loss", 4.5, "step") == 2  # from the first evaluation on
    assert reach(run, "val/loss", 1.9, "step") is None


# --- the page ---------------------------------------------------------------------------------------------------------


def check_page(page: Path, scratch: Path, images: int) -> dict:
    """Everything that holds for any page, at both widths; returns what is on the wide one."""
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(|<script""", text)
    for width in (400, 1280):
        seen = look_at(page, width, scratch)
        assert seen["scrollWidth"] <= seen["clientWidth"] <= width
        assert len(seen["images"]) == images
        assert all(natural > 300 and alt for _, natural, alt in seen["images"])
        assert seen["requests"] == []
        assert "nan" not in re.split(r"\W+", seen["text"].lower())
    for table in seen["tables"].values():
        assert len({len(row) for row in table}) == 1 and all(cell for row in table for cell in row)
    return seen


def test_the_page_in_a_browser(trained, tmp_path):
    seen = check_page(compare(all_of(trained), tmp_path / "out", baseline="sophia"), tmp_path, images=9)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    head, adamw, sophia = seen["tables"]["reaching"]
    assert head[0] == "run" and adamw[0] == "adamw" and sophia[0] == "sophia, 2 seeds"
    column = head.index("speedup")
    ours, base = (group["target_s"]["mean"] for group in summary["groups"])
    assert float(adamw[column].split("±")[0].strip("× ")) == pytest.approx(base / ours, abs=0.006)
    assert sophia[column] == "1.00×"
    column = head.index("best validation loss")
    assert float(adamw[column]) == pytest.approx(min(series(trained / "adamw", "val/loss")), abs=6e-4)
    mean, deviation = map(float, sophia[column].split(" ± "))
    best = [min(series(run, "val/loss")) for run in all_of(trained)[1:]]
    assert mean == pytest.approx(statistics.fmean(best), abs=6e-4)
    assert deviation == pytest.approx(statistics.stdev(best), abs=6e-4)
    head, adamw, sophia = seen["tables"]["cost"]
    assert adamw[head.index(next(title for title in head if title.startswith("Hessian step")))] == "–"
    assert "the baseline" in seen["text"] and "standard deviations" in seen["text"]

    origins = seen["tables"]["origins"]
    assert [row[:3] for row in origins[1:]] == [
        ["adamw", "adamw", "17"],
        ["sophia-seed1", "sophia", "1"],
        ["sophia-seed2", "sophia", "2"],
    ]
    system = json.loads((trained / "adamw" / "system.json").read_text())[0]
    assert system["hardware"]["cpu"] in origins[1][3]
    assert system["versions"]["torch"] in origins[1][4] and origins[1][5].startswith(system["commit"][:10])
    differing = {row[0]: row[1:] for row in seen["tables"]["differences"][1:]}
    assert differing["optim.name"] == ["adamw", "sophia"] and "optim.lr" not in differing


def test_one_run_without_validation_or_hessian(copies):
    rewrite(copies / "adamw", lambda row: {key: x for key, x in row.items() if key != "val/loss"})
    for file in ("config.yaml", "system.json"):
        (copies / "adamw" / file).unlink()
    seen = check_page(compare([copies / "adamw"], copies / "out"), copies, images=8)
    assert "training loss (smoothed)" in seen["text"] and "Hessian" not in seen["text"]
    assert seen["tables"]["origins"][1] == [
        "adamw", "adamw", "–", "not recorded", "not recorded", "not recorded", "–",
    ]  # fmt: skip


def test_twelve_runs_of_different_lengths_with_long_names(copies):
    sources = []
    for index in range(12):
        name = (
            f"sophia-flashbob-gpt2-tiny-shakespeare-fineweb-8xa100-lr={index + 1}e-4-weight_decay=0.1-warmup"
        )
        shutil.copytree(copies / ("adamw" if index % 3 else "sophia-seed1"), copies / name)
        rewrite(copies / name, lambda row: row if row["step"] <= 12 - index // 2 else None)  # noqa: B023
        sources.append(copies / name)
    rewrite(sources[3], lambda row: {key: x for key, x in row.items() if key != "val/loss"})
    seen = check_page(compare(sources, copies / "out"), copies, images=9)
    assert len(seen["tables"]["reaching"]) == 13
    assert seen["tables"]["reaching"][4][:2] == ["…lr=4e-4…", "not reached"]
    assert "ends at step 7 of 12" in seen["text"] and "Some runs have no validation loss" in seen["text"]


@pytest.mark.parametrize(
    "lines",
    [
        ['{"step": 1, "train/loss": 5.0}'],
        [
            '{"step": 1, "train/loss": 5.0, "time/elapsed_s": 0.0, "tokens": 0}',
            '{"step": 2, "train/loss": 0.0}',
        ],
        [
            '{"step": 1, "train/loss": 5.0, "time/elapsed_s": 9e4, "val/loss": 1e9, "time/step_s": 9e4, "tokens": 3e9}'
        ],
    ],
    ids=["one step", "zeros", "large"],
)
def test_odd_records(lines, trained, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "odd" in compare([tmp_path / "odd"], tmp_path / "one").read_text()
    page = compare([trained / "adamw", tmp_path / "odd"], tmp_path / "two").read_text()
    assert "odd" in page and "What differs" in page


# --- errors -----------------------------------------------------------------------------------------------------------


def program(*arguments: str | Path, expect: int = 0, **env: str) -> str:
    """The last line on stderr, or stdout if it went well."""
    result = subprocess.run(
        [sys.executable, "-m", "scripts.compare_runs", *map(str, arguments)],
        cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == expect, result.stderr
    return result.stdout if expect == 0 else result.stderr.strip()


def error_of(sources: list, **options) -> str:
    with pytest.raises(SystemExit) as error:
        build_comparison(load_runs(sources), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_errors(copies):
    assert error_of([copies / "none"]) == (
        f"compare_runs: error: {copies}/none is not a directory; expected a run directory, one of wandb's "
        "(wandb/offline-run-…), or wandb:entity/project/run_id"
    )
    assert "has neither metrics.jsonl nor wandb's files" in error_of([copies])
    assert "adamw is given 2 times" in error_of([copies / "adamw", f"{copies}/adamw/"])
    assert error_of(all_of(copies), baseline="adam") == (
        "compare_runs: error: --baseline adam: no run or group of runs has this name; expected one of adamw, sophia"
    )
    assert error_of(["wandb:project/run"]).endswith("wandb:project/run: expected wandb:entity/project/run_id")
    edit(copies / "adamw" / "metrics.jsonl", '{"step": 5,', '{"step": 5')
    assert error_of([copies / "adamw"]).endswith("metrics.jsonl, line 5: not a JSON object")
    (copies / "adamw" / "metrics.jsonl").write_text("")
    assert "adamw has no step with a training loss: nothing was recorded yet" in error_of([copies / "adamw"])


def test_the_program_reads_directories_and_a_server(trained, tmp_path):
    recorded = rows(trained / "sophia-seed2")
    recorded[4]["train/loss"] = "NaN"  # as the server has it
    config = OmegaConf.to_container(OmegaConf.load(trained / "sophia-seed2" / "config.yaml"))
    system = json.loads((trained / "sophia-seed2" / "system.json").read_text())
    assert isinstance(config, dict)
    with wandb_server(rows=recorded, config={**config, "system": system[0]}) as server:
        output = program(
            trained / "adamw", trained / "sophia-seed1", "wandb:entity/project/run_id",
            "--out", tmp_path, "--baseline", "sophia-seed1", "--target-loss", "4.7",
            HOME=str(tmp_path), **server.environment,
        )  # fmt: skip
        assert output.strip().endswith(f"report: {tmp_path}/report.html") and "speedup" in output
        line = program("wandb:entity/project/none", expect=1, HOME=str(tmp_path), **server.environment)
        assert line.splitlines()[-1].startswith(
            "compare_runs: error: wandb:entity/project/none: Could not find run"
        )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["target"] == 4.7 and summary["baseline"] == "sophia-seed1 and 1 more"
    assert summary["groups"][1]["runs"] == ["sophia-seed1", "the run"]
    best = [min(series(run, "val/loss")) for run in all_of(trained)[1:]]
    assert summary["groups"][1]["best_loss"]["mean"] == pytest.approx(statistics.fmean(best))
    assert "the run: 1 step without a finite training loss." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("key", "what"), [("0" * 40, "127.0.0.1:9"), ("", "No API key configured")])
def test_a_server_that_is_not_there(key, what, tmp_path):
    line = program(
        "wandb:entity/project/run", expect=1, HOME=str(tmp_path),
        WANDB_BASE_URL="http://127.0.0.1:9", WANDB_HTTP_TIMEOUT="2", WANDB_API_KEY=key,
    )  # fmt: skip
    assert (
        line.splitlines()[-1].startswith("compare_runs: error: wandb:entity/project/run: ") and what in line
    )
