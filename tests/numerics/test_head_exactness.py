"""Every loss and score against float64: at most four times the error of untiled ``log_softmax`` in the same dtype.

The head's weight is the identity, so that the logits are the hidden states, to the bit, and their gradient is the
hidden states' gradient: what is judged is the arithmetic after the product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import seqtile
from numerics._errors import assert_all_no_worse
from seqtile.ops.lm_loss import vocabulary_shards
from seqtile.ops.lm_loss.divergence import TeacherTopK, linear_divergence
from seqtile.ops.lm_loss.head_nodes import HeadCall
from seqtile.ops.lm_loss.logits_tile import Objective
from seqtile.ops.lm_loss.module_head import module_cross_entropy
from seqtile.ops.lm_loss.policy import importance_ratios, sequence_logprobs
from seqtile.ops.lm_loss.token_logprobs import HeadInput
from seqtile.ops.lm_loss.vocabulary_shards import VocabularyShard, sharded_scores
from seqtile.tiling import parse_tile

TOKENS, VOCABULARY, TILE, K = 48, 320, 10, 3
LOW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda noise: 3 * noise,
    "flat": lambda noise: 0.01 * noise,
    "sharp": lambda noise: 40 * noise,
    "one token": lambda noise: noise + 30 * (torch.arange(VOCABULARY) == 7),
    "far above 0": lambda noise: 3 * noise + 2000,
    "far below 0": lambda noise: 3 * noise - 2000,
}


def logits(shape: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SHAPES[shape](torch.randn(TOKENS, VOCABULARY, generator=generator)).to(dtype)


def labels() -> Tensor:
    return torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


def head(dtype: torch.dtype) -> Tensor:
    return torch.eye(VOCABULARY, dtype=dtype)


def upstream(dtype: torch.dtype) -> Tensor:
    """For each token another one, as advantages are."""
    return torch.linspace(-1, 2, TOKENS, dtype=torch.promote_types(dtype, torch.float32))


WEIGHTS = torch.linspace(0.5, 1.5, VOCABULARY)

Score = Callable[[Tensor, Tensor, bool], Tensor]
"""Of logits and the teacher's logits, each token's number, tiled or not."""


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def at_labels(log_p: Tensor) -> Tensor:
    return log_p.gather(-1, labels().unsqueeze(-1)).squeeze(-1)


def entropies(z: Tensor, teacher: Tensor, tiled: bool) -> Tensor:
    if tiled:
        found = seqtile.token_logprobs(z, head(z.dtype), labels(), entropy=True, tile=TILE).entropy
        assert found is not None and (found >= 0).all()
        return found
    log_p = wide(z).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def log_probs(z: Tensor, teacher: Tensor, tiled: bool) -> Tensor:
    if tiled:
        return seqtile.token_logprobs(z, head(z.dtype), labels(), tile=TILE).log_probs
    return at_labels(wide(z).log_softmax(-1))


def candidates(z: Tensor, teacher: Tensor, tiled: bool) -> Tensor:
    asked = torch.stack([labels(), labels().flip(0)], -1)
    if tiled:
        found = seqtile.token_logprobs(z, head(z.dtype), labels(), candidates=asked, tile=TILE).candidates
        assert found is not None
        return found.sum(-1)
    return wide(z).log_softmax(-1).gather(-1, asked).sum(-1)


def cross_entropy(**options: Any) -> Score:
    def score(z: Tensor, teacher: Tensor, tiled: bool) -> Tensor:
        weights = options.get("class_weights")
        if tiled:
            return seqtile.linear_cross_entropy(z, head(z.dtype), labels(), reduction="none", tile=TILE, **options)
        log_p = wide(z).log_softmax(-1)
        weights = torch.ones(VOCABULARY, dtype=log_p.dtype) if weights is None else weights.to(log_p.dtype)
        smoothing = options.get("label_smoothing", 0.0)
        loss = -(1 - smoothing) * weights[labels()] * at_labels(log_p) - smoothing * (weights * log_p).mean(-1)
        return loss + options.get("z_loss", 0.0) * wide(z).logsumexp(-1).square()

    return score


def divergence(beta: float, temperature: float = 1.0) -> Score:
    def score(z: Tensor, teacher: Tensor, tiled: bool) -> Tensor:
        if tiled:
            known = HeadInput(teacher, head(teacher.dtype))
            return linear_divergence(
                z, head(z.dtype), labels(), known, beta=beta, temperature=temperature, reduction="none", tile=TILE
            )
        log_s, log_t = ((wide(each) / temperature).log_softmax(-1) for each in (z, teacher))
        if beta in (0.0, 1.0):
            p, q = (log_t, log_s) if beta == 0.0 else (log_s, log_t)
            return (p.exp() * (p - q)).sum(-1)
        one = torch.tensor(beta, dtype=log_s.dtype)
        log_m = torch.logaddexp(log_s + torch.log1p(-one), log_t + one.log())
        of_teacher = (log_t.exp() * (log_t - log_m)).sum(-1)
        return beta * of_teacher + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum(-1)

    return score


SCORES: dict[str, Score] = {
    "log-probability": log_probs,
    "entropy": entropies,
    "candidates": candidates,
    "cross-entropy": cross_entropy(),
    "smoothing": cross_entropy(label_smoothing=0.1),
    "weighted smoothing": cross_entropy(label_smoothing=0.3, class_weights=WEIGHTS),
    "z-loss": cross_entropy(z_loss=1e-4),
    "KL": divergence(0.0),
    "JSD": divergence(0.5),
    "JSD, temperature": divergence(0.3, 2.0),
    "reverse KL": divergence(1.0),
}


def outcome(score: Score, z: Tensor, teacher: Tensor, tiled: bool) -> dict[str, Tensor]:
    z = z.detach().clone().requires_grad_()
    numbers = score(z, teacher, tiled)
    gradient = torch.autograd.grad(numbers, z, upstream(z.dtype))[0]
    return {"value": numbers.detach(), "gradient": gradient}


def check(score: Score, shape: str, dtype: torch.dtype, near: float | None = None) -> None:
    z, teacher = logits(shape, dtype), logits(shape, dtype, seed=2)
    if near is not None:  # a student that has nearly learned
        teacher = (z + near * torch.randn(z.shape, generator=torch.Generator().manual_seed(3))).to(dtype)
    truth = outcome(score, z.double(), teacher.double(), False)
    assert_all_no_worse(outcome(score, z, teacher, True), outcome(score, z, teacher, False), truth, factor=4)


@LOW
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, shape: str, dtype: torch.dtype) -> None:
    check(SCORES[name], shape, dtype)


@LOW
@pytest.mark.parametrize("name", ["KL", "JSD", "reverse KL"])
def test_a_student_near_its_teacher(name: str, dtype: torch.dtype) -> None:
    check(SCORES[name], "usual", dtype, near=0.05)


@LOW
@pytest.mark.parametrize("shape", SHAPES)
def test_what_has_no_gradient(shape: str, dtype: torch.dtype) -> None:
    z = logits(shape, dtype)
    scores = seqtile.token_logprobs(z, head(dtype), labels(), top_log_probs=K, log_sum_squares=True, tile=TILE)

    def untiled(z: Tensor) -> dict[str, Tensor]:
        log_p = wide(z).log_softmax(-1)
        return {"top_log_probs": log_p.topk(K, -1).values, "log_sum_squares": (2 * log_p).logsumexp(-1)}

    truth = untiled(z.double())
    assert_all_no_worse({name: getattr(scores, name) for name in truth}, untiled(z), truth, factor=4)


class Ranks:
    """Two ranks as threads, which meet in ``all_reduce``."""

    def __init__(self) -> None:
        self.meet, self.held = threading.Barrier(2, timeout=30), [torch.empty(0)] * 2
        self.dist = SimpleNamespace(all_reduce=self.all_reduce, ReduceOp=SimpleNamespace(MAX="max"))

    def all_reduce(self, tensor: Tensor, op: str = "sum", group: Any = None) -> None:
        self.held[group] = tensor.clone()
        self.meet.wait()
        both = torch.stack(self.held)
        self.meet.wait()
        tensor.copy_(both.amax(0) if op == "max" else both.sum(0))

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        results: dict[int, Any] = {}

        def attempt(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001
                results[rank] = error
                self.meet.abort()

        threads = [threading.Thread(target=attempt, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[rank] for rank in range(2)]


@pytest.mark.backward_here
@LOW
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["log-probability", "entropy"])
def test_a_sharded_vocabulary(name: str, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, z = Ranks(), logits(shape, dtype)
    monkeypatch.setattr(vocabulary_shards, "dist", ranks.dist)

    def work(rank: int) -> dict[str, Tensor]:
        hidden = z.detach().clone().requires_grad_()
        rows = head(dtype).chunk(2)[rank]
        call = HeadCall(hidden, rows, None, labels(), Objective(), parse_tile(TILE), vocabulary=VOCABULARY)
        shard: Any = VocabularyShard(rank, rank * rows.shape[0], VOCABULARY)  # type: ignore[arg-type]
        value = sharded_scores(call, shard, None)[name == "entropy"]
        gradient = torch.autograd.grad(value, hidden, upstream(dtype))[0]
        return {"value": value.detach(), "gradient": gradient}

    untiled, truth = (outcome(SCORES[name], tensor, tensor, False) for tensor in (z, z.double()))
    for found in ranks.run(work):  # type: ignore[arg-type]
        assert_all_no_worse(found, untiled, truth, factor=4)  # type: ignore[arg-type]
        assert name != "entropy" or (found["value"] >= 0).all()  # type: ignore[index]


MANY = 70_000
"""Tokens: more than fp16's largest number, 65,504, and than bf16 counts."""

COUNT = 65_024
"""Of tokens of a step: a number in fp16 and in bf16."""


def numbers(half: torch.dtype, dtype: torch.dtype, *shape: int, seed: int = 5) -> Tensor:
    """Of the low precision, in either dtype."""
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(half)
    return made.to(dtype).requires_grad_()


def cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return seqtile.linear_cross_entropy(hidden, weight, targets, tile=9000, **options)


def distilled(beta: float, top_k: bool) -> Callable[..., Tensor]:
    def losses(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        teacher: Any = HeadInput(hidden.detach().flip(0), weight.detach())
        if top_k:
            tokens = torch.arange(K).expand(MANY, K)
            teacher = TeacherTopK(hidden.detach().new_tensor([0.25, 0.25, 0.125]).log().expand(MANY, K), tokens)
        return linear_divergence(hidden, weight, targets, teacher, beta=beta, tile=9000, **options)

    return losses


# Of each loss its weights of tokens and of classes, if it has some, and the count that it is divided by, if given.
SUMS: dict[str, tuple[Callable[..., Tensor], set[str], int | None]] = {
    "cross-entropy": (cross_entropies, set(), None),
    "cross-entropy, weights of tokens": (cross_entropies, {"token_weights"}, None),
    "cross-entropy, weights of classes": (cross_entropies, {"class_weights"}, None),
    "cross-entropy, both": (cross_entropies, {"class_weights", "token_weights"}, None),
    "cross-entropy over a given count": (cross_entropies, set(), COUNT),
    "KL": (distilled(0.0, False), set(), None),
    "JSD": (distilled(0.5, False), set(), None),
    "KL over a given count": (distilled(0.0, False), set(), COUNT),
    "KL to a teacher's top tokens": (distilled(0.0, True), set(), None),
}
HALF = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)


@HALF
@pytest.mark.parametrize(
    ("name", "reduction"),
    [(name, reduction) for name, (_, _, count) in SUMS.items() for reduction in ("mean", "sum")[: 1 if count else 2]],
)
def test_sums_of_losses(name: str, reduction: str, half: torch.dtype) -> None:
    """As exact as each token's loss, weighed and summed in fp32."""
    losses, weighs, count = SUMS[name]

    def outcome(dtype: torch.dtype, reduced: bool) -> dict[str, Tensor]:
        hidden, weight = numbers(half, dtype, MANY, 4), numbers(half, dtype, 6, 4, seed=6)
        targets = torch.randint(6, (MANY,), generator=torch.Generator().manual_seed(7))
        sizes = {"token_weights": MANY, "class_weights": 6}
        weights: Any = {name: numbers(half, dtype, sizes[name], seed=8).detach() for name in weighs}
        if reduced:  # with weights in the states' dtype, as mask.to(hidden.dtype) makes them
            items = {} if count is None else {"num_items": hidden.new_tensor([count])}
            loss = losses(hidden, weight, targets, reduction=reduction, **weights, **items)
        else:
            wide = {name: tensor.to(torch.promote_types(dtype, torch.float32)) for name, tensor in weights.items()}
            each = losses(hidden, weight, targets, reduction="none", **wide)
            of_tokens = wide.get("token_weights", torch.ones_like(each))
            if "class_weights" in wide:
                of_tokens = of_tokens * wide["class_weights"][targets]
            loss = each.sum() / (1 if reduction == "sum" else count or of_tokens.sum())
        gradients = torch.autograd.grad(loss, [hidden, weight])
        return {"loss": loss.detach(), **dict(zip(("hidden", "weight"), gradients, strict=True))}

    assert_all_no_worse(outcome(half, True), outcome(half, False), outcome(torch.float64, False))


def of_policy(half: torch.dtype, dtype: torch.dtype, function: Callable[..., Tensor]) -> dict[str, Tensor]:
    log_probs, old = numbers(half, dtype, 1, MANY), numbers(half, dtype, 1, MANY, seed=6)
    mask = torch.ones(1, MANY, dtype=torch.bool)
    value = function(-log_probs, -old, mask)
    return {"value": value.detach(), "gradient": torch.autograd.grad(value.sum(), log_probs)[0]}


CUTS = torch.tensor([0, 3, MANY])
POLICIES: dict[str, Callable[..., Tensor]] = {
    "sums": lambda new, old, mask: sequence_logprobs(new, mask),
    "means": lambda new, old, mask: sequence_logprobs(new, mask, average=True),
    "packed sums": lambda new, old, mask: sequence_logprobs(new, mask, cu_seqlens=CUTS),
    "packed means": lambda new, old, mask: sequence_logprobs(new, mask, cu_seqlens=CUTS, average=True),
    "ratios": lambda new, old, mask: importance_ratios(new, old, mask),
    "ratios of sequences": lambda new, old, mask: importance_ratios(new, old, mask, level="sequence"),
    "ratios of packed sequences": lambda new, old, mask: importance_ratios(
        new, old, mask, level="sequence", cu_seqlens=CUTS
    ),
}


@HALF
@pytest.mark.parametrize("name", POLICIES)
def test_sums_of_sequences(name: str, half: torch.dtype) -> None:
    ours, single, truth = (of_policy(half, dtype, POLICIES[name]) for dtype in (half, torch.float32, torch.float64))
    assert_all_no_worse(ours | {"gradient": single["gradient"]}, single, truth)
    # The gradient is rounded once, to the dtype of what it belongs to.
    torch.testing.assert_close(ours["gradient"], single["gradient"].to(half))


@pytest.mark.parametrize("count", [None, COUNT])
def test_sums_of_a_head_that_is_a_module(count: int | None) -> None:
    """As one with adapters; all of it in fp16."""

    def outcome(dtype: torch.dtype, items: Any) -> dict[str, Tensor]:
        hidden, weight = numbers(torch.float16, dtype, MANY, 4), numbers(torch.float16, dtype, 6, 4, seed=6)
        targets = torch.randint(6, (MANY,), generator=torch.Generator().manual_seed(7))
        loss = module_cross_entropy(
            lambda tile, weights: F.linear(tile, weights["weight"]), hidden, targets, {"weight": weight},
            lambda tokens: (tokens // 7,) * 7, 6, Objective(), items,
        )  # fmt: skip
        gradients = torch.autograd.grad(loss, [hidden, weight])
        return {"loss": loss.detach(), **dict(zip(("hidden", "weight"), gradients, strict=True))}

    given = None if count is None else torch.tensor([count], dtype=torch.float16)
    found, truth = outcome(torch.float16, given), outcome(torch.float64, count)
    assert_all_no_worse(found, outcome(torch.float16, count), truth)
