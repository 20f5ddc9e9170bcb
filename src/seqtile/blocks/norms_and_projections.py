"""Other position-wise parts of a layer: norms outside the MLP's tile, and attention's projections.

A norm written in Python keeps its input and the normalised states in fp32 until its backward; in tiles it keeps its
input, which the residual connection holds anyway. A projection keeps its input alone, so that tiles free nothing there,
unless an adapter casts the input or drops parts of it: then each projection keeps a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from seqtile.blocks.instance import Setting, TiledForward
from seqtile.engines.zero3 import mark_leaf, whole_shape
from seqtile.recognise.candidates import Candidate, is_per_row
from seqtile.recognise.decoder_layers import looks_like_attention
from seqtile.recognise.known_kernels import own_forward
from seqtile.recognise.widths import linear_widths
from seqtile.tiling import KeepRule, TileRule

FUSED_NORMS = ("torch.", "liger_kernel.", "apex.")
"""Packages whose norms keep their input and one number per token, so that tiles would free nothing."""


ROWS_AUTO = TileRule("auto", 4)
"""Longer tiles than a frozen MLP's: what runs in them is short, and each tile costs its kernels' start."""


class TiledRows(TiledForward):
    """``forward`` of a norm or a projection over tiles of tokens: a norm of a known formula by its own operator."""


@dataclass(frozen=True)
class Rows:
    """A norm or a projection to tile: its name, the module, and the widths of its input and output."""

    name: str
    module: nn.Module
    hidden: int
    width: int

    @property
    def is_norm(self) -> bool:
        return linear_widths(self.module) is None


def find_rows(model: nn.Module, blocks: Sequence[Candidate], besides: Sequence[str], *, whole: bool) -> list[Rows]:
    """Norms and projections of the layers around ``blocks`` that are not in the blocks' tiles.

    Args:
        model: the model, its blocks tiled already.
        blocks: position-wise blocks; their layers are looked through.
        besides: names of modules that run in another operator, attention and the norm before it.
        whole: also norms beside the list of layers, such as the one before the head.
    """
    rows: dict[str, Rows] = {}
    modules = dict(model.named_modules())
    hidden = {block.layer: block.hidden for block in blocks if block.layer}
    inside = tuple(f"{name}." for name in (*besides, *(block.name for block in blocks)) if name)
    parents = {layer.rpartition(".")[0].rpartition(".")[0]: width for layer, width in hidden.items()} if whole else {}
    in_tiles = {*besides}
    for block in blocks:
        in_tiles |= {f"{block.layer}.{child}".lstrip(".") for child in block.neighbours.names}
    proved: dict[object, bool] = {}

    def is_norm(module: nn.Module, width: int) -> bool:
        key = type(module), width
        shapes = [tuple(whole_shape(weight)) for weight in module.parameters()]
        if "norm" not in type(module).__name__.lower() or type(module).__module__.startswith(FUSED_NORMS):
            return False
        if not shapes or any(shape != (width,) for shape in shapes) or any(True for _ in module.children()):
            return False
        if key not in proved:
            proved[key] = is_per_row(model, module, width)
        return proved[key]

    for name, module in modules.items():
        if name in in_tiles or name.startswith(inside) or own_forward(module) is not None:
            continue
        parent = name.rpartition(".")[0]
        width = parents.get(parent) or next(
            (layer_width for layer, layer_width in hidden.items() if name.startswith(f"{layer}.")), None
        )
        if width is None:
            continue
        if is_norm(module, width):
            rows[name] = Rows(name, module, width, width)
        elif (
            (widths := linear_widths(module)) is not None
            and width in widths
            and looks_like_attention(parent, modules[parent])
        ):
            rows[name] = Rows(name, module, *widths)
    return list(rows.values())


def tile_rows(rows: Iterable[Rows], rule: TileRule, path: str = "auto") -> None:
    """Install the tiled forwards; by the generic operator alone where ``path`` is ``"generic"``."""
    for row in rows:
        rule = replace(rule, part="norm" if row.is_norm else "projection")
        setting = Setting(rule, KeepRule("share", 0.0, 1), "generic", row.hidden, row.width, name=row.name)
        tiled = TiledRows(row.module, setting)
        tiled.fuses_norms = path != "generic"
        tiled.install()
        tiled.check()
        mark_leaf(row.module)


def adapted_since(model: nn.Module) -> int:
    """Count the tiled projections that an adapter has wrapped since."""
    return sum(
        name.endswith(".base_layer") and isinstance(module.__dict__.get("forward"), TiledRows)
        for name, module in model.named_modules()
    )


def words_for(rows: Sequence[Rows]) -> str:
    """``"33 norms and 128 projections"``, or ""."""
    norms = sum(row.is_norm for row in rows)
    counts = [(norms, "norm"), (len(rows) - norms, "projection")]
    return " and ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count)
