"""The layer that ``kernelize`` puts into the place of an MLP's forward.

``kernels`` binds :meth:`TiledMLP.forward` to each MLP of the model, so ``self`` is that MLP. What it computes is read
from its own class: ``torch.fx`` traces the forward, and the trace must be ``down(act(gate(x)) * up(x))`` or
``down(act(up(x)))`` of plain linear layers, and nothing else. The weights are inputs of one autograd node, so DDP, FSDP
and ZeRO see one gradient each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from seqtile._compat import HOOKS
from seqtile.ops.linear import Projection
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.pointwise import ACTIVATIONS, RELU, RELU2, Activation
from seqtile.ops.rng import Autocast
from seqtile.tiling import FUSED_WIDTHS, BlockShape, TileRule


class TiledMLP(nn.Module):
    """An MLP over tiles of tokens, with the gradients of the untiled one and a third of its memory or less.

    Tiles follow the module's shapes (:meth:`seqtile.tiling.TileRule.tile_sizes`, ``"auto"``); a batch that tiles would
    not help runs the module's own forward.
    """

    has_backward = True
    can_torch_compile = False

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``; 11 units of ``2 * tokens * D * F`` for a step of a gated MLP, untiled 9.

        Raises:
            NotImplementedError: the module computes something else, or holds layers that are not plain linear ones.
        """
        return tiled_forward(self, x)


@dataclass(frozen=True)
class Layout:
    """What an MLP's forward computes.

    Attributes:
        first: names of the linear layers before the activation: gate and up, a fused one, or the up of a plain MLP.
        down: name of the linear layer after it.
        activation: between them.
        gated: whether the activation is multiplied by ``up``.
        up_first: a fused layer holds up in its first half.
    """

    first: tuple[str, ...]
    down: str
    activation: Activation
    gated: bool
    up_first: bool = False


def tiled_forward(module: nn.Module, x: Tensor) -> Tensor:
    """The forward of ``module`` over tiles of ``x``."""
    layout = _layout_of(module)
    first = tuple(_projection(module, name) for name in layout.first)
    down = _projection(module, layout.down)
    tensors = [tensor for projection in (*first, down) for tensor in projection.tensors()]
    untiled: Callable[..., Tensor] = type(module).forward
    if not Autocast.of(x).enabled and any(tensor.dtype != x.dtype for tensor in tensors):
        return untiled(module, x)  # raises as it always does
    matrix = down.weight
    assert isinstance(matrix, Tensor)
    hidden, width = matrix.shape
    trained = sum(tensor.numel() for tensor in tensors if tensor.requires_grad)
    shape = BlockShape(
        hidden, width, x.element_size(), trained, matrix.element_size(), x.device.type, live_widths=FUSED_WIDTHS
    )
    sizes = TileRule("auto").tile_sizes(x.shape[:-1].numel(), shape)
    if not sizes:
        return untiled(module, x)
    weights = FusedWeights(first, down, layout.activation, gated=layout.gated, up_first=layout.up_first)
    return fused_mlp(x, weights, sizes)


def _projection(module: nn.Module, name: str) -> Projection:
    """The live tensors of a linear layer."""
    linear = module.get_submodule(name)
    if type(linear) is not nn.Linear:
        raise _refusal(module, f"its {name} is a {type(linear).__name__}, expected a plain Linear")
    if "forward" in vars(linear) or any(vars(linear)[hooks] for hooks in HOOKS):
        raise _refusal(module, f"its {name} has hooks or a forward of its own, which would not run")
    for tensor in (linear.weight, linear.bias):
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            raise _refusal(module, f"a weight of its {name} is a {type(tensor).__name__}, expected a whole tensor")
    return Projection(linear.weight, linear.bias)


def _refusal(module: nn.Module, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"seqtile's kernel cannot tile {type(module).__name__}: {why}; leave it out of the kernel mapping, or use "
        "seqtile.apply, which reads more"
    )


_layouts: WeakKeyDictionary[nn.Module, tuple[Any, Layout]] = WeakKeyDictionary()


def _layout_of(module: nn.Module) -> Layout:
    """The layout of this module, traced again when it, or a module in it, has changed."""
    state = tuple((name, type(child), _read_by_forward(child)) for name, child in module.named_modules())
    cached = _layouts.get(module)
    if cached is None or cached[0] != state:
        cached = _layouts[module] = state, _Reader(module).layout()
    return cached[1]


def _read_by_forward(module: nn.Module) -> tuple[Any, ...]:
    """What a forward may decide by: numbers, words and functions on the module, and how many hooks it has."""
    state = vars(module)
    plain = [(key, value) for key, value in state.items() if callable(value) or type(value) in (bool, int, float, str)]
    return *plain, *(len(state[hooks]) for hooks in HOOKS)


class _LinearsAreLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear)


class _Reader:
    """Matches the trace of a forward, from its output to its input."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        try:
            self._graph = _LinearsAreLeaves().trace(module)
        except Exception as error:  # whatever foreign code raises when it is given a proxy
            raise _refusal(module, f"its forward cannot be traced ({type(error).__name__}: {error})") from error
        self._seen: set[fx.Node] = set()

    def layout(self) -> Layout:
        """The formula of the whole trace."""
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        (output,) = [node for node in self._graph.nodes if node.op == "output"]
        if len(inputs) != 1:
            raise self._other("it takes more than one input")
        self._seen = {output, inputs[0]}
        down, hidden = self._linear(output.args[0])
        hidden = self._take(hidden)
        if hidden.target in (operator.mul, torch.mul, "mul"):
            left, right = hidden.args
            try:
                activation, gate = self._activation(left)
                up = right
            except NotImplementedError:
                activation, gate = self._activation(right)
                up = left
            first, up_first = self._gate_and_up(gate, up, inputs[0])
            layout = Layout(first, down, activation, gated=True, up_first=up_first)
        else:
            self._seen.discard(hidden)
            activation, node = self._activation(hidden)
            layout = Layout((self._of(node, inputs[0]),), down, activation, gated=False)
        if unread := [node for node in self._graph.nodes if node not in self._seen]:
            raise self._other(f"it also computes {unread[0].format_node() or unread[0]}")
        if len({*layout.first, layout.down}) < len(layout.first) + 1:
            raise self._other("it calls a linear layer twice")
        return layout

    def _other(self, why: str) -> NotImplementedError:
        return _refusal(
            self._module, f"its forward is another formula than down(act(gate(x)) * up(x)) or down(act(up(x))): {why}"
        )

    def _take(self, node: Any) -> fx.Node:
        if not isinstance(node, fx.Node):
            raise self._other(f"a constant {node!r} stands in it")
        self._seen.add(node)
        return node

    def _linear(self, node: Any) -> tuple[str, Any]:
        node = self._take(node)
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            raise self._other(f"{node.format_node()} stands where a linear layer was expected")
        return str(node.target), node.args[0]

    def _of(self, node: Any, source: fx.Node) -> str:
        name, read = self._linear(node)
        if read is not source:
            raise self._other(f"{name} reads something else than the input")
        return name

    def _activation(self, node: Any) -> tuple[Activation, Any]:
        """The activation that ends at ``node``, and what it is applied to."""
        node = self._take(node)
        # Neither changes the function: gradients are computed from its input, and "none" is GELU's default.
        keywords = {key: value for key, value in node.kwargs.items() if key != "inplace" and value != "none"}
        if node.op == "call_function" and len(node.args) == 1:
            for activation in ACTIVATIONS:
                for _, spelling in activation.spellings:
                    plain, fixed = (
                        (spelling.func, spelling.keywords) if isinstance(spelling, partial) else (spelling, {})
                    )
                    if node.target is plain and keywords == fixed:
                        return activation, node.args[0]
            if node.target is torch.square and not keywords:
                activation, inner = self._activation(node.args[0])
                if activation is RELU:
                    return RELU2, inner
        self._seen.discard(node)
        raise self._other(f"{node.format_node()} is no activation that the kernel knows")

    def _gate_and_up(self, gate: Any, up: Any, source: fx.Node) -> tuple[tuple[str, ...], bool]:
        """Names of the layers that gate and up come from, and whether a fused one holds up first."""
        halves = [self._half(node) for node in (gate, up)]
        if halves == [None, None]:
            return (self._of(gate, source), self._of(up, source)), False
        gate_half, up_half = halves
        if gate_half is None or up_half is None or gate_half[0] is not up_half[0] or gate_half[1] == up_half[1]:
            raise self._other("gate and up are not the two halves of one layer")
        return (self._of(gate_half[0].args[0], source),), gate_half[1] == 1

    def _half(self, node: Any) -> tuple[fx.Node, int] | None:
        """The ``chunk`` that a node takes a half of, and which."""
        if not isinstance(node, fx.Node) or node.target is not operator.getitem:
            return None
        parts, index = node.args
        if not isinstance(parts, fx.Node) or parts.target not in ("chunk", torch.chunk):
            return None
        count, dim = ((*parts.args[1:], *parts.kwargs.values()) + (0,))[:2]
        if count != 2 or dim != -1 or index not in (0, 1):
            return None
        self._seen |= {node, parts}
        return parts, 1 if index == 1 else 0
