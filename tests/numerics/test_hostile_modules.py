"""No module is silently wrong when it is tiled, whatever it does; and what is harmless stays tiled.

The modules are in ``hostile``, what is compared in ``numerics._judge``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hostile import CATALOGUE, COMPLEX, FAMILIES, HARMLESS, HIDDEN, NEIGHBOURS, Entry, Gated, TwoLayers, entries
from numerics._judge import EQUAL, LEFT, REFUSED, SILENT, UNCLEAR, judge, rows_at_once

HOSTILE = [entry for entry in CATALOGUE if entry.family != HARMLESS]


def named(entries: list[Entry]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry.name for entry in entries])


@named(HOSTILE)
def test_a_hostile_module_is_equal_or_left_untiled_or_refused(entry: Entry) -> None:
    outcome = judge(entry)
    assert outcome.word in (EQUAL, LEFT, REFUSED), outcome
    assert outcome.word == REFUSED or outcome.beside, "the plain MLP beside it was left too"


@named(entries(HARMLESS))
def test_a_harmless_module_is_equal_and_stays_tiled(entry: Entry) -> None:
    outcome = judge(entry)
    assert (outcome.word, outcome.tiled) == (EQUAL, True), outcome
    rows, tokens = rows_at_once(entry)
    # A tile has three tokens, of three sequences at most; the weights have as many rows as the hidden states are wide.
    assert rows <= 9 < tokens, f"a tensor of the inner width had {rows} of {tokens} rows"


def test_the_catalogue_covers_every_family() -> None:
    counted = Counter(entry.family for entry in CATALOGUE)
    assert set(counted) == {*FAMILIES, HARMLESS}
    assert all(counted[family] >= (6 if family == COMPLEX else 8) for family in FAMILIES) and counted[HARMLESS] >= 24
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE)


# ---------------------------------------------------------------------------------------------------------------------
# Tilers that believe everything: each hostile module must be wrong with one of them, or it tests nothing
# ---------------------------------------------------------------------------------------------------------------------


def _report(entry: Entry) -> Any:
    return SimpleNamespace(blocks=[SimpleNamespace(name=entry.block, path="naive")], left=[])


def _in_tiles(module: nn.Module, entry: Entry) -> None:
    """Each tile of ``module`` in an activation checkpoint of its own."""
    original, dim = module.forward, -2 if entry.dim is None else entry.dim

    def forward(x: Tensor) -> Any:
        rows = x.flatten(0, -2)[None] if entry.dim is None else x
        tiles = [checkpoint(original, part, use_reentrant=False) for part in rows.split(entry.tile, dim)]
        return torch.cat(tiles, dim).view(x.shape) if entry.dim is None else torch.cat(tiles, dim)

    module.forward = forward  # type: ignore[method-assign]


def tile_the_block(model: nn.Module, entry: Entry) -> Any:
    _in_tiles(model.get_submodule(entry.block), entry)
    return _report(entry)


def tile_the_layer(model: nn.Module, entry: Entry) -> Any:
    _in_tiles(model.get_submodule(entry.block.rpartition(".")[0]), entry)
    return _report(entry)


class _Recomputed(torch.autograd.Function):
    """Tiles without gradients forward, each again with gradients in backward, as tiled MLPs elsewhere do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any, tile: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call, ctx.tile = call, tile
        return torch.cat([call(part) for part in x.split(tile, -2)], -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = []
        for part, share in zip(ctx.saved_tensors[0].split(ctx.tile, -2), grad.split(ctx.tile, -2), strict=True):
            parts.append(part.detach().requires_grad_())
            with torch.enable_grad():
                torch.autograd.backward(ctx.call(parts[-1]), share)
        return torch.cat([part.grad for part in parts], -2), None, None


def tile_without_gradients(model: nn.Module, entry: Entry) -> Any:
    block = model.get_submodule(entry.block)
    original = block.forward
    block.forward = lambda x: _Recomputed.apply(x, original, entry.tile)  # type: ignore[method-assign]
    return _report(entry)


def _formulas(block: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """What the linear layers of the block, as they are now, may stand for."""
    linears = [child for child in block.children() if isinstance(child, nn.Linear)]
    weights = [(linear.weight, linear.bias) for linear in linears]

    def formula(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        first, *gate = [F.linear(x, *weight) for weight in weights[:-1]]
        inner = activation(first) * gate[0] if gate else activation(first)
        return F.linear(inner, *weights[-1])

    leaky = partial(F.leaky_relu, negative_slope=0.1)
    activations = (F.silu, F.gelu, torch.relu, lambda z: torch.relu(z).square(), leaky)
    return [partial(formula, activation) for activation in activations]


def _formula_of(block: nn.Module) -> int | None:
    """The number of the formula that has the values of the block on eight tokens in evaluation mode."""
    x = torch.linspace(-2, 2, 8 * HIDDEN).view(2, 4, HIDDEN)
    with torch.no_grad():
        values = block(x)
        known = [torch.allclose(formula(x), values, atol=1e-6) for formula in _formulas(block)]
    return known.index(True) if any(known) else None


def replace_by_the_formula(model: nn.Module, entry: Entry) -> Any:
    """The formula in place of the forward, found once for all blocks of the class."""
    block = model.get_submodule(entry.block)
    number = _formula_of(block)
    for module in model.modules():
        if type(module) is type(block) and number is not None:
            module.forward = _formulas(module)[number]  # type: ignore[method-assign]
    return _report(entry)


def take_what_follows_for_a_dropout(model: nn.Module, entry: Entry) -> Any:
    model.get_submodule("layers.1").dropout.forward = lambda x: x
    return _report(entry)


def drop_the_gradient_of_the_input(model: nn.Module, entry: Entry) -> Any:
    original = model.forward
    model.forward = lambda *inputs: original(*(x.detach() for x in inputs))  # type: ignore[method-assign]
    return _report(entry)


def careless_tilers(entry: Entry) -> list[Any]:
    if entry.family == COMPLEX:
        return [drop_the_gradient_of_the_input]
    if entry.dim is not None:
        return [tile_the_block]
    tilers = [tile_the_block, tile_without_gradients]
    if isinstance(entry.build().get_submodule(entry.block), (Gated, TwoLayers)) and entry.path != "generic":
        tilers.insert(0, replace_by_the_formula)
    if "layers" in entry.block:
        tilers.append(tile_the_layer)
    if entry.family == NEIGHBOURS and hasattr(entry.build().get_submodule("layers.1"), "dropout"):
        tilers.append(take_what_follows_for_a_dropout)
    return tilers


@pytest.mark.slow
@named(HOSTILE)
def test_each_hostile_module_catches_a_careless_tiler(entry: Entry) -> None:
    words = (judge(entry, tiler).word for tiler in careless_tilers(entry))
    assert any(word in (SILENT, UNCLEAR) for word in words)


# ---------------------------------------------------------------------------------------------------------------------
# The judge itself
# ---------------------------------------------------------------------------------------------------------------------


def _first(family: str) -> Entry:
    return entries(family)[0]


def test_an_error_that_seqtile_did_not_raise_is_no_refusal() -> None:
    def failing(model: nn.Module, entry: Entry) -> Any:
        torch.zeros(2) + torch.zeros(3)

    assert judge(_first(HARMLESS), failing).word == UNCLEAR


def test_untiled_and_reported_is_left() -> None:
    def leaving(model: nn.Module, entry: Entry) -> Any:
        return SimpleNamespace(blocks=[], left=[SimpleNamespace(name=entry.block, why="it looks odd")])

    assert judge(_first(HARMLESS), leaving).word == LEFT


def test_another_activation_is_silent() -> None:
    def another(model: nn.Module, entry: Entry) -> Any:
        block = model.get_submodule(entry.block)
        block.forward = partial(lambda x: block.down_proj(F.gelu(block.gate_proj(x)) * block.up_proj(x)))
        return _report(entry)

    assert judge(_first(HARMLESS), another).word == SILENT
