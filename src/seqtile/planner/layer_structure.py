"""The kinds of a model's decoder layers, and the same model with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from seqtile._errors import UserError
from seqtile.checkpointing.keep_attention import largest_of_layers
from seqtile.models.layer_fields import experts_of, fields_by_layer, layer_kinds
from seqtile.options import by_layer, layer_policies
from seqtile.planner.phases import Phase
from seqtile.recognise.decoder_layers import DecoderLayer, decoder_layers
from seqtile.recognise.packed_experts import packable_experts, whole_experts


@dataclass(frozen=True)
class LayerSample:
    """Some layers of a model, which a fake run has in place of all.

    Attributes:
        layers: their numbers in the whole model, in order.
        like: for each layer, the layer of the same kind near the model's beginning that it copies.
    """

    layers: tuple[int, ...]
    like: tuple[int, ...]

    def place(self, model: nn.Module, config: Any) -> None:
        """Put the layers of the sample into ``model``, which has the first layers of ``config`` and a copy of it."""
        path, own_config, whole = (
            _layer_list(decoder_layers(model)),
            getattr(model, "config", None),
            config.get_text_config(),
        )
        assert path is not None and own_config is not None
        text = own_config.get_text_config()
        first_layers_of_model, uncopied = model.get_submodule(path), {id(text): text, id(own_config): own_config}
        used: set[int] = set()
        layers = []
        for number in self.like:
            layer = first_layers_of_model.get_submodule(str(number))
            layers.append(copy.deepcopy(layer, dict(uncopied)) if number in used else layer)
            used.add(number)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.ModuleList(layers))
        text.num_hidden_layers = len(layers)
        computed = {}
        for name, values in fields_by_layer(whole):
            picked = type(values)(values[number] for number in self.layers)
            if isinstance(getattr(type(whole), name, None), property):  # worked out from other fields
                computed[name] = picked
            else:
                setattr(text, name, picked)
        if computed:  # proofs are remembered by the class
            text.__class__ = type(type(text).__name__, (type(text),), {"__module__": type(text).__module__, **computed})


@dataclass(frozen=True)
class Depths:
    """Which layers fake runs have, and how the whole model follows from them.

    The first sample has the first layer of each kind and then the last of each; every further one has one more layer in
    the middle. What that layer adds to a part of the step depends only on whether it comes after the layer that runs,
    as for the first ones, or before it, as for the last ones. Kinds with the same modules and shapes, whose attention
    reads windows of different sizes, add the same and share a sample.

    Where activation checkpoints differ by layer, every sample runs once with each policy on all of its layers: a layer
    adds what it adds in the run with its own policy, and takes while it runs what it takes there.

    Attributes:
        kinds: the kind of each segment of decoder layers of the whole model, as a number.
        samples: the layers of each fake run; a single one with all layers where leaving some out would save nothing,
            or where layers share weights.
        sample_of_kind: number of the sample that has one more segment of each kind.
        segment: layers of a segment, which run together; without chunks each layer is a segment.
        attends: whether each layer has attention.
        policies: policy of each layer's activation checkpoint where they differ; else empty.
    """

    kinds: tuple[int, ...]
    samples: tuple[LayerSample, ...]
    sample_of_kind: tuple[int, ...] = ()
    segment: int = 1
    attends: tuple[bool, ...] = ()
    policies: tuple[str | None, ...] = ()

    def with_checkpoint(self, checkpoint: str | None) -> Depths:
        """The same for another option ``checkpoint``."""
        return replace(self, policies=layer_policies(checkpoint, self.layers) if by_layer(checkpoint) else ())

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return len(self.kinds) * self.segment

    @property
    def shallow(self) -> int:
        """Layers of the shortest model that begins as this one and has a layer of each kind."""
        return (max(self.kinds.index(kind) for kind in self.kinds) + 1) * self.segment

    def whole_model(
        self, runs: Mapping[str | None, Sequence[Mapping[Phase, Mapping[str, float]]]]
    ) -> dict[Phase, Mapping[str, float]]:
        """Memory of each phase of the whole model's step.

        Of each kind of decoder layer, the first, the second and the last of each run of layers with one policy have an
        entry: between them the memory of a phase only grows or only falls from layer to layer.

        Args:
            runs: a run of each sample, for each policy of :attr:`policies` (or the only policy).
        """
        if not self.sample_of_kind:
            return dict(next(iter(runs.values()))[0])
        policies = self.policies or tuple(runs) * len(self.kinds)
        layers = [*zip(self.kinds, policies, strict=True)]
        width, size = len(self.sample_of_kind), self.segment
        order = [self.kinds[number // size] for number in self.samples[0].layers[::size]]

        def grown(
            terms: Mapping[str, float], policy: str | None, before: slice, after: slice, present: tuple[slice, slice],
            phases: tuple[Phase, Phase, Phase],
        ) -> dict[str, float]:  # fmt: skip
            """``terms`` of a run with ``policy``, with what the layers of the whole model add."""
            total, (as_first, as_last, moved) = dict(terms), phases
            for other, own_runs in runs.items():
                for kind, sample in enumerate(self.sample_of_kind):
                    for side, sample_side, short, long in (
                        (after, present[1], as_first, as_first), (before, present[0], as_last, moved),
                    ):  # fmt: skip
                        count = layers[side].count((kind, other))
                        count -= order[sample_side].count(kind) if other == policy else 0
                        if count:
                            _add(total, count, own_runs[0], own_runs[sample], short, long)
            return total

        result: dict[Phase, Mapping[str, float]] = {}
        for policy, own_runs in runs.items():
            for phase, terms in own_runs[0].items():
                if phase.layer is None:
                    if policy == policies[-1]:
                        everything, nothing = slice(None), slice(0)
                        result[phase] = grown(
                            terms, policy, nothing, everything, (nothing, everything), (phase, phase, phase)
                        )
                    continue
                position, inside = divmod(phase.layer, size)
                kind, is_first = order[position], position < width
                of_kind = [number for number, own_kind in enumerate(self.kinds) if own_kind == kind]
                first, last = order.index(kind), width + order[width:].index(kind)
                as_first, as_last = (replace(phase, layer=number * size + inside) for number in (first, last))
                moved = replace(phase, layer=(1 + last) * size + inside)  # behind one segment more
                for number in _ends_of_runs(of_kind, policies, policy):
                    # The first of several, and the model's first, is represented by the first of the kind.
                    if is_first == (number == of_kind[0] and (len(of_kind) > 1 or number == 0)):
                        result[replace(phase, layer=number * size + inside)] = grown(
                            terms, policy, slice(number), slice(number + 1, None),
                            (slice(position), slice(position + 1, None)), (as_first, as_last, moved),
                        )  # fmt: skip
        return result


def _ends_of_runs(layers: Sequence[int], policies: Sequence[str | None], policy: str | None) -> list[int]:
    """The first two and the last of some layers in each run of neighbours with ``policy``."""
    borders = [n for n in range(len(policies)) if not n or policies[n] != policies[n - 1]] + [len(policies)]
    runs = [[n for n in layers if begin <= n < end] for begin, end in pairwise(borders) if policies[begin] == policy]
    return [number for run in runs if run for number in {*run[:2], run[-1]}]


def _add(
    total: dict[str, float], layers: int, base: Mapping[Phase, Mapping[str, float]],
    longer: Mapping[Phase, Mapping[str, float]], short: Phase, long: Phase,
) -> None:  # fmt: skip
    """Add to ``total`` what one layer more, in ``longer``, adds to a part of the step, times ``layers``."""
    if short not in base:
        # What runs with another policy may lack the part, such as a recompute. A layer adds the same to all parts of
        # one layer's forward, and to all of its backward.
        forward = short.direction == "forward"
        others = [
            phase for phase in base
            if phase.layer == short.layer and (phase.direction == "forward") == forward
            and replace(phase, layer=long.layer) in longer
        ]  # fmt: skip
        nearest = max(
            others,
            key=lambda phase: (phase.part == short.part, phase.past_mixer == short.past_mixer, not phase.in_kernel),
        )
        short, long = nearest, replace(nearest, layer=long.layer)
    shorter, longer_terms = base.get(short, {}), longer.get(long, {})
    for name in {*shorter, *longer_terms}:
        total[name] = total.get(name, 0.0) + layers * (longer_terms.get(name, 0.0) - shorter.get(name, 0.0))


def find_depths(config: Any, model: nn.Module, segment: int = 1) -> Depths:
    """The few layers that represent all of ``model``: its first and last layer of each kind, and one more of each.

    Kinds differ in the layers' classes, shapes or attention types.

    Args:
        config: configuration of the model.
        model: the model.
        segment: layers that run together on chunks, which are a kind together. Where it does not divide the layers,
            the last segment is shorter, and all layers are in the only sample.

    Raises:
        UserError: no decoder layers are found.
    """
    layers = decoder_layers(model)
    if not layers:
        raise UserError(
            "plan.no-layers",
            f"found no list of layers (with attention or a state) in {type(model).__name__}; plan another model",
        )
    structures, signs = layer_kinds(config, model)
    attends = tuple(map(_attends, layers))
    every = tuple(range(len(signs)))
    uneven = len(signs) % segment > 0
    if segment > 1 and not uneven:
        signs, structures = (
            [tuple(each[n : n + segment]) for n in range(0, len(each), segment)] for each in (signs, structures)
        )
    first = {sign: number for number, sign in reversed(list(enumerate(signs)))}
    last = {sign: number for number, sign in enumerate(signs)}
    beginning, end = sorted(first.values()), sorted(last.values())
    kinds = tuple(beginning.index(first[sign]) for sign in signs)
    added = [number for number in beginning if structures.index(structures[number]) == number]
    samples = [(*beginning, *end), *((*beginning, number, *end) for number in added)]
    weights = [{id(weight) for weight in model.get_submodule(layer.name).parameters()} for layer in layers]
    shared = sum(map(len, weights)) != len(set().union(*weights))
    # Modules whose configuration differs by layer hold copies of it, which do not follow a layer to another place.
    shared = shared or bool(getattr(config.get_text_config(), "per_layer_attributes", None))
    if sum(map(len, samples)) > len(signs) or shared or _layer_list(layers) is None or uneven:
        return Depths(kinds, (LayerSample(every, every),), segment=1 if uneven else segment, attends=attends)

    def layers_of(segments: Sequence[int]) -> tuple[int, ...]:
        return tuple(number * segment + inside for number in segments for inside in range(segment))

    return Depths(
        kinds,
        tuple(LayerSample(layers_of(sample), layers_of([first[signs[n]] for n in sample])) for sample in samples),
        tuple(1 + added.index(structures.index(structures[number])) for number in beginning),
        segment,
        attends,
    )


@dataclass(frozen=True)
class Counts:
    """Sizes of a model, in elements.

    Attributes:
        weights: all parameters, tied ones once.
        trained: those that train.
        matrices: weights of at least two dimensions inside decoder layers, adapters included.
        linears: frozen weights of linear layers inside decoder layers, which 4-bit loading packs.
        experts: frozen weights of experts, which it packs too where bitsandbytes can.
        large_experts: those that bitsandbytes cannot pack.
        active: weights that one token is multiplied by, head included: an expert counts by its share of the tokens.
        layer: the largest decoder layer.
        largest: the largest matrix of a decoder layer.
        largest_linear: the largest of ``linears``.
        layer_experts: those of ``experts`` that a layer has, the most of any layer.
        largest_product: weights of the last product of a decoder layer, the down projection of a dense MLP.
        root: everything outside the decoder layers.
        layers, hidden: number of decoder layers, and features of a hidden state.
        vocabulary: size of the head's vocabulary; 0 for a classifier.
        heads, key_heads, head_width: query heads, key-value heads and their width; the largest where layers differ.
        attends: whether each decoder layer has attention; the others carry a state, or are an MLP alone.
    """

    weights: int
    trained: int
    matrices: int
    linears: int
    experts: int
    large_experts: int
    active: int
    layer: int
    largest: int
    largest_linear: int
    layer_experts: int
    largest_product: int
    root: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    attends: tuple[bool, ...]

    @property
    def attentions(self) -> int:
        """Decoder layers with attention."""
        return sum(self.attends)

    def attentions_with(self, policy: str | None, checkpoint: str | None) -> int:
        """Decoder layers with attention whose activation checkpoint has ``policy``; None for those without one."""
        policies = layer_policies(checkpoint, self.layers)
        return sum(attends and own == policy for attends, own in zip(self.attends, policies, strict=True))


def count_layers(depths: Depths, counts: Sequence[Counts]) -> Counts:
    """Sizes of the whole model from those of the samples: every further layer of a kind adds the same."""
    ends, longer = counts[0], [counts[sample] for sample in depths.sample_of_kind]
    return replace(ends, layers=depths.layers, attends=depths.attends, **{
        name: getattr(ends, name) + sum(
            (depths.kinds.count(layer_kind) - 2) * (getattr(more_layers, name) - getattr(ends, name))
            for layer_kind, more_layers in enumerate(longer)
        )
        for name in ("weights", "trained", "matrices", "linears", "experts", "large_experts", "active")
    })  # fmt: skip


def count_weights(config: Any, model: nn.Module) -> Counts:
    """Count the parameters of ``model``, which may be on the meta device."""
    text = config.get_text_config()
    decoder = decoder_layers(model)
    layers = [model.get_submodule(layer.name) for layer in decoder]
    in_layers = {id(weight) for layer in layers for weight in layer.parameters()}
    matrices = [weight for layer in layers for weight in layer.parameters() if weight.dim() >= 2]
    linears: set[nn.Parameter] = {
        module.weight
        for layer in layers
        for module in layer.modules()
        if type(module) in (nn.Linear, Conv1D) and isinstance(module.weight, nn.Parameter)
    }
    frozen_linears = [weight.numel() for weight in linears if not weight.requires_grad]
    frozen_experts = [
        sum(weight.numel() for weight in packable_experts(layer).values() if not weight.requires_grad)
        for layer in layers
    ]
    frozen = [w for layer in layers for w in whole_experts(layer).values() if not w.requires_grad]
    experts = experts_of(text) or 1
    routed = (largest_of_layers(text, "num_experts_per_tok") or experts) / experts
    active = sum(int(weight.numel() * (routed if weight.dim() == 3 else 1)) for weight in matrices)
    heads = int(largest_of_layers(text, "num_attention_heads") or 1)  # Mamba has none
    hidden = int(text.hidden_size)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return Counts(
        weights=sum(weight.numel() for weight in model.parameters()),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        matrices=sum(weight.numel() for weight in matrices),
        linears=sum(frozen_linears),
        experts=sum(frozen_experts),
        large_experts=sum(weight.numel() for weight in frozen) - sum(frozen_experts),
        largest_linear=max(frozen_linears, default=0),
        layer_experts=max(frozen_experts),
        active=active + (head.weight.numel() if head is not None else 0),
        layer=max(sum(weight.numel() for weight in layer.parameters()) for layer in layers),
        largest_product=hidden * int(largest_of_layers(text, "intermediate_size") or 4 * hidden),
        largest=max((weight.numel() for weight in matrices), default=0),
        root=sum(weight.numel() for weight in model.parameters() if id(weight) not in in_layers),
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        key_heads=int(largest_of_layers(text, "num_key_value_heads") or heads),
        head_width=int(largest_of_layers(text, "head_dim") or hidden // heads),
        vocabulary=0 if head is None else int(text.vocab_size),
        attends=tuple(map(_attends, decoder)),
    )


def _attends(layer: DecoderLayer) -> bool:
    return any(not mixer.has_state for mixer in layer.mixers)


def _layer_list(layers: Sequence[DecoderLayer]) -> str | None:
    """The name of the list that holds all the layers and nothing else, None where there is no such list."""
    path = layers[0].name.rpartition(".")[0]
    return path if [layer.name for layer in layers] == [f"{path}.{n}" for n in range(len(layers))] else None
