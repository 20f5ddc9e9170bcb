"""TRL's trainers with tiled heads: log-probabilities and divergences without logits.

SFT, DPO, GRPO, KTO and RLOO ask a fused head of TRL's for log-probabilities; the tiled one answers in its place. Online
DPO and GKD request logits: they get deferred ones, and GKD's divergence is computed from the two heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import ONLINE_DPO_FORWARD
from seqtile._errors import UserError
from seqtile.install.apply import apply
from seqtile.lm_loss.deferred_logits import DeferredLogits
from seqtile.lm_loss.tiled_loss import HeadOf, deferred_logits, installed_losses
from seqtile.ops.lm_loss.divergence import linear_divergence
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.ops.lm_loss.token_logprobs import HeadInput


def tile_trainer(trainer: Any, *, loss_tile: int | str | None = None, shared_prompts: bool = False) -> list[str]:
    """Put the tiled head on every language model of a TRL trainer, built but not yet trained.

    Replaces ``seqtile.apply(model, blocks="none", loss="tiled", loss_tile=...)`` for each of ``trainer.model``,
    ``trainer.ref_model`` and ``trainer.teacher_model``, and what ``OnlineDPOTrainer`` and ``GKDTrainer`` need besides.
    Nothing else that :func:`seqtile.apply` did to them changes; the two can be called in either order.

    Args:
        trainer: SFT, DPO, GRPO, KTO, RLOO, online DPO or GKD.
        loss_tile: tokens per tile of the head; None keeps a tiled loss as it is, and is ``"auto"`` for a model
            without one.
        shared_prompts: compute each prompt once however many samples of a batch begin with it, as the answers of a
            group and the two of a preference do. For SFT, DPO, GRPO, KTO and RLOO, and for batches without images.
            AsyncGRPO's own rows run without its kernel and without gathered keys.

    Returns:
        What was done, one line per model.

    Raises:
        UserError: the trainer has no model with a tiled loss, or requests logits in an unsupported way; or shared
            prompts for a trainer or a model that cannot have them.
    """
    names = ("model", "ref_model", "teacher_model")
    attributes = {name: getattr(trainer, name, None) for name in names}
    models = {name: model for name, model in attributes.items() if isinstance(model, nn.Module)}
    if not models:
        raise UserError("trl.no-model", f"{type(trainer).__name__} has no model to tile; expected a built TRL trainer")
    class_names = {base.__name__ for base in type(trainer).__mro__}
    if shared_prompts and (others := class_names & {"OnlineDPOTrainer", "GKDTrainer"}):
        raise UserError(
            "shared-prompts.trainer-unsupported",
            f"shared_prompts=True does not support {others.pop()}, which does not score a padded batch",
        )
    done = []
    for name, model in models.items():
        if loss_tile is None and installed_losses(model):
            done.append(f"{name}: its loss is tiled already")
        else:
            tile = "auto" if loss_tile is None else loss_tile
            done.append(f"{name}: {apply(model, blocks='none', loss='tiled', loss_tile=tile).done['loss']}")
    if shared_prompts:
        from seqtile.shared_prompts.trl_calls import share_in_calls

        for name, model in models.items():
            share_in_calls(model)
            done.append(f"{name}: shared prompts are computed once")
    deferring = list(models.values())
    if "OnlineDPOTrainer" in class_names:
        setattr(trainer, ONLINE_DPO_FORWARD, _inside(deferring, getattr(trainer, ONLINE_DPO_FORWARD)))
        done.append("log-probabilities from deferred logits")
    if "GKDTrainer" in class_names:
        trainer.generalized_jsd_loss = generalized_jsd_loss
        trainer.compute_loss = _train_inside(deferring, trainer.compute_loss)
        done.append("divergence from the two heads")
    return done


def _inside(models: list[nn.Module], function: Callable[..., Any]) -> Callable[..., Any]:
    def deferred(*args: Any, **kwargs: Any) -> Any:
        with deferred_logits(*models):
            return function(*args, **kwargs)

    return deferred


def _train_inside(models: list[nn.Module], function: Callable[..., Any]) -> Callable[..., Any]:
    """``compute_loss``, with real logits where its caller wants the outputs too, as in evaluation."""
    within = _inside(models, function)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return (function if return_outputs else within)(model, inputs, return_outputs=return_outputs, **kwargs)

    return compute_loss


def generalized_jsd_loss(
    student_logits: Any, teacher_logits: Any, labels: Tensor | None = None, beta: float = 0.5, temperature: float = 1.0,
    reduction: str = "batchmean", num_items_in_batch: Tensor | int | None = None,
) -> Tensor:  # fmt: skip
    """``GKDTrainer.generalized_jsd_loss`` of deferred logits, ``[B, T, V]`` both; of real ones TRL's own.

    Raises:
        UserError: a reduction that is not one number, or a head that is more than its weight.
    """
    if not (isinstance(student_logits, DeferredLogits) and isinstance(teacher_logits, DeferredLogits)):
        from trl.experimental.gkd import GKDTrainer

        return GKDTrainer.generalized_jsd_loss(  # type: ignore[no-any-return]
            student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch
        )
    if num_items_in_batch is None and reduction not in ("batchmean", "sum"):
        raise UserError(
            "divergence.unknown-reduction",
            f"got reduction={reduction!r} for a tiled divergence, expected 'batchmean' or 'sum'",
        )
    if labels is None:
        labels = torch.zeros(student_logits.shape[:-1], dtype=torch.long, device=student_logits.device)
    student, teacher, targets = student_logits, teacher_logits, labels

    def of_student(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        def of_teacher(rows: Tensor, its_weight: Tensor, its_bias: Tensor | None) -> Tensor:
            its_head = HeadInput(rows, its_weight, its_bias, teacher.scaling)
            return linear_divergence(
                hidden, weight, targets, its_head, beta=beta, bias=bias, scaling=student.scaling,
                temperature=temperature, reduction="sum", tile=_head_of(student).installed.rule,
            )  # fmt: skip

        return _plain_inside(teacher, of_teacher)

    divisor: Any = 1
    if num_items_in_batch is not None:
        divisor = num_items_in_batch
    elif reduction == "batchmean":
        divisor = (labels != IGNORED).sum().clamp(min=1)
    total = _plain_inside(student, of_student)
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


def _head_of(logits: DeferredLogits) -> HeadOf:
    if not isinstance(logits.source, HeadOf) or logits.written is not None:
        raise UserError(
            "divergence.modified-logits", "expected unmodified deferred logits of a model with a tiled loss"
        )
    return logits.source


def _plain_inside(logits: DeferredLogits, compute: Callable[..., Tensor]) -> Tensor:
    """Call ``compute(hidden, weight, bias)`` inside the head's module, where engines have gathered its weight."""
    head = _head_of(logits)

    def refuse(*_: Any) -> Tensor:
        raise UserError(
            "divergence.head-not-plain",
            f"a tiled divergence needs a plain linear head, got {type(head.head).__name__} (an adapter or a "
            "quantized layer); put no adapter on the head",
        )

    return head.installed.inside(head.head, logits.hidden, compute, refuse)  # type: ignore[no-any-return]
