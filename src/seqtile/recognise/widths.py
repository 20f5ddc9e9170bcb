"""Widths of linear layers, MLPs and experts, read from their attributes and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from seqtile.engines.zero3 import whole_shape
from seqtile.recognise.packed_experts import is_packed


def linear_widths(module: Any) -> tuple[int, int] | None:
    """(in, out) of a linear layer of any make: ``nn.Linear``, quantised, adapter-wrapped or ``Conv1D``."""
    for first, second in (("in_features", "out_features"), ("nx", "nf")):
        width = getattr(module, first, None)
        if isinstance(width, int) and isinstance(out := getattr(module, second, None), int):
            return width, out
    return None


def widths_of_children(
    module: nn.Module, widths_of: Callable[[nn.Module], tuple[int, int] | None] = linear_widths
) -> dict[str, tuple[int, int]]:
    """Widths by name of the children for which ``widths_of`` returns some."""
    return {name: widths for name, child in module.named_children() if (widths := widths_of(child)) is not None}


def half_widths(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of half an MLP: a module with one linear layer, and norms, dropouts and an activation beside it."""
    if linear_widths(module) is not None or any(True for _ in module.parameters(recurse=False)):
        return None
    linears = widths_of_children(module)
    others = [child for name, child in module.named_children() if name not in linears]
    return next(iter(linears.values())) if len(linears) == 1 and all(map(_is_small, others)) else None


def mlp_widths(module: nn.Module) -> tuple[int, int] | None:
    """(hidden, intermediate) if the module is a gated or plain MLP by its linear children, in any order.

    Two linear layers are taken to run in the order of the children; if they do not, swap both widths.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # a container cannot be called
        return None
    linears = []
    for child in _parts(module):
        widths = linear_widths(child)
        if widths is not None:
            linears.append(widths)
        elif any(True for _ in child.parameters()) and not _is_small(child):
            return None
    shapes = [whole_shape(weight) for weight in module.parameters(recurse=False)]
    if any(len(shape) > 1 for shape in shapes) or len(linears) not in (2, 3):
        return None
    for number in reversed(range(len(linears))):
        down, others = linears[number], {*linears[:number], *linears[number + 1 :]}
        double = len(linears) == 2 and number == 1 and others == {(down[1], 2 * down[0])}
        if others == {down[::-1]} or double:
            return down[1], down[0]
    return None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        else:
            yield child


def _is_small(module: nn.Module) -> bool:
    """Whether a module may be a norm or activation of an MLP: no matrices and no children."""
    return not any(True for _ in module.children()) and all(len(whole_shape(p)) <= 1 for p in module.parameters())


def stacks_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's own 3-D weights by name, those that bitsandbytes packs in 4 bits included."""
    stacks = {name: tuple(whole_shape(weight)) for name, weight in module.named_parameters(recurse=False)}
    for name, parametrization in getattr(module, "parametrizations", {}).items():
        if is_packed(parametrization):
            stacks[name] = tuple(parametrization[0].quant_state.shape)
    return {name: shape for name, shape in stacks.items() if len(shape) == 3}


def experts_widths(module: nn.Module) -> tuple[int, int] | None:
    """(hidden, intermediate of the experts a token visits) if the module holds routed experts as 3-D weights."""
    stacks = stacks_of(module)
    shapes = list(stacks.values())
    if len(shapes) < 2 or shapes[0][0] != shapes[-1][0]:
        return None
    down = stacks.get("down_proj", shapes[-1])
    sides = set(shapes[0][1:]) & set(down[1:])
    config = getattr(module, "config", None)
    hidden = getattr(module, "hidden_dim", None) or getattr(module, "hidden_size", None)
    hidden = hidden or getattr(config, "hidden_size", None) or (min(sides) if sides else down[1])
    inner = [side for side in down[1:] if side != hidden]
    visits = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1
    return int(hidden), int(inner[0] if inner else hidden) * int(visits)
