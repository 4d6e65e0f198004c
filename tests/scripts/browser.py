"""A page as a browser shows it: headless Chromium, at a width of choice."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Run in the page that holds the page under test as a frame: so narrow a window Chromium does not open.
HARNESS = """<!doctype html><meta charset="utf-8">
<iframe id="frame" width="{width}" height="1200" style="border:0" srcdoc="{page}"></iframe><pre id="result"></pre>
<script>
document.getElementById("frame").onload = () => {{
  const page = document.getElementById("frame").contentDocument, root = page.documentElement;
  const tables = {{}};
  for (const table of page.querySelectorAll("table"))
    tables[table.id] = [...table.rows].map(row => [...row.cells].map(cell => cell.textContent.trim()));
  const images = [...page.images].map(image => [image.id, image.naturalWidth, image.alt]);
  const result = {{tables, images, clientWidth: root.clientWidth, scrollWidth: root.scrollWidth,
                  text: page.body.innerText, requests: page.defaultView.performance.getEntriesByType("resource")
                  .map(entry => entry.name).filter(name => !name.startsWith("data:"))}};
  document.getElementById("result").textContent = JSON.stringify(result);
}};
</script>"""


def chromium() -> str:
    """The browser's path. Without one the test is skipped, and fails in continuous integration."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(
                "no Chromium: .ci/run installs it when it runs as root; otherwise install it beforehand"
            )
        pytest.skip("no Chromium here (apt-get install chromium)")
    return path


def look_at(page: Path, width: int, scratch: Path) -> dict[str, Any]:
    """Tables, images, text and widths of `page`, laid out `width` CSS pixels wide."""
    harness = scratch / f"harness-{width}.html"
    harness.write_text(
        HARNESS.format(width=width, page=html.escape(page.read_text(encoding="utf-8"), quote=True))
    )
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch / 'profile'}",
        "--window-size=1400,1300", "--virtual-time-budget=20000", "--dump-dom", harness.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found and found.group(1), dom[-2000:]
    return json.loads(html.unescape(found.group(1)))
