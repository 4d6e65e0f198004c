"""What README.md says is true: its code runs, its files exist, its list of wrong configurations is the tested one."""

import re
from pathlib import Path

from tests.train.test_config import WRONG

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_its_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    namespace: dict = {}
    for code in blocks:  # the second goes on where the first ends
        exec(compile(code, "README.md", "exec"), namespace)
    tensors = [namespace[name].grad for name in "qkv"] + namespace["gradients"] + namespace["products"]
    assert all(x.isfinite().all() and x.norm() > 0 for x in tensors)


def test_its_links_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    assert len(targets) >= 2
    for target in targets:
        assert (ROOT / target).exists(), target


def test_its_wrong_configurations_are_those_that_the_tests_run():
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", README, re.MULTILINE)
    tested = {" ".join(arguments): line for arguments, line in WRONG.items()}
    tested["attention=sdpa"] = tested["arm=sophia-flashbob attention=sdpa"]
    checked = 0
    for command, line in rows:
        if command in tested:
            assert (
                line.rstrip("….").strip().startswith(tested[command].rstrip(" ,…")[: len(line) - 4].strip())
            ), command
            checked += 1
    assert checked >= 12
