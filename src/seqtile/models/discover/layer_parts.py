"""What runs right before and right after a block in its decoder layer, from a trace of the layer's own forward.

The layer's children are replaced by stand-ins that note what they are given and return a new tensor, so only the code
between them runs: who reads what is then a matter of looking.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from seqtile.engines.zero3 import whole_shape
from seqtile.models.discover.trace import in_a_thread


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


@dataclass(frozen=True)
class Step:
    """One call in a layer's forward.

    Attributes:
        kind: ``"child"``, ``"dropout"`` (a functional one), ``"operator"``, or ``"attribute"`` (of a child).
        name: the child or attribute that was called, the attribute that holds the probability, or the operator.
        reads: numbers of the tensors that it was given.
        hidden_states: number of the first of them.
        makes: number of the tensor that it returned, -1 for none or several.
    """

    kind: str
    name: str
    reads: tuple[int, ...]
    hidden_states: int
    makes: int


class _Child:
    """Stands for a child: notes its call, and when anything else of it is read."""

    def __init__(self, name: str, child: nn.Module, call: Callable[..., Any], notes: _Notes) -> None:
        self.__dict__.update(_name=name, _child=child, _call=call, _notes=notes)

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._call(*args, **words)

    def __getattr__(self, attribute: str) -> Any:
        self._notes.steps.append(Step("attribute", self._name, (), -1, -1))
        return getattr(self._child, attribute)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._child)


class LayerSteps:
    """The calls in one run of a layer's forward."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    def call_of(self, name: str) -> Step | None:
        """The call of a child, if there is exactly one and nothing else of the child is read."""
        uses = [step for step in self.steps if step.kind in ("child", "attribute") and step.name == name]
        return uses[0] if len(uses) == 1 and uses[0].kind == "child" else None

    def maker(self, step: Step) -> Step | None:
        """What made the hidden states that ``step`` reads, if nothing else reads them."""
        made = [one for one in self.steps if one.makes == step.hidden_states >= 0]
        return made[0] if len(made) == 1 and self.reader(made[0]) is step else None

    def reader(self, step: Step) -> Step | None:
        """The only call that reads what ``step`` made."""
        readers = [one for one in self.steps if step.makes >= 0 and step.makes in one.reads]
        return readers[0] if len(readers) == 1 else None


class _Watch(TorchFunctionMode):
    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._notes.inside or not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            return result
        name = getattr(func, "__name__", str(func))
        if func is nn.functional.dropout:
            p = inspect.signature(func).bind(*args, **kwargs).arguments.get("p", 0.5)
            result = args[0].clone() if result is args[0] and args else result
            self._notes.add("dropout", self._notes.dropouts.get(p, ""), args, kwargs, result)
        else:
            self._notes.add("operator", name, args, kwargs, result)
        return result


class _Notes:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.dropouts: dict[float, str] = {}
        self.inside = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        return self._numbers.setdefault(id(tensor), len(self._numbers))

    def add(self, kind: str, name: str, args: Any, words: Mapping[str, Any], result: Any) -> None:
        given = list(_tensors((*args, *words.values())))
        first = words.get("hidden_states", args[0] if args else None)
        hidden_states = self.number(first) if isinstance(first, Tensor) else -1
        made = self.number(result) if isinstance(result, Tensor) else -1
        self.steps.append(Step(kind, name, tuple(self.number(one) for one in given), hidden_states, made))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


_RETURNS: tuple[Callable[[Tensor], Any], ...] = (
    lambda y: (y, None), lambda y: (y, None, None), lambda y: y, lambda y: (y,), lambda y: (y, None, None, None),
)  # fmt: skip
"""What attention modules and their like return; the layer's own code tells which."""


def layer_steps(layer: nn.Module, hidden: int, plain: Mapping[str, int]) -> LayerSteps | None:
    """The calls in the forward of ``layer`` on hidden states of this width; None where it cannot be run.

    Args:
        layer: the decoder layer; nothing of it is changed, no child of it runs.
        hidden: width of its input.
        plain: children that return one tensor, with its width.

    Cost:
        A few milliseconds.
    """
    for returns in _RETURNS:
        try:
            return in_a_thread(lambda returns=returns: _run(layer, hidden, plain, returns))  # type: ignore[misc]
        except Exception:  # noqa: BLE001, S112 - another arity of its attention, or arguments that nobody knows
            continue
    return None


def _run(layer: nn.Module, hidden: int, plain: Mapping[str, int], returns: Callable[[Tensor], Any]) -> LayerSteps:
    notes = _Notes()
    view: Any = object.__new__(type(layer))
    view.__dict__.update(layer.__dict__)
    view.__dict__.pop("forward", None)
    # Transformers' own switches: neither changes who reads what, and both would run the parts in other ways.
    view.__dict__.update(training=True, gradient_checkpointing=False, chunk_size_feed_forward=0)

    def stand_in(name: str) -> Callable[..., Any]:
        def run(*args: Any, **words: Any) -> Any:
            notes.inside = True
            x = next(_tensors((words.get("hidden_states"), *args, *words.values())))
            y = x.new_empty(*x.shape[:-1], plain.get(name) or x.shape[-1])
            notes.inside = False
            notes.add("child", name, args, words, y)
            return y if name in plain else returns(y)

        return run

    modules = {}
    for name, child in layer._modules.items():
        if child is None:
            modules[name] = None
            continue
        modules[name] = _Child(name, child, stand_in(name), notes)
    view.__dict__["_modules"] = modules
    for name, value in vars(layer).items():
        if isinstance(value, float) and "drop" in name:
            p = 0.25 + len(notes.dropouts) / 1024  # one of its own for each, so that a call tells which it is
            notes.dropouts[p] = name
            view.__dict__[name] = p
        elif callable(value) and name in plain:
            view.__dict__[name] = stand_in(name)
    words = {}
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    for parameter in parameters[1:]:
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            words[parameter.name] = None
    for name, value in vars(layer).items():
        if isinstance(value, (list, set, dict)) and name not in vars(nn.Module()):
            view.__dict__[name] = value.copy()
    before = {name: value.copy() if isinstance(value, (list, set, dict)) else value for name, value in vars(view).items()}
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(7, 5, hidden)  # no code unpacks a tensor into seven
        notes.number(x)
        with _Watch(notes):
            type(layer).forward(view, x, **words)
    if len(before) != len(vars(view)) or any(before[k] is not v and before[k] != v for k, v in vars(view).items()):
        raise RuntimeError("the layer's forward changes the layer")
    return LayerSteps(notes.steps)


def is_small(layer: nn.Module, name: str) -> bool:
    """Whether a child may run in a tile beside a block by its shape, as norms and dropouts do: no matrices, no parts."""
    child = getattr(layer, name, None) if name else None
    if not isinstance(child, nn.Module) or any(True for _ in child.children()):
        return False
    return all(len(whole_shape(p)) <= 1 for p in child.parameters())


def plain_children(layer: nn.Module, blocks: Mapping[str, int]) -> dict[str, int]:
    """Children that return one tensor: norms, dropouts, activations, and ``blocks`` with their widths (0: the input's)."""
    small = {name: 0 for name, _ in layer.named_children() if is_small(layer, name)}
    functions = {name: 0 for name, value in vars(layer).items() if callable(value) and not isinstance(value, type)}
    return {**small, **functions, **blocks}


def around(layer: nn.Module, steps: LayerSteps, name: str) -> Neighbours:
    """What runs beside the child ``name``."""
    call = steps.call_of(name)
    if call is None or len(call.reads) != 1:
        return Neighbours(members=(name,))
    return replace(_followed(layer, steps, call, Neighbours(members=(name,))), before=norm_before(layer, steps, name))


def norm_before(layer: nn.Module, steps: LayerSteps, name: str) -> str:
    """The norm that makes the hidden states of the child ``name``, and of nothing else; or ""."""
    call = steps.call_of(name)
    maker = steps.maker(call) if call is not None else None
    if maker is None or maker.kind != "child" or not is_small(layer, maker.name) or len(maker.reads) != 1:
        return ""
    return maker.name if steps.call_of(maker.name) is not None else ""


def _followed(layer: nn.Module, steps: LayerSteps, last: Step, near: Neighbours) -> Neighbours:
    after = steps.reader(last)
    if after is None or len(after.reads) != 1 or not after.name:
        return near
    if after.kind == "dropout":
        return replace(near, dropout=after.name)
    if after.kind == "child" and is_small(layer, after.name) and steps.call_of(after.name) is not None:
        return replace(near, after=after.name)
    return near


def looks_inline(widths: Mapping[str, tuple[int, int] | None]) -> tuple[str, str] | None:
    """Two linear layers ``D -> F`` and ``F -> D`` among the children of a layer, which may be an MLP."""
    linear = {name: wide for name, wide in widths.items() if wide is not None}
    for one, (wide, inner) in linear.items():
        for other, turned in linear.items():
            if turned == (inner, wide) and wide < inner:
                return one, other
    return None


def inline(layer: nn.Module, steps: LayerSteps, widths: Mapping[str, tuple[int, int]]) -> Neighbours | None:
    """An MLP whose linear layers are children of the layer, called one after another (OPT, BART)."""
    for name in widths:
        call = steps.call_of(name)
        members: list[Step] = []
        while call is not None and _may_be_inside(layer, call, widths) and len(call.reads) == 1:
            members.append(call)
            if len(members) > 1 and widths.get(call.name) == widths[name][::-1]:
                break
            call = steps.reader(call)
        else:
            continue
        names = tuple(one.name for one in members)
        if widths[name][0] >= widths[name][1] or len(set(names)) < len(names):
            continue
        near = _followed(layer, steps, members[-1], Neighbours(members=names))
        maker = steps.maker(members[0])
        if maker is not None and maker.kind == "child" and is_small(layer, maker.name) and len(maker.reads) == 1:
            return replace(near, before=maker.name)
        return replace(near, closing=_closing(layer, steps, members, near))
    return None


def _may_be_inside(layer: nn.Module, step: Step, widths: Mapping[str, tuple[int, int]]) -> bool:
    if step.kind == "operator" or not step.name:
        return False
    child = getattr(layer, step.name, None)
    return step.kind == "dropout" or step.name in widths or not isinstance(child, nn.Module) or is_small(layer, step.name)


def _closing(layer: nn.Module, steps: LayerSteps, members: list[Step], near: Neighbours) -> str:
    """The norm of ``x + block(x)``, where nothing else reads that sum."""
    last = members[-1]
    follower = steps.reader(last) if near.after or near.dropout else last
    total = steps.reader(follower) if follower is not None else None
    if total is None or total.name not in ("add", "__add__") or len(total.reads) != 2:
        return ""
    norm = steps.reader(total)
    if members[0].hidden_states not in total.reads or norm is None or norm.kind != "child" or len(norm.reads) != 1:
        return ""
    return norm.name if is_small(layer, norm.name) else ""


def pair(layer: nn.Module, steps: LayerSteps, widths: Mapping[str, tuple[int, int]]) -> Neighbours | None:
    """An MLP in two children of the layer (BERT): ``h = first(x)``, ``second(h, other)``."""
    for name, (wide, inner) in widths.items():
        call = steps.call_of(name)
        second = steps.reader(call) if call is not None else None
        if second is None or second.kind != "child" or widths.get(second.name) != (inner, wide) or wide >= inner:
            continue
        if call is not None and second.hidden_states == call.makes and len(second.reads) == 2:
            return Neighbours(members=(name, second.name))
    return None
