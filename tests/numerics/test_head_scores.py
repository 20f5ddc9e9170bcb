"""Log-probabilities, entropy and accuracy from one tiled pass, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from numerics._blocks import random
from numerics._heads import IGNORE, SCALINGS, VOCABULARY, inputs, last_tile_dropped
from seqtile.ops.lm_loss import logits_tile
from seqtile.ops.lm_loss.logits_tile import Objective
from seqtile.ops.lm_loss.module_head import module_logprobs
from seqtile.ops.lm_loss.token_logprobs import token_logprobs

ALL: dict[str, Any] = dict(entropy=True, argmax=True, top_k=3, log_sum_squares=True, mean_logit=True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits_tile.BLOCK_ELEMENTS, "cpu", 4 * VOCABULARY)


def given(tokens: int = 36, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = inputs(tokens, dtype=dtype)
    made["targets"] = made.pop("labels")
    return made


def twin(given: dict[str, Tensor], scaling: Any) -> dict[str, Tensor]:
    logits = scaling.on(F.linear(given["hidden"], given["weight"], given["bias"]))
    log_p = logits.log_softmax(-1)
    valid = given["targets"] != IGNORE
    target = given["targets"].clamp(min=0).unsqueeze(-1)
    found = {
        "log_probs": log_p.gather(-1, target).squeeze(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "argmax": logits.argmax(-1),
        "top_k": (logits.topk(3, -1).indices == target).any(-1),
        "log_sum_squares": (2 * log_p).logsumexp(-1),
        "mean_logit": logits.mean(-1),
    }
    return {name: torch.where(valid, value, 0) for name, value in found.items()}


def check(scaling: Any) -> None:
    tensors = given()
    expected = twin(tensors, scaling)
    scores = token_logprobs(**tensors, **ALL, scaling=scaling, tile=10)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(scores, name).to(value.dtype), value, msg=lambda t, n=name: f"{n}: {t}")
    leaves = [tensors[name] for name in ("hidden", "weight", "bias")]
    up = [random(36, seed=seed, dtype=torch.float64, grad=False) for seed in (6, 7)]
    for names in (("log_probs",), ("entropy",), ("log_probs", "entropy")):
        ours = torch.autograd.grad([getattr(scores, n) for n in names], leaves, up[: len(names)], retain_graph=True)
        theirs = torch.autograd.grad([expected[n] for n in names], leaves, up[: len(names)], retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_everything_from_one_pass(scaling: Any) -> None:
    check(scaling)


def test_the_checker_notices_a_broken_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    last_tile_dropped(monkeypatch)
    with pytest.raises(AssertionError):
        check(SCALINGS["plain"])


def test_only_what_is_asked_for() -> None:
    tensors = given(dtype=torch.float32)
    tensors["hidden"] = tensors["hidden"].detach().view(3, 12, -1)
    tensors["targets"] = tensors["targets"].view(3, 12)
    with torch.no_grad():
        scores = token_logprobs(**tensors, tile=10)
    assert scores.log_probs.shape == (3, 12) and scores.log_probs.dtype == torch.float32
    assert (scores.entropy, scores.argmax, scores.top_k, scores.log_sum_squares, scores.mean_logit) == (None,) * 5
    for change, words in (
        ({"top_k": 0}, "top_k=0: expected at least 1"), ({"temperature": None}, "temperature=None: expected a number"),
        ({"temperature": float("nan")}, "temperature=nan"), ({"weight": None}, "weight is None, expected a tensor"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            token_logprobs(**{**tensors, **change})


def test_entropy_can_be_asked_for_without_a_gradient_of_the_log_probabilities() -> None:
    tensors = given()
    scores = token_logprobs(**tensors, entropy=True, tile=10)
    scores.entropy.sum().backward()  # type: ignore[union-attr]
    reference = twin(tensors, SCALINGS["plain"])["entropy"].sum()
    torch.testing.assert_close(tensors["weight"].grad, torch.autograd.grad(reference, tensors["weight"])[0])


def test_a_head_that_runs_as_a_module_finds_the_same() -> None:
    call = inputs(bias=False)
    hidden, weight, labels = call["hidden"], call["weight"], call["labels"]
    wanted: dict[str, Any] = {name: True for name in ("entropy", "argmax", "log_sum_squares", "mean_logit")}
    expected = token_logprobs(hidden, weight, labels, ignore_index=IGNORE, **wanted)
    aim = Objective(ignore_index=IGNORE)
    got = module_logprobs(
        lambda x, _: x @ weight.detach().t(), hidden, labels, dict, lambda n: (20, n - 20), VOCABULARY, aim
    )
    for name in ("log_probs", *wanted):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
