"""In low precision the fused gradients are as good as the untiled ones, judged against fp32 on the rounded inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from numerics._blocks import gradients, random, shards
from numerics._fused import COARSE, Between, Fused, GatedMLP, GateUpMLP, PlainMLP, low_precision_sums
from numerics.test_generic_precision import Autocast, assert_as_good
from seqtile.ops import grad_accumulator
from seqtile.ops.grad_accumulator import Sum, products_sum_in_fp32

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 1024
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
COUNT = pytest.mark.parametrize("count", [1, 16, 64])
KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMLP(HIDDEN, INTERMEDIATE),
    "gate_up": lambda: GateUpMLP(HIDDEN, INTERMEDIATE),
    "plain": lambda: PlainMLP(HIDDEN, INTERMEDIATE, transposed=True),
    "norms": lambda: Between(GatedMLP(HIDDEN, INTERMEDIATE), Norm(), Norm()),
}


class Norm(nn.Module):
    """Llama's RMSNorm: fp32 inside, the input's dtype outside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def check_low_precision(dtype: torch.dtype, count: int, kind: str = "gated", keep: float = 0.0) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]().to(dtype)
    true = copy.deepcopy(model).float()
    x = random(2, TOKENS // 2, HIDDEN, dtype=dtype)
    upstream = (1 + random(2, TOKENS // 2, HIDDEN, seed=2, grad=False)).to(dtype)  # does not cancel over tokens
    truth = gradients(true, [x.detach().float().requires_grad_()], upstream.float())
    twin = gradients(model, [x], upstream)
    ours = gradients(Fused(model, shards(TOKENS, count), keep), [x], upstream)
    assert {value.dtype for value in ours.values()} == {dtype}
    assert_as_good(ours, twin, truth)


@COUNT
@LOW
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_weights(kind: str, dtype: torch.dtype, count: int) -> None:
    check_low_precision(dtype, count, kind)


def test_low_precision_with_kept_tiles() -> None:
    check_low_precision(torch.bfloat16, 16, keep=0.5)


@pytest.mark.parametrize("count", [16, 64])
@LOW
def test_sums_in_the_weights_precision_are_noticed(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_precision_sums(monkeypatch)
    with pytest.raises(AssertionError, match="untiled"):
        check_low_precision(dtype, count)


@pytest.mark.parametrize("mutant", COARSE.values(), ids=lambda mutant: mutant.__name__)
def test_the_checker_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_low_precision(torch.bfloat16, 16)


@COUNT
@LOW
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    model, x = KINDS[kind](), random(2, TOKENS // 2, HIDDEN)
    upstream = 1 + random(2, TOKENS // 2, HIDDEN, seed=2, grad=False)
    truth = gradients(model, [x], upstream)
    twin = gradients(Autocast(model, dtype), [x], upstream.to(dtype))
    ours = gradients(Autocast(Fused(model, shards(TOKENS, count), keep=0.3), dtype), [x], upstream.to(dtype))
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in twin.items()}
    assert_as_good(ours, twin, truth)


def test_autocast_with_a_low_precision_input() -> None:
    """The residual stream may be in the compute dtype already, the weights in fp32."""
    torch.manual_seed(0)
    model, x = KINDS["gated"](), random(TOKENS, HIDDEN, dtype=torch.bfloat16)
    upstream = (1 + random(TOKENS, HIDDEN, seed=2, grad=False)).bfloat16()
    truth = gradients(model, [x.detach().float().requires_grad_()], upstream.float())
    twin = gradients(Autocast(model, torch.bfloat16), [x], upstream)
    ours = gradients(Autocast(Fused(model, shards(TOKENS, 16)), torch.bfloat16), [x], upstream)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in twin.items()}
    assert_as_good(ours, twin, truth)


def test_backward_inside_autocast() -> None:
    """The products run in the forward's precision, whatever the state of the backward."""
    torch.manual_seed(0)
    model, x = KINDS["gated"](), random(64, HIDDEN)
    upstream = random(64, HIDDEN, seed=2, grad=False)
    twin = gradients(model, [x], upstream)
    output = Fused(model, shards(64, 4))(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(output, [x, *model.parameters()], upstream)
    for one, other in zip(got, [twin["input.0"], *(twin[name] for name, _ in model.named_parameters())], strict=True):
        torch.testing.assert_close(one, other)


def test_weights_are_cast_once_per_pass_under_autocast() -> None:
    model, x = KINDS["gated"](), random(64, HIDDEN)
    from seqtile.counting import count_live_bytes

    with torch.autocast("cpu", torch.bfloat16), count_live_bytes() as live:
        output = Fused(model, shards(64, 16))(x)
    written = live.written
    with torch.autocast("cpu", torch.bfloat16), count_live_bytes() as live:
        Fused(model, shards(64, 1))(x)
    assert written <= live.written * 1.01
    assert output.dtype == torch.bfloat16


def test_double_precision_is_left_alone_by_autocast() -> None:
    model, x = KINDS["gated"]().double(), random(8, HIDDEN, dtype=torch.float64)
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
    check_low_precision(torch.bfloat16, 64)
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
