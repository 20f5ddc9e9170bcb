"""Every engine with every technique: gradients and weights of an untiled single process, on two gloo processes.

One launch runs the cases of several engines in one process group; each case is then a test of its own here.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from grid.launch import LAUNCHES, Result, run_cases

MODULES = {engine: importlib.import_module(f"grid.{engine}") for engines in LAUNCHES.values() for engine in engines}
CASES = [
    (launch, engine, case.name)
    for launch, engines in LAUNCHES.items()
    for engine in engines
    for case in MODULES[engine].CASES
]


def _missing(launch: str, engine: str) -> str:
    """What a case needs and does not find here, or ""."""
    if importlib.util.find_spec(launch) is None:
        return f"needs {launch}, which is installed where it can compile: a C++ compiler, Python.h"
    return MODULES[engine].missing() if hasattr(MODULES[engine], "missing") else ""


@cache
def _results(names: tuple[str, ...], folder: Path) -> dict[str, Result]:
    return run_cases(names, folder)


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> dict[str, tuple[str, ...]]:
    """The cases that this run of pytest selected, by launch: only they are run."""
    chosen: dict[str, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"launch", "engine"} <= parameters.keys() and not _missing(parameters["launch"], parameters["engine"]):
            chosen.setdefault(parameters["launch"], []).append(f"{parameters['engine']}:{parameters['case']}")
    return {launch: tuple(names) for launch, names in chosen.items()}


@pytest.mark.timeout(5400)  # the first test of a launch waits for all its cases; the launcher has limits of its own
@pytest.mark.parametrize(
    ("launch", "engine", "case"),
    [pytest.param(*case, id=f"{case[1]}-{case[2]}") for case in CASES],
)
def test_equals_one_untiled_process(
    launch: str,
    engine: str,
    case: str,
    selected: dict[str, tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if why := _missing(launch, engine):
        pytest.skip(why)
    folder = tmp_path_factory.getbasetemp() / f"grid-{launch}"
    result = _results(selected[launch], folder)[f"{engine}:{case}"]
    if result.problem:
        pytest.fail(result.problem, pytrace=False)
