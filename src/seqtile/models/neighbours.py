"""What stands right before and right after a block in its decoder layer, read from the layer's own source.

A norm or a dropout after the MLP needs the MLP's output, so a layer checkpoint's recompute would run the whole block
for it. Inside the tile it costs one more product instead (12 units, not 14). Reading the ``forward`` of the layer tells
which child follows, whatever its name: ``h = self.mlp(h)`` and then ``h = self.NORM(h)``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from seqtile.engines.zero3 import whole_shape


@dataclass(frozen=True)
class Neighbours:
    """Children of a layer that run on the block's own variable, in the order in which they are called.

    Attributes:
        before: name of the norm whose output only the block reads, or "".
        members: the block itself, or the linear layers and the activation of an inline block.
        after: name of the norm or dropout module that is the only reader of the block's output, or "".
        dropout: attribute that holds the probability of a functional dropout after the block, or "".
    """

    before: str = ""
    members: tuple[str, ...] = ()
    after: str = ""
    dropout: str = ""


def find_neighbours(layer: nn.Module, name: str) -> Neighbours:
    """Neighbours of the child ``name`` of ``layer``; empty where the source does not show them plainly.

    Plainly: every call of the block in the source has the same neighbours, and neither block nor neighbour is read
    anywhere else.
    """
    alone = Neighbours(members=(name,))
    seen: list[Neighbours] = []
    for body in _bodies(type(layer)):
        for position, statement in enumerate(body):
            call = _assigned_call(statement)
            if call is None or _child_called(call[1]) != name:
                continue
            target, node = call
            before = ""
            argument = node.args[0]
            if isinstance(argument, ast.Call):
                before = _child_called(argument)
            elif position and isinstance(argument, ast.Name):
                previous = _assigned_call(body[position - 1])
                if previous and previous[0] == argument.id == target:
                    before = _child_called(previous[1])
            after, dropout = _follower(body[position + 1 :], target)
            seen.append(Neighbours(_only(layer, before), (name,), _only(layer, after), dropout))
    reads = _reads(type(layer))
    if reads is None or not seen or len(set(seen)) > 1 or reads.count(name) != len(seen) or _calls_itself(layer, reads):
        return alone
    near = seen[0]
    before, after = (part if reads.count(part) == len(seen) else "" for part in (near.before, near.after))
    return Neighbours(before, near.members, after, near.dropout)


def _calls_itself(layer: nn.Module, reads: list[str]) -> bool:
    """Whether the forward uses methods of its class, which may read any child."""
    return any(inspect.isroutine(getattr(type(layer), name, None)) for name in reads)


def find_inline(layer: nn.Module, widths: Mapping[str, tuple[int, int] | None]) -> Neighbours | None:
    """An MLP whose linear layers are children of the decoder layer and are called one after another (OPT)."""
    linear = {name: wide for name, wide in widths.items() if wide is not None}
    if not any(
        one[0] == two[1] and one[1] == two[0] and one[0] != one[1] for one in linear.values() for two in linear.values()
    ):
        return None
    for body in _bodies(type(layer)):
        for position in range(len(body)):
            members: list[str] = []
            variable = ""
            end = position
            for end in range(position, len(body)):
                call = _assigned_call(body[end])
                child = _child_called(call[1]) if call else ""
                argument = call[1].args[0] if call and child else None
                if not call or not isinstance(argument, ast.Name) or argument.id != call[0]:
                    break
                if not _position_wise_child(layer, child, linear) or (variable and call[0] != variable):
                    break
                members.append(child)
                variable = call[0]
            while members and members[0] not in linear:
                members.pop(0)
            first = linear.get(members[0]) if members else None
            if first is None or linear.get(members[-1]) != (first[1], first[0]) or len(members) < 2:
                continue
            after, dropout = _follower(body[end:], variable)
            after = _only(layer, after)
            reads = _reads(type(layer)) or []
            if any(reads.count(name) != 1 for name in members) or _calls_itself(layer, reads):
                return None
            return Neighbours("", tuple(members), after if reads.count(after) == 1 else "", dropout)
    return None


def _position_wise_child(layer: nn.Module, name: str, linear: Mapping[str, object]) -> bool:
    child = getattr(layer, name, None)
    if name in linear:
        return True
    return callable(child) and (not isinstance(child, nn.Module) or not any(True for _ in child.parameters()))


def _only(layer: nn.Module, name: str) -> str:
    """``name`` if it is a norm or a dropout of the layer, by its shape: no parameter of two dimensions, no children."""
    child = getattr(layer, name, None) if name else None
    if not isinstance(child, nn.Module) or any(True for _ in child.children()):
        return ""
    return name if all(len(whole_shape(p)) == 1 for p in child.parameters()) else ""


@functools.cache
def _forward_source(layer_class: Any) -> ast.Module | None:
    """The class's forward; None where the source is not at hand, uses ``super()`` or sets attributes of ``self``."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(layer_class.forward)))
        tree = ast.parse(source)
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "super":
            return None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _self_attribute(node):
            return None
    return tree


def _reads(layer_class: Any) -> list[str] | None:
    """Every ``self.NAME`` that the forward reads, as often as it does; None where the source does not tell."""
    tree = _forward_source(layer_class)
    if tree is None:
        return None
    return [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _self_attribute(node)]


def _bodies(layer_class: Any) -> tuple[list[ast.stmt], ...]:
    """Every list of statements in the class's forward."""
    tree = _forward_source(layer_class)
    if tree is None:
        return ()
    lists = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse")]
    return tuple(body for body in lists if isinstance(body, list))


def _assigned_call(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """(variable, call) of ``variable = call(one argument)``."""
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.value, ast.Call)
    ):
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or len(call.args) != 1 or call.keywords:
        return None
    return target.id, call


def _child_called(call: ast.Call) -> str:
    """``NAME`` of ``self.NAME(one argument)``, else ""."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr if len(call.args) == 1 and not call.keywords else ""
    return ""


def _follower(rest: list[ast.stmt], variable: str) -> tuple[str, str]:
    """(module, dropout attribute) of the one call that reads ``variable`` next, if the statement rebinds it."""
    if not rest or not isinstance(rest[0], ast.Assign) or not variable:
        return "", ""
    statement = rest[0]
    rebinds = isinstance(statement.targets[0], ast.Name) and statement.targets[0].id == variable
    reads = [n for n in ast.walk(statement.value) if isinstance(n, ast.Name) and n.id == variable]
    if not rebinds or len(reads) != 1:
        return "", ""
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call) and node.args and node.args[0] is reads[0]:
            if child := _child_called(node):
                return child, ""
            words = {keyword.arg: keyword.value for keyword in node.keywords}
            share, training = words.get("p"), words.get("training")
            plain = set(words) == {"p", "training"} and len(node.args) == 1
            if (
                plain
                and ast.unparse(node.func).endswith("functional.dropout")
                and _self_attribute(training) == "training"
            ):
                return "", _self_attribute(share)
    return "", ""


def _self_attribute(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""
