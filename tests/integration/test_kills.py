"""The benchmark that kills runs at random moments: two kills of one process, and its committed output."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import kills

RESULTS = Path(kills.__file__).parent / "results" / "kills.jsonl"


@pytest.mark.slow
def test_a_run_that_is_killed_is_the_run_that_nobody_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "kills.jsonl"
    given = ["--engines", "single", "--kills", "2", "--seed", "1", "--results", str(results)]
    assert kills.main(given) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) >= 2 and not any(row["lost"] for row in rows)
    assert f"| single | {' | '.join(str(Counter(row['phase'] for row in rows)[phase]) for phase in kills.PHASES)}" in (
        capsys.readouterr().out
    )
    assert kills.main(given) == 0  # goes on where it ended: there is nothing left to do
    assert len(results.read_text().splitlines()) == len(rows)


def test_what_is_lost_is_said():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert not [row for row in rows if row["lost"]]
    rows[0]["lost"] = "a checkpoint"
    assert "| 1 |" in kills.table(rows).splitlines()[2]
