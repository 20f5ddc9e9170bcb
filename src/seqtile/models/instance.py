"""The objects that stand in for ``forward`` on one instance, and how they come off again.

They live in the instance's ``__dict__``: the class is untouched, no parameter is renamed, nothing enters
``state_dict``. They refer to their module weakly and find it again after ``copy.deepcopy`` and pickling.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from seqtile.ops.generic import run_in_tiles
from seqtile.tiling import BlockShape, TileRule

logger = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Installed:
    """Base of the stand-ins: puts itself into an instance, remembers what was there, and restores it."""

    def __init__(self, module: nn.Module, rule: TileRule, hidden: int, intermediate: int) -> None:
        self._module = weakref.ref(module)
        self.rule, self.hidden, self.intermediate = rule, hidden, intermediate
        self.before = {name: module.__dict__[name] for name in ("forward", "extra_repr") if name in module.__dict__}

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
        for name in ("forward", "extra_repr"):
            self.module.__dict__.pop(name, None)
        self.module.__dict__.update(self.before)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the instance had: its own if one was set before, else its class's."""
        return self.before.get("forward") or type(self.module).forward.__get__(self.module)

    def shape(self, x: Tensor, weights: Mapping[str, Tensor]) -> BlockShape:
        """What the tile rule needs to know, from what the block is at this call."""
        values = list(weights.values())
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            itemsize=x.element_size(),
            weight_numel=sum(weight.numel() for weight in values),
            weight_itemsize=min([weight.element_size() for weight in values] or [4]),
            device_type=x.device.type,
        )

    def note(self) -> str:
        return f"tile={self.rule}"


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
        original = self.original
        place = _Places(args, kwargs)
        if not place.names:
            return original(*args, **kwargs)

        def call(tiles: list[Tensor]) -> Any:
            filled, words = place.fill(args, kwargs, tiles)
            return original(*filled, **words)

        return run_block(self, [self.module], place.tensors, call)


def run_block(
    installed: Installed, parts: Sequence[nn.Module], tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]
) -> Any:
    """Run ``call`` on tiles of ``tensors``, with the weights of ``parts`` replaced where gradients are summed."""

    def weights() -> dict[str, Tensor]:
        return {
            f"{number}.{name}": weight
            for number, part in enumerate(parts)
            for name, weight in part.named_parameters()
            if weight.requires_grad
        }

    def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
        if not aliases:
            return call(list(tiles))
        return functional_call(_Bare(parts), dict(aliases), (call, list(tiles)))

    x = tensors[0]
    sizes = installed.rule.tile_sizes(x.shape[:-1].numel(), installed.shape(x, weights()))
    if not sizes:
        return call(list(tensors))
    return run_in_tiles(run, tensors, sizes, weights)


class _Bare(nn.Module):
    """The parts of a block under one roof, so that ``functional_call`` replaces their weights and runs no hook."""

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
        for name, value in [*enumerate(args), *kwargs.items()]:
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


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward: someone, an engine perhaps, listens to its calls."""
    return any(getattr(module, name) for name in _HOOKS)
