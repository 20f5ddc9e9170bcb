"""Find a model's position-wise blocks: candidates by structure, verified by their traces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from seqtile._compat import children_of, parameters_of
from seqtile._errors import UserError
from seqtile._technique import Left
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.recognise.chain import Chain, inputs_of
from seqtile.recognise.decoder_layers import NOT_LANGUAGE, is_prediction_head, looks_like_attention, named_state
from seqtile.recognise.known_code import custom_code, is_known_module
from seqtile.recognise.known_kernels import tiled_by_liger
from seqtile.recognise.layer_parts import (
    LayerSteps,
    Neighbours,
    around,
    inline,
    layer_steps,
    looks_inline,
    pair,
    plain_children,
)
from seqtile.recognise.proof import Mode, Proof, autocast_dtype, for_training, prove
from seqtile.recognise.widths import experts_widths, half_widths, linear_widths, mlp_widths, widths_of_children

LOOKED_FOR = (
    "a module with two or three linear layers D -> F and F -> D (gate, up, down; fused gate_up, down; fc1, fc2), "
    "experts with 3-D weights, or such linear layers called one after another in a layer"
)

PREDICTION_HEAD = "multi-token-prediction head; name its blocks in only= to tile them"

Trusted = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Candidate:
    """A position-wise block.

    Attributes:
        name: qualified name of the module, or of the first linear layer of an inline block.
        kind: ``"mlp"``, ``"experts"``, ``"inline"`` (linear layers that are children of the layer) or ``"pair"``
            (two children of the layer with one linear layer each).
        module: the block; the layer for ``"inline"`` and ``"pair"``.
        hidden: width of its input.
        intermediate: width of its widest tensor, per token.
        layer: qualified name of the layer around it, or "".
        neighbours: the children of that layer that run before and after it in the same tile.
        why: how it was proven to be position-wise.
        proof: the proof; None for a block that the caller vouches for.
        trusted: whether its caller vouches for its code.
    """

    name: str
    kind: str
    module: nn.Module
    hidden: int
    intermediate: int
    layer: str
    neighbours: Neighbours
    why: str = ""
    proof: Proof | None = None
    trusted: bool = False

    @property
    def in_layer(self) -> bool:
        """Whether the layer's own ``forward`` calls its parts, so that there is no module of its own."""
        return self.kind in ("inline", "pair")

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that hold the block's weights."""
        if not self.in_layer:
            return [self.module]
        members = [getattr(self.module, name) for name in self.neighbours.members]
        return [member for member in members if isinstance(member, nn.Module)]


def find_blocks(
    model: nn.Module, *, everything: bool = False, trusted: Trusted = lambda name, module: False
) -> tuple[list[Candidate], list[Left]]:
    """Position-wise blocks of ``model`` in module order, and what resembles one but is left alone.

    Args:
        model: any module tree; nothing in it is changed.
        everything: also blocks of vision and audio towers and of prediction heads, which are left alone otherwise.
        trusted: whether the caller vouches for a block that cannot be proven.

    Returns:
        The blocks, outermost first, none inside another; and the modules left alone with the reason.
    """
    modules = dict(model.named_modules())
    traces = LayerTraces(modules, trusted)
    blocks: list[Candidate] = []
    left: list[Left] = []
    inside = ""  # modules come in order, so those inside a block follow it
    for name, module in modules.items():
        if inside and f"{name}.".startswith(inside):
            continue
        class_name = type(module).__name__
        if not everything and is_prediction_head(name, module):
            left.append(Left(name, class_name, PREDICTION_HEAD))
            inside = f"{name}."
            continue
        candidate = _classify(name, module, traces)
        if candidate is None and (why := _unread(name, module)):
            candidate = _vouched(name, module) if trusted(name, module) else None
            custom = custom_code([module]) if children_of(module) else ""
            if candidate is None and custom:
                left.append(Left(name, class_name, Proof.of_custom(custom).why_untiled(name), True, True))
            elif candidate is None:
                left.append(Left(name, class_name, why))
        if candidate is None:
            continue
        if tiled_by_liger(module):
            why = "Liger tiles it already; use LigerSwiGLUMLP, LigerGEGLUMLP or the model's own MLP instead"
            left.append(Left(name, class_name, why))
            continue
        if not everything and NOT_LANGUAGE.search(name):
            left.append(Left(name, class_name, "vision or audio tower; name it in only= to tile it"))
            continue
        with for_training(model):
            judged = _judged(model, candidate, trusted)
            if isinstance(judged, Left) and parameters_of(module):  # its linear layers may still form an MLP
                inner = _called_in_a_row(name, module, traces)
                judged_inner = _judged(model, inner, trusted) if inner is not None else judged
                judged = judged_inner if isinstance(judged_inner, Candidate) else judged
        (blocks if isinstance(judged, Candidate) else left).append(judged)  # type: ignore[arg-type]
        if isinstance(judged, Candidate) and not judged.in_layer:
            if not name:
                break
            inside = f"{name}."
    return blocks, left


class LayerTraces:
    """Traces of layers' forwards, one for all layers of a kind; a custom layer is traced only if it is trusted."""

    def __init__(self, modules: Mapping[str, nn.Module], trusted: Trusted = lambda name, module: False) -> None:
        self.modules = modules
        self._trusted = {id(module) for name, module in modules.items() if trusted(name, module)}
        self._known: dict[object, LayerSteps | None] = {}

    def of(self, layer: nn.Module, hidden: int, blocks: Mapping[str, int]) -> LayerSteps | None:
        if not is_known_module(layer) and id(layer) not in self._trusted:
            return None
        plain = plain_children(layer, blocks)
        settings = tuple(
            (k, v) for k, v in vars(layer).items() if isinstance(v, (int, float, str, bool)) and k != "layer_idx"
        )
        key = (type(layer) if type(layer).__module__.startswith("transformers.") else id(layer), settings, hidden,
               tuple(plain.items()), tuple(type(child) for child in layer.children()))  # fmt: skip
        if key not in self._known:
            self._known[key] = layer_steps(layer, hidden, plain)
        return self._known[key]


def chain_of(layer: nn.Module | None, block: Candidate, neighbours: Neighbours) -> Chain:
    """The chain that runs in one tile of ``block`` with these neighbours."""
    if block.kind in ("mlp", "experts"):
        members: list[tuple[str, Any]] = [(block.name, block.module)]
    else:
        members = [(name, getattr(layer, name)) for name in neighbours.members]
    norm_before, norm_after, closing = (
        getattr(layer, name) if name else None for name in (neighbours.before, neighbours.after, neighbours.closing)
    )
    probability = float(getattr(layer, neighbours.dropout)) if neighbours.dropout else 0.0
    kind = "block" if block.kind == "mlp" else block.kind
    probabilities = [probability, *(member for _, member in members if isinstance(member, (int, float)))]
    training = any(probabilities) and (layer is None or layer.training)
    return Chain(tuple(members), kind, norm_before, norm_after, probability, closing, training)


def expected_mode(chain: Chain, hidden: int, dims: tuple[int | str, ...] | None = None) -> Mode:
    """The mode in which a chain will run in training, from its modules and the present autocast state."""
    weights = [
        p for module in chain.modules for p in module.parameters() if p.is_floating_point() and p.element_size() > 1
    ]
    dtype = weights[0].dtype if weights else torch.float32
    device = weights[0].device if weights and not weights[0].is_meta else torch.device("cpu")
    block = chain.members[0][1]
    count = 2 if chain.kind == "pair" else inputs_of(block) if chain.kind == "block" else 1
    inputs: tuple[tuple[tuple[int | str, ...], torch.dtype], ...] = ((dims or ("b", "s", hidden), dtype),) * count
    if chain.kind == "experts":
        inputs = ((("bs", hidden), dtype), (("bs", 2), torch.int64), (("bs", 2), dtype))
    return Mode(inputs, device, autocast_dtype(device.type))


def _judged(model: nn.Module, block: Candidate, trusted: Trusted) -> Candidate | Left:
    class_name = type(block.module).__name__
    layer = model.get_submodule(block.layer) if block.name or block.in_layer else None
    trusts = trusted(block.name, block.module)
    whole, unfollowed = block.neighbours, replace(block.neighbours, after="", dropout="", closing="")
    # Then with fewer neighbours: a neighbour that reads other tokens must not leave the block untiled.
    for neighbours in dict.fromkeys((whole, unfollowed, replace(whole, before=""), replace(unfollowed, before=""))):
        chain = chain_of(layer, block, neighbours)
        proof = prove(chain, expected_mode(chain, block.hidden), trusted=trusts)
        if not proof.why_not:
            return replace(block, neighbours=neighbours, why=proof.how, proof=proof, trusted=trusts)
    if block.kind == "mlp" and not proof.refuted:  # of two linear layers, the second child may run first
        swapped = prove(chain, expected_mode(chain, block.intermediate), trusted=trusts)
        if not swapped.why_not:
            block = replace(block, hidden=block.intermediate, intermediate=block.hidden)
            return replace(block, neighbours=neighbours, why=swapped.how, proof=swapped, trusted=trusts)
    if proof.refuted:
        return Left(block.name, class_name, f"not position-wise: {proof.why_untiled(block.name)}")
    if trusts:
        return replace(block, why="not verified: trusted by the caller (trust=)", trusted=True)
    submodules = ((name, submodule) for module in chain.modules for name, submodule in module.named_modules() if name)
    try:
        refuse_gathering_inside(submodules, block=block.name, layer=block.layer)
    except UserError as error:  # an engine's hooks cannot be traced; raised where the block is to be tiled
        return replace(block, why=str(error))
    return Left(block.name, class_name, proof.why_untiled(block.name), True, proof.custom)


def is_per_row(model: nn.Module, norm: nn.Module, hidden: int) -> bool:
    """Whether a norm treats every token by itself, and ``[B, T, D]`` as it treats rows."""
    chain = Chain((("norm", norm),), "inline")
    with for_training(model):
        whole = prove(chain, expected_mode(chain, hidden))
        rows = prove(chain, expected_mode(chain, hidden, ("bs", hidden)))
    if whole.graph is None or rows.graph is None:
        return False
    return (whole.graph.outputs[2][0], whole.graph.gradients) == (rows.graph.outputs[2][0], rows.graph.gradients)


def _classify(name: str, module: nn.Module, traces: LayerTraces) -> Candidate | None:
    if looks_like_attention(name, module) or named_state(module):
        return None
    if type(module).__name__ == "ParamWrapper":  # PEFT's target_parameters: the experts inside are tiled
        return None
    layer, _, child = name.rpartition(".")
    parent = traces.modules.get(layer)
    if (widths := mlp_widths(module)) is not None:
        neighbours = Neighbours(members=(child,))
        if name and parent is not None and (steps := traces.of(parent, widths[0], {child: 0})) is not None:
            neighbours = around(parent, steps, child)
        return Candidate(name, "mlp", module, *widths, layer, neighbours)
    if (widths := experts_widths(module)) is not None:
        layer = re.sub(r"(\.base_layer)+$", "", name).rpartition(".")[
            0
        ]  # the layer around PEFT's wrappers of the experts
        return Candidate(name, "experts", module, *widths, layer, Neighbours())
    return _called_in_a_row(name, module, traces)


def _called_in_a_row(name: str, module: nn.Module, traces: LayerTraces) -> Candidate | None:
    """An MLP of several children of ``module``, which its forward calls one after another."""
    if len(children_of(module)) < 2 or linear_widths(module) is not None:  # a linear layer with an adapter in it
        return None
    for kind, look, widths_of in (("inline", inline, linear_widths), ("pair", pair, half_widths)):
        widths = widths_of_children(module, widths_of)
        two = looks_inline(widths)
        if two is None:
            continue
        for hidden in dict.fromkeys(widths[child][0] for child in two):
            steps = traces.of(module, hidden, {child: out for child, (_, out) in widths.items()})
            neighbours = look(module, steps, widths) if steps is not None else None
            if neighbours is not None:
                first = neighbours.members[0]
                return Candidate(f"{name}.{first}".lstrip("."), kind, module, *widths[first], name, neighbours)
    return None


def _vouched(name: str, module: nn.Module) -> Candidate | None:
    """A block that the caller vouches for, with more linear layers than an MLP, such as hand-written adapters."""
    widths = widths_of_children(module)
    two = looks_inline(widths)
    if two is None or any(looks_like_attention(inner, submodule) for inner, submodule in module.named_modules()):
        return None
    layer, _, child = name.rpartition(".")
    return Candidate(name, "mlp", module, *widths[two[0]], layer, Neighbours(members=(child,)))


def _unread(name: str, module: nn.Module) -> str:
    """Why a module whose linear layers resemble an MLP is not one, or "" if they do not."""
    if not children_of(module):
        matrices = _matrices(module)
        paired = [shape for shape in matrices if matrices.count(shape) > 1 or shape[::-1] in matrices]
        is_mlp = any(rows != columns for rows, columns in paired)
        if not is_mlp or looks_like_attention(name, module) or linear_widths(module) is not None:
            return ""
        return "its matrices are bare parameters, not linear layers; use tile_module"
    if len(children_of(module)) < 2 or type(module).forward in (nn.Module.forward, nn.Sequential.forward):
        return ""
    if (
        looks_like_attention(name, module) or linear_widths(module) is not None
    ):  # it has an adapter's two linear layers as children
        return ""
    for widths_of in (linear_widths, half_widths):
        if two := looks_inline(widths_of_children(module, widths_of)):
            return f"its forward does not simply call {two[0]} and then {two[1]}"
    return ""


def _matrices(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of a module's own parameters that may be the matrices of an MLP.

    It leaves out recurrent layers, and scales and shifts: vectors, and parameters of the same shape as their bias.
    """
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return []
    shapes = {
        name: tuple(parameter.shape) for name, parameter in parameters_of(module).items() if parameter is not None
    }
    shifts = {name for name in shapes if name.endswith("bias")}
    scaled = {name for name in shapes if shapes[name] == shapes.get(name.removesuffix("weight") + "bias")}
    return [
        shape for name, shape in shapes.items() if len(shape) == 2 and 1 not in shape and name not in shifts | scaled
    ]
