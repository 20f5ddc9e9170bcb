"""The documentation's site builds strictly: a page, link or anchor that does not exist is an error."""

from __future__ import annotations

import os
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
    assert (tmp_path / "api.html").read_text(encoding="utf-8").count(f'id="{tiling}"') == 1
