"""How a model's decoder layers repeat, and the same model with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from seqtile._errors import UserError
from seqtile.models.discover.decoder_layers import decoder_layers


@dataclass(frozen=True)
class Depths:
    """Two depths that a step is run at, and what repeats between them.

    Attributes:
        layers: decoder layers of the whole model.
        front: layers at the front that are told apart.
        back: layers at the back that are told apart, which is the length of the pattern.
        shallow: the two depths; both ``layers`` where the model is too shallow to leave layers out.
    """

    layers: int
    front: int
    back: int
    shallow: tuple[int, int]

    def place(self, number: int, layers: int) -> int | None:
        """Where layer ``number`` of ``layers`` stands: 2 from the front, -1 from the back, None in between."""
        if number >= layers - self.back:
            return number - layers
        return number if number < self.front else None


def find_depths(config: Any, model: nn.Module) -> Depths:
    """The shallowest two models that have the same layers at their ends as ``model``.

    Layers repeat with a pattern (sliding and full attention in turn) after a beginning of their own (dense layers
    before a mixture of experts); both are read from the layers' classes, shapes and attention types.

    Raises:
        UserError: no decoder layers are found.
    """
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            f"no list of decoder layers (with attention or a state) in {type(model).__name__}; plan a causal language "
            "model"
        )
    types = list(getattr(config.get_text_config(), "layer_types", None) or ())
    signs = [_signature(model.get_submodule(layer.name)) for layer in layers]
    if len(types) == len(signs):
        signs = [(sign, kind) for sign, kind in zip(signs, types, strict=True)]
    total = len(signs)
    prefix, period = _pattern(signs)
    least = prefix + 2 * period
    least += (total - least) % period
    if least + period >= total:
        return Depths(total, total, 0, (total, total))
    return Depths(total, prefix + period, period, (least, least + period))


@dataclass(frozen=True)
class Counts:
    """Sizes of a model, in elements.

    Attributes:
        weights: all parameters, tied ones once.
        trained: those that train.
        matrices: weights of linear layers and experts inside decoder layers, which 4-bit loading packs.
        active: weights that one token is multiplied by, head included: an expert counts by its share of the tokens.
        layer: the largest decoder layer.
        largest: the largest matrix of a decoder layer.
        largest_product: weights of the last product of a decoder layer, the down projection of a dense MLP.
        root: everything outside the decoder layers.
        layers, hidden, heads, key_heads, head_width, vocabulary: of the model.
        attentions: decoder layers with attention; the others carry a state, or are an MLP alone.
    """

    weights: int
    trained: int
    matrices: int
    active: int
    layer: int
    largest: int
    largest_product: int
    root: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    attentions: int


def count_layers(depths: Depths, low: Counts, high: Counts) -> Counts:
    """Sizes of the whole model from those at its two shallow depths: every further layer adds the same."""
    first, second = depths.shallow
    if first == second:
        return low
    repeats = (depths.layers - first) // (second - first)
    return replace(low, layers=depths.layers, **{
        name: getattr(low, name) + repeats * (getattr(high, name) - getattr(low, name))
        for name in ("weights", "trained", "matrices", "active", "attentions")
    })  # fmt: skip


def count_weights(config: Any, model: nn.Module) -> Counts:
    """Count the parameters of ``model``, which may be on the meta device."""
    text = config.get_text_config()
    found = decoder_layers(model)
    layers = [model.get_submodule(layer.name) for layer in found]
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.dim() >= 2]
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    experts = experts or getattr(text, "n_routed_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts
    active = sum(int(weight.numel() * (share if weight.dim() == 3 else 1)) for weight in matrices)
    heads = int(text.num_attention_heads)
    hidden = int(text.hidden_size)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return Counts(
        weights=sum(weight.numel() for weight in model.parameters()),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        matrices=sum(weight.numel() for weight in matrices),
        active=active + (head.weight.numel() if head is not None else 0),
        layer=max(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
        largest_product=hidden * int(getattr(text, "intermediate_size", None) or 4 * hidden),
        largest=max((weight.numel() for weight in matrices), default=0),
        root=sum(weight.numel() for weight in model.parameters() if id(weight) not in own),
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        key_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_width=int(getattr(text, "head_dim", None) or hidden // heads),
        vocabulary=int(text.vocab_size),
        attentions=sum(any(not mixer.has_state for mixer in layer.mixers) for layer in found),
    )


def cut(config: Any, layers: int) -> Any:
    """A copy of ``config`` with its first ``layers`` decoder layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == total and name != "architectures":
            setattr(text, name, type(value)(value[:layers]))
    text.num_hidden_layers = layers
    return config


def _pattern(signs: Sequence[Any]) -> tuple[int, int]:
    """(prefix, period): from ``prefix`` on, every layer is like the one ``period`` before it."""
    total = len(signs)
    for cost in range(1, total + 1):  # the shortest beginning and pattern together
        for period in range(1, cost + 1):
            prefix = cost - period
            if all(signs[i] == signs[i + period] for i in range(prefix, total - period)):
                return prefix, period
    return 0, max(1, total)


def _signature(layer: nn.Module) -> Any:
    modules = tuple((name, type(part).__name__) for name, part in layer.named_modules())
    shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    return modules, shapes
