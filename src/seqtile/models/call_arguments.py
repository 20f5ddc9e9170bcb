"""Which arguments of a call are split along tokens, and how a tile's arguments are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor


def by_position(function: Any, words: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, with the first parameter of ``function`` by position."""
    bound = len(function.args) if isinstance(function, partial) else int(isinstance(function, MethodType))
    function = function.func if isinstance(function, partial) else getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount <= bound or code.co_varnames[bound] not in words:
        return (), dict(words)
    rest = dict(words)
    return (rest.pop(code.co_varnames[bound]),), rest


class Places:
    """Which arguments are split along tokens: the first tensor, and every other with the same leading dimensions.

    A tensor of exactly the leading shape (one number per token) is split too, unless it could as well be one number
    per feature; all else is passed through.

    Attributes:
        names: the arguments that are split.
        why_whole: why the call cannot be split at all, or "": a tensor has one row per element of the batch.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.names: list[int | str] = []
        self.tensors: list[Tensor] = []
        self.flat: list[bool] = []
        self.why_whole = ""
        self.arguments: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        x: Tensor | None = None
        for name, value in self.arguments.items():
            if not isinstance(value, Tensor) or (x is None and value.dim() < 2):
                continue
            if x is None:
                x = value
            leading = x.shape[:-1]
            flat = value.shape == leading and (value.dim() > 1 or value.shape[0] != x.shape[-1])
            if flat or (value.dim() > 1 and value.shape[:-1] == leading):
                self.names.append(name)
                self.flat.append(flat)
                self.tensors.append(value.unsqueeze(-1) if flat else value)
            elif value.dim() > 1 and len(leading) > 1 and value.shape[0] == leading[0] > 1:
                self.why_whole = (
                    f"argument {name!r} has shape {tuple(value.shape)} beside hidden states {tuple(x.shape)}, neither "
                    "one row per token nor the same for the whole batch; repeat it for every token, or call with "
                    "batch 1"
                )
        split = set(self.names)
        self.whole = [name for name, value in self.arguments.items() if isinstance(value, Tensor) and name not in split]

    def take(self) -> list[Tensor]:
        """The tensors to split; nothing here holds them any longer, since what runs a tile lives until backward."""
        tensors, self.tensors = self.tensors, []
        for name in self.names:
            self.arguments[name] = None
        return tensors

    def constants(self) -> list[Tensor]:
        """The tensors that every tile gets whole."""
        return [self.arguments[name] for name in self.whole]

    @property
    def key(self) -> tuple[Any, ...]:
        """What else tells one call from another: where its tensors are, and all that is none."""
        others = tuple((name, value) for name, value in self.arguments.items() if not isinstance(value, Tensor))
        return (tuple(self.names), tuple(self.flat), tuple(self.whole), tuple(map(repr, others)))

    def fill(
        self, tiles: Sequence[Tensor], constants: Sequence[Tensor] | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, with tiles, and ``constants`` if given, in place of the whole tensors."""
        filled = dict(self.arguments)
        for name, tile, flat in zip(self.names, tiles, self.flat, strict=True):
            filled[name] = tile.squeeze(-1) if flat else tile
        filled.update(zip(self.whole, constants or [], strict=False))
        words = {name: value for name, value in filled.items() if isinstance(name, str)}
        return [value for name, value in filled.items() if not isinstance(name, str)], words
