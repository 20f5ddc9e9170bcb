"""The launcher tells a pass from every kind of failure, names the rank that failed first, and never waits for ever."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grid.cases import Case, Trained, assert_equal, train_alone
from grid.faults import CASES
from grid.launch import Result, run_cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder: Path = tmp_path_factory.mktemp("faults")
    names = [f"faults:{case.name}" for case in CASES]
    return run_cases(names, folder, case_seconds=10, max_failures=len(CASES))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("raises", "rank 1 failed first:\nTraceback (most recent call last):"),
        ("raises", "RuntimeError: planted"),
        ("dies", "end of the log of rank 1, which said nothing"),
        ("hangs", "no rank finished anything for 10 s"),
        ("hangs", "faults.py"),  # the stack of the rank that hangs
    ],
)
def test_a_failure_is_told(results: dict[str, Result], case: str, told: str) -> None:
    assert told in results[f"faults:{case}"].problem


def _no_untiled_run() -> Trained:
    raise AssertionError("only low precision needs it")


def _mutant(case: Case, change: Callable[[Tensor], Tensor | None], field: str) -> Trained:
    run = train_alone(case)
    found = run.weights if field == "weights" else run.gradients[-1]
    name = "model.layers.1.mlp.up_proj.weight"
    found[name] = change(found[name])  # type: ignore[assignment, arg-type]
    return run


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda value: value * (1 + 1e-4), "gradients"),
        (lambda value: value * 2, "gradients"),
        (lambda value: None, "gradients"),
        (lambda value: value.index_fill(0, torch.tensor([0]), 0.0), "gradients"),
        (lambda value: value * (1 + 1e-4), "weights"),
    ],
    ids=["slightly scaled", "summed instead of averaged", "lost", "a row lost", "weights after the step"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_comparison_sees_a_wrong_gradient(
    change: Callable[[Tensor], Tensor | None], field: str, dtype: torch.dtype
) -> None:
    case = Case("mutant", "fault", dtype=dtype)
    assert_equal(case, train_alone(case), _no_untiled_run)
    with pytest.raises(AssertionError, match="up_proj"):
        assert_equal(case, _mutant(case, change, field), _no_untiled_run)


def test_the_comparison_sees_a_rank_that_trained_alone() -> None:
    case = Case("alone", "fault")
    both = replace(case, lengths=(case.lengths[0],) * 2)
    with pytest.raises(AssertionError):
        assert_equal(case, train_alone(both), _no_untiled_run)


def test_what_passes_is_told_so_before_and_after_failures(results: dict[str, Result]) -> None:
    assert [results[f"faults:{case}"].problem for case in ("passes", "passes-again")] == ["", ""]
