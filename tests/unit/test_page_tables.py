"""Tables that commands write into pages are those of the committed rows, and rows are what the plan says today."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from seqtile.planner import sharding_terms

PAGE = Path(__file__).parents[2] / "docs" / "planning-reference.md"

if not PAGE.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]")

plan_engines, plan_published = import_module("plan_engines"), import_module("plan_published")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_published_runs() -> None:
    shown, found = PAGE.read_text(encoding="utf-8"), rows(plan_published.RESULTS)
    assert "\n".join(plan_published.table(found)) in shown
    assert [row["run"] for row in found] == [run.name for run in plan_published.RUNS]


def test_the_bounds_of_published_runs() -> None:
    """Mean absolute error of memories, none far under at the high estimate, no length far above."""
    told = [row for row in rows(plan_published.RESULTS) if not row["lacks"]]
    memories = [row for row in told if row["unit"] != "tokens"]
    assert sum(abs(row["error"]) for row in memories) / len(memories) <= 0.07
    assert min(row["sure_error"] for row in memories) >= -0.03
    assert max(row["sure_error"] for row in told if row["unit"] == "tokens") <= 0.10


@pytest.mark.parametrize("run", [plan_published.RUNS[index] for index in (6, 17)], ids=lambda run: run.name)
def test_a_published_run_is_planned_as_its_row_says(run: Any) -> None:
    (row,) = (row for row in rows(plan_published.RESULTS) if row["run"] == run.name)
    again = plan_published.judge(run)
    assert (again["asked"], again["expected"], again["sure"]) == (row["asked"], row["expected"], row["sure"])


def test_engines_on_two_ranks() -> None:
    found = rows(plan_engines.RESULTS)
    assert "\n".join(plan_engines.table(found)) in PAGE.read_text(encoding="utf-8")
    cells = [{name: row[name] for name in ("engine", "lora", "accumulation", "offload")} for row in found]
    assert cells == [plan_engines.asdict(cell) for cell in plan_engines.all_cells()]
    assert all(row["error"] == row["predicted_bytes"] / min(row["updates"]) - 1 for row in found)
    assert all(-0.02 <= row["predicted_bytes"] / measured - 1 <= 0.05 for row in found for measured in row["updates"])
    assert {len(row["updates"]) for row in found} == {plan_engines.UPDATES}


def test_what_another_thread_frees_is_no_longer_counted() -> None:
    plan_engines.count_every_thread()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            for _ in range(3):
                with record_function(plan_engines.UPDATE):
                    held = [torch.empty(2**20, dtype=torch.uint8)]
                    last_owner = Thread(target=held.clear)
                    last_owner.start()
                    last_owner.join()
    finally:
        plan_engines.count_every_thread(False)
    second, third = plan_engines.highest(events)
    assert second == third >= 2**20


@pytest.mark.parametrize("index", [0, 4, 5, 9, 15, 16, 17, 20])
def test_an_engine_is_planned_as_its_row_says(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZERO_BUCKET", "ZERO3_LIVE", "ZERO3_PREFETCH"):
        monkeypatch.setattr(sharding_terms, name, getattr(sharding_terms, name))  # put back afterwards
    row = rows(plan_engines.RESULTS)[index]
    predicted, _, _ = plan_engines.planned(plan_engines.all_cells()[index])
    assert round(predicted) == row["predicted_bytes"]
