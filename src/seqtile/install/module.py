"""Tile a user's position-wise module along a given dimension."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import tree_map
from seqtile._errors import UserError, expect_module
from seqtile.blocks.call_arguments import SplitArguments
from seqtile.blocks.install_blocks import Block, refuse_tiled_by_unsloth, with_free_memory
from seqtile.blocks.instance import Setting, TiledForward, logger, mode_of
from seqtile.engines.granularity import refuse_wrapped
from seqtile.engines.zero3 import mark_leaf
from seqtile.install.apply import replacing_all
from seqtile.install.report import Report
from seqtile.options import TilingOptions
from seqtile.recognise.chain import Chain, inputs_of
from seqtile.recognise.proof import Mode, Proof, for_training, prove
from seqtile.recognise.widths import linear_widths


def tile_module(
    module: nn.Module,
    *,
    dim: int = -2,
    tile: int | str = "auto",
    path: str = "auto",
    keep: float | str = 0.0,
) -> Report:
    """Run one position-wise module over tiles of tokens, in place.

    The caller guarantees that the module is position-wise; one whose trace mixes tokens or keeps a state is refused.

    Replaces ``module(x)`` by ``torch.cat([module(tile) for tile in x.split(size, dim)], dim)``, each tile recomputed
    in backward, with one gradient per weight. :func:`seqtile.undo` removes it; a later :func:`seqtile.apply` on the
    model around it does not change it.

    Args:
        module: maps tensors to a tensor, or a nest of them, with the same tokens along ``dim``.
        dim: the token dimension of its inputs and outputs. The first tensor argument gives the number of tokens. Other
            arguments with as many tokens there are split too, if they have as many dimensions or share its leading
            dimensions up to ``dim`` (a ``[B, T]`` mask beside ``[B, T, D]`` and ``dim=1``). The rest is not split.
        tile: as for :func:`seqtile.apply`.
        path: as for :func:`seqtile.apply`; the fused operator where the module is an MLP of plain linear layers.
        keep: as for :func:`seqtile.apply`.

    Returns:
        Report: what was tiled: one block.

    Cost:
        As :func:`seqtile.apply`: without an activation checkpoint around it the module's products run once more, but
        for the last one. Where rows along other dimensions depend on each other, or that could not be probed, and
        such a dimension is before ``dim`` and longer than 1: one copy of the input and one of the output.

    Raises:
        UserError: a wrong argument, or a module whose trace mixes tokens or keeps a state. A module that cannot be
            traced is tiled, and the report marks it as not verified.
        ValueError: in a call: it is unclear whether a tensor argument has one row per token, or an output has not.
    """
    expect_module(module, "tile_module")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise UserError(
            "dim.wrong-type",
            f"got dim={dim!r} of type {type(dim).__name__}, expected an int, the token dimension of the inputs",
        )
    options = TilingOptions(tile=tile, path=path, keep=keep)
    rule, keeping = options.tile_rule, options.keep_rule(1)
    refuse_wrapped(module)
    refuse_tiled_by_unsloth(module)
    name = type(module).__name__
    hidden, widest = _widths(module)
    along = _proof(module, _dims_along(dim, hidden), ("along", dim))
    if along.why_not and along.refuted:
        raise UserError(
            "dim.not-tileable",
            f"cannot tile {name} along dim={dim}: {along.why_not}; pass the token dimension, or leave it untiled",
        )
    rows = _proof(module, ("b", "s", hidden)) if dim != -1 else None
    by_rows = rows is not None and not rows.why_not
    setting = Setting(rule, with_free_memory(keeping, module, 1), path, hidden, widest, name=name, trusted=True)
    forward = TiledModule(module, setting, dim, by_rows)
    not_fused = "its rows may depend on each other"
    if by_rows and rows is not None:
        weights: Any = rows.formula
        if not isinstance(weights, str):
            weights = weights.weights(Chain(((name, module),)), _dtype(module))
        not_fused = weights if isinstance(weights, str) else ""
    forward.falls_back = not not_fused and path != "generic"
    if path == "fused" and not forward.falls_back:
        raise UserError("path.fused-unsupported", f"path='fused' does not support {name}: {not_fused}; use path='auto'")
    with replacing_all(module):
        forward.install()
        forward.check()
        mark_leaf(module)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    shape = setting.shape(torch.empty(0, dtype=_dtype(module), device="meta"), trained, forward.falls_back)
    shape = replace(shape, device_type=next((p.device.type for p in module.parameters()), "cpu"))
    why = along.how or f"not verified: trusted by the caller ({along.why_not})"
    path = "fused" if forward.falls_back else "generic"
    block = Block(name, name, "module", path, hidden, widest, (), rule.describe(shape), why, not_fused, False)
    report = Report((block,), (), 1, setting.keep, weakref.ref(module))
    logger.info("%s", report)
    return report


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)


def _dims_along(dim: int, hidden: int) -> tuple[int | str, ...]:
    """Three dimensions with the tokens in ``dim``; the features are last, or second where the tokens are last."""
    sizes: list[int | str] = [3, hidden, 5] if dim in (-1, 2) else [3, 3, hidden]
    if -3 <= dim < 3:
        sizes[dim] = "s"
    return tuple(sizes)


def _proof(module: nn.Module, dims: tuple[int | str, ...], call: tuple[Any, ...] = ()) -> Proof:
    """Prove the module before its first call, for an input of these dimensions."""
    if "s" not in dims:
        return Proof("it was not called yet", False, None, "")
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
    mode = Mode(((dims, _dtype(module)),) * inputs_of(module), device)
    with for_training(module):
        return prove(Chain(((type(module).__name__, module),), call=call), mode, trusted=True)


def _widths(module: nn.Module) -> tuple[int, int]:
    """(width of the input, widest tensor per token), read from the weights; (1, 1) without weights."""
    linears = [widths for submodule in module.modules() if (widths := linear_widths(submodule)) is not None]
    shapes = linears or [(p.shape[1], p.shape[0]) if p.dim() > 1 else (p.numel(),) * 2 for p in module.parameters()]
    return (shapes[0][0], max(max(shape) for shape in shapes)) if shapes else (1, 1)


class TiledModule(TiledForward):
    """``forward`` of a module that its owner called position-wise along one dimension."""

    def __init__(self, module: nn.Module, setting: Setting, dim: int, by_rows: bool) -> None:
        super().__init__(module, setting)
        self.dim, self.by_rows = dim, by_rows

    owner = "tile_module"

    def note(self) -> str:
        return f"{super().note()} along dim={self.dim}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        places = _Along(self.setting.name, self.dim, args, kwargs)
        if self.by_rows and places.features_last:
            return super().__call__(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.refuse_copies()
        original, tensors = self.original, places.take()
        if not tensors:
            return original(*args, **kwargs)
        shapes: list[torch.Size] = []

        def call(tiles: list[Tensor]) -> Any:
            tile_args, tile_kwargs = places.fill(tiles)
            shapes.clear()
            return tree_map(
                lambda leaf: places.as_rows(leaf, len(tiles[0]), shapes), original(*tile_args, **tile_kwargs)
            )

        width = tensors[0].numel() // max(len(tensors[0]), 1)
        lanes = max(1, width // self.setting.hidden)
        constants = places.constants()
        mode = mode_of([tensor[None] for tensor in tensors], constants)
        split = tuple((("s", tensor.shape[1]), tensor.dtype) for tensor in tensors)  # rows of one token each
        mode = replace(mode, inputs=split + mode.inputs[len(tensors) :])
        chain = Chain(((self.setting.name, self.module),), arguments=places, call=places.key)
        result = self.run(chain, tensors, call, lambda: original(*args, **kwargs), lanes, mode)
        if not shapes:  # it ran untiled
            return result
        output_shapes = iter(list(shapes))
        return tree_map(
            lambda leaf: (
                places.given_back(leaf, next(output_shapes)).contiguous() if isinstance(leaf, Tensor) else leaf
            ),
            result,
        )


class _Along(SplitArguments):
    """Split are the tensors with tokens in one dimension, each as ``[tokens, rest]``."""

    features_last = True
    dim = 0

    def __init__(self, name: str, dim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args, kwargs)
        self.name = name
        x = next((value for value in self.arguments.values() if isinstance(value, Tensor) and value.dim() > 0), None)
        if x is None:
            return
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"{name} is tiled along dim={dim}, but got a first tensor of shape {tuple(x.shape)}")
        self.dim = dim % x.dim()
        self.features_last = self.dim < x.dim() - 1
        for key, value in self.arguments.items():
            if isinstance(value, Tensor) and self._has_tokens(key, value, x):
                self.split[key] = value.shape[: self.dim] + value.shape[self.dim + 1 :]

    @property
    def key(self) -> tuple[Any, ...]:
        return ("along", self.dim, *super().key)

    def rows(self, value: Tensor, shape: torch.Size) -> Tensor:
        value = value.movedim(self.dim, 0)
        return value.reshape(len(value), shape.numel())

    def given_back(self, tile: Tensor, shape: torch.Size) -> Tensor:
        return tile.reshape(len(tile), *shape).movedim(0, self.dim)

    def _has_tokens(self, key: int | str, value: Tensor, x: Tensor) -> bool:
        dim, same = self.dim, value.dim() == x.dim()
        if value.dim() <= dim or (same and value.shape[dim] == 1 != x.shape[dim]):
            return False
        leads = value.shape[: dim + 1] == x.shape[: dim + 1]
        if value is x or (same and value.shape[dim] == x.shape[dim]):
            return True
        may_be_features = value.dim() == 1 and x.dim() > 1 and value.shape[0] == x.shape[-1]
        if same or (leads and may_be_features):
            raise ValueError(
                f"cannot tile {self.name} along dim={dim}: argument {key!r} has shape {tuple(value.shape)} and the "
                f"first tensor {tuple(x.shape)}, so it is unclear whether it has one row per token; give it as many "
                "dimensions, with size 1 where it is the same for every token"
            )
        return leads

    def as_rows(self, leaf: Any, tokens: int, shapes: list[torch.Size]) -> Any:
        """One output of a tile as ``[tokens, rest]``; its ``rest`` is added to ``shapes``."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() <= self.dim or leaf.shape[self.dim] != tokens:
            raise ValueError(
                f"cannot tile {self.name}: for {tokens:,} tokens along dim={self.dim} it returned shape "
                f"{tuple(leaf.shape)}, expected one row per token; it is not position-wise, so call seqtile.undo on "
                "it"
            )
        leaf = leaf.movedim(self.dim, 0)
        shapes.append(leaf.shape[1:])
        return leaf.reshape(tokens, leaf.shape[1:].numel())
