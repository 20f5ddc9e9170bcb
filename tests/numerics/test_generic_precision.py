"""The generic operator's recompute under autocast, and blocks of several precisions."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from numerics._blocks import Tiled, block, gradients, random, shards
from numerics._errors import Autocast, assert_as_good

HIDDEN, INTERMEDIATE = 32, 48


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
