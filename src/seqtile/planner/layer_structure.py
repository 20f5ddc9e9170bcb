"""The kinds of a model's decoder layers, and the same model with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from seqtile._errors import UserError
from seqtile.activation_checkpointing.keep_attention import largest_of_layers
from seqtile.models.discover.decoder_layers import DecoderLayer, decoder_layers
from seqtile.planner.model_shapes import is_masked_lm


@dataclass(frozen=True)
class LayerSample:
    """Some layers of a model, which a fake run has in place of all.

    Attributes:
        layers: their numbers in the whole model, in order.
        like: for each a layer of the same kind near the model's beginning, of which it is a copy.
    """

    layers: tuple[int, ...]
    like: tuple[int, ...]

    def place(self, model: nn.Module, config: Any) -> None:
        """Put the layers of the sample into ``model``, which has the first layers of ``config`` and a copy of it."""
        held, text, whole = _layer_list(decoder_layers(model)), _config_of(model), config.get_text_config()
        assert held is not None
        old, known = (
            model.get_submodule(held),
            {id(one): one for one in (_config_of(model), getattr(model, "config", 0))},
        )
        used: set[int] = set()
        layers = []
        for number in self.like:
            layer = old.get_submodule(str(number))
            layers.append(copy.deepcopy(layer, dict(known)) if number in used else layer)
            used.add(number)
        owner, _, name = held.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.ModuleList(layers))
        text.num_hidden_layers = len(layers)
        computed = {}
        for name, values in _by_layer(whole):
            picked = type(values)(values[number] for number in self.layers)
            if isinstance(getattr(type(whole), name, None), property):  # worked out from other fields
                computed[name] = picked
            else:
                setattr(text, name, picked)
        text.__class__ = type(type(text).__name__, (type(text),), {"__module__": type(text).__module__, **computed})


@dataclass(frozen=True)
class Depths:
    """Which layers fake runs have, and how the whole model follows from them.

    Attributes:
        kinds: the kind of each decoder layer of the whole model, as a number.
        samples: the layers of each fake run: first those at the ends, the first and the last layer of each kind; then
            the same with one more of a kind, once or twice for each kind. A single one with all layers where the model
            is too shallow to leave layers out, or its layers share weights.
    """

    kinds: tuple[int, ...]
    samples: tuple[LayerSample, ...]

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return len(self.kinds)

    @property
    def ends(self) -> tuple[int, ...]:
        """The layers that are told apart."""
        return self.samples[0].layers

    @cached_property
    def inner(self) -> dict[int | None, tuple[int, list[tuple[int, int | None, float]]]]:
        """By the last layer of a kind, :meth:`second_of_its_kind`, where there is one."""
        last = {kind: number for number, kind in enumerate(self.kinds)}
        found = {end: self.second_of_its_kind(end) for end in last.values()}
        return {end: one for end, one in found.items() if one is not None}

    @property
    def shallow(self) -> int:
        """Layers of the shortest model that begins as this one and has a layer of each kind."""
        return max(self.kinds.index(kind) for kind in self.kinds) + 1

    def more(self) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
        """For each kind with further runs: these, each with the layer that it has more, and what it stands for.

        That is the layers of the kind beside the ends.
        """
        runs: dict[int, list[tuple[int, int]]] = {}
        for run, sample in enumerate(self.samples[1:], 1):
            (layer,) = set(sample.layers) - set(self.ends)
            runs.setdefault(self.kinds[layer], []).append((run, layer))
        for kind, known in runs.items():
            yield known, [n for n, one in enumerate(self.kinds) if one == kind and n not in self.ends]

    def terms_of(self, layer: int | None) -> list[tuple[int, int | None, float]]:
        """How a part of the step in ``layer`` (None: in none) is summed up: run, layer in it, and weight.

        A layer holds one thing before another layer and one behind it (what it saved, its gradients). The run with one
        more of its kind tells which of the two; a run with another one, or the layer of the same kind at the other end,
        tells the other.
        """
        found: list[tuple[int, int | None, float]] = [(0, layer, 1.0)]
        for runs, alike in self.more():
            if layer is None:
                sides: list[tuple[int, int | None, list[int]]] = [(runs[0][0], None, alike)]
            else:
                before = [n for n in alike if n < layer]
                behind = alike[len(before) :]
                sides = [
                    (*one, missing)
                    for is_before, missing in ((True, before), (False, behind))
                    if missing and (one := _beside(self.kinds, self.ends, layer, runs, is_before)) is not None
                ]
            for run, where, missing in sides:
                found += [(run, where, float(len(missing))), (0, where, -float(len(missing)))]
        return found

    def second_of_its_kind(self, end: int) -> tuple[int, list[tuple[int, int | None, float]]] | None:
        """The first of the layers in between that are like the last one of a kind, and the terms of a part in it.

        What a layer holds in its backward grows towards the first layer where a gradient is larger than a checkpoint,
        and the first layer itself may need less, as nothing comes before it.

        Args:
            end: the last layer of its kind, whose part is like that of the layer in between.

        Returns:
            Its number and, as of :meth:`terms_of`, how the part is summed up; None where the runs do not tell.
        """
        kind = self.kinds[end]
        between = [number for number, one in enumerate(self.kinds) if one == kind and number not in self.ends]
        if not between or between[0] > end:
            return None
        layer = between[0]
        found: list[tuple[int, int | None, float]] = [(0, end, 1.0)]
        known = {self.kinds[alike[0]]: runs for runs, alike in self.more()}
        missing: dict[tuple[int, bool], int] = {}
        for number, one in enumerate(self.kinds):
            if number != layer:
                missing[one, number < layer] = missing.get((one, number < layer), 0) + 1
            if number in self.ends and number != end:
                missing[one, number < end] = missing.get((one, number < end), 0) - 1  # as in the run
        for (one, before), count in missing.items():
            if count:
                beside = _beside(self.kinds, self.ends, end, known.get(one, []), before)
                if beside is None:
                    return None
                found += [(*beside, float(count)), (0, beside[1], -float(count))]
        return layer, found


def _beside(
    kinds: Sequence[Any], ends: Sequence[int], layer: int, runs: Sequence[tuple[int, int]], before: bool
) -> tuple[int, int] | None:
    """A run and an end of the kind of ``layer``, itself if possible, that has the run's further layer on that side."""
    alike = [layer, *(end for end in ends if kinds[end] == kinds[layer])]
    return next(((run, end) for end in alike for run, extra in runs if (extra < end) == before), None)


def _further(kinds: Sequence[Any], ends: Sequence[int], between: Sequence[int]) -> list[int]:
    """Layers of one kind, one or two of those ``between`` the ends, that tell what such a layer adds on either side.

    Of each end there must be one of its kind that has one of them before it, where it has such layers before it in the
    whole model, and likewise behind it.
    """

    def tells_all(picked: Sequence[int]) -> bool:
        runs = list(enumerate(picked))
        return all(
            _beside(kinds, ends, end, runs, before) is not None
            for end in ends
            for before in (True, False)
            if any((one < end) == before for one in between)
        )

    middle = len(between) // 2  # it stands behind the first layers and before the last ones, most often
    for one in sorted(between, key=lambda number: abs(between.index(number) - middle)):
        if tells_all([one]):
            return [one]
    return [between[0], between[-1]]


def find_depths(config: Any, model: nn.Module) -> Depths:
    """The few layers that stand for all of ``model``: its first and last layer of each kind, and one more of each.

    Kinds are told by the layers' classes, shapes and attention types. Fake runs with these layers give what one more
    layer of a kind adds, and so what the whole model holds, in whichever order and number its kinds come.

    Raises:
        UserError: no decoder layers are found.
    """
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            f"no list of layers (with attention or a state) in {type(model).__name__}; plan a language model that has "
            "one"
        )
    depth = getattr(config, "num_hidden_layers", None)
    if is_masked_lm(config) and len(layers) != depth:
        raise UserError(
            f"{type(model).__name__} has {len(layers)} layers with weights of their own for a depth of {depth}, and a "
            "plan is of models with as many; plan another encoder"
        )
    types = list(getattr(config.get_text_config(), "layer_types", None) or ())
    modules = [model.get_submodule(layer.name) for layer in layers]
    signs = [_signature(module) for module in modules]
    if len(types) == len(signs):
        signs = [(sign, kind) for sign, kind in zip(signs, types, strict=True)]
    first = {sign: number for number, sign in reversed(list(enumerate(signs)))}
    last = {sign: number for number, sign in enumerate(signs)}
    kinds = tuple(sorted(first.values()).index(first[sign]) for sign in signs)
    ends = tuple(sorted({*first.values(), *last.values()}))
    samples = [ends]
    for sign, beginning in first.items():
        between = [n for n in range(beginning, last[sign]) if signs[n] == sign and n not in ends]
        samples += [tuple(sorted((*ends, one))) for one in _further(kinds, ends, between)] if between else []
    total = len(signs)
    own = [{id(weight) for weight in module.parameters()} for module in modules]
    shared = sum(map(len, own)) != len(set().union(*own))
    # Modules whose configuration differs by layer hold copies of it, which do not follow a layer to another place.
    shared = shared or bool(getattr(config.get_text_config(), "per_layer_attributes", None))
    if len(samples[-1]) >= total or shared or _layer_list(layers) is None:
        return Depths(kinds, (LayerSample(tuple(range(total)), tuple(range(total))),))
    return Depths(kinds, tuple(LayerSample(one, tuple(first[signs[n]] for n in one)) for one in samples))


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
        layers, hidden, vocabulary: of the model.
        heads, key_heads, head_width: of the model, the most where its layers differ.
        attentions: decoder layers with attention; the others carry a state, or are an MLP alone.
        causal: whether a token reads those before it alone.
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
    causal: bool


def count_layers(depths: Depths, counts: Sequence[Counts]) -> Counts:
    """Sizes of the whole model from those of the samples: every further layer of a kind adds the same."""
    ends = counts[0]
    return replace(ends, layers=depths.layers, **{
        name: getattr(ends, name)
        + sum(len(alike) * (getattr(counts[runs[0][0]], name) - getattr(ends, name)) for runs, alike in depths.more())
        for name in ("weights", "trained", "matrices", "active", "attentions")
    })  # fmt: skip


def count_weights(config: Any, model: nn.Module) -> Counts:
    """Count the parameters of ``model``, which may be on the meta device."""
    text = config.get_text_config()
    found = decoder_layers(model)
    layers = [model.get_submodule(layer.name) for layer in found]
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.dim() >= 2]
    experts = largest_of_layers(text, "num_local_experts") or largest_of_layers(text, "num_experts")
    experts = experts or largest_of_layers(text, "n_routed_experts") or 1
    share = (largest_of_layers(text, "num_experts_per_tok") or experts) / experts
    active = sum(int(weight.numel() * (share if weight.dim() == 3 else 1)) for weight in matrices)
    heads = int(largest_of_layers(text, "num_attention_heads") or 1)  # Mamba has none
    hidden = int(text.hidden_size)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return Counts(
        weights=sum(weight.numel() for weight in model.parameters()),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        matrices=sum(weight.numel() for weight in matrices),
        active=active + (head.weight.numel() if head is not None else 0),
        layer=max(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
        largest_product=hidden * int(largest_of_layers(text, "intermediate_size") or 4 * hidden),
        largest=max((weight.numel() for weight in matrices), default=0),
        root=sum(weight.numel() for weight in model.parameters() if id(weight) not in own),
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        key_heads=int(largest_of_layers(text, "num_key_value_heads") or heads),
        head_width=int(largest_of_layers(text, "head_dim") or hidden // heads),
        vocabulary=int(text.vocab_size),
        attentions=sum(any(not mixer.has_state for mixer in layer.mixers) for layer in found),
        causal=not is_masked_lm(config),
    )


def first_layers(config: Any, layers: int) -> Any:
    """A copy of ``config`` with its first ``layers`` decoder layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, values in _by_layer(text):
        if name in vars(text):
            setattr(text, name, type(values)(values[:layers]))
    text.num_hidden_layers = layers
    return config


def _by_layer(text: Any) -> list[tuple[str, Any]]:
    """What the configuration of a language model says layer by layer: fields and properties with an entry for each."""
    # Not the properties that every configuration has: reading some of them warns.
    own = [kind for kind in type(text).__mro__ if not issubclass(PretrainedConfig, kind)]
    names = {*vars(text), *(name for kind in own for name, one in vars(kind).items() if isinstance(one, property))}
    names -= set(getattr(text, "per_layer_attributes", None) or ())  # read from the configuration of each layer alone
    values = [(name, getattr(text, name, None)) for name in sorted(names - {"architectures"})]
    total = text.num_hidden_layers
    return [(name, one) for name, one in values if isinstance(one, list | tuple) and len(one) == total]


def _config_of(model: Any) -> Any:
    """The configuration of its language model, the object that its modules read."""
    return model.config.get_text_config()


def _layer_list(layers: Sequence[DecoderLayer]) -> str | None:
    """The name of the list that holds all the layers and nothing else, None where there is no such list."""
    held = layers[0].name.rpartition(".")[0]
    return held if [layer.name for layer in layers] == [f"{held}.{n}" for n in range(len(layers))] else None


def _signature(layer: nn.Module) -> Any:
    modules = tuple((name, type(part).__name__) for name, part in layer.named_modules())
    shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    return modules, shapes
