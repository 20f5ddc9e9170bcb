"""In low precision the tiled gradients are as good as the untiled ones, judged against fp32 on the rounded inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from numerics._blocks import Gated, Tiled, block, gradients, random, shards
from numerics._mutants import COARSE, Mutant, low_precision_sums

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 1024


class Autocast(nn.Module):
    """The forward under autocast and the backward outside it, as a trainer runs them."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = inner
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.block(x)


def assert_as_good(ours: dict[str, Tensor], twin: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """``err(ours) <= 2 err(twin) + 1e-5 scale`` in maximum and L2 norm, for the output and every gradient."""
    assert ours.keys() == twin.keys() == truth.keys()
    for name, true in truth.items():
        for norm in (lambda t: t.abs().max(), torch.linalg.vector_norm):
            error, allowed = norm(ours[name].to(true.dtype) - true), norm(twin[name].to(true.dtype) - true)
            assert error <= 2 * allowed + 1e-5 * norm(true), f"{name}: {error:.3g}, untiled {allowed:.3g}"


def _low(dtype: torch.dtype) -> tuple[Gated, Gated, Tensor, Tensor]:
    """A block in low precision, the same block in fp32, an input, and a gradient that does not cancel over tokens."""
    model = block(hidden=HIDDEN, intermediate=INTERMEDIATE).to(dtype)
    true = block(hidden=HIDDEN, intermediate=INTERMEDIATE)
    true.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    upstream = (1 + random(2, TOKENS // 2, HIDDEN, seed=2, grad=False)).to(dtype)
    return model, true, random(2, TOKENS // 2, HIDDEN, dtype=dtype), upstream


def check_low_precision(dtype: torch.dtype, count: int) -> None:
    model, true, x, upstream = _low(dtype)
    truth = gradients(true, [x.detach().float().requires_grad_()], upstream.float())
    twin = gradients(model, [x], upstream)
    ours = gradients(Tiled(model, shards(TOKENS, count)), [x], upstream)
    assert {value.dtype for value in ours.values()} == {dtype}
    assert_as_good(ours, twin, truth)


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights(dtype: torch.dtype, count: int) -> None:
    check_low_precision(dtype, count)


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_the_weights_precision_are_noticed(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_precision_sums(monkeypatch)
    with pytest.raises(AssertionError, match="untiled"):
        check_low_precision(dtype, count)


@pytest.mark.parametrize("mutant", COARSE.values(), ids=lambda mutant: mutant.__name__)
def test_the_checker_notices_a_broken_operator(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_low_precision(torch.bfloat16, 16)


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, count: int) -> None:
    model = block(hidden=HIDDEN, intermediate=INTERMEDIATE)
    x = random(2, TOKENS // 2, HIDDEN)
    upstream = 1 + random(2, TOKENS // 2, HIDDEN, seed=2, grad=False)
    truth = gradients(model, [x], upstream)
    twin = gradients(Autocast(model, dtype), [x], upstream.to(dtype))
    ours = gradients(Autocast(Tiled(model, shards(TOKENS, count)), dtype), [x], upstream.to(dtype))
    assert ours["output.0"].dtype == dtype and ours["gate.weight"].dtype == torch.float32
    assert_as_good(ours, twin, truth)


def test_autocast_reaches_the_recompute() -> None:
    """The recompute runs in the forward's precision, also when the backward runs outside autocast."""
    seen: list[torch.dtype] = []
    model = block(hidden=HIDDEN, intermediate=INTERMEDIATE)
    model.up.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    output = Autocast(Tiled(model, shards(6, 3)), torch.bfloat16)(random(6, HIDDEN))
    output.float().sum().backward()
    assert seen == [torch.bfloat16] * 6


def test_mixed_precision_inside_a_block() -> None:
    """Sums are kept in fp32 for low-precision weights, and in each other weight's own precision."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
            self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype)) * self.scale

    torch.manual_seed(0)
    model, x = Mixed(), random(64, HIDDEN, dtype=torch.bfloat16)
    upstream = random(64, HIDDEN, dtype=torch.float64, seed=2, grad=False)
    ours, twin = gradients(Tiled(model, shards(64, 16)), [x], upstream), gradients(model, [x], upstream)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in twin.items()}
    truth = gradients(copy.deepcopy(model).double(), [x.detach().double().requires_grad_()], upstream)
    assert_as_good(ours, twin, truth)
