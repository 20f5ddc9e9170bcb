"""Live bytes of the generic operator, counted: a few hidden states, one tile's intermediates, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from numerics._births import births
from numerics._blocks import Tiled, block, random
from numerics._layers import HOW, Layer
from numerics._mutants import inputs_kept
from seqtile.counting.live import LiveBytes, count_live_bytes
from seqtile.ops.token_tiles import Outputs

HIDDEN, INTERMEDIATE, TILE = 32, 80, 16
LENGTHS = (256, 512, 1024)
NORM = 2 / HIDDEN
"""Mean and scale that a recomputed LayerNorm saves, two numbers per token, in hidden states."""


def mlp(frozen: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    return block(hidden=HIDDEN, intermediate=INTERMEDIATE, bias=False, dtype=dtype).requires_grad_(not frozen)


def measure(net: nn.Module, x: Tensor, upstream: Tensor | None = None) -> LiveBytes:
    with count_live_bytes("cpu") as live:
        output = net(x)
        output.backward(torch.ones_like(output) if upstream is None else upstream)
    return live


def slope_and_rest(net: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Peak over tokens at one tile size: hidden states per token, and the bytes that do not depend on tokens."""
    peaks = [measure(net, random(1, length, HIDDEN, dtype=dtype)).peak for length in LENGTHS]
    state = HIDDEN * dtype.itemsize
    slopes = {(b - a) / (n - m) / state for a, b, m, n in zip(peaks, peaks[1:], LENGTHS, LENGTHS[1:], strict=False)}
    assert len(slopes) == 1, f"not linear in tokens: {slopes}"
    slope = slopes.pop()
    return slope, peaks[0] - slope * state * LENGTHS[0]


SLOPES = [("none", 3.0), ("checkpoint", 4.0 + NORM), ("reentrant", 5.0 + NORM)]
"""Alone: the output, its gradient and the input's gradient. In a checkpointed layer the block's input too, which the
layer's recompute makes again with its norm; a reentrant one recomputes the output as well."""


def check_slope(how: str, expected: float, frozen: bool = False) -> None:
    net = Tiled(mlp(frozen), TILE)
    assert slope_and_rest(net if how == "none" else Layer(net, HIDDEN, HOW[how]))[0] == expected


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("how", "expected"), SLOPES)
def test_hidden_states_per_token(how: str, expected: float, frozen: bool) -> None:
    check_slope(how, expected, frozen)


def test_an_input_kept_by_a_closure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs_kept(monkeypatch)
    with pytest.raises(AssertionError):
        check_slope("checkpoint", 4.0 + NORM)


def test_outputs_kept_per_tile_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Outputs.write

    def mutated(self: Outputs, index: int, result: Any) -> list[Tensor]:
        tensors = write(self, index, result)
        vars(self.cuts).setdefault("kept", []).extend(tensor.detach() for tensor in tensors)  # as long as the graph
        return tensors

    monkeypatch.setattr(Outputs, "write", mutated)
    with pytest.raises(AssertionError):
        check_slope("none", 3.0)


def test_an_untiled_block_is_noticed() -> None:
    x = random(1, 512, HIDDEN)
    assert measure(mlp(), x).peak > 5 * INTERMEDIATE / HIDDEN * x.nbytes > 3 * measure(Tiled(mlp(), TILE), x).peak


@pytest.mark.parametrize("tile", [16, 64])
def test_one_tiles_intermediates(tile: int) -> None:
    """What does not depend on tokens is what the untiled block needs for one tile; no weights' sums, for none train."""
    model = mlp(frozen=True)
    _, rest = slope_and_rest(Tiled(model, tile))
    assert 0 < rest <= measure(model, random(1, tile, HIDDEN)).peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_fp32_sum_per_weight(dtype: torch.dtype) -> None:
    """Training costs the sums in fp32, and one gradient of one weight while it is added or cast."""
    one = HIDDEN * INTERMEDIATE
    (slope, trained), (same, frozen) = (slope_and_rest(Tiled(mlp(f, dtype), TILE), dtype) for f in (False, True))
    assert slope == same == 3
    assert 3 * one * 4 <= trained - frozen <= 3 * one * 4 + one * dtype.itemsize


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_of_all_tokens_times_intermediate(how: dict[str, Any], grad: bool) -> None:
    def largest(net: nn.Module) -> int:
        layer, x = Layer(net, HIDDEN, how), random(2, 128, HIDDEN)
        with births() as born, torch.set_grad_enabled(grad):
            output = layer(x)
            if grad:
                output.sum().backward()
        return max(torch.Size(shape).numel() for shape in born.shapes)

    assert largest(Tiled(mlp(), TILE)) == 256 * HIDDEN
    assert largest(mlp()) == 256 * INTERMEDIATE


def test_the_layers_checkpoint_keeps_the_input_alone() -> None:
    """After the forward of a checkpointed layer its output is all that is new."""
    x = random(1, 512, HIDDEN)
    layer = Layer(Tiled(mlp(), TILE), HIDDEN, HOW["checkpoint"])
    with count_live_bytes("cpu") as live:
        output = layer(x)
        assert live.now == output.nbytes


def test_after_the_forward_the_block_keeps_its_input_alone() -> None:
    x = random(1, 512, HIDDEN)
    tiled = Tiled(mlp(), TILE)
    with count_live_bytes("cpu") as live:
        output = tiled(x * 1)
        assert live.now == output.nbytes + x.nbytes


def test_without_gradient_only_the_output_grows() -> None:
    found = []
    for length in LENGTHS:
        x = random(1, length, HIDDEN)
        with count_live_bytes("cpu") as live, torch.no_grad():
            output = Tiled(mlp(), TILE)(x)
        found.append(live.peak - output.nbytes)
    assert len(set(found)) == 1


def test_a_gradient_that_is_not_contiguous_is_copied_once() -> None:
    net, x = Tiled(mlp(frozen=True), TILE), random(2, 256, HIDDEN)
    whole, strided = (torch.ones(2, 256, HIDDEN), torch.ones(256, 2, HIDDEN).transpose(0, 1))
    assert measure(net, x, strided).peak - measure(net, x, whole).peak == x.nbytes


def test_an_expanded_gradient_is_not_copied() -> None:
    net, x = Tiled(mlp(frozen=True), TILE), random(2, 256, HIDDEN)
    assert measure(net, x, torch.ones(()).expand(x.shape)).peak == measure(net, x, torch.ones(2, 256, HIDDEN)).peak
