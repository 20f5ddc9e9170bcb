"""Divergences between tiled heads against plain PyTorch, and as TRL's generalised JSD computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seqtile
from numerics import _heads
from numerics._births import births
from numerics._blocks import random
from numerics._heads import IGNORE, SCALINGS, assert_same, bias_skipped, inputs, last_tile_dropped, upstream_ignored
from seqtile.ops.lm_loss.divergence import TeacherTopK, linear_divergence
from seqtile.ops.lm_loss.token_logprobs import HeadInput, token_logprobs

pytestmark = pytest.mark.usefixtures("small_blocks")
TOKENS, WIDE, VOCABULARY, K = 37, 6, 19, 4
BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])


def teacher(tokens: int = TOKENS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> HeadInput:
    """Of another width, with a head of its own and another scaling."""
    return HeadInput(
        random(tokens, WIDE, seed=21, dtype=dtype), random(vocabulary, WIDE, seed=22, dtype=dtype),
        random(vocabulary, seed=23, dtype=dtype), SCALINGS["scaled"],
    )  # fmt: skip


def divergence(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """As GKDTrainer.generalized_jsd_loss of TRL 1.16 computes it."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_t, log_s) if beta == 0.0 else kl(log_s, log_t)
    one = torch.tensor(beta, dtype=log_s.dtype)
    log_m = torch.stack([log_s + torch.log1p(-one), log_t + torch.log(one)]).logsumexp(0)
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


def twin(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, teacher: HeadInput, beta: float,
    scaling: Any = SCALINGS["plain"], temperature: float = 1.0, reduction: str = "mean", num_items: Any = None,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_s = (scaling.on(F.linear(hidden, weight, bias).to(wide)) / temperature).log_softmax(-1)
    logits = F.linear(teacher.hidden, teacher.weight, teacher.bias).detach().to(wide)
    log_t = (teacher.scaling.on(logits) / temperature).log_softmax(-1)
    valid = labels != IGNORE
    each = torch.where(valid, divergence(log_s, log_t, beta), 0)
    if reduction == "none":
        return each
    return each.sum() / (1 if reduction == "sum" else valid.sum() if num_items is None else num_items)


def run(function: Callable[..., Tensor], given: dict[str, Tensor], teacher: Any, **options: Any) -> dict[str, Tensor]:
    return _heads.run(partial(function, teacher=teacher), given, **options)


def check(given: dict[str, Tensor], teacher: Any, **options: Any) -> None:
    assert_same(run(linear_divergence, given, teacher, tile=10, **options), run(twin, given, teacher, **options))


@BETAS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_equal_to_the_twin(scaling: Any, reduction: str, beta: float) -> None:
    given = inputs(dtype=torch.float64)
    check(given, teacher(), beta=beta, scaling=scaling, temperature=1.7, reduction=reduction)


@pytest.mark.parametrize("mutant", [last_tile_dropped, upstream_ignored, bias_skipped])
def test_the_checker_notices_a_broken_operator(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    given = inputs(dtype=torch.float64)
    with pytest.raises(AssertionError):
        check(given, teacher(), beta=0.5)


@BETAS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str, beta: float) -> None:
    given = inputs(7, 3, 5, dtype=torch.float64)
    labels = given.pop("labels")

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_divergence(
            hidden, weight, labels, teacher(7, 5), beta=beta, bias=bias, scaling=SCALINGS["capped"], temperature=0.8,
            reduction=reduction, tile=3,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, tuple(given.values()))


@BETAS
@pytest.mark.parametrize("frozen", [["weight", "bias"], ["hidden"], ["weight", "bias", "hidden"]], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen(reduction: str, frozen: list[str], beta: float) -> None:
    given = inputs(dtype=torch.float64)
    for name in frozen:
        given[name].requires_grad_(False)
    if len(frozen) == 3:
        found = linear_divergence(**given, teacher=teacher(), beta=beta, reduction=reduction, tile=10)
        assert not found.requires_grad
        torch.testing.assert_close(found, twin(**given, teacher=teacher(), beta=beta, reduction=reduction))
        return
    check(given, teacher(), beta=beta, reduction=reduction)


@BETAS
def test_a_student_that_is_its_teacher_is_at_rest(beta: float) -> None:
    given = inputs(dtype=torch.float64)
    same = HeadInput(given["hidden"], given["weight"], given["bias"])
    found = run(linear_divergence, given, same, beta=beta, tile=10)
    for value in found.values():
        torch.testing.assert_close(value, torch.zeros_like(value))


def test_beta_turns_from_one_kl_to_the_other() -> None:
    """As in the limits of the paper: divided by beta and by 1 - beta."""
    given, small = inputs(dtype=torch.float64), 1e-6
    ends = [linear_divergence(**given, teacher=teacher(), beta=beta) for beta in (0.0, 1.0)]
    inner = [linear_divergence(**given, teacher=teacher(), beta=beta) / small for beta in (small, 1 - small)]
    torch.testing.assert_close(torch.stack(inner), torch.stack(ends), rtol=1e-3, atol=0)


@BETAS
def test_a_teacher_that_excludes_tokens(beta: float) -> None:
    """Logits of minus infinity, as of padding rows of a vocabulary: nothing where both agree, infinite where not."""
    given, own = inputs(dtype=torch.float64), teacher()
    hole = torch.zeros(VOCABULARY, dtype=torch.float64).index_fill(0, torch.tensor([3, 7]), -torch.inf)
    excluded = HeadInput(own.hidden, own.weight, hole)
    found = run(linear_divergence, given, excluded, beta=beta, tile=10)
    if beta == 1.0:
        assert found["loss"].isinf()
    else:
        assert all(value.isfinite().all() for value in found.values())
    given["bias"] = hole.clone().requires_grad_()
    agreed = run(linear_divergence, given, excluded, beta=beta, tile=10)
    assert beta == 1.0 or all(agreed[name].isfinite().all() for name in ("loss", "hidden", "weight"))


def test_num_items_batches_and_lengths() -> None:
    for tokens in (0, 1, 9, 10, 11, 24):
        given = inputs(tokens, dtype=torch.float64)
        for options in ({"num_items": torch.tensor(100)}, {"num_items": 7}, {"reduction": "sum"}):
            check(given, teacher(tokens), beta=0.5, **options)
    own = teacher(24)
    shaped = HeadInput(own.hidden.detach().view(2, 12, -1), own.weight, own.bias, own.scaling)
    flat = linear_divergence(**given, teacher=own, reduction="none")
    views = {**given, "hidden": given["hidden"].view(2, 12, -1), "labels": given["labels"].view(2, 12)}
    torch.testing.assert_close(linear_divergence(**views, teacher=shaped, reduction="none"), flat.view(2, 12))


def test_nothing_to_train_is_a_zero_gradient() -> None:
    given = inputs()
    given["labels"].fill_(IGNORE)
    for options in ({"reduction": "sum"}, {"num_items": 5}, {"reduction": "none"}):
        found = run(linear_divergence, given, teacher(dtype=torch.float32), **options)
        assert all((value == 0).all() for value in found.values())
    assert linear_divergence(**given, teacher=teacher(dtype=torch.float32)).isnan()


@pytest.mark.parametrize(("reduction", "own", "teachers"), [("mean", 3, 1), ("none", 4, 2)])
@BETAS
def test_products_of_the_tokens_that_count(beta: float, reduction: str, own: int, teachers: int) -> None:
    given, trained = inputs(), 29
    assert int((given["labels"] != IGNORE).sum()) == trained
    with seqtile.count_products() as products, births() as born:
        linear_divergence(
            **given, teacher=teacher(dtype=torch.float32), beta=beta, reduction=reduction, tile=10
        ).sum().backward()  # fmt: skip
    assert products.flops == 2 * trained * VOCABULARY * (own * 8 + teachers * WIDE)
    assert not [shape for shape in born.shapes if VOCABULARY in shape and max(shape) > VOCABULARY]


def test_backward_twice() -> None:
    given = inputs(bias=False)
    for reduction in ("mean", "none"):
        loss = linear_divergence(**given, teacher=teacher(dtype=torch.float32), reduction=reduction).sum()
        first = torch.autograd.grad(loss, given["weight"], torch.tensor(2.0), retain_graph=True)[0].clone()
        second = torch.autograd.grad(loss, given["weight"])[0]
        torch.testing.assert_close(first, 2 * second)
        with pytest.raises(NotImplementedError, match="create_graph"):
            again = linear_divergence(**given, teacher=teacher(dtype=torch.float32), reduction=reduction).sum()
            torch.autograd.grad(again, given["weight"], create_graph=True)


@BETAS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_activation_checkpoint_around_it_computes_nothing_again(reduction: str, beta: float) -> None:
    given, own = inputs(bias=False), teacher(dtype=torch.float32)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_divergence(hidden * 1.5, weight, labels, own, beta=beta, reduction=reduction, tile=10)

    counted = []
    for function in (loss, lambda **each: checkpoint(loss, **each, use_reentrant=False)):
        with seqtile.count_products() as products:
            function(**given).sum().backward()
        counted.append(products.flops)
    assert counted[0] == counted[1]


def test_autocast_and_a_teacher_in_another_dtype() -> None:
    given, exact = inputs(), teacher(dtype=torch.float32)
    coarse = HeadInput(exact.hidden.bfloat16(), exact.weight.bfloat16(), exact.bias.bfloat16(), exact.scaling)  # type: ignore[union-attr]
    for own in (exact, coarse):
        with torch.autocast("cpu", torch.bfloat16):
            found = run(linear_divergence, given, own, beta=0.5, tile=10)
        assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(found, torch.float32)
        expected = run(twin, given, exact, beta=0.5)
        for name, value in expected.items():  # as far off as bf16 is
            torch.testing.assert_close(found[name], value, rtol=3e-2, atol=3e-2 * float(value.abs().max()))
    found = run(linear_divergence, given, coarse, beta=0.5, tile=10)
    assert found["hidden"].dtype == torch.float32


def test_strides_and_frozen_leading_dimensions() -> None:
    given, own = inputs(24, dtype=torch.float64), teacher(24)
    expected = run(twin, given, own, beta=0.5, reduction="none")
    given["hidden"] = given["hidden"].detach().view(2, 12, -1).transpose(0, 1).contiguous().transpose(0, 1)
    given["hidden"].requires_grad_()
    given["weight"] = given["weight"].detach().t().contiguous().t().requires_grad_()
    given["labels"] = given["labels"].view(2, 12)
    shaped = HeadInput(own.hidden.view(2, 12, -1), own.weight, own.bias, own.scaling)
    found = run(linear_divergence, given, shaped, beta=0.5, reduction="none", tile=5)
    assert not given["hidden"].is_contiguous()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].reshape(value.shape), value)


def of_classes(log_s: Tensor, log_t: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """Divergence of the tokens and of all others as one class, from whole distributions."""
    rest = torch.ones_like(log_s, dtype=torch.bool).scatter(-1, tokens, False)
    parts = []
    for log_p in (log_s, log_t):
        other = log_p.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)
        parts.append(torch.cat([log_p.gather(-1, tokens), other], -1))
    return divergence(*parts, beta)


@BETAS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_teacher_known_by_its_most_likely_tokens(reduction: str, beta: float) -> None:
    given, own = inputs(dtype=torch.float64), teacher()
    said = token_logprobs(
        own.hidden, own.weight, torch.zeros(TOKENS, dtype=torch.long), bias=own.bias, scaling=own.scaling,
        temperature=1.7, top_log_probs=K,
    )  # fmt: skip
    known = TeacherTopK(said.top_log_probs, said.top_tokens)  # type: ignore[arg-type]

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, teacher: Any, **_: Any) -> Tensor:
        log_s = (F.linear(hidden, weight, bias) / 1.7).log_softmax(-1)
        log_t = (own.scaling.on(F.linear(own.hidden, own.weight, own.bias)).detach() / 1.7).log_softmax(-1)
        valid = labels != IGNORE
        each = torch.where(valid, of_classes(log_s, log_t, known.tokens, beta), 0)
        return each if reduction == "none" else each.sum() / valid.sum()

    options = {"beta": beta, "temperature": 1.7, "reduction": reduction}
    assert_same(run(linear_divergence, given, known, tile=10, **options), run(plain, given, known))


def top_k(log_probs: list[float], tokens: list[int]) -> TeacherTopK:
    """The same of every position."""
    return TeacherTopK(*(torch.tensor(values).expand(TOKENS, len(values)) for values in (log_probs, tokens)))


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_teachers_token_of_no_probability_counts_as_none(beta: float) -> None:
    """A server that cuts its distribution off (top-k, top-p sampling) says minus infinity."""
    never = top_k([-0.5, -torch.inf], [1, 2])
    found = run(linear_divergence, inputs(dtype=torch.float64), never, beta=beta)
    assert all(value.isfinite().all() for value in found.values())
    nearly = run(linear_divergence, inputs(dtype=torch.float64), top_k([-0.5, -700.0], [1, 2]), beta=beta)
    assert_same(found, nearly)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_students_token_that_cannot_be_adds_nothing(beta: float) -> None:
    never, nearly = inputs(dtype=torch.float64), inputs(dtype=torch.float64)
    never["bias"].data[2], nearly["bias"].data[2] = -torch.inf, -800.0
    known = top_k([-0.5, -2.0], [1, 2])
    found = run(linear_divergence, never, known, beta=beta)
    assert all(value.isfinite().all() for value in found.values())
    assert_same(found, run(linear_divergence, nearly, known, beta=beta))


def test_a_teacher_is_not_asked_about_tokens_that_do_not_count() -> None:
    given, sure = inputs(dtype=torch.float64), top_k([-1.0, -2.0], [3, 4])
    masked = given["labels"] == -100
    assert masked.any()
    broken = TeacherTopK(sure.log_probs.clone(), sure.tokens.clone())
    broken.log_probs[masked], broken.tokens[masked] = torch.nan, -1
    assert_same(run(linear_divergence, given, broken), run(linear_divergence, inputs(dtype=torch.float64), sure))


def test_a_top_k_of_the_whole_probability_stays_finite() -> None:
    given = inputs(dtype=torch.float32)
    sure = TeacherTopK(torch.tensor([[0.0, -torch.inf]]).expand(TOKENS, 2), torch.tensor([[1, 2]]).expand(TOKENS, 2))
    found = run(linear_divergence, given, sure, beta=1.0)
    assert found["loss"].isinf() or found["loss"].isfinite()
    sure = TeacherTopK(torch.tensor([[-1e-9]]).expand(TOKENS, 1), torch.tensor([[1]]).expand(TOKENS, 1))
    for beta in (0.0, 0.5, 1.0):
        assert all(value.isfinite().all() for value in run(linear_divergence, given, sure, beta=beta).values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta": 1.5}, "beta=1.5"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"reduction": "batchmean"}, "expected one of 'mean', 'sum', 'none'"),
        ({"reduction": "sum", "num_items": 3}, "num_items needs"),
        ({"teacher": torch.zeros(TOKENS, 5)}, "expected a HeadInput or a TeacherTopK"),
        ({"teacher": teacher(vocabulary=23)}, "23 rows, expected the student's vocabulary, 19"),
        ({"teacher": teacher(tokens=5)}, "one per token"),
        ({"teacher": HeadInput(torch.zeros(TOKENS, 5), torch.zeros(VOCABULARY, 6))}, "expected .*V, D"),
        ({"labels": torch.full((TOKENS,), 99)}, "labels range from 99 to 99"),
        ({"teacher": TeacherTopK(torch.zeros(TOKENS, 2), torch.zeros(TOKENS, 3).long())}, "of the shape of its tokens"),
        ({"teacher": top_k([-1.0, -2.0], [3, 3])}, "expected different ones"),
        ({"teacher": top_k([-1.0, -2.0], [3, VOCABULARY])}, "of a token in the loss"),
        ({"teacher": top_k([0.5, -2.0], [3, 4])}, "expected logarithms"),
        ({"teacher": top_k([-0.1, -0.1], [3, 4])}, "at most 1 in sum"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], words: str) -> None:
    """Of what would give wrong numbers, or a shape that broadcasts."""
    with pytest.raises(ValueError, match=words):
        linear_divergence(**{**inputs(dtype=torch.float64), "teacher": teacher(), **change})
