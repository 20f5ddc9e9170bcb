"""``seqtile.TilingCallback`` in the real trainers: the same losses, and what it logs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import seqtile
import tiny_run
import trainers
from refusals import refused
from seqtile.install.apply import tiled_names
from trainers import plain
from watching import rows_of

STEPS = 8
pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers have to say about their own defaults


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def sft(directory: Path, out: Path, *callbacks: Any, **settings: Any) -> Any:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainers.sft(directory, out, *callbacks, adapters=lora, **settings)


def history(trainer: Any) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


TRAINERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Trainer": (plain, ()),
    "SFT": (sft, ("mean_token_accuracy",)),
    "DPO": (trainers.dpo, ("rewards/margins",)),
    "GRPO": (trainers.grpo, ("kl", "reward")),
    "GKD": (trainers.gkd, ()),
    "reward": (trainers.reward_model, ("accuracy", "margin")),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_one_loss_trajectory(name: str, directory: Path, tmp_path: Path) -> None:
    build, also = TRAINERS[name]
    settings = {"max_steps": STEPS, "learning_rate": 0.1}
    untiled = build(directory, tmp_path, **settings)
    untiled.train()
    callback = seqtile.TilingCallback(tile=16)
    tiled = build(directory, tmp_path, callback, **settings)
    assert tiled_names(tiled.model) == tiled_names(untiled.model) | {block.name for block in callback.report.blocks}
    assert len(callback.report.blocks) == 2
    tiled.train()
    expected, got = history(untiled), history(tiled)
    assert len(expected) == len(got) == STEPS and expected[0]["loss"] != expected[-1]["loss"]
    for key in ("loss", "grad_norm", *also):
        # The order of sums differs by tile; eight steps of plain SGD add it up to ten times what one is allowed.
        torch.testing.assert_close(
            torch.tensor([log[key] for log in got]), torch.tensor([log[key] for log in expected]), rtol=1.3e-5,
            atol=1e-5, msg=lambda text, key=key: f"{key}: {text}",
        )  # fmt: skip
    torch.testing.assert_close(weights(tiled), weights(untiled), rtol=1.3e-5, atol=1e-5)
    assert got[0]["seqtile"].startswith("tiled 2 of 2 MLPs (LlamaMLP), 16 tokens per tile")
    assert [key for log in got[1:] for key in log if "seqtile" in key] == ["seqtile/peak_resident_gib"] * (STEPS - 1)
    assert 0.05 < got[-1]["seqtile/peak_resident_gib"] < 1000
    assert ("reference model: tiled 2 of 2" in got[0]["seqtile"]) == (name in ("DPO", "GRPO"))
    assert ("teacher model: tiled 2 of 2" in got[0]["seqtile"]) == (name == "GKD")


class Told(TrainerCallback):
    """Stands where those in ``report_to`` stand: before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_what_is_reported_to_hears_it(directory: Path, tmp_path: Path) -> None:
    told = Told()
    trainer = plain(directory, tmp_path, told, seqtile.TilingCallback(tile=16), max_steps=2)
    trainer.train()
    assert "tiled 2 of 2" in told.logs[0]["seqtile"] and "seqtile/peak_resident_gib" in told.logs[1]
    json.dumps(trainer.state.log_history)  # saved beside every checkpoint


def test_resumed_with_checkpointing(directory: Path, tmp_path: Path) -> None:
    more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_checkpointing": True}
    whole = plain(directory, tmp_path / "whole", seqtile.TilingCallback(tile=16), **more)
    whole.train()
    again = plain(directory, tmp_path / "whole", seqtile.TilingCallback(tile=16), **more)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert [log["loss"] for log in history(again)] == [log["loss"] for log in history(whole)]
    assert ["seqtile" in log for log in history(again)] == [True, False, False, True, False, False]
    untiled = plain(directory, tmp_path / "untiled", **more)
    untiled.train()
    torch.testing.assert_close(weights(again), weights(untiled), rtol=1.3e-5, atol=1e-5)


def test_a_model_per_run(directory: Path, tmp_path: Path) -> None:
    callback = seqtile.TilingCallback(tile=16, loss="tiled")
    trainer = plain(
        directory, tmp_path, callback, max_steps=2, model_init=lambda: AutoModelForCausalLM.from_pretrained(directory)
    )
    first = trainer.model
    for _ in range(2):
        trainer.train()
        assert trainer.model is not first and len(tiled_names(trainer.model)) == 2
        first = trainer.model
    assert "loss of LlamaForCausalLM tiled" in str(callback.report)


def test_evaluated_predicted_and_trained_twice(directory: Path, tmp_path: Path) -> None:
    trainer = plain(directory, tmp_path, seqtile.TilingCallback(tile=16), max_steps=2)
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(plain(directory, tmp_path).evaluate()["eval_loss"], rel=1e-5)
    trainer.train()
    model = trainer.model
    trainer.train()
    assert trainer.model is model and len(tiled_names(model)) == 2
    assert sum("seqtile" in log for log in history(trainer)) == 1  # the state begins again
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(trainers.ids(2)).predictions.shape == (2, 32, 257)


def test_added_to_a_trainer_that_is_built(directory: Path, tmp_path: Path) -> None:
    trainer = plain(directory, tmp_path, max_steps=1)
    trainer.add_callback(seqtile.TilingCallback(tile=16))
    trainer.train()
    assert len(tiled_names(trainer.model)) == 2 and "tiled 2 of 2" in history(trainer)[0]["seqtile"]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_tiled_loss_in_trl(directory: Path, tmp_path: Path, bf16: bool) -> None:
    trainer = sft(directory, tmp_path, max_steps=1, bf16=bf16)
    report = seqtile.apply(trainer.model, loss="tiled", tile=16)
    trainer.add_callback(seqtile.TilingCallback(report))
    trainer.train()
    assert "loss of LlamaForCausalLM tiled" in history(trainer)[0]["seqtile"]


def replace_forward(trainer: Trainer) -> torch.Tensor:
    """As Liger's kernels do: a bound function on the instance; it halves the output. Returns a weight that it reads."""
    mlp = trainer.model.model.layers[1].mlp

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, x) / 2

    mlp.forward = FunctionType(forward.__code__, {**globals(), "__name__": "liger_kernel.a_kernel"}).__get__(mlp)
    return mlp.gate_proj.weight


def test_what_another_library_replaced_is_noticed(directory: Path, tmp_path: Path) -> None:
    trainer = plain(directory, tmp_path, max_steps=1)
    trainer.add_callback(seqtile.TilingCallback(seqtile.apply(trainer.model, tile=16, blocks="mlp")))
    replace_forward(trainer)
    with refused("callback.tiles-lost", "1 of 2 tiled blocks", "model.layers.1.mlp"):
        trainer.train()


def test_what_another_library_put_in_its_place_is_tiled(directory: Path, tmp_path: Path) -> None:
    """As use_liger_kernel=True does when training begins."""
    trainer = plain(directory, tmp_path, seqtile.TilingCallback(tile=16, blocks="mlp"), max_steps=1)
    mlp = trainer.model.model.layers[1].mlp
    mlp.forward = type(mlp).forward.__get__(mlp)
    with rows_of(mlp.gate_proj.weight) as tiles:
        trainer.train()
    assert set(tiles) == {16} and "tiled 2 of 2" in history(trainer)[0]["seqtile"]


def test_the_layers_tiles_go_on_around_a_replaced_forward(directory: Path, tmp_path: Path) -> None:
    trainer, untiled = (
        plain(directory, tmp_path, *one, max_steps=2) for one in ([seqtile.TilingCallback(tile=16)], [])
    )
    weight = replace_forward(trainer)
    replace_forward(untiled)
    with rows_of(weight) as tiles:
        trainer.train()
    untiled.train()
    assert set(tiles) == {16}
    torch.testing.assert_close(weights(trainer), weights(untiled))


@pytest.mark.parametrize(("longest", "reported"), [(31, 1), (32, 0)])
def test_rows_longer_than_planned_are_reported_once(
    longest: int, reported: int, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All rows have 32 tokens; evaluation has larger batches, which no plan is about."""
    callback = seqtile.TilingCallback(max_length=longest, device="8GiB", tile=16, loss_tile=16, keep=0.0)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    plain(directory, tmp_path, callback, max_steps=3, **evaluated).train()
    assert sum("its memory is not in the plan" in record.getMessage() for record in caplog.records) == reported


def test_settings_that_would_be_ignored_are_refused(directory: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tiles'"):
        seqtile.TilingCallback(tiles=8)
    report = seqtile.apply(AutoModelForCausalLM.from_pretrained(directory))
    with refused("callback.report-and-settings", "['tile']"):
        seqtile.TilingCallback(report, tile=8)


def test_garbage_is_gone_when_the_first_step_begins(directory: Path, tmp_path: Path) -> None:
    class Garbage:
        """A cycle, as a trainer's construction leaves them."""

        def __init__(self) -> None:
            self.itself = self

    found: dict[str, bool] = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            found["at the start"] = left() is None

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            nonlocal left
            left = weakref.ref(Garbage())

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal left
            found[f"step {state.global_step}"] = left() is None
            left = weakref.ref(Garbage())

    trainer = plain(directory, tmp_path, Watch(), seqtile.TilingCallback(), max_steps=2, eval_on_start=True)
    left = weakref.ref(Garbage())
    gc.disable()
    try:
        trainer.train()
    finally:
        gc.enable()
    assert found == {"at the start": True, "step 0": True, "step 1": False}


class Allocator:
    """Stands for an accelerator's counters."""

    def __init__(self) -> None:
        self.peak = 0

    def max_memory_allocated(self, *_: Any) -> int:
        return self.peak

    def reset_peak_memory_stats(self, *_: Any) -> None:
        self.peak = 0


@pytest.mark.parametrize("ours", [True, False], ids=["", "transformers measures"])
def test_the_peak_of_each_part(directory: Path, monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    allocator, emptied = Allocator(), []
    for name in ("max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, getattr(allocator, name))
    module = SimpleNamespace(empty_cache=lambda: emptied.append(True), is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    model = AutoModelForCausalLM.from_pretrained(directory)
    callback = seqtile.TilingCallback(seqtile.apply(model))
    args = SimpleNamespace(device=torch.device("meta"), skip_memory_metrics=ours)  # a device that is no CPU
    state = SimpleNamespace(log_history=[{}])
    callback.on_train_begin(args, state, None, model=model)
    assert emptied == [True]
    for event, gib in (
        (callback.on_step_begin, 9), (callback.on_pre_optimizer_step, 5), (callback.on_optimizer_step, 2),
        (callback.on_step_begin, 7), (callback.on_pre_optimizer_step, 3), (callback.on_optimizer_step, 1),
        (callback.on_prediction_step, 4),
    ):  # fmt: skip
        allocator.peak = gib << 30  # what the time until this event took
        event(args, state, None)
    logs: dict[str, Any] = {}
    callback.on_log(args, state, None, logs=logs)
    del logs["seqtile"]
    parts = {"forward_backward": 5.0, "optimizer": 2.0, "evaluation": 4.0} if ours else {}
    assert logs == {f"seqtile/{part}_peak_allocated_gib": gib for part, gib in parts.items()}
    callback.on_log(args, state, None, logs=(later := {}))
    assert later == {} and emptied == [True]
