"""Which attention modules of known libraries can run one group of heads at a time, proved by running them so.

The model's own ``forward`` runs on a shallow view of the module in which the four projections are stand-ins: those of
query, key and value hand out a group's slice, the output projection keeps what it is given. A trace on a few tokens
shows whether that is the same computation: every projection called once, the first three with the hidden states, which
nothing else reads (they are NaN), and nothing done to the result of the last. Then all heads at once must give what
group by group gives, and the same gradients.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import (
    CACHE_ARGUMENTS,
    MODULES,
    PARAMETERS,
    children_of,
    compute_attention_plainly,
    disable_current_modes,
    parameters_of,
)
from seqtile._shallow import view_of
from seqtile._technique import Left
from seqtile.devices import one_thread
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.engines.zero3 import whole_shape
from seqtile.ops import rotary
from seqtile.ops.attention.group_core import HeadGroup
from seqtile.recognise.candidates import PREDICTION_HEAD, LayerTraces, is_per_row
from seqtile.recognise.decoder_layers import ATTENTION_MIXER, is_prediction_head, kind_of, looks_like_attention
from seqtile.recognise.known_code import is_known
from seqtile.recognise.known_functions import with_rotary, with_twins
from seqtile.recognise.known_kernels import twin_of
from seqtile.recognise.layer_parts import norm_before
from seqtile.recognise.widths import linear_widths

_INPUTS = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "out_proj")
_COUNTS = {"num_heads": 0, "num_attention_heads": 0, "n_heads": 0, "num_key_value_heads": 1, "num_kv_heads": 1}


@dataclass(frozen=True)
class HeadShape:
    """Heads of an attention module.

    Attributes:
        query: query heads.
        groups: key-value heads.
        width: elements of a head.
        query_width: elements of a head's query and of what is packed with it: Qwen3-Next's gate.
        output: name of the output projection.
    """

    query: int
    groups: int
    width: int
    query_width: int
    output: str

    @property
    def projections(self) -> tuple[str, str, str, str]:
        """Names of the projections of query, key, value and output."""
        return (*_INPUTS, self.output)


@dataclass(frozen=True)
class Attention:
    """An attention module that can run one group of heads at a time.

    Attributes:
        name: qualified name.
        module: the module.
        shape: its heads.
        layer: qualified name of the decoder layer around it.
        norm: child of that layer that norms its input and is read by nothing else, or "".
    """

    name: str
    module: nn.Module
    shape: HeadShape
    layer: str
    norm: str


def find_attention(model: nn.Module) -> tuple[list[Attention], list[Left]]:
    """Attention modules of the known form in module order, and the others with the reason."""
    modules = dict(model.named_modules())
    traces = LayerTraces(modules)
    attention: list[Attention] = []
    left: list[Left] = []
    proved: dict[object, str] = {}
    for name, module in modules.items():
        inside = any(
            name.startswith(f"{earlier}.")
            for earlier in [earlier.name for earlier in attention] + [earlier.name for earlier in left]
        )
        linears = sum(linear_widths(child) is not None for child in module.children())
        if not inside and is_prediction_head(name, module):
            left.append(Left(name, type(module).__name__, PREDICTION_HEAD))
            continue
        if inside or linears < 2 or not looks_like_attention(name, module):
            continue
        if kind_of(name.rpartition(".")[2], module) not in ("", ATTENTION_MIXER):  # a state, by whatever name
            continue
        shape = head_shape(module) if is_known(type(module).forward) else _CUSTOM
        if isinstance(shape, HeadShape):
            key = _key(module, shape)
            if key not in proved:
                proved[key] = why_not_by_heads(module, shape)
            shape = proved[key] or shape
        if isinstance(shape, str):
            left.append(Left(name, type(module).__name__, shape))
            continue
        layer, _, child = name.rpartition(".")
        parent = modules.get(layer)
        norm = ""
        if parent is not None and layer:
            hidden = (linear_widths(module.get_submodule("q_proj")) or (0, 0))[0]
            steps = traces.of(parent, hidden, {})
            norm = norm_before(parent, steps, child) if steps is not None else ""
            norm = norm if norm and is_per_row(model, getattr(parent, norm), hidden) else ""
        attention.append(Attention(name, module, shape, layer, norm))
    return attention, left


_CUSTOM = "its forward is custom code; heads= supports attention of Transformers and libraries built on it"


def _key(module: nn.Module, shape: HeadShape) -> object:
    plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool)) and k != "layer_idx"}
    weights = tuple((name, tuple(whole_shape(weight))) for name, weight in between_weights(module))
    return type(module), tuple(sorted(plain.items())), weights, shape


def head_shape(module: nn.Module) -> HeadShape | str:
    """The heads of an attention module by its projections; or why it is not of the known form."""
    output = next((name for name in _OUTPUTS if hasattr(module, name)), _OUTPUTS[0])
    widths = [linear_widths(getattr(module, name, None) or nn.Identity()) for name in (*_INPUTS, output)]
    if None in widths:
        linear = [name for name, child in module.named_children() if linear_widths(child) is not None]
        return f"its projections are {', '.join(linear)}, not {', '.join((*_INPUTS, output))}"
    (hidden, q), (_, k), (_, v), (o, out) = (pair for pair in widths if pair is not None)
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or width < 1 or o % width or k % width:
        return "head_dim does not determine its heads"
    query = o // width
    shape = HeadShape(query, k // width, width, q // query, output)
    if shape.query % shape.groups or k != v or q % o or out != hidden:
        return "its projections do not fit one query group per key-value head"
    if "forward" in module.__dict__ and not hasattr(module.__dict__["forward"], "setting"):
        return "its forward was replaced on the instance"
    return shape


def between_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Weights of an attention module that are not in its four projections."""
    weights = []
    for name, weight in named_weights(module):
        if name.partition(".")[0] not in (*_INPUTS, *_OUTPUTS):
            weights.append((name, weight))
    return weights


class View:
    """One call of an attention module's own forward with some of its heads.

    Args:
        module: the attention module.
        shape: its heads.
        cut: the heads to run.
        parts: their queries, keys and values.
        traced: raise where something follows the output projection, and run plain twins of known kernels.
    """

    def __init__(
        self, module: nn.Module, shape: HeadShape, cut: HeadGroup, parts: Sequence[Tensor], *, traced: bool = False
    ) -> None:
        self._traced = traced
        self.calls: list[str] = []
        self._output: Tensor | None = None
        self.view = view_of(module)
        attributes = self.view.__dict__
        for name, index in _COUNTS.items():
            if attributes.get(name) == (shape.query, shape.groups)[index]:
                attributes[name] = cut.size * (shape.query // shape.groups, 1)[index]
        attributes[PARAMETERS] = {
            name: cut.of(weight, 0) if name == "sinks" and weight is not None else weight
            for name, weight in parameters_of(module).items()
        }
        self._parts = dict(zip(_INPUTS, parts, strict=True))
        self._projections = shape.projections
        for name in _INPUTS:
            attributes[name] = _Handed(self, name)
        attributes[shape.output] = self._take

    def run(self, hidden_states: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The input of the output projection."""
        self._hidden_states = hidden_states
        forward = type(self.view).forward
        if self._traced:
            forward = with_twins(forward)
        elif rotary.ROTARY_BY_DEVICE.get(hidden_states.device.type, rotary.ROTARY_KERNELS) is not None:
            forward = with_rotary(forward)
        try:
            self._result = forward(self.view, hidden_states, *args, **kwargs)
        finally:
            self.view.__dict__.clear()  # the view and its stand-ins hold each other, and with them the call's tensors
            self._parts.clear()
        output, self._output = self._output, None
        assert output is not None
        return output

    def hand(self, name: str, hidden_states: Tensor) -> Tensor:
        self.calls.append(name if hidden_states is self._hidden_states else f"{name} of something else")
        return self._parts[name]

    def _take(self, output: Tensor) -> Tensor:
        self.calls.append(self._projections[-1])
        self._output = output
        self._given_back = nothing_like(self._hidden_states)
        if self._traced:
            self._given_back = self._given_back.as_subclass(_Untouched)
        return self._given_back

    @property
    def beside(self) -> tuple[Any, ...] | None:
        """Further outputs of the forward, without attention weights; None if it returned no tuple."""
        if not isinstance(self._result, tuple):
            return None
        return tuple(None if isinstance(value, Tensor) else value for value in self._result[1:])

    @property
    def is_plain(self) -> bool:
        """Whether each projection was called once, as described above, and the last one's result went out as it was."""
        result = self._result[0] if isinstance(self._result, tuple) else None
        return sorted(self.calls) == sorted(self._projections) and result is self._given_back


class _Untouched(Tensor):
    """A tensor that only is passed on: whatever else is done with it raises, a dropout in evaluation mode too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"its output projection is followed by {getattr(func, '__name__', func)}")


class _Handed:
    """Replaces a projection: returns what was computed before."""

    def __init__(self, view: View, name: str) -> None:
        self._view, self._name = view, name

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self._view.hand(self._name, hidden_states)


def nothing_like(like: Tensor) -> Tensor:
    """A tensor of this shape that takes no memory and spoils whatever reads it."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(like.shape)


def why_not_by_heads(module: nn.Module, shape: HeadShape) -> str:
    """Why the module cannot run one group of heads at a time; "" if the trace and the numbers show that it can."""
    with (
        disable_current_modes(), torch.device("cpu"), torch.random.fork_rng(devices=[]), one_thread(),
        torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False),
    ):  # fmt: skip
        torch.manual_seed(0)
        reason = ""
        for rotary in (shape.width, shape.width // 2, shape.width // 4, 3 * shape.width // 4):
            try:
                return _compare_groups(module, shape, rotary)
            except Exception as error:  # noqa: BLE001 - a module that does not take these arguments is left alone
                reason = reason or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return f"its forward does not run on some of its heads ({reason.rstrip(': ')})"


def _compare_groups(module: nn.Module, shape: HeadShape, rotary: int) -> str:
    tokens = 6
    # Small heads of the same number would do, but head_dim is read in many ways.
    sizes = [shape.query * shape.query_width, *[shape.groups * shape.width] * 2]
    parts = [torch.randn(1, tokens, size, dtype=torch.float32, requires_grad=True) for size in sizes]
    weights = {
        name: torch.randn(whole_shape(weight), dtype=torch.float32).add_(1).requires_grad_()
        for name, weight in between_weights(module)
    }
    turn = torch.randn(1, tokens, rotary)
    offered = {
        "position_embeddings": (turn.cos(), turn.sin()), "attention_mask": None, **dict.fromkeys(CACHE_ARGUMENTS),
        "position_ids": torch.arange(tokens)[None], "cache_position": torch.arange(tokens),
    }  # fmt: skip
    taken = inspect.signature(type(module).forward).parameters
    kwargs = {name: value for name, value in offered.items() if name in taken}
    hidden_states = nothing_like(torch.empty(1, tokens, 8))
    gradient = torch.randn(1, tokens, shape.query * shape.width)
    leaves = [*parts, *weights.values()]
    seen: list[list[Tensor]] = []
    for size in (shape.groups, 1):
        total = [torch.zeros_like(leaf) for leaf in leaves]
        whole = torch.empty_like(gradient)
        for start in range(0, shape.groups, size):
            cut = HeadGroup(start, size, shape.groups)
            bare = _bare_attention(module)
            cut_parts = [cut.of(projected, -1) for projected in parts]

            def call(
                cut: HeadGroup = cut, cut_parts: list[Tensor] = cut_parts, bare: nn.Module = bare
            ) -> tuple[View, Tensor]:
                view = View(bare, shape, cut, cut_parts, traced=True)
                return view, view.run(hidden_states, (), kwargs)

            named = {f"0.{name}": weight for name, weight in weights.items()}
            view, output = call_with_weights(ParameterSwap((bare,)), named, (call,))
            if not view.is_plain:
                return "its forward does more to its input or output than the four projections"
            cut.of(whole, -1).copy_(output.detach())
            gradients = torch.autograd.grad(output, leaves, cut.of(gradient, -1), allow_unused=True)
            total = [
                whole_values if gradient is None else whole_values + gradient
                for whole_values, gradient in zip(total, gradients, strict=True)
            ]
        seen.append([whole, *total])
    for whole_values, grouped_values in zip(*seen, strict=True):
        if not torch.isfinite(whole_values).all():
            return "its forward reads the hidden states outside its projections"
        if not torch.allclose(
            whole_values, grouped_values, rtol=1e-4, atol=1e-4 * float(whole_values.abs().max()) + 1e-9
        ):
            return "its heads are not independent: one group at a time gives other results"
    return ""


def _bare_attention(module: nn.Module) -> nn.Module:
    """A shallow copy for training that drops nothing and computes attention by plain products, whatever its kernel."""
    bare: nn.Module = view_of(module)
    attributes = bare.__dict__
    attributes.update(
        {name: 0.0 for name, value in module.__dict__.items() if "drop" in name and isinstance(value, float)}
    )
    attributes[PARAMETERS] = dict(parameters_of(module))
    attributes[MODULES] = {
        name: nn.Identity() if isinstance(child, nn.Dropout) else (child and twin_of(child)) or child
        for name, child in children_of(module).items() if name not in (*_INPUTS, *_OUTPUTS)
    }  # fmt: skip
    bare.training = True
    config = copy.copy(getattr(module, "config", None))
    if config is not None:
        compute_attention_plainly(config)
        attributes["config"] = config
    return bare
