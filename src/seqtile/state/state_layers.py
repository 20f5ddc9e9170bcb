"""Find a model's layers with a state, and run verified ones over tiles of the sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from seqtile._errors import UserError
from seqtile._technique import Left, TechniqueResult
from seqtile.blocks.instance import ForwardsTechnique, idle_sentences, logger
from seqtile.blocks.layer import TiledLayer
from seqtile.engines.zero3 import mark_leaf
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import DecoderLayer, Mixer, decoder_layers
from seqtile.recognise.proof import for_training
from seqtile.state.state_cache import cache_argument
from seqtile.state.state_proof import StateProofs, has_values, is_here
from seqtile.state.tiled_state import StateForward, StateSetting
from seqtile.tiling import STATE_TOKENS


@dataclass(frozen=True)
class Carrier:
    """A layer with a state.

    Attributes:
        layer: qualified name of its decoder layer.
        mixer: qualified name of the mixer that carries the state.
        whole: qualified name of the outermost module around the mixer with neither attention nor another state in it.
        kind: kind of the state.
    """

    layer: str
    mixer: str
    whole: str
    kind: str


def find_carriers(model: nn.Module) -> Iterator[Carrier]:
    """The layers with a state of ``model``, in order."""
    for layer in decoder_layers(model):
        for mixer in layer.mixers:
            if mixer.has_state:
                yield Carrier(layer.name, _joined(layer.name, mixer.name), _around(layer, mixer), mixer.kind)


def _around(layer: DecoderLayer, mixer: Mixer) -> str:
    other_names = [sibling.name for sibling in layer.mixers if sibling is not mixer]
    parts = mixer.name.split(".")
    for depth in range(len(parts)):
        inner = ".".join(parts[:depth])
        if not any(f"{name}.".startswith(f"{inner}." if inner else "") for name in other_names):
            return _joined(layer.name, inner)
    return _joined(layer.name, mixer.name)


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


class StateTechnique(ForwardsTechnique):
    """``state``: verified layers with a state run over tiles of the sequence."""

    name = "state"

    def check(self) -> None:
        """Refuse ``state=N`` for a model without layers that carry a state.

        Raises:
            UserError: no layer carries a state.
        """
        if self.options.state != "auto" and not any(find_carriers(self.model)):
            raise UserError(
                "state.no-layers",
                f"state={self.options.state}: {type(self.model).__name__} has no layer that carries a state along the "
                "sequence; drop state",
            )

    def install(self, inside: Collection[str]) -> TechniqueResult:
        return _install_state(self.model, self.options.state or "auto")

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        return replace(options, state=options.state or cls.installed(model)[0].state.tile)

    @classmethod
    def without_effect(cls, forwards: Sequence[StateForward]) -> list[str]:
        forwards = [forward for forward in forwards if forward.state.runs]
        tile = forwards[0].state.tile if forwards else "auto"
        return idle_sentences(f"state={tile}", forwards, decides=tile == "auto") if forwards else []


def _install_state(model: nn.Module, tile: int | str) -> TechniqueResult:
    proofs, left, done = StateProofs(), list[Left](), Counter[tuple[str, str]]()
    carriers = [*find_carriers(model)]
    unproven = False
    with for_training(model):
        for carrier in carriers:
            whole, why, ready = _choose(model, carrier, proofs)
            if why:
                name = carrier.whole if whole else carrier.mixer
                why = f"only its mixer runs in tiles: {why}" if whole else why
                left.append(Left(name, type(model.get_submodule(name)).__name__, why))
            if not whole:
                continue
            unproven |= not ready
            for name in dict.fromkeys((carrier.mixer, whole)):
                _install_forward(model, name, StateSetting(tile, name, carrier.layer), proofs)
            if whole != carrier.layer and "forward" not in model.get_submodule(carrier.layer).__dict__:
                _install_forward(
                    model, carrier.layer, StateSetting(tile, carrier.layer, carrier.layer, runs=False), proofs
                )
            mark_leaf(model.get_submodule(carrier.layer))  # the layer's replacement removes the mark again
            done[carrier.kind, "whole layers" if whole != carrier.mixer else "the mixers alone"] += 1
    sentence = _sentence(done, len(carriers), tile, unproven)
    if carriers and not done:
        sentence += f": {'; '.join(dict.fromkeys(carrier.why for carrier in left))}"
        logger.warning("%s", sentence)
    return TechniqueResult(sentence, left)


def _choose(model: nn.Module, carrier: Carrier, proofs: StateProofs) -> tuple[str, str, bool]:
    """Return (name of the module that runs in tiles or "", why not the whole layer, whether it is proven already)."""
    why, ready, why_not_whole = "", True, ""
    for name in dict.fromkeys((carrier.whole, carrier.mixer)):
        module = model.get_submodule(name)
        forward = module.__dict__.get("forward")
        if forward is not None and not isinstance(forward, TiledLayer):
            why = f"the forward of {name} was replaced"
        elif cache_argument(module) is None:
            why = f"{type(module).__name__} accepts no cache, so tiles cannot pass its state on"
        else:
            ready = is_here(module)
            tried = (
                module if has_values(module) else model.get_submodule(carrier.mixer)
            )  # experts cannot be routed by shapes alone
            why = proofs.why_not(tried, hidden_states_for(model, tried)) if ready else ""
            if not why:
                return name, why_not_whole, ready and tried is module
        why_not_whole = why
    return "", why, ready


def hidden_states_for(model: nn.Module, module: nn.Module) -> torch.Tensor:
    """An empty tensor of the width of the model's hidden states, with the dtype and device of ``module``."""
    config: Any = next(submodule.config for submodule in model.modules() if hasattr(submodule, "config"))
    weight = next(w for w in module.parameters() if w.is_floating_point() and w.element_size() >= 2)
    return torch.empty(0, config.get_text_config().hidden_size, dtype=weight.dtype, device=weight.device)


def _install_forward(model: nn.Module, name: str, setting: StateSetting, proofs: StateProofs) -> None:
    forward = StateForward(model.get_submodule(name), setting, proofs)
    forward.install()
    forward.check()


def _sentence(done: Counter[tuple[str, str]], total: int, tile: int | str, unproven: bool) -> str:
    if not total:
        return "no layer carries a state"
    size = f"about {STATE_TOKENS:,}" if tile == "auto" else f"{tile:,}"
    what = ", ".join(f"{count} of {state}, {how}" for (state, how), count in done.items()) or "none"
    proven = ", verified at their first call" if unproven else ""
    return f"layers with a state in tiles of {size} tokens: {sum(done.values())} of {total} ({what}){proven}"


def can_carry(model: nn.Module) -> bool:
    """Whether ``state`` could run some layer of ``model`` in tiles."""
    proofs = StateProofs()
    with for_training(model):
        return any(_choose(model, carrier, proofs)[0] for carrier in find_carriers(model))
