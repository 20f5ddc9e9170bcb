"""Trace a function of hidden states, forward and backward, on tensors without memory.

The function runs in a thread of its own: modes, autocast, checkpoint hooks and profilers of the caller stay behind.
Its operators are followed one by one (:mod:`seqtile.recognise.recorder`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import FakeTensorMode, run_backward, tree_flatten
from seqtile._log import log_level
from seqtile.recognise.recorder import Recorder
from seqtile.recognise.sizes import SIZES, NotPerToken, Untraceable
from seqtile.recognise.token_flow import Expressions
from seqtile.recognise.views import Views


@dataclass(frozen=True)
class Graph:
    """The result of a trace.

    Attributes:
        outputs: (expression, dimensions, dtype) of each tensor that the function returned, after how they are nested.
        gradients: expression of the gradient of every input and weight, by name, or None.
        draws: the random draws, each with how often it was made.
        operators: names of all operators.
    """

    outputs: tuple[Any, ...]
    gradients: tuple[tuple[str, int | None], ...]
    draws: tuple[tuple[int, int], ...]
    operators: frozenset[str] = field(compare=False)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """``function()`` in a thread of its own: no mode, hook or autocast state of the caller reaches it, nor the reverse.

    All threads share one cache of the weights that autocast has cast, and the outermost autocast of a thread empties it
    on leaving (``torch.autocast.__exit__``): inside a caller's autocast no block of the thread is the outermost.
    """
    answer: list[Any] = []
    inside = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()

    def call() -> None:
        if inside:
            torch.autocast_increment_nesting()  # the thread's own count, which ends with it
        with log_level(FakeTensorMode.__module__, logging.CRITICAL + 1):  # it logs a traceback for each failure
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
"""A function to trace; it takes a function that returns a module's copy, and the inputs."""


class Tracer:
    """Traces functions of the same modules, so that their expressions can be compared.

    Args:
        modules: the modules that the functions run.
        inputs: sizes and dtype of each input; a name represents the token axes in a dimension.
        device: where the inputs are.
        autocast: dtype of autocast, None where it is off.
        gradients: whether to trace a backward too.
    """

    def __init__(
        self, modules: Sequence[nn.Module], inputs: Sequence[tuple[Sequence[int | str], torch.dtype]],
        device: torch.device, autocast: torch.dtype | None = None, gradients: bool = True,
    ) -> None:  # fmt: skip
        self.modules, self.inputs, self.device = modules, inputs, device
        self.autocast, self.gradients = autocast, gradients
        self.axes = frozenset("".join(axes for sizes, _ in inputs for axes in sizes if isinstance(axes, str)))
        self.names: dict[int, str] = {}
        self._expressions, self._mode = Expressions(), FakeTensorMode()

    def judge(self, function: Function) -> Graph:
        """Trace what ``function`` computes, if it is position-wise and has no side effects.

        Raises:
            NotPerToken: it is not position-wise, or has side effects.
            Untraceable: it cannot be traced to its end.
        """
        recorder = Recorder(self._expressions, self.axes)
        graph = self._run(function, recorder)
        if recorder.no_rule is not None:
            raise recorder.no_rule
        assert graph is not None
        return graph

    def trace(self, function: Function, like: Graph) -> Graph | None:
        """The graph of ``function``, or None if its outputs differ from those of the graph ``like``."""
        return self._run(function, Recorder(self._expressions, self.axes), like)

    def _run(self, function: Function, recorder: Recorder, like: Graph | None = None) -> Graph | None:
        views = Views(self._fake)
        for number, module in enumerate(self.modules):
            views.of(module, str(number))
        self.names = {id(tensor): name for name, tensor in views.weights()}
        leaves: dict[str, Tensor] = {}
        for number, (dims, dtype) in enumerate(self.inputs):
            shape = [dim if isinstance(dim, int) else prod(SIZES[axis] for axis in dim) for dim in dims]
            with self._mode:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            leaves[f"input {number}"] = tensor.requires_grad_(dtype.is_floating_point or dtype.is_complex)
            recorder.leaf(tensor, tuple(tuple(dim) if isinstance(dim, str) else () for dim in dims), f"input {number}")
        # Not the leaves themselves: autocast caches casts of leaves, and hidden states are not leaves.
        inputs = list(leaves.values())
        for name, tensor in views.weights():
            recorder.leaf(tensor, ((),) * tensor.dim(), name)
            leaves |= {name: tensor} if tensor.requires_grad else {}
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # anomaly detection reads values
            stack.enter_context(self._mode)
            stack.enter_context(recorder)
            result = function(views.__getitem__, [tensor.view_as(tensor) for tensor in inputs])
            flat, spec = tree_flatten(result)
            tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
            others = [leaf for leaf in flat if not isinstance(leaf, Tensor)]
            graph = self._backward(tensors, (str(spec), repr(others)), leaves, recorder, like)
        if changed := views.changed():
            raise NotPerToken(f"its forward changes {changed}")
        return graph

    def _fake(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor without memory in place of a weight, with its whole (unsharded) shape."""
        shape = getattr(tensor, "ds_shape", tensor.shape)
        with self._mode:
            fake = torch.empty(tuple(shape), dtype=tensor.dtype, device=device)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Buffer):
            return nn.Buffer(fake, persistent=bool(getattr(tensor, "persistent", True)))
        return nn.Parameter(fake, requires_grad=fake.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _backward(
        self, tensors: list[Tensor], nested: tuple[str, str], leaves: Mapping[str, Tensor], recorder: Recorder,
        like: Graph | None,
    ) -> Graph | None:  # fmt: skip
        """Run a backward from new upstream gradients and return the graph; None if outputs differ from ``like``."""
        flows = [recorder.flow(tensor) for tensor in tensors]
        if recorder.no_rule is None:
            for tensor, flow in zip(tensors, flows, strict=True):
                if set(flow.axes) != self.axes or flow.summed:
                    raise NotPerToken(f"it returns a tensor that has no row per token (shape {tuple(tensor.shape)})")
        described = [(flow.expr, flow.dims, tensor.dtype) for tensor, flow in zip(tensors, flows, strict=True)]
        outputs = (*nested, *described)
        if like is not None and like.outputs != outputs:
            return None
        gradients: list[tuple[str, int | None]] = []
        if self.gradients:
            ends = [tensor for tensor in tensors if tensor.requires_grad]
            if not ends:
                raise Untraceable("no gradient flows back from its output")
            upstream = [torch.empty_like(tensor) for tensor in ends]
            for number, (tensor, gradient) in enumerate(zip(ends, upstream, strict=True)):
                recorder.leaf(gradient, recorder.flow(tensor).dims, f"upstream {number}")
            recorder.in_backward = True
            inner = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
            grads = run_backward(
                tuple(ends), tuple(upstream), False, False, tuple(inner.values()), True, accumulate_grad=False
            )
            for (name, leaf), grad in zip(inner.items(), grads, strict=True):
                gradients.append((name, None if grad is None else self._gradient(name, leaf, grad, recorder)))
        draws = tuple(sorted(recorder.draws.items()))
        return Graph(outputs, tuple(gradients), draws, frozenset(recorder.operators))

    def _gradient(self, name: str, leaf: Tensor, gradient: Tensor, recorder: Recorder) -> int:
        flow, expected = recorder.flow(gradient), recorder.flow(leaf)
        if recorder.no_rule is None:
            if expected.axes and (flow.dims != expected.dims or flow.summed):
                raise NotPerToken("the gradient of its input depends on other tokens")
            if not expected.axes and (not flow.summed or flow.axes):
                raise NotPerToken(f"the gradient of {name} is no sum over tokens")
        return flow.expr
