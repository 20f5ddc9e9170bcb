"""The documentation's site builds strictly: a page, link or anchor that does not exist is an error."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("no mkdocs.yml here: the tests run from an installed package", allow_module_level=True)


def test_the_site_builds(tmp_path: Path) -> None:
    """As `make docs` does, into another folder."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    tiling = "seqtile.integrations.callback.TilingCallback"
    assert (tmp_path / "reference.html").read_text(encoding="utf-8").count(f'id="{tiling}"') == 1
    core = re.sub(r"<[^>]+>", "", (tmp_path / "how-it-works.html").read_text(encoding="utf-8"))
    last = (ROOT / "docs" / "core.py").read_text(encoding="utf-8").splitlines()[-1].strip()
    assert html.unescape(core).count(last) == 1, "docs/how-it-works.md does not include docs/core.py"
    text = (tmp_path / "llms-full.txt").read_text(encoding="utf-8")
    assert last in text and "8<" not in text and not re.search(r"^::: ", text, re.M)
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("- [") for line in listed) > 10
    for url in (url for line in listed for url in re.findall(r"^- \[[^\]]+\]\((.+?)\): ", line)):
        assert (tmp_path / url).exists(), url
    for file in ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"):
        assert (ROOT / file).read_text(encoding="utf-8").strip() in text, f"{file} is not in llms-full.txt"
    assert "### seqtile.install.apply.apply" in text and "def apply(model" in text
