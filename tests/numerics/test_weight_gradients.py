"""Tiling adds no rounding to a weight's gradient: in low precision it is as exact as the untiled one, to 5 %."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from numerics._blocks import Tiled, gradients, random, shards
from numerics._errors import assert_no_worse, in_float64
from numerics._fused import Between, Fused, GatedMLP, GateUpMLP, PlainMLP
from seqtile.counting.products import count_products
from seqtile.ops import normed_linears
from seqtile.ops.grad_accumulator import Sum, as_on_an_accelerator, products_sum_in_fp32
from seqtile.ops.tile_linear import SumsOfLinears

HIDDEN, INTERMEDIATE, TOKENS = 48, 128, 4096
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
COUNT = pytest.mark.parametrize("count", [16, 64])
OPERATORS: dict[str, Callable[..., nn.Module]] = {"fused": Fused, "generic": Tiled}
OPERATOR = pytest.mark.parametrize("operator", OPERATORS)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMLP(HIDDEN, INTERMEDIATE),
    "gate_up": lambda: GateUpMLP(HIDDEN, INTERMEDIATE),
    "plain": lambda: PlainMLP(HIDDEN, INTERMEDIATE),
    "norms": lambda: Between(GatedMLP(HIDDEN, INTERMEDIATE), nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN)),
}
FACTOR = 1.05
"""The same products of the same operands, rounded once, as untiled: only the order of the sums in fp32 differs."""


def run(operator: str, kind: str, dtype: torch.dtype, count: int) -> tuple[dict[str, Tensor], ...]:
    """Gradients in tiles, untiled and true. The upstream gradient is as good as independent of the token: sums over
    tokens grow with their root, so that the roundings of the tiles' parts weigh as much as they ever can."""
    torch.manual_seed(0)
    model = KINDS[kind]().to(dtype)
    x, upstream = random(TOKENS, HIDDEN, dtype=dtype), random(TOKENS, HIDDEN, seed=2, dtype=dtype, grad=False)
    wide = [x.detach().double().requires_grad_()]
    tiled = OPERATORS[operator](model, shards(TOKENS, count))
    return gradients(tiled, [x], upstream), gradients(model, [x], upstream), gradients(
        in_float64(model), wide, upstream.double()
    )  # fmt: skip


def check(operator: str, kind: str, dtype: torch.dtype, count: int) -> None:
    ours, twin, truth = run(operator, kind, dtype, count)
    names = [name for name in truth if name.endswith(("weight", "bias")) and not name.startswith(("before", "after"))]
    assert len(names) >= 3
    for name in names:
        assert_no_worse(ours[name], twin[name], truth[name], factor=FACTOR, name=name)


@COUNT
@LOW
@pytest.mark.parametrize("kind", ["gated", "gate_up", "plain"])
@OPERATOR
def test_weights_and_biases(operator: str, kind: str, dtype: torch.dtype, count: int) -> None:
    check(operator, kind, dtype, count)


@COUNT
@LOW
def test_linear_layers_beside_norms(dtype: torch.dtype, count: int) -> None:
    """The generic operator runs the norms as they are; the fused one differentiates them in fp32, see below."""
    check("generic", "norms", dtype, count)


def check_norms(dtype: torch.dtype) -> None:
    """No comparison with untiled to 5 %: these are two draws of a few dozen roundings. Tiles must not change them."""
    (many, twin, truth), (one, _, _) = (run("fused", "norms", dtype, count) for count in (64, 1))
    for name in truth:
        assert_no_worse(many[name], twin[name], truth[name], name=name)
        assert_no_worse(many[name], one[name], truth[name], factor=FACTOR, name=name)


@LOW
def test_norms_of_the_fused_operator(dtype: torch.dtype) -> None:
    check_norms(dtype)


def rounded_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile's product is rounded to the weight's dtype before it is summed in fp32."""
    monkeypatch.setattr(Sum, "add_product", lambda self, left, right: self.add(left @ right))


def autograd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic operator takes the gradients that autograd hands over."""
    monkeypatch.setattr(SumsOfLinears, "__torch_function__", lambda self, func, types, args=(), kwargs=None: func(
        *args, **(kwargs or {})
    ))  # fmt: skip


@COUNT
@OPERATOR
def test_products_that_are_rounded_per_tile_are_noticed(
    operator: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded_per_tile(monkeypatch)
    with pytest.raises(AssertionError, match="weight: off by"):
        check(operator, "gated", torch.bfloat16, count)


@COUNT
def test_gradients_as_autograd_hands_them_over_are_noticed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    autograd_alone(monkeypatch)
    with pytest.raises(AssertionError, match="weight: off by"):
        check("generic", "gated", torch.bfloat16, count)


def test_norms_that_are_rounded_per_tile_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normed_linears, "LOW", ())
    with pytest.raises(AssertionError, match="weight: off by"):
        check_norms(torch.bfloat16)


class Odd(nn.Module):
    """Every way in which a linear layer may be called in a block: a part trains, twice, without a gradient, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.d = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.b.weight.requires_grad_(False)
        self.c.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        with torch.no_grad():
            still = self.a(x)
        y = torch.relu_(self.a(x)) + still  # modified in place
        y = self.b(y) * linear(bias=self.c.bias, weight=self.c.weight, input=y)
        y = self.d(self.d(y.tanh())) + linear(y, self.d.weight.detach())
        return self.c(y.to(self.c.weight.dtype))


@pytest.mark.parametrize("needs", [True, False], ids=["input needs a gradient", "input needs none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_however_a_linear_layer_is_called(dtype: torch.dtype, needs: bool) -> None:
    torch.manual_seed(0)
    model = Odd().to(dtype)
    x, upstream = random(3, 64, HIDDEN, dtype=dtype, grad=needs), random(3, 64, HIDDEN, seed=2, dtype=dtype, grad=False)
    ours, twin = gradients(Tiled(model, shards(192, 8)), [x], upstream), gradients(model, [x], upstream)
    truth = gradients(in_float64(model), [x.detach().double().requires_grad_(needs)], upstream.double())
    assert {name for name, value in ours.items() if value is None} == {
        "b.weight", "c.bias", *(() if needs else ("input.0",))
    }  # fmt: skip
    for name, value in twin.items():
        if value is not None:
            assert_no_worse(ours[name], value, truth[name], name=name)


def test_low_precision_inside_autocast_is_left_to_it() -> None:
    torch.manual_seed(0)
    model, x = GatedMLP(HIDDEN, INTERMEDIATE).bfloat16(), random(64, HIDDEN, dtype=torch.bfloat16)
    seen: list[Any] = []
    original = SumsOfLinears.__init__

    def noting(self: SumsOfLinears, weights: Any, sum_of: Any) -> None:
        original(self, weights, lambda *args: seen.append(args) or sum_of(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SumsOfLinears, "__init__", noting)
        with torch.autocast("cpu", torch.bfloat16):
            inside = Tiled(model, 16)(x)
        inside.sum().backward()
        assert not seen
        Tiled(model, 16)(x).sum().backward()
    assert len(seen) == 4 * 6  # tiles, weights and biases


def products_of_one_sum() -> int:
    products_sum_in_fp32("cpu", torch.bfloat16)  # probed with numbers, so before there are none
    with FakeTensorMode(), count_products() as products:
        left, right = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((512, 4096), (4096, 512)))
        total = Sum(torch.empty(512, 512, dtype=torch.bfloat16))
        total.add_product(left, right)
        assert total.result().dtype == torch.bfloat16
    assert products.flops == 2 * 512 * 512 * 4096
    return len(products.records)


def test_a_plan_for_an_accelerator_sees_one_product() -> None:
    """Fake tensors are on the CPU, whose products come in pieces, each of which costs a plan three fake operators."""
    assert products_of_one_sum() > 1
    with as_on_an_accelerator():
        assert products_of_one_sum() == 1
    assert products_of_one_sum() > 1
