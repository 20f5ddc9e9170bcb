"""What :func:`seqtile.apply` does besides the blocks: the loss, and what activation checkpoints keep and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from seqtile._errors import UserError
from seqtile.checkpointing.policies import (
    check_checkpointing,
    install_checkpointing,
    remove_checkpointing,
    standing_checkpointing,
)
from seqtile.lm_loss.tiled_loss import check_kernel, find_causal_lms, install_loss, remove_loss, standing_losses
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import states_of


@dataclass(frozen=True)
class Rest:
    """What :func:`seqtile.apply` does besides the blocks."""

    options: TilingOptions

    def check(self, model: nn.Module) -> None:
        """Refuse what ``model`` cannot do, before anything is changed."""
        if self.options.loss is not None:
            for _, module in find_causal_lms(model)[0]:
                check_kernel(module.get_output_embeddings(), self.options.loss_impl)  # type: ignore[operator]
        check_checkpointing(model, self.options.checkpoint, self._room)

    @property
    def _room(self) -> bool | int:
        return self.options.offload_room or False

    @contextmanager
    def replacing(self, model: nn.Module) -> Iterator[None]:
        """Take loss and checkpoint policy off, and put them back if the ``with`` block raises UserError."""
        losses, policies = standing_losses(model), standing_checkpointing(model)
        remove_rest(model)
        try:
            yield
        except UserError:
            remove_rest(model)  # what was installed before something was refused
            for loss in losses:
                loss.install()
            for policy in policies:
                policy.install()
            raise

    def install(self, model: nn.Module) -> tuple[str, str]:
        """Change the model; return a description of the new loss and one of the new checkpoints."""
        options, loss = self.options, ""
        if options.loss is not None:
            loss = install_loss(model, options.loss_rule, options.loss_impl)
        if options.checkpoint is None and not options.offload:
            return loss, ""
        done = install_checkpointing(model, options.checkpoint, self._room)
        return loss, f"{done}{recomputed(states_of(model))}" if options.checkpoint == "attention-saved" else done


def recomputed(states: Mapping[str, Sequence[str]]) -> str:
    """What "attention-saved" recomputes besides MLPs, norms and projections, by kind of state, or ""."""
    return "".join(
        f"; {len(layers)} layers with a state ({state}) keep their input alone, and their scan runs again"
        for state, layers in states.items()
    )


def remove_rest(model: nn.Module) -> None:
    """Take the tiled loss and the checkpoint policy off."""
    remove_loss(model)
    remove_checkpointing(model)


def rest_notes(model: nn.Module) -> list[str]:
    """Notes for the user on loss and checkpoints, from the model as it is now."""
    return [note for standing in (*standing_losses(model), *standing_checkpointing(model)) for note in standing.notes()]
