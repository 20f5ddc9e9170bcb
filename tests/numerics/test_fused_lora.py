"""LoRA adapters and dropout inside the fused operator, against PEFT's own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from numerics._blocks import assert_same, check_gradcheck, gradients, random, shards
from numerics._errors import Autocast, assert_as_good
from numerics._fused import COARSE, Fused, GatedMLP, GateUpMLP, PlainMLP, low_precision_sums, weights_of
from seqtile.counting.products import count_products
from seqtile.ops import linear
from seqtile.ops.grad_accumulator import as_on_an_accelerator
from seqtile.ops.linear import Layer
from seqtile.ops.rng import RandomState
from watching import adapter_units

peft = pytest.importorskip("peft", reason="PEFT is not installed")

D, F_, R, TILE = 12, 20, 3, 4
ALL = ("gate", "up", "down")


class Named(nn.Module):
    """A root for PEFT to inject into."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


def adapted(
    mlp: nn.Module, targets: Sequence[str] = ALL, *, seed: int = 5, trains_base: bool = False, **config: Any
) -> nn.Module:
    """``mlp`` with random adapters, so that ``B`` is not zero."""
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(r=R, lora_alpha=5, target_modules=list(targets), **config), Named(mlp)
    ).mlp
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.4)
        else:
            weight.requires_grad_(trains_base)
    return model


def gated(targets: Sequence[str] = ALL, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    return adapted(GatedMLP(D, F_), targets, **config)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "all three": gated,
    "gate": lambda: gated(["gate"]),
    "down": lambda: gated(["down"]),
    "ranks differ": lambda: gated(rank_pattern={"up": 2}),
    "scalings differ": lambda: gated(alpha_pattern={"up": 11}),
    "rank-stabilised": lambda: gated(use_rslora=True),
    "base trains too": lambda: gated(trains_base=True),
    "gate_up": lambda: adapted(GateUpMLP(D, F_), ["gate_up", "down"]),
    "plain": lambda: adapted(PlainMLP(D, F_), ["up", "down"]),
}


def check(model: nn.Module, keep: float = 0.0, **kwargs: Any) -> None:
    """In double precision: an adapter's gradients differ by orders of magnitude, and some are sums that cancel."""
    model.double()
    x = random(2, 5, D, dtype=torch.float64, **kwargs)
    upstream = random(2, 5, D, dtype=torch.float64, seed=2, grad=False)
    assert_same(gradients(Fused(model, TILE, keep), [x], upstream), gradients(model, [x], upstream))


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters(kind: str, keep: float) -> None:
    check(KINDS[kind](), keep)


@pytest.mark.parametrize("mutant", COARSE.values(), ids=lambda mutant: mutant.__name__)
def test_the_checker_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = KINDS["base trains too"]()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(model)


def test_input_that_needs_no_gradient() -> None:
    check(gated(), grad=False)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "lora_", "gate.lora_A", "up.lora_", "gate.lora_B"])
def test_adapters_that_are_frozen(frozen: str) -> None:
    """Loaded for inference, or one factor alone trained."""
    model = gated()
    for name, weight in model.named_parameters():
        if frozen in name:
            weight.requires_grad_(False)
    check(model)


def test_gradcheck() -> None:
    check_gradcheck(Fused(gated(trains_base=True), TILE, 0.5), fast_mode=True, width=D)


@pytest.mark.parametrize("how", ["none", "checkpoint"])
@pytest.mark.parametrize(("keep", "saved"), [(0.0, 0.0), (0.5, 1.0), (1.0, 2.0)])
def test_units(how: str, keep: float, saved: float) -> None:
    """8 units of the frozen base; the adapters' own: 2 forward, 4 backward, 2 again for gate and up, 1 for down.

    Of a kept tile only ``x A^T`` is computed again.
    """
    wide, inner, tokens, rank = 48, 136, 2048, 5
    config = dict(r=rank, target_modules=list(ALL))
    model = peft.inject_adapter_in_model(peft.LoraConfig(**config), Named(GatedMLP(wide, inner, bias=False))).mlp
    x = random(tokens, wide)

    def run(block: nn.Module) -> tuple[float, float]:
        with count_products() as products:
            layer = lambda x: x + block(x * 2)  # noqa: E731
            output = checkpoint(layer, x, use_reentrant=False) if how == "checkpoint" else layer(x)
            output.sum().backward()
        return products.units(tokens, wide, inner), adapter_units(products, tokens, wide, inner, rank)

    base, own = run(Fused(model, shards(tokens, 8), keep))
    assert base == 8.0 - saved
    side = rank * tokens * 2 / (2 * tokens * wide * inner)  # one side of an adapter, in units, per feature
    z, wide_side = side * wide, side * inner  # products with [D] and with [F]
    forward = 3 * (z + wide_side)
    recompute = 2 * (z + wide_side * (1 - saved / 2)) + wide_side
    backward = 3 * 2 * (z + wide_side)
    assert own == pytest.approx(forward + recompute + backward, rel=1e-12)
    if how == "checkpoint" and keep == 0.0:
        theirs = run(model)
        assert base < theirs[0] and own <= theirs[1] + 1e-12


class Launches(TorchDispatchMode):
    """Counts the operators that write memory; without views and new tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in ("empty", "new_empty", "detach"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("adapters", "forward", "both"), [(torch.bfloat16, 10, 34), (torch.float32, 15, 53)], ids=["bf16", "fp32"]
)
def test_launches_of_a_tile(adapters: torch.dtype, forward: int, both: int) -> None:
    """Two and six of the eager pointwise part where a compiled one takes two."""
    with torch.device("meta"):
        model = adapted(GatedMLP(48, 136, bias=False).bfloat16())
    for name, weight in model.named_parameters():
        weight.data = weight.data.to(adapters if "lora_" in name else torch.bfloat16)

    def launches(tiles: int, *, backward: bool) -> int:
        model.zero_grad()  # adding to a gradient is a launch
        x = torch.empty(tiles * 64, 48, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with as_on_an_accelerator(), torch.set_grad_enabled(backward), Launches() as launched:
            output = Fused(model, 64)(x)
            if backward:
                output.backward(torch.empty_like(output))
        return launched.count

    assert launches(3, backward=False) - launches(2, backward=False) == forward
    assert launches(3, backward=True) - launches(2, backward=True) == both


def trained(model: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Output and gradients of what trains."""
    return {name: value for name, value in gradients(model, [x], upstream).items() if value is not None}


def check_low_precision(model: nn.Module, count: int) -> None:
    """In bf16, judged against fp32 throughout, as good as PEFT's own layers."""
    true = copy.deepcopy(model).float()
    x = random(1024, D, dtype=torch.bfloat16)
    upstream = (1 + random(1024, D, seed=2, grad=False)).bfloat16()
    truth = trained(true, x.detach().float().requires_grad_(), upstream.float())
    twin, ours = trained(model, x, upstream), trained(Fused(model, shards(1024, count)), x, upstream)
    assert {n: v.dtype for n, v in ours.items()} == {n: v.dtype for n, v in twin.items()}
    assert_as_good(ours, twin, truth)


@pytest.mark.parametrize("share", [0.0, 1e-9])  # of dropout: masks that drop nothing take the path of masks
@pytest.mark.parametrize("count", [1, 16])
def test_adapter_in_fp32_on_a_low_precision_base(count: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT keeps adapters in fp32."""
    monkeypatch.setattr(linear, "WIDE_ROWS", 100)
    model = gated(lora_dropout=share)
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            weight.data = weight.data.bfloat16()
    check_low_precision(model, count)


@pytest.mark.parametrize("count", [1, 16, 64])
def test_low_precision_adapters(count: int) -> None:
    """Their sums over tiles are fp32 too."""
    check_low_precision(gated().bfloat16(), count)


def test_low_precision_sums_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    low_precision_sums(monkeypatch)
    with pytest.raises(AssertionError, match="untiled"):
        check_low_precision(gated().bfloat16(), 64)


@pytest.mark.parametrize("count", [1, 16, 64])
def test_autocast(count: int) -> None:
    model, x = gated(trains_base=True), random(1024, D)
    upstream = 1 + random(1024, D, seed=2, grad=False)
    twin = gradients(Autocast(model, torch.bfloat16), [x], upstream.bfloat16())
    ours = gradients(Autocast(Fused(model, shards(1024, count)), torch.bfloat16), [x], upstream.bfloat16())
    assert_as_good(ours, twin, gradients(model, [x], upstream))


def test_backward_inside_autocast() -> None:
    """Every product runs in the forward's precision, whatever the state of the backward."""
    model, x, upstream = gated(trains_base=True), random(2, 5, D), random(2, 5, D, seed=2, grad=False)
    leaves = [x, *model.parameters()]
    outside = torch.autograd.grad(Fused(model, TILE)(x), leaves, upstream)
    output = Fused(model, TILE)(x)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(output, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_tiles_of_no_rows() -> None:
    model, x = gated(), random(7, D)
    torch.testing.assert_close(Fused(model, (0, 4, 0, 3))(x), model(x))
    Fused(model, ())(random(0, D)).sum().backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in model.parameters() if w.requires_grad)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor | None]]:
    """Every mask that a projection draws, with the width of its input."""
    masks: list[tuple[int, Tensor | None]] = []
    draw = Layer.draw

    def noting(self: Layer, rows: int) -> Tensor | None:
        mask = draw(self, rows)
        masks.append((self.matrix.shape[1], mask))
        return mask

    monkeypatch.setattr(Layer, "draw", noting)
    return masks


class Given(nn.Module):
    """A dropout with recorded masks."""

    def __init__(self, mask: Tensor, share: float) -> None:
        super().__init__()
        self.mask, self.share = mask, share

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.view(x.shape) / (1 - self.share)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["all three", "gate_up", "plain"])
def test_dropout_of_adapters(kind: str, checkpointed: bool, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recompute draws the forward's masks; against an untiled run that is fed them."""
    model, share = KINDS[kind](), 0.4
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer.lora_dropout["default"] = nn.Dropout(share)
    masks = recorded(monkeypatch)
    fused_block = Fused(model, TILE, keep)

    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = fused_block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) if checkpointed else self.block(x)

    model.double()
    x = random(2, 5, D, dtype=torch.float64)
    upstream = random(2, 5, D, dtype=torch.float64, seed=2, grad=False)
    torch.manual_seed(3)
    ours = {n.removeprefix("block."): v for n, v in gradients(Layered(), [x], upstream).items()}
    half = len(masks) // 2
    assert half == 3 * len(layers)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(masks[:half], masks[half:], strict=True))
    assert not torch.equal(masks[0][1], masks[len(layers)][1]), "every tile draws its own"
    for number, layer in enumerate(layers):
        drawn = [mask for _, mask in masks[number : half : len(layers)]]
        layer.lora_dropout["default"] = Given(torch.cat(drawn), share)
    assert_same(ours, gradients(model, [x], upstream))


def test_masks_drawn_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "_set", lambda self, state: None)
    with pytest.raises(AssertionError):
        test_dropout_of_adapters("all three", False, 0.0, monkeypatch)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_finite_differences_under_a_reset_seed(checkpointed: bool) -> None:
    """Adapters with dropout, and dropout on the output; every evaluation starts from one seed."""
    torch.manual_seed(0)
    model = adapted(PlainMLP(D, F_, dropout=0.3), ["up", "down"], trains_base=True, lora_dropout=0.4).double().train()
    block = Fused(model, TILE)
    assert weights_of(model).dropout == 0.3

    def seeded(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(7)
        return checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)

    x = random(2, 5, D, dtype=torch.float64)
    assert torch.autograd.gradcheck(seeded, (x, *model.parameters()), fast_mode=True)
    output = seeded(x)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before), "the stream goes on as if the backward had not drawn"


def test_dropout_keeps_the_expected_value() -> None:
    """Scaled by 1 / (1 - p), on an adapter's input and on the output."""
    torch.manual_seed(0)
    model = adapted(PlainMLP(D, F_, dropout=0.25), ["down"], lora_dropout=0.5).double().train()
    x = random(1, D, dtype=torch.float64).detach().expand(40000, D)
    with torch.no_grad():
        mean = Fused(model, 10000)(x).mean(0)
        truth = model.eval()(x[:1])[0]
    # The mean of n draws is off by its standard deviation, about |y| / sqrt(n); five of them never happen by chance.
    assert (mean - truth).abs().max() <= 5 * 2 * truth.abs().max() / 40000**0.5


def test_no_dropout_in_evaluation() -> None:
    model = gated(lora_dropout=0.5).eval()
    before = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_everything() -> None:
    """p = 1: nothing of the adapter, nothing of the output, no NaN."""
    torch.manual_seed(0)
    model = adapted(PlainMLP(D, F_), ["up", "down"], trains_base=True).train()
    for layer in (model.up, model.down):
        layer.lora_dropout["default"] = nn.Dropout(1.0)
    check(model)
    model.dropout.p = 1.0
    model.zero_grad()
    output = Fused(model, TILE)(random(10, D, dtype=torch.float64))
    assert torch.equal(output, torch.zeros_like(output))
    output.sum().backward()
    assert torch.equal(model.down.base_layer.weight.grad, torch.zeros(D, F_, dtype=torch.float64))


def test_twin_of_one_projection() -> None:
    """The formula, spelled out."""
    torch.manual_seed(0)
    model, x = gated(["down"]), random(7, D)
    layer = model.down
    h = F.silu(model.gate(x)) * model.up(x)
    low = F.linear(h, layer.lora_A["default"].weight)
    y = F.linear(h, layer.base_layer.weight, layer.base_layer.bias)
    y = y + F.linear(low, layer.lora_B["default"].weight) * (5 / R)
    torch.testing.assert_close(Fused(model, TILE)(x), y)
