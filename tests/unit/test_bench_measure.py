"""What a benchmark measures: units, bytes and errors of one block, against hand-worked numbers."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import halves
import measure_block
from block import Upstream, Workload, relative_error, repeated
from cell import Cell
from measure_block import measure_cell, measure_costs, measure_error, measure_pairs, start
from seqtile.options import TilingOptions

HIDDEN, INTERMEDIATE, TOKENS = 32, 88, 512
CELL = Cell(HIDDEN, INTERMEDIATE, TOKENS, dtype="float32", options=TilingOptions(tile="shards:4"))
ROWS = TOKENS * HIDDEN * 4
"""Bytes of one hidden-state tensor."""
BUFFER = TOKENS // 4 * INTERMEDIATE * 4
"""Bytes of one tile's intermediate."""
WEIGHTS = 3 * HIDDEN * INTERMEDIATE * 4


def costs(**changes: Any) -> dict[str, Any]:
    workload = Workload(CELL.changed(**changes))
    return {**start(workload), **measure_costs(workload)}


@pytest.mark.parametrize(
    ("method", "train", "checkpoint", "units"),
    [
        ("untiled", "full", False, 9),
        ("untiled", "full", True, 11),
        ("untiled", "frozen", True, 8),
        ("fused", "full", False, 11),
        ("fused", "full", True, 11),
        ("fused", "frozen", True, 8),
        ("generic", "full", True, 11),
        ("tile-checkpoint", "full", False, 11),
        ("tile-checkpoint", "full", True, 3 + 3 * 3 / 4 + 2 + 6),  # the layer's recompute stops before the last tile
    ],
)
def test_units_are_those_of_the_design(method: str, train: str, checkpoint: bool, units: float) -> None:
    assert costs(method=method, train=train, checkpoint=checkpoint)["units"] == units


def test_units_of_kept_tiles_and_of_adapters() -> None:
    assert costs(checkpoint=True, keep=0.5)["units"] == 10
    untiled, fused = (costs(checkpoint=True, train="lora", method=method)["units"] for method in ("untiled", "fused"))
    assert fused <= untiled and fused > 8


def test_bytes_beyond_input_weights_and_their_gradients() -> None:
    """Two hidden states (the gradients of output and input) and four buffers; the output only where it is held."""
    dropped, held = costs(), costs(hold_output=True)
    assert dropped["weight_gradient_bytes"] == WEIGHTS
    assert 0 <= dropped["beyond_bytes"] - (2 * ROWS + 4 * BUFFER) <= 64  # the number that starts the backward
    assert held["beyond_bytes"] - dropped["beyond_bytes"] == ROWS
    assert dropped["peak_allocated_bytes"] == dropped["beyond_bytes"] + WEIGHTS
    assert dropped["peak_from"] == "counted live bytes" and dropped["peak_reserved_bytes"] is None


@pytest.mark.parametrize("checkpoint", [False, True], ids=["alone", "checkpoint"])
def test_the_fused_operator_has_the_lowest_peak(checkpoint: bool) -> None:
    peaks = {
        method: costs(method=method, checkpoint=checkpoint)["peak_allocated_bytes"]
        for method in ("untiled", "tile-checkpoint", "generic", "fused")
    }
    assert min(peaks, key=lambda method: peaks[method]) == "fused"
    assert max(peaks, key=lambda method: peaks[method]) == "untiled"


def test_the_norm_shares_the_tile_under_a_checkpoint_only() -> None:
    assert "in one tile: norm, mlp" in costs(checkpoint=True)["ran"]
    assert "in one tile" not in costs(checkpoint=True, blocks="mlp")["ran"]
    assert "in one tile" not in costs(checkpoint=False)["ran"]


@pytest.mark.parametrize("train", ["full", "frozen", "lora"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["alone", "checkpoint"])
def test_errors_cover_every_gradient(train: str, checkpoint: bool) -> None:
    workload = Workload(CELL.changed(train=train, checkpoint=checkpoint))
    start(workload)
    workload.step()
    found = measure_error(workload)
    norm = train == "full" and checkpoint
    assert len(found["gradient_errors"]) == 1 + {"full": 3, "frozen": 0, "lora": 6}[train] + norm
    assert found["reference"] == "untiled fp32"
    assert 0 <= found["gradient_error"] < 1e-6  # fp32: some rounding errors of 6e-8, summed in another order


@pytest.mark.parametrize("name", ["input", "gate_proj.weight", "down_proj.weight"])
def test_a_wrong_gradient_is_seen(name: str) -> None:
    workload = Workload(CELL)
    start(workload)
    workload.step()
    tensor = dict(workload.trained())[name]
    assert tensor.grad is not None
    with torch.no_grad():
        tensor.grad[..., -1, :] = 0
    found = measure_error(workload)
    assert found["gradient_error"] > 1e-3 and found["gradient_error_worst"] == name
    tensor.grad = None if name != "input" else tensor.grad.fill_(float("nan"))
    assert measure_error(workload)["gradient_error"] == float("inf")


def test_a_sliced_reference_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(CELL.changed(tokens=2100, method="untiled"))
    start(workload)
    workload.step()
    whole = measure_error(workload)
    workload.reference, kept = None, workload.reference
    monkeypatch.setattr(measure_block, "REFERENCE_BYTES", 1)
    sliced = measure_error(workload)
    assert whole["gradient_error"] == 0.0
    assert kept is not None and workload.reference is None  # the whole one is kept
    assert sliced["reference"] == "untiled fp32 in slices of 1,024 tokens"
    assert 0 < sliced["gradient_error"] < 1e-6  # other sums of the same numbers


def test_the_upstream_gradient_repeats_and_reaches_the_output() -> None:
    pattern = torch.randn(3, 4)
    output = torch.zeros(1, 7, 4, requires_grad=True)
    Upstream.apply(output, pattern).backward()
    assert output.grad is not None
    torch.testing.assert_close(output.grad[0], torch.cat([pattern, pattern, pattern[:1]]), rtol=0, atol=0)
    assert repeated(pattern, 2).shape == (2, 4)


def test_low_precision_is_judged_against_fp32() -> None:
    found = [measure_cell(CELL.changed(dtype="bfloat16", method=method)) for method in ("untiled", "fused")]
    untiled, fused = (row["gradient_error"] for row in found)
    assert 1e-4 < untiled < 2e-2  # bfloat16 rounds to 4e-3
    assert fused <= 2 * untiled
    assert all(len(row["step_ms_all"]) == 5 and row["step_ms"] > 0 for row in found)


def test_pairs_run_in_turn_and_the_ratio_is_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter([10.0, 9.0, 12.0, 20.0, 30.0, 33.0])

    def timed(workload: Workload) -> float:
        order.append("fused" if "forward" in workload.mlp.__dict__ else "untiled")
        return next(times)

    monkeypatch.setattr(measure_block, "timed_step", timed)
    untiled, fused = measure_pairs(CELL, ["fused"], 3)
    assert order == ["untiled", "fused", "fused", "untiled", "untiled", "fused"]
    assert fused["pairs_ms"] == [(10.0, 9.0), (20.0, 12.0), (30.0, 33.0)]
    assert fused["ratios"] == [0.9, 0.6, 1.1]
    assert fused["ratio"] == statistics.median(fused["ratios"]) == 0.9
    assert untiled["step_ms"] == 20.0 and fused["units"] == 11 and untiled["units"] == 9


def test_a_method_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    install = measure_block.install

    def failing(model: Any, blocks: Any, method: str, ours: Any, count: int) -> str:
        if method == "liger":
            raise torch.OutOfMemoryError("too much")
        if method == "deepspeed":
            raise RuntimeError("two\nlines")
        return install(model, blocks, method, ours, count)

    monkeypatch.setattr(measure_block, "install", failing)
    rows = {row["method"]: row for row in measure_pairs(CELL, ["liger", "deepspeed", "fused"], 1)}
    assert rows["liger"]["error"] == "out of memory" and "ratio" not in rows["liger"]
    assert rows["deepspeed"]["error"] == "RuntimeError: two lines"
    assert len(rows["fused"]["pairs_ms"]) == 1


def test_where_untiled_does_not_fit_the_others_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    costs_of = measure_block.measure_costs

    def no_room(workload: Workload) -> dict[str, Any]:
        if "forward" not in workload.mlp.__dict__:
            raise torch.OutOfMemoryError("too much")
        return costs_of(workload)

    monkeypatch.setattr(measure_block, "measure_costs", no_room)
    untiled, fused = measure_pairs(CELL, ["fused"], 2)
    assert untiled["error"] == "out of memory"
    assert len(fused["step_ms_all"]) == 2 and "ratio" not in fused


def test_two_halves_give_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CELL.changed(tile="64", dtype="bfloat16").row()
    found = halves.measure_halves(cell)
    assert found["output_equal"] and found["input_gradient_equal"] and found["finite"]
    assert found["weight_gradient_error"] < 2**-8  # each half's gradient is rounded to bfloat16 once
    assert found["elements"] == TOKENS * HIDDEN
    monkeypatch.setattr(halves, "start", _shifted)
    assert not halves.measure_halves(cell)["output_equal"]


def _shifted(workload: Workload) -> dict[str, Any]:
    """Installs a block that reads one row too far, in long inputs only."""
    forward = type(workload.mlp).forward

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return forward(workload.mlp, x.roll(1, -2) if x.shape[-2] > TOKENS // 2 else x)

    workload.mlp.__dict__["forward"] = wrong
    return {}


def test_relative_error_of_a_missing_gradient_is_infinite() -> None:
    assert relative_error(None, torch.ones(2)) == float("inf")
    assert relative_error(torch.full((2,), float("nan")), torch.ones(2)) == float("inf")
    assert relative_error(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0])) == pytest.approx(0.1 / 2**0.5, rel=1e-6)
