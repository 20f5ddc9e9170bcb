"""The state of each tensor in a trace: its token dimensions, and the expression that it holds.

A trace runs on sizes that are large primes (:mod:`seqtile.recognise.sizes`), so a shape tells which dimensions
hold tokens. An *expression* is the computation per token, with the layout of the token dimensions left out. Two blocks
that compute the same have equal expressions, whatever the shapes of their tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from seqtile.counting.watch import tensors_in
from seqtile.recognise.sizes import SIZES, NotPerToken, Untraceable, axes_in

MIXED = "one token's output depends on other tokens"

Atoms = tuple[str | int, ...]
"""Contents of a dimension with tokens: axes, and sizes of features flattened with them; ``()`` for features alone."""


@dataclass(frozen=True)
class Flow:
    """State of one tensor of a trace.

    Attributes:
        dims: contents of each of its dimensions.
        expr: number of the expression that it holds.
        summed: whether it is a sum over tokens, or linear in one, as a weight's gradient is.
        root: number of the tensor whose memory it shares.
    """

    dims: tuple[Atoms, ...]
    expr: int
    summed: bool = False
    root: int = -1

    @property
    def axes(self) -> list[str]:
        """The token axes in its dimensions."""
        return [atom for dim in self.dims for atom in dim if isinstance(atom, str)]


class Expressions:
    """Numbers for expressions: equal ones, and only those, have the same number in every trace of this process."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[Any, ...]] = {}

    def number(self, *key: Any) -> int:
        number = int.from_bytes(blake2b(repr(key).encode(), digest_size=12).digest())
        self.keys[number] = key
        return number

    def unique(self) -> int:
        """An expression that equals no other."""
        return self.number("unique", next(_COUNTER))

    def joined(self, name: str, operands: Iterable[Any]) -> int:
        """Number a sum or product of flows and plain numbers in any order; nested ones are flattened."""
        neutral, flat = ("number", 0.0 if name == "add" else 1.0), list[Any]()
        for operand in operands:
            key = self.keys[operand.expr] if isinstance(operand, Flow) else ("number", float(operand))
            nested = key[1] if key[0] == name else ((operand.expr,) if isinstance(operand, Flow) else (key,))
            flat += [entry for entry in nested if entry != neutral]
        flat.sort(key=repr)
        return flat[0] if len(flat) == 1 and isinstance(flat[0], int) else self.number(name, tuple(flat))

    def permuted(self, expr: int, order: Sequence[int]) -> int:
        key = self.keys[expr]
        if key[0] == "to":  # a cast is the same before and after
            return self.number("to", self.permuted(key[1], order), key[2])
        if key[0] == "permute" and len(key[2]) == len(order):
            expr, order = key[1], [key[2][index] for index in order]
        return expr if list(order) == sorted(order) else self.number("permute", expr, tuple(order))


_COUNTER = itertools.count()


@dataclass
class Call:
    """One operator call of a trace.

    Attributes:
        name: operator without its overload, ``"mul"``; of another library with its namespace, ``"lib::name"``.
        args: its arguments by the names of its schema.
        out: the tensors that it returned.
        flow: returns the state of a tensor.
        expressions: numbers the expressions of the trace.
        axes: the token axes of the trace.
        in_backward: whether the backward called it.
    """

    name: str
    args: dict[str, Any]
    out: list[Tensor]
    flow: Callable[[Tensor], Flow]
    expressions: Expressions
    axes: frozenset[str]
    in_backward: bool

    @property
    def first(self) -> Tensor:
        """The first tensor among the arguments."""
        return tensors_in(self.args.values())[0]

    def flows(self, *names: str) -> list[Flow]:
        """States of the tensors in these arguments, or in all."""
        return [self.flow(tensor) for tensor in tensors_in(self.args[name] for name in names or self.args)]

    def mixes(self, how: str) -> NotPerToken:
        return NotPerToken(f"{MIXED}: {self.name} {how}")

    def dims(self, out: Tensor) -> tuple[Atoms, ...]:
        """Contents of each dimension of an output, by its sizes; as in the inputs where two orders are possible."""
        dims: list[Atoms] = []
        for size in out.shape:
            axes = axes_in(size)
            atoms: Atoms = tuple(axes)
            if axes and (len(axes) > 1 or size != SIZES[axes]):
                inputs = [(t, self.flow(t)) for t in tensors_in(self.args.values())]
                same = [d for t, flow in inputs for n, d in zip(t.shape, flow.dims, strict=True) if n == size]
                if len(set(same)) > 1:
                    raise self.mixes("joins two orders of them")
                if not same and size != math.prod(SIZES[axis] for axis in axes):
                    raise Untraceable("it puts tokens and features into one dimension")
                atoms = same[0] if same else atoms
            dims.append(atoms)
        return tuple(dims)

    def flow_of(self, out: Tensor, expr: int, summed: bool = False) -> Flow:
        flow = Flow(self.dims(out), expr, summed)
        if len(flow.axes) > len(set(flow.axes)):
            raise self.mixes("of every pair of them")
        return flow

    def expr(self, *besides: Any) -> int:
        """Number the operator and its arguments; a dimension counts among those without tokens, from the last."""
        return self.expressions.number(self.name, *(self._key(*argument) for argument in self.args.items()), *besides)

    def _key(self, name: str, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return ("expression", self.flow(value).expr)
        if isinstance(value, (list, tuple)):
            return tuple(self._key(name, entry) for entry in value)
        if name in ("dim", "dims") and isinstance(value, int):
            return ("dim", place_of(self.flow(self.first).dims, value))
        return (type(value), value)

    def is_sum(self, *linear: str, all_of_them: bool = False) -> bool:
        """Whether the result is a sum over tokens because an argument is, in which the operator is linear.

        Raises:
            NotPerToken: it takes such a sum in another argument, or joins it with tokens.
        """
        flows = self.flows()
        if not any(flow.summed for flow in flows):
            return False
        linear_flows = self.flows(*(name for name in linear if name in self.args)) if linear else []
        sums = [flow for flow in linear_flows if flow.summed]
        whole = len(sums) == len(linear_flows) if all_of_them else len(sums) == 1
        if not whole or len(sums) < sum(flow.summed for flow in flows) or any(f.axes for f in flows if not f.summed):
            raise self.mixes("of a sum over tokens and something else")
        return True


def features(tensor: Tensor, dims: Sequence[Atoms]) -> tuple[int, ...]:
    """Sizes of the dimensions without tokens; leading ones of size 1 change nothing and are left out."""
    sizes = [size for size, atoms in zip(tensor.shape, dims, strict=True) if not atoms]
    return tuple(itertools.dropwhile(lambda size: size == 1, sizes))


def place_of(dims: Sequence[Atoms], dim: int) -> int:
    """Index of a dimension among those without tokens, counted from the last, -1."""
    return -sum(not atoms for atoms in dims[dim % max(len(dims), 1) :])
