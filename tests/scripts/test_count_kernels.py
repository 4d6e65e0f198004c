"""scripts/count_kernels.py on a small model: Inductor's real schedule for a GPU, on a machine without one."""

import subprocess
import sys

import pytest
import torch

from tests.train.launch import ROOT, environment


@pytest.mark.skipif(torch.cuda.is_available(), reason="it feigns a GPU")
def test_a_layer_has_36_matrix_products_and_four_attention_calls():
    """Four weights (q, k and v are one), nine products each; attention: forward, twice backward, backward over backward."""
    arguments = ["--model", "gpt2-tiny", "--layers", "1", "2", "--shape", "2x64"]
    environ = environment()
    environ.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-m", "scripts.count_kernels", *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in result.stdout.splitlines()
        if len(cells := line.split("│")) > 3
    }
    assert rows["matrix products"] == "36.0" and rows["attention"] == "4.0"
    assert 30 < float(rows["all of Inductor's"]) < 100
