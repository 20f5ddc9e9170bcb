"""Proofs that must expire: what a block reads changes after its first call, in a place that is easily overlooked.

Every model here was wrong once without a word. It has to be equal to untiled, left untiled with a reason, or refused.
"""

from __future__ import annotations

import array
import builtins
import collections
import copy
import ctypes
import dataclasses
import enum
import gc
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqtile
from numerics.test_hostile_code import HIDDEN, INTERMEDIATE, Layer, Mlp, center, outcome
from seqtile.models.discover import proof, python_code

ACCEPTED = ("equal", "left", "refused")


@dataclasses.dataclass
class Options:
    name: str = "a"
    scale: float = dataclasses.field(default=1.0, compare=False)


class Deque(collections.deque[Any]): ...


class Doubles(array.array): ...  # type: ignore[type-arg]


class Bytes(bytearray): ...


class Numbers(np.ndarray): ...  # type: ignore[type-arg]


class Setting(enum.Enum):
    A = {"scale": 1.0}


class Centering(Tensor):
    def mul(self, other: Tensor) -> Tensor:  # type: ignore[override]
        return center(other)


class Act:
    def __call__(self, z: Tensor) -> Tensor:
        return F.silu(z)


class Number:
    def __float__(self) -> float:
        return 1.0


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)


class Meta(type):
    scale = 1.0


class WithMeta(Mlp, metaclass=Meta):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * type(self).scale


class Classy(Mlp):
    scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


class Base(Mlp):
    def post(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.post(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Derived(Base):
    def post(self, h: Tensor) -> Tensor:
        return super().post(h)


class Forwarding(Base):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        if tied:
            self.gate.weight = self.up.weight

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _untie(mlp: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    mlp.gate.weight = nn.Parameter(torch.randn(INTERMEDIATE, HIDDEN, generator=generator))


def _ones() -> Tensor:
    return torch.ones(INTERMEDIATE) * 2


def _centered_if_set(mlp: Any, x: Tensor, h: Tensor) -> Tensor:
    extra = getattr(mlp, "extra", None)
    return h if extra is None else center(h) * extra


def _matched(mlp: Any, x: Tensor, h: Tensor) -> Tensor:
    match mlp.held:
        case Options(scale=1.0):
            return h
    return center(h)


def _with(held: Any, between: Callable[[Any, Tensor, Tensor], Tensor]) -> Mlp:
    mlp = Mlp(between)
    mlp.held = held
    return mlp


def _scaled(held: Any, number: Callable[[Any], float]) -> Mlp:
    return _with(held, lambda mlp, x, h: h * number(mlp.held))


def _center_if(condition: Callable[[Any], Any], held: Any = None) -> Mlp:
    return _with(held, lambda mlp, x, h: center(h) if condition(mlp.held) else h)


def _bias_later(mlp: Any) -> None:
    mlp.up_proj.bias = nn.Parameter(_ones())


def _none_buffer() -> Mlp:
    mlp = _with(None, lambda mlp, x, h: h if mlp.extra is None else center(h) * mlp.extra)
    mlp.register_buffer("extra", None)
    return mlp


def _class_hidden_later(mlp: Any) -> None:
    del mlp.junk
    mlp.scale = 3.0


def _junk() -> Mlp:
    mlp = Classy()
    mlp.junk = 1  # type: ignore[assignment]
    return mlp


PATCHED: list[tuple[Any, str]] = []


def _patched(name: str, owner: Any, first: Any, later: Any, make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A block whose ``owner`` has another attribute later."""
    PATCHED.append((owner, name))

    def build() -> nn.Module:
        setattr(owner, name, first)
        return make()

    return build, lambda mlp: setattr(owner, name, later)


def _with_act() -> Mlp:
    mlp = Mlp(lambda mlp, x, h: mlp.act(h))
    mlp.act = Act()  # type: ignore[assignment]
    return mlp


def _with_called() -> Mlp:
    mlp = Mlp()
    mlp.up_proj = Called(HIDDEN, INTERMEDIATE, bias=False)
    return mlp


def _in_a_folder_like_pytorchs() -> nn.Module:
    text = (
        "from torch import nn\nimport torch.nn.functional as F\n"
        "class FeedForward(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.gate, self.up = nn.Linear({HIDDEN}, {INTERMEDIATE}), nn.Linear({HIDDEN}, {INTERMEDIATE})\n"
        f"        self.down, self.mix = nn.Linear({INTERMEDIATE}, {HIDDEN}), False\n"
        "    def forward(self, x):\n"
        "        h = F.silu(self.gate(x)) * self.up(x)\n"
        "        return self.down(h - h.mean(1, keepdim=True) if self.mix else h)\n"
    )
    scope: dict[str, Any] = {"__name__": "torchtune.modules"}
    exec(compile(text, f"{Path(torch.__file__).parent}tune/modules.py", "exec"), scope)
    return scope["FeedForward"]()  # type: ignore[no-any-return]


STALE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "weights that were tied": (Tied, _untie),
    "a parameter appears": (
        lambda: Mlp(_centered_if_set), lambda mlp: mlp.register_parameter("extra", nn.Parameter(_ones())),
    ),
    "a buffer appears": (lambda: Mlp(_centered_if_set), lambda mlp: mlp.register_buffer("extra", _ones())),
    "a buffer that was None": (_none_buffer, lambda mlp: setattr(mlp, "extra", _ones())),
    "a bias that was None": (
        lambda: Mlp(lambda mlp, x, h: h if mlp.up_proj.bias is None else center(h)), _bias_later,
    ),
    "1 becomes True": (lambda: _center_if(lambda held: held is True, 1), lambda mlp: setattr(mlp, "held", True)),
    "0.0 becomes -0.0": (
        lambda: _scaled(0.0, lambda held: math.copysign(1.0, held)), lambda mlp: setattr(mlp, "held", -0.0),
    ),
    "an equal object": (
        lambda: _scaled(Options(), lambda held: held.scale), lambda mlp: setattr(mlp, "held", Options(scale=3.0)),
    ),
    "the order of a dictionary": (
        lambda: _center_if(lambda held: next(iter(held)) == "b", {"a": 1, "b": 2}),
        lambda mlp: mlp.held.update(a=mlp.held.pop("a")),
    ),
    "a tensor becomes a number": (
        lambda: _with(torch.ones(()), lambda mlp, x, h: h * mlp.held), lambda mlp: setattr(mlp, "held", 3.0),
    ),
    "a tensor of another class": (
        lambda: _with(torch.ones(()), lambda mlp, x, h: mlp.held.mul(h)),
        lambda mlp: setattr(mlp, "held", torch.ones(()).as_subclass(Centering)),
    ),
    "a base class's method": _patched("post", Base, Base.post, lambda self, h: center(h), Derived),
    "a base class's forward": _patched(
        "forward", Base, Base.forward, lambda self, x: center(Mlp.forward(self, x)), Forwarding,
    ),
    "one attribute goes and one comes": (_junk, _class_hidden_later),
    "__call__ of an activation": _patched("__call__", Act, Act.__call__, lambda self, z: center(F.silu(z)), _with_act),
    "__call__ of a child": _patched(
        "__call__", Called, Called.__call__, lambda self, x: center(nn.Linear.__call__(self, x)), _with_called
    ),
    "__float__ of an object": _patched(
        "__float__", Number, Number.__float__, lambda self: 3.0, lambda: _scaled(Number(), float)
    ),
    "a number of C's": (
        lambda: _scaled(ctypes.c_float(1.0), lambda held: held.value), lambda mlp: setattr(mlp.held, "value", 3.0),
    ),
    "a deque's subclass": (
        lambda: _scaled(Deque([1.0]), lambda held: held[0]), lambda mlp: mlp.held.__setitem__(0, 3.0),
    ),
    "an array's subclass": (
        lambda: _scaled(Doubles("d", [1.0]), lambda held: held[0]), lambda mlp: mlp.held.__setitem__(0, 3.0),
    ),
    "a bytearray's subclass": (
        lambda: _scaled(Bytes(b"\x01"), lambda held: held[0]), lambda mlp: mlp.held.__setitem__(0, 3),
    ),
    "a NumPy array's subclass": (
        lambda: _scaled(np.ones(1).view(Numbers), lambda held: float(held[0])),
        lambda mlp: mlp.held.__setitem__(0, 3.0),
    ),
    "the dictionary of an enumeration": (
        lambda: Setting.A.value.update(scale=1.0) or Mlp(lambda mlp, x, h: h * Setting.A.value["scale"]),
        lambda mlp: Setting.A.value.update(scale=3.0),
    ),
    "a class pattern": (lambda: _with(Options(), _matched), lambda mlp: setattr(mlp.held, "scale", 3.0)),
    "a format string": (
        lambda: _scaled(Options(), lambda held: float("{h.scale}".format_map({"h": held}))),
        lambda mlp: setattr(mlp.held, "scale", 3.0),
    ),
    "repr": (
        lambda: _center_if(lambda held: "3.0" in repr(held), types.SimpleNamespace(scale=1.0)),
        lambda mlp: setattr(mlp.held, "scale", 3.0),
    ),
    "an f-string": (
        lambda: _center_if(lambda held: "3.0" in f"{held}", types.SimpleNamespace(scale=1.0)),
        lambda mlp: setattr(mlp.held, "scale", 3.0),
    ),
    "a built-in name": _patched(
        "my_scale", builtins, 1.0, 3.0, lambda: Mlp(lambda mlp, x, h: h * my_scale)  # type: ignore[name-defined]  # noqa: F821
    ),
    "a method added to tensors": _patched(
        "scaled", Tensor, lambda self: self, center, lambda: Mlp(lambda mlp, x, h: h.scaled())
    ),
    "an attribute of sys": _patched("my_scale", sys, 1.0, 3.0, lambda: Mlp(lambda mlp, x, h: h * sys.my_scale)),  # type: ignore[attr-defined]
    "an attribute of NumPy": _patched("my_scale", np, 1.0, 3.0, lambda: Mlp(lambda mlp, x, h: h * np.my_scale)),  # type: ignore[attr-defined]
    "an attribute of torch.nn": _patched("my_scale", nn, 1.0, 3.0, lambda: Mlp(lambda mlp, x, h: h * nn.my_scale)),  # type: ignore[attr-defined]
    "an attribute of nn.Module": _patched(
        "my_scale", nn.Module, 1.0, 3.0, lambda: Mlp(lambda mlp, x, h: h * mlp.my_scale)
    ),
    "an attribute of the metaclass": _patched("scale", Meta, 1.0, 3.0, WithMeta),
    "a setting of a backend": _patched(
        "deterministic", torch.backends.cudnn, False, True,
        lambda: _center_if(lambda held: torch.backends.cudnn.deterministic),
    ),
    "code beside PyTorch's": (_in_a_folder_like_pytorchs, lambda mlp: setattr(mlp, "mix", True)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """Put back what was patched, or one entry's change would decide the next one's proof."""
    missing = object()
    before = [(owner, name, getattr(owner, name, missing)) for owner, name in PATCHED]
    yield
    for owner, name, value in before:
        if value is not missing:
            setattr(owner, name, value)
        elif hasattr(owner, name):
            delattr(owner, name)


@pytest.mark.parametrize("name", STALE)
def test_what_a_proof_rests_on_is_watched(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, change = STALE[name]

    def later(model: Any) -> None:
        model(torch.ones(2, 7, HIDDEN))
        change(model.mlp)

    assert outcome(lambda: Layer(build()), caplog, later=later) in ACCEPTED


def test_a_block_with_tied_weights_does_not_lend_its_proof(caplog: pytest.LogCaptureFixture) -> None:
    found = outcome(lambda: nn.Sequential(Layer(Tied()), Layer(Tied(False))), caplog)
    assert found == "equal"


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "precision of products": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high",
    ),
    "seed": (torch.initial_seed, torch.manual_seed, 0, 5),
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads() + 1),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False, True),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_the_process_is_watched(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ask, put, first, later = SWITCHES[name]

    def build() -> nn.Module:
        put(first)
        return Layer(Mlp(lambda mlp, x, h: center(h) if ask() == later else h))

    def change(model: Any) -> None:
        put(first)
        model(torch.ones(2, 7, HIDDEN))
        put(later)

    def center(h: Tensor) -> Tensor:
        return h - h.mean(1, keepdim=True)

    try:
        assert outcome(build, caplog, later=change) in ACCEPTED
    finally:
        put(first)


def test_a_proof_holds_with_or_without_deterministic_algorithms_and_not_for_both() -> None:
    """PyTorch's own code asks for them too, where no trace looks."""
    inputs, device = ((("b", "s", HIDDEN), torch.float32),), torch.device("cpu")
    mode = proof.Mode(inputs, device)
    assert proof.Mode(inputs, device) == mode
    torch.set_deterministic_debug_mode(1)
    try:
        assert proof.Mode(inputs, device) != mode
    finally:
        torch.set_deterministic_debug_mode(0)


def test_the_default_dtype_of_the_forward_only_is_noticed() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return x + self.mlp(x)  # type: ignore[no-any-return]
        finally:
            torch.set_default_dtype(torch.float32)

    def between(mlp: Any, x: Tensor, h: Tensor) -> Tensor:
        return h * h * (2.0 if torch.get_default_dtype() == torch.float64 else 1.0)

    model, x = Layer(Mlp(between), run), torch.randn(2, 7, HIDDEN)
    seqtile.apply(model, tile=3)
    with pytest.raises(RuntimeError, match="something that its forward reads .* was changed between forward and"):
        model(x).sum().backward()


def test_what_another_thread_counts_is_not_put_back() -> None:
    counter, stop = types.SimpleNamespace(ticks=0), threading.Event()

    def count() -> None:
        while not stop.wait(1e-4):
            counter.ticks += 1
            counted.append(None)

    counted: list[None] = []
    thread = threading.Thread(target=count)
    model = Layer(_with(counter, lambda mlp, x, h: h if mlp.held.ticks >= 0 else center(h)))
    thread.start()
    try:
        seqtile.apply(model, tile=3)
    finally:
        stop.set()
        thread.join()
    assert counted and counter.ticks == len(counted)


def test_proofs_do_not_keep_a_model_alive() -> None:
    def made() -> nn.Module:
        model: Any = Layer(Mlp())

        class Local(Mlp):
            def forward(self, x: Tensor) -> Any:
                return super().forward(x) * (1.0 if model is not None else 2.0)

        model.mlp = Local()
        return model  # type: ignore[no-any-return]

    model = made()
    seqtile.apply(model, tile=3)
    model(torch.randn(2, 7, HIDDEN)).sum().backward()
    weight = weakref.ref(model.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]
    del model
    gc.collect()
    assert weight() is None


def test_only_a_spelled_out_name_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """``getattr(self, "name", ...)`` says what it reads: a trainer may count beside it."""
    model: Any = Layer(_with(types.SimpleNamespace(), lambda mlp, x, h: h * getattr(mlp, "absent", 1.5)))
    model.mlp.steps = 0
    seqtile.apply(model, tile=3)
    model(torch.randn(2, 7, HIDDEN)).sum().backward()
    monkeypatch.setattr(proof, "_prove", lambda *_: pytest.fail("proven again"))
    model.mlp.steps = 1
    model(torch.randn(2, 7, HIDDEN)).sum().backward()
    model.mlp.absent = 2.0
    with pytest.raises(pytest.fail.Exception):
        model(torch.randn(2, 7, HIDDEN))


def test_a_number_that_changes_all_the_time_ends_the_proofs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proof, "MOST_CHANGES", 3)
    model: Any = Layer(_scaled(0.5, lambda held: held))
    seqtile.apply(model, tile=3)
    plain = copy.deepcopy(model)
    seqtile.undo(plain)
    x = torch.randn(2, 7, HIDDEN)
    for step in range(8):
        model.mlp.held = plain.mlp.held = 1 + step / 7
        torch.testing.assert_close(model(x), plain(x))
    assert caplog.text.count("changed 3 times in a row") == 1


SPELLED: dict[str, tuple[Callable[..., Any], bool]] = {
    "a name": (lambda o: getattr(o.a, "x", 1.0), True),
    "a name and a call": (lambda o: getattr(o(1, 2)[0], "x", o(3)) if hasattr(o, "y") else None, True),
    "a variable": (lambda o, n: getattr(o, n), False),
    "a sum": (lambda o, n: getattr(o, "a" + n), False),
    "a method of a name": (lambda o: getattr(o, "X".lower()), False),
    "a choice": (lambda o, n: getattr(o, "x" if n else "y"), False),
    "beside another call": (lambda o, n: print(getattr(o, n), "x"), False),
    "by another name": (lambda o, get=getattr: [get, getattr][0](o, "x"), False),
    "nested": (lambda o, n: getattr(getattr(o, "x", o), n), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_a_spelled_out_name_is_told_from_another(name: str) -> None:
    function, spelled_out = SPELLED[name]
    code = python_code.Code.written([], [function])
    assert code.dynamic is not spelled_out


class Registry(collections.OrderedDict[str, Any]):
    """Makes an object of every class that is looked up, as transformers' registry of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


REGISTRY = Registry(silu=nn.SiLU, gelu=nn.GELU)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(REGISTRY["silu"](self.up_proj(x)))


def test_a_dictionary_with_methods_of_its_own_stays_as_it_is() -> None:
    before = list(dict.items(REGISTRY))
    seqtile.apply(nn.ModuleDict({"mlp": Looks(), "other": nn.Linear(8, 8)}), tile=3, trust="*")
    assert list(dict.items(REGISTRY)) == before
    assert list(REGISTRY) == ["silu", "gelu"]
