"""What the suites of other libraries' chunked losses check, of ours, in float64 against the formulas in plain PyTorch.

Read for it: ``test/chunked_loss`` and ``test/transformers/test_fused_linear_{cross_entropy,jsd}.py`` of
linkedin/Liger-Kernel at ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c, ``tests`` of apple/ml-cross-entropy at
d42911f9b1a1f98289bb601c35c8151562603d74, ``tests/test_utils.py`` and ``tests/experimental`` of huggingface/trl at
f2cd57710ae345ea6428ae95363267fcf38a3dc8. Here is what no other file here tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from numerics._blocks import random
from numerics._heads import SCALINGS, assert_same
from seqtile.ops.lm_loss.cross_entropy import linear_cross_entropy
from seqtile.ops.lm_loss.divergence import linear_divergence
from seqtile.ops.lm_loss.policy import importance_ratios, sequence_logprobs
from seqtile.ops.lm_loss.token_logprobs import HeadInput, token_logprobs

pytestmark = pytest.mark.usefixtures("small_blocks")
ROWS, TOKENS, HIDDEN, WIDE, VOCABULARY, TILE = 4, 9, 8, 6, 47, 10
BETA = 0.2


def head(bias: bool, seed: int = 1, width: int = HIDDEN) -> dict[str, Tensor]:
    found = {
        "hidden": random(ROWS, TOKENS, width, seed=seed, dtype=torch.float64),
        "weight": random(VOCABULARY, width, seed=seed + 1, dtype=torch.float64),
    }
    return found | ({"bias": random(VOCABULARY, seed=seed + 2, dtype=torch.float64)} if bias else {})


def labels(ignore_index: int) -> Tensor:
    """Prompts of other lengths, one row that is ignored whole, and an ignored token in the middle."""
    found = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(4))
    found[found == ignore_index] = 0
    for row, prompt in enumerate((2, 5, TOKENS, 0)):
        found[row, :prompt] = ignore_index
    found[0, 6] = ignore_index
    return found


@dataclass
class Scored:
    """Log-probabilities ``[rows, tokens]`` of the policy and of the reference, and the sums and ratios made of them."""

    log_probs: Tensor
    reference: Tensor
    mask: Tensor
    sums: Callable[..., Tensor]
    ratios: Callable[..., Tensor]


def ours(given: dict[str, Tensor], targets: Tensor, ignore_index: int, reference: HeadInput) -> Scored:
    scores = token_logprobs(
        **given, targets=targets, ignore_index=ignore_index, reference=reference, tile=TILE, temperature=0.9
    )
    assert scores.reference is not None
    return Scored(scores.log_probs, scores.reference, targets != ignore_index, sequence_logprobs, importance_ratios)


def plain(given: dict[str, Tensor], targets: Tensor, ignore_index: int, reference: HeadInput) -> Scored:
    mask = targets != ignore_index

    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        log_p = (F.linear(hidden, weight, bias) / 0.9).log_softmax(-1)
        return log_p.gather(-1, torch.where(mask, targets, 0).unsqueeze(-1)).squeeze(-1) * mask

    def sums(log_probs: Tensor, mask: Tensor, average: bool = False) -> Tensor:
        return (log_probs * mask).sum(-1) / (mask.sum(-1).clamp(min=1) if average else 1)

    def ratios(log_probs: Tensor, old: Tensor, mask: Tensor, level: str) -> Tensor:
        difference = log_probs - old
        return (difference if level == "token" else sums(difference, mask, True).unsqueeze(-1)).exp()

    with torch.no_grad():
        frozen = of(reference.hidden, reference.weight, reference.bias)
    return Scored(of(given["hidden"], given["weight"], given.get("bias")), frozen, mask, sums, ratios)


def compare(bias: bool, ignore_index: int, loss_of: Callable[[Scored], Tensor]) -> None:
    targets = labels(ignore_index)
    found = []
    for way in (ours, plain):
        given, other = head(bias), head(bias, seed=11, width=WIDE)
        loss = loss_of(way(given, targets, ignore_index, HeadInput(**other)))
        gradients = torch.autograd.grad(loss, list(given.values()))
        found.append({"loss": loss.detach(), **dict(zip(given, gradients, strict=True))})
    assert found[1]["weight"].abs().max() > 1e-4
    assert_same(*found)


def _margin(s: Scored) -> tuple[Tensor, Tensor]:
    """Log-ratios of the chosen half and of the rejected one."""
    chosen, rejected = (s.sums(s.log_probs, s.mask) - s.sums(s.reference, s.mask)).chunk(2)
    return chosen, rejected


def dpo(of_ratios: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Scored], Tensor]:
    return lambda s: of_ratios(*_margin(s)).mean()


def without_reference(of_logps: Callable[[Tensor, Tensor], Tensor], average: bool, nll: float = 0.0) -> Any:
    def loss(s: Scored) -> Tensor:
        chosen, rejected = s.sums(s.log_probs, s.mask, average=average).chunk(2)
        half = s.log_probs.shape[0] // 2
        own = -s.sums(s.log_probs[:half], s.mask[:half]).sum() / s.mask[:half].sum()
        return of_logps(chosen, rejected).mean() + nll * own

    return loss


def kto(s: Scored) -> Tensor:
    chosen, rejected = _margin(s)
    return torch.cat([1 - torch.sigmoid(BETA * (chosen - 0.3)), 1 - torch.sigmoid(BETA * (0.3 - rejected))]).mean()


def odds(log_p: Tensor) -> Tensor:
    return log_p - torch.log1p(-log_p.exp())


PREFERENCES: dict[str, Callable[[Scored], Tensor]] = {
    "DPO": dpo(lambda c, r: -F.logsigmoid(BETA * (c - r))),
    "DPO, label smoothing": dpo(lambda c, r: -0.9 * F.logsigmoid(BETA * (c - r)) - 0.1 * F.logsigmoid(-BETA * (c - r))),
    "APO zero": dpo(lambda c, r: 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r)),
    "APO down": dpo(lambda c, r: torch.sigmoid(BETA * c) + 1 - torch.sigmoid(BETA * (c - r))),
    "SPPO hard": dpo(lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2),
    "NCA pair": dpo(
        lambda c, r: -F.logsigmoid(BETA * c) - 0.5 * F.logsigmoid(-BETA * c) - 0.5 * F.logsigmoid(-BETA * r)
    ),
    "CPO": without_reference(lambda c, r: -F.logsigmoid(BETA * (c - r)), average=False, nll=1.0),
    "SimPO": without_reference(lambda c, r: -F.logsigmoid(BETA * (c - r) - 0.5), average=True),
    "ORPO": without_reference(
        lambda c, r: -BETA * F.logsigmoid(odds(c - 1e-3) - odds(r - 1e-3)), average=True, nll=1.0
    ),
    "KTO": kto,
}


@pytest.mark.parametrize("loss", PREFERENCES)
@pytest.mark.parametrize(("bias", "ignore_index"), [(True, -100), (False, 42)])
def test_preference_losses(loss: str, bias: bool, ignore_index: int) -> None:
    """Heads with and without bias, a reference of another width, and an ``ignore_index`` that is a token."""
    compare(bias, ignore_index, PREFERENCES[loss])


EVERYTHING = {"delta": 2.0, "kl": 0.1, "corrected": True, "generator": True}
GRPO = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.mark.parametrize("kind", GRPO)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["plain", "all"])
def test_policy_losses(kind: str, level: str, more: dict[str, Any]) -> None:
    """TRL's ``_compute_loss``: every kind, clipped, with a KL, its correction and the generator's ratio."""
    advantages = torch.tensor([[0.7], [-1.1], [0.4], [0.9]], dtype=torch.float64)
    noise = 0.4 * random(ROWS, TOKENS, seed=31, dtype=torch.float64, grad=False)
    generators = 1 + 0.2 * random(ROWS, TOKENS, seed=32, dtype=torch.float64, grad=False)

    def loss(s: Scored) -> Tensor:
        old, mask = s.log_probs.detach() + noise * s.mask, s.mask
        ratios = s.ratios(s.log_probs, old, mask, level=level)
        unclipped = ratios.clamp(max=more["delta"]) if "delta" in more else ratios
        if kind == "cispo":
            each = -ratios.clamp(max=1.2).detach() * advantages * s.log_probs
        elif kind == "sapo":
            steep = torch.where(advantages > 0, 1.0, 1.05)
            each = -torch.sigmoid(steep * (unclipped - 1)) * 4 / steep * advantages
        elif kind == "vespo":
            each = -s.ratios(s.log_probs, old, mask, level="sequence").detach() * advantages * s.log_probs
        else:
            each = -torch.min(unclipped * advantages, ratios.clamp(0.8, 1.2) * advantages)
        if "generator" in more and kind != "vespo":
            each = each * generators
        if "kl" in more:
            beyond = s.reference - s.log_probs
            kl = beyond.exp() - beyond - 1
            each = each + more["kl"] * kl * (ratios if more["corrected"] else 1)
        each = each * mask
        if kind in ("grpo", "sapo"):
            return (each.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        if kind == "luspo":
            return each.sum(-1).mean()
        return each.sum() / {"bnpo": mask.sum(), "dr_grpo": torch.tensor(ROWS * TOKENS)}.get(kind, torch.tensor(17))

    compare(True, -100, loss)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 42])
def test_hard_and_soft_losses_together(beta: float, ignore_index: int) -> None:
    """Liger's distillation losses: cross-entropy of the labels and a divergence at a temperature, weighted."""
    targets, teacher = labels(ignore_index), HeadInput(**head(True, seed=11, width=WIDE))
    mask = targets != ignore_index

    def tiled(given: dict[str, Tensor]) -> Tensor:
        options: dict[str, Any] = {"ignore_index": ignore_index, "tile": TILE}
        hard = linear_cross_entropy(**given, labels=targets, **options)
        return 0.3 * hard + 0.7 * linear_divergence(
            **given, labels=targets, teacher=teacher, beta=beta, temperature=2.0, **options
        )

    def untiled(given: dict[str, Tensor]) -> Tensor:
        logits = F.linear(*given.values())
        other = F.linear(teacher.hidden, teacher.weight, teacher.bias).detach()
        s, t = (logits / 2).log_softmax(-1), (other / 2).log_softmax(-1)
        m = t if beta == 1 else s if beta == 0 else ((1 - beta) * s.exp() + beta * t.exp()).log()
        forward, reverse = (t.exp() * (t - m)).sum(-1), (s.exp() * (s - m)).sum(-1)
        soft = forward if beta == 0 else reverse if beta == 1 else beta * forward + (1 - beta) * reverse
        hard = F.cross_entropy(logits[mask], targets[mask])
        return 0.3 * hard + 0.7 * soft[mask].mean()

    found = []
    for way in (tiled, untiled):
        given = head(True)
        loss = way(given)
        gradients = torch.autograd.grad(loss, [*given.values()])
        found.append({"loss": loss.detach(), **dict(zip(given, gradients, strict=True))})
    assert_same(*found)


def test_a_divergence_is_symmetric_halfway_alone() -> None:
    """TRL's ``test_symmetry``; and two heads that know nothing agree."""
    one, other = head(False), head(False, seed=11)
    targets = labels(-100)

    def divergence(student: dict[str, Tensor], teacher: dict[str, Tensor], beta: float) -> Tensor:
        return linear_divergence(**student, labels=targets, teacher=HeadInput(**teacher), beta=beta, tile=TILE).detach()

    torch.testing.assert_close(divergence(one, other, 0.5), divergence(other, one, 0.5))
    assert not torch.isclose(divergence(one, other, 0.1), divergence(other, one, 0.1))
    torch.testing.assert_close(divergence(one, other, 0.1), divergence(other, one, 0.9))
    flat = {**one, "weight": torch.zeros_like(one["weight"])}
    torch.testing.assert_close(divergence(flat, {**other, "weight": flat["weight"]}, 0.5), torch.zeros(()).double())


def test_losses_weighted_by_the_targets_probability_and_their_accuracy() -> None:
    """Liger's ``use_token_scaling`` and ``return_token_accuracy``."""
    targets = labels(-100)
    mask = targets != -100
    given, again = head(True), head(True)
    scores = token_logprobs(**given, targets=targets, argmax=True, tile=TILE)
    factors = scores.log_probs.detach().exp()
    loss = linear_cross_entropy(**given, labels=targets, token_weights=factors, reduction="sum", tile=TILE)
    logits = F.linear(*again.values())[mask]
    own = logits.softmax(-1).gather(-1, targets[mask].unsqueeze(-1)).squeeze(-1).detach()
    expected = (own * F.cross_entropy(logits, targets[mask], reduction="none")).sum()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(
        torch.autograd.grad(loss, [*given.values()]), torch.autograd.grad(expected, [*again.values()]), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert scores.argmax is not None
    assert torch.equal(scores.argmax[mask], logits.argmax(-1))


@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("scaling", ["plain", "capped"])
def test_labels_of_later_positions(shift: int, scaling: str) -> None:
    """The ``shift`` of apple's: the caller's here, in the hidden states or in the labels, to the same gradients."""
    targets, cap = labels(-100), SCALINGS[scaling]
    given, again = head(True), head(True)
    moved = F.pad(targets[:, shift:], (0, shift), value=-100)
    loss = linear_cross_entropy(**given, labels=moved, scaling=cap, tile=TILE)
    hidden = again["hidden"][:, :-shift]
    expected = linear_cross_entropy(**{**again, "hidden": hidden}, labels=targets[:, shift:], scaling=cap, tile=TILE)
    plain = F.cross_entropy(
        cap.on(F.linear(hidden, again["weight"], again["bias"])).flatten(0, 1), targets[:, shift:].flatten()
    )
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(expected, plain)
    for one, other in zip(
        torch.autograd.grad(loss, [*given.values()]), torch.autograd.grad(plain, [*again.values()]), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_masked_prompts_leave_the_gradient_of_their_tokens_alone() -> None:
    """TRL's masked head: results of prompts are 0, and a loss that ignores them has the same gradient unmasked."""
    targets = labels(-100)
    mask = targets != -100
    given, again = head(False), head(False)
    masked = token_logprobs(**given, targets=targets, entropy=True, tile=TILE)
    whole = token_logprobs(**again, targets=targets.clamp(min=0), entropy=True, tile=TILE)
    assert masked.entropy is not None and whole.entropy is not None
    assert not masked.log_probs[~mask].any() and not masked.entropy[~mask].any() and whole.log_probs[~mask].all()
    for one, other in zip(
        torch.autograd.grad((masked.log_probs + masked.entropy).sum(), [*given.values()]),
        torch.autograd.grad(((whole.log_probs + whole.entropy) * mask).sum(), [*again.values()]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
