"""The objects that stand in for ``forward`` on one instance, and how they come off again.

They live in the instance's ``__dict__``: the class is untouched, no parameter is renamed, nothing enters
``state_dict``. They refer to their module weakly and find it again after ``copy.deepcopy`` and pickling.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.engines.flat import call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import unmark_leaf
from seqtile.models.fuse import fused_weights
from seqtile.ops.fused import FusedWeights, fused_mlp
from seqtile.ops.generic import run_in_tiles
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, KeepRule, TileRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """How one block is tiled.

    Attributes:
        rule: where the cuts are.
        keep: how many tiles keep gate and up.
        path: ``"auto"``, ``"fused"`` or ``"generic"``.
        hidden: width of the block's input.
        intermediate: width of its widest tensor per token.
        experts: whether it is a group of routed experts.
        name: qualified name of the block.
        layer: qualified name of the decoder layer around it, or "".
    """

    rule: TileRule
    keep: KeepRule
    path: str
    hidden: int
    intermediate: int
    experts: bool = False
    name: str = ""
    layer: str = ""

    def shape(self, x: Tensor, weights: Sequence[Tensor], fused: bool) -> BlockShape:
        """What the tile rule needs to know, from what the block is at this call."""
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            itemsize=x.element_size(),
            weight_numel=sum(weight.numel() for weight in weights),
            weight_itemsize=min([weight.element_size() for weight in weights] or [4]),
            device_type=x.device.type,
            live_widths=FUSED_WIDTHS if fused else LIVE_WIDTHS,
        )


class Installed:
    """Base of the stand-ins: puts itself into an instance, remembers what was there, and restores it."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        self._module = weakref.ref(module)
        self.setting = setting
        self.told: set[str] = set()
        self.before: dict[str, Any] = {
            name: module.__dict__[name] for name in ("forward", "extra_repr") if name in module.__dict__
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a tiled forward outlived its module"
        return module

    def install(self) -> None:
        self.module.__dict__["forward"] = self
        self.module.__dict__["extra_repr"] = _Note(self)

    def remove(self) -> None:
        """Put every attribute back as it was."""
        unmark_leaf(self.module)
        for name in ("forward", "extra_repr"):
            self.module.__dict__.pop(name, None)
        self.module.__dict__.update(self.before)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the instance had: its own if one was set before, else its class's."""
        return self.before.get("forward") or type(self.module).forward.__get__(self.module)

    def inside(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of everything that runs inside a tile, without the block itself."""
        return ((name, part) for name, part in self.module.named_modules() if name)

    def check(self) -> None:
        """Raise where an engine would gather weights at every tile."""
        if not torch.compiler.is_compiling():
            refuse_gathering_inside(self.inside(), block=self.setting.name, layer=self.setting.layer)

    def fused(self) -> FusedWeights | str:
        """The block's live weights for the fused operator, or why it runs the generic one."""
        raise NotImplementedError(f"{type(self).__name__} names no block; it is a base class")

    def run(self, parts: Sequence[nn.Module], tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
        """Run ``call`` on tiles of ``tensors``; ``parts`` hold the block's weights."""

        def weights() -> dict[str, Tensor]:
            return {
                f"{number}.{name}": weight
                for number, part in enumerate(parts)
                for name, weight in named_weights(part)
                if weight.requires_grad
            }

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            if not aliases:
                return call(list(tiles))
            return call_with_weights(_Bare(parts), aliases, (call, list(tiles)))

        x, setting = tensors[0], self.setting
        mlp = self._choose(len(tensors))
        tokens = x.shape[:-1].numel()
        shape = setting.shape(x, list(weights().values()), mlp is not None)
        sizes = setting.rule.tile_sizes(tokens, shape)
        if not sizes:
            return call(list(tensors))
        if mlp is None:
            return run_in_tiles(run, tensors, sizes, weights)
        return fused_mlp(x, mlp, sizes, keep=setting.keep.share(tokens, shape))

    def _choose(self, inputs: int) -> FusedWeights | None:
        """The fused operator's weights if it can run this call; says so, once, if it was asked for and cannot."""
        setting = self.setting
        if setting.path == "generic" or setting.experts or torch.compiler.is_compiling():
            return None
        mlp = self.fused() if inputs == 1 else f"it was called with {inputs} tensors"
        if isinstance(mlp, FusedWeights):
            return mlp
        if self.falls_back and mlp not in self.told:
            self.told.add(mlp)
            logger.warning("%s now runs the generic operator: %s", type(self.module).__name__, mlp)
        return None

    falls_back = False
    """Whether the report said "fused", so that running the generic operator is news."""

    def note(self) -> str:
        return f"tile={self.setting.rule}"


class _Note:
    """``extra_repr`` of a changed instance: what ``print(model)`` shows."""

    def __init__(self, installed: Installed) -> None:
        self.installed = installed

    def __call__(self) -> str:
        module = self.installed.module
        former = self.installed.before.get("extra_repr") or type(module).extra_repr.__get__(module)
        return ", ".join(part for part in (former(), self.installed.note()) if part)


class TiledForward(Installed):
    """``forward`` of one position-wise module, over tiles of tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        original = self.original
        place = _Places(args, kwargs)
        if not place.names:
            return original(*args, **kwargs)

        def call(tiles: list[Tensor]) -> Any:
            filled, words = place.fill(args, kwargs, tiles)
            return original(*filled, **words)

        return self.run([self.module], place.tensors, call)

    def fused(self) -> FusedWeights | str:
        return fused_weights(self.module)


class _Bare(nn.Module):
    """The parts of a block under one roof, so that a call replaces their weights and runs no hook."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules.update({str(number): part for number, part in enumerate(parts)})

    def forward(self, call: Callable[[list[Tensor]], Any], tiles: list[Tensor]) -> Any:
        return call(tiles)


class _Places:
    """Which arguments are split along tokens: the first tensor, and every other with the same leading dimensions.

    A tensor of exactly the leading shape (one number per token) is split too; all else is passed through.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.names: list[int | str] = []
        self.tensors: list[Tensor] = []
        self.flat: list[bool] = []
        leading: torch.Size | None = None
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            if not isinstance(value, Tensor) or (leading is None and value.dim() < 2):
                continue
            if leading is None:
                leading = value.shape[:-1]
            flat = value.shape == leading and value.dim() > 1
            if flat or (value.dim() > 1 and value.shape[:-1] == leading):
                self.names.append(name)
                self.flat.append(flat)
                self.tensors.append(value.unsqueeze(-1) if flat else value)

    def fill(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tiles: Sequence[Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with tiles in place of the whole tensors."""
        filled, words = list(args), dict(kwargs)
        for name, tile, flat in zip(self.names, tiles, self.flat, strict=True):
            value = tile.squeeze(-1) if flat else tile
            if isinstance(name, int):
                filled[name] = value
            else:
                words[name] = value
        return filled, words
