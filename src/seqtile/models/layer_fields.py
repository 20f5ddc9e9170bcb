"""Fields of a configuration that tell of its layers: experts, and what each layer has of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from seqtile.checkpointing.keep_attention import largest_of_layers
from seqtile.recognise.decoder_layers import decoder_layers


def experts_of(text: Any) -> int:
    """Experts of a layer of the language model with this configuration, or 0."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(experts) for name in names if (experts := largest_of_layers(text, name))), 0)


def first_layers(config: Any, layers: int) -> Any:
    """A copy of ``config`` with its first ``layers`` decoder layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, values in fields_by_layer(text):
        if name in vars(text):
            setattr(text, name, type(values)(values[:layers]))
    text.num_hidden_layers = layers
    return config


def fields_by_layer(text: Any) -> list[tuple[str, Any]]:
    """Per-layer fields and properties of a language model's configuration."""
    # Not the properties that every configuration has: reading some of them warns.
    classes = [base for base in type(text).__mro__ if not issubclass(PretrainedConfig, base)]
    properties = (name for base in classes for name, value in vars(base).items() if isinstance(value, property))
    names = {*vars(text), *properties}
    names -= set(getattr(text, "per_layer_attributes", None) or ())  # read from the configuration of each layer alone
    values = [(name, getattr(text, name, None)) for name in sorted(names - {"architectures"})]
    total = text.num_hidden_layers
    return [(name, value) for name, value in values if isinstance(value, list | tuple) and len(value) == total]


def layer_kinds(config: Any, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The modules and shapes of each decoder layer, and its kind: those and the type of its attention."""
    structures = list[Any]()
    for layer in decoder_layers(model):
        module = model.get_submodule(layer.name)
        classes = tuple((name, type(child).__name__) for name, child in module.named_modules())
        structures.append((classes, tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())))
    types = list(getattr(config.get_text_config(), "layer_types", None) or ())
    return structures, list(zip(structures, types, strict=True)) if len(types) == len(structures) else structures
