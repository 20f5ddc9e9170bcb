"""Low precision beyond the contract: autocast in part, blocks of several precisions, products that add into fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from numerics._blocks import Tiled, block, gradients, random, shards
from numerics._errors import Autocast, assert_as_good
from numerics._fused import Fused, GatedMLP
from numerics.test_contract import check_low_precision
from seqtile.counting.live import count_live_bytes
from seqtile.ops import grad_accumulator
from seqtile.ops.grad_accumulator import Sum, products_sum_in_fp32

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 1024


def test_autocast_with_a_low_precision_input() -> None:
    """The residual stream may be in the compute dtype already, the weights in fp32."""
    torch.manual_seed(0)
    model, x = GatedMLP(HIDDEN, INTERMEDIATE), random(TOKENS, HIDDEN, dtype=torch.bfloat16)
    upstream = (1 + random(TOKENS, HIDDEN, seed=2, grad=False)).bfloat16()
    truth = gradients(model, [x.detach().float().requires_grad_()], upstream.float())
    twin = gradients(Autocast(model, torch.bfloat16), [x], upstream)
    ours = gradients(Autocast(Fused(model, shards(TOKENS, 16)), torch.bfloat16), [x], upstream)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in twin.items()}
    assert_as_good(ours, twin, truth)


def test_weights_are_cast_once_per_pass_under_autocast() -> None:
    model, x = GatedMLP(HIDDEN, INTERMEDIATE), random(64, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16), count_live_bytes() as live:
        output = Fused(model, shards(64, 16))(x)
    written = live.written
    with torch.autocast("cpu", torch.bfloat16), count_live_bytes() as live:
        Fused(model, shards(64, 1))(x)
    assert written <= live.written * 1.01
    assert output.dtype == torch.bfloat16


def test_double_precision_is_left_alone_by_autocast() -> None:
    model, x = GatedMLP(HIDDEN, INTERMEDIATE).double(), random(8, HIDDEN, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert Fused(model, 4)(x).dtype == torch.float64


def test_the_product_into_fp32_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not products_sum_in_fp32("cpu", torch.float32), "fp32 products need no other dtype"
    asked: list[object] = []
    addmm = torch.addmm

    def noting(*args: Tensor, **kwargs: object) -> Tensor:
        asked.append(kwargs.get("out_dtype"))
        return addmm(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(grad_accumulator.torch, "addmm", noting)
    products_sum_in_fp32.cache_clear()
    answers = {products_sum_in_fp32("cpu", torch.bfloat16) for _ in range(3)}
    assert len(answers) == 1 and asked == [torch.float32]


def test_sums_by_the_product_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of devices whose product adds into fp32, with a stand-in for it where this device has none."""
    addmm = torch.addmm

    def offered(total: Tensor, left: Tensor, right: Tensor, **kwargs: object) -> Tensor:
        if kwargs.pop("out_dtype", None) is None:
            return addmm(total, left, right, **kwargs)  # type: ignore[call-overload]
        return addmm(total, left.float(), right.float(), **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(grad_accumulator.torch, "addmm", offered)
    monkeypatch.setattr(grad_accumulator, "products_sum_in_fp32", lambda device, dtype: dtype in grad_accumulator.LOW)
    check_low_precision(Fused, torch.bfloat16, 64)
    left, right = (
        random(8, 300, dtype=torch.bfloat16, grad=False),
        random(300, 8, seed=2, dtype=torch.bfloat16, grad=False),
    )
    total = Sum(torch.empty(8, 8))
    for piece in range(3):
        total.add_product(left[:, piece::3], right[piece::3])
    torch.testing.assert_close(total.result(), left.float() @ right.float())


def test_a_sum_of_nothing_is_zero() -> None:
    poison = torch.full((8, 8), float("nan"))
    del poison
    assert torch.equal(Sum(torch.empty(8, 8)).result(), torch.zeros(8, 8))


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
