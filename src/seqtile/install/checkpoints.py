"""Activation checkpoints as a technique of :func:`seqtile.apply`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from seqtile._technique import Technique, TechniqueResult
from seqtile.checkpointing.policies import (
    Checkpointing,
    check_checkpointing,
    install_checkpointing,
    installed_checkpointing,
)
from seqtile.options import TilingOptions, layer_policies, offload_of
from seqtile.recognise.decoder_layers import decoder_layers


class CheckpointTechnique(Technique):
    """``checkpoint`` and ``offload`` of checkpoints; what one call leaves out stays as an earlier call gave it."""

    name = "checkpoint"

    def check(self) -> None:
        check_checkpointing(self.model, self.options.checkpoint, self.options.offload_room)

    def install(self, inside: Collection[str]) -> TechniqueResult:
        self.remove(self.model)
        done = install_checkpointing(self.model, self.options.checkpoint, self.options.offload_room)
        if self.options.saves_attention:
            layers = decoder_layers(self.model)
            policies = layer_policies(self.options.checkpoint, len(layers))
            states: dict[str, list[str]] = {}
            for layer, policy in zip(layers, policies, strict=True):
                for state in layer.states if policy == "attention-saved" else ():
                    states.setdefault(state, []).append(layer.name)
            done += recomputed(states)
        return TechniqueResult(done)

    @classmethod
    def installed(cls, model: nn.Module) -> list[Checkpointing]:
        return installed_checkpointing(model)

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        for checkpointing in installed_checkpointing(model):
            checkpoint, room = options.checkpoint or checkpointing.policy, options.checkpoints_on_host
            if checkpointing.host is not None and not room:
                room = f"{checkpointing.host.budget}B" if checkpointing.host.budget else True
            offload = offload_of(room, options.weights_on_host)
            options = replace(options, checkpoint=checkpoint, offload=offload)
        return options

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        return [note for policy in installed_checkpointing(model) for note in policy.notes()]


def recomputed(states: Mapping[str, Sequence[str]]) -> str:
    """Describe the layers with a state that "attention-saved" recomputes, or ""."""
    return "".join(
        f"; {len(layers)} layers with a state ({state}) save their input only and recompute their scan"
        for state, layers in states.items()
    )
