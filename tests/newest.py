"""The parts that rest on other libraries' behaviour, on the versions that are installed: `make test-newest`.

    python tests/newest.py [--jobs N] [--write docs/integrations.md]

``--write`` puts a row with versions, counts and date into the table of the file, in place of its last one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from seqtile import _compat

TESTS = Path(__file__).parent
ENGINES = ("ddp-checkpoint", "fsdp2-checkpoint", "zero12-zero2-checkpoint", "zero3-checkpoint", "zero3-lora-generic")
PARTS = {
    "techniques": ["compat"],
    "contract": ["numerics/test_contract.py"],
    "effects": ["numerics/test_effects.py"],
    "heads": ["numerics/test_heads.py"],
    "state": ["numerics/test_state_tiles.py", "numerics/test_autocast_states.py", "integration/test_state_layers.py"],
    "loss": ["numerics/test_head.py", "numerics/test_head_equivalence.py", "numerics/test_head_models.py"],
    "offload": ["numerics/test_offload.py", "numerics/test_offload_pool.py"],
    "adapters": ["numerics/test_adapter_kinds.py"],
    "trainers": [f"integration/test_{name}.py" for name in ("train", "train_evaluation", "callback", "head_trainers")],
    "engines": [f"distributed/test_engines.py::test_equals_one_untiled_process[{case}]" for case in ENGINES],
}
NAME = "| `make test-newest` |"
HEADER = ["| what | versions | result | date |", "|---|---|---|---|"]


class Counts:
    """A plugin of pytest that keeps the number of tests by outcome."""

    by_outcome: dict[str, int]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        outcomes = ("passed", "failed", "error", "skipped")
        self.by_outcome = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in outcomes}

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {outcome}" for outcome, count in self.by_outcome.items() if count)


def table_row(counts: Counts) -> str:
    versions = {name: _compat.installed(name) for name in ("python", *_compat.TESTED)}
    shown = ", ".join(f"{library} {version}" for library, version in versions.items() if version)
    return f"{NAME} {shown} | {counts} | {datetime.date.today()} |"


def with_row(page: str, row: str) -> str:
    """``page`` with ``row`` first in its table, alone of its name; the table is added where there is none."""
    name = "|".join(row.split("|")[:2])
    lines = [line for line in page.splitlines() if not line.startswith(name)]
    if HEADER[0] not in lines:
        lines += HEADER
    lines.insert(lines.index(HEADER[0]) + len(HEADER), row)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tests side by side")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the row into a page, in Markdown")
    options = parser.parse_args()
    files = [str(TESTS / file) for part in PARTS.values() for file in part]
    counts = Counts()
    side_by_side = ["-n", str(options.jobs), "--dist", "loadfile", "--max-worker-restart", "0"]
    code = pytest.main(["-q", "--rootdir", str(TESTS.parent), *side_by_side, "-m", "not gpu", *files], plugins=[counts])
    row = table_row(counts)
    print(*HEADER, row, sep="\n")
    if options.write:
        page = options.write.read_text(encoding="utf-8") if options.write.is_file() else ""
        options.write.write_text(with_row(page, row), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
