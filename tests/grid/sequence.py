"""Sequence parallelism: both ranks train on one batch, each on its part of every row, through Transformers' trainer.

The trainer shares the tokens out and weights the ranks' losses; what it gives must equal one process with whole rows.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grid.cases import GENERIC, LOSS, RATE, RECOMPUTED, SDPA, WORLD, Case, Trained, tile
from grid.training import Parallel
from zoo import VOCABULARY, tokens

LENGTH = 24
"""Tokens per row with its padding: divides by what every kind of sharing needs, 2 * WORLD."""


@dataclass(frozen=True)
class Rows(Case):
    """Batches of two rows padded to :data:`LENGTH`; both ranks work on the same one.

    Attributes:
        filled: tokens of the two rows before their padding, for each batch in turn.
        learnable: tokens follow a rule, so that fifty steps learn it and a wrong gradient shows in the losses.
    """

    dtype: torch.dtype | None = torch.float32
    filled: tuple[tuple[int, int], ...] = ((24, 9), (17, 21))
    learnable: bool = False

    def rows(self, number: int) -> list[dict[str, Tensor]]:
        ids, rows = tokens(2, LENGTH, seed=number), []
        if self.learnable:
            ids = 3 + (ids[:, :1] + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3)
        for row, filled in zip(ids, self.filled[number % len(self.filled)], strict=True):
            labels = row.masked_fill(torch.arange(LENGTH) >= filled, -100)
            rows.append({"input_ids": row, "labels": labels, "position_ids": torch.arange(LENGTH)})
        return rows

    def loss(self, model: Any, rank: int, number: int) -> Tensor:
        """Of the whole batch, whatever the rank: the mean over ranks is the loss of one process."""
        rows = self.rows(number)
        return model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss

    def loss_in_another_order(self, model: Any, rank: int, number: int) -> Tensor:
        """The same loss, its sums in another order: one row after the other."""
        rows = self.rows(number)
        count = sum((row["labels"][1:] >= 0).sum() for row in rows)
        apart = [{name: value[None] for name, value in row.items()} for row in rows]
        return torch.stack([model(**row, num_items_in_batch=count).loss for row in apart]).sum()


PADDED = ((24, 9), (6, 5))
"""Tokens of the rows: of the second batch, the second rank holds nothing but padding."""


def usual_rows(options: dict[str, Any]) -> list[Case]:
    """The cases that every way of sharing rows runs, with the engine's own ``options``."""
    return [
        Rows("plain", "plain", config=SDPA, options=options, steps=2),
        Rows(
            "checkpoint-generic", "activation checkpointing + accumulation, clipping", config=SDPA, options=options,
            **RECOMPUTED, **GENERIC, steps=2, micro_steps=2, clip=0.1,
            filled=((24, 9), (9, 24)),  # the trainer weights tokens, the reference batches: the same if as many
        ),
        Rows("tiled-loss", LOSS, config=SDPA, options=options, steps=2, tiled_loss=True, filled=PADDED),
        Rows("padding", "a rank with nothing but padding", config=SDPA, options=options, steps=2, filled=PADDED),
    ]  # fmt: skip


class Shared(Parallel):
    """The trainer's loop; what a case asks of it is in the trainer's arguments."""

    @classmethod
    def arguments(cls, case: Case) -> dict[str, Any]:
        """What the trainer is told, beyond what it is told for every case."""
        raise NotImplementedError

    @classmethod
    def check(cls, trainer: Any) -> None:
        """Assert the distributed type, the sizes and the placement of the shards, before the first step."""
        raise NotImplementedError

    @classmethod
    def watching(cls, trainer: Any, seen: Trained) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro step: adds whole gradients to ``seen``, before they are clipped."""
        raise NotImplementedError

    @classmethod
    def whole_weights(cls, trainer: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    @classmethod
    def done(cls) -> None:
        """Undo what outlives the trainer."""

    @classmethod
    def train(cls, case: Case, rank: int, tiled: bool = True) -> Trained:
        from accelerate.state import AcceleratorState
        from transformers import Trainer, TrainingArguments

        assert isinstance(case, Rows)
        seen = Trained([], {})

        class Watched(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                if not seen.gradients:
                    cls.check(self)
                with cls.watching(self, seen):
                    return super().training_step(*args, **kwargs)

        model = case.model()
        if tiled:
            tile(case, model, rank)
        batches = case.steps * case.micro_steps
        data = [row for number in range(batches + batches % WORLD) for row in case.rows(number)]
        try:
            with tempfile.TemporaryDirectory() as folder:
                arguments = TrainingArguments(
                    folder, per_device_train_batch_size=2, max_steps=case.steps, learning_rate=RATE, optim="sgd",
                    gradient_accumulation_steps=case.micro_steps, max_grad_norm=case.clip, use_cpu=True,
                    lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=1,
                    report_to="none", save_strategy="no", disable_tqdm=True, **cls.arguments(case),
                )  # fmt: skip
                trainer = Watched(model, arguments, train_dataset=data)
                trainer.train()
            seen.weights = cls.whole_weights(trainer)
            seen.losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            assert len(seen.losses) == len(seen.gradients) == case.steps
            return seen
        finally:
            cls.done()
            AcceleratorState._reset_state(True)
