"""Split a call's arguments along tokens, and assemble each tile's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor


def by_position(function: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, with the first parameter of ``function`` by position."""
    bound = len(function.args) if isinstance(function, partial) else int(isinstance(function, MethodType))
    function = function.func if isinstance(function, partial) else getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount <= bound or code.co_varnames[bound] not in kwargs:
        return (), dict(kwargs)
    others = dict(kwargs)
    return (others.pop(code.co_varnames[bound]),), others


class SplitArguments:
    """The arguments of one call, of which some are split along tokens.

    Attributes:
        arguments: all of them by position or name.
        split: the arguments that are split, each with what :meth:`given_back` needs to restore its layout.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.arguments: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        self.split: dict[int | str, Any] = {}

    def rows(self, value: Tensor, layout: Any) -> Tensor:
        """Return a whole tensor in the layout in which it is split."""
        raise NotImplementedError

    def given_back(self, tile: Tensor, layout: Any) -> Tensor:
        """Return a tile in the layout of the module's argument."""
        raise NotImplementedError

    @property
    def names(self) -> list[int | str]:
        """The arguments that are split."""
        return list(self.split)

    @property
    def whole(self) -> list[int | str]:
        """The tensors that every tile gets whole, by name."""
        return [name for name, value in self.arguments.items() if isinstance(value, Tensor) and name not in self.split]

    def constants(self) -> list[Tensor]:
        """The tensors that every tile gets whole."""
        return [self.arguments[name] for name in self.whole]

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies a call besides its tensors: their positions, and all other arguments."""
        settings = [(name, repr(value)) for name, value in self.arguments.items() if not isinstance(value, Tensor)]
        return (tuple(self.split.items()), tuple(self.whole), tuple(settings))

    def take(self) -> list[Tensor]:
        """The tensors to split. They are released here, since the function that runs a tile lives until backward."""
        tensors = [self.rows(self.arguments[name], layout) for name, layout in self.split.items()]
        self.arguments |= dict.fromkeys(self.split)
        return tensors

    def fill(
        self, tiles: Sequence[Tensor], constants: Sequence[Tensor] | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, with tiles, and ``constants`` if given, in place of the whole tensors."""
        filled = self.arguments | dict(zip(self.whole, constants or [], strict=False))
        for (name, layout), tile in zip(self.split.items(), tiles, strict=True):
            filled[name] = self.given_back(tile, layout)
        kwargs = {name: value for name, value in filled.items() if isinstance(name, str)}
        return [value for name, value in filled.items() if not isinstance(name, str)], kwargs


class TokenArguments(SplitArguments):
    """Splits the first tensor, and every other tensor with the same leading dimensions.

    A tensor of exactly the leading shape (one number per token) is split too, unless it could also be one number per
    feature. All other arguments are passed to every tile.

    Attributes:
        why_whole: why the call cannot be split, or "": a tensor with one row per sequence fits no tile.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(args, kwargs)
        self.why_whole = ""
        x: Tensor | None = None
        for name, value in self.arguments.items():
            if not isinstance(value, Tensor) or (x is None and value.dim() < 2):
                continue
            if x is None:
                x = value
            leading = x.shape[:-1]
            flat = value.shape == leading and (value.dim() > 1 or value.shape[0] != x.shape[-1])
            if flat or (value.dim() > 1 and value.shape[:-1] == leading):
                self.split[name] = flat
            elif value.dim() > 1 and len(leading) > 1 and value.shape[0] == leading[0] > 1:
                self.why_whole = (
                    f"argument {name!r} has shape {tuple(value.shape)}, but hidden states have {tuple(x.shape)}: "
                    "expected one row per token, or one for the whole batch; expand it to one row per token, or "
                    "use batch 1"
                )

    def rows(self, value: Tensor, flat: bool) -> Tensor:
        return value.unsqueeze(-1) if flat else value

    def given_back(self, tile: Tensor, flat: bool) -> Tensor:
        return tile.squeeze(-1) if flat else tile
