"""The parts of :func:`seqtile.apply` besides the blocks: the loss and activation checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from seqtile._compat import CHECKPOINT_FUNCTION, attention_kind
from seqtile._effects import split_frozen
from seqtile.checkpointing.keep_attention import kept_per_token
from seqtile.checkpointing.policies import (
    check_checkpointing,
    find_checkpointed,
    install_checkpointing,
    is_on,
    remove_checkpointing,
    standing_checkpointing,
)
from seqtile.checkpointing.reentrant import is_reentrant
from seqtile.host_weights import (
    check_host_weights,
    install_host_weights,
    remove_host_weights,
    standing_host_weights,
)
from seqtile.lm_loss.tiled_loss import check_loss, install_loss, remove_loss, standing_losses
from seqtile.ops.attention.backends import FLEX
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import decoder_layers, states_of


@dataclass(frozen=True)
class Rest:
    """The parts of :func:`seqtile.apply` besides the tiled forwards; each stays unless it is asked for.

    Attributes:
        options: what is asked for.
        others_stay: whether parts that are not asked for stay, or come off.
    """

    options: TilingOptions
    others_stay: bool = True

    def check(self, model: nn.Module) -> None:
        """Refuse what ``model`` cannot do, before anything is changed."""
        if self.options.loss is not None:
            check_loss(model, self.options.loss_impl)
        if self.options.checkpoint is not None or self.options.offload_room:
            check_checkpointing(model, *self._checkpoints(model))
        if self.options.weights_on_host:
            check_host_weights(model)

    def _checkpoints(self, model: nn.Module) -> tuple[str | None, bool | int]:
        """(what checkpoints save, whether or how many bytes of it go to the host), with what stands where not given."""
        policy, room = self.options.checkpoint, self.options.offload_room
        for standing in standing_checkpointing(model) if self.others_stay else ():
            policy = policy or standing.policy
            if standing.host is not None:
                room = room or standing.host.budget or True
        return policy, room

    def install(self, model: nn.Module) -> tuple[str, str]:
        """Change the model; return a description of the new loss and one of the new checkpoints.

        Only moving the weights can fail after :meth:`check`, and leaves them as they were.
        """
        options, loss, on_host = self.options, "", ""
        if options.weights_on_host:  # those that wait there already stay: the device may not have room for all of them
            on_host = install_host_weights(model)
        elif not self.others_stay:
            remove_host_weights(model)
        done = []
        policy, room = self._checkpoints(model)
        if options.checkpoint is not None or options.offload_room or not self.others_stay:
            remove_checkpointing(model)
        if options.checkpoint is not None or options.offload_room:
            done.append(install_checkpointing(model, policy, room))
            if policy == "attention-saved":
                done[-1] += recomputed(states_of(model))
        if options.loss is not None or not self.others_stay:
            remove_loss(model)
        if options.loss is not None:
            loss = install_loss(model, options.loss_rule, options.loss_impl)
        return loss, "; ".join([*done, *([on_host] if on_host else [])])


def recomputed(states: Mapping[str, Sequence[str]]) -> str:
    """Describe the layers with a state that "attention-saved" recomputes, or ""."""
    return "".join(
        f"; {len(layers)} layers with a state ({state}) save their input only and recompute their scan"
        for state, layers in states.items()
    )


def attention_runs_twice(model: nn.Module, tokens: int) -> str:
    """Describe the cost and benefit of ``checkpoint="attention-saved"``; "" where it does not apply.

    It is not chosen here: whether it fits depends on the whole step, which a plan counts.

    Args:
        model: as it is now.
        tokens: of the longest batch that ran, 0 before the first.
    """
    if standing_checkpointing(model) or any(is_reentrant(module) for module in model.modules()):
        return ""
    for _, module in split_frozen(find_checkpointed(model))[0]:
        functions = [inner.__dict__.get(CHECKPOINT_FUNCTION) for inner in module.modules()]
        selective = any("context_fn" in getattr(function, "keywords", {}) for function in functions)
        if selective or not is_on(module) or attention_kind(module) in (None, "eager", FLEX):
            continue
        mixers = [layer.mixers for layer in decoder_layers(module)]
        layers = sum(not all(mixer.has_state for mixer in layer) for layer in mixers if layer)
        if not layers:
            continue
        text_config = module.config.get_text_config()  # type: ignore[union-attr, operator]
        kept = layers * kept_per_token(text_config, 2)
        of_batch = f", {kept * tokens / 2**30:,.2f} GiB for the {tokens:,} tokens that ran" if tokens else ""
        return (
            "activation checkpoints recompute attention; checkpoint='attention-saved' saves its output instead, "
            f"for {kept // layers:,} bytes per token (bf16) in each of {layers} layers{of_batch}"
        )
    return ""


def remove_rest(model: nn.Module) -> None:
    """Take the tiled loss and the checkpoint policy off, and put weights back on the device."""
    remove_loss(model)
    remove_checkpointing(model)
    remove_host_weights(model)


def rest_notes(model: nn.Module) -> list[str]:
    """Notes for the user on loss, checkpoints and weights on the host, from the model as it is now."""
    standing = (*standing_losses(model), *standing_checkpointing(model), *standing_host_weights(model))
    return [note for each in standing for note in each.notes()]
