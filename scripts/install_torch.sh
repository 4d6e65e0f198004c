#!/usr/bin/env bash
# Install the pinned torch into a virtual environment:  scripts/install_torch.sh VENV
#   TORCH    cpu or cuda (default: cuda where nvidia-smi lists a GPU, else cpu)
# It goes before everything else: a range resolved without a torch present can bring gigabytes of CUDA.
set -euo pipefail
venv=$1
torch=${TORCH:-$(nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)}
version=$(sed -n 's/^torch==//p' "$(dirname "$0")/../constraints.txt")
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
echo "setup: torch $version for $torch"
if [ "$torch" = cpu ]; then
  # A wheel that pip is configured to find on this machine's disk, else the CPU index of PyTorch's installation page.
  "${pip[@]}" install --no-index --no-deps "torch==$version" 2>/dev/null ||
    "${pip[@]}" install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$version"
else
  "${pip[@]}" install "torch==$version"
fi
