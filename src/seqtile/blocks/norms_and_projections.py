"""Other position-wise parts of a layer: norms outside the MLP's tile, and attention's projections.

A norm written in Python makes ten passes over fp32 tensors, and saves its input and the normalised states in fp32 for
its backward. On accelerators a norm of a known formula runs as one kernel (:class:`KernelNorm`). Elsewhere it runs
unchanged, or in tiles, which save its input alone. A projection saves its input alone, so tiles free nothing there
unless an adapter casts or drops parts of the input: each projection then saves a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from seqtile._compat import PLAIN, children_of, in_forward_mode, transform_level
from seqtile._technique import Left
from seqtile.blocks.instance import Setting, TiledForward, inside_a_tile, mode_of
from seqtile.blocks.layer import TiledLayer
from seqtile.engines.zero3 import is_registered, mark_leaf, whole_shape
from seqtile.ops.fused_norm import fused_norm
from seqtile.ops.norm import BY_DEVICE, NORM_KERNELS
from seqtile.ops.rng import RowWise
from seqtile.recognise.candidates import Candidate, Trusted, expected_mode, is_per_row
from seqtile.recognise.chain import Chain
from seqtile.recognise.decoder_layers import decoder_layers, looks_like_attention
from seqtile.recognise.known_kernels import own_forward
from seqtile.recognise.live_weights import row_wise
from seqtile.recognise.proof import for_training, prove
from seqtile.recognise.widths import linear_widths
from seqtile.tiling import KeepRule, TileRule

FUSED_NORMS = ("torch.", "liger_kernel.", "apex.")
"""Packages whose norms save their input and one number per token, so that tiles would free nothing."""

ROWS_AUTO = TileRule("auto", 4)
"""Longer tiles than a frozen MLP's: a norm or projection is short work, and each tile costs its kernels' launches."""


class TiledRows(TiledForward):
    """``forward`` of a norm or a projection over tiles of tokens; a known norm runs by the norm operator."""


class KernelNorm(TiledRows):
    """``forward`` of a norm outside the MLP's tile: one kernel where the device has one, else the norm's own."""

    _gave_up: bool | None = None

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module, setting)
        self._names = [name for name, _ in module.named_parameters()]

    def note(self) -> str:
        return "one kernel on accelerators"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        operands = None
        if not torch.compiler.is_compiling():
            self.refuse_copies()
            alone = len(args) == 1 and not kwargs and type(args[0]) in PLAIN
            if alone and BY_DEVICE.get(args[0].device.type, NORM_KERNELS) is not None:
                operands = self.operands(args[0])
        if operands is None:
            return self.original(*args, **kwargs)
        norm, dtype = operands
        return fused_norm(args[0], norm, dtype, (args[0].shape[:-1].numel(),))

    def operands(self, x: Any) -> tuple[RowWise, torch.dtype] | None:
        """The live weights with their formula, and the dtype of the result; None where no kernel computes ``x``."""
        kernels = BY_DEVICE.get(x.device.type, NORM_KERNELS) if type(x) in PLAIN and x.numel() else None
        if kernels is None or inside_a_tile() or self.plainly is not None or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        if x.is_nested or transform_level() is not None or in_forward_mode():
            return None
        if self._gave_up is None:  # read once: a checkpoint's recompute must run the same kernel as its forward
            self._gave_up = kernels.failed
        if self._gave_up:
            return None
        verdict, _ = self.verdict(Chain(((self.setting.name, self.module),)), mode_of((x,)))
        proof = verdict.proof
        if proof.norm is None or proof.graph is None:
            self._log_untiled(proof.why_not or OTHER_FORMULA)
            return None
        norm = row_wise(self.module, proof.norm, runs_hooks=True, names=self._names)
        return None if isinstance(norm, str) else (norm, proof.graph.outputs[2][2])


OTHER_FORMULA = "it computes another formula than the norms that have a kernel"


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


def find_norms(
    model: nn.Module, blocks: Sequence[Candidate], trusted: Trusted, *, whole: bool
) -> tuple[list[Rows], list[Left]]:
    """Find norms of the layers around ``blocks``: (norms that have a kernel, norms that have none).

    These are norms of hidden states outside the blocks' tiles, and norms of queries and keys.

    Args:
        model: the model, its blocks tiled already.
        blocks: position-wise blocks; their layers are looked through.
        trusted: whether the caller vouches for custom code.
        whole: also the layers without a block, and norms beside the list of layers, such as the one before the head.
    """
    norms: list[Rows] = []
    left: list[Left] = []
    modules = dict(model.named_modules())
    every_layer = [layer.name for layer in decoder_layers(model)] if blocks else []
    layers = dict.fromkeys(every_layer, blocks[0].hidden) if whole and blocks else {}
    for block in blocks:  # a group of experts is not a child of its decoder layer
        around = next((layer for layer in every_layer if block.name.startswith(f"{layer}.")), block.layer)
        layers |= {around: block.hidden} if around else {}
    beside = {layer.rpartition(".")[0].rpartition(".")[0]: width for layer, width in layers.items()} if whole else {}
    inside = tuple(f"{block.name}." for block in blocks if block.name)
    in_tiles = {
        f"{block.layer}.{child}".lstrip(".")
        for block in blocks
        if isinstance(forward := modules[block.layer].__dict__.get("forward"), TiledLayer)
        for child in forward.names
    }
    for name, module in modules.items():
        class_name, parent = type(module).__name__, name.rpartition(".")[0]
        if "norm" not in class_name.lower() or type(module).__module__.startswith(FUSED_NORMS):
            continue
        if name in in_tiles or name.startswith(inside) or own_forward(module) is not None:
            continue
        widths = {tuple(whole_shape(weight)) for weight in module.parameters()}
        if len(widths) != 1 or len(width := widths.pop()) != 1 or next(module.children(), None) is not None:
            continue
        hidden = beside.get(parent) or next((w for layer, w in layers.items() if name.startswith(f"{layer}.")), None)
        if hidden is None or (width != (hidden,) and not looks_like_attention(parent, modules[parent])):
            continue
        chain = Chain(((name, module),))
        trusts = trusted(name, module)
        with for_training(model):
            proof = prove(chain, expected_mode(chain, width[0]), trusted=trusts)
        if proof.norm is not None:
            norms.append(Rows(name, module, *width, *width))
        elif proof.custom or width == (hidden,):  # a norm with a gate is another function
            why = f"{proof.why_not or OTHER_FORMULA}; not changed"
            left.append(Left(name, class_name, why, bool(proof.why_not) and not proof.refuted, proof.custom))
    return norms, left


def install_norms(norms: Iterable[Rows], trusted: Trusted) -> None:
    """Install the forward that runs a norm by the device's kernel, if there is one."""
    for norm in norms:
        setting = Setting(
            TileRule("auto"), KeepRule("share", 0.0, 1), "auto", norm.hidden, norm.width, name=norm.name,
            trusted=trusted(norm.name, norm.module),
        )  # fmt: skip
        KernelNorm(norm.module, setting).install()


def find_rows(model: nn.Module, blocks: Sequence[Candidate], besides: Sequence[str], *, whole: bool) -> list[Rows]:
    """Norms and projections of the layers around ``blocks`` that are not in the blocks' tiles.

    Args:
        model: the model, its blocks tiled already.
        blocks: position-wise blocks; their layers are looked through.
        besides: names of modules that run in an operator already, as head-wise attention does with the norm before it.
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
    """Install the tiled forwards; ``path="generic"`` excludes the norm operator."""
    for row in rows:
        rule = replace(rule, part="norm" if row.is_norm else "projection")
        setting = Setting(rule, KeepRule("share", 0.0, 1), "generic", row.hidden, row.width, name=row.name)
        tiled = TiledRows(row.module, setting)
        tiled.fuses_norms = path != "generic"
        tiled.install()
        tiled.check()
        mark_leaf(row.module)


def norms_by_kernel(model: nn.Module) -> int:
    """Count the norms outside the tiles that run by a kernel where the device has one."""
    return sum(isinstance(module.__dict__.get("forward"), KernelNorm) for module in model.modules())


def follow_adapters(model: nn.Module) -> list[TiledRows]:
    """Tile each adapter's layer in place of the tiled projection inside it, so that the adapter is tiled too."""
    retiled = []
    for module in model.modules():
        base = module
        while (inner := children_of(base).get("base_layer")) is not None:
            base = inner
        forward = base.__dict__.get("forward")
        if base is module or type(forward) is not TiledRows or linear_widths(module) is None:
            continue
        if is_registered(module):  # ZeRO-3 gathers the adapter's parts one by one, at every tile
            continue
        forward.remove()
        tiled = TiledRows(module, forward.setting)
        tiled.fuses_norms = forward.fuses_norms
        tiled.install()
        mark_leaf(module)
        retiled.append(tiled)
    return retiled


def adapted_since(model: nn.Module) -> int:
    """Count the tiled projections that an adapter has wrapped after they were tiled."""
    return sum(
        name.endswith(".base_layer") and isinstance(module.__dict__.get("forward"), TiledRows)
        for name, module in model.named_modules()
    )


def describe_rows(rows: Sequence[Rows]) -> str:
    """``"33 norms and 128 projections"``, or ""."""
    norms = sum(row.is_norm for row in rows)
    counts = [(norms, "norm"), (len(rows) - norms, "projection")]
    return " and ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count)
