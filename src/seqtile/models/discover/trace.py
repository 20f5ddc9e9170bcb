"""A record of what a function of hidden states does, forward and backward, on tensors without memory.

The function runs in a thread of its own: modes, autocast, checkpoint hooks and profilers of the caller stay behind.
Its operators are followed one by one (:mod:`seqtile.models.discover.recorder`).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from seqtile._compat import FakeTensorMode, run_backward, tree_flatten
from seqtile._log import log_level
from seqtile.counting.fake import Quicker
from seqtile.models.discover.facts import Facts
from seqtile.models.discover.python_code import Code, is_raised_by_user
from seqtile.models.discover.recorder import Recorder, Sizes
from seqtile.models.discover.sizes import SIZES, NotPerToken, TokenCount, Untraceable, at, has_count, noted, plain
from seqtile.models.discover.token_flow import Expressions
from seqtile.models.discover.views import Views, is_known_kind


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


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What a function may return besides tensors."""

_here = threading.local()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def is_tracing() -> bool:
    """Whether this thread runs a trace or a trial."""
    return getattr(_here, "traces", False)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """``function()`` in a thread of its own: no mode, hook or autocast state of the caller reaches it, nor the reverse.

    All threads share one cache of the weights that autocast has cast, and the outermost autocast of a thread empties it
    on leaving (``torch.autocast.__exit__``): inside a caller's autocast no block of the thread is the outermost.
    """
    answer: list[Any] = []
    inside = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()

    def call() -> None:
        _here.traces = True
        if inside:
            torch.autocast_increment_nesting()  # the thread's own count, which ends with it
        with log_level(FakeTensorMode.__module__, logging.CRITICAL + 1):  # it writes a traceback for each failure
            try:
                answer.append((function(), None))
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                answer.append((None, error))

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
        try:
            with code.watching():
                graph = self._run(function, recorder, SIZES)
        finally:
            changed = before.restore(code)
        if changed:
            raise NotPerToken(f"its forward changes {changed}")

        def again(recorder: Recorder, sizes: Mapping[str, int], ones: Collection[str] = ()) -> Graph | None:
            """Another trace, with an eye on all that the code was seen to read."""
            before = Facts(self.modules, functions, code)
            try:
                graph = self._run(function, recorder, sizes, ones=ones)
            finally:
                changed = before.restore(code)
            if changed:
                raise NotPerToken(f"its forward changes {changed}")
            return graph

        asked = noted.asked
        for sizes in self._small_sizes():
            other = Recorder(self._expressions, self.axes, recorder.steps[: recorder.forward], sizes)
            again(other, sizes)
            shapes = [tuple(at(size, sizes) for size in shape) for shape in recorder.shapes]
            if other.returned != recorder.returned or other.shapes != shapes:
                raise NotPerToken("its forward returns something else for another number of tokens")
            if asked:  # all of it, with that answer, on the large sizes that can be followed
                other = Recorder(self._expressions, self.axes)
                if again(other, SIZES, [axis for axis in sizes if sizes[axis] == 1]) != graph:
                    raise NotPerToken("it computes something else for another number of tokens")
        if code.in_backward and not asked:
            again(Recorder(self._expressions, self.axes), SIZES)
        for question in range(recorder.asked):  # "is one infinite?": yes must be an error, as PEFT's VB-LoRA raises
            self._refuses(function, question + 1)
        if recorder.no_rule is not None:
            raise recorder.no_rule
        assert graph is not None
        return graph

    def _small_sizes(self) -> Iterator[dict[str, int]]:
        """The token axes with a size of 1 for all of them, and for some: the one size that code may ask for."""
        axes = sorted(self.axes)
        for ones in itertools.product((True, False), repeat=len(axes)):
            if any(ones):
                yield {**SIZES, **{axis: 1 for axis, one in zip(axes, ones, strict=True) if one}}

    def _refuses(self, function: Function, question: int) -> None:
        """See that the code raises an error of its own where the answer to this question is yes."""
        recorder = Recorder(self._expressions, self.axes)
        recorder.yes = question
        try:
            self._run(function, recorder, SIZES)
        except (NotPerToken, Untraceable):
            pass
        except Exception as error:  # noqa: BLE001 - whatever it raises
            if is_raised_by_user(error):
                return
        raise Untraceable("it decides by the values of its weights")

    def trace(self, function: Function, like: Graph) -> Graph | None:
        """What ``function`` computes, or None where its outputs are others than in the graph ``like``."""
        return self._run(function, Recorder(self._expressions, self.axes), SIZES, like)

    def _run(
        self, function: Function, recorder: Recorder, sizes: Mapping[str, int], like: Graph | None = None,
        ones: Collection[str] = (),
    ) -> Graph | None:  # fmt: skip
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
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # which asks for values
            # A tile runs under a checkpoint's, which torch.func's derivatives refuse.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
            stack.enter_context(set_checkpoint_early_stop(False))  # which ends a recompute by an error
            stack.enter_context(self._mode)
            stack.enter_context(Quicker())
            stack.enter_context(recorder)
            watched = stack.enter_context(Sizes())
            noted.begin(ones)
            stack.callback(noted.indexed.clear)  # which hold frames
            watched.inputs = [tensor.view_as(tensor) for tensor in inputs]
            watched.weights = [tensor for _, tensor in views.weights()]
            shown = [*watched.inputs, *watched.weights]
            names = [set(vars(tensor)) for tensor in shown]
            try:
                result = function(views.__getitem__, list(watched.inputs))
            except TypeError as error:
                if TokenCount.__name__ in str(error):  # a function of PyTorch that takes no sizes
                    raise NotPerToken("its forward computes with the number of tokens") from None
                raise
            noted.check()
            recorder.forward = len(recorder.steps)
            flat, spec = tree_flatten(result)
            rest = [one for one in flat if not isinstance(one, Tensor)]
            if has_count(rest):
                raise NotPerToken("its forward returns the number of tokens")
            tensors = [one for one in flat if isinstance(one, Tensor)]
            if any(set(vars(one)) - names[0] for one in tensors):
                raise NotPerToken("its forward sets an attribute of its output")
            if opaque := next((one for one in rest if not isinstance(one, _PLAIN)), None):
                raise Untraceable(f"it returns a {type(opaque).__name__}, of which nothing is known")
            recorder.returned = (str(spec), repr(rest))
            recorder.shapes = [plain(tuple(one.shape)) for one in flat if isinstance(one, Tensor)]
            if recorder.expected is None:
                if recorder.share_memory([*tensors, *inputs]):
                    raise NotPerToken("what it returns shares memory, so that a change of one would change another")
                graph = self._backward(tensors, leaves, recorder, like)
            elif len(recorder.steps) != len(recorder.expected):
                raise NotPerToken("its forward computes something else for another number of tokens")
            noted.check()
            if any(set(vars(tensor)) != former for tensor, former in zip(shown, names, strict=True)):
                raise NotPerToken("its forward sets an attribute of its input or of a weight")
        if changed := views.changed():
            raise NotPerToken(f"its forward changes {changed}")
        return graph

    def _fake(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor without memory in a weight's place, of its whole shape."""
        if not is_known_kind(type(tensor)):
            raise Untraceable(f"a weight or buffer is a {type(tensor).__name__}, which may do anything")
        shape = getattr(tensor, "ds_shape", tensor.shape)
        with self._mode:
            fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=device)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Buffer):
            return nn.Buffer(fake, persistent=bool(getattr(tensor, "persistent", True)))
        return nn.Parameter(fake, requires_grad=fake.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _backward(
        self, tensors: list[Tensor], leaves: Mapping[str, Tensor], recorder: Recorder, like: Graph | None
    ) -> Graph | None:
        """The graph, after a backward from upstream gradients of their own; None if it was not to be made."""
        flows = [recorder.flow(one) for one in tensors]
        if recorder.no_rule is None:
            for one, flow in zip(tensors, flows, strict=True):
                if set(flow.axes) != self.axes or flow.summed:
                    raise NotPerToken(f"it returns a tensor that has no row per token (shape {tuple(one.shape)})")
        described = [(flow.expr, flow.dims, one.dtype) for one, flow in zip(tensors, flows, strict=True)]
        assert recorder.returned is not None
        outputs = (*recorder.returned, *described)
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
            noted.in_backward = True
            inner = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            given = tuple(inner.values())
            found = run_backward(tuple(ends), tuple(upstream), False, False, given, True, accumulate_grad=False)
            for (name, leaf), gradient in zip(inner.items(), found, strict=True):
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
