"""Find the position-wise blocks of a model, by structure rather than by a list of class names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from seqtile.engines.zero3 import whole_shape
from seqtile.models.neighbours import Neighbours, find_inline, find_neighbours, find_pair, looks_inline
from seqtile.models.probe import mixes_tokens

LOOKED_FOR = (
    "a module with two or three linear layers D -> F and F -> D (gate, up, down; fused gate_up, down; fc1, fc2), "
    "experts with 3-D weights, or such linear layers called one after another in a layer"
)

_NOT_LANGUAGE = re.compile(r"(^|\.)(visual|vision|image|audio|speech|vq)[^.]*(\.|$)")


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
        layer: qualified name of the layer around it, "" if there is none.
        neighbours: what stands before and after it in that layer.
        why: what proves that it is position-wise.
    """

    name: str
    kind: str
    module: nn.Module
    hidden: int
    intermediate: int
    layer: str
    neighbours: Neighbours
    why: str

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
        return [part for part in members if isinstance(part, nn.Module)]


@dataclass(frozen=True)
class Left:
    """A module that was left alone, and why."""

    name: str
    class_name: str
    why: str


def find_blocks(model: nn.Module, *, everything: bool = False) -> tuple[list[Candidate], list[Left]]:
    """Position-wise blocks of ``model`` in module order, and what resembles one but is left alone.

    Args:
        model: any module tree; nothing in it is called but the probed blocks, on four random tokens.
        everything: also blocks of vision and audio towers, which are left alone otherwise.

    Returns:
        The blocks, outermost first, none inside another; and the modules left alone with the reason.
    """
    modules = dict(model.named_modules())
    found: list[Candidate] = []
    left: list[Left] = []
    probed: dict[object, str | None] = {}
    for name, module in modules.items():
        if any(not block.name or name.startswith(f"{block.name}.") for block in found if not block.in_layer):
            continue
        parent = modules.get(name.rpartition(".")[0])
        candidate = _classify(name, module, parent)
        class_name = type(module).__name__
        if candidate is None:
            if why := _unread(name, module):
                left.append(Left(name, class_name, why))
            continue
        if not everything and _NOT_LANGUAGE.search(name):
            left.append(Left(name, class_name, "vision or audio tower; name it in only= to tile it"))
            continue
        key = _probe_key(module, candidate)
        if key not in probed:
            probed[key] = mixes_tokens(_probed(candidate), candidate.kind, candidate.hidden)
        reason = probed[key]
        if reason is not None and reason.startswith("not "):
            left.append(Left(name, class_name, reason))
        else:
            candidate = replace(candidate, neighbours=_row_wise_ones(modules.get(candidate.layer), candidate, probed))
            found.append(_with(candidate, reason or "permuted tokens gave permuted outputs"))
    return found, left


def _row_wise_ones(layer: nn.Module | None, block: Candidate, probed: dict[object, str | None]) -> Neighbours:
    """The block's neighbours without norms that read other tokens, which no tile may hold."""
    near = block.neighbours
    for place in ("before", "after", "closing"):
        norm = getattr(layer, getattr(near, place), None) if layer is not None and getattr(near, place) else None
        if not isinstance(norm, nn.Module) or not any(True for _ in norm.parameters()):
            continue
        key = (type(norm), block.hidden)
        if key not in probed:
            probed[key] = mixes_tokens(norm, "mlp", block.hidden)
        if (probed[key] or "").startswith("not "):
            near = replace(near, **{place: ""})  # type: ignore[arg-type]
    return near


def _probe_key(module: nn.Module, candidate: Candidate) -> object:
    """What one probe stands for: blocks of a transformers class with the same attributes; else this one instance."""
    if not type(module).__module__.startswith("transformers."):
        return id(module)
    plain = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))))
    children = tuple(type(child) for child in module.children())
    return type(module), plain, children, candidate.hidden, candidate.intermediate


def _with(candidate: Candidate, why: str) -> Candidate:
    fields = {**candidate.__dict__, "why": why if candidate.kind != "inline" else candidate.why}
    return Candidate(**fields)


def _classify(name: str, module: nn.Module, parent: nn.Module | None) -> Candidate | None:
    if looks_like_attention(name, module):
        return None
    layer = name.rpartition(".")[0]
    if (widths := mlp_widths(module)) is not None:
        neighbours = find_neighbours(parent, name.rpartition(".")[2]) if name and parent is not None else Neighbours()
        return Candidate(name, "mlp", module, *widths, layer, neighbours, "")
    experts: Any = module
    while type(experts).__name__ == "ParamWrapper":  # PEFT's target_parameters: tile around it, it sets the weights
        experts = experts.base_layer
    if (widths := experts_widths(experts)) is not None:
        return Candidate(name, "experts", module, *widths, layer, Neighbours(), "")
    for kind, look, width in (("inline", find_inline, linear_widths), ("pair", find_pair, _half_widths)):
        near = look(module, {child: width(part) for child, part in module.named_children()})
        if near is not None:
            wide = width(getattr(module, near.members[0])) or (0, 0)
            why = f"the layer calls {', '.join(near.members)} one after another"
            return Candidate(f"{name}.{near.members[0]}".lstrip("."), kind, module, *wide, name, near, why)
    return None


def looks_like_attention(name: str, module: nn.Module) -> bool:
    return bool(re.search(r"attn|attention", f"{name.rpartition('.')[2]} {type(module).__name__}", re.IGNORECASE))


def _unread(name: str, module: nn.Module) -> str:
    """Why a layer with linear layers like an MLP's is none; "" where nothing resembles one."""
    if looks_like_attention(name, module) or linear_widths(module) is not None:  # an adapter's two are inside
        return ""
    if type(module).forward in (nn.Module.forward, nn.Sequential.forward) or len(list(module.children())) < 2:
        return ""
    for width in (linear_widths, _half_widths):
        if two := looks_inline({child: width(part) for child, part in module.named_children()}):
            return f"its forward does not call {two[0]} and {two[1]} plainly one after another"
    return ""


def _half_widths(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of half an MLP: a module with one linear layer, and norms, dropouts and an activation beside it."""
    if linear_widths(module) is not None or any(True for _ in module.parameters(recurse=False)):
        return None
    linears = [widths for child in module.children() if (widths := linear_widths(child)) is not None]
    rest = [child for child in module.children() if linear_widths(child) is None]
    if len(linears) != 1 or any(True for child in rest for _ in child.buffers()) or not all(map(_row_wise, rest)):
        return None
    return linears[0]


class _Pair(nn.Module):
    """The two halves of an MLP as one module, for the probe."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden_states: Tensor, other: Tensor) -> Any:
        return self.second(self.first(hidden_states), other)


def _probed(candidate: Candidate) -> nn.Module:
    if candidate.kind != "pair":
        return candidate.module
    return _Pair(*candidate.parts)


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer of any make: ``nn.Linear``, quantised, adapter-wrapped or ``Conv1D``."""
    for names in (("nx", "nf"), ("in_features", "out_features")):
        wide = [getattr(module, name, None) for name in names]
        if isinstance(wide[0], int) and isinstance(wide[1], int):
            return wide[0], wide[1]
    return None


def mlp_widths(module: nn.Module) -> tuple[int, int] | None:
    """(hidden, intermediate) if the module is a gated or plain MLP by its linear children."""
    linears = []
    for child in _parts(module):
        widths = linear_widths(child)
        if widths is not None:
            linears.append(widths)
        elif any(True for _ in child.parameters()) and not _row_wise(child):
            return None
        elif any(True for _ in child.buffers()) and not _is_activation(child):
            return None  # a buffer may be a running statistic over tokens
    if any(True for _ in module.parameters(recurse=False)) or len(linears) not in (2, 3):
        return None
    hidden, out = linears[0]
    down = linears[-1]
    if down[1] != hidden or any(widths != (hidden, out) for widths in linears[:-1]):
        return None
    if len(linears) == 2 and out == 2 * down[0]:
        return hidden, down[0]
    return (hidden, out) if out == down[0] else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential):
            yield from _parts(child)
        else:
            yield child


def _is_activation(module: nn.Module) -> bool:
    """Whether it is one of Transformers' activations; those with buffers (xIELU) hold constants in them."""
    return type(module).__module__ == "transformers.activations"


def _row_wise(module: nn.Module) -> bool:
    """Norms inside an MLP: one-dimensional parameters and nothing below."""
    return not any(True for _ in module.children()) and all(len(whole_shape(p)) <= 1 for p in module.parameters())


def experts_widths(module: nn.Module) -> tuple[int, int] | None:
    """(hidden, intermediate of the experts a token visits) if the module holds routed experts as 3-D weights."""
    stacks = [p for p in module.parameters(recurse=False) if len(whole_shape(p)) == 3]
    if len(stacks) < 2 or whole_shape(stacks[0])[0] != whole_shape(stacks[-1])[0]:
        return None
    down = whole_shape(getattr(module, "down_proj", stacks[-1]))
    sides = set(whole_shape(stacks[0])[1:]) & set(down[1:])
    config = getattr(module, "config", None)
    hidden = getattr(module, "hidden_dim", None) or getattr(module, "hidden_size", None)
    hidden = hidden or getattr(config, "hidden_size", None) or (min(sides) if sides else down[1])
    inner = [side for side in down[1:] if side != hidden]
    visits = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1
    return int(hidden), int(inner[0] if inner else hidden) * int(visits)
