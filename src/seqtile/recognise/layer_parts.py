"""Trace a decoder layer's forward to find what runs directly before and after its block.

Stand-ins replace the layer's children, record their inputs and return new tensors. So only the code between the
children runs, and the records show which call reads which tensor.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqtile._compat import BUFFERS, MODULES, PARAMETERS, children_of, disabled_torch_function, version_of
from seqtile._shallow import view_of
from seqtile.engines.zero3 import whole_shape
from seqtile.recognise.snapshot import INTERNAL
from seqtile.recognise.trace import in_a_thread


@dataclass(frozen=True)
class Neighbours:
    """Children of a layer that run on the block's own tensor, in the order in which they are called.

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

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of them, in call order."""
        calls = (self.before, *self.members, self.after, self.dropout, self.closing)
        return tuple(name for name in calls if name)


@dataclass(frozen=True)
class LayerCall:
    """One call in a layer's forward.

    Attributes:
        kind: ``"child"``, ``"dropout"`` (a functional one), ``"operator"``, ``"in-place"`` (an operator that changes
            its argument), or ``"attribute"`` (of a child, read).
        name: the child or attribute that was called, the attribute that holds the probability, or the operator.
        reads: numbers of the tensors among its arguments.
        hidden_states: number of its first argument or ``hidden_states=``, -1 if that is no tensor.
        makes: number of the tensor that it returned, -1 for none or several.
        plain: whether gradient mode and autocast were the same as at the start of the forward.
        alone: whether all arguments are tensors, and a child's all positional.
    """

    kind: str
    name: str
    reads: tuple[int, ...]
    hidden_states: int
    makes: int
    plain: bool = True
    alone: bool = True


class LayerSteps:
    """The calls in one run of a layer's forward in training."""

    def __init__(self, steps: list[LayerCall]) -> None:
        self.steps = steps

    def is_undisturbed(self, first: LayerCall, last: LayerCall) -> bool:
        """Whether no tensor is modified in place between two calls."""
        between = self.steps[self.steps.index(first) + 1 : self.steps.index(last)]
        return all(step.kind != "in-place" for step in between)

    def call_of(self, name: str) -> LayerCall | None:
        """The call of a child, if there is exactly one and nothing else of the child is read."""
        uses = [step for step in self.steps if step.kind in ("child", "attribute") and step.name == name]
        return uses[0] if len(uses) == 1 and uses[0].kind == "child" and uses[0].plain else None

    def maker(self, step: LayerCall) -> LayerCall | None:
        """The call that made the hidden states of ``step``, if no other call reads them."""
        makers = [candidate for candidate in self.steps if candidate.makes == step.hidden_states >= 0]
        return makers[0] if len(makers) == 1 and self.reader(makers[0]) is step else None

    def reader(self, step: LayerCall) -> LayerCall | None:
        """The only call that reads what ``step`` made."""
        readers = [candidate for candidate in self.steps if step.makes >= 0 and step.makes in candidate.reads]
        return readers[0] if len(readers) == 1 else None


class _Result(Tensor):
    """The result of a stand-in: a tensor that also acts as a tuple of tensors where the code unpacks it.

    Unpacking gives two tensors, or the number that an earlier run failed for; an integer index gives the tensor itself.
    """

    __torch_function__ = disabled_torch_function

    @staticmethod
    def unpack() -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter([self, *[_result(self, self.shape) for _ in range(self.unpack() - 1)]])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self
        return _LaterResults() if isinstance(index, slice) and index.start else super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


class _LaterResults(tuple[Any, ...]):
    """The results after the first: usable as a tuple, or as an operand of a sum with a tensor."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return other if isinstance(other, Tensor) else tuple(self) + other


def _result(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta").as_subclass(_Result)


class _LayerRun(TorchFunctionMode):
    """One run of a layer's forward, which records which call reads which tensor."""

    def __init__(self, layer: nn.Module, plain: Mapping[str, int], results: Mapping[str, int]) -> None:
        super().__init__()
        self._results = results
        self.unpacked: Any = None  # name of the child whose result was unpacked last
        self.steps: list[LayerCall] = []
        self._plain = plain
        self._dropouts: dict[float, str] = {}
        self._inside = False
        self._context = _gradients_and_autocast()
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self.view = self._view(layer)

    def _view(self, layer: nn.Module) -> Any:
        """The layer with stand-ins for its children, weights without memory, and one probability for each dropout."""
        view = view_of(layer)
        attributes = view.__dict__
        # Transformers' switches: neither changes the data flow, but both change how the parts run.
        attributes.update(training=True, gradient_checkpointing=False, chunk_size_feed_forward=0)
        attributes[MODULES] = {
            name: None if child is None else _ChildStandIn(name, child, self)
            for name, child in children_of(layer).items()
        }
        for container in (PARAMETERS, BUFFERS):
            attributes[container] = {
                name: None if tensor is None else _weight(tensor) for name, tensor in attributes[container].items()
            }
        for name, value in vars(layer).items():
            if isinstance(value, float) and "drop" in name:
                p = 0.25 + len(self._dropouts) / 1024
                self._dropouts[p], attributes[name] = name, p
            elif callable(value) and name in self._plain:
                attributes[name] = self.stand_in(name)
            elif type(value) in (list, set, dict) and name not in INTERNAL:
                attributes[name] = value.copy()
        return view

    def stand_in(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = list(_tensors_in((kwargs.get("hidden_states"), *args, *kwargs.values())))
            if not tensors:
                raise TypeError(f"{name} was called without a tensor")
            self._inside = True
            y = _result(tensors[0], (*tensors[0].shape[:-1], self._plain.get(name) or tensors[0].shape[-1]))
            y.unpack = partial(self._unpack, name)  # type: ignore[attr-defined]
            y = y if name not in self._plain else y.as_subclass(Tensor)
            self._inside = False
            self.add("child", name, args, kwargs, y)
            return y

        return call

    def _unpack(self, name: str) -> int:
        self.unpacked = name
        return self._results.get(name, 2)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name == "__bool__":
            return False  # code that checks for infinite values
        versions = [(tensor, version_of(tensor)) for tensor in _tensors_in((*args, *kwargs.values()))]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError):  # a stand-in's result may have a wrong shape; the records need none
            tensors = list(_tensors_in((*args, *kwargs.values())))
            if not tensors:
                raise
            result = _result(tensors[0], tensors[0].shape)
        if self._inside or not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            return result
        if any(version_of(tensor) != version for tensor, version in versions):
            self.add("in-place", name, args, kwargs, result)
        elif func is nn.functional.dropout:
            p = inspect.signature(func).bind(*args, **kwargs).arguments.get("p", 0.5)
            self.add("dropout", self._dropouts.get(p, ""), args, kwargs, result)
        else:
            self.add("operator", name, args, kwargs, result)
        return result

    def number(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def add(self, kind: str, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        tensors = list(_tensors_in((*args, *kwargs.values())))
        first = kwargs.get("hidden_states", args[0] if args else None)
        hidden_states = self.number(first) if isinstance(first, Tensor) else -1
        made = self.number(result) if isinstance(result, Tensor) else -1
        reads = tuple(self.number(tensor) for tensor in tensors)
        plain, alone = (
            _gradients_and_autocast() == self._context,
            len(tensors) == len(args) + len(kwargs) and not (kwargs and kind == "child"),
        )
        self.steps.append(LayerCall(kind, name, reads, hidden_states, made, plain, alone))


def _gradients_and_autocast() -> tuple[bool, ...]:
    return (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, device_types()))


@functools.cache
def device_types() -> list[str]:
    """The kinds of devices here, for each of which autocast may be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


class _ChildStandIn:
    """Replaces a child; records its call, and every read of its attributes."""

    def __init__(self, name: str, child: nn.Module, run: _LayerRun) -> None:
        self.__dict__.update(_name=name, _child=child, _run_layer=run, _call=run.stand_in(name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __setattr__(self, attribute: str, value: Any) -> None:
        raise RuntimeError(f"the layer's forward sets {self._name}.{attribute}")

    def __getattr__(self, attribute: str) -> Any:
        self._run_layer.steps.append(LayerCall("attribute", self._name, (), -1, -1))
        value = getattr(self._child, attribute)
        if isinstance(value, Tensor):
            return _weight(value)
        return self._run_layer.stand_in(f"{self._name}.{attribute}") if inspect.ismethod(value) else value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._child)


def _weight(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(whole_shape(tensor)), dtype=tensor.dtype, device="meta")


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def layer_steps(layer: nn.Module, hidden: int, plain: Mapping[str, int]) -> LayerSteps | None:
    """The calls in the forward of ``layer`` on hidden states of this width.

    Args:
        layer: the decoder layer; it is not changed, and its children do not run.
        hidden: width of its input.
        plain: children that return one tensor, with its width.

    Returns:
        The calls, or None if the forward fails with all arguments that were tried.

    Cost:
        One to a few milliseconds.
    """
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    needed = [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in _NAMED
    ]
    others = [
        parameter.name
        for parameter in parameters
        if parameter.default is None and not re.search("past|cache|output|use_", parameter.name)
    ]
    counts = [parameter.name for parameter in parameters if parameter.default == 0 and type(parameter.default) is int]
    tables = [value for value in vars(layer).values() if isinstance(value, dict) and value]
    lengths = [5, *(key for table in tables for key in [next(iter(table))] if type(key) is int)]  # Aria's projector
    shapes = [(7, length, hidden) for length in lengths] + [(7, 5, 6, hidden)]  # no code unpacks a tensor into seven
    for shape in shapes:
        for shaped, numbers in (([], []), (needed, []), (needed + others, []), (needed + others, counts)):
            kwargs = {**dict.fromkeys(needed), **dict.fromkeys(shaped, shape), **dict.fromkeys(numbers, shape[1])}
            try:
                return in_a_thread(partial(_run_layer, layer, shape, plain, kwargs))  # type: ignore[no-any-return]
            except Exception:  # noqa: BLE001 - it needs another shape, or unknown arguments
                continue
    return None


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNPACKED = re.compile(r"values to unpack \(expected (\d+)")
"""Python's message about too many or too few values to unpack."""


def _run_layer(
    layer: nn.Module,
    shape: Sequence[int],
    plain: Mapping[str, int],
    arguments: Mapping[str, Sequence[int] | int | None],
) -> LayerSteps:
    results: dict[str, int] = {}  # number of values that a child returns, where it is not two
    while True:
        run = _LayerRun(layer, plain, results)
        x = torch.empty(tuple(shape), device="meta")
        run.number(x)
        kwargs = {name: _result(x, value) if isinstance(value, tuple) else value for name, value in arguments.items()}
        try:
            with torch.enable_grad(), run:
                type(layer).forward(run.view, x, **kwargs)
        except ValueError as error:
            expected = _UNPACKED.search(str(error))
            if expected is None or run.unpacked in (None, *results):
                raise
            results[run.unpacked] = int(expected[1])
        else:
            return LayerSteps(run.steps)


def is_small(layer: nn.Module, name: str) -> bool:
    """Whether a child may run in a tile beside a block, as norms and dropouts do: no matrices, no children."""
    child = getattr(layer, name, None) if name else None
    if not isinstance(child, nn.Module) or any(True for _ in child.children()):
        return False
    if type(child).__call__ is not nn.Module.__call__:
        return False
    return all(len(whole_shape(p)) <= 1 for p in child.parameters())


def plain_children(layer: nn.Module, blocks: Mapping[str, int]) -> dict[str, int]:
    """Widths of children that return one tensor: norms, dropouts, activations (0: the input's), and ``blocks``."""
    small = {name: 0 for name, _ in layer.named_children() if is_small(layer, name)}
    functions = {name: 0 for name, value in vars(layer).items() if callable(value) and not isinstance(value, type)}
    return {**small, **functions, **blocks}


def around(layer: nn.Module, steps: LayerSteps, name: str) -> Neighbours:
    """The neighbours of the child ``name``."""
    call = steps.call_of(name)
    block = getattr(layer, name)
    if call is None or len(call.reads) != 1 or not call.alone or type(block).__call__ is not nn.Module.__call__:
        return Neighbours(members=(name,))  # a shared tile calls its forward, which would skip a __call__ of its own
    return replace(_followed(layer, steps, call, Neighbours(members=(name,))), before=norm_before(layer, steps, name))


def norm_before(layer: nn.Module, steps: LayerSteps, name: str) -> str:
    """The norm whose output the child ``name`` alone reads, or ""."""
    call = steps.call_of(name)
    maker = steps.maker(call) if call is not None else None
    if call is None or maker is None or not _is_norm_call(layer, steps, maker):
        return ""
    return maker.name if steps.is_undisturbed(maker, call) else ""


def _is_norm_call(layer: nn.Module, steps: LayerSteps, step: LayerCall) -> bool:
    """Whether a step is the only call of a small child, on one tensor."""
    return step.alone and len(step.reads) == 1 and is_small(layer, step.name) and steps.call_of(step.name) is step


def _followed(layer: nn.Module, steps: LayerSteps, last: LayerCall, neighbours: Neighbours) -> Neighbours:
    after = steps.reader(last)
    if after is None or len(after.reads) != 1 or not after.name or not steps.is_undisturbed(last, after):
        return neighbours
    if getattr(getattr(layer, after.name, None), "inplace", False) and not isinstance(
        getattr(layer, after.name), nn.Dropout
    ):
        return neighbours  # it would overwrite a tensor that the operator's backward reads
    if after.kind == "dropout":
        return replace(neighbours, dropout=after.name)
    return replace(neighbours, after=after.name) if _is_norm_call(layer, steps, after) else neighbours


def looks_inline(widths: Mapping[str, tuple[int, int]]) -> tuple[str, str] | None:
    """Two linear layers ``D -> F`` and ``F -> D`` among the children of a layer, which may be an MLP."""
    for first, (hidden, inner) in widths.items():
        for second, turned in widths.items():
            if turned == (inner, hidden) and hidden < inner:
                return first, second
    return None


def inline(layer: nn.Module, steps: LayerSteps, widths: Mapping[str, tuple[int, int]]) -> Neighbours | None:
    """An MLP whose linear layers are children of the layer, called one after another (OPT, BART)."""
    for name in widths:
        call = steps.call_of(name)
        members: list[LayerCall] = []
        while call is not None and _may_be_inside(layer, call, widths) and len(call.reads) == 1:
            members.append(call)
            if len(members) > 1 and widths.get(call.name) == widths[name][::-1]:
                break
            call = steps.reader(call)
        else:
            continue
        names = tuple(member.name for member in members)
        if any(member.kind == "child" and steps.call_of(member.name) is not member for member in members):
            continue
        if not steps.is_undisturbed(members[0], members[-1]):
            continue
        neighbours = _followed(layer, steps, members[-1], Neighbours(members=names))
        maker = steps.maker(members[0])
        if maker is not None and _is_norm_call(layer, steps, maker) and steps.is_undisturbed(maker, members[0]):
            return replace(neighbours, before=maker.name)
        return replace(neighbours, closing=_closing(layer, steps, members, neighbours))
    return None


def _may_be_inside(layer: nn.Module, step: LayerCall, widths: Mapping[str, tuple[int, int]]) -> bool:
    if step.kind == "operator" or not step.name or (step.kind == "child" and not step.alone):
        return False
    child = getattr(layer, step.name, None)
    return (
        step.kind == "dropout" or step.name in widths or not isinstance(child, nn.Module) or is_small(layer, step.name)
    )


def _closing(layer: nn.Module, steps: LayerSteps, members: list[LayerCall], neighbours: Neighbours) -> str:
    """The norm of ``x + block(x)``, where nothing else reads that sum."""
    last = members[-1]
    follower = steps.reader(last) if neighbours.after or neighbours.dropout else last
    total = steps.reader(follower) if follower is not None else None
    if total is None or total.name not in ("add", "__add__") or len(total.reads) != 2:
        return ""
    norm = steps.reader(total)
    if members[0].hidden_states not in total.reads or norm is None or not steps.is_undisturbed(members[0], norm):
        return ""
    return norm.name if _is_norm_call(layer, steps, norm) else ""


def pair(layer: nn.Module, steps: LayerSteps, widths: Mapping[str, tuple[int, int]]) -> Neighbours | None:
    """An MLP in two children of the layer (BERT): ``h = first(x)``, ``second(h, other)``."""
    for name, (width, inner) in widths.items():
        call = steps.call_of(name)
        second = steps.reader(call) if call is not None else None
        if second is None or second.kind != "child" or widths.get(second.name) != (inner, width) or width >= inner:
            continue
        if (
            call is not None
            and call.alone
            and second.alone
            and second.hidden_states == call.makes
            and len(second.reads) == 2
            and steps.is_undisturbed(call, second)
        ):
            return Neighbours(members=(name, second.name))
    return None
