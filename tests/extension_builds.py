"""Where DeepSpeed's operators are compiled for the tests, about two minutes the first time, and locks of dead builds.

A build that is killed leaves its lock, and whoever wants the same operator then waits for it for ever. So the tests
have a folder of their own, in the repository's ``.cache``, which stays from run to run. TORCH_EXTENSIONS_DIR names
another one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

NAME = "TORCH_EXTENSIONS_DIR"
OWN = Path(__file__).parents[1] / ".cache" / "torch_extensions" / (
    f"py{sys.version_info.major}{sys.version_info.minor}-torch{version('torch')}"
)  # fmt: skip
"""One for each interpreter and PyTorch: PyTorch compiles again what it finds compiled for another."""

BUILD_SECONDS = 900.0
"""No build takes as long, on a busy machine either: a lock that is older is a dead one's."""


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """What the user set, or the tests' own."""
    return Path(environment.get(NAME) or OWN)


def unlock(since: float, until: float, builds: Path = OWN) -> None:
    """Remove the locks that were taken in this time, by a build that is dead."""
    for lock in builds.glob("*/lock"):
        if since <= lock.stat().st_mtime <= until:
            lock.unlink(missing_ok=True)
