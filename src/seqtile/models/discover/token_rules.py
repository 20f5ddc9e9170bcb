"""How every operator passes the token dimensions of its inputs on to its outputs.

A rule says where the token axes are in the output, and refuses an operator through which one token sees another. Beside
them it keeps an *expression*: the computation per token, with the layout of the token axes left out. Two blocks that
compute the same have equal expressions, whichever shapes they do it in. An operator without a rule proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqtile.models.discover.sizes import SIZES, NoRule, NotPerToken, Untraceable, axes_in

MIXED = "one token's output depends on other tokens"


Dims = tuple[tuple[str | int, ...], ...]


def letters(dims: Iterable[tuple[str | int, ...]]) -> list[str]:
    """The token axes in dimensions."""
    return [one for dim in dims for one in dim if isinstance(one, str)]


@dataclass(frozen=True)
class Flow:
    """What is known of one tensor of a trace.

    Attributes:
        dims: what is in each dimension that holds tokens: their axes, "b" (batch), "m" and "s" (sequence), and sizes of
            features flattened with them; ``()`` for a dimension of features alone.
        expr: number of the expression that it holds.
        summed: whether it is a sum over tokens, or linear in one, as a weight's gradient is.
        root: number of the tensor whose memory it shares.
    """

    dims: Dims
    expr: int
    summed: bool = False
    root: int = -1

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(letters(self.dims))


_COUNTER = itertools.count()


class Expressions:
    """Numbers for expressions: equal ones have the same number."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[Any, ...]] = {}

    def number(self, *key: Any) -> int:
        number = hash(key)  # the same in every trace of this process
        self.keys[number] = key
        return number

    def unique(self) -> int:
        """An expression that equals no other."""
        return self.number("unique", next(_COUNTER))

    def joined(self, name: str, parts: Iterable[Any]) -> int:
        """Operands whose order does not matter, as (expression) or a plain number; nested ones are taken apart."""
        neutral, flat = (0 if name == "add" else 1), list[Any]()
        for part in parts:
            key = self.keys[part.expr] if isinstance(part, Flow) else ("number", float(part))
            nested = key[1] if key[0] == name else ((part.expr,) if isinstance(part, Flow) else (key,))
            flat += [one for one in nested if one != ("number", float(neutral))]
        flat.sort(key=repr)
        return flat[0] if len(flat) == 1 and isinstance(flat[0], int) else self.number(name, tuple(flat))

    def permuted(self, expr: int, order: Sequence[int]) -> int:
        key = self.keys[expr]
        if key[0] == "permute" and len(key[2]) == len(order):
            expr, order = key[1], [key[2][place] for place in order]
        return expr if list(order) == sorted(order) else self.number("permute", expr, tuple(order))


@dataclass
class Call:
    """One operator call of a trace.

    Attributes:
        name: operator without its overload, ``"mul"``; of another library with its namespace, ``"lib::name"``.
        args: its arguments by the names of its schema.
        out: the tensors that it returned.
        flow: gives what is known of a tensor.
        expressions: where expressions get their numbers.
        axes: the token axes of the trace.
    """

    name: str
    args: dict[str, Any]
    out: list[Tensor]
    flow: Callable[[Tensor], Flow]
    expressions: Expressions
    axes: frozenset[str]

    def flows(self) -> list[Flow]:
        return [self.flow(tensor) for tensor in tensors_in(list(self.args.values()))]

    def expr(self, *besides: Any) -> int:
        """Expression of the call: its operator, its arguments and ``besides``."""
        return self.expressions.number(self.name, *(self._key(value) for value in self.args.values()), *besides)

    def _key(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return ("expression", self.flow(value).expr)
        if isinstance(value, (list, tuple)):
            return tuple(self._key(one) for one in value)
        return (type(value), value)

    def linear_in_sums(self, *names: str) -> bool:
        """Whether only the arguments of these names are sums over tokens, so that the result is one too."""
        others = [value for name, value in self.args.items() if name not in names]
        if any(self.flow(tensor).summed for tensor in tensors_in(others)):
            raise NotPerToken(f"{MIXED}: {self.name} of a sum over tokens")
        mine = [self.flow(tensor) for tensor in tensors_in([self.args.get(name) for name in names])]
        summed = [flow for flow in mine if flow.summed]
        if summed and (len(summed) < len(mine) or any(self.flow(t).axes for t in tensors_in(others))):
            raise NotPerToken(f"{MIXED}: {self.name} joins tokens and a sum over tokens")
        return bool(summed)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def features(tensor: Tensor, dims: Dims) -> tuple[int, ...]:
    """Sizes of the dimensions without tokens; leading ones of size 1 change nothing and are left out."""
    sizes = [size for size, axes in zip(tensor.shape, dims, strict=True) if not axes]
    while sizes and sizes[0] == 1:
        del sizes[0]
    return tuple(sizes)


def feature_place(tensor: Tensor, dims: Dims, dim: int, what: str) -> int:
    """Where a dimension stands among those without tokens, from the last, -1.

    Raises:
        NotPerToken: it holds tokens.
    """
    dim %= max(tensor.dim(), 1)
    if tensor.dim() and dims[dim]:
        raise NotPerToken(f"{MIXED}: {what} over them")
    return -sum(not axes for axes in dims[dim:]) if tensor.dim() else -1


# -- element by element ----------------------------------------------------------------------------------------------


def broadcast(call: Call, shape: Sequence[int], tensors: Iterable[Tensor]) -> Dims:
    """Token axes of an output of ``shape`` whose inputs are broadcast against each other."""
    dims: list[tuple[str | int, ...]] = [()] * len(shape)
    for tensor in tensors:
        given = call.flow(tensor).dims
        for place, axes in enumerate(given, len(shape) - len(given)):
            if axes and dims[place] not in ((), axes):
                raise NotPerToken(f"{MIXED}: {call.name} of two layouts of them")
            dims[place] = dims[place] or axes
    if len(letters(dims)) > len(set(letters(dims))):
        raise NotPerToken(f"{MIXED}: {call.name} of every pair of them")
    return tuple(dims)


_LINEAR = {
    "mul": ("self", "other"), "div": ("self",), "neg": ("self",), "add": ("self", "other"), "sub": ("self", "other"),
    "masked_fill": ("self",), "where": ("self", "other"), "conj": ("self",),
}  # fmt: skip
"""Arguments in which an operator is linear; a backward is linear in the gradient."""


def pointwise(call: Call) -> Flow | list[Flow]:
    if len(call.out) > 1:
        return [replace(_pointwise(call), expr=call.expr(number)) for number in range(len(call.out))]
    return _pointwise(call)


def _pointwise(call: Call) -> Flow:
    args = call.args
    gradient = [name for name in args if name.startswith("grad")] if call.name.endswith("_backward") else []
    if call.name == "mul" and all(flow.summed for flow in call.flows()) and len(call.flows()) > 1:
        raise NotPerToken(f"{MIXED}: a product of sums over tokens")
    linear = _LINEAR.get(call.name, tuple(gradient))
    if call.name == "mul" and any(flow.summed for flow in call.flows()):
        if any(flow.axes for flow in call.flows()):
            raise NotPerToken(f"{MIXED}: mul joins tokens and a sum over tokens")
        summed = True
    else:
        summed = call.linear_in_sums(*linear)
    dims = broadcast(call, call.out[0].shape, tensors_in(args.values()))
    number = call.expressions
    operands = [call.flow(v) if isinstance(v, Tensor) else v for v in (args.get("self"), args.get("other"))]
    plain = [one if isinstance(one, Flow) or not isinstance(one, (int, float)) else float(one) for one in operands]
    if call.name in ("add", "mul") and args.get("alpha", 1) == 1:
        return Flow(dims, number.joined(call.name, plain), summed)
    if call.name == "div" and args.get("rounding_mode") is None and operands[1] == 1:
        return Flow(dims, operands[0].expr, summed)  # type: ignore[union-attr]
    return Flow(dims, call.expr(), summed)


# -- layout ----------------------------------------------------------------------------------------------------------


def reshaped(call: Call) -> Flow:
    given = call.flow(call.args["self"])
    out = call.out[0]
    dims = _regrouped(call.args["self"].shape, given.dims, out.shape)
    before, after = features(call.args["self"], given.dims), features(out, dims)
    expr = given.expr if before == after else call.expressions.number("reshape", given.expr, after)
    return replace(given, dims=dims, expr=expr)


def _regrouped(shape: Sequence[int], dims: Dims, wanted: Sequence[int]) -> Dims:
    """What is in each dimension after a reshape to the sizes ``wanted``."""
    atoms = [one for size, inside in zip(shape, dims, strict=True) for one in (inside or (size,)) if one != 1]
    found = []
    for size in wanted:
        taken: list[str | int] = []
        while size > 1:
            room = atoms[0] if isinstance(atoms[0], int) else SIZES[atoms[0]]
            if size % room == 0:
                taken, size = [*taken, atoms.pop(0)], size // room
            elif isinstance(atoms[0], int) and room % size == 0:
                taken, atoms[0], size = [*taken, size], room // size, 1
            else:
                raise NotPerToken(f"{MIXED}: a reshape splits them")
        found.append(tuple(taken) if letters([tuple(taken)]) else ())
    return tuple(found)


def permuted(call: Call) -> Flow:
    tensor = call.args["self"]
    given, count = call.flow(tensor), tensor.dim()
    order = list(range(count))
    if call.name == "permute":
        order = [dim % count for dim in call.args["dims"]]
    elif count > 1:
        one, two = (call.args.get(name, default) % count for name, default in (("dim0", 0), ("dim1", 1)))
        order[one], order[two] = order[two], order[one]
    dims = tuple(given.dims[dim] for dim in order)
    places = [dim for dim in range(count) if not given.dims[dim]]
    moved = [places.index(dim) for dim in order if not given.dims[dim]]
    lead = len(moved) - len(features(tensor, given.dims))
    if moved[:lead] == list(range(lead)):
        moved = [place - lead for place in moved[lead:]]
    else:
        return replace(given, dims=dims, expr=call.expressions.number("permute", given.expr, tuple(moved), "padded"))
    return replace(given, dims=dims, expr=call.expressions.permuted(given.expr, moved))


def expanded(call: Call) -> Flow:
    tensor, out = call.args["self"], call.out[0]
    given = call.flow(tensor)
    lead = out.dim() - tensor.dim()
    dims = [*((),) * lead, *given.dims]
    for place, size in enumerate(out.shape):
        if not dims[place] and (place < lead or tensor.shape[place - lead] != size):
            dims[place] = tuple(axes_in(size))
    if given.summed and frozenset(letters(dims)) - given.axes:
        raise NotPerToken(f"{MIXED}: a sum over tokens goes back to each of them")
    after = features(out, dims)
    same = features(tensor, given.dims) == after
    return replace(given, dims=tuple(dims),
                   expr=given.expr if same else call.expressions.number("expand", given.expr, after))  # fmt: skip


def cut(call: Call) -> list[Flow]:
    """slice, select, split and unbind: equal pieces have equal expressions, whichever operator cuts them."""
    tensor, args = call.args["self"], call.args
    given, dim = call.flow(tensor), args.get("dim", 0) % max(tensor.dim(), 1)
    size = tensor.shape[dim]
    if call.name == "slice" and call.out[0].shape == tensor.shape and given.dims[dim]:
        if args.get("end") in (None, size) or args["end"] >= 2**62:  # all of them, however many
            return [given]
    place = feature_place(tensor, given.dims, dim, f"{call.name} is")
    flows, start = [], 0
    for out in call.out:
        dropped = out.dim() < tensor.dim()
        length, step = (1 if dropped else out.shape[dim]), 1
        if call.name in ("slice", "select"):
            start = args.get("start", args.get("index", 0)) or 0
            start, step = (start + size if start < 0 else start), args.get("step", 1)
        dims = given.dims[:dim] + given.dims[dim + 1 :] if dropped else given.dims
        whole = length == size and not dropped
        piece = (start, length, step) + (("dropped",) if dropped else ())
        expr = given.expr if whole else call.expressions.number("slice", given.expr, place, *piece)
        flows.append(replace(given, dims=dims, expr=expr))
        start += length
    return flows


def same(call: Call) -> Flow:
    """Copies and conversions: only a change of dtype is a computation."""
    tensor, out = call.args["self"], call.out[0]
    given = call.flow(tensor)
    expr = given.expr if tensor.dtype == out.dtype else call.expressions.number("to", given.expr, out.dtype)
    return Flow(given.dims, expr, given.summed)


def view_as_it_is(call: Call) -> Flow:
    return call.flow(call.args["self"])


# -- along a dimension -----------------------------------------------------------------------------------------------


def along(call: Call) -> list[Flow]:
    """Operators that read along dimensions, which no token axis may be in; the output keeps or loses those."""
    tensor = next(iter(tensors_in(call.args.values())))
    given = call.flow(tensor)
    named = [call.args[name] for name in ("dim", "dims", "axis") if call.args.get(name) is not None]
    chosen = named[0] if named else list(range(tensor.dim()))
    chosen = chosen if isinstance(chosen, (list, tuple)) else [chosen]
    over = {dim % max(tensor.dim(), 1) for dim in (chosen or range(tensor.dim()))} if tensor.dim() else set()
    tokens_too = any(given.dims[dim] for dim in over)
    if tokens_too and call.name != "sum":
        raise NotPerToken(f"{MIXED}: {call.name} is taken over them")
    gradients = [name for name in call.args if name.startswith("grad")]
    linear = {"sum": ("self",), "mean": ("self",), "cumsum": ("self",), "flip": ("self",)}.get(call.name, gradients)
    summed = call.linear_in_sums(*linear) or tokens_too
    places = sorted(-sum(not axes for axes in given.dims[dim:]) for dim in over if not given.dims[dim])
    flows = []
    for number, out in enumerate(call.out):
        if out.dim() == tensor.dim():
            dims = tuple(() if dim in over else axes for dim, axes in enumerate(given.dims))
        else:
            dims = tuple(axes for dim, axes in enumerate(given.dims) if dim not in over)
        if len(dims) != out.dim():
            raise Untraceable(f"{call.name} gave an unexpected shape")
        others = [axes for t in tensors_in(call.args.values()) for axes in call.flow(t).axes]
        if set(others) - given.axes:
            raise NotPerToken(f"{MIXED}: {call.name} of two layouts of them")
        plain = {name: value for name, value in call.args.items() if name not in ("dim", "dims", "axis")}
        shape = features(tensor, given.dims) if tokens_too else ()
        key = replace(call, args=plain).expr(
            tuple(places), "over tokens" if tokens_too else "", number, shape)  # fmt: skip
        flows.append(Flow(dims, key, summed))
    return flows


def normalised(call: Call) -> list[Flow]:
    """Layer and RMS norms and their backward: over trailing dimensions; weights' gradients are sums over tokens."""
    tensor = call.args["input"]
    given, width = call.flow(tensor), len(call.args["normalized_shape"])
    if any(given.dims[tensor.dim() - width :]):
        raise NotPerToken(f"{MIXED}: {call.name} is taken over them")
    if any(flow.summed for flow in call.flows()):
        raise NotPerToken(f"{MIXED}: {call.name} of a sum over tokens")
    flows = []
    for number, out in enumerate(call.out):
        whole = out.dim() == tensor.dim()
        weight = call.name.endswith("_backward") and number > 0
        dims = tuple(() for _ in out.shape) if weight or not whole else given.dims
        flows.append(Flow(dims, call.expr(number), weight))
    return flows


def joined(call: Call) -> Flow:
    """cat and stack along a dimension without tokens."""
    parts = call.args["tensors"]
    out, dim = call.out[0], call.args.get("dim", 0) % call.out[0].dim()
    summed = call.linear_in_sums("tensors")
    known = [list(call.flow(part).dims) for part in parts if part.dim() > 1 or part.shape[0]]
    if call.name == "stack":
        known = [[*dims[:dim], (), *dims[dim:]] for dims in known]
    if any(dims != known[0] for dims in known) or known[0][dim]:
        raise NotPerToken(f"{MIXED}: {call.name} puts them behind each other, or beside something else")
    place = feature_place(out, known[0], dim, "cat is")
    plain = [call.flow(part).expr for part in parts]
    return Flow(tuple(known[0]), call.expressions.number(call.name, tuple(plain), place), summed)


def placed(call: Call) -> Flow:
    """Backwards of slice and select, and padding: a tensor of zeros with the gradient at a place."""
    tensor = call.args.get("grad_output", call.args.get("self"))
    given, out = call.flow(tensor), call.out[0]
    if call.name == "constant_pad_nd":
        pads = call.args["pad"]
        dims = [out.dim() - 1 - number // 2 for number, pad in enumerate(pads) if pad]
        if given.summed and call.args.get("value", 0):
            raise NotPerToken(f"{MIXED}: a sum over tokens is padded")
    else:
        dims = [call.args["dim"] % out.dim()]
    labels = list(given.dims)
    if call.name == "select_backward":
        labels.insert(dims[0], ())
    places = [feature_place(out, labels, dim, "a cut is made") for dim in dims]
    sizes = [out.shape[dim] for dim in dims]
    plain = [call.args.get(name) for name in ("start", "end", "step", "index", "value", "pad")]
    plain = [tuple(one) if isinstance(one, list) else one for one in plain]
    expr = call.expressions.number(call.name, given.expr, tuple(places), tuple(sizes), *plain)
    return Flow(tuple(labels), expr, given.summed)


def looked_up(call: Call) -> Flow:
    """``table[index]`` with one index per token into a constant, or constant indices into features."""
    table = call.args.get("weight", call.args.get("self"))
    indices = call.args["indices"] if call.name == "index" else [call.args["indices"]]
    given, out = call.flow(table), call.out[0]
    used = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if call.flow(used[0][1]).summed or len(used) != 1:
        raise NoRule(f"it uses {call.name} with {len(used)} indices, for which there is no rule")
    dim, index = used[0]
    if given.dims[dim]:
        raise NotPerToken(f"{MIXED}: an index picks some of them")
    mine = call.flow(index).dims
    if given.axes and any(mine):
        raise NotPerToken(f"{MIXED}: an index of theirs picks from other tokens")
    dims = given.dims[:dim] + mine + given.dims[dim + 1 :]
    assert len(dims) == out.dim()
    return Flow(dims, call.expr(dim), given.summed)


def gathered(call: Call) -> Flow:
    tensor, index = call.args["self"], call.args["index"]
    given, other = call.flow(tensor), call.flow(index)
    place = feature_place(tensor, given.dims, call.args["dim"], "gather is")
    if given.dims != other.dims or given.summed or any(one.summed for one in call.flows()):
        raise NotPerToken(f"{MIXED}: {call.name} of two layouts of them")
    plain = {name: value for name, value in call.args.items() if name != "dim"}
    return Flow(given.dims, replace(call, args=plain).expr(place))


# -- products --------------------------------------------------------------------------------------------------------


def product(call: Call) -> Flow:
    args = call.args
    left, right = (args[one] for one in {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"),
                                         "dot": ("self", "tensor"), "addmm": ("mat1", "mat2"),
                                         "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}[call.name])  # fmt: skip
    one, two, number = call.flow(left), call.flow(right), call.expressions
    first, second = one.dims, two.dims
    *rows, inner = first
    batch, rows = rows[: left.dim() - 2], rows[left.dim() - 2 :]
    other_inner, columns = (second[-2], second[-1:]) if right.dim() > 1 else (second[-1], ())
    if inner != other_inner:
        raise NotPerToken(f"{MIXED}: {call.name} multiplies along them")
    if one.summed and two.summed or (one.summed and two.axes) or (two.summed and one.axes):
        raise NotPerToken(f"{MIXED}: a product with a sum over tokens")
    heads = tuple(a or b for a, b in zip(batch, second[: len(batch)], strict=True))
    if any(a and b and a != b for a, b in zip(batch, second, strict=False)):
        raise NotPerToken(f"{MIXED}: {call.name} of two layouts of them")
    dims = (*heads, *rows, *columns)
    left_axes, right_axes = set(letters((*batch, *rows))), set(letters((*second[: len(batch)], *columns)))
    shared = set(letters(heads))
    if (left_axes & right_axes) - shared or set(letters([inner])) & (left_axes | right_axes):
        raise NotPerToken(f"{MIXED}: {call.name} of every pair of them")
    if inner and shared and left_axes | right_axes != shared:
        raise NotPerToken(f"{MIXED}: {call.name} multiplies along them")
    flat = not batch or (left.shape[0] == 1 and not any(batch))
    if inner:
        order = sorted((one.expr, two.expr)) if flat and left.dim() > 1 < right.dim() else [one.expr, two.expr]
        expr = number.number("outer", *order, *(() if flat else (call.name, first, second)))
        if order != [one.expr, two.expr]:
            expr = number.permuted(expr, (1, 0))
        summed = True
        # [K, tokens] @ [tokens, N]: the features of the first are its rows, those of the second its columns.
    elif flat and any(columns) and not any(rows) and right.dim() > 1:
        expr, summed = number.number("mm", two.expr, number.permuted(one.expr, (1, 0))), one.summed or two.summed
    else:
        where = () if flat else (batch, rows, columns)
        expr, summed = number.number("mm", one.expr, two.expr, *where), one.summed or two.summed
    flow = Flow(dims, expr, summed)
    if call.name.startswith(("add", "badd")):
        added = args["self"]
        if args.get("alpha", 1) != 1 or args.get("beta", 1) != 1:
            return replace(flow, expr=call.expr())
        known = call.flow(added)
        if known.summed != flow.summed:
            raise NotPerToken(f"{MIXED}: {call.name} joins tokens and a sum over tokens")
        return Flow(dims, number.joined("add", [known, flow]), summed)
    return flow


def convolved(call: Call) -> Flow:
    """A convolution whose kernel has one element is a linear layer at every place."""
    args = call.args
    x, weight = args["input"], args["weight"]
    given = call.flow(x)
    plain = all(one == 1 for one in (*args["stride"], *weight.shape[2:])) and not any(args["padding"])
    if not plain or args["transposed"] or given.dims[1] or args["groups"] != 1 or call.flow(weight).axes:
        raise NotPerToken(f"{MIXED}: a convolution over them")
    return Flow(given.dims, call.expr())


def convolved_backward(call: Call) -> list[Flow]:
    args, flows = call.args, []
    given = call.flow(args["grad_output"])
    plain = all(one == 1 for one in (*args["stride"], *args["weight"].shape[2:])) and not any(args["padding"])
    if not plain or args["transposed"] or args["groups"] != 1:
        raise NotPerToken(f"{MIXED}: a convolution over them")
    for number, out in enumerate(call.out):
        flows.append(Flow(given.dims if number == 0 else ((),) * out.dim(), call.expr(number), number > 0))
    return flows


# -- what is made or drawn -------------------------------------------------------------------------------------------


def made(call: Call) -> Flow:
    """Tensors of one value: their shape says where the tokens are."""
    dims = tuple(tuple(axes_in(size)) for size in call.out[0].shape)
    value = call.args.get("fill_value", call.name if "empty" not in call.name else call.expressions.unique())
    value = call.flow(value).expr if isinstance(value, Tensor) else value
    kind = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}.get(call.name, value)
    return Flow(dims, call.expressions.number("constant", kind, features(call.out[0], dims), call.out[0].dtype))


def counted_up(call: Call) -> Flow:
    if any(axes_in(size) for size in call.out[0].shape):
        raise NotPerToken("its forward depends on the position of a token")
    return Flow(((),) * call.out[0].dim(), call.expr())


def dropped(call: Call) -> list[Flow]:
    """Dropout's masks: every token has numbers of its own."""
    tensor = call.args.get("self", call.args.get("input"))
    given = call.flow(tensor)
    if given.axes != call.axes:
        raise NotPerToken("it draws random numbers that several tokens share, or that belong to none")
    p = next((value for name, value in call.args.items() if isinstance(value, float)), call.args.get("p"))
    p = call.flow(p).expr if isinstance(p, Tensor) else p
    if call.name == "bernoulli_":
        return [replace(given, expr=call.expressions.number("bernoulli", p, features(tensor, given.dims)))]
    return [Flow(given.dims, call.expr(number)) for number in range(len(call.out))]


def filled(call: Call) -> Flow:
    tensor, value = call.args["self"], call.args.get("value", 0)
    known = call.flow(value) if isinstance(value, Tensor) else None
    if known is not None and (known.summed or known.axes):
        raise NotPerToken(f"{MIXED}: {call.name} with a value of theirs")
    given = call.flow(tensor)
    return replace(given, expr=call.expressions.number("constant", known.expr if known else value, features(tensor, given.dims), tensor.dtype), summed=False)


def copied(call: Call) -> Flow:
    tensor, source = call.args["self"], call.args["src"]
    given, known = call.flow(tensor), call.flow(source)
    dims = broadcast(call, tensor.shape, [tensor, source])
    if known.summed and given.axes:
        raise NotPerToken(f"{MIXED}: a sum over tokens goes back to each of them")
    expr = known.expr if features(tensor, dims) == features(source, known.dims) else call.expr()
    if tensor.dtype != source.dtype:
        expr = call.expressions.number("to", expr, tensor.dtype)
    return replace(given, dims=dims, expr=expr, summed=known.summed)


def refused_because(why: str) -> Callable[[Call], Flow]:
    def rule(call: Call) -> Flow:
        if any(flow.axes or flow.summed for flow in call.flows()):
            raise NotPerToken(f"{MIXED}: {why} ({call.name})")
        raise NoRule(f"it uses {call.name} of a weight, for which there is no rule")

    return rule


_POINTWISE = frozenset((
    "mish_backward", "elu_backward", "celu_backward", "softplus_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward", "softshrink_backward", "hardshrink_backward",
    "hardtanh_backward", "logit_backward", "rrelu_with_noise_backward", "_prelu_kernel", "_prelu_kernel_backward", "_conj", "_neg_view",
))  # fmt: skip
"""Operators that are pointwise and not tagged so."""

Rule = Callable[[Call], Flow | list[Flow]]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_copy", "unsqueeze", "squeeze", "flatten",
                     "_reshape_alias", "view_copy"), reshaped),
    **dict.fromkeys(("t", "transpose", "permute"), permuted),
    "expand": expanded,
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "unbind", "narrow", "chunk"), cut),
    **dict.fromkeys(("clone", "_to_copy", "contiguous", "lift_fresh_copy"), same),
    **dict.fromkeys(("detach", "alias", "lift_fresh", "view_as_real_copy"), view_as_it_is),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "std_mean", "logsumexp",
                     "linalg_vector_norm", "norm", "prod", "any", "all", "argmax", "argmin", "topk", "sort", "cumsum",
                     "cumprod", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
                     "glu", "glu_backward", "flip", "roll", "median", "kthvalue"), along),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
                    normalised),
    **dict.fromkeys(("cat", "stack"), joined),
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd"), placed),
    **dict.fromkeys(("index", "embedding", "index_select"), looked_up),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), gathered),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"), product),
    "convolution": convolved,
    "convolution_backward": convolved_backward,
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                     "ones_like", "full_like", "empty_like", "scalar_tensor", "empty_strided", "new_empty_strided"),
                    made),
    **dict.fromkeys(("arange", "linspace", "eye", "tril_indices", "triu_indices", "randperm"), counted_up),
    **dict.fromkeys(("native_dropout", "bernoulli_", "bernoulli"), dropped),
    **dict.fromkeys(("fill_", "zero_"), filled),
    "copy_": copied,
    **dict.fromkeys(("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount",
                     "unique_dim", "histc"), refused_because("it decides by their values")),
    **dict.fromkeys(("as_strided", "unfold", "diagonal", "tril", "triu", "native_batch_norm", "_native_batch_norm_legit",
                     "_native_batch_norm_legit_no_training", "native_group_norm", "_scaled_dot_product_flash_attention",
                     "_scaled_dot_product_flash_attention_for_cpu"), refused_because("an operator over several of them")),
}  # fmt: skip


def rule_for(func: Any, name: str) -> Rule | None:
    """The rule of an operator, None where there is none."""
    if name in RULES:
        return RULES[name]
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    return pointwise if torch.Tag.pointwise in func.tags or name in _POINTWISE else None


def _random(call: Call) -> Flow:
    raise NotPerToken(f"it draws random numbers that are no dropout's ({call.name})")
