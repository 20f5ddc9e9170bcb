"""Find a model's decoder layers and their mixers: attention or a state.

Layers are found by structure, not by name: they are the entries of an outermost list of modules, at least one of which
holds attention or a layer with a state. The class names of transformers give the kind of state; a layer that only
looks like one (a convolution over the sequence, a decay parameter) counts as a state of unknown kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from seqtile._compat import parameters_of

ATTENTION_MIXER = "attention"
UNKNOWN_STATE = "a state of unknown kind"

STATES: dict[str, str] = {
    "Gated DeltaNet": r"GatedDeltaNet$",
    "KDA": r"DeltaAttention$",
    "Mamba-2": r"Mamba2Mixer$|^(Bamba|FalconH1|GraniteMoeHybrid)Mixer$|MambaLayer$|^Zamba2MambaMixer$",
    "Mamba": r"MambaMixer$",
    "short convolution": r"ShortConv(olution)?$",
    "lightning attention": r"LightningAttention$",
    "RG-LRU": r"RecurrentBlock$",
    "RWKV": r"^Rwkv\w*Attention$",
    "mLSTM": r"^(x|m)LSTMLayer$",
}
"""Kinds of layers with a state, by the names of transformers' classes."""

_STATE_PARAMETERS = frozenset(("A_log", "dt_bias", "time_decay", "recurrent_param"))
_ATTENTION_WORD = re.compile(r"attn|attention", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"(^|[._])(attn|attention)$", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"Attention|Attn")
_LAYER_CLASS = re.compile(r"(Layer|Block)$")
NOT_LANGUAGE = re.compile(r"(^|\.)(visual|vision|image|audio|speech|vq)[^.]*(\.|$)")
"""Names of the parts of a model that process pictures or sound."""

_PREDICTION_NAME = re.compile(r"(^|_)(mtp|nextn|multi_token_pred)", re.IGNORECASE)
_PREDICTION_CLASS = re.compile(r"(MTP|Mtp|NextN|MultiTokenPrediction)(Layer|Block|Head|Module|Predictor|Model)?$")


@dataclass(frozen=True)
class Mixer:
    """A mixer: how a token reads the tokens before it.

    Attributes:
        name: name inside its decoder layer.
        kind: ``"attention"``, a key of :data:`STATES`, or a state of unknown kind.
    """

    name: str
    kind: str

    @property
    def has_state(self) -> bool:
        """Whether it carries a state along the sequence."""
        return self.kind != ATTENTION_MIXER


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer.

    Attributes:
        name: qualified name.
        class_name: its class.
        mixers: attention and states in it; empty for a layer with an MLP alone.
    """

    name: str
    class_name: str
    mixers: tuple[Mixer, ...]

    @property
    def kind(self) -> str:
        """``"attention"``, ``"Mamba-2"``, ``"attention and Mamba-2"``, or ``"MLP"``."""
        return " and ".join(sorted({mixer.kind for mixer in self.mixers}, key=str.lower)) or "MLP"

    @property
    def states(self) -> tuple[str, ...]:
        """Kinds of the states in it."""
        return tuple(dict.fromkeys(mixer.kind for mixer in self.mixers if mixer.has_state))


def decoder_layers(model: nn.Module) -> list[DecoderLayer]:
    """The decoder layers of ``model`` in module order, without those of vision and audio towers and prediction heads.

    Args:
        model: a language model, PEFT's wrapper or not; its weights may be on the meta device.

    Cost:
        One walk over the modules.
    """
    layers = list(_in_lists("", model))
    if not any(layer.mixers for layer in layers):  # layers that are in no list
        parents = dict.fromkeys(name.rpartition(".")[0] for name, _ in _mixers("", model))
        layers = [_layer(name, model.get_submodule(name)) for name in parents if not NOT_LANGUAGE.search(name)]
    return layers


def is_prediction_head(name: str, module: nn.Module) -> bool:
    """Whether a part of a model predicts tokens beyond the next one (multi-token prediction, MTP), by name or class."""
    by_name = _PREDICTION_NAME.search(name.rpartition(".")[2])
    return bool(name and (by_name or _PREDICTION_CLASS.search(type(module).__name__)))


def states_of(model: nn.Module) -> dict[str, list[str]]:
    """The decoder layers with a state: their names, by kind of state."""
    names_by_state: dict[str, list[str]] = {}
    for layer in decoder_layers(model):
        for state in layer.states:
            names_by_state.setdefault(state, []).append(layer.name)
    return names_by_state


def looks_like_attention(name: str, module: nn.Module) -> bool:
    """Whether the last part of a module's name, or its class's name, contains "attn" or "attention".

    This is wider than :func:`kind_of` on purpose. A false match here leaves a module untiled, since it is examined as
    attention and not as an MLP. A false match of :func:`kind_of`, such as a decoder layer called ``AttentionBlock``,
    would hide the states inside the module, which is not searched any further.
    """
    return bool(_ATTENTION_WORD.search(f"{name.rpartition('.')[2]} {type(module).__name__}"))


def kind_of(name: str, module: nn.Module) -> str:
    """The kind of mixer that a module is, or ""."""
    if isinstance(module, torch.jit.ScriptModule):  # it keeps its parameters in no dictionary
        return ""
    if state := named_state(module):
        return state
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    over_sequence = any(conv.kernel_size[0] > 1 and conv.groups == conv.in_channels for conv in convolutions)
    if over_sequence or not _STATE_PARAMETERS.isdisjoint(parameters_of(module)):
        return UNKNOWN_STATE
    if isinstance(module, nn.ModuleList) or not any(_is_linear_layer(submodule) for submodule in module.modules()):
        return ""
    class_name = _plain_class(module)
    called_so = _ATTENTION_NAME.search(name) or _ATTENTION_CLASS.search(class_name)
    return ATTENTION_MIXER if called_so and not _LAYER_CLASS.search(class_name) else ""


def named_state(module: nn.Module) -> str:
    """The kind of state (a key of :data:`STATES`) by the name of the module's class, or ""."""
    return _named_state(_plain_class(module))


@cache
def _named_state(class_name: str) -> str:
    return next((kind for kind, pattern in STATES.items() if re.search(pattern, class_name)), "")


def _in_lists(prefix: str, module: nn.Module) -> Iterator[DecoderLayer]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}".lstrip(".")
        if NOT_LANGUAGE.search(full) or is_prediction_head(full, child):
            continue
        if isinstance(child, nn.ModuleList):
            entries = {f"{full}.{number}": entry for number, entry in child.named_children()}
            layers = [_layer(name, entry) for name, entry in entries.items() if not is_prediction_head(name, entry)]
            if any(layer.mixers for layer in layers):
                yield from layers
                continue
        yield from _in_lists(full, child)


def _layer(name: str, module: nn.Module) -> DecoderLayer:
    return DecoderLayer(name, type(module).__name__, tuple(Mixer(*mixer) for mixer in _mixers("", module)))


def _mixers(prefix: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, kind) of the outermost mixers inside ``module``."""
    for name, child in module.named_children():
        full = f"{prefix}.{name}".lstrip(".")
        own_name = prefix.rpartition(".")[2] if isinstance(module, nn.ModuleList) else name
        if kind := kind_of(own_name, child):
            yield full, kind
        else:
            yield from _mixers(full, child)


def _is_linear_layer(module: nn.Module) -> bool:
    """A linear layer of any class: transformers' Conv1D, packed and adapted ones too."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    weight = parameters_of(module).get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _plain_class(module: nn.Module) -> str:
    """The name of a module's class without the prefix of the subclass that FSDP2 makes."""
    name = type(module).__name__
    return name.removeprefix("FSDP")
