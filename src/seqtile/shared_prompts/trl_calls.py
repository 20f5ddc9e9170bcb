"""Calls of TRL's fused head with a padded batch, run on one row in which each common prefix is there once.

GRPO, RLOO, DPO, KTO and SFT call ``model(input_ids, attention_mask, labels, fused_lm_head=True)`` and read ``[B, T -
1]`` values. Hooks on the model fold the batch before the call and spread the values after it, whatever head computes
them. AsyncGRPO packs such rows itself, and has FlashAttention-3 gather the keys of every path; the hooks read its
segments instead, which then run on any kernel.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.lm_loss.tiled_loss import find_causal_lms
from seqtile.ops.attention.segment_tree import SegmentTable
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.shared_prompts.model import SharedPrompts, TreeHooks, share_prompts
from seqtile.shared_prompts.rows import SHORTEST_PREFIX, TreeRow, tree_row

logger = first_rank_logger(__name__)

UNDERSTOOD = {
    "input_ids", "attention_mask", "labels", "use_cache", "return_dict", "num_items_in_batch", "fused_lm_head",
    "trl_head", "output_router_logits",
}  # fmt: skip
"""Arguments of a call that can be folded."""


def share_in_calls(model: nn.Module) -> SharedPrompts:
    """Fold each call of TRL's fused head on the causal language models in ``model``.

    Raises:
        UserError: what :func:`share_prompts` raises, or a model that trains with a load-balancing loss.
    """
    shared = share_prompts(model)
    for _, module in find_causal_lms(model)[0]:
        if getattr(module.config.get_text_config(), "output_router_logits", False):  # type: ignore[union-attr, operator]
            shared.remove()
            raise UserError(_ROUTER)
        folded = FoldedCalls()
        module.register_forward_pre_hook(folded.before, with_kwargs=True)
        module.register_forward_hook(folded.after, with_kwargs=True)
    return shared


_ROUTER = (
    "shared prompts: the load-balancing loss would count the tokens of a shared prompt once; set "
    "output_router_logits=False in the model's configuration"
)


@dataclass(frozen=True)
class Fold:
    """One folded call.

    Attributes:
        row: what runs instead.
        shape: of the batch, ``(B, T)``.
        samples: ``[M]``, the sample of each scored token.
        columns: ``[M]``, its column in the batch.
    """

    row: TreeRow
    shape: tuple[int, int]
    samples: Tensor
    columns: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Values ``[1, tokens of the row]`` as ``[B, T - 1]``, zero where nothing is scored."""
        whole = values.new_zeros(self.shape[0], self.shape[1] - 1)
        return whole.index_put((self.samples, self.columns - 1), values[0, self.row.places])


class FoldedCalls(TreeHooks):
    """Hooks on one causal language model."""

    def __init__(self) -> None:
        self._folds: weakref.WeakKeyDictionary[SegmentTable, Fold] = weakref.WeakKeyDictionary()
        self._watching = True

    def __getstate__(self) -> dict[str, Any]:
        return {"_watching": self._watching}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._folds = weakref.WeakKeyDictionary()
        self.__dict__.update(state)

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Before the model's forward."""
        if "tree_kv_index" in kwargs:
            return args, read_trl_row(kwargs)
        if not (kwargs.get("fused_lm_head") or kwargs.get("trl_head")):
            return None
        if kwargs.get("output_router_logits"):
            raise UserError(_ROUTER)
        further = [name for name, value in kwargs.items() if value is not None and name not in UNDERSTOOD]
        fold = None
        why = f"the batch has {', '.join(further)}" if further or args else ""
        if not why:
            fold = fold_batch(kwargs["input_ids"], kwargs.get("attention_mask"), kwargs["labels"])
            why = "" if fold else f"no two samples of the batch share their first {SHORTEST_PREFIX} tokens"
        if self._watching and model.training and torch.is_grad_enabled():
            self._watching = False
            if why:
                logger.warning("shared_prompts=True had no effect in the first training step: %s", why)
        if fold is None:
            return None
        self._folds[fold.row.segments] = fold
        return args, {**kwargs, **fold.row.inputs, "labels": fold.row.labels, "shift_labels": fold.row.labels}

    def after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After it."""
        segments = kwargs.get("shared_prompts")
        fold = None if segments is None else self._folds.pop(segments, None)
        if fold is None:
            return output
        spread = {
            field.name: fold.spread(value) for field in fields(output)
            if isinstance(value := getattr(output, field.name), Tensor) and value.dim() == 2
        }  # fmt: skip
        count = kwargs.get("num_items_in_batch")
        loss = -spread["log_probs"].sum() / (max(len(fold.samples), 1) if count is None else count)
        return replace(output, loss=loss, **spread)


def fold_batch(input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Fold | None:
    """The row of a padded batch ``[B, T]``; None where its samples share nothing.

    Cost:
        The batch is read on the CPU, so the call waits for the device once.
    """
    ids, targets = input_ids.cpu(), labels.cpu()
    real = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
    if not real.any(-1).all():
        return None
    scored = [of_sample[there] != IGNORED for of_sample, there in zip(targets, real, strict=True)]
    row = tree_row([sample[there] for sample, there in zip(ids, real, strict=True)], scored, device=input_ids.device)
    if row.tokens == row.tokens_apart:
        return None
    # A sample's first token is predicted by nothing.
    columns = [there.nonzero()[1:, 0][mask[1:]] for there, mask in zip(real, scored, strict=True)]
    samples = torch.arange(len(ids), device="cpu").repeat_interleave(torch.tensor(row.counts, device="cpu"))
    device = input_ids.device
    return Fold(row, (ids.shape[0], ids.shape[1]), samples.to(device), torch.cat(columns).to(device))


def read_trl_row(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with TRL's description of a row (``TreeRow.pack``) replaced by its segments."""
    kwargs = dict(kwargs)
    index, starts, paths = (
        kwargs.pop(name).tolist() for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    )
    kwargs = {name: value for name, value in kwargs.items() if not name.startswith("tree_")}
    numbers = {start: number for number, start in enumerate(starts[:-1])}
    parents = []
    for number, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        path = index[paths[number] : paths[number + 1] - (end - start)]  # whole segments, the parent's last
        parents.append(max((numbers[place] for place in path if place in numbers), default=-1))
    lengths = [end - start for start, end in zip(paths, paths[1:], strict=False)]
    ends_of_samples = set(range(len(parents))) - set(parents)
    segments = SegmentTable(
        tuple(starts[:-1]), tuple(parents), starts[-1], sum(lengths[number] for number in ends_of_samples)
    )
    return {**kwargs, "shared_prompts": segments}
