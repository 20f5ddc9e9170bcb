"""A run that is out of memory says what it was doing, or goes on, to the losses and weights of one that was not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import short_of_memory
import tiny_run
from oom_faults import PHASES, Fault
from seqtile._errors import RunError
from seqtile.planner import chooser, memory_plan
from seqtile.train import out_of_memory, retry
from seqtile.train.out_of_memory import Place
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.result_report import Outcome
from seqtile.train.run import train
from seqtile.train.run_directory import newest_whole, numbered

STEPS = 4
FAILED = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows())


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "SMALLEST_TILE", 2)


DROPPING = {"lora": {"r": 2, "dropout": 0.3}}
ON_HOST = {**DROPPING, "offload": "checkpoints+weights"}
CONSTANT = {"lr_scheduler_type": "constant"}


def run(
    model: Path, dataset: Path, output: Path, *faults: TrainerCallback, resume: bool = False, **values: Any
) -> Outcome:
    defaults = dict(max_length=tiny_run.LENGTH, tile=32, loss_tile=32, steps=STEPS, save_steps=2, learning_rate=1e-2,
                    gradient_accumulation=2)  # fmt: skip
    paths = {"model": str(model), "dataset": str(dataset), "output": str(output)}
    recipe, _ = build_recipe({**defaults, **paths, **values}, {})
    return train(recipe, resume=resume, callbacks=faults)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(next(output.glob("*model.safetensors")))


@pytest.fixture(
    scope="module", params=[{}, DROPPING, ON_HOST], ids=["full", "lora with dropout", "weights on the host"]
)
def reference(request: Any, model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing happened to, whose tiles are smaller from step :data:`FAILED` on: saved and resumed there.

    All its weights are on the device.
    """
    output, values = tmp_path_factory.mktemp("reference") / "out", {**request.param, "offload": False, "report": False}
    run(model, dataset, output, steps=FAILED - 1, trainer=CONSTANT, **values)
    values |= {"tile": 8, "loss_tile": 8, "trainer": CONSTANT}
    return request.param, run(model, dataset, output, resume=True, **values).losses, weights(output)


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "recompute"])
def test_a_step_is_done_again_in_place(
    model: Path, dataset: Path, tmp_path: Path, reference: Any, phase: str, caplog: Any
):
    values, losses, expected = reference
    fault = Fault(phase, FAILED, micro=2)
    outcome = run(model, dataset, tmp_path / "out", fault, on_oom="retry", trainer=CONSTANT, **values)
    told = phase if phase != "recompute" else "backward"
    block = {"loss": "lm_head", "backward": "model.layers.1"}.get(phase, "model.layers.1.self_attn")
    place = f"out of memory at step 3, in the {told} of {block}"
    assert f"{place}: continuing in place with tile: 8, loss_tile: 8" in caplog.text
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, expected[name]), name
    # The mean that is logged of the failed step is put right by a sum and a difference of fp32 numbers.
    torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(losses), rtol=1e-6, atol=0)
    # Two rows of 64 tokens a step: none counted twice.
    log = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [row["num_tokens"] for row in log] == [128.0 * step for step in range(1, STEPS + 1)]
    saved = read_recipe(tmp_path / "out" / "recipe.yaml")
    assert (saved["tile"], saved["loss_tile"], saved.get("offload", False)) == (8, 8, values.get("offload", False))
    assert ("; weights of 2 layers on the host" in caplog.text) == ("offload" in values)
    (again,) = json.loads((tmp_path / "out" / "report" / "report.json").read_text())["retries"]
    assert (again["step"], again["phase"], again["how"]) == (3, told, "in place")


def test_what_the_optimizer_has_begun_is_done_again_from_the_checkpoint(
    model: Path, dataset: Path, tmp_path: Path, reference: Any, caplog: Any
):
    values, losses, expected = reference
    outcome = run(model, dataset, tmp_path / "out", Fault("optimizer", FAILED), on_oom="retry", trainer=CONSTANT,
                  **values)  # fmt: skip
    assert "in the optimizer: continuing from checkpoint-2 with tile: 8, loss_tile: 8" in caplog.text
    assert outcome.losses == losses
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, expected[name]), name
    (again,) = outcome.retries
    assert (again["step"], again["phase"], again["how"]) == (3, "optimizer", "from checkpoint-2")


def test_the_first_step_goes_on_from_a_checkpoint_of_step_0(model: Path, dataset: Path, tmp_path: Path, caplog: Any):
    small = {**DROPPING, "tile": 8, "loss_tile": 8, "steps": 2, "report": False}
    whole = run(model, dataset, tmp_path / "whole", **small)
    fault = Fault("optimizer", 1)
    found = run(model, dataset, tmp_path / "out", fault, on_oom="retry", **{**small, "tile": 32, "loss_tile": 32})
    assert "continuing from checkpoint-0" in caplog.text and found.losses == whole.losses
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, weights(tmp_path / "whole")[name]), name


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to know what this process has")
def test_memory_that_is_really_short(dataset: Path, tmp_path: Path):
    """One buffer of a whole row takes 192 MiB and a tile has four; smaller ones fit in what is left."""
    wide = tiny_run.save_model(tmp_path / "wide", intermediate_size=24576, num_hidden_layers=1, hidden_size=16,
                               head_dim=6, max_position_embeddings=2048)  # fmt: skip
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"text": "the king sees " * 200} for _ in range(2)])
    values = dict(tile=2048, loss_tile=32, max_length=2048, steps=1, save_steps=2, learning_rate=1e-2,
                  gradient_accumulation=1, report=False)  # fmt: skip
    paths = {"model": str(wide), "dataset": str(rows), "output": str(tmp_path / "out")}
    command = [sys.executable, short_of_memory.__file__, json.dumps({**values, **paths, "on_oom": "retry"})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tiles"] in ([512], [512, 128]), done.stderr  # how much is free in pieces depends on the libraries
    assert re.search("in the (forward|backward) of model.layers.0.mlp: continuing in place with tile: 512", done.stderr)
    smaller = {**values, "tile": found["tiles"][-1], "loss_tile": found["loss_tile"]}
    whole = run(wide, rows, tmp_path / "whole", **smaller)
    assert found["losses"] == [list(loss) for loss in whole.losses]
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, weights(tmp_path / "whole")[name]), name


def test_it_ends_where_nothing_smaller_is_left(
    model: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retry, "_by_plan", lambda *_: [])
    with pytest.raises(RunError) as caught:
        run(model, dataset, tmp_path / "out", Fault("forward", FAILED, times=99), on_oom="retry")
    assert "2 of at most 8 retries; no smaller setting is left" in str(caught.value)
    assert newest_whole(tmp_path / "out")[0] == tmp_path / "out" / "checkpoint-2"
    assert read_recipe(tmp_path / "out" / "recipe.yaml")["tile"] == 2


@pytest.mark.parametrize("phase", PHASES)
def test_it_says_what_it_was_doing_and_keeps_the_checkpoint(
    model: Path, dataset: Path, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retry, "_by_plan", lambda recipe, place: [f"the plan of {place.tokens} tokens"])  # seconds
    reachable = out_of_memory._reachable
    others = [*reachable("cpu")]  # of other tests in this process; held, so that no storage of ours gets their place
    monkeypatch.setattr(
        out_of_memory, "_reachable",
        lambda kind: (one for one in reachable(kind) if one[0] not in {other[0] for other in others}),
    )  # fmt: skip
    with pytest.raises(RunError) as caught:
        run(model, dataset, tmp_path / "out", Fault(phase, FAILED))
    first, _, rest = str(caught.value).partition("\n")
    block = {"forward": " of model.layers.1.self_attn", "loss": " of lm_head", "backward": " of model.layers.1"}
    asked = "could not allocate 1,048,576.00 GiB"
    assert first == f"out of memory at step 3, in the {phase}{block.get(phase, '')}: {asked}"
    assert "  0.05 MiB  4 x optimizer state of model.layers.*.mlp.gate_proj.weight, 96 x 32 float32\n" in rest
    # 42,720 weights in fp32, and two states of each.
    sums = re.search(r"in all: optimizer state 0.33 MiB, weights 0.16 MiB, .*", rest)
    assert sums and "activations 0." in sums[0] and ("gradients" in sums[0]) == (phase in ("backward", "optimizer"))
    assert re.search(r"\nthe plan of \d\d tokens\n", rest)
    assert f"the last complete checkpoint is {tmp_path / 'out' / 'checkpoint-2'}" in rest
    assert [step for step, _ in numbered(tmp_path / "out")] == [2]


def test_it_says_what_the_plan_had_said_and_what_would_have_avoided_it(
    model: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chooser, "SMALLEST_TILE", 64)
    monkeypatch.setattr(memory_plan, "SAME_TILES", 0.0)  # of a device's memory, which is nothing to this model
    values = {"model": str(model), "dataset": str(dataset), "max_length": 256, "loss_tile": 64, "tile": 256}
    recipe, _ = build_recipe(values, {})
    asked = 2**18  # one of the four buffers of 256 x 96 numbers that a tile holds takes 2**16 + 2**15 bytes
    said = retry.explain_out_of_memory(recipe, Place("backward", "model.layers.1.mlp", 3, asked, 256, 256), [], None, 0)
    assert re.search(r"\nplanned for 256 tokens: 0.75 GiB \(0.45 to 1.25\) of [\d,.]+ GiB, peak in the ", said)
    assert re.search(r"\nthis would avoid it: tile: 64, .* \(0.00 GiB less, .* by the plan\); --on-oom retry", said)
    assert said.endswith("no checkpoint was saved yet")
    more = Place("backward", "model.layers.1.mlp", 3, 2**24, 256, 256)
    assert "this would avoid it" not in retry.explain_out_of_memory(recipe, more, [], None, 0)


def test_tensors_without_memory_are_not_live() -> None:
    """torch.compile leaves fake tensors behind, whose shapes may be symbols."""
    from seqtile.counting.fake import fake_tensors
    from seqtile.train.out_of_memory import largest_tensors

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    model = torch.nn.Linear(4, 4)
    with fake_tensors():
        left_behind = torch.empty(2**40)
    torch.compile(traced, backend="aot_eager", dynamic=True)(torch.ones(5, 7))
    lines = largest_tensors(RuntimeError("none"), model, None, None)
    assert left_behind.numel() == 2**40 and not any("1099511627776" in line for line in lines), lines
