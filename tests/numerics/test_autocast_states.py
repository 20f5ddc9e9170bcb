"""Forward and backward under any two states of autocast: no operator is farther from the truth than untiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics._blocks import Tiled, random, shards
from numerics._errors import assert_all_no_worse, in_float64
from numerics._fused import Between, Fused, GatedMLP
from seqtile.ops.attention.group_core import Groups, HeadGroup, cut_heads, in_groups
from seqtile.ops.attention.head_groups import HeadWeights, head_wise
from seqtile.ops.linear import Projection
from seqtile.ops.lm_loss.cross_entropy import linear_cross_entropy
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.normed_linears import Norm
from seqtile.ops.pointwise import SILU
from seqtile.ops.rng import Autocast, RowWise

HIDDEN, HEADS, TOKENS, TILES = 32, 4, 96, 6
STATES: dict[str, torch.dtype | None] = {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Attention(nn.Module):
    """Full attention of one sequence; ``how`` is untiled, in one node, or between projections that are modules."""

    how = "untiled"

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def attend(self, cut: HeadGroup, parts: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[Tensor, None]:
        q, k, v = (part.unflatten(-1, (cut.size, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), None

    def forward(self, x: Tensor) -> Tensor:
        groups = Groups(self.attend, cut_heads(HEADS, 1), 2, 2, Autocast.of(x), False)
        if self.how == "one node":
            first = tuple(Projection(part.weight, part.bias) for part in (self.q, self.k, self.v))
            weights = HeadWeights(first, Projection(self.o.weight, self.o.bias))
            return head_wise(x, weights, groups, shards(TOKENS, 4))[0]
        parts = [self.q(x), self.k(x), self.v(x)]
        if self.how == "between modules":
            groups = Groups(self.attend, cut_heads(HEADS, 1), 2, 2, Autocast.of(parts[0]), False)
            return self.o(in_groups(parts, [], groups)[0])
        return self.o(self.attend(HeadGroup(0, HEADS, HEADS), parts, ())[0])


class HeadAndLoss(nn.Module):
    """A loss per token, whose backward computes the logits again."""

    how = "untiled"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 40)

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.arange(TOKENS).view(x.shape[:-1]) % 40
        if self.how == "tiled":
            return linear_cross_entropy(
                x, self.head.weight, labels, bias=self.head.bias, reduction="none", tile="shards:5"
            )
        logits = self.head(x)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


class Otherwise(nn.Module):
    """A block of the above in another way than untiled."""

    def __init__(self, block: Any, how: str) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x: Tensor) -> Tensor:
        self.block.how = self.how
        try:
            return self.block(x)
        finally:
            del self.block.how


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "fused": (lambda: GatedMLP(HIDDEN, 48), lambda model: Fused(model, shards(TOKENS, TILES))),
    "fused with norms": (
        lambda: Between(GatedMLP(HIDDEN, 48), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)),
        lambda model: Fused(model, shards(TOKENS, TILES), keep=0.5),
    ),
    "generic": (lambda: GatedMLP(HIDDEN, 48), lambda model: Tiled(model, shards(TOKENS, TILES))),
    "generic with norms": (
        lambda: Between(GatedMLP(HIDDEN, 48), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)),
        lambda model: Tiled(model, shards(TOKENS, TILES)),
    ),
    "attention by heads": (Attention, lambda model: Otherwise(model, "one node")),
    "attention by heads, between modules": (Attention, lambda model: Otherwise(model, "between modules")),
    "head and loss": (HeadAndLoss, lambda model: Otherwise(model, "tiled")),
}


def state(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def step(
    model: nn.Module, x: Tensor, forward: torch.dtype | None = None, backward: torch.dtype | None = None
) -> dict[str, Tensor | None]:
    """Output and gradients, each half under a state of its own."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with state(forward):
        y = model(x)
    upstream = (1 + random(*y.shape, seed=2, dtype=torch.float64, grad=False)).to(torch.bfloat16).to(y.dtype)
    with state(backward):
        y.backward(upstream)
    weights = {name.replace("block.", ""): weight.grad for name, weight in model.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **weights}


def check(case: str, dtype: torch.dtype, forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    make, tiled = CASES[case]
    torch.manual_seed(0)
    model, x = make().to(dtype), random(2, TOKENS // 2, HIDDEN, dtype=dtype)
    truth = step(in_float64(model), x.double())
    try:
        twin = step(model, x, forward, backward)
    except RuntimeError as error:  # bf16 weights and fp16 autocast on a CPU, torch 2.13
        assert "mixed dtype (CPU)" in str(error)
        pytest.skip("PyTorch cannot run this untiled")
    assert_all_no_worse(step(tiled(model), x, forward, backward), twin, truth)


@pytest.mark.parametrize("backward", STATES)
@pytest.mark.parametrize("forward", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_any_two_states(case: str, dtype: torch.dtype, forward: str, backward: str) -> None:
    check(case, dtype, STATES[forward], STATES[backward])


OF_OUR_OWN = ("fused", "fused with norms", "attention by heads", "head and loss")
"""Operators that compute every gradient themselves."""


@pytest.mark.parametrize("case", OF_OUR_OWN)
def test_gradients_do_not_depend_on_the_backwards_state(case: str) -> None:
    make, tiled = CASES[case]
    torch.manual_seed(0)
    model, x = tiled(make()), random(2, TOKENS // 2, HIDDEN)
    outside, inside = step(model, x), step(model, x, None, torch.bfloat16)
    assert all(torch.equal(inside[name], value) for name, value in outside.items())


def check_attention_between_modules() -> None:
    """The recompute between projections that are modules, in fp32 as in the forward."""

    def gradient(backward: torch.dtype | None) -> Sequence[Tensor]:
        parts = [random(2, TOKENS // 2, HIDDEN, seed=seed) for seed in range(3)]
        groups = Groups(Attention().attend, cut_heads(HEADS, 1), 2, 2, Autocast.of(parts[0]), False)
        output, _ = in_groups(parts, [], groups)
        with state(backward):
            return torch.autograd.grad(output, parts, random(*output.shape, seed=4, grad=False))

    for inside, outside in zip(gradient(torch.bfloat16), gradient(None), strict=True):
        assert torch.equal(inside, outside)


def test_attention_between_modules() -> None:
    check_attention_between_modules()


class Seen:
    """A row-wise function, and the states in which it ran."""

    def __init__(self) -> None:
        self.states: list[tuple[bool, bool, torch.dtype]] = []

    def __call__(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        enabled = torch.is_autocast_enabled("cpu")
        self.states.append((torch.is_grad_enabled(), enabled, torch.get_autocast_dtype("cpu")))
        return rows * weights[0].to(rows.dtype)


def check_norms(forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    """The norms in the tile run in the forward's state: in the forward, in the recompute and when differentiated."""
    seen = Seen()
    up, down = (Projection(random(*shape)) for shape in ((48, HIDDEN), (HIDDEN, 48)))
    norm = RowWise(seen, (random(HIDDEN),))
    mlp = FusedWeights((up,), down, SILU, gated=False, before=norm, after=norm)
    with state(forward):
        y = fused_mlp(random(TOKENS, HIDDEN), mlp, shards(TOKENS, 2))
    with state(backward):
        y.float().sum().backward()
    assert {enabled for _, enabled, _ in seen.states} == {forward is not None}
    assert forward is None or {dtype for _, _, dtype in seen.states} == {forward}
    assert {grad for grad, _, _ in seen.states} == {False, True}, "it was run, and differentiated"


@pytest.mark.parametrize("backward", STATES)
@pytest.mark.parametrize("forward", STATES)
def test_norms_run_in_the_forwards_state(forward: str, backward: str) -> None:
    check_norms(STATES[forward], STATES[backward])


def gradient_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm is differentiated outside autocast, whatever the forward's state was."""
    gradient = Norm.gradient

    def mutated(self: Norm, *args: Any, **kwargs: Any) -> Tensor | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Autocast, "on", Autocast.off)
            return gradient(self, *args, **kwargs)

    monkeypatch.setattr(Norm, "gradient", mutated)


def test_a_norm_that_is_differentiated_outside_autocast_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_without_autocast(monkeypatch)
    with pytest.raises(AssertionError):
        check_norms(torch.bfloat16, None)


@pytest.mark.backward_here
def test_a_recompute_in_the_backwards_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Autocast.on
    monkeypatch.setattr(Autocast, "on", lambda self: on(self) if self.enabled else nullcontext())
    with pytest.raises((AssertionError, RuntimeError)):
        check_attention_between_modules()
