"""Each pair of techniques gives the loss and the gradients that the model has without seqtile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import combinations
from zoo import assert_same_gradients


def _case(pair: frozenset[str]) -> object:
    """Compiling is slow, and what it takes differs between versions: not with the lowest."""
    marks = [pytest.mark.slow] if "compiled layers" in pair else []
    return pytest.param(pair, id="+".join(sorted(pair)).replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("pair", [_case(pair) for pair in combinations.PAIRS])
def test_pair(pair: frozenset[str]) -> None:
    combinations.run(pair)


@pytest.mark.device
@pytest.mark.parametrize("pair", [_case(pair) for pair in combinations.PAIRS if pair not in combinations.REFUSED])
def test_pair_in_bf16(pair: frozenset[str]) -> None:
    combinations.run_in_bf16(pair)


def test_the_judge_of_bf16_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    build = combinations.build

    def slightly_off(how: combinations.Technique, ours: bool, dtype: torch.dtype) -> nn.Module:
        model = build(how, ours, dtype)
        if ours:
            model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 1.02)
        return model

    monkeypatch.setattr(combinations, "build", slightly_off)
    with pytest.raises(AssertionError, match="up_proj"):
        combinations.run_in_bf16(frozenset({"tiled MLP", "tiled loss"}))


def test_the_judge_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(got: dict, expected: dict) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        assert_same_gradients({**got, name: got[name] * 1.001}, expected)

    monkeypatch.setattr(combinations, "assert_same_gradients", slightly_off)
    with pytest.raises(AssertionError, match="up_proj"):
        combinations.run(frozenset({"tiled MLP", "tiled loss"}))
