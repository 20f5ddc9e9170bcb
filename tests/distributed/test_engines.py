"""Every engine with every technique: gradients and weights of an untiled single process, on two gloo processes.

One launch per engine runs all its cases in one process group; each case is then a test of its own here.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from grid.launch import Result, run_cases

NEEDS = {"ddp": "torch", "fsdp1": "torch", "fsdp2": "torch", "zero12": "deepspeed", "zero3": "deepspeed"}
ENGINES = {
    engine: importlib.import_module(f"grid.{engine}").CASES
    for engine in NEEDS
    if importlib.util.find_spec(f"grid.{engine}")
}


@cache
def _results(engine: str, names: tuple[str, ...], folder: Path) -> dict[str, Result]:
    return run_cases(engine, names, folder)


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> dict[str, tuple[str, ...]]:
    """The cases that this run of pytest selected, by engine: only they are launched."""
    chosen: dict[str, list[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "engine" in parameters and "case" in parameters:
            chosen.setdefault(parameters["engine"], []).append(parameters["case"])
    return {engine: tuple(names) for engine, names in chosen.items()}


@pytest.mark.timeout(1500)  # the first test of an engine waits for all its cases; the launcher has limits of its own
@pytest.mark.parametrize(
    ("engine", "case"),
    [pytest.param(engine, case.name, id=f"{engine}-{case.name}") for engine in ENGINES for case in ENGINES[engine]],
)
def test_equals_one_untiled_process(
    engine: str,
    case: str,
    selected: dict[str, tuple[str, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if importlib.util.find_spec(NEEDS[engine]) is None:
        pytest.skip(f"needs {NEEDS[engine]}, which is installed where it can compile: a C++ compiler, Python.h")
    result = _results(engine, selected[engine], tmp_path_factory.getbasetemp() / f"grid-{engine}")[case]
    if result.problem:
        pytest.fail(result.problem, pytrace=False)
