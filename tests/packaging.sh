#!/usr/bin/env bash
# `pip install .` into an empty environment brings flashbob alone, and it takes a second derivative there.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
bash "$repository/scripts/install_torch.sh" "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install -c "$repository/constraints.txt" "$repository"
cd "$venv"
bin/python - <<'PYTHON'
import importlib.util
from importlib.metadata import files

import torch
from flashbob import sdpa_bob

for name in ("train", "optim", "data", "configs", "scripts"):
    assert importlib.util.find_spec(name) is None, f"the wheel installed a top-level {name}"
tops = {path.parts[0] for path in files("flashbob")}
assert all(top == "flashbob" or top.startswith("flashbob-") for top in tops), tops

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
attention = lambda q, k, v: sdpa_bob(q, k, v, is_causal=True)
assert torch.autograd.gradgradcheck(attention, (q, k, v))
print("packaging: flashbob", "alone; its second derivative passes gradgradcheck")
PYTHON
