"""Evaluation during training: tiled, shown, and the best checkpoint kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import tiny_run
from refusals import command_refused
from seqtile.cli import main
from seqtile.install.runs import forget_runs, what_ran
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    tiny_run.save_model(folder / "model")
    tiny_run.write_jsonl(folder / "rows.jsonl", tiny_run.text_rows())
    tiny_run.write_jsonl(folder / "other.jsonl", [*tiny_run.text_rows(3), {"text": ""}])
    return folder


class Watch(TrainerCallback):
    """What the tiles did in an evaluation, and the loss of the same rows untiled."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        forget_runs(model)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ran.append(str(what_ran(model)))


def flags(folder: Path, output: Path, *more: str) -> list[str]:
    return ["train", "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--output", str(output),
            "--max-length", "64", "--tile", "16", *more]  # fmt: skip


def test_evaluation_is_tiled_and_the_best_checkpoint_stays(folder: Path, tmp_path: Path) -> None:
    values = {
        "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output": str(tmp_path / "out"),
        "eval_dataset": str(folder / "other.jsonl"), "eval_steps": 1, "skip_bad_rows": True, "steps": 5, "tile": 16,
        "max_length": 64, "trainer": {"lr_scheduler_type": "constant", "warmup_steps": 0},
        # Of so large a step the first is the best.
        "learning_rate": 0.5,
    }  # fmt: skip
    watch = Watch()
    outcome = train(build_recipe(values, {})[0], callbacks=[watch])
    assert watch.ran == ["batches of up to 64 tokens were cut into up to 4 tiles"] * 5
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["eval_loss"] for one in records if "eval_loss" in one}
    best = min(losses, key=lambda step: losses[step])
    assert outcome.best == (best, losses[best]) and best < 4
    kept = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-4", "checkpoint-5"}
    assert outcome.data["eval"].rows == 3 and outcome.data["eval"].left_out == {"'text' is empty": 1}
    untiled = train(
        build_recipe({**values, "output": str(tmp_path / "plain"), "tiled_mlp": False, "tile": None}, {})[0]
    )
    assert untiled.best is not None and untiled.best[0] == best
    torch.testing.assert_close(untiled.best[1], outcome.best[1], rtol=1e-4, atol=0)


def test_the_loss_is_the_mean_of_the_batches_of_which_the_last_is_smaller(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"][: 40 + 9 * number]} for number, row in enumerate(tiny_run.text_rows(3))]
    tiny_run.write_jsonl(tmp_path / "three.jsonl", rows)
    values = {
        "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output": str(tmp_path / "out"),
        "eval_dataset": str(tmp_path / "three.jsonl"), "eval_steps": 1, "steps": 1, "batch_size": 2, "tile": 16,
        "max_length": 64, "learning_rate": 0.1, "trainer": {"warmup_steps": 0},
    }  # fmt: skip
    outcome = train(build_recipe(values, {})[0])
    expected = tiny_run.mean_loss(tmp_path / "out", tmp_path / "three.jsonl", 2, 64)
    assert outcome.best is not None and outcome.best[1] == pytest.approx(expected, rel=1e-5)


def test_a_run_in_passes_over_the_heads_is_the_plain_one_and_saves(folder: Path, tmp_path: Path) -> None:
    tiny_run.save_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    values = {
        "model": str(tmp_path / "model"), "dataset": str(folder / "rows.jsonl"), "steps": 2, "max_length": 64,
        "eval_dataset": str(folder / "rows.jsonl"), "eval_steps": 1, "learning_rate": 0.01,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {"passes": {"tile": 16, "heads": 1}, "plain": {"tiled_mlp": False}}
    passes, plain = (
        train(build_recipe({**values, **one, "output": str(tmp_path / name)}, {})[0]) for name, one in more.items()
    )
    assert passes.ran == "batches of up to 64 tokens were cut into up to 4 tiles"
    assert "1 key-value head per pass" in str(passes.tiling)
    assert dict(passes.losses) == pytest.approx(dict(plain.losses), rel=1e-4)
    assert passes.best == pytest.approx(plain.best, rel=1e-4)


def test_everyday_flags_reach_the_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from seqtile.train.trainer import Trainer

    seen: list[Any] = []

    class Seen(BaseException):
        pass

    def stop(trainer: Any, _: Any) -> None:
        seen.append(trainer.args)
        raise Seen

    monkeypatch.setattr(Trainer, "train_all", stop)
    more = ["--batch-size", "2", "--epochs", "3", "--save-steps", "7", "--packing", "wrapped", "--warmup-steps", "0.25",
            "--lr-scheduler-type", "cosine", "--eval-dataset", str(folder / "rows.jsonl"), "--eval-steps", "14",
            "--report-to", "none"]  # fmt: skip
    with pytest.raises(Seen):
        main(flags(folder, tmp_path / "out", *more))
    (args,) = seen
    assert (args.per_device_train_batch_size, args.num_train_epochs, args.save_steps, args.eval_steps) == (2, 3, 7, 14)
    assert args.packing and args.packing_strategy == "wrapped" and args.per_device_eval_batch_size == 2
    assert args.get_warmup_steps(100) == 25 and str(args.lr_scheduler_type.value) == "cosine" and not args.report_to


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["--eval-steps", "5"], ("eval-steps.without-eval-dataset",)),
        (["--eval-dataset", "missing.jsonl"], ("dataset.not-found", "'missing.jsonl'")),
        (
            ["--eval-dataset", "{rows}", "--eval-steps", "5", "--save-steps", "2"],
            ("eval-steps.not-multiple-of-save-steps",),
        ),
        (["--packing", "some"], ("option.unknown-choice", "packing")),
        (["--report-to", "none,wandbb"], ("report-to.unknown", "'wandbb'")),
        (["--lr-scheduler-type", "sideways"], ("trainer.refused", "sideways is not a valid SchedulerType")),
        (["--batch-size", "0"], ("recipe.invalid-value", "batch_size")),
    ],
)
def test_bad_flags(folder: Path, tmp_path: Path, more: list[str], refusal: tuple[str, ...]) -> None:
    given = [word.format(rows=folder / "rows.jsonl") for word in more]
    command_refused(flags(folder, tmp_path / "out", *given), *refusal)
    assert not (tmp_path / "out").exists()
