"""What both suites share: running parts, writing rows, judging bounds, the summary that is printed last."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cell import TIMED_OUT, Worker
from environment import append_rows, stamp
from seqtile._errors import UserError

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


LATE = "skipped: the time was up"


class Suite:
    """Runs parts one after another until the time is up, and keeps rows and checks.

    Every row is written when it is measured. A file without checks was ended, or its time was up: the next run on that
    device with those versions goes on there.

    Args:
        name: of the results file, ``NAME-DATE.jsonl``.
        out: directory of the results.
        minutes: no measurement goes on after this.
    """

    def __init__(self, name: str, out: Path, minutes: float) -> None:
        self.worker = Worker()
        self.found = self.worker.run("environment", {}, timeout_s=600)
        if "error" in self.found:
            raise UserError("benchmark.cannot-start", f"cannot start a measurement: {self.found['error']}")
        self.rows: list[Row] = []
        self.file = out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.jsonl"
        self._go_on(out, name)
        self.checks: list[Check] = []
        self.late = False
        self._until = time.monotonic() + 60 * minutes
        self._begin = time.monotonic()

    def _go_on(self, out: Path, name: str) -> None:
        for file in sorted(out.glob(f"{name}-*.jsonl")):
            rows = read_rows(file)
            same = all(row[key] == self.found[key] for row in rows for key in ("device_name", "versions"))
            if rows and same and not any(row["kind"] == "check" for row in rows):
                self.file, self.rows = file, rows

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._until - time.monotonic())

    def run(self, part: str, key: Row, measure: Callable[[float], list[Row]]) -> list[Row]:
        """Measure one thing and write its rows, or take those of the run that this one goes on with.

        Args:
            part: what it belongs to.
            key: what tells it from others of the part; compared as a line of JSON gives it back.
            measure: told the seconds that are left.

        Returns:
            The rows; one that says so where the time was up, which is not written.
        """
        known = json.loads(json.dumps({"kind": part, **key}))
        before = [row for row in self.rows if all(row.get(name) == value for name, value in known.items())]
        if before:
            return before
        rows: list[Row] = [{"error": LATE}]
        if self.left:
            print(f"[{time.monotonic() - self._begin:5.0f} s] {part}", flush=True)
            rows = measure(self.left)
        if any(TIMED_OUT in row.get("error", "") or row.get("error") == LATE for row in rows):
            self.late = True
            return [{**known, "error": LATE} for _ in rows]
        rows = [{**self._stamp(), **row, **known} for row in rows]
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
        """End the worker, print the summary, and write the checks beside the rows if no row is missing."""
        self.worker.close()
        if not self.late:
            append_rows(self.file, [{"kind": "check", **self._stamp(), **asdict(check)} for check in self.checks])
        print(f"\n{self.found['device_name']}, torch {self.found['versions']['torch']}, "
              f"{time.monotonic() - self._begin:.0f} s, written to {self.file}\n")  # fmt: skip
        for check in self.checks:
            print(check)
        if self.late:
            print("\nThe time was up: start it again with the same --out, and it goes on with what is missing.")


def read_rows(path: Path) -> list[Row]:
    """The rows of earlier runs; a last line that was cut off is taken away."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


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
