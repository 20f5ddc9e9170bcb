"""A record of what a function of hidden states does, forward and backward, on tensors without memory.

The function runs in a thread of its own: modes, autocast, checkpoint hooks and profilers of the caller stay behind.
Its operators are followed one by one (:mod:`seqtile.models.discover.token_rules`).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from seqtile.models.discover.facts import Code, Facts
from seqtile.models.discover.sizes import SIZES, NoRule, NotPerToken, Untraceable, at, axes_in, counted, holds_tokens
from seqtile.models.discover.token_rules import (
    MIXED,
    RULES,
    Atoms,
    Call,
    Expressions,
    Flow,
    drawn,
    features,
    literal,
    reshaped,
    rule_for,
    same,
    tensors_in,
)
from seqtile.models.discover.views import Views

ONE_TOKEN = dict.fromkeys(SIZES, 1)
"""Sizes of the trace that must be the same computation as the judged one."""

LONGEST = 5000
"""Most operators of a trace."""

_UNUSED = ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "output_mask")
"""Arguments that change no value."""


@dataclass(frozen=True)
class Graph:
    """What a trace found.

    Attributes:
        outputs: (expression, dimensions, dtype) of each tensor that the function returned, after how they are nested.
        gradients: expression of the gradient of every input and weight, by name; None where there is none.
        draws: the random draws, each with how often it was made.
        operators: names of all operators.
    """

    outputs: tuple[Any, ...]
    gradients: tuple[tuple[str, int | None], ...]
    draws: tuple[tuple[int, int], ...]
    operators: frozenset[str] = field(compare=False)


class Recorder(TorchDispatchMode):
    """Sees every operator of one trace, those of the backward included.

    Args:
        expressions: where expressions get their numbers.
        axes: the token axes of the inputs.
        expected: the steps of the judged trace, where this one only has to be the same.
    """

    def __init__(self, expressions: Expressions, axes: frozenset[str], expected: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.expressions, self.axes, self.expected = expressions, axes, expected
        self.steps: list[Any] = []
        self.forward = 0
        self.draws: Counter[int] = Counter()
        self.operators: set[str] = set()
        self.no_rule: NoRule | None = None
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        with unwatched():
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
                raise Untraceable("it reads the value of a weight") from None
            self._record(func, args, kwargs, tensors_in([result]))
            return result

    def _record(self, func: Any, args: Any, kwargs: Any, out: list[Tensor]) -> None:
        schema = func._schema
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
                raise NoRule(f"it uses {name}, for which there is no rule")
            flows = rule(call) if self.no_rule is None or rule is drawn else []
        except NoRule as error:  # go on: what comes later may refute
            self.no_rule = self.no_rule or error
            flows = []
        if self.no_rule is not None:
            flows = [Flow(tuple(tuple(axes_in(size)) for size in one.shape), self.expressions.unique()) for one in out]
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
        plain = tuple(one for one in tree_flatten(list(given.values()))[0] if not isinstance(one, Tensor))
        shapes = tuple(tuple(tensor.shape) for tensor in out)
        # A linear layer is one operator or two, depending on whether its input is contiguous.
        names = {"addmm": ("mm", "add"), "baddbmm": ("bmm", "add"), "addmv": ("mv", "add")}.get(name, (name,))
        for one in names:
            step = (one, plain if one == name and one != "add" else (), shapes)
            self.steps.append(step)
            place = len(self.steps) - 1
            if place > LONGEST:
                raise Untraceable(f"it runs more than {LONGEST:,} operators")
            if self.expected is not None and (
                place >= len(self.expected) or _of_one(self.expected[place]) != _of_one(step)
            ):
                raise NotPerToken(f"its forward computes something else for another number of tokens ({name})")


_CUTS = {torch.ops.aten.split.Tensor: 2, torch.ops.aten.split_with_sizes.default: 2, torch.ops.aten.unbind.int: 1}
"""Operators that return a tensor for every piece, and the place of the dimension among their arguments."""

_LAYOUT = ("expand", "permute", "transpose", "t")
"""Operators that compute nothing, beside copies and reshapes: which of them run may depend on sizes."""


def _of_one(step: tuple[str, tuple[Any, ...], tuple[tuple[int, ...], ...]]) -> Any:
    """What a step of the judged trace is for a single token; dimensions of size 1 do not count."""
    name, plain, shapes = step
    sizes = tuple(tuple(at(size, ONE_TOKEN) for size in shape) for shape in shapes)
    return name, tuple(at(one, ONE_TOKEN) if type(one) is int else one for one in plain), [
        tuple(size for size in shape if size != 1) for shape in sizes
    ]  # fmt: skip


class Sizes(TorchFunctionMode):
    """Gives the traced code sizes that tell when it computes with the number of tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Size:
            return torch.Size(counted(size) for size in result)
        if type(result) is int and getattr(func, "__name__", "") in ("size", "numel", "nelement", "__len__"):
            return counted(result)
        return result


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, PyTorch's own code runs, which the profiler need not see."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


_LOUD = logging.getLogger("torch._subclasses.fake_tensor")


def in_a_thread(function: Callable[[], Any]) -> Any:
    """``function()`` in a thread of its own: no mode, hook or autocast state of the caller reaches it."""
    answer: list[Any] = []

    def call() -> None:
        level = _LOUD.level
        _LOUD.setLevel(logging.CRITICAL + 1)  # it writes a traceback for everything that cannot run on fake tensors
        try:
            answer.append((function(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            answer.append((None, error))
        finally:
            _LOUD.setLevel(level)

    thread = threading.Thread(target=call, name="seqtile-trace")
    thread.start()
    thread.join()
    result, error = answer[0]
    if error is not None:
        raise error
    return result


Function = Callable[[Callable[[nn.Module], Any], list[Tensor]], Any]
"""Takes what gives a module's copy, and the inputs."""


class Tracer:
    """Traces functions of the same modules, so that their expressions can be compared.

    Args:
        modules: what the functions run.
        inputs: sizes and dtype of each input; a word stands for the token axes in a dimension.
        device: where the inputs are.
        autocast: its dtype where it is on.
        gradients: whether there is a backward.
    """

    def __init__(
        self, modules: Sequence[nn.Module], inputs: Sequence[tuple[Sequence[int | str], torch.dtype]],
        device: torch.device, autocast: torch.dtype | None = None, gradients: bool = True,
    ) -> None:  # fmt: skip
        self.modules, self.inputs, self.device = modules, inputs, device
        self.autocast, self.gradients = autocast, gradients
        self.axes = frozenset("".join(one for sizes, _ in inputs for one in sizes if isinstance(one, str)))
        self.names: dict[int, str] = {}
        self._expressions, self._mode = Expressions(), FakeTensorMode()

    def judge(self, function: Function, code: Code, functions: Sequence[Any] = ()) -> Graph:
        """What ``function`` computes, if it treats every token by itself and changes nothing.

        Args:
            function: what to trace.
            code: notes the code that runs.
            functions: functions besides modules that run in it.

        Raises:
            NotPerToken: it does not.
            Untraceable: nothing is known of it.
        """
        recorder = Recorder(self._expressions, self.axes)
        before = Facts(self.modules, functions, Code.written(self.modules, functions))
        sys.setprofile(code.profile)
        try:
            graph = self._run(function, recorder, SIZES)
        finally:
            sys.setprofile(None)
            changed = before.restore()
        if not changed:  # once more, on one token, with an eye on all that the code was seen to read
            before = Facts(self.modules, functions, code)
            try:
                self._run(
                    function, Recorder(self._expressions, self.axes, recorder.steps[: recorder.forward]), ONE_TOKEN
                )
            finally:
                changed = before.restore()
        if changed:
            raise NotPerToken(f"its forward changes {changed}")
        if recorder.no_rule is not None:
            raise recorder.no_rule
        assert graph is not None
        return graph

    def trace(self, function: Function, like: Graph) -> Graph | None:
        """What ``function`` computes, or None where its outputs are others than in the graph ``like``."""
        return self._run(function, Recorder(self._expressions, self.axes), SIZES, like)

    def _run(
        self, function: Function, recorder: Recorder, sizes: Mapping[str, int], like: Graph | None = None
    ) -> Graph | None:
        views = Views(self._fake)
        for number, module in enumerate(self.modules):
            views.of(module, str(number))
        self.names = {id(tensor): name for name, tensor in views.weights()}
        leaves: dict[str, Tensor] = {}
        graph = None
        for number, (dims, dtype) in enumerate(self.inputs):
            shape = [one if isinstance(one, int) else prod(sizes[axis] for axis in one) for one in dims]
            with self._mode:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            leaves[f"input {number}"] = tensor.requires_grad_(dtype.is_floating_point or dtype.is_complex)
            recorder.leaf(tensor, tuple(tuple(one) if isinstance(one, str) else () for one in dims), f"input {number}")
        # Not the leaves themselves: autocast keeps one copy of a leaf for all who cast it, and hidden states are none.
        inputs = list(leaves.values())
        for name, tensor in views.weights():
            recorder.leaf(tensor, ((),) * tensor.dim(), name)
            leaves |= {name: tensor} if tensor.requires_grad else {}
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._mode)
            stack.enter_context(recorder)
            stack.enter_context(Sizes())
            result = function(views.__getitem__, [tensor.view_as(tensor) for tensor in inputs])
            recorder.forward = len(recorder.steps)
            if recorder.expected is None:
                graph = self._backward(result, leaves, recorder, like)
            elif len(recorder.steps) != len(recorder.expected):
                raise NotPerToken("its forward computes something else for another number of tokens")
        if changed := views.changed():
            raise NotPerToken(f"its forward changes {changed}")
        return graph

    def _fake(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor without memory in a weight's place: of its whole shape, and trained."""
        shape = getattr(tensor, "ds_shape", tensor.shape)
        with self._mode:
            fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=device)
        trains = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        fake.requires_grad_(trains and (fake.is_floating_point() or fake.is_complex()))
        return nn.Parameter(fake, requires_grad=fake.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _backward(
        self, result: Any, leaves: Mapping[str, Tensor], recorder: Recorder, like: Graph | None
    ) -> Graph | None:
        """The graph, after a backward from upstream gradients of their own; None if it was not to be made."""
        flat, spec = tree_flatten(result)
        tensors = [one for one in flat if isinstance(one, Tensor)]
        flows = [recorder.flow(one) for one in tensors]
        if recorder.no_rule is None:
            for one, flow in zip(tensors, flows, strict=True):
                if set(flow.axes) != self.axes or flow.summed:
                    raise NotPerToken(f"it returns a tensor that has no row per token (shape {tuple(one.shape)})")
        rest = [one for one in flat if not isinstance(one, Tensor)]
        described = [(flow.expr, flow.dims, one.dtype) for one, flow in zip(tensors, flows, strict=True)]
        outputs = (str(spec), repr(rest), *described)
        if like is not None and like.outputs != outputs:
            return None
        gradients: list[tuple[str, int | None]] = []
        if self.gradients:
            ends = [one for one in tensors if one.requires_grad]
            if not ends:
                raise Untraceable("its output passes no gradient back")
            upstream = [torch.empty_like(one) for one in ends]
            for number, (one, gradient) in enumerate(zip(ends, upstream, strict=True)):
                recorder.leaf(gradient, recorder.flow(one).dims, f"upstream {number}")
            found = torch.autograd.grad(ends, list(leaves.values()), upstream, allow_unused=True)
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
                gradients.append((name, None if gradient is None else self._gradient(name, leaf, gradient, recorder)))
        draws = tuple(sorted(recorder.draws.items()))
        return Graph(outputs, tuple(gradients), draws, frozenset(recorder.operators))

    def _gradient(self, name: str, leaf: Tensor, gradient: Tensor, recorder: Recorder) -> int:
        flow, wanted = recorder.flow(gradient), recorder.flow(leaf)
        if recorder.no_rule is None:
            if wanted.axes and (flow.dims != wanted.dims or flow.summed):
                raise NotPerToken("the gradient of its input depends on other tokens")
            if not wanted.axes and (not flow.summed or flow.axes):
                raise NotPerToken(f"the gradient of {name} is no sum over tokens")
        return flow.expr
