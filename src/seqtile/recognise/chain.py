"""The chain that runs in one tile: a block, alone or with the norm before it and what follows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import MODULES

ViewOf = Callable[[nn.Module], Any]
"""Returns the module to call for a module: itself, or its copy without memory."""


class Arguments(Protocol):
    """The arguments of a call, in which tiles replace the split tensors."""

    @property
    def names(self) -> Sequence[int | str]: ...

    @property
    def key(self) -> tuple[Any, ...]: ...

    def fill(
        self, tiles: Sequence[Tensor], constants: Sequence[Tensor] | None = None
    ) -> tuple[list[Any], dict[str, Any]]: ...


def itself(module: nn.Module) -> Any:
    """The identity, for a chain that runs on the model itself and not on views."""
    return module


@dataclass(frozen=True)
class Chain:
    """Modules and functions that run one after another on hidden states, all of them on one tile.

    Attributes:
        members: the block's modules and functions by name; a number is the probability of a functional dropout.
        kind: ``"block"``: one module, called without its hooks; ``"experts"``: likewise, of routed experts;
            ``"inline"``: several in a row; ``"pair"``: two modules, of which the second takes another tensor too.
        before: a norm, or None.
        after: a norm or dropout, or None.
        dropout: probability of a functional dropout after the members, 0 without.
        closing: the norm of the sum of input and output, or None.
        training: whether functional dropouts drop.
        arguments: the arguments of a lone block that was called with more than hidden states, or None.
        call: key of that call.
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
        steps = (self.before, *[member for _, member in self.members], self.after, self.closing)
        return [step for step in steps if isinstance(step, nn.Module)]

    @property
    def functions(self) -> list[Any]:
        """The members that are neither a module nor a number."""
        return [member for _, member in self.members if not isinstance(member, (nn.Module, int, float))]

    @property
    def called(self) -> nn.Module | None:
        """The lone block whose ``forward`` is called without its hooks."""
        block = self.members[0][1]
        return block if self.kind in ("block", "experts") and isinstance(block, nn.Module) else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Distinguishes chains of the same modules."""
        has_norms = [norm is not None for norm in (self.before, self.after, self.closing)]
        probabilities = [member for _, member in self.members if isinstance(member, (int, float))]
        return (self.kind, len(self.members), *has_norms, *probabilities, self.dropout, self.training, *self.call)

    def run(self, tensors: Sequence[Tensor], view: ViewOf = itself, call: Callable[..., Any] | None = None) -> Any:
        """Run the chain on ``tensors``.

        Args:
            tensors: ``[..., D]`` each.
            view: returns the callable for each module.
            call: replaces a lone block's forward.
        """
        x = tensors[0]
        if self.arguments is not None:
            count = len(self.arguments.names)
            args, kwargs = self.arguments.fill(tensors[:count], tensors[count:])
            return view(self.members[0][1]).forward(*args, **kwargs)
        h = x if self.before is None else view(self.before)(x)
        if self.kind == "pair":
            (_, first), (_, second) = self.members
            return view(second)(view(first)(h), tensors[-1])
        for _, member in self.members:
            if isinstance(member, (int, float)):
                h = F.dropout(h, float(member), self.training)
            elif self.kind in ("block", "experts"):
                h = (call or view(member).forward)(h, *tensors[1:])
            else:
                h = (view(member) if isinstance(member, nn.Module) else member)(h)
        h = h if self.after is None else view(self.after)(h)
        h = F.dropout(h, self.dropout, self.training) if self.dropout else h
        return h if self.closing is None else view(self.closing)(x + h)

    def parts(self, view: ViewOf = itself) -> Mapping[str, Any]:
        """Names for formulas: the block's children and attributes, or the members of an inline block."""
        if self.kind == "inline":
            return {name: view(value) if isinstance(value, nn.Module) else value for name, value in self.members}
        block = view(self.members[0][1])
        functions = {
            name: value for name, value in block.__dict__.items()
            if callable(value) and name != "forward" and name != "extra_repr" and not name.startswith("_")
        }  # fmt: skip
        return {**functions, **block.__dict__[MODULES]}

    def why_not_fusable(self) -> str:
        """Why the fused operator cannot run a chain of this kind, or ""."""
        if self.kind == "pair":
            return "its norm reads another tensor beside the MLP's output"
        if self.closing is not None:
            return "its norm reads the residual beside the MLP's output"
        if self.arguments is not None:
            return "it was called with more than hidden states"
        if any(isinstance(member, (int, float)) and member for _, member in self.members) and self.training:
            return "a dropout stands between its linear layers"
        return ""


def required_arguments(module: nn.Module) -> list[str]:
    """The required arguments of a forward; Bloom's and MPT's MLPs take the residual too."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in positional
    ]


def inputs_of(module: nn.Module) -> int:
    """How many of the required arguments a trace passes: hidden states, and at most one more."""
    return max(1, min(2, len(required_arguments(module))))
