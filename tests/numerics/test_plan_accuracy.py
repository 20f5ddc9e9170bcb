"""Predicted bytes against the allocator's own, on cells of ``benchmarks/plan_accuracy.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

import plan_published
from seqtile.cli.flags import options_of
from seqtile.options import changed
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONTEXT

pytestmark = pytest.mark.backward_here  # a profiler records the memory of its own thread

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_accuracy", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plan_accuracy = _script()
CELLS = plan_accuracy.all_cells()


def test_the_table_covers_what_it_says() -> None:
    assert len(set(CELLS)) == len(CELLS) >= 40
    assert len({cell.model for cell in CELLS}) == 6
    for name in ("technique", "lora", "optimizer", "precision", "batch", "accumulation", "tokens"):
        every = {getattr(cell, name) for cell in CELLS}
        assert len(every) > 1
        for model in {cell.model for cell in CELLS}:
            assert len({getattr(cell, name) for cell in CELLS if cell.model == model}) > 1, (model, name)


def test_every_measured_cell_is_within_the_bounds() -> None:
    for name, cells in (
        ("plan-cpu", CELLS),
        ("plan-cpu-hybrid", plan_accuracy.hybrid_cells()),
    ):
        found = plan_accuracy.Grid(name, cells).results.read_text(encoding="utf-8").splitlines()
        for row in map(json.loads, found):
            bound = 2 if row["model"] in plan_accuracy.EXPERTS else 1
            assert -0.005 * bound <= row["error"] <= 0.01 * bound, row


@pytest.mark.parametrize(
    "cell",
    [
        plan_accuracy.Cell("llama", 3000, "loss, MLP, checkpoints", False, "adamw", "float32", 1, 2),
        plan_accuracy.Cell("phi3", 2500, "loss", True, "sgd", "bfloat16", 1, 1),
        plan_accuracy.Cell("gpt2", 2500, "loss, checkpoints", False, "adafactor", "autocast", 1, 1),
        plan_accuracy.Cell("mixtral", 2500, "loss, checkpoints", True, "adamw", "float32", 3, 1),
        # The peak is in a kernel in the shorter rows that are run for it, and beside the kernels in its own.
        plan_accuracy.Cell("llama", 4096, "loss, layer, heads, checkpoints", True, "adamw", "bfloat16", 3, 1),
    ],
    ids=str,
)
def test_predicted_is_measured(cell: Any) -> None:
    """Within 1 % and no more than 0.5 % too low; twice that with experts, whose routing no shape tells."""
    if cell.lora and cell.model in plan_accuracy.EXPERTS and version("peft").startswith("0.19."):
        pytest.skip("PEFT 0.19 reads 'all-linear' letter by letter on models with experts")
    row = json.loads(json.dumps(plan_accuracy.run_cell(cell)))  # as it is written to the results
    bound = 2 if row["model"] in plan_accuracy.EXPERTS else 1
    assert -0.005 * bound <= row["error"] <= 0.01 * bound
    assert row["tokens"] not in row["fake_lengths"]
    assert row["layers"] not in row["fake_layers"]


@pytest.mark.parametrize("flags", [{"loss": "full"}, {"loss": "tiled", "loss_tile": 128}, {"loss": "tiled"}], ids=str)
def test_the_loss_that_is_asked_for_is_planned(flags: dict[str, Any]) -> None:
    """Whole fp32 logits, those of chunks and those of the tiles that are chosen, against a real step."""
    config = plan_accuracy.Cell("llama", 1024, "none", False).config()
    config.vocab_size = 8192  # so that logits are the peak
    options = options_of({"tile": "none", "checkpoint": "layer", **flags})
    planner = Planner(
        Request(
            "llama", config, Device("cpu", 2**34, None, "made up"), precision="float32", attention="sdpa",
            device_type="cpu", options=options,
        )
    )  # fmt: skip
    setup = planner.resolved(1024)
    assert setup.options.loss is None or "loss_tile" not in flags or setup.loss_tile == flags["loss_tile"]
    terms = planner.estimate(1024).terms
    planned = sum(value for name, value in terms.items() if name != CONTEXT)
    assert planned == pytest.approx(plan_accuracy.measure(config, setup, 1024), rel=0.005)


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [("llama", "none:2"), ("llama", "none:1+attention-saved:2"), ("gemma3_text", "none:1+attention-saved:2")],
)
def test_checkpoints_by_layer_are_predicted(model: str, checkpoint: str) -> None:
    """A step of full attention, and one whose layers read windows of two sizes."""
    config = plan_accuracy.Cell("llama", 2500, "none", False).config()
    if model != "llama":
        layers = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 512, "head_dim": 32}
        config = AutoConfig.for_model(model, **{**plan_accuracy.COMMON, "num_hidden_layers": 6, **layers})
    setup = changed(plan_accuracy.Cell("llama", 2500, "loss, MLP, checkpoints", False).setup(), checkpoint=checkpoint)
    found = plan_accuracy.predict(config, setup, 2500, workspace=plan_accuracy.cpu_workspace, device_type="cpu")
    error = found.peak / plan_accuracy.measure(config, setup, 2500) - 1
    assert -0.005 <= error <= 0.01


@pytest.mark.parametrize(
    "model",
    [
        "lfm2",
        "nemotron_h",
        pytest.param("bamba", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
    ],
)
def test_layers_with_a_state_are_predicted(model: str) -> None:
    """Within 2 %, on transformers' PyTorch paths."""
    if model not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model}")
    row = plan_accuracy.run_cell(next(cell for cell in plan_accuracy.hybrid_cells() if cell.model == model))
    assert abs(row["error"]) <= 0.02


def test_layers_whose_heads_differ_are_predicted() -> None:
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("transformers has no gemma4_text")
    config = AutoConfig.for_model(
        "gemma4_text", **{**plan_accuracy.COMMON, "num_hidden_layers": 3}, head_dim=32, global_head_dim=64,
        sliding_window=256, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    )  # fmt: skip
    setup = plan_accuracy.Cell("gemma4_text", 1536, "loss, checkpoints", False).setup()
    found = plan_accuracy.predict(config, setup, 1536, workspace=plan_accuracy.cpu_workspace, device_type="cpu")
    assert found.peak == pytest.approx(plan_accuracy.measure(config, setup, 1536), rel=0.001)


def test_the_rows_of_hybrid_models_are_within_what_is_aimed_at() -> None:
    """Never 0.5 % under, mixtures of experts 1 %; within 1 %, mixtures of experts 2 %."""
    grid = plan_accuracy.Grid("plan-cpu-hybrid", plan_accuracy.hybrid_cells())
    rows = [json.loads(line) for line in grid.results.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 33 and {row["model"] for row in rows} == set(plan_accuracy.HYBRIDS)
    for row in rows:
        slack = 2 if row["model"] in plan_accuracy.EXPERTS else 1
        assert -0.005 * slack <= row["error"] <= 0.01 * slack, row


def test_a_published_run_is_predicted_by_the_command_alone() -> None:
    """One row of the table: within 7 %, and not under by more than 3 % at the high estimate."""
    run = next(run for run in plan_published.RUNS if run.name == "LitGPT, batch 2")
    row = plan_published.judge(run)
    assert abs(row["error"]) <= 0.07 and row["sure_error"] >= -0.03


def test_published_rows_say_what_they_judge() -> None:
    runs = plan_published.RUNS
    assert len({run.name for run in runs}) == len({run.asked for run in runs}) == len(runs) >= 20
    assert not any(run.led_to and run.lacks for run in runs)
    assert sum(not run.led_to and not run.lacks for run in runs) >= 10
