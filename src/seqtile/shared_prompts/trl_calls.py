"""Calls of TRL's fused head with a padded batch, run on one row in which each common prefix is there once.

GRPO, RLOO, DPO, KTO and SFT call ``model(input_ids, attention_mask, labels, fused_lm_head=True)`` and read ``[B, T -
1]`` values. Hooks on the model fold the batch before the call and spread the values after it, whatever head computes
them. AsyncGRPO packs such rows itself, and has FlashAttention-3 gather the keys of every path; the hooks read its
segments instead, which then run on any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.lm_loss.tiled_loss import find_causal_lms
from seqtile.ops.attention.segment_tree import ARGUMENT, SegmentTable
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.shared_prompts.model import SharedPrompts, TreeHooks, remove_sharing, share_prompts
from seqtile.shared_prompts.rows import SHORTEST_PREFIX, TreeRow, no_mask, tree_row

logger = first_rank_logger(__name__)

UNDERSTOOD = {
    "input_ids", "attention_mask", "labels", "use_cache", "return_dict", "num_items_in_batch", "fused_lm_head",
    "trl_head", "output_router_logits",
}  # fmt: skip
"""Arguments that a call may have to be folded."""


def share_in_calls(model: nn.Module) -> SharedPrompts:
    """Fold each call of TRL's fused head on the causal language models in ``model``.

    Raises:
        UserError: what :func:`share_prompts` raises, no causal language model, or one that trains with a load-balancing
            loss.
    """
    causal_lms: list[Any] = [module for _, module in find_causal_lms(model)[0]]
    if any(getattr(module.config.get_text_config(), "output_router_logits", False) for module in causal_lms):
        raise UserError("shared-prompts.router-loss", _ROUTER)
    remove_sharing(model)
    shared = share_prompts(model)
    for module in causal_lms:
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
        row: the row that runs instead of the batch.
        shape: shape of the batch, ``(B, T)``.
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
        self._fold: Fold | None = None
        self._watching = True

    def __getstate__(self) -> dict[str, Any]:
        return {"_watching": self._watching}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _fold=None)

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Replace a batch that can be folded by its row."""
        self._fold = None  # left over by a call that failed
        if "tree_kv_index" in kwargs:
            return args, read_trl_row(kwargs)
        if kwargs.get(ARGUMENT) is not None:
            return None
        fused = kwargs.get("fused_lm_head") or kwargs.get("trl_head")
        if fused and kwargs.get("output_router_logits"):
            raise UserError("shared-prompts.router-loss", _ROUTER)
        unsupported = [name for name, value in kwargs.items() if value is not None and name not in UNDERSTOOD]
        fold: Fold | str
        if not fused:
            fold = "the trainer asks for logits, as with label smoothing or a loss of your own"
        elif unsupported or args:
            fold = f"the batch has {', '.join(unsupported) or 'arguments without names'}"
        else:
            fold = fold_batch(kwargs["input_ids"], kwargs.get("attention_mask"), kwargs["labels"])
        if self._watching and model.training and torch.is_grad_enabled():
            self._watching = False
            if isinstance(fold, str):
                logger.warning("shared_prompts=True had no effect in the first training step: %s", fold)
        if isinstance(fold, str):
            return None
        self._fold = fold
        return args, {**kwargs, **fold.row.inputs, "labels": fold.row.labels, "shift_labels": fold.row.labels}

    def after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Spread the row's values over the batch."""
        fold, self._fold = self._fold, None
        if fold is None:
            return output
        spread = {
            field.name: fold.spread(value) for field in fields(output)
            if isinstance(value := getattr(output, field.name), Tensor) and value.dim() == 2
        }  # fmt: skip
        count = kwargs.get("num_items_in_batch")
        loss = -spread["log_probs"].sum() / (max(len(fold.samples), 1) if count is None else count)
        return replace(output, loss=loss, **spread)


def fold_batch(input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Fold | str:
    """Fold a padded batch ``[B, T]`` into a row, or return why it cannot be folded.

    Cost:
        The batch is read on the CPU, so the call waits for the device once.
    """
    ids, targets = input_ids.cpu(), labels.cpu()
    real = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
    if not real.any(-1).all():
        return "a sample of the batch has no token"
    if (F.pad(real.long(), (1, 1)).diff().abs().sum(-1) > 2).any():
        return "a sample of the batch has masked tokens in its middle"
    kept = targets[:, 1:] != IGNORED
    if (kept & ((targets != ids) | ~real)[:, 1:]).any():
        return "a label of the batch is not the token in its place"
    if (kept & ~real[:, :-1]).any():
        return "the batch scores a token behind padding, such as the first of a sample"
    scored = [of_sample[is_token] != IGNORED for of_sample, is_token in zip(targets, real, strict=True)]
    row = tree_row(
        [sample[is_token] for sample, is_token in zip(ids, real, strict=True)], scored, device=input_ids.device
    )
    if row.tokens == row.tokens_apart:
        return f"no two samples of the batch share their first {SHORTEST_PREFIX} tokens"
    # A sample's first token is predicted by nothing.
    columns = [is_token.nonzero()[1:, 0][mask[1:]] for is_token, mask in zip(real, scored, strict=True)]
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
        path = index[paths[number] : paths[number + 1] - (end - start)]  # whole segments, the parent is the last one
        parents.append(max((numbers[place] for place in path if place in numbers), default=-1))
    lengths = [end - start for start, end in zip(paths, paths[1:], strict=False)]
    ends_of_samples = set(range(len(parents))) - set(parents)
    segments = SegmentTable(
        tuple(starts[:-1]), tuple(parents), starts[-1], sum(lengths[number] for number in ends_of_samples)
    )
    return {**kwargs, "attention_mask": no_mask(kwargs["input_ids"].device), ARGUMENT: segments}
