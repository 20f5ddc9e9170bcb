"""Operators on fake tensors return the same from remembered results as from PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

import zoo
from seqtile.counting import fake_results
from seqtile.counting.fake import fake_tensors
from seqtile.planner.fake_step import fake_step
from seqtile.planner.step_config import Lora, Setup

SETUP = Setup(device_type="cuda", attention="flash")


@pytest.fixture(autouse=True)
def no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "_results", {})


@pytest.mark.parametrize(
    ("architecture", "lora", "options"),
    [
        ("llama", Lora(4), {"blocks": "mlp+norm+projections", "heads": 1}),
        ("qwen3_moe", None, {"checkpoint": None}),
    ],
)
def test_a_step_is_the_same_as_with_pytorchs_results(
    architecture: str, lora: Lora | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(architecture, **{**zoo._BASE, **zoo.ARCHITECTURES[architecture]})
    setup = replace(SETUP, lora=lora, options=replace(SETUP.options, tile=64, loss_tile=64, **options))
    steps = [fake_step(config, setup, 128) for _ in range(2)]
    assert fake_results._results
    monkeypatch.setattr(fake_results.FakeResults, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert steps == [fake_step(config, setup, 128)] * 2


def twice(run: Callable[[], Any]) -> tuple[Any, Any]:
    with fake_tensors():
        return run(), run()


def test_only_a_view_shares_its_arguments_storage() -> None:
    def run() -> tuple[Tensor, ...]:
        x = torch.ones(4, 6)
        return x, x.t()[2:], x + 1

    for x, view, new in twice(run):
        assert (view.shape, view.storage_offset()) == ((4, 4), 2)
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata != new.untyped_storage()._cdata


def test_an_operator_that_writes_returns_its_argument() -> None:
    def run() -> list[bool]:
        x, square, resized = torch.ones(4, 6), torch.empty(4, 4), torch.empty(0)
        torch.mul(x, x, out=resized)
        return [x.mul_(2) is x, torch.mm(x, x.t(), out=square) is square, resized.shape == (4, 6)]

    assert twice(run) == ([True] * 3, [True] * 3)


def test_an_input_that_was_written_over_is_not_the_next_calls_result() -> None:
    with fake_tensors(), torch.inference_mode():  # autograd would return the tensor given as out
        x, y = torch.ones(4, 6), torch.empty(4, 6)
        torch.ops.aten.silu.out(x, out=x)
        assert torch.ops.aten.silu.out(x, out=y) is y


def test_a_negated_view_stays_one() -> None:
    assert twice(lambda: torch._neg_view(torch.ones(3)).is_neg()) == (True, True)


def test_results_differ_by_the_type_of_a_number_and_the_default_dtype() -> None:
    def run() -> list[torch.dtype]:
        x = torch.ones(3, dtype=torch.int64)
        return [(x * number).dtype for number in (2, 2.0, True)]

    integer, single, double = torch.int64, torch.float32, torch.float64
    assert twice(run) == ([integer, single, integer],) * 2
    torch.set_default_dtype(double)
    try:
        assert twice(run) == ([integer, double, integer],) * 2
    finally:
        torch.set_default_dtype(single)


def test_a_constants_value_is_not_remembered() -> None:
    assert twice(lambda: [int(torch.tensor(number) + 1) for number in (3, 4)]) == ([4, 5], [4, 5])
