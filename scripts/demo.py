"""`make demo`: train a small GPT-2 on Tiny Shakespeare with AdamW, Sophia over math attention and Sophia over FlashBoB.

    python -m scripts.demo [key=value …]        # the overrides go to every run, e.g. train.max_steps=100

Three runs of `train.py` one after the other into runs/demo/, then a text sampled from the last, and a page that compares
the three. A run that is already complete is not repeated; `rm -r runs/demo` starts afresh.
"""

import subprocess
import sys
import time
from pathlib import Path

from scripts.compare_runs import compare
from scripts.load_runs import Run

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("adamw", "sophia-math", "sophia-flashbob")


def main(overrides: list[str]) -> None:
    start = time.monotonic()
    out = ROOT / "runs" / "demo"
    directories = [out / arm for arm in ARMS]
    for arm, directory in zip(ARMS, directories, strict=True):
        print(f"\n=== {arm} ===", flush=True)
        train = [sys.executable, "train.py", "preset=demo", f"arm={arm}", f"run.dir={directory}", *overrides]
        subprocess.run(train, cwd=ROOT, check=True)
    sampling = [
        sys.executable,
        "-m",
        "train.sample",
        str(directories[-1]),
        "--prompt",
        "ROMEO:",
        "--tokens",
        "300",
    ]
    sample = subprocess.run(sampling, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    print("\n=== text from sophia-flashbob ===\n" + sample, flush=True)
    page = compare(directories, out / "report", sample)
    math, flashbob = (Run.load(directory).series("step", "val/loss")[1][-1] for directory in directories[1:])
    print(f"validation loss, sophia-flashbob minus sophia-math: {flashbob - math:+.4f}")
    print(f"report: {page.relative_to(ROOT)} (picture: {(page.parent / 'overview.png').relative_to(ROOT)})")
    print(f"demo: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"demo: `{' '.join(map(str, error.cmd))}` failed with exit code {error.returncode}\n{error.stderr or ''}"
        )
