"""Steps of TRL's trainers, and of models without a vocabulary.

What they compute is run on fake tensors with the operations of TRL 1.16.0 (``trl/trainer/dpo_trainer.py``,
``trl/experimental/orpo/orpo_trainer.py``, ``trl/experimental/gkd/gkd_trainer.py``). The bytes of a reference that is a
model of its own are a formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.lm_loss.tiled_loss import deferred_logits
from seqtile.models.causal import causal_model
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.planner.grpo import REFERENCE, gathered_reference, reference_bytes
from seqtile.planner.layer_structure import Counts
from seqtile.planner.phases import Phase
from seqtile.planner.request import Request
from seqtile.planner.step_config import Setup
from seqtile.planner.step_kind import StepKind


class LabelStep(StepKind):
    """A step of a model that returns a few numbers for each sequence or token: a reward model, a classifier."""

    def applies(self, config: Any, setup: Setup) -> bool:
        return setup.trainer is not None and setup.trainer.head == "labels"

    def auto_class(self, config: Any) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def change_batch(self, model: Any, setup: Setup, batch: dict[str, Tensor]) -> None:
        del batch["labels"]
        text = model.config.get_text_config()
        if text.pad_token_id is None:  # the token before the first padding is scored
            text.pad_token_id = 0

    def loss(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).logits.float().mean()
        return loss


class ReferenceStep(StepKind):
    """A step that reads scores or logits of the model, and those of a frozen model beside it."""

    standing = (REFERENCE,)

    def applies(self, config: Any, setup: Setup) -> bool:
        return setup.trainer is not None and setup.rollouts is None and setup.trainer.head not in ("loss", "labels")

    def loss(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
        assert setup.trainer is not None
        ids = batch["input_ids"]
        if setup.trainer.head == "hidden":
            base, head = causal_model(model), causal_model(model).get_output_embeddings()
            student = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
            rows = min(student[..., 0].numel(), setup.loss_tile)
            divergence: Tensor = _TiledDivergence.apply(student, head.weight, rows)  # type: ignore[no-untyped-call]
            return divergence.sum()
        if setup.trainer.head == "scores":
            targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
            with deferred_logits(model):
                scores = model(input_ids=ids).logits.scores(targets, entropy=True, argmax=True, mean_logit=True)
            log_probs: Tensor = scores.log_probs
            return -log_probs.sum()
        logits = model(input_ids=ids).logits
        if setup.trainer.head == "divergence":
            of_teacher = logits.detach().clone()  # which the trainer has until the loss is computed
            return _divergence(logits[:, :-1], of_teacher[:, :-1])
        return _loss_of_pairs(logits, ids)

    def after_forward(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> None:
        assert setup.trainer is not None
        if not setup.trainer.reference or setup.trainer.head == "divergence":
            return
        with torch.no_grad():
            if setup.trainer.head == "scores":
                self.loss(model, setup, batch)
            elif setup.trainer.head == "hidden":
                causal_model(model).base_model(input_ids=batch["input_ids"], use_cache=False)
            else:
                model(input_ids=batch["input_ids"])

    def add_terms(
        self, request: Request, counts: Counts, terms: dict[str, float], phase: Phase, tokens: int, bound: str
    ) -> None:
        assert request.trainer is not None
        if not request.trainer.own_reference:
            return
        terms[REFERENCE] = reference_bytes(request, counts)
        if phase.direction == "forward":
            terms[REFERENCE] += gathered_reference(request, counts)
            if request.engine in ("zero2", "zero3") and request.options.tiled:
                # DeepSpeed has wrapped it before it could be tiled: gate, up and their product of all rows.
                width = 3 * counts.largest_product / counts.hidden
                rows = request.batch * -(-tokens // request.split)
                terms[REFERENCE] += width * request.setup().dtype.itemsize * rows


def _loss_of_pairs(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the first half of the rows, and log-probabilities of every row's tokens, from whole logits."""
    half, width = max(1, len(ids) // 2), logits.shape[-1]
    first = logits[:half]  # a slice of a slice, whose backward makes each whole
    loss = F.cross_entropy(first[..., :-1, :].contiguous().view(-1, width), ids[:half, 1:].contiguous().view(-1))
    shifted, tokens = logits[:, :-1], ids[:, 1:].unsqueeze(-1)
    if logits.dtype == torch.float32:  # in the order of TRL's selective_log_softmax, which the backward reverses
        log_probs = torch.gather(shifted, -1, tokens)
        log_probs = log_probs - torch.stack([torch.logsumexp(row, dim=-1) for row in shifted]).unsqueeze(-1)
    else:
        rows = zip(shifted, tokens, strict=True)
        log_probs = torch.stack([F.log_softmax(row, dim=-1).gather(-1, labels) for row, labels in rows])
    return loss - log_probs.sum()


def _divergence(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """GKD's divergence of ``[B, T, V]`` logits."""
    student, teacher = student / 1.0, teacher / 1.0
    student_log_probs, teacher_log_probs = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    both = torch.stack([student_log_probs + math.log(1 - beta), teacher_log_probs + math.log(beta)])
    mixture = torch.logsumexp(both, dim=0)
    of_teacher = F.kl_div(mixture, teacher_log_probs, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, student_log_probs, reduction="none", log_target=True)
    divergence = beta * of_teacher + (1 - beta) * of_student
    every_token = torch.arange(divergence.shape[0] * divergence.shape[1], device=divergence.device)
    return divergence.flatten(0, 1)[every_token].sum()


class _TiledDivergence(torch.autograd.Function):
    """The tensors of TRL's divergence of hidden states ``[B, T, D]`` (``trl/kernels/chunked_divergence.py``)."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, weight: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(student, weight, student.clone())  # the last for the teacher's hidden states
        ctx.rows = rows
        _logits_of_both(student, rows)
        return student.new_zeros(student.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        student, weight, _ = ctx.saved_tensors
        of_hidden = torch.zeros_like(student, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _logits_of_both(student, ctx.rows)
        return of_hidden.to(student.dtype), None if of_weight is None else of_weight.to(weight.dtype), None


TRL_LOGITS_WIDTH = 32_768
"""Logits at a time of TRL's distillation (1.16.0), whatever the vocabulary."""


def _logits_of_both(hidden: Tensor, rows: int) -> None:
    """Allocate the tiles of the two models' logits, whose size does not depend on the vocabulary."""
    hidden.new_empty(2, rows, TRL_LOGITS_WIDTH, dtype=torch.float32)
