"""The table of engines in docs/multi-gpu.md is what ``grid.table`` writes for today's cases."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from grid import ddp, table
from grid.launch import LAUNCHES


def test_every_engine_has_a_launch_and_every_technique_a_row() -> None:
    assert table.ENGINES.keys() <= {engine for engines in LAUNCHES.values() for engine in engines}
    of_cases = {name for _, case in table.all_cases() if not case.upstream for name in table.techniques_of(case)}
    of_rows = [technique for techniques in table.ROWS.values() for technique in techniques]
    assert sorted(of_rows) == sorted(of_cases)


def test_the_page_is_of_todays_cases() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    command = "PYTHONPATH=tests:src python -m grid.table"
    run = re.search(rf"^\d{{4}}-\d\d-\d\d, `{command}`: (\d+) cases in .*torch \d.*$", text, re.MULTILINE)
    assert run and int(run[1]) == sum(1 for _ in table.all_cases())
    assert text == table.page(run[0]), f"cases have changed: {command}"


def test_a_refused_case_shows_in_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = [line for line in table.table().splitlines() if line.startswith("| experts")]
    assert row.split(" | ")[1] == "yes"
    monkeypatch.setattr(
        ddp, "CASES", [replace(case, refused=("x",)) if case.technique == "experts" else case for case in ddp.CASES]
    )
    [row] = [line for line in table.table().splitlines() if line.startswith("| experts")]
    assert row.split(" | ")[1] == "refused"
