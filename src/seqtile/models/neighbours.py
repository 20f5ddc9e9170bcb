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
from itertools import pairwise
from typing import Any

from torch import nn

from seqtile.engines.zero3 import whole_shape


@dataclass(frozen=True)
class Neighbours:
    """Children of a layer that run on the block's own variable, in the order in which they are called.

    Attributes:
        before: name of the norm whose output only the block reads, or "".
        members: the block itself; the linear layers, activation and dropouts of an inline block, where an attribute
            that is a number is the probability of a functional dropout; or the two halves of a pair.
        after: name of the norm or dropout module that is the only reader of the block's output, or "".
        dropout: attribute that holds the probability of a functional dropout after the block, or "".
        closing: name of the norm that reads the sum of an inline block's input and output and nothing else, or "".
    """

    before: str = ""
    members: tuple[str, ...] = ()
    after: str = ""
    dropout: str = ""
    closing: str = ""


Widths = tuple[int, int]


def find_neighbours(layer: nn.Module, name: str) -> Neighbours:
    """Neighbours of the child ``name`` of ``layer``; empty where the source does not show them plainly.

    Plainly: every call of the block in the source has the same neighbours, and neither block nor neighbour is read
    anywhere else.
    """
    alone = Neighbours(members=(name,))
    layer_class: Any = type(layer)
    tree = _source(layer_class)
    if tree is None:
        return alone
    seen: list[Neighbours] = []
    for body in _bodies(tree):
        for position, statement in enumerate(body):
            node = _call_of(statement, name)
            if node is None:
                continue
            call, before, after, dropout = _assigned_call(statement), "", "", ""
            argument = node.args[0]
            if isinstance(argument, ast.Call):
                before = _child_called(argument)
            elif call and position and isinstance(argument, ast.Name):
                previous = _assigned_call(body[position - 1])
                if previous and previous[0] == argument.id == call[0]:
                    before = _child_called(previous[1])
            if call and call[1] is node:
                after, dropout = _follower(tree, body[position + 1 :], call[0])
            seen.append(Neighbours(_only(layer, before), (name,), _only(layer, after), dropout))
    reads = _reads(tree)
    if not seen or len(set(seen)) > 1 or reads.count(name) != len(seen) or _calls_itself(layer, reads):
        return alone
    near = seen[0]
    before, after = (part if reads.count(part) == len(seen) else "" for part in (near.before, near.after))
    return Neighbours(before, near.members, after, near.dropout)


def find_norm_before(layer: nn.Module, name: str) -> str:
    """The norm that is called right before the child ``name`` and that nothing else reads: ``h = self.NORM(h)`` and
    then ``h, ... = self.NAME(..., h, ...)``; "" where the source does not show it plainly."""
    layer_class: Any = type(layer)
    tree = _source(layer_class)
    if tree is None:
        return ""
    reads, found = _reads(tree), []
    for body in _bodies(tree):
        for one, other in pairwise(body):
            if not isinstance(other, ast.Assign) or len(other.targets) > 1 or not isinstance(other.value, ast.Call):
                continue
            call, target = other.value, other.targets[0]
            if _self_attribute(call.func) != name:
                continue
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
            before = _assigned_call(one)
            variable = before[0] if before else ""
            named = [n for n in ast.walk(call) if isinstance(n, ast.Name) and n.id == variable]
            words = {word.arg: word.value for word in call.keywords}
            given = words.get("hidden_states") or (call.args[0] if call.args else None)
            rebound = isinstance(first, ast.Name) and first.id == variable
            if before and rebound and len(named) == 1 and given is named[0]:
                found.append(_only(layer, _child_called(before[1])))
    plain = len(found) == reads.count(name) == 1 and found[0] and reads.count(found[0]) == 1
    return found[0] if plain and not _calls_itself(layer, reads) else ""


def _calls_itself(layer: nn.Module, reads: list[str]) -> bool:
    """Whether the forward uses methods of its class, which may read any child."""
    return any(inspect.isroutine(getattr(type(layer), name, None)) for name in reads)


def looks_inline(widths: Mapping[str, Widths | None]) -> tuple[str, str] | None:
    """Two linear layers ``D -> F`` and ``F -> D`` among the children of a layer, which may be an MLP."""
    linear = {name: wide for name, wide in widths.items() if wide is not None}
    for one, (wide, inner) in linear.items():
        for other, turned in linear.items():
            if turned == (inner, wide) and wide < inner:
                return one, other
    return None


def find_inline(layer: nn.Module, widths: Mapping[str, Widths | None]) -> Neighbours | None:
    """An MLP whose linear layers are children of the decoder layer and are called one after another (OPT, BART)."""
    linear = {name: wide for name, wide in widths.items() if wide is not None}
    layer_class: Any = type(layer)
    tree = _source(layer_class)
    if tree is None or not looks_inline(widths):
        return None
    reads = _reads(tree)
    for body in _bodies(tree):
        for position in range(len(body)):
            variable, names, end = _chain(layer, body, position, linear)
            first = next((number for number, name in enumerate(names) if name in linear), len(names))
            last = next((n for n in range(first + 1, len(names)) if names[n] in linear), 0)
            if not last or linear[names[first]] != linear[names[last]][::-1]:
                continue
            members, rest = names[first : last + 1], names[last + 1 :]
            if any(reads.count(name) != 1 for name in members if _is_child(layer, name)) or _calls_itself(layer, reads):
                return None
            before = ""
            if position and first == 0 and (previous := _assigned_call(body[position - 1])):
                before = _child_called(previous[1]) if previous[0] == variable else ""
            after, dropout = _follower(tree, body[end:], variable)
            if rest:
                after, dropout = (rest[0], "") if _is_child(layer, rest[0]) else ("", rest[0])
            before, after = (part if _only(layer, part) and reads.count(part) == 1 else "" for part in (before, after))
            plain = first == 0 and not before and len(rest) <= 1 and position > 0
            closing = _closing(body[position - 1], body[end : end + 2], variable) if plain else ""
            closing = closing if _only(layer, closing) and reads.count(closing) == 1 else ""
            return Neighbours(before, tuple(members), after, dropout, closing)
    return None


def _closing(previous: ast.stmt, rest: list[ast.stmt], variable: str) -> str:
    """``NORM`` of ``r = v`` before the block and ``v = r + v``, ``v = self.NORM(v)`` right after it."""
    residual = _assigned_name(previous)
    if len(rest) < 2 or not residual or residual == variable or not isinstance(previous, ast.Assign):
        return ""
    total, norm = rest[0], _assigned_call(rest[1])
    if not isinstance(previous.value, ast.Name) or previous.value.id != variable or not isinstance(total, ast.Assign):
        return ""
    added = {ast.unparse(total.value)} & {f"{residual} + {variable}", f"{variable} + {residual}"}
    if not added or _assigned_name(total) != variable or norm is None or norm[0] != variable:
        return ""
    argument = norm[1].args[0]
    return _child_called(norm[1]) if isinstance(argument, ast.Name) and argument.id == variable else ""


def _chain(
    layer: nn.Module, body: list[ast.stmt], position: int, linear: Mapping[str, Widths]
) -> tuple[str, list[str], int]:
    """(variable, names, end) of the longest run of ``v = self.NAME(v)``, nested calls and functional dropouts."""
    names: list[str] = []
    variable = ""
    for end in range(position, len(body)):
        statement = body[end]
        target = _assigned_name(statement)
        read, applied = _applied(statement.value) if isinstance(statement, ast.Assign) else ("", [])
        if not applied or read != target or (variable and target != variable):
            return variable, names, end
        if not all(_position_wise_child(layer, name, linear) for name in applied):
            return variable, names, end
        names += applied
        variable = target
    return variable, names, len(body)


def find_pair(layer: nn.Module, widths: Mapping[str, Widths | None]) -> Neighbours | None:
    """An MLP in two children of the layer (BERT): ``h = self.FIRST(x)`` and right after it ``self.SECOND(h, other)``.

    Also where a method that the forward uses makes these calls. ``widths`` are those of the children that hold one
    linear layer and nothing else with a two-dimensional weight.
    """
    linear = {name: wide for name, wide in widths.items() if wide is not None}
    if not looks_inline(linear):
        return None
    trees = _sources(type(layer))
    reads = [name for tree in trees for name in _reads(tree)]
    for tree in trees:
        for body in _bodies(tree):
            for one, other in pairwise(body):
                call = _assigned_call(one)
                first = _child_called(call[1]) if call else ""
                if call is None or first not in linear or not isinstance(other, ast.Assign):
                    continue
                value, inner = other.value, call[0]
                if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 2:
                    continue
                second = _self_attribute(value.func)
                given = [argument.id for argument in value.args if isinstance(argument, ast.Name)]
                wide, inside = linear[first]
                if linear.get(second) != (inside, wide) or wide >= inside:
                    continue
                if len(given) != 2 or given[0] != inner or given[1] == inner or not _dies(tree, other, inner):
                    continue
                return Neighbours(members=(first, second)) if reads.count(first) == reads.count(second) == 1 else None
    return None


def _position_wise_child(layer: nn.Module, name: str, linear: Mapping[str, object]) -> bool:
    child = getattr(layer, name, None)
    if name in linear or isinstance(child, (int, float)):  # a functional dropout's probability
        return True
    return callable(child) and (not isinstance(child, nn.Module) or not any(True for _ in child.parameters()))


def _is_child(layer: nn.Module, name: str) -> bool:
    return not isinstance(getattr(layer, name, None), (int, float))


def _only(layer: nn.Module, name: str) -> str:
    """``name`` if it is a norm or a dropout of the layer, by its shape: no parameter of two dimensions, no children."""
    child = getattr(layer, name, None) if name else None
    if not isinstance(child, nn.Module) or any(True for _ in child.children()):
        return ""
    return name if all(len(whole_shape(p)) == 1 for p in child.parameters()) else ""


@functools.cache
def _source(layer_class: Any, method: str = "forward") -> ast.Module | None:
    """A method of the class; None where the source is not at hand, uses ``super()`` or sets attributes of ``self``."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(layer_class, method))))
        tree = ast.parse(source)
    except (AttributeError, OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "super":
            return None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _self_attribute(node):
            return None
    return tree


def _sources(layer_class: Any) -> list[ast.Module]:
    """The forward and every method of the class that it uses; empty where one of them does not tell."""
    found: dict[str, ast.Module] = {}
    wanted = ["forward"]
    while wanted:
        tree = _source(layer_class, name := wanted.pop())
        if tree is None:
            return []
        found[name] = tree
        wanted += [
            read for read in set(_reads(tree)) - found.keys() if inspect.isroutine(getattr(layer_class, read, None))
        ]
    return list(found.values())


def _reads(tree: ast.Module) -> list[str]:
    """Every ``self.NAME`` that the source reads, as often as it does."""
    return [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _self_attribute(node)]


def _bodies(tree: ast.Module) -> tuple[list[ast.stmt], ...]:
    """Every list of statements in the source."""
    lists = [getattr(node, field, None) for node in ast.walk(tree) for field in ("body", "orelse")]
    return tuple(body for body in lists if isinstance(body, list))


def _assigned_name(statement: ast.stmt) -> str:
    """``variable`` of ``variable = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _assigned_call(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """(variable, call) of ``variable = call(one argument)``."""
    target = _assigned_name(statement)
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not target or not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    return target, call


def _call_of(statement: ast.stmt, name: str) -> ast.Call | None:
    """The only call ``self.NAME(one argument)`` in an assignment or a return."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return)):
        return None
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and _child_called(node) == name]
    return calls[0] if len(calls) == 1 else None


def _child_called(call: ast.Call) -> str:
    """``NAME`` of ``self.NAME(one argument)``, else ""."""
    return _self_attribute(call.func) if len(call.args) == 1 and not call.keywords else ""


def _applied(node: ast.expr) -> tuple[str, list[str]]:
    """(variable, names) of ``self.B(self.A(variable))``, in the order in which they run."""
    names: list[str] = []
    while isinstance(node, ast.Call):
        name = _child_called(node) or _dropout_share(node)
        if not name:
            return "", []
        names.append(name)
        node = node.args[0]
    return (node.id, names[::-1]) if isinstance(node, ast.Name) else ("", [])


def _dropout_share(call: ast.Call) -> str:
    """``NAME`` of ``functional.dropout(one argument, p=self.NAME, training=self.training)``, else ""."""
    words = {keyword.arg: keyword.value for keyword in call.keywords}
    if set(words) != {"p", "training"} or len(call.args) != 1 or _self_attribute(words["training"]) != "training":
        return ""
    return _self_attribute(words["p"]) if ast.unparse(call.func).endswith("functional.dropout") else ""


def _follower(tree: ast.Module, rest: list[ast.stmt], variable: str) -> tuple[str, str]:
    """(module, dropout attribute) of the one call that reads ``variable`` next, if nothing reads it later."""
    if not rest or not isinstance(rest[0], ast.Assign) or not variable:
        return "", ""
    statement = rest[0]
    reads = [n for n in ast.walk(statement.value) if isinstance(n, ast.Name) and n.id == variable]
    if len(reads) != 1 or not _dies(tree, statement, variable):
        return "", ""
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call) and node.args and node.args[0] is reads[0]:
            return (child, "") if (child := _child_called(node)) else ("", _dropout_share(node))
    return "", ""


def _dies(tree: ast.Module, statement: ast.stmt, variable: str) -> bool:
    """Whether nothing reads ``variable`` after ``statement``: it is bound anew there, or named nowhere below."""
    if _assigned_name(statement) == variable:
        return True
    if any(isinstance(node, (ast.For, ast.While, ast.Try)) for node in ast.walk(tree)):
        return False
    end = statement.end_lineno or statement.lineno
    return not any(isinstance(n, ast.Name) and n.id == variable and n.lineno > end for n in ast.walk(tree))


def _self_attribute(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""
