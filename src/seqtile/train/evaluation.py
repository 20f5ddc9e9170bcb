"""Evaluation loss, equal on one and on several processes.

Transformers repeats each batch's loss once per row and averages over ranks and batches. Data loaders give every rank as
many batches, of as many rows, and fill up the last ones with rows from the beginning; of a batch that is partly filled
up, and of a row that ranks share, that average is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from seqtile._compat import attention_kind, ulysses_around
from seqtile._errors import RunError
from seqtile.ops.lm_loss.kept_tokens import IGNORED


class Evaluated:
    """The losses of one evaluation, as its batches come.

    Of packed rows those that fill up a last batch of several rows do count in that batch's mean.

    Args:
        loader: gives this rank's batches, or its parts of batches.
        accelerator: accelerate's, of the trainer.

    Attributes:
        rows: the data set.
    """

    def __init__(self, loader: Any, accelerator: Any) -> None:
        split = accelerator.parallelism_config
        self._ring, self._ulysses = getattr(split, "cp_size", 1), getattr(split, "sp_size", 1)
        self._loader, self._accelerator = getattr(loader, "rows", loader), accelerator
        self.rows = self._loader.dataset
        self._batches = self._count = 0
        self._sums = torch.zeros(2, dtype=torch.float64)  # of loss * rows, and of rows

    @contextmanager
    def split(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """This rank's part of a batch [rows, tokens], without the labels of padding rows."""
        self._count = self._rows_that_count()
        for name in {"labels", "shift_labels"} & batch.keys():
            batch[name][self._count :] = IGNORED
        context: Any = nullcontext()
        if self._ulysses > 1:
            batch["labels"] = batch["shift_labels"]
        elif self._ring > 1:
            labels = batch["labels"]
            batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
            batch["position_ids"] = torch.arange(labels.shape[1], device=labels.device)[None]
            buffers = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() == 2]
            context = self._accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
            )
        with context:
            yield batch

    def add(self, loss: torch.Tensor, shard: dict[str, Any]) -> None:
        """Count the mean loss of what this rank ran.

        Cost: three numbers per rank are gathered.
        """
        size = self._ring * self._ulysses
        tokens = (shard["shift_labels"] != IGNORED).sum() if size > 1 else torch.ones_like(loss)
        own_sums = torch.stack([loss * tokens, tokens, torch.full_like(loss, self._count)]).float()
        every = self._accelerator.gather(own_sums[None]).cpu().double().view(-1, size, 3)
        batches, rows = every[..., :2].sum(dim=1), every[:, 0, 2]  # ranks that share rows follow each other
        self._sums += torch.stack([(batches[:, 0] / batches[:, 1].clamp(min=1) * rows).sum(), rows.sum()])
        self._batches += 1

    def mean(self) -> float:
        """The mean over rows of a token's mean loss in their batch; the same on every rank."""
        return float(self._sums[0] / self._sums[1])

    def _rows_that_count(self) -> int:
        """How many rows of the next batch are not from the beginning again."""
        number, offset = divmod(self._batches, self._ulysses)
        # Under Ulysses a group runs its first rank's batch, then its second's, and so on.
        process = int(self._accelerator.process_index) // self._ring
        process += offset - process % self._ulysses
        together = int(self._loader.total_batch_size)
        size = together // (int(self._accelerator.num_processes) // self._ring)
        return min(max(len(self.rows) - number * together - process * size, 0), size)


def exchange_in_evaluations(model: Any) -> None:
    """Have Ulysses exchange heads and tokens in evaluations too, whose rows are split as those of a step.

    accelerate switches it off there, where the Trainer runs whole rows:
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py

    Raises:
        RunError: DeepSpeed's attention is not where it was.
    """
    ulysses = ulysses_around(attention_kind(model))
    if ulysses is None:
        raise RunError("could not find DeepSpeed's Ulysses around the model's attention; drop eval_dataset")
    ulysses.disable_in_eval = False
