"""What both suites share: running parts, writing rows, judging bounds, the summary that is printed last."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile.bench.cell import run_child
from seqtile.bench.environment import append_rows, stamp

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One claim: what was measured, and whether it holds; ``holds`` is None where there is no number."""

    claim: str
    value: str
    holds: bool | None

    def __str__(self) -> str:
        verdict = {True: "holds ", False: "MISSED", None: "no row"}[self.holds]
        return f"{verdict}  {self.claim}: {self.value}"


class Suite:
    """Runs parts one after another until the time is up, and keeps rows and checks.

    Args:
        name: of the results file, ``NAME-DATE.jsonl``.
        out: directory of the results.
        minutes: no part starts after this.
    """

    def __init__(self, name: str, out: Path, minutes: float) -> None:
        self.found = run_child("environment", {})
        if "error" in self.found:
            raise UserError(f"cannot start a measurement: {self.found['error']}")
        self.file = out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.jsonl"
        self.rows: list[Row] = []
        self.checks: list[Check] = []
        self._until = time.monotonic() + 60 * minutes
        self._begin = time.monotonic()

    def run(self, part: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Measure one part and write its rows; a part that comes too late is a row that says so."""
        if time.monotonic() > self._until:
            rows: list[Row] = [{"error": "skipped: the time was up"}]
        else:
            print(f"[{time.monotonic() - self._begin:5.0f} s] {part}", flush=True)
            rows = measure()
        rows = [{"kind": part, **self._stamp(), **row} for row in rows]
        append_rows(self.file, rows)
        self.rows += rows
        return rows

    def claim(self, claim: str, rows: list[Row], value: Callable[[list[Row]], tuple[str, bool | None]]) -> None:
        """Judge a claim by its rows; a row that failed is its answer."""
        failed = next((row["error"] for row in rows if "error" in row), None)
        self.checks.append(Check(claim, *(value(rows) if failed is None else (failed, None))))

    def _stamp(self) -> Row:
        return stamp(self.found, ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])

    def finish(self) -> None:
        """Write the checks beside the rows and print the summary."""
        checks = [{"kind": "check", **self._stamp(), **asdict(check)} for check in self.checks]
        append_rows(self.file, checks)
        print(f"\n{self.found['device_name']}, torch {self.found['versions']['torch']}, "
              f"{time.monotonic() - self._begin:.0f} s, written to {self.file}\n")  # fmt: skip
        for check in self.checks:
            print(check)


def show(rows: list[Row]) -> None:
    """Rows as short lines while the suite runs."""
    for row in rows:
        if "error" in row:
            print(f"    {row.get('method', ''):18} {row['error']}")
            continue
        ratio = f"{row['ratio']:.3f}x" if "ratio" in row else ""
        times = f"{row['step_ms']:9.1f} ms" if "step_ms" in row else ""
        print(f"    {row['method']:18} {times:12} {ratio:7} {row['peak_allocated_bytes'] / GIB:8.3f} GiB  "
              f"{row['units']:6.3f} units  error {row['gradient_error']:.1e}  {row['ran']}", flush=True)  # fmt: skip
