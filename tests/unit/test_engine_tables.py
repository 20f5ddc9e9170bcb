"""docs/engines.md is what ``grid.table`` writes for today's cases, not written by hand."""

from __future__ import annotations

import re

from grid import table
from grid.launch import LAUNCHES


def test_every_engine_has_a_launch_and_a_column() -> None:
    assert table.ENGINES.keys() <= {engine for engines in LAUNCHES.values() for engine in engines}
    assert {table.engine_of(engine, case) for engine, case in table.all_cases()} == set(table.COLUMNS)


def test_the_page_is_of_todays_cases() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    command = "PYTHONPATH=tests:src python -m grid.table"
    ran = re.search(rf"^\d{{4}}-\d\d-\d\d, `{command}`: (\d+) cases in .*torch \d.*$", text, re.MULTILINE)
    assert ran and int(ran[1]) == sum(1 for _ in table.all_cases())
    assert text == table.page(ran[0]), "cases have changed: PYTHONPATH=tests:src python -m grid.table"


def test_the_table_of_techniques_is_on_the_page() -> None:
    assert table.matrix() in table.PAGE.read_text(encoding="utf-8")
    rows = [line for line in table.matrix().splitlines() if "works" in line]
    assert len(rows) > 10 and any("refused" in row for row in rows)
