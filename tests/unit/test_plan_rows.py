"""Published runs, and engines on two ranks, are planned as when their committed rows were written, within 1 %."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]")
if not (Path(__file__).parents[2] / "benchmarks").is_dir():
    pytest.skip("no benchmarks here: the tests run from an installed package", allow_module_level=True)

plan_engines, plan_published = import_module("plan_engines"), import_module("plan_published")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("run", [plan_published.RUNS[index] for index in (6, 17)], ids=lambda run: run.name)
def test_a_published_run(run: Any) -> None:
    (row,) = (row for row in rows(plan_published.RESULTS) if row["run"] == run.name)
    planned = plan_published.judge(run)
    assert planned["asked"] == row["asked"]
    assert (planned["expected"], planned["sure"]) == pytest.approx((row["expected"], row["sure"]), rel=0.01)


@pytest.mark.parametrize("index", [0, 4, 9, 15])
def test_an_engine(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZERO_BUCKET", "ZERO3_LIVE", "ZERO3_PREFETCH"):
        monkeypatch.setattr(plan_engines.sharding_terms, name, getattr(plan_engines.sharding_terms, name))
    predicted, _, _ = plan_engines.planned(plan_engines.all_cells()[index])
    assert predicted == pytest.approx(rows(plan_engines.RESULTS)[index]["predicted_bytes"], rel=0.01)
