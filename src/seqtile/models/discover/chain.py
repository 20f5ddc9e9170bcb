"""What runs in one tile: a block, alone or with the norm before it and what follows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import MODULES
from seqtile.models.discover.formula import Formula
from seqtile.models.discover.live_weights import row_wise
from seqtile.ops.mlp import FusedWeights

ViewOf = Callable[[nn.Module], Any]
"""Gives what is called in a module's place: itself, or a copy of it without memory."""


class Arguments(Protocol):
    """Where the tensors of a call go among its arguments."""

    @property
    def names(self) -> Sequence[int | str]: ...

    @property
    def key(self) -> tuple[Any, ...]: ...

    def fill(
        self, tiles: Sequence[Tensor], constants: Sequence[Tensor] | None = None
    ) -> tuple[list[Any], dict[str, Any]]: ...


def itself(module: nn.Module) -> Any:
    """The module: what runs a chain on the model itself and not on a copy."""
    return module


@dataclass(frozen=True)
class Chain:
    """Modules and functions that run one after another on hidden states, all of them on one tile.

    Attributes:
        members: the block's modules and functions by name, a number for the probability of a functional dropout.
        kind: ``"block"``: one module, called without its hooks; ``"experts"``: the same of routed experts;
            ``"inline"``: several in a row; ``"pair"``: the second takes another tensor beside.
        before: a norm, or None.
        after: a norm or dropout, or None.
        dropout: probability of a functional dropout after the members, 0 without.
        closing: the norm of the sum of input and output, or None.
        training: whether functional dropouts drop.
        arguments: where the tensors go among the arguments of a lone block, if it was called with more than one.
        call: what tells that call from another.
    """

    members: tuple[tuple[str, Any], ...]
    kind: str = "block"
    before: nn.Module | None = None
    after: nn.Module | None = None
    dropout: float = 0.0
    closing: nn.Module | None = None
    training: bool = True
    arguments: Arguments | None = field(default=None, compare=False)
    call: tuple[Any, ...] = ()

    @property
    def modules(self) -> list[nn.Module]:
        parts = (("", self.before), *self.members, ("", self.after), ("", self.closing))
        modules = []
        for _, part in parts:
            if isinstance(part, nn.Module):
                modules.append(part)
        return modules

    @property
    def functions(self) -> list[Any]:
        """What is neither a module nor a number."""
        return [part for _, part in self.members if not isinstance(part, (nn.Module, int, float))]

    @property
    def called(self) -> nn.Module | None:
        """The lone block whose ``forward`` is called without its hooks."""
        block = self.members[0][1]
        return block if self.kind in ("block", "experts") and isinstance(block, nn.Module) else None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells chains of the same modules apart."""
        places = [isinstance(part, nn.Module) for part in (self.before, self.after, self.closing)]
        shares = [part for _, part in self.members if isinstance(part, (int, float))]
        return (self.kind, len(self.members), *places, *shares, self.dropout, self.training, *self.call)

    def run(self, tensors: Sequence[Tensor], view: ViewOf = itself, call: Callable[..., Any] | None = None) -> Any:
        """``tensors`` through the chain.

        Args:
            tensors: ``[..., D]`` each.
            view: what is called in each module's place.
            call: what is called in place of a lone block's forward.
        """
        x = tensors[0]
        if self.arguments is not None:
            count = len(self.arguments.names)
            filled, words = self.arguments.fill(tensors[:count], tensors[count:])
            return view(self.members[0][1]).forward(*filled, **words)
        h = x if self.before is None else view(self.before)(x)
        if self.kind == "pair":
            (_, first), (_, second) = self.members
            return view(second)(view(first)(h), tensors[-1])
        for _, part in self.members:
            if isinstance(part, (int, float)):
                h = F.dropout(h, float(part), self.training)
            elif self.kind in ("block", "experts"):
                h = (call or view(part).forward)(h, *tensors[1:])
            else:
                h = (view(part) if isinstance(part, nn.Module) else part)(h)
        h = h if self.after is None else view(self.after)(h)
        h = F.dropout(h, self.dropout, self.training) if self.dropout else h
        return h if self.closing is None else view(self.closing)(x + h)

    def parts(self, view: ViewOf = itself) -> Mapping[str, Any]:
        """What a formula may name: the block's children and attributes, or the members of an inline block."""
        if self.kind == "inline":
            return {name: view(part) if isinstance(part, nn.Module) else part for name, part in self.members}
        block = view(self.members[0][1])
        functions = {
            name: value for name, value in block.__dict__.items()
            if callable(value) and name != "forward" and name != "extra_repr" and not name.startswith("_")
        }  # fmt: skip
        return {**functions, **block.__dict__[MODULES]}

    def weights(self, formula: Formula, dtype: torch.dtype, view: ViewOf = itself) -> FusedWeights | str:
        """The live weights for the fused operator, or why it cannot run now."""
        parts = self.parts(view)
        norm = None if self.before is None else view(self.before)
        after: Any = None if self.after is None else view(self.after)
        mlp = formula.weights(parts, dtype)
        if isinstance(mlp, str):
            return mlp
        drop = self.dropout if self.training else 0.0
        if isinstance(self.after, nn.Dropout):
            drop, after = (float(self.after.p) if after.training else 0.0), None
        before = None if norm is None else row_wise(norm, formula.norms[0])
        behind = None if after is None else row_wise(after, formula.norms[1])
        if isinstance(before, str) or isinstance(behind, str):
            return before if isinstance(before, str) else str(behind)
        if drop and mlp.dropout:
            return "a dropout follows a block that ends with one"
        return replace(mlp, before=before, after=behind, dropout=mlp.dropout or drop)

    def fusable(self) -> str:
        """Why the fused operator cannot run this chain, by its kind, or ""."""
        if self.kind == "pair":
            return "its norm reads another tensor beside the MLP's output"
        if self.closing is not None:
            return "its norm reads the residual beside the MLP's output"
        if self.arguments is not None:
            return "it was called with more than hidden states"
        if any(isinstance(part, (int, float)) and part for _, part in self.members) and self.training:
            return "a dropout stands between its linear layers"
        return ""


def needed_words(module: nn.Module) -> list[str]:
    """The arguments that a forward cannot do without; Bloom's and MPT's MLPs take the residual too."""
    try:
        words = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [word.name for word in words if word.default is word.empty and word.kind in kinds]


def inputs_of(module: nn.Module) -> int:
    """How many of them are traced: hidden states, and one more."""
    return max(1, min(2, len(needed_words(module))))
