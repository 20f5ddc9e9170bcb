"""Every result of one pass, against plain PyTorch in float64: its value and, where it has one, its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import seqtile
from numerics._blocks import random
from numerics._heads import IGNORE, SCALINGS, TILED, VOCABULARY, assert_same, inputs, last_tile_dropped, run
from seqtile.ops.lm_loss.logits_tile import Objective
from seqtile.ops.lm_loss.module_head import module_logprobs
from seqtile.ops.lm_loss.token_logprobs import HeadInput, token_logprobs

pytestmark = pytest.mark.usefixtures("small_blocks")
TOKENS, K = 36, 3


def given(tokens: int = TOKENS, hidden: int = 8, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    made = inputs(tokens, hidden, vocabulary, dtype=torch.float64)
    made["targets"] = made.pop("labels")
    return made


def temperatures(tokens: int = TOKENS) -> Tensor:
    return 0.5 + random(tokens, seed=8, dtype=torch.float64, grad=False).abs()


def candidates(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (tokens, K), generator=torch.Generator().manual_seed(9))


def log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, scaling: Any, temperature: Tensor) -> Tensor:
    return (scaling.on(F.linear(hidden, weight, bias)) / temperature.unsqueeze(-1)).log_softmax(-1)


def test_tokens_that_cannot_be_add_nothing() -> None:
    """Rows of the head that are masked by -inf, as where a vocabulary is padded."""
    possible = VOCABULARY - 4
    whole, cut = given(), given()
    whole["bias"].data[possible:] = -torch.inf
    for name in ("weight", "bias"):
        cut[name] = cut[name].detach()[:possible].clone().requires_grad_()
    for tensors in (whole, cut):
        tensors["targets"].clamp_(max=possible - 1)
        scores = token_logprobs(**tensors, entropy=True, log_sum_squares=True, tile=10)
        assert scores.entropy is not None
        (scores.log_probs + 0.3 * scores.entropy).sum().backward()
        tensors |= {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach()}
        tensors["squares"], tensors["dx"] = scores.log_sum_squares, tensors["hidden"].grad
    for name in ("log_probs", "entropy", "squares", "dx"):
        torch.testing.assert_close(whole[name], cut[name])
    torch.testing.assert_close(whole["weight"].grad[:possible], cut["weight"].grad)
    assert not whole["weight"].grad[possible:].any()


def check(scaling: Any) -> None:
    """Every result of one pass, and the gradient of each that has one, alone and together."""
    tensors, per_token, asked = given(), temperatures(), candidates()
    logits = scaling.on(F.linear(tensors["hidden"], tensors["weight"], tensors["bias"])) / per_token.unsqueeze(-1)
    log_p, target = logits.log_softmax(-1), tensors["targets"].clamp(min=0).unsqueeze(-1)
    valid = (tensors["targets"] != IGNORE).unsqueeze(-1)
    results = {
        "log_probs": log_p.gather(-1, target),
        "entropy": -(log_p.exp() * log_p).sum(-1, keepdim=True),
        "argmax": logits.argmax(-1, keepdim=True),
        "top_k": (logits.topk(K, -1).indices == target).any(-1, keepdim=True),
        "log_sum_squares": (2 * log_p).logsumexp(-1, keepdim=True),
        "mean_logit": logits.mean(-1, keepdim=True),
        "candidates": log_p.gather(-1, asked),
        "top_log_probs": log_p.topk(K).values,
        "top_tokens": log_p.topk(K).indices,
    }
    expected = {name: torch.where(valid, value, 0) for name, value in results.items()}
    scores = token_logprobs(
        **tensors, scaling=scaling, temperature=per_token, candidates=asked, entropy=True, argmax=True, top_k=K,
        log_sum_squares=True, mean_logit=True, top_log_probs=K, tile=10,
    )  # fmt: skip
    ours = {name: getattr(scores, name).view(value.shape) for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(ours[name].to(value.dtype), value, msg=lambda text, name=name: f"{name}: {text}")
    leaves = [tensors[name] for name in ("hidden", "weight", "bias")]
    for names in (["log_probs"], ["entropy"], ["candidates"], ["entropy", "candidates", "log_probs"]):
        upstream = [random(*expected[n].shape, seed=6, dtype=torch.float64, grad=False) for n in names]
        got, true = (
            torch.autograd.grad([run[n] for n in names], leaves, upstream, retain_graph=True)
            for run in (ours, expected)
        )
        torch.testing.assert_close(got, true)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_everything_from_one_pass(scaling: Any) -> None:
    check(scaling)


def test_the_checker_notices_a_broken_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    last_tile_dropped(monkeypatch)
    with pytest.raises(AssertionError):
        check(SCALINGS["plain"])


def test_only_what_is_asked_for() -> None:
    tensors = given()
    tensors["hidden"] = tensors["hidden"].detach().view(3, 12, -1)
    tensors["targets"] = tensors["targets"].view(3, 12)
    with torch.no_grad():
        scores = token_logprobs(**tensors, tile=10)
    assert scores.log_probs.shape == (3, 12)
    assert (scores.entropy, scores.argmax, scores.top_k, scores.log_sum_squares, scores.mean_logit) == (None,) * 5


def test_a_head_that_runs_as_a_module_gives_the_same() -> None:
    call = inputs(bias=False)
    hidden, weight, labels = call["hidden"], call["weight"], call["labels"]
    options: dict[str, Any] = {name: True for name in ("entropy", "argmax", "log_sum_squares", "mean_logit")}
    expected = token_logprobs(hidden, weight, labels, ignore_index=IGNORE, **options)
    got = module_logprobs(
        lambda x, _: x @ weight.detach().t(), hidden, labels, dict, lambda n: (20, n - 20), VOCABULARY,
        Objective(ignore_index=IGNORE),
    )  # fmt: skip
    for name in ("log_probs", *options):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))


def test_a_number_is_the_same_temperature_for_every_token() -> None:
    tensors = given()
    by_temperature = token_logprobs(**tensors, temperature=0.7, tile=10)
    by_scaling = token_logprobs(**tensors, scaling=seqtile.LogitScaling(temperature=0.7), tile=10)
    torch.testing.assert_close(by_temperature.log_probs, by_scaling.log_probs)


@pytest.mark.parametrize("names", [["log_probs"], ["entropy"], ["candidates"], ["log_probs", "entropy", "candidates"]])
@pytest.mark.parametrize("scaling", ["plain", "capped"])
def test_gradcheck(names: list[str], scaling: str) -> None:
    tensors = given(7, 3, 5)
    targets = tensors.pop("targets")

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        scores = token_logprobs(
            hidden, weight, targets, bias=bias, scaling=SCALINGS[scaling], temperature=temperatures(7), entropy=True,
            candidates=candidates(7, 5), tile=3,
        )  # fmt: skip
        return tuple(getattr(scores, name) for name in names)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


def test_a_reference_with_the_same_head_and_with_its_own() -> None:
    tensors, per_token = given(), temperatures()
    other, narrow = random(TOKENS, 8, seed=11, dtype=torch.float64), random(TOKENS, 5, seed=12, dtype=torch.float64)
    head = random(VOCABULARY, 5, seed=13, dtype=torch.float64)
    for reference, parts in (
        (other, (other, tensors["weight"], tensors["bias"])),
        (HeadInput(narrow, head, scaling=SCALINGS["scaled"]), (narrow, head, None)),
    ):
        scores = token_logprobs(**tensors, temperature=per_token, reference=reference, tile=10)
        scaling = SCALINGS["plain" if reference is other else "scaled"]
        log_p = log_softmax(*parts, scaling, per_token)
        expected = log_p.gather(-1, tensors["targets"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        assert scores.reference is not None and not scores.reference.requires_grad
        torch.testing.assert_close(scores.reference, torch.where(tensors["targets"] == IGNORE, 0, expected))
        assert scores.log_probs.requires_grad


def test_the_reference_costs_one_product_and_no_second_look_at_the_targets() -> None:
    tensors = given(vocabulary=23)
    trained = int((tensors["targets"] != IGNORE).sum())
    for settings, units in (({}, 4), ({"reference": tensors["hidden"] * 2}, 5)):
        with seqtile.count_products() as products:
            token_logprobs(**tensors, **settings, tile=10).log_probs.sum().backward()
        assert products.flops == units * 2 * trained * 8 * 23


CLASSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "token-weights": {"token_weights": torch.linspace(0.1, 2.0, 37, dtype=torch.float64)},
}


@pytest.mark.parametrize("settings", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaling", ["plain", "capped"])
def test_class_weights(scaling: str, reduction: str, settings: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float64)
    weights = random(VOCABULARY, seed=14, dtype=torch.float64, grad=False).abs()

    def twin(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
        logits = SCALINGS[scaling].on(F.linear(hidden, weight, bias))
        smoothing, factors = settings.get("label_smoothing", 0.0), settings.get("token_weights", torch.ones(37))
        if "token_weights" not in settings:
            return F.cross_entropy(logits, labels, weights, label_smoothing=smoothing, reduction=reduction)
        loss = factors * F.cross_entropy(logits, labels, weights, label_smoothing=smoothing, reduction="none")
        if reduction == "none":
            return loss
        own = (factors * weights[labels.clamp(min=0)])[labels != IGNORE]
        return loss.sum() / (own.sum() if reduction == "mean" else 1)

    upstream = None if reduction == "none" else torch.tensor(0.5, dtype=torch.float64)
    ours = run(
        TILED, tensors, upstream, class_weights=weights, scaling=SCALINGS[scaling], reduction=reduction, tile=10,
        **settings,
    )  # fmt: skip
    assert_same(ours, run(twin, tensors, upstream))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_the_z_loss_is_returned(reduction: str, needs_gradient: bool) -> None:
    tensors = inputs(dtype=torch.float64)
    logits = F.linear(tensors["hidden"], tensors["weight"], tensors["bias"])
    squares = torch.where(tensors["labels"] == IGNORE, 0, 0.01 * logits.logsumexp(-1).square())
    valid = (tensors["labels"] != IGNORE).sum()
    expected = squares if reduction == "none" else squares.sum() / (valid if reduction == "mean" else 1)
    with torch.set_grad_enabled(needs_gradient):
        loss, z_loss = TILED(**tensors, z_loss=0.01, reduction=reduction, return_z_loss=True, tile=10)
        torch.testing.assert_close(loss, TILED(**tensors, z_loss=0.01, reduction=reduction, tile=10))
        torch.testing.assert_close(loss - z_loss, TILED(**tensors, reduction=reduction, tile=10))
    torch.testing.assert_close(z_loss, expected.detach())
    assert not z_loss.requires_grad and loss.requires_grad == needs_gradient


NATIVE = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this PyTorch has no chunked linear_cross_entropy"
)


@NATIVE
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sum"},
        {"num_items": 77},
        {"class_weights": torch.linspace(0.5, 2, VOCABULARY)},
        {"bias": None},
    ],
    ids=str,
)
def test_native_computes_the_same(settings: dict[str, Any]) -> None:
    tensors = inputs()
    if "bias" in settings:
        tensors.pop("bias")
    assert_same(run(TILED, tensors, impl="native", **settings), run(TILED, tensors, tile=10, **settings))


@NATIVE
def test_native_rounds_the_loss_in_low_precision_and_is_refused() -> None:
    """Once PyTorch's returns fp32 there, it can be taken there."""
    tensors = inputs(1024, 32, 48, dtype=torch.bfloat16, bias=False)
    loss = F.linear_cross_entropy(
        tensors["hidden"], tensors["weight"], tensors["labels"], options=torch.nn.LinearCrossEntropyOptions()
    )
    assert loss.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="rounds the loss and its upstream gradient to torch.bfloat16"):
        TILED(**tensors, impl="native")


@NATIVE
def test_what_native_does_not_compute_is_refused() -> None:
    for settings, words in (
        ({"scaling": SCALINGS["capped"]}, "does not scale"),
        ({"scaling": seqtile.LogitScaling(softcap=2.0)}, "soft-cap"),
        ({"label_smoothing": 0.1}, "label smoothing"),
        ({"z_loss": 0.1}, "z-loss"),
        ({"return_z_loss": True}, "return the z-loss"),
        ({"reduction": "none"}, "returns a sum only"),
        ({"token_weights": torch.ones(37)}, "returns a sum only"),
    ):
        with pytest.raises(ValueError, match=words):
            TILED(**inputs(), impl="native", **settings)


def test_native_where_pytorch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(ValueError, match="has no chunked linear_cross_entropy"):
        TILED(**inputs(), impl="native")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": torch.full((TOKENS,), VOCABULARY)}, "labels range from 19 to 19"),
        ({"targets": torch.full((TOKENS,), -7)}, "labels range from -7 to -7"),
        ({"targets": torch.zeros(TOKENS)}, "expected integers; use .long"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": torch.full((TOKENS,), torch.nan)}, "temperature=nan of a token in the loss"),
        ({"temperature": torch.ones(3)}, "expected a number or that of the targets"),
        ({"candidates": torch.zeros(3, 2, dtype=torch.long)}, "candidates are .* expected integers of"),
        ({"candidates": torch.full((TOKENS, 1), -1)}, r"candidates \[-1\] of a token in the loss"),
        ({"top_log_probs": VOCABULARY + 1}, "at most the vocabulary, 19"),
        ({"top_k": 0}, "at least 1"),
        ({"weight": None}, "weight is None, expected a tensor"),
        ({"vocabulary_group": "tp"}, "expected a process group"),
        ({"reference": torch.zeros(3, 8)}, "one per token"),
        ({"reference": torch.zeros(TOKENS, 5)}, "expected .*V, D"),
        ({"reference": HeadInput(torch.zeros(TOKENS, 5), torch.zeros(11, 5))}, "expected the same vocabulary"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    """Of what would give wrong numbers, or a shape that broadcasts."""
    with pytest.raises(ValueError, match=words):
        token_logprobs(**{**given(), **change})
