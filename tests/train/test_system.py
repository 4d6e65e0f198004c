"""A run records what it ran on: in its directory, and in wandb's configuration, with its group and tags."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version

import torch

from tests.train.launch import ROOT, SMALL, SOPHIA, rows, train
from train import system
from train.config import Config
from train.wandb_log import read_offline


def test_wandbs_files_and_the_directory_say_what_a_run_ran_on(tmp_path):
    secret = "0123456789abcdef0123456789abcdef01234567"
    train(
        *SMALL, *SOPHIA, "logger=wandb", "logger.mode=offline", f"logger.tags=[mine,{secret}]", "run.dir=run",
        cwd=tmp_path, processes=2, WANDB_API_KEY=secret,
    )  # fmt: skip
    (entry,) = json.loads((tmp_path / "run" / "system.json").read_text())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert entry["commit"] == (head or None) and entry["uncommitted"] in ((True, False) if head else (None,))
    assert entry["versions"] == {
        "python": platform.python_version(), "torch": torch.__version__, "triton": version("triton"),
        "cuda": torch.version.cuda, "wandb": version("wandb"),
    }  # fmt: skip
    hardware = entry["hardware"]
    assert (hardware["device"], hardware["gpus"]) == ("cpu", [])
    assert (hardware["processes"], hardware["hosts"], hardware["threads"]) == (2, 1, 1)
    assert hardware["cpu"] and hardware["cpu_count"] >= 1 and hardware["memory_gib"] > 0
    assert platform.node() not in json.dumps(entry)

    run, history = read_offline((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert run["config"]["system"] == entry
    assert run["config"]["optim"]["hessian_interval"] == 3
    assert run["group"] == "sophia-flashbob"
    assert run["tags"] == ["mine", "***", "sophia-flashbob", "gpt2-tiny"]
    # Any curve can be drawn against any of the three axes.
    assert all({"step", "tokens", "time/elapsed_s"} <= row.keys() for row in history)
    assert [row["tokens"] for row in history] == [row["tokens"] for row in rows(tmp_path / "run")]


def on(device: str) -> Config:
    """As much of a configuration as a system's description asks for."""
    config = Config.__new__(Config)
    config.device = device
    return config


def test_going_on_elsewhere_adds_an_entry_and_going_on_here_does_not(tmp_path):
    path = tmp_path / "system.json"
    first = system.record(on("cpu"), tmp_path, first_step=1)
    assert system.record(on("cpu"), tmp_path, first_step=9) == first
    assert json.loads(path.read_text()) == [first]
    elsewhere = first | {"hardware": first["hardware"] | {"cpu": "another processor"}}
    path.write_text(json.dumps([elsewhere]))
    second = system.record(on("cpu"), tmp_path, first_step=9)
    assert json.loads(path.read_text()) == [elsewhere, second] and second["first_step"] == 9
    # Its checkpoints were lost: the run begins anew, and with it its record.
    fresh = system.record(on("cpu"), tmp_path, first_step=1)
    assert json.loads(path.read_text()) == [fresh] and fresh["hardware"] == first["hardware"]


def test_gpus_and_hosts(monkeypatch, tmp_path):
    """What torch and torchrun say of two hosts with two GPUs each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H200 {index}")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    hardware = system.describe(on("auto"))["hardware"]
    assert hardware["gpus"] == ["NVIDIA H200 0", "NVIDIA H200 1"]
    assert (hardware["device"], hardware["processes"], hardware["hosts"]) == ("cuda", 4, 2)
    monkeypatch.setattr(system, "ROOT", tmp_path)  # no git checkout
    outside = system.describe(on("auto"))
    assert (outside["commit"], outside["uncommitted"]) == (None, None)


def test_peak_memory_is_the_process_s_own():
    """Linux gives a new process the maximum of the one that starts it, which getrusage then reports."""
    program = (
        "from train.metrics import process_peak_bytes as p; a = p(); x = b'1' * (64 << 20); print(a, p())"
    )
    ballast = b"1" * (2 << 30)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    del ballast
    before, after = map(int, result.stdout.split())
    assert before < 1 << 30 and 60 << 20 < after - before < 70 << 20
