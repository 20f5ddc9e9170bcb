"""The tiled head against plain PyTorch: losses, gradients, edge cases, precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from numerics._blocks import random
from numerics._errors import assert_as_good
from numerics._heads import (
    HIDDEN,
    IGNORE,
    MUTANTS,
    SCALINGS,
    TILED,
    VOCABULARY,
    assert_same,
    inputs,
    low_precision_sums,
    run,
    twin,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("small_blocks")]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.2, "z_loss": 1e-2},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_to_the_twin(dtype: torch.dtype, scaling: Any, options: dict[str, Any], reduction: str) -> None:
    given = inputs(dtype=dtype)
    settings = {**options, "scaling": scaling, "reduction": reduction}
    assert_same(run(TILED, given, tile=10, **settings), run(twin, given, **settings))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_weights(reduction: str) -> None:
    given = inputs()
    weights = random(37, seed=9, grad=False).abs()
    settings = {"reduction": reduction, "label_smoothing": 0.1}
    expected = run(twin, given, token_weights=weights, **settings)
    ignored = weights.masked_fill(given["labels"] == IGNORE, float("nan"))  # whatever stands there
    for one in (weights, ignored):
        assert_same(run(TILED, given, tile=10, token_weights=one, **settings), expected)


@pytest.mark.parametrize("count", [100, 100.0, torch.tensor(100), torch.tensor(100.0)], ids=str)
def test_num_items(count: Any) -> None:
    given = inputs()
    assert_same(run(TILED, given, tile=10, num_items=count), run(twin, given, num_items=count))


@pytest.mark.parametrize("tokens", [0, 1, 9, 10, 11, 37])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_lengths(tokens: int, reduction: str) -> None:
    given = inputs(tokens)
    assert_same(run(TILED, given, tile=10, reduction=reduction), run(twin, given, reduction=reduction))


@pytest.mark.parametrize("rule", [1, 37, 1000, "shards:3", "arctic", "memory:1KiB", "auto"])
def test_tile_rules(rule: int | str) -> None:
    given = inputs()
    assert_same(run(TILED, given, tile=rule), run(twin, given))


@pytest.mark.parametrize(
    "frozen", [["weight", "bias"], ["hidden"], ["hidden", "bias"], ["weight", "hidden"], ["bias"]], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen(frozen: list[str], reduction: str) -> None:
    given = inputs()
    for name in frozen:
        given[name].requires_grad_(False)
    assert_same(run(TILED, given, tile=10, reduction=reduction), run(twin, given, reduction=reduction))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batches_and_strides(batch: int) -> None:
    given = inputs(batch * 12)
    given["hidden"] = random(12, batch, HIDDEN).detach().transpose(0, 1).requires_grad_()
    given["labels"] = given["labels"].view(12, batch).t()
    given["weight"] = random(HIDDEN, VOCABULARY, seed=2).detach().t().requires_grad_()
    for reduction in ("mean", "none"):
        assert_same(run(TILED, given, tile=5, reduction=reduction), run(twin, given, reduction=reduction))


def test_all_ignored() -> None:
    given = inputs()
    given["labels"].fill_(IGNORE)
    for settings in ({"reduction": "sum"}, {"num_items": 7}, {"reduction": "none"}):
        ours, expected = run(TILED, given, tile=10, **settings), run(twin, given, **settings)
        assert_same(ours, expected)
        assert all((value == 0).all() for value in ours.values())


def test_a_mean_over_nothing_is_nan_and_has_a_zero_gradient() -> None:
    """As PyTorch's: the loss says that it means nothing, and no weight is spoilt."""
    given = inputs()
    given["labels"].fill_(IGNORE)
    reference = torch.nn.functional.cross_entropy(given["hidden"] @ given["weight"].t(), given["labels"])
    expected = torch.autograd.grad(reference, given["weight"])[0]
    ours = run(TILED, given, tile=10)
    assert ours.pop("loss").isnan() and reference.isnan()
    assert all((value == 0).all() for value in ours.values()) and (expected == 0).all()


def test_an_ignored_row_may_hold_anything() -> None:
    given = inputs()
    ours = run(TILED, given, tile=10, upstream=torch.tensor(1.0))
    given["hidden"].data[0] = float("inf")  # its label is ignored
    got = run(TILED, {**given, "weight": given["weight"].detach()}, tile=10, upstream=torch.tensor(1.0))
    assert (got["hidden"][0] == 0).all()
    torch.testing.assert_close(got["loss"], ours["loss"])
    torch.testing.assert_close(got["hidden"][1:], ours["hidden"][1:])


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["plain", "both"])
@pytest.mark.parametrize("scaling", ["plain", "capped"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(scaling: str, reduction: str, options: dict[str, Any]) -> None:
    given = inputs(7, 3, 5, dtype=torch.float64)
    labels = given.pop("labels")
    settings = {**options, "scaling": SCALINGS[scaling], "reduction": reduction, "tile": 3}

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return TILED(hidden, weight, labels, bias=bias, **settings)

    assert torch.autograd.gradcheck(function, tuple(given.values()))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice(reduction: str) -> None:
    given = inputs(bias=False)
    loss = TILED(**given, tile=10, reduction=reduction).sum()
    wanted = [given["hidden"], given["weight"]]
    first = [g.clone() for g in torch.autograd.grad(loss, wanted, torch.tensor(2.0), retain_graph=True)]
    zero = torch.autograd.grad(loss, wanted, torch.tensor(0.0), retain_graph=True)
    second = torch.autograd.grad(loss, wanted, torch.tensor(1.0))
    for one, nothing, other in zip(first, zero, second, strict=True):
        torch.testing.assert_close(one, 2 * other)
        assert (nothing == 0).all()
    with pytest.raises(RuntimeError, match="retain_graph=True|second time"):
        torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_retained_graph_are_not_shared(dtype: torch.dtype) -> None:
    given = inputs(bias=False, dtype=dtype)
    loss = TILED(**given, tile=10)
    first = torch.autograd.grad(loss, given["weight"], retain_graph=True)[0]
    copy = first.clone()
    torch.autograd.grad(loss, given["weight"], torch.tensor(3.0))
    assert torch.equal(first, copy)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="the CPU rounds no factor; needs an accelerator")
@pytest.mark.parametrize("keep", [False, True])
def test_the_factor_of_the_states_gradient_is_not_rounded_to_their_dtype(keep: bool) -> None:
    """1/257 has an error of 0.2 % in bf16."""
    device = torch.accelerator.current_accelerator()
    given = {name: None if t is None else t.detach().to(device) for name, t in inputs(bias=False).items()}
    hidden = given.pop("hidden").bfloat16().requires_grad_()
    given["weight"] = given["weight"].bfloat16()
    plain = torch.autograd.grad(TILED(hidden, **given, tile=10, reduction="sum"), hidden)[0]
    loss = TILED(hidden, **given, tile=10, num_items=257)
    got = torch.autograd.grad(loss, hidden, retain_graph=keep)[0]
    assert torch.equal(got, (plain.float() * torch.tensor(1.0 / 257, device=device)).bfloat16())


def test_accumulated_over_micro_batches() -> None:
    """Two halves divided by the whole's count are the whole."""
    given = inputs()
    whole = run(TILED, given, tile=10, upstream=torch.tensor(1.0))
    count = (given["labels"] != IGNORE).sum()
    for part in (slice(0, 20), slice(20, None)):
        cut = {**given, "hidden": given["hidden"][part], "labels": given["labels"][part]}
        TILED(**cut, tile=10, num_items=count).backward()
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(given[name].grad, whole[name])


def test_without_gradient() -> None:
    given = inputs()
    with torch.no_grad():
        for reduction in ("mean", "sum", "none"):
            loss = TILED(**given, tile=10, reduction=reduction)
            assert not loss.requires_grad
            torch.testing.assert_close(loss, twin(**given, reduction=reduction))


def test_a_second_derivative_is_refused() -> None:
    given = inputs()
    for reduction in ("mean", "none"):
        with pytest.raises(NotImplementedError, match="create_graph"):
            torch.autograd.grad(TILED(**given, reduction=reduction).sum(), given["weight"], create_graph=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_checker_notices_a_broken_operator(
    mutant: Callable[..., None], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    given = inputs()
    upstream = None if reduction == "none" else torch.tensor(0.5)
    with pytest.raises(AssertionError):
        ours = run(TILED, given, upstream, tile=10, reduction=reduction)
        assert_same(ours, run(twin, given, upstream, reduction=reduction))


def check_low_precision(dtype: torch.dtype, count: int, reduction: str, autocast: bool = False) -> None:
    given = inputs(1024, 32, 48, dtype=torch.float32 if autocast else dtype)
    true = {name: t.detach().float().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
    # As large for every token and not a power of two, as a mean over a step's tokens is.
    upstream = torch.tensor(1 / 819) if reduction == "sum" else (1 + random(1024, seed=5, grad=False)) / 819

    def cast(function: Any) -> Any:
        def inner(**kwargs: Any) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=autocast):
                return function(**kwargs)

        return inner

    truth = run(partial(twin, reduction=reduction), true, upstream)
    plain = run(cast(partial(twin, reduction=reduction)), given, upstream)
    ours = run(cast(partial(TILED, reduction=reduction, tile=f"shards:{count}")), given, upstream)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in plain.items()}
    assert_as_good(ours, plain, truth)


LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@LOW
@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
def test_low_precision(dtype: torch.dtype, count: int, reduction: str, autocast: bool) -> None:
    check_low_precision(dtype, count, reduction, autocast)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_in_the_weights_precision_are_noticed(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    low_precision_sums(monkeypatch)
    with pytest.raises(AssertionError, match="untiled"):
        check_low_precision(torch.bfloat16, 64, reduction)


def test_more_than_two_billion_logits() -> None:
    """By shape alone: no tile of the default rule reaches 2**31 elements, and every offset is PyTorch's own."""
    from seqtile.tiling import BlockShape, TileRule, head_sizes

    for vocabulary in (32_000, 128_256, 262_144):
        for kind in ("cpu", "cuda"):
            shape = BlockShape(4096, vocabulary, 2, 4096 * vocabulary, 2, kind, live_widths=1)
            sizes = head_sizes(2**20, TileRule("auto"), shape)
            assert sum(sizes) == 2**20 and max(sizes) * vocabulary < 2**31
    hidden = torch.empty(2**20, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(128_256, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    loss = TILED(hidden, weight, torch.zeros(2**20, dtype=torch.long, device="meta"), reduction="sum", tile=2**17)
    assert [g.shape for g in torch.autograd.grad(loss, (hidden, weight))] == [hidden.shape, weight.shape]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "average"}, "expected one of"),
        ({"num_items": 3, "reduction": "sum"}, "num_items needs"),
        ({"num_items": float("nan")}, "expected a number of tokens"),
        ({"num_items": torch.ones(3)}, "num_items has shape"),
        ({"label_smoothing": 1.5}, "share from"),
        ({"z_loss": -1.0}, "at least 0"),
        ({"token_weights": torch.ones(3)}, "expected that of the labels"),
        ({"token_weights": torch.ones(37, requires_grad=True)}, "multiply by them yourself"),
        ({"class_weights": torch.ones(3)}, r"class_weights have shape \(3,\), expected \(19,\)"),
        ({"class_weights": torch.ones(19, requires_grad=True)}, "class_weights need a gradient"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "one per token"),
        ({"labels": torch.full((37,), VOCABULARY)}, "labels range from 19 to 19"),
        ({"bias": torch.zeros(3)}, "bias has shape"),
        ({"weight": torch.zeros(19, 3)}, "expected .*V, D"),
        ({"weight": torch.zeros(19, 8).to(torch.int8)}, "expected a floating-point one"),
        ({"hidden": None}, "hidden is None, expected a tensor"),
        ({"tile": 0}, "at least 1"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    """Of what would give wrong numbers, or a shape that broadcasts."""
    with pytest.raises(ValueError, match=words):
        TILED(**{**inputs(), **change})
