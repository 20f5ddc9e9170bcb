"""What :func:`seqtile.apply` does besides the blocks: the loss, and what activation checkpoints keep and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from seqtile._errors import UserError
from seqtile.activation_checkpointing.policies import (
    POLICIES,
    check_checkpointing,
    install_checkpointing,
    remove_checkpointing,
    standing_checkpointing,
)
from seqtile.models.lm_loss.tiled_loss import check_kernel, find_causal_lm, install_loss, remove_loss, standing_losses
from seqtile.ops.lm_loss.loss_kernels import IMPLEMENTATIONS
from seqtile.tiling import TileRule, parse_bytes, parse_tile


@dataclass(frozen=True)
class Rest:
    """Checked arguments of :func:`seqtile.apply`.

    Attributes:
        loss: tile rule of the head, or None.
        impl: what computes it, as :func:`seqtile.linear_cross_entropy` takes it.
        policy: what a layer's checkpoint keeps, or None to leave checkpoints as they are.
        offload: whether layer inputs wait on the host; a number is the bytes allowed there.
    """

    loss: TileRule | None
    impl: str
    policy: str | None
    offload: bool | int

    @classmethod
    def parse(
        cls, loss: str | None, loss_tile: int | str, impl: str, checkpoint: str | None, offload: bool | str
    ) -> Rest:
        """Raises UserError for unknown words and settings that would be ignored."""
        if loss not in (None, "tiled"):
            raise UserError(f"loss={loss!r}: expected 'tiled', or None to leave it as it is")
        if loss is None and loss_tile != "auto":
            raise UserError(f"loss_tile={loss_tile!r} changes nothing without loss='tiled'; give both or neither")
        if impl not in IMPLEMENTATIONS:
            raise UserError(f"loss_impl={impl!r}: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}")
        if loss is None and impl != "torch":
            raise UserError(f"loss_impl={impl!r} changes nothing without loss='tiled'; give both or neither")
        if checkpoint is not None and checkpoint not in POLICIES:
            raise UserError(f"checkpoint={checkpoint!r}: expected one of {', '.join(map(repr, POLICIES))}, or None")
        room: bool | int = offload if isinstance(offload, bool) else 0
        if isinstance(offload, str):
            word, _, value = offload.partition(":")
            room = parse_bytes(value) if word == "memory" else 0
        if not isinstance(offload, bool) and not room:
            raise UserError(f"offload={offload!r}: expected True, False or a bound such as 'memory:64GiB'")
        try:
            return cls(parse_tile(loss_tile) if loss else None, impl, checkpoint, room)
        except (TypeError, ValueError) as error:
            raise UserError(str(error).replace("tile=", "loss_tile=", 1)) from None

    def __bool__(self) -> bool:
        return self.loss is not None or self.policy is not None or bool(self.offload)

    def check(self, model: nn.Module) -> None:
        """Refuse what ``model`` cannot do, before anything is changed."""
        if self.loss is not None:
            check_kernel(find_causal_lm(model)[1].get_output_embeddings(), self.impl)  # type: ignore[operator]
        check_checkpointing(model, self.policy, self.offload)

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
        """Change the model; what was done to the loss and to the checkpoints, in words."""
        loss = install_loss(model, self.loss, self.impl) if self.loss is not None else ""
        if self.policy is None and not self.offload:
            return loss, ""
        return loss, install_checkpointing(model, self.policy, self.offload).describe()


def remove_rest(model: nn.Module) -> None:
    """Take the tiled loss and the checkpoint policy off."""
    remove_loss(model)
    remove_checkpointing(model)


def rest_notes(model: nn.Module) -> list[str]:
    """What the user should know of them, from what the model is now."""
    notes = [
        f"{one.covered_by} was put over the tiled loss and computes the loss in its place; call seqtile.apply again "
        "after the trainer is built to have the tiled one"
        for one in standing_losses(model)
        if one.covered_by
    ]
    notes += [
        f"TRL asks for one score per token, which loss_impl={one.impl!r} does not compute: plain PyTorch does"
        for one in standing_losses(model)
        if one.trl is not None and one.impl != "torch"
    ]
    return notes + [note for one in standing_checkpointing(model) for note in one.notes()]
