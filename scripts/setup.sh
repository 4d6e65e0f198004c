#!/usr/bin/env bash
# Build the virtual environment that every command here uses:  scripts/setup.sh VENV
#   PYTHON   the interpreter (default python3; 3.11 or newer)
#   TORCH    see install_torch.sh
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $python is $("$python" -V 2>&1); Python 3.11 or newer is needed (PYTHON=... chooses another)" >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
bash scripts/install_torch.sh "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install -c constraints.txt -e '.[train,dev]'
"$venv/bin/python" -c 'import sys, torch; print("setup: Python", sys.version.split()[0], "torch", torch.__version__)'
