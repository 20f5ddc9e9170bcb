"""What a block may take and return: several inputs, nests of outputs, weights that only some tiles use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from numerics._blocks import (
    HIDDEN,
    INTERMEDIATE,
    Gated,
    Tiled,
    assert_same,
    assert_tiled_is_untiled,
    block,
    gradients,
    random,
)
from numerics._mutants import last_tile_without_gradient, upstream_ignored

TILE = 4


class Router(nn.Module):
    """Two products of one input, the experts they choose, something that has no gradient, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(HIDDEN, INTERMEDIATE)
        self.heads = nn.Linear(HIDDEN, 2 * 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        wide = self.wide(x)
        heads = self.heads(x).view(-1, 2, 3)
        return {"wide": wide, "more": (heads, None, wide.argmax(-1).view(-1), "experts"), "still": wide.detach() * 2}


def check_nest() -> None:
    torch.manual_seed(0)
    model = Router()

    def loss(output: dict[str, Any]) -> Tensor:
        heads = output["more"][0]
        return output["wide"].square().sum() + (heads * random(*heads.shape, seed=5, grad=False)).sum()

    assert_same(
        gradients(Tiled(model, TILE), [random(2, 5, HIDDEN)], loss), gradients(model, [random(2, 5, HIDDEN)], loss)
    )


def test_nest_of_outputs() -> None:
    torch.manual_seed(0)
    model, x = Router(), random(2, 5, HIDDEN)
    ours, twin = Tiled(model, TILE)(x), model(x)
    torch.testing.assert_close(ours["wide"], twin["wide"])
    torch.testing.assert_close(ours["more"][0], twin["more"][0])
    assert ours["more"][1] is None and ours["more"][3] == "experts"
    assert torch.equal(ours["more"][2], twin["more"][2]) and not ours["more"][2].is_floating_point()
    torch.testing.assert_close(ours["still"], twin["still"])
    assert ours["wide"].requires_grad and not ours["still"].requires_grad and not ours["more"][2].requires_grad
    check_nest()


@pytest.mark.parametrize("mutant", [last_tile_without_gradient, upstream_ignored])
def test_the_checker_notices_a_broken_operator(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_nest()


@pytest.mark.parametrize("used", ["wide", "heads"])
def test_output_that_the_loss_does_not_use(used: str) -> None:
    torch.manual_seed(0)
    model = Router()

    def loss(output: dict[str, Any]) -> Tensor:
        return (output["wide"] if used == "wide" else output["more"][0]).square().sum()

    ours = gradients(Tiled(model, TILE), [random(2, 5, HIDDEN)], loss)
    assert_same(ours, gradients(model, [random(2, 5, HIDDEN)], loss))
    assert (ours["heads.weight"] is None) == (used == "wide")


def test_outputs_without_gradient_alone() -> None:
    class Chosen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1, keepdim=True)

    model, x = Chosen(HIDDEN, 3), random(2, 5, HIDDEN)
    ours = Tiled(model, TILE)(x)
    assert not ours.requires_grad
    assert torch.equal(ours, model(x))


class Experts(nn.Module):
    """Mixtral's experts: hidden states, the chosen experts and their weights, one row per token in each."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(experts))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, *, scale: float = 1.0) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = torch.where(chosen == number, weights, 0).sum(-1, keepdim=True)
            if bool((chosen == number).any()):
                result = result + scale * share * expert(x)
        return result


def _experts(tokens: int = 10) -> tuple[Experts, list[Tensor]]:
    torch.manual_seed(0)
    chosen = torch.zeros(tokens, 2, dtype=torch.long)
    chosen[:, 0] = 1
    chosen[:TILE] = 2  # expert 2 is used by the first tile alone, 3 by none
    return Experts(), [random(tokens, HIDDEN), chosen, random(tokens, 2, seed=4)]


def test_several_inputs_and_weights_that_some_tiles_do_not_use() -> None:
    model, (x, chosen, weights) = _experts()

    def of_floats(run: nn.Module) -> dict[str, Tensor | None]:
        class Chosen(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = run

            def forward(self, x: Tensor, weights: Tensor) -> Tensor:
                return run(x, chosen, weights)

        return gradients(Chosen(), [x, weights], random(10, HIDDEN, seed=2, grad=False))

    ours = of_floats(Tiled(model, TILE))
    assert_same(ours, of_floats(model))
    assert ours["experts.2.weight"] is not None, "used by one tile"
    assert ours["experts.3.weight"] is None, "used by no tile: no gradient, as untiled"
    assert ours["input.1"] is not None, "a second input gets its gradient"


def test_input_that_only_one_tile_differentiates() -> None:
    """Rows of the input's gradient that no tile writes are zeros, not what the memory held."""

    class First(nn.Module):
        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return x * 2 if bool((number == 0).any()) else x.detach() * 2

    number = torch.arange(12).unsqueeze(1)
    for _ in range(3):
        poison = torch.full((12, HIDDEN), float("nan"))
        del poison
        x = random(12, HIDDEN)
        Tiled(First(), TILE)(x, number).sum().backward()
        assert torch.equal(x.grad, torch.where(number < TILE, 2.0, 0.0).expand(12, HIDDEN))


def test_keywords_pass_through() -> None:
    model, (x, chosen, weights) = _experts()
    for seen in (Tiled(model, TILE)(x, chosen, weights, scale=0.25), Tiled(model, TILE)(x, chosen, weights) / 4):
        torch.testing.assert_close(seen, model(x, chosen, weights, scale=0.25))


def test_inputs_of_different_dimensions() -> None:
    class Added(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert x.dim() == 3 and y.dim() == 2
            return super().forward(x) + y.view(1, -1, HIDDEN)

    torch.manual_seed(0)
    model, x, y = Added(HIDDEN, HIDDEN), random(2, 5, HIDDEN), random(10, HIDDEN, seed=3)
    ours = gradients(Tiled(model, TILE), [x, y], lambda output: output.square().sum())
    loss = (F.linear(x, model.weight, model.bias) + y.view(2, 5, HIDDEN)).square().sum()
    for name, expected in zip(
        ("input.0", "input.1", "weight"), torch.autograd.grad(loss, (x, y, model.weight)), strict=True
    ):
        torch.testing.assert_close(ours[name], expected)


def test_the_same_tensor_twice() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    x = random(2, 5, HIDDEN)
    Tiled(Product(), TILE)(x, x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


class Tied(nn.Module):
    """One weight, used twice in the block and known by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(HIDDEN, HIDDEN)
        self.two = nn.Linear(HIDDEN, HIDDEN)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class InPlace(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu_(self.gate(x))).mul_(2).add_(1)


@pytest.mark.parametrize("kind", [Tied, InPlace])
def test_tied_weights_and_writes_in_place(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert_tiled_is_untiled(kind(), [random(2, 5, HIDDEN)], random(2, 5, HIDDEN, seed=2, grad=False), TILE)


def test_one_block_twice_in_a_model() -> None:
    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.block = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x + self.block(x))

    model, x, upstream = block(), random(2, 5, HIDDEN), random(2, 5, HIDDEN, seed=2, grad=False)
    assert_same(gradients(Twice(Tiled(model, TILE)), [x], upstream), gradients(Twice(model), [x], upstream))


def test_weight_that_does_not_train_is_used_as_it_is() -> None:
    """Buffers and frozen weights reach the block; only weights that train are replaced inside a tile."""
    seen = set()

    class Noting(Gated):
        def forward(self, x: Tensor) -> Tensor:
            seen.update(name for name, weight in self.named_parameters() if weight is own[name])
            return super().forward(x)

    torch.manual_seed(0)
    model = Noting()
    own = dict(model.named_parameters())
    model.gate.requires_grad_(False)
    Tiled(model, TILE)(random(5, HIDDEN)).sum().backward()
    assert seen == {"gate.weight", "gate.bias"}


def test_hooks_inside_the_block() -> None:
    """A user's hooks on modules inside see one tile at a time, and again in the recompute."""
    model = block()
    calls: list[tuple[str, int]] = []
    model.up.register_forward_hook(lambda _, __, y: calls.append(("forward", y.shape[-2])))
    model.up.register_full_backward_hook(lambda _, __, grads: calls.append(("backward", grads[0].shape[-2])))
    Tiled(model, TILE)(random(2, 5, HIDDEN)).sum().backward()
    assert calls[:3] == [("forward", 4), ("forward", 4), ("forward", 2)]
    assert calls[3:] == [
        ("forward", 2),
        ("backward", 2),
        ("forward", 4),
        ("backward", 4),
        ("forward", 4),
        ("backward", 4),
    ]


def test_in_place_on_the_output() -> None:
    model, x = block(), random(2, 5, HIDDEN)
    ours = Tiled(model, TILE)(x)
    ours += x
    got = torch.autograd.grad(ours.square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad((model(x) + x).square().sum(), x))


def test_in_place_on_the_input_is_refused() -> None:
    """It would change what the recompute starts from."""

    class OnInput(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.relu_(x))

    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        Tiled(OnInput(), TILE)(random(2, 5, HIDDEN) * 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Tiled(OnInput(), TILE)(random(2, 5, HIDDEN, grad=False)).sum().backward()
