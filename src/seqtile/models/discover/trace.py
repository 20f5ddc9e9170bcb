"""A record of what a function of hidden states does, forward and backward, on tensors without memory.

The function runs in a thread of its own: modes, autocast, checkpoint hooks and profilers of the caller are left behind
there. Its operators are followed one by one (:mod:`seqtile.models.discover.token_rules`).
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from seqtile.models.discover.facts import INTERNAL, Code, Facts
from seqtile.models.discover.sizes import SIZES, NoRule, NotPerToken, Untraceable, at, counted, holds_tokens
from seqtile.models.discover.token_rules import Call, Dims, Expressions, Flow, pointwise, rule_for, tensors_in

ONE_TOKEN = {"b": 1, "m": 1, "s": 1}
"""Sizes of the trace that must be the same computation as the judged one."""

_LAYOUT = frozenset((
    "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t",
    "clone", "detach", "alias", "contiguous", "lift_fresh", "_to_copy", "view_copy",
))  # fmt: skip
"""Operators that compute nothing: which of them run may depend on sizes."""


@dataclass(frozen=True)
class Graph:
    """What a trace found.

    Attributes:
        outputs: (expression, dtype) of each tensor that the function returned, and how they are nested.
        gradients: expression of the gradient of every input and weight, by name; None where there is none.
        draws: the random draws, each with how often it was made.
        operators: names of all operators.
    """

    outputs: tuple[Any, ...]
    gradients: tuple[tuple[str, int | None], ...]
    draws: tuple[tuple[int, int], ...]
    operators: frozenset[str] = field(compare=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, PyTorch's own code runs, which the profiler need not see."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)


class Recorder(TorchDispatchMode):
    """Sees every operator of one trace, those of the backward included."""

    def __init__(self, expressions: Expressions, axes: frozenset[str], longest: int) -> None:
        super().__init__()
        self.expressions, self.axes = expressions, axes
        self.sizes: Mapping[str, int] = SIZES
        self.expected: Sequence[Any] | None = None
        self.longest = longest
        self.forward_steps = 0
        self.flows: dict[int, Flow] = {}
        self.owned: dict[int, str] = {}
        self.steps: list[Any] = []
        self.draws: Counter[int] = Counter()
        self.operators: set[str] = set()
        self._alive: list[Tensor] = []

    def add(self, tensor: Tensor, flow: Flow, owner: str = "") -> None:
        """Make a tensor known; ``owner`` names the weight, buffer or input that it is."""
        root = flow.root if flow.root >= 0 else id(tensor)
        self.flows[id(tensor)] = Flow(flow.dims, flow.expr, flow.summed, root)
        if owner:
            self.owned[root] = owner
        self._alive.append(tensor)

    def leaf(self, tensor: Tensor, dims: Dims, owner: str) -> Tensor:
        self.add(tensor, Flow(dims, self.expressions.number("leaf", owner, tensor.dtype)), owner)
        return tensor

    def flow(self, tensor: Tensor) -> Flow:
        known = self.flows.get(id(tensor))
        if known is not None:
            return known
        raise Untraceable(f"it reads a tensor {tuple(tensor.shape)} that is no weight or buffer of its own")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        with unwatched():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in tensors_in((*args, *kwargs.values())):
            if not isinstance(tensor, FakeTensor) and func is not torch.ops.aten.lift_fresh.default:
                raise Untraceable(f"it reads a tensor {tuple(tensor.shape)} that is no weight or buffer of its own")
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if self.expected is None and any(f.axes or f.summed for f in map(self.flow, tensors_in(args))):
                raise NotPerToken("its forward decides by the values of its input") from None
            raise Untraceable("it reads the value of a weight") from None
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        name = name if space == "aten" else func._schema.name
        given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        for unused in ("layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "output_mask"):
            given.pop(unused, None)
        written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        out = tensors_in([result])
        self.operators.add(name)
        if name != "slice" and any(type(value) is int and holds_tokens(value) for value in given.values()):
            raise NotPerToken(f"its forward computes with the number of tokens ({name})")
        self._compare(name, given, out)
        if self.expected is not None:
            return
        base = name.rstrip("_") if written and name not in ("copy_", "fill_", "zero_", "bernoulli_") else name
        arguments = {key: value for key, value in given.items() if key not in written or key == "self"}
        rule = rule_for(func, base) or (rule_for_pointwise(func, base))
        if rule is None:
            raise NoRule(f"it uses {name}, for which there is no rule")
        call = Call(base, arguments, out, self.flow, self.expressions, self.axes)
        found = rule(call)
        flows = found if isinstance(found, list) else [found]
        if "bernoulli" in name or name == "native_dropout":
            self.draws[flows[0].expr] += 1
        targets = [given[key] for key in written] or out
        views = any(one.alias_info is not None for one in func._schema.returns) and not written
        for target, flow in zip(targets, flows, strict=True):
            if len(flow.dims) != target.dim():
                raise Untraceable(f"{name} gave an unexpected shape")
            if written:
                self._write(target, flow)
            else:
                root = self.flow(tensors_in(given.values())[0]).root if views else -1
                self.add(target, Flow(flow.dims, flow.expr, flow.summed, root))

    def _write(self, target: Tensor, flow: Flow) -> None:
        root = self.flow(target).root
        if owner := self.owned.get(root):
            raise NotPerToken(f"its forward writes into {owner}")
        shared = [key for key, one in self.flows.items() if one.root == root and key != id(target)]
        for key in shared:  # other views of the same memory: what they hold now has no name
            self.flows[key] = Flow(self.flows[key].dims, self.expressions.unique(), self.flows[key].summed, root)
            if flow.summed != self.flows[key].summed:
                raise NotPerToken("a sum over tokens is written beside them")
        expr = self.expressions.unique() if shared else flow.expr
        self.flows[id(target)] = Flow(flow.dims, expr, flow.summed, root)

    def _compare(self, name: str, given: Mapping[str, Any], out: list[Tensor]) -> None:
        """Remember the call, or see that it is the one that the first trace made at this place."""
        if name in _LAYOUT or name == "sym_size":
            return
        numbers = [leaf for leaf in tree_flatten(list(given.values()))[0] if not isinstance(leaf, Tensor)]
        step = (name, tuple(numbers), tuple(tuple(tensor.shape) for tensor in out))
        self.steps.append(step)
        if len(self.steps) > self.longest:
            raise Untraceable(f"it runs more than {self.longest:,} operators")
        place = len(self.steps) - 1
        if self.expected is not None and (
            place >= len(self.expected) or _at(self.expected[place], self.sizes) != step
        ):
            raise NotPerToken(f"its forward computes something else for another number of tokens ({name})")

    def finished(self) -> None:
        if self.expected is not None and len(self.steps) != len(self.expected):
            raise NotPerToken("its forward computes something else for another number of tokens")


def _at(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(one, sizes) for one in value)
    return at(value, sizes) if type(value) is int else value


def rule_for_pointwise(func: Any, base: str) -> Any:
    """A variant that writes into its first argument is pointwise if the plain operator is."""
    plain = getattr(torch.ops.aten, base, None)
    tags = [tag for overload in (plain.overloads() if plain else ()) for tag in getattr(plain, overload).tags]
    return pointwise if torch.Tag.pointwise in tags else None


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


class Views:
    """Copies of modules whose weights have shapes but no memory; what runs on them leaves the modules as they are."""

    def __init__(self, make: Callable[[Tensor, torch.device | str], Tensor], training: bool | None) -> None:
        self._make, self._training = make, training
        self._views: dict[int, nn.Module] = {}
        self._weights: dict[int, tuple[str, Tensor]] = {}
        self._former: list[tuple[nn.Module, dict[str, Any]]] = []

    def of(self, module: nn.Module, name: str) -> nn.Module:
        known = self._views.get(id(module))
        if known is not None:
            return known
        view: nn.Module = object.__new__(type(module))
        self._views[id(module)] = view
        own = view.__dict__
        own.update(module.__dict__)
        own["_parameters"] = {key: self._fake(f"{name}.{key}", one) for key, one in module._parameters.items()}
        own["_buffers"] = {key: self._fake(f"{name}.{key}", one) for key, one in module._buffers.items()}
        own["_modules"] = {
            key: self.of(child, f"{name}.{key}") if isinstance(child, nn.Module) else child
            for key, child in module._modules.items()
        }
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                own[key] = self._fake(f"{name}.{key}", value)
            elif type(value) in (list, dict, set) and key not in INTERNAL:
                own[key] = value.copy()
        if self._training is not None:
            own["training"] = self._training
        _bind_forward(own, module, view)
        self._former.append((view, {key: _copied(value) for key, value in own.items()}))
        return view

    def _fake(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._weights:
            fake = self._make(tensor, "cpu" if tensor.is_meta else tensor.device)
            self._weights[id(tensor)] = (name, fake)
        return self._weights[id(tensor)][1]

    def __getitem__(self, module: nn.Module) -> nn.Module:
        return self._views[id(module)]

    def alias(self, module: nn.Module, other: nn.Module) -> None:
        """Give the copy of ``other`` for ``module`` too."""
        self._views[id(module)] = self._views[id(other)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.values()

    def changed(self) -> str:
        """What a call changed in a module, or ""."""
        for view, former in self._former:
            for name, value in view.__dict__.items():
                if name not in former or _differs(former[name], value):
                    return f"{type(view).__name__}.{name}"
        return ""


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _differs(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differs(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_differs, one, other))
    return isinstance(one, Tensor) or isinstance(other, Tensor) or one != other


def _bind_forward(own: dict[str, Any], module: nn.Module, view: nn.Module) -> None:
    """A forward of the instance's own that is bound to the module is bound to the view instead."""
    forward = own.pop("forward", None)
    forward = getattr(forward, "before", {"forward": forward}).get("forward")
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        forward = types.MethodType(forward.__func__, view)
    if forward is not None:
        own["forward"] = forward


Sizes_ = Sequence[int | str]
"""Sizes of an input; a word stands for token axes."""

Function = Callable[[Callable[[nn.Module], Any], list[Tensor]], Any]


class Tracer:
    """Traces functions of the same modules, so that their expressions can be compared.

    Args:
        modules: what the functions run.
        inputs: dimensions of each input, and its dtype.
        device: where the inputs are.
        autocast: its dtype where it is on.
        gradients: whether there is a backward.
        training: True to take every module for training, None to take each as it is.
        longest: most operators of a trace.
    """

    def __init__(
        self, modules: Sequence[nn.Module], inputs: Sequence[tuple[Sizes_, torch.dtype]], device: torch.device,
        autocast: torch.dtype | None = None, gradients: bool = True, training: bool | None = None, longest: int = 5000,
    ) -> None:
        self.modules, self.inputs, self.device = modules, inputs, device
        self.autocast, self.gradients, self.training, self.longest = autocast, gradients, training, longest
        self.expressions = Expressions()
        self.mode = FakeTensorMode()
        self.names: dict[int, str] = {}
        self.axes = frozenset("".join(one for dims, _ in inputs for one in dims if isinstance(one, str)))

    def trace(
        self, function: Function, code: Code | None = None, like: Graph | None = None, functions: Sequence[Any] = ()
    ) -> Graph | None:
        """What ``function`` computes.

        Args:
            function: takes what gives a module's copy, and the inputs.
            functions: functions besides modules that run.
            like: a graph; where the outputs are others, there is no backward, and the result is None.
            code: notes the code that runs; with it the function must do the same to a single token.
        """
        recorder = Recorder(self.expressions, self.axes, self.longest)
        before = Facts(self.modules, functions, Code.written(self.modules, functions)) if code is not None else None
        sys.setprofile(code.profile if code is not None else None)
        try:
            graph = self._run(function, recorder, like)
        finally:
            sys.setprofile(None)
            if before is not None and (changed := before.restore()):
                raise NotPerToken(f"its forward changes {changed}")
        if code is not None:
            before = Facts(self.modules, functions, code)
            other = Recorder(self.expressions, self.axes, self.longest)
            other.sizes, other.expected = ONE_TOKEN, recorder.steps[: recorder.forward_steps]
            self._run(function, other)
            other.finished()
            if changed := before.restore():
                raise NotPerToken(f"its forward changes {changed}")
        return graph

    def _run(self, function: Function, recorder: Recorder, like: Graph | None = None) -> Graph | None:
        sizes = recorder.sizes
        views = Views(self._fake, self.training)
        for number, module in enumerate(self.modules):
            views.of(module, str(number))
        leaves: dict[str, Tensor] = {}
        self.names = {id(tensor): name for name, tensor in views.weights()}
        with self.mode:
            inputs = [
                torch.empty([one if isinstance(one, int) else _size(one, sizes) for one in dims], dtype=dtype,
                            device=self.device).requires_grad_(dtype.is_floating_point or dtype.is_complex)
                for dims, dtype in self.inputs
            ]
        for number, (tensor, (dims, _)) in enumerate(zip(inputs, self.inputs, strict=True)):
            recorder.leaf(tensor, tuple(tuple(one) if isinstance(one, str) else () for one in dims), f"input {number}")
            leaves[f"input {number}"] = tensor
        for name, tensor in views.weights():
            recorder.leaf(tensor, ((),) * tensor.dim(), name)
            if tensor.requires_grad:
                leaves[name] = tensor
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.mode)
            stack.enter_context(recorder)
            stack.enter_context(Sizes())
            # Not the leaves themselves: autocast keeps one copy of a leaf for all who cast it, and hidden states are none.
            result = function(views.__getitem__, [tensor.view_as(tensor) for tensor in inputs])
            recorder.forward_steps = len(recorder.steps)
            graph = self._backward(result, leaves, recorder, like)
        if changed := views.changed():
            raise NotPerToken(f"its forward changes {changed}")
        return graph

    def _fake(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor without memory in a weight's place: of its whole shape, and trained."""
        shape = getattr(tensor, "ds_shape", tensor.shape)
        with self.mode:
            fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=device)
        trains = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        fake.requires_grad_(trains and (fake.is_floating_point() or fake.is_complex()))
        return nn.Parameter(fake, requires_grad=fake.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _backward(
        self, result: Any, leaves: dict[str, Tensor], recorder: Recorder, like: Graph | None
    ) -> Graph | None:
        flat, spec = tree_flatten(result)
        judged = recorder.expected is None
        outputs: list[Any] = [str(spec)]
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                outputs.append(leaf)
                continue
            if judged:
                flow = recorder.flow(leaf)
                if flow.axes != self.axes or flow.summed:
                    raise NotPerToken(f"it returns a tensor that has no row per token ({tuple(leaf.shape)})")
                outputs.append((flow.expr, flow.dims, leaf.dtype))
        if like is not None and like.outputs != tuple(outputs):
            return None
        gradients: list[tuple[str, int | None]] = []
        differentiable = [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self.gradients and not differentiable:
            raise Untraceable("its output passes no gradient back")
        if self.gradients and differentiable and judged:
            upstream = []
            for number, leaf in enumerate(differentiable):
                gradient = torch.empty_like(leaf)
                recorder.leaf(gradient, recorder.flow(leaf).dims, f"upstream {number}")
                upstream.append(gradient)
            found = torch.autograd.grad(differentiable, list(leaves.values()), upstream, allow_unused=True)
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
                if gradient is None:
                    gradients.append((name, None))
                    continue
                flow, wanted = recorder.flow(gradient), recorder.flow(leaf)
                if wanted.axes and (flow.dims != wanted.dims or flow.summed):
                    raise NotPerToken("the gradient of its input depends on other tokens")
                if not wanted.axes and (not flow.summed or flow.axes):
                    raise NotPerToken(f"the gradient of {name} is no sum over tokens")
                gradients.append((name, flow.expr))
        return Graph(tuple(outputs), tuple(gradients), tuple(sorted(recorder.draws.items())),
                     frozenset(recorder.operators))  # fmt: skip


def _size(axes: str, sizes: Mapping[str, int]) -> int:
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product
