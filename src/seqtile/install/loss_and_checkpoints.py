"""The parts of :func:`seqtile.apply` besides the blocks: the loss and activation checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from seqtile._compat import CHECKPOINT_FUNCTION, attention_kind
from seqtile._effects import split_frozen
from seqtile._errors import UserError
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
from seqtile.lm_loss.tiled_loss import check_kernel, find_causal_lms, install_loss, remove_loss, standing_losses
from seqtile.ops.attention.backends import FLEX
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import decoder_layers, states_of


@dataclass(frozen=True)
class Rest:
    """The parts of :func:`seqtile.apply` besides the blocks."""

    options: TilingOptions

    def check(self, model: nn.Module) -> None:
        """Refuse what ``model`` cannot do, before anything is changed."""
        if self.options.loss is not None:
            for _, module in find_causal_lms(model)[0]:
                check_kernel(module.get_output_embeddings(), self.options.loss_impl)  # type: ignore[operator]
        check_checkpointing(model, self.options.checkpoint, self.options.offload_room)
        if self.options.weights_on_host:
            check_host_weights(model)

    @contextmanager
    def replacing(self, model: nn.Module) -> Iterator[None]:
        """Take loss and checkpoint policy off, and put them back if the ``with`` block raises UserError."""
        losses, policies = standing_losses(model), standing_checkpointing(model)
        _remove_loss_and_checkpoints(model)
        try:
            yield
        except UserError:
            _remove_loss_and_checkpoints(model)  # undo what was installed before the error
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
        done = []
        if options.checkpoint is not None or options.offload_room:
            done.append(install_checkpointing(model, options.checkpoint, options.offload_room))
        if options.checkpoint == "attention-saved":
            done[-1] += recomputed(states_of(model))
        if options.weights_on_host:  # those that wait there already stay: the device may not have room for all of them
            done.append(install_host_weights(model))
        else:
            remove_host_weights(model)
        return loss, "; ".join(done)


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
    _remove_loss_and_checkpoints(model)
    remove_host_weights(model)


def _remove_loss_and_checkpoints(model: nn.Module) -> None:
    remove_loss(model)
    remove_checkpointing(model)


def rest_notes(model: nn.Module) -> list[str]:
    """Notes for the user on loss, checkpoints and weights on the host, from the model as it is now."""
    standing = (*standing_losses(model), *standing_checkpointing(model), *standing_host_weights(model))
    return [note for each in standing for note in each.notes()]
