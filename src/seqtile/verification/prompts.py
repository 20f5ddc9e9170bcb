"""Compare a row in which each common prefix is there once with one row per sample, on a user's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._effects import Watched
from seqtile._errors import UserError, expect_module
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.shared_prompts.model import share_prompts, shares_prompts
from seqtile.shared_prompts.rows import tree_row
from seqtile.verification.compare import NO_TRUTH, truth_of
from seqtile.verification.judge import difference, groups, severity
from seqtile.verification.one_step import BlockSizes, Measured
from seqtile.verification.result import VerifyResult
from seqtile.verification.state import kept, refuse_what_cannot_be_compared


def verify_shared_prompts(
    model: nn.Module,
    samples: Sequence[Sequence[int] | Tensor],
    scored: Sequence[int | Sequence[bool] | Tensor] | None = None,
    *,
    reference: str | None = "fp32",
    seed: int = 0,
) -> VerifyResult:
    """Run ``samples`` on ``model`` in one row each and in one row for all, and compare every gradient.

    The loss weighs each scored token's log-probability by another number. Dropout is off; the model's tiles, adapters
    and checkpoints stay as they are in both runs. Gradients, buffers, random state and training mode are restored.

    Args:
        model: a model in one process, not yet wrapped by an engine; after :func:`seqtile.share_prompts` or without.
        samples: as for :func:`seqtile.tree_row`.
        scored: likewise.
        reference: ``"fp32"``: the tolerance comes from a third run, of a copy of the model in fp32 (in fp64 if the
            model is in fp32), one row per sample; None uses PyTorch's default tolerance of the dtype.
        seed: seed of the random state that every run starts from.

    Returns:
        VerifyResult: its ``untiled`` run is that of one row per sample.

    Cost:
        Two or three forwards and backwards with whole logits; as many sets of gradients in host memory.

    Raises:
        UserError: no two samples share a prefix, or the model cannot run such rows.
    """
    expect_module(model, "verify_shared_prompts")
    refuse_what_cannot_be_compared(model)
    device = next(model.parameters()).device
    row = tree_row(samples, scored, device=device)
    if row.tokens == row.tokens_apart:
        raise UserError(
            "verify.no-shared-prefix",
            f"got {len(samples)} samples that share no prefix, so there is nothing to compare",
        )
    alone = [
        tree_row([sample], None if scored is None else [scored[number]], device=device)
        for number, sample in enumerate(samples)
    ]
    weights = torch.linspace(0.5, 1.5, sum(row.counts), device=device) / max(sum(row.counts), 1)

    def apart(model: nn.Module, _: Any) -> Tensor:
        log_probs: list[Tensor] = []
        for one in alone:
            logits = model(input_ids=one.input_ids, use_cache=False).logits
            log_probs += one.of_samples(_log_probs(logits, one.labels))
        return -(torch.cat(log_probs) * weights).sum()

    def together(model: nn.Module, _: Any) -> Tensor:
        logits = model(**row.inputs).logits
        return -(torch.cat(row.of_samples(_log_probs(logits, row.labels))) * weights).sum()

    notes: list[str] = []
    already_shared = shares_prompts(model)
    with kept(model, seed), Watched.pause():
        model.train()
        truth, precision = NO_TRUTH if reference is None else truth_of(model, {}, apart, seed, notes)
        expected = Measured(model, {}, apart, seed)
        shared = None if already_shared else share_prompts(model)
        try:
            got = Measured(model, {}, together, seed)
        finally:
            if shared is not None:
                shared.remove()
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    differences = tuple(
        difference(
            name, expected.gradients.get(name), got.gradients.get(name), truth.get(name),
            dtypes.get(name, torch.float32),
        )
        for name in {**expected.gradients, **got.gradients}
    )  # fmt: skip
    worst, sizes = max(differences, key=severity), BlockSizes(model, [], [])
    notes.append(f"{row.tokens:,} tokens computed instead of {row.tokens_apart:,}")
    return VerifyResult(
        ok=severity(worst) <= 1, worst=worst, untiled=expected.run(sizes), tiled=got.run(sizes),
        groups=groups(differences), parameters=differences, with_dropout=(), blocks=0, ran=got.ran,
        reference=precision, notes=tuple(notes),
    )  # fmt: skip


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(labels == IGNORED, 0)
