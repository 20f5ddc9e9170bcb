"""The ``seqtile`` command, also as ``python -m seqtile``."""

from __future__ import annotations

import sys
from typing import NoReturn

FROM_TRAIN = ("typer", "pydantic", "yaml", "rich", "psutil", "accelerate", "trl", "datasets", "peft")
"""Packages that commands import but a plain install does not include."""


def main() -> NoReturn:
    """Run the command; where a package is missing that comes with the extra, one sentence instead of a traceback."""
    try:
        from seqtile.cli import console

        console()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in FROM_TRAIN:
            raise
        sys.stderr.write(f"seqtile: {package} is not installed; from a clone run: pip install '.[train]'\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
