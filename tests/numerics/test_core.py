"""docs/core.py, the page to read first: short, and the fused operator for plain linear layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from numerics._blocks import assert_same, cut, gradients, random
from numerics._errors import assert_all_no_worse, in_float64
from numerics._fused import Fused, GatedMLP
from seqtile.counting.products import count_products

FILE = Path(__file__).parents[2] / "docs" / "core.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="no pages here: the tests run from an installed package")
HIDDEN, INTERMEDIATE, TILE = 24, 40, 16
LENGTHS = (1, 13, TILE, TILE + 1, 16 * TILE + 5)


def operator(old: str = "", new: str = "") -> Callable[..., Tensor]:
    """``tiled_mlp`` of the page, with a piece of its text replaced."""
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    names: dict[str, Callable[..., Tensor]] = {}
    exec(compile(text.replace(old, new), str(FILE), "exec"), names)
    return names["tiled_mlp"]


class Core(nn.Module):
    """A block through the page's operator."""

    def __init__(self, block: GatedMLP, tiled_mlp: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.tiled_mlp = block, tiled_mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.tiled_mlp(x, self.block.gate.weight, self.block.up.weight, self.block.down.weight, TILE)


def check(tokens: int, dtype: torch.dtype, tiled_mlp: Callable[..., Tensor]) -> None:
    """As near the truth as the untiled block, and as the operator within PyTorch's defaults for the dtype."""
    torch.manual_seed(0)
    block = GatedMLP(HIDDEN, INTERMEDIATE, bias=False).to(dtype)
    x, upstream = random(tokens, HIDDEN, dtype=dtype), random(tokens, HIDDEN, dtype=dtype, seed=2, grad=False)
    got = gradients(Core(block, tiled_mlp), [x], upstream)
    truth = gradients(in_float64(block), [x.detach().double().requires_grad_()], upstream.double())
    assert_all_no_worse(got, gradients(block, [x], upstream), truth)
    if dtype is not torch.bfloat16:
        assert_same(got, gradients(Fused(block, TILE), [x], upstream))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_it_gives_what_the_operator_gives(tokens: int, dtype: torch.dtype) -> None:
    check(tokens, dtype, operator())


def test_in_low_precision_its_error_is_the_untiled_one() -> None:
    check(LENGTHS[-1], torch.bfloat16, operator())  # 17 tiles; errors of a few roundings have no typical size


MUTANTS = {
    "no derivative of the gate": ("* s * (1 + a * (1 - s))", "* s"),
    "upstream ignored": ("dh = dy_rows @ down", "dh = torch.ones_like(dy_rows) @ down"),
    "a sum overwritten by the last tile": ("d_up.addmm_(", "d_up.zero_().addmm_("),
    "one part of the input's gradient": (".addmm_(db, up)", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_page_is_noticed(mutant: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check(LENGTHS[-1], torch.float32, operator(*mutant))


def units(block: nn.Module, checkpointed: bool) -> float:
    """GEMMs over ``2 * T * D * F`` FLOPs of one layer's forward and backward."""
    tokens, norm = 8 * TILE, nn.RMSNorm(HIDDEN)

    def layer(x: Tensor) -> Tensor:
        return x + block(norm(x))

    x = random(tokens, HIDDEN)
    with count_products() as products:
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.sum().backward()
    return products.units(tokens, HIDDEN, INTERMEDIATE)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_it_computes_as_many_products(checkpointed: bool) -> None:
    block = GatedMLP(HIDDEN, INTERMEDIATE, bias=False)
    fused = units(Fused(block, cut(8 * TILE, TILE)), checkpointed)
    assert units(Core(block, operator()), checkpointed) == fused == 11.0


def test_a_node_that_saves_its_own_input_runs_twice_under_a_checkpoint() -> None:
    """What the page says of ``Save``."""
    saves_itself = operator("ctx.tile, ctx.save = tile, save", "ctx.tile, ctx.save = tile, ctx; "
                            "ctx.save_for_backward(x, gate, up, down)")  # fmt: skip
    block = GatedMLP(HIDDEN, INTERMEDIATE, bias=False)
    assert units(Core(block, saves_itself), True) == 14.0


def test_second_derivatives_are_refused() -> None:
    x = random(5, HIDDEN)
    loss = Core(GatedMLP(HIDDEN, INTERMEDIATE, bias=False), operator())(x).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_the_page_is_short_and_says_what_it_computes() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and max(map(len, text.splitlines())) <= 120
    block, x = GatedMLP(HIDDEN, INTERMEDIATE, bias=False), random(7, HIDDEN)
    said = "F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)"
    assert said in text
    weights = {name: layer.weight for name, layer in block.named_children()}
    torch.testing.assert_close(eval(said, {"F": F, "x": x, **weights}), operator()(x, *weights.values(), TILE))
