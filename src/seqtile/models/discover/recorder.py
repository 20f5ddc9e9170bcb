"""Sees every operator of a trace and follows it by its rule."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqtile._compat import (
    GRAPH_MEMBERS,
    MEMORY_METHODS,
    READ_NUMBER,
    READ_NUMBER_NAME,
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    schema_of,
    tree_flatten,
    without_function_modes,
)
from seqtile.counting.watch import tensors_in
from seqtile.models.discover.python_code import KNOWN_LIBRARIES
from seqtile.models.discover.sizes import (
    SIZES,
    NoRule,
    NotPerToken,
    Shape,
    Untraceable,
    at,
    counted,
    holds_tokens,
    noted,
    plain,
)
from seqtile.models.discover.token_flow import MIXED, Atoms, Call, Expressions, Flow, features
from seqtile.models.discover.token_rules import RULES, literal, numbers_in, reshaped, rule_for, same

LONGEST = 5000
"""Most operators of a trace."""

_UNUSED = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "output_mask")
"""Arguments that change no value."""


class Recorder(TorchDispatchMode):
    """Sees every operator of one trace, those of the backward included.

    Args:
        expressions: where expressions get their numbers.
        axes: the token axes of the inputs.
        expected: the steps of the judged trace, where this one only has to be the same.
        sizes: the sizes of the token axes.

    Attributes:
        returned: how the outputs are nested, and those that are no tensors.
        asked: how often the code asked a yes-or-no question about its weights' values.
        yes: which of these questions is answered with yes.
    """

    def __init__(
        self, expressions: Expressions, axes: frozenset[str], expected: Sequence[Any] | None = None,
        sizes: Mapping[str, int] = SIZES,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.expressions, self.axes, self.expected, self.sizes = expressions, axes, expected, sizes
        self.steps: list[Any] = []
        self.forward = 0
        self.draws: Counter[int] = Counter()
        self.operators: set[str] = set()
        self.no_rule: NoRule | None = None
        self.asked, self.yes = 0, -1
        self.returned: tuple[str, str] | None = None
        self.shapes: list[tuple[int, ...]] = []
        self._known: dict[int, tuple[Tensor, Flow]] = {}
        self._owners: dict[int, str] = {}

    def leaf(self, tensor: Tensor, dims: tuple[Atoms, ...], owner: str) -> None:
        """Make a weight, a buffer, an input or an upstream gradient known, by its name."""
        self._add(tensor, Flow(dims, self.expressions.number("leaf", owner, tensor.dtype)))
        self._owners[id(tensor)] = owner

    def _add(self, tensor: Tensor, flow: Flow) -> None:
        self._known[id(tensor)] = tensor, replace(flow, root=flow.root if flow.root >= 0 else id(tensor))

    def flow(self, tensor: Tensor) -> Flow:
        if id(tensor) not in self._known:
            raise Untraceable(f"it reads a tensor {tuple(tensor.shape)} that is no weight or buffer of its own")
        return self._known[id(tensor)][1]

    def share_memory(self, tensors: Sequence[Tensor]) -> bool:
        """Whether two of these tensors have the same memory."""
        roots = [self.flow(tensor).root for tensor in tensors]
        return len(set(roots)) < len(roots)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        with unwatched(), without_function_modes():  # which are on where a backward calls
            kwargs, tensors = kwargs or {}, tensors_in((*args, *(kwargs or {}).values()))
            if func is not torch.ops.aten.lift_fresh.default:
                for tensor in tensors:
                    if self.expected is None or not isinstance(tensor, FakeTensor):
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
                if self.expected is None and any(flow.axes or flow.summed for flow in map(self.flow, tensors)):
                    raise NotPerToken("its forward decides by the values of its input") from None
                if tensors[0].dtype is not torch.bool or func is not READ_NUMBER:
                    raise Untraceable("it reads the value of a weight") from None
                self.asked += 1
                self.operators.add(READ_NUMBER_NAME)
                return self.asked == self.yes
            except Exception as error:
                note_failure(error)
                raise
            if tensors or tensors_in([result]):  # else it asks about dtypes
                self._record(func, args, kwargs, tensors_in([result]))
            return result

    def _record(self, func: Any, args: Any, kwargs: Any, out: list[Tensor]) -> None:
        schema = schema_of(func)
        name = schema.name.removeprefix("aten::")
        given = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        given = {key: value for key, value in given.items() if key not in _UNUSED}
        self.operators.add(name.rstrip("_"))
        if name != "slice" and any(type(value) is int and holds_tokens(value) for value in given.values()):
            raise NotPerToken(f"its forward computes with the number of tokens ({name})")
        rule = rule_for(func, name)
        if rule not in (same, reshaped) and name not in _LAYOUT:
            self._compare(name.rstrip("_"), given, out)
        if self.expected is not None:
            return
        written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        arguments = {key: value for key, value in given.items() if key not in written or key == "self"}
        base = name if name in RULES else name.rstrip("_") if written else name
        call = Call(base, arguments, out, self.flow, self.expressions, self.axes)
        try:
            if rule is None:
                given_axes = {axis for flow in call.flows() for axis in flow.axes}
                if not noted.in_backward and any(given_axes - set(Flow(call.dims(one), 0).axes) for one in out):
                    raise call.mixes("is taken over them")
                raise NoRule(f"it uses {name}, for which there is no rule")
            flows = rule(call)
        except NoRule as error:  # go on: what comes later may refute
            self.no_rule = self.no_rule or error
            flows = [Flow(call.dims(one), self.expressions.unique()) for one in out]
        if "bernoulli" in name or name == "native_dropout":
            self.draws[flows[0].expr] += 1
        views = not written and any(one.alias_info is not None for one in schema.returns)
        for target, flow in zip([given[key] for key in written] or out, flows, strict=True):
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
            raise NotPerToken(f"its forward writes into {owner}")
        for key, (other, known) in list(self._known.items()):
            if (
                known.root == root and other is not target
            ):  # the whole of the same memory holds the same, a part has no name
                if flow.summed != known.summed:
                    raise NotPerToken("a sum over tokens is written beside them")
                whole = other.numel() == target.numel() and features(other, known.dims) == features(target, flow.dims)
                self._known[key] = other, replace(known, expr=flow.expr if whole else self.expressions.unique())
        self._known[id(target)] = target, replace(flow, root=root)

    def _compare(self, name: str, given: Mapping[str, Any], out: Sequence[Tensor]) -> None:
        """Remember the step, or see that it is the one that the judged trace made at this place."""
        leaves = tree_flatten(list(given.values()))[0]
        plain = tuple(one for one in leaves if not isinstance(one, Tensor))
        if name in ("lift_fresh", "lift_fresh_copy"):
            plain = tuple(repr(numbers_in(one)) for one in leaves if isinstance(one, Tensor))
        shapes = tuple(tuple(tensor.shape) for tensor in out)
        # A linear layer is one operator or two, depending on whether its input is contiguous.
        names = {"addmm": ("mm", "add"), "baddbmm": ("bmm", "add"), "addmv": ("mv", "add")}.get(name, (name,))
        names = names if plain == (1, 1) else (name,)
        for one in names:
            step = (one, plain if one == name else (1,) if one == "add" else (), shapes)
            self.steps.append(step)
            place = len(self.steps) - 1
            if place > LONGEST:
                raise Untraceable(f"it runs more than {LONGEST:,} operators")
            if self.expected is not None and (
                place >= len(self.expected) or self._here(self.expected[place]) != self._here(step)
            ):
                raise NotPerToken(f"its forward computes something else for another number of tokens ({name})")

    def _here(self, step: tuple[str, tuple[Any, ...], tuple[tuple[int, ...], ...]]) -> Any:
        """What a step of the judged trace is with the sizes of this one; dimensions of size 1 do not count."""
        name, plain, shapes = step
        sizes = tuple(tuple(at(size, self.sizes) for size in shape) for shape in shapes)
        return name, tuple(at(one, self.sizes) if type(one) is int else one for one in plain), [
            tuple(size for size in shape if size != 1) for shape in sizes
        ]  # fmt: skip


_CUTS = {torch.ops.aten.split.Tensor: 2, torch.ops.aten.split_with_sizes.default: 2, torch.ops.aten.unbind.int: 1}
"""Operators that return a tensor for every piece, and the place of the dimension among their arguments."""

_LAYOUT = ("expand", "permute", "transpose", "t")
"""Operators that compute nothing, beside copies and reshapes: which of them run may depend on sizes."""


class Sizes(TorchFunctionMode):
    """Gives the traced code sizes that tell when it computes with the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        noted.pytorch_called(caller)
        called = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if called in ("__get__", "__set__") else called
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and (called == "__set__" or name == "grad") and not _asker(caller).startswith(_MAY_SET):
            does = "sets" if called == "__set__" else "asks for"
            raise NotPerToken(f"its forward {does} {name} of a tensor")
        if tensor is not None and name in _ON_LEAVES and not _asker(caller).startswith(_MAY_SET):
            for what, tensors in (("its input", self.inputs), ("a weight", self.weights)):
                if any(tensor is one for one in tensors):
                    raise NotPerToken(f"its forward calls {name} on {what}")
        if tensor is not None and not (asker := _asker(caller)).startswith(_MAY_ASK):
            self._check(name, tensor)
            if name in _OF_LAYOUT and asker.partition(".")[0] not in (*KNOWN_LIBRARIES, "torch"):
                raise Untraceable(f"its forward asks for {name} of a tensor")
        with unwatched():
            try:
                result = func(*plain(args), **plain(kwargs or {}))
            except (NotPerToken, Untraceable):
                raise
            except Exception as error:
                note_failure(error)
                raise
        if type(result) is torch.Size:
            return Shape(counted(size) for size in result)
        if type(result) is tuple and all(type(one) is int for one in result):
            return tuple(counted(one) for one in result)
        return counted(result) if type(result) is int and name != "__len__" else result

    def _check(self, name: str, tensor: Tensor) -> None:
        """Refuse questions about what a tensor without memory, or of another trace, would answer otherwise."""
        if name in _OF_GRAPH:
            raise NotPerToken(f"its forward asks for {name} of a tensor, which is another in a tile")
        if name in _OF_MEMORY or (name in _OF_TOKENS and any(map(holds_tokens, tensor.shape))):
            raise NotPerToken(f"its forward asks for {name} of a tensor")


def _asker(frame: types.FrameType | None) -> str:
    """The module whose code calls a method of a tensor, some of which are written in Python."""
    while frame is not None and frame.f_globals.get("__name__") in ("torch._tensor", "torch.overrides"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


_MAY_SET = ("seqtile.", "torch.utils.", "torch.autograd.")
_MAY_ASK = ("seqtile.", "torch.utils.", "torch.autograd.", "torch.nn.modules.module", "torch.nn.modules._functions")
"""Modules of our own, and those of PyTorch that call hooks."""

_ON_LEAVES = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_")
_OF_MEMORY = frozenset(
    ("data_ptr", "untyped_storage", "storage", "storage_offset", "is_set_to", *MEMORY_METHODS, "grad", "tolist",
     "numpy", "__array__")
)  # fmt: skip
_OF_LAYOUT = ("stride", "is_contiguous")
"""A weight's or an input's may be any; libraries that we know ask for it to choose between equal kernels."""

_OF_TOKENS = ("__len__", "is_contiguous", "requires_grad", "__repr__", "__str__", "__format__")
_OF_GRAPH = ("is_leaf", "grad_fn", "output_nr", "retains_grad", "is_inference", "is_conj", "is_neg", *GRAPH_MEMBERS)


def note_failure(error: Exception) -> None:
    """Whoever catches an error of a tensor without memory might not have met it on a real one: refuse all the same."""
    first = str(error).splitlines()[0][:200] if str(error) else ""
    Untraceable(f"it could not be executed here ({type(error).__name__}: {first})")  # which is noted as it is made


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, PyTorch's own code runs, which the profiler need not see."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)
