"""Code that a trace could take for other code: by the one size it may ask for, by what it is, or in its backward.

Every model here was tiled once, and wrong without a word. Now it must be left untiled, and say so.
"""

from __future__ import annotations

import enum
import numbers
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics.test_hostile_code import HIDDEN, INTERMEDIATE, Layer, Mlp, center, outcome

Between = Callable[[Any, Tensor, Tensor], Tensor]
UNTILED = ("left", "refused")


class _Told(torch.autograd.Function):
    """Halves the gradient where it is told to."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, told: bool) -> Tensor:
        ctx.told = told
        return h * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (grad * 0.5 if ctx.told else grad * 1.0), None


def _without_gradients(self: Any, x: Tensor, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.shape[0] != 1):
        gate = self.gate_proj(x)
    return F.silu(gate) * h


def _halving(when: Callable[[Tensor, Tensor], bool]) -> Between:
    def between(self: Any, x: Tensor, h: Tensor) -> Tensor:
        h = h * 1.5
        if torch.is_grad_enabled():
            h.register_hook(lambda grad: grad * 0.5 if when(x, grad) else grad)
        return h

    return between


ONES: dict[str, Between] = {
    "another weight": lambda self, x, h: (
        F.silu((self.up_proj if x.shape[0] == 1 else self.gate_proj)(x)) * h + 0 * self.gate_proj(x) * self.up_proj(x)
    ),
    "the other operand": lambda self, x, h: (
        F.silu((lambda one, two: two if x.shape[0] == 1 else one)(self.gate_proj(x), self.up_proj(x))) * h
    ),
    "detached": lambda self, x, h: 1.5 * (h.detach() if x.shape[0] == 1 else h),
    "one token, detached": lambda self, x, h: 1.5 * (h.detach() if x.shape[1] == 1 else h),
    "without gradients": _without_gradients,
    "a hook": _halving(lambda x, grad: x.shape[0] == 1),
    "asked in a hook": _halving(lambda x, grad: grad.shape[0] == 1),
    "told to a backward": lambda self, x, h: 1.5 * _Told.apply(h, x.shape[0] == 1),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("tokens", [20, 4])
def test_what_one_sequence_computes_is_what_all_do(name: str, tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    # Of four tokens, the last tile has a single one.
    assert outcome(lambda: Layer(Mlp(ONES[name])), caplog, (3, tokens, HIDDEN)) in UNTILED


class Length(enum.IntEnum):
    SHORT = 20


def _apply(function: Callable[[Any], Any], value: Any) -> Any:
    return function(value)


def _type_of(value: Any) -> Any:
    return type(value)


QUESTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "isinstance of a size": lambda self, x: isinstance(x.shape[1], int) and x.shape[1] > 16,
    "isinstance of an abstract number": lambda self, x: isinstance(x.shape[1], numbers.Integral) and x.shape[1] > 16,
    "isinstance of the shape": lambda self, x: isinstance(x.shape, torch.Size),
    "type of a size": lambda self, x: type(x.shape[1]) is int and x.shape[1] > 16,
    "type of a size, in a function": lambda self, x: _type_of(x.shape[1]) == int and x.shape[1] > 16,  # noqa: E721
    "a size is another": lambda self, x: x.shape[1] is self.length,
    "equal to a number of NumPy's": lambda self, x: x.shape[1] == np.int64(20),
    "equal to a member of an enumeration": lambda self, x: x.shape[1] == Length.SHORT,
    "not unequal to it": lambda self, x: not x.shape[1] != Length.SHORT,
    "an index, beside a call of PyTorch's": lambda self, x: (
        lambda length, _: 16 < length < 100
    )(_apply(operator.index, x.shape[1]), _apply(torch.sin, x)),
    "type of a tensor": lambda self, x: type(x).__name__ == "Tensor",
    "class of a tensor": lambda self, x: x.__class__.__name__ == "Tensor",
    "type of a weight": lambda self, x: type(x) is not type(self.up_proj.weight),
    "layout of a weight": lambda self, x: self.up_proj.weight.is_contiguous() is False,
    "strides of a weight": lambda self, x: self.up_proj.weight.stride(0) == 1,
    "place in memory": lambda self, x: x.storage_offset() != 0,
    "in a dictionary of modules": lambda self, x: self in SEEN,
    "in a weak dictionary of modules": lambda self, x: self in WEAK,
    "in a weak set of modules": lambda self, x: self in WEAK_SET,
    "in a dictionary of weights": lambda self, x: self.up_proj.weight in SEEN,
    "in a dictionary by number": lambda self, x: id(self) in IDS,
    "in a slot": lambda self, x: getattr(self, "kept", False),
}  # fmt: skip

SEEN: dict[Any, bool] = {}
WEAK: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
WEAK_SET: weakref.WeakSet[Any] = weakref.WeakSet()
IDS: dict[int, bool] = {}


class Slotted(Mlp):
    __slots__ = ("kept",)


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_a_trace_would_answer_otherwise_is_not_asked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    asks = QUESTIONS[name]

    def build() -> nn.Module:
        mlp: Any = (Slotted if name == "in a slot" else Mlp)(lambda self, x, h: center(h) if asks(self, x) else h)
        mlp.length = 20
        mlp.up_proj.weight = nn.Parameter(torch.randn(HIDDEN, INTERMEDIATE).t())
        for known in (SEEN, WEAK, IDS):
            known.clear()
        SEEN[mlp], WEAK[mlp], IDS[id(mlp)], SEEN[mlp.up_proj.weight] = True, True, True, True
        WEAK_SET.add(mlp)
        if isinstance(mlp, Slotted):
            Slotted.kept.__set__(mlp, True)  # type: ignore[attr-defined]
        return Layer(mlp, lambda self, x: x + self.mlp(x)) if name == "place in memory" else Layer(mlp)

    try:
        assert outcome(build, caplog) in UNTILED
    finally:
        SEEN.clear()


class Needing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1 if ctx.needs_input_grad[0] else h * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1


class NeedingActivation(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return F.silu(Needing.apply(z))  # type: ignore[no-untyped-call]


class Activated(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act = NeedingActivation()

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def test_a_function_that_asks_what_needs_gradients_is_left(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(Activated()), caplog) in UNTILED


class Mixing(nn.Parameter):
    """A weight whose products take the mean over tokens away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return center(found) if func is F.linear else found


class Centred(Tensor):
    """An input whose activations lose their mean over tokens."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            found = center(found) if func is F.silu else found
        return found.as_subclass(Centred) if isinstance(found, Tensor) and func is not Tensor.as_subclass else found


def _with_mixing_weight() -> nn.Module:
    mlp = Mlp()
    weight = mlp.up_proj.weight.data
    del mlp.up_proj._parameters["weight"]
    mlp.up_proj.register_parameter("weight", Mixing(weight))
    return Layer(mlp)


def _with_centred_input(self: Any, x: Tensor) -> Tensor:
    return x + self.mlp(self.norm(x).as_subclass(Centred)).as_subclass(Tensor)


@pytest.mark.parametrize("build", [_with_mixing_weight, lambda: Layer(Mlp(), _with_centred_input)], ids=["w", "x"])
def test_tensors_that_compute_otherwise_are_left(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome(build, caplog) in UNTILED


class Kept:
    def __init__(self, h: Tensor) -> None:
        self.h = h

    def __repr__(self) -> str:
        return "Kept"


class Returning(Mlp):
    def __init__(self, besides: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.besides = besides

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.besides(x, y)


def _doubling_first(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x) * 1
    first, second = self.mlp(h)
    with torch.no_grad():
        first.mul_(2.0)
    return x + first + second + h


def _reading(self: Any, x: Tensor) -> Tensor:
    y, kept = self.mlp(self.norm(x))
    return x + y + kept.h.mean()


@pytest.mark.parametrize(
    ("besides", "forward"),
    [
        (lambda x, y: y, _doubling_first),
        (lambda x, y: x, _doubling_first),
        (lambda x, y: Kept(y), _reading),
    ],
    ids=["its output twice", "its input", "an object"],
)
def test_outputs_that_belong_together_are_left(besides: Any, forward: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(Returning(besides), forward), caplog) in UNTILED


def _marking(what: Callable[[Any, Tensor], Tensor]) -> Between:
    def between(self: Any, x: Tensor, h: Tensor) -> Tensor:
        what(self, x).mark = 3.0  # type: ignore[attr-defined]
        return h

    return between


@pytest.mark.parametrize("what", [lambda self, x: x, lambda self, x: self.up_proj.weight], ids=["input", "weight"])
def test_an_attribute_set_on_a_tensor_is_not_lost(what: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert (
        outcome(lambda: Layer(Mlp(_marking(what)), lambda self, x: x + self.mlp(self.norm(x) * 1)), caplog) in UNTILED
    )


COUNTS: list[int] = []


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []

    def count_one(self, grad: Tensor) -> None:
        self.count += 1

    def remember(self, grad: Tensor) -> None:
        self.seen.append(1)

    def __call__(self, module: nn.Module, given: Any, gradients: Any) -> None:
        self.count += 1


class _Counting(torch.autograd.Function):
    """Notes each backward in what it is given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, counter: Any) -> Tensor:
        ctx.counter = counter
        return h * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.counter is None:
            COUNTS.append(1)
        else:
            ctx.counter.count += 1
        return grad * 1, None


def _hooked_by(hook: Callable[[Any], Any]) -> Between:
    def between(self: Any, x: Tensor, h: Tensor) -> Tensor:
        h = h * 1.5
        if torch.is_grad_enabled():
            h.register_hook(hook(self.counter))
        return h

    return between


BACKWARDS: dict[str, Between] = {
    "in a global list": lambda self, x, h: 1.5 * _Counting.apply(h, None),  # type: ignore[no-untyped-call]
    "in an object": lambda self, x, h: 1.5 * _Counting.apply(h, self.counter),  # type: ignore[no-untyped-call]
    "by a tensor's hook": _hooked_by(lambda counter: counter.count_one),
    "by a tensor's hook, in a list": _hooked_by(lambda counter: counter.remember),
    "by a module's hook": lambda self, x, h: 1.5 * h,
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_what_counts_in_its_backward_counts_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        mlp: Any = Mlp(BACKWARDS[name])
        mlp.counter = Counter()
        if "module" in name:
            mlp.up_proj.register_full_backward_hook(mlp.counter)
        return Layer(mlp)

    assert outcome(build, caplog) in UNTILED


@torch.library.custom_op("hostile_traces::centre", mutates_args=())
def _centre(x: Tensor) -> Tensor:
    return center(x) if x.shape[1] > 100 else x.clone()


@_centre.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_centre.register_autograd(lambda ctx, grad: grad)


def _seeded(self: Any, x: Tensor, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return F.dropout(h, 0.5, True)


def _most(x: Tensor) -> Tensor:
    return (x / 100).clamp(min=1)


def _most_chosen(self: Any, x: Tensor, h: Tensor) -> Tensor:
    chosen, value = h[..., :4].argmax(-1).flatten(), h[..., 0].detach().flatten()
    return h / _most(torch.zeros(4).scatter_reduce(0, chosen, value, "amax").max())


OPERATORS: dict[str, tuple[Between, dict[str, Any]]] = {
    "aminmax": (lambda self, x, h: h / _most(torch.aminmax(h.detach()).max), {"scale": 200.0}),
    "scatter_reduce": (_most_chosen, {"scale": 200.0}),
    "cummax": (lambda self, x, h: h + torch.cummax(h.detach().clamp(min=100.0), 1).values, {"scale": 200.0}),
    "nansum": (lambda self, x, h: h + torch.nansum(h.detach().clamp(min=100.0) - 100) * 1e-3, {"scale": 200.0}),
    "masked_scatter": (
        lambda self, x, h: h.masked_scatter(h > 100.0, x.repeat(1, 1, 6)[..., :INTERMEDIATE].contiguous()),
        {"scale": 200.0},
    ),
    "an operator of its own": (
        lambda self, x, h: torch.ops.hostile_traces.centre(h),
        {"shape": (1, 200, HIDDEN)},
    ),
    "a seed of its own": (_seeded, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_may_read_other_tokens_is_left(name: str, caplog: pytest.LogCaptureFixture) -> None:
    between, how = OPERATORS[name]
    assert outcome(lambda: Layer(Mlp(between), lambda self, x: x + self.mlp(x)), caplog, **how) in UNTILED


class Experts(nn.Module):
    """Hand-written routed experts with a capacity that no trial reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = 4, HIDDEN
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * INTERMEDIATE, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, INTERMEDIATE) * 0.3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (found[:64] for found in torch.where(top_k_index == expert))
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert]) * top_k_weights[token, place, None]
            out.index_add_(0, token, y)
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 4, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, index = self.router(rows).softmax(-1).topk(2, -1)
        return self.experts(rows, index, weights).view_as(x)  # type: ignore[no-any-return]


def test_experts_of_no_known_library_are_left_unless_trusted(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(Routed()), caplog, (2, 200, HIDDEN)) in UNTILED
    assert "its code belongs to no library" in caplog.text


class Shifted(nn.Module):
    """An MLP whose activation adds one to the bits of a number, not to the number."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        z = self.up_proj(x)
        t = torch.tanh(0.7978845608 * z * (1.0 + 0.044715 * z * z))
        return self.down_proj(0.5 * z * (t.view(torch.int32) + 1).view(torch.float32))  # type: ignore[no-any-return]


class Finite(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(torch.where(h.detach() <= torch.inf, h, torch.zeros_like(h)))


@pytest.mark.parametrize("build", [Shifted, Finite])
def test_no_formula_is_found_in_bits_or_comparisons_with_infinity(build: Any) -> None:
    import seqtile

    torch.manual_seed(0)
    model: Any = Layer(build())
    x = torch.randn(3, 20, HIDDEN)
    x[0, 0, 0] = torch.nan if build is Finite else x[0, 0, 0]
    with torch.no_grad():
        expected = model.mlp(x)
        seqtile.apply(model, tile=3)
        torch.testing.assert_close(model.mlp(x), expected, equal_nan=True)
