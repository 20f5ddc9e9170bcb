"""The trial of a layer with a state: it must see each state that is lost, or loses its gradient, by itself."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from numerics._states import FAMILIES, carrier_of, model_of
from seqtile.state.state_cache import CarriedState, cache_argument
from seqtile.state.state_proof import StateProofs, _random_like, _Trial
from tiny_models import HIDDEN

BOTH = ("recurrent", "convolution")
STATES = {"Gated DeltaNet": BOTH, "KDA": BOTH, "Mamba-2": BOTH, "short convolution": ("convolution",)}

LOSSES = ("dropped", "zeros", "taken detached", "left detached")


class _Losing(CarriedState):
    """A layer's view of its cache, in which one state is lost: ``recurrent`` or ``convolution``."""

    def __init__(self, carried: CarriedState, state: str, how: str) -> None:
        self.carried, self.state, self.how = carried, state, how
        self.tensors = carried.tensors

    def _taken(self, kind: str, value: Tensor | None) -> Tensor | None:
        if value is None or kind != self.state or self.how == "left detached":
            return value
        return {
            "dropped": None, "zeros": torch.zeros_like(value), "halved": value / 2, "taken detached": value.detach(),
        }[self.how]  # fmt: skip

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._taken("convolution", super().get_conv_state(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._taken("recurrent", super().get_recurrent_state(layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before = self.tensors.get(("convolution", state_idx))
        if before is not None:
            taken = self._taken("convolution", before)
            self.tensors["convolution", state_idx] = torch.zeros_like(before) if taken is None else taken
        found = super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size)
        if self.state == "convolution" and self.how == "left detached":
            self.tensors["convolution", state_idx] = self.tensors["convolution", state_idx].detach()
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        if self.state == "recurrent" and self.how == "left detached":
            recurrent_states = recurrent_states.detach()
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx)


def lose(mixer: nn.Module, state: str, how: str) -> None:
    """Have a mixer lose one of its states."""
    own = type(mixer)
    found = cache_argument(mixer)
    assert found is not None
    name = found[0]

    class Losing(own):  # type: ignore[misc, valid-type]
        __doc__ = own.__doc__

        def forward(self, *args: Any, **words: Any) -> Any:
            args = tuple(_Losing(a, state, how) if isinstance(a, CarriedState) else a for a in args)
            if isinstance(words.get(name), CarriedState):
                words[name] = _Losing(words[name], state, how)
            return super().forward(*args, **words)

    Losing.forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    Losing.__name__ = own.__name__
    mixer.__class__ = Losing


ALL = [(kind, family) for kind, families in FAMILIES.items() for family in families]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def why_not(module: nn.Module, dtype: torch.dtype) -> str:
    return StateProofs().why_not(module, torch.empty(0, HIDDEN, dtype=dtype))


@pytest.mark.parametrize(
    ("kind", "family", "dtype"),
    [(*family, torch.float32) for family in ALL]
    + [(kind, families[0], torch.bfloat16) for kind, families in FAMILIES.items()],
    ids=str,
)
def test_each_state_that_is_lost_is_seen(kind: str, family: str, dtype: torch.dtype) -> None:
    """Dropped, or without its gradient on the way in or out; and a layer that loses none is proven."""
    model = model_of(family, dtype).train()
    carrier = carrier_of(model)
    whole, mixer = (model.get_submodule(name) for name in (carrier.whole, carrier.mixer))
    assert why_not(whole, dtype) == why_not(mixer, dtype) == ""
    own = type(mixer)
    whole.requires_grad_(False)
    assert why_not(whole, dtype) == why_not(mixer, dtype) == "", "frozen"
    whole.requires_grad_(True)
    for state in STATES[kind]:
        for how in LOSSES:
            lose(mixer, state, how)
            why = why_not(mixer, dtype)
            assert f"the {state} state or its gradient is not passed on" in why, (how, why)
            mixer.__class__ = own


@DTYPES
def test_a_state_of_another_size_is_seen(dtype: torch.dtype) -> None:
    """Values and gradients are there, and are not those of one tile."""
    model = model_of("bamba", dtype).train()
    mixer = model.get_submodule(carrier_of(model).mixer)
    lose(mixer, "recurrent", "halved")
    assert "after three tiles the recurrent state" in why_not(mixer, dtype)


def test_a_layer_that_loses_a_state_stays_whole() -> None:
    model = model_of("bamba", torch.bfloat16)
    carrier = carrier_of(model)
    lose(model.get_submodule(carrier.mixer), "recurrent", "dropped")
    report = seqtile.apply(model, blocks="none", state=16)
    assert ": 0 of 1" in report.done["state"]
    [left] = [one for one in report.left if one.name == carrier.mixer]
    assert left.why == "the recurrent state or its gradient is not passed on"


def test_a_trial_that_fails_at_the_first_call_reaches_the_report() -> None:
    model = model_of("bamba").train()
    report = seqtile.apply(model, blocks="none", state=16)
    assert ": 1 of 1" in report.done["state"] and not report.notes
    carrier = carrier_of(model)
    lose(model.get_submodule(carrier.mixer), "recurrent", "dropped")  # after the trial; autocast asks for another one
    ids = torch.arange(5, 45)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids, use_cache=False).loss.backward()
    [note] = [note for note in report.notes if carrier.layer in note]
    assert "the recurrent state or its gradient is not passed on" in note and note in str(report)


def test_the_report_says_why_a_mixer_alone_runs_in_tiles() -> None:
    model = model_of("bamba").train()
    layer = model.get_submodule(carrier_of(model).layer)
    own = type(layer)

    class Mixing(own):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, *args: Any, **words: Any) -> Any:
            return super().forward(hidden_states - hidden_states.mean(1, keepdim=True), *args, **words)

    Mixing.forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    Mixing.__name__ = own.__name__
    layer.__class__ = Mixing
    report = seqtile.apply(model, blocks="none", state=16)
    assert "1 of 1 (1 of Mamba-2, the mixers alone)" in report.done["state"]
    [left] = report.left
    assert left.name == carrier_of(model).layer and left.why.startswith("only its mixer runs in tiles: after three")


def test_a_trial_leaves_nothing_behind() -> None:
    model = model_of("qwen3_5_text").train()
    layer = model.get_submodule(carrier_of(model).whole)
    with seqtile.count_live_bytes() as live:
        x = torch.empty(1, HIDDEN)
        before = live.now
        assert StateProofs().why_not(layer, x) == ""
        gc.collect()
        assert live.now == before


def test_a_trial_draws_on_the_cpu_whatever_the_default_device() -> None:
    """As with ``torch.set_default_device("cuda")``, under which a generator of the CPU draws only where it is named."""
    model = model_of("qwen3_next")
    layer, x = model.get_submodule(carrier_of(model).whole), torch.zeros(1, 3, HIDDEN)
    expected, upstream = _Trial(layer, x).x, _random_like(x)
    with torch.device("meta"):
        assert torch.equal(_Trial(layer, x).x, expected) and torch.equal(_random_like(x), upstream)
