"""Records every operator of a trace and applies its rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import (
    ALL_TRUE,
    READ_NUMBER,
    READ_NUMBER_NAME,
    DataDependentOutputException,
    TorchDispatchMode,
    schema_of,
)
from seqtile.counting.watch import tensors_in
from seqtile.recognise.sizes import NoRule, NotPerToken, Untraceable, holds_tokens
from seqtile.recognise.token_flow import MIXED, Atoms, Call, Expressions, Flow, features
from seqtile.recognise.token_rules import TOKEN_RULES, literal, rule_for

_UNUSED = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "output_mask")
"""Arguments that change no value."""


class Recorder(TorchDispatchMode):
    """Records every operator of one trace, forward and backward.

    Args:
        expressions: numbers the expressions of the trace.
        axes: the token axes of the inputs.

    Attributes:
        draws: the random draws by their expression, each with how often it was made.
        operators: names of all operators.
        no_rule: the first operator without a rule.
        in_backward: whether the backward runs.
    """

    def __init__(self, expressions: Expressions, axes: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expressions, self.axes = expressions, axes
        self.draws: Counter[int] = Counter()
        self.operators: set[str] = set()
        self.no_rule: NoRule | None = None
        self.in_backward = False
        self._known: dict[int, tuple[Tensor, Flow]] = {}
        self._owners: dict[int, str] = {}

    def leaf(self, tensor: Tensor, dims: tuple[Atoms, ...], owner: str) -> None:
        """Register a weight, a buffer, an input or an upstream gradient by name."""
        self._add(tensor, Flow(dims, self.expressions.number("leaf", owner, tensor.dtype)))
        self._owners[id(tensor)] = owner

    def _add(self, tensor: Tensor, flow: Flow) -> None:
        self._known[id(tensor)] = tensor, replace(flow, root=flow.root if flow.root >= 0 else id(tensor))

    def flow(self, tensor: Tensor) -> Flow:
        if id(tensor) not in self._known:
            raise Untraceable(f"it reads a tensor {tuple(tensor.shape)} that is neither its weight nor its buffer")
        return self._known[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in tensors:
                self.flow(tensor)
        if (
            func in _CUTS
            and tensors[0].dim()
            and holds_tokens(tensors[0].shape[[*args, *kwargs.values(), 0][_CUTS[func]]])
        ):
            raise NotPerToken(f"{MIXED}: it cuts between them")  # into as many pieces as there are tokens
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if any(flow.axes or flow.summed for flow in map(self.flow, tensors)):
                raise NotPerToken("its forward depends on the values of its input") from None
            if tensors[0].dtype is not torch.bool or func is not READ_NUMBER:
                raise Untraceable("its forward depends on the value of a weight") from None
            self.operators.add(READ_NUMBER_NAME)
            # Checks that raise read values: "is one of them infinite?" (PEFT's VB-LoRA), "are all of them valid?".
            return self.expressions.keys[self.flow(tensors[0]).expr][0] == ALL_TRUE
        if func is READ_NUMBER:
            return result  # it reads a constant of the code: other tensors have no values here
        if tensors or tensors_in([result]):  # an operator without tensors reads dtypes
            self._record(func, args, kwargs, tensors_in([result]))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, out: list[Tensor]) -> None:
        schema = schema_of(func)
        name = schema.name.removeprefix("aten::")
        arguments = {
            argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
        }
        arguments |= dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        arguments = {key: value for key, value in arguments.items() if key not in _UNUSED}
        self.operators.add(name.rstrip("_"))
        if name != "slice" and any(type(value) is int and holds_tokens(value) for value in arguments.values()):
            raise NotPerToken(f"its forward computes with the number of tokens ({name})")
        rule = rule_for(func, name)
        written = [
            argument.name for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]  # fmt: skip
        read_arguments = {key: value for key, value in arguments.items() if key not in written or key == "self"}
        base = name if name in TOKEN_RULES else name.rstrip("_") if written else name
        call = Call(base, read_arguments, out, self.flow, self.expressions, self.axes, self.in_backward)
        try:
            if rule is None:
                given_axes = {axis for flow in call.flows() for axis in flow.axes}
                if not self.in_backward and any(given_axes - set(Flow(call.dims(leaf), 0).axes) for leaf in out):
                    raise call.mixes("is taken over them")
                raise NoRule(f"it uses {name}, which cannot be traced")
            flows = rule(call)
        except NoRule as error:  # continue: a later operator may refute it
            self.no_rule = self.no_rule or error
            flows = [Flow(call.dims(leaf), self.expressions.unique()) for leaf in out]
        if "bernoulli" in name or name == "native_dropout":
            self.draws[flows[0].expr] += 1
        views = not written and any(returned.alias_info is not None for returned in schema.returns)
        for target, flow in zip([arguments[key] for key in written] or out, flows, strict=True):
            if len(flow.dims) != target.dim():
                raise Untraceable(f"{name} gave an unexpected shape")
            if written:
                self._write(target, flow)
            else:
                root = self.flow(call.first).root if views and rule is not literal else -1
                self._add(target, replace(flow, root=root))

    def _write(self, target: Tensor, flow: Flow) -> None:
        root = self.flow(target).root
        if owner := self._owners.get(root):
            raise NotPerToken(f"its forward writes to {owner}")
        for key, (alias, alias_flow) in list(self._known.items()):
            if alias_flow.root == root and alias is not target:
                if flow.summed != alias_flow.summed:
                    raise NotPerToken("a sum over tokens is written beside them")
                # A view of the whole memory now holds the written expression; a view of a part gets one of its own.
                whole = alias.numel() == target.numel() and features(alias, alias_flow.dims) == features(
                    target, flow.dims
                )
                self._known[key] = alias, replace(alias_flow, expr=flow.expr if whole else self.expressions.unique())
        self._known[id(target)] = target, replace(flow, root=root)


_CUTS = {torch.ops.aten.split.Tensor: 2, torch.ops.aten.split_with_sizes.default: 2, torch.ops.aten.unbind.int: 1}
"""Operators that return a tensor for every piece, and the index of ``dim`` among their arguments."""
