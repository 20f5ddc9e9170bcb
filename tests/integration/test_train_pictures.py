"""``seqtile train`` on pictures and videos: the loss of plain Transformers, resumed bit by bit, with adapters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import TrainerCallback

import tiny_run
from refusals import command_refused
from seqtile.cli import main
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.result_report import Outcome
from seqtile.train.run import train

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, 20 pictures of unlike sizes and 5 videos."""
    folder = tmp_path_factory.mktemp("pictures")
    tiny_run.save_qwen_vl(folder / "model")
    tiny_run.write_jsonl(folder / "rows.jsonl", tiny_run.picture_rows(folder))
    return folder


class Interrupted(TrainerCallback):
    """Ctrl-C while step 3 runs."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def run(folder: Path, output: Path, *, how: Any = None, **values: Any) -> Outcome:
    defaults = dict(
        model=str(folder / "model"), dataset=str(folder / "rows.jsonl"), output=str(output), max_length=128, steps=5,
        tile=16, vision=1, loss_tile=16, batch_size=2, gradient_accumulation=2, learning_rate=1e-2,
        trust_remote_code=True, report=False,
    )  # fmt: skip
    return train(build_recipe({**defaults, **values}, {})[0], **(how or {}))


def test_stopped_and_resumed_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, tmp_path / "whole")
    stopped = run(folder, tmp_path / "parts", how={"callbacks": [Interrupted()]})
    assert (stopped.stopped_by, stopped.step) == (signal.SIGINT, 3)
    resumed = run(folder, tmp_path / "parts", how={"resume": True})
    assert resumed.losses == whole.losses and len({loss for _, loss in whole.losses}) == 5
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    start = load_file(folder / "model" / "model.safetensors")
    still = {name for name in start if torch.equal(start[name], weights[0][name])}
    assert not still, "the tower and its merger are trained too"
    summary = whole.data["train"]
    assert (summary.rows, summary.pictures, summary.frames) == (25, 20, 20)


def test_the_loss_is_that_of_plain_transformers_on_every_row(folder: Path, tmp_path: Path) -> None:
    """One step over all rows: the mean over the tokens that are no pictures."""
    ours = run(folder, tmp_path / "out", steps=1, batch_size=5, gradient_accumulation=5)
    trained = tmp_path / "out"
    processor = transformers.AutoProcessor.from_pretrained(trained, trust_remote_code=True)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for row in tiny_run.picture_rows(folder):
        videos = 0
        for part in row["messages"][0]["content"]:
            videos += "video" in part
            for kind in {"image", "video"} & part.keys():
                paths = part[kind] if kind == "video" else [part[kind]]
                opened = [transformers.image_utils.load_image(str(folder / path)) for path in paths]
                part[kind] = opened if kind == "video" else opened[0]
        settings = {"do_sample_frames": False, "video_metadata": [{"total_num_frames": 4, "fps": None}] * videos}
        batch = processor.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=settings
        )
        labels = batch["input_ids"].masked_fill(batch["mm_token_type_ids"] > 0, -100)
        with torch.no_grad():
            logits = model(**batch).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    torch.testing.assert_close(torch.tensor(ours.losses[0][1]), torch.tensor(total / count), rtol=1e-4, atol=0)


def test_groups_of_the_tower_change_nothing_but_rounding(folder: Path, tmp_path: Path) -> None:
    groups = run(folder, tmp_path / "groups")
    whole = run(folder, tmp_path / "whole", vision=None, tiled_mlp=False, tile=None)
    assert whole.tiling is None
    torch.testing.assert_close(torch.tensor(groups.losses), torch.tensor(whole.losses), rtol=1e-4, atol=1e-4)


def test_adapters_are_on_the_language_model_and_evaluations_keep_the_best(folder: Path, tmp_path: Path) -> None:
    held_out = tiny_run.write_jsonl(folder / "eval.jsonl", tiny_run.picture_rows(folder, pictures=3, videos=2))
    values = dict(lora={"r": 4}, eval_dataset=str(held_out), eval_steps=2, steps=4)
    outcome = run(folder, tmp_path / "out", **values)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved and all(".layers." in name and ".visual." not in name for name in saved)
    assert outcome.best is not None and set(outcome.data) == {"train", "eval"}
    assert outcome.data["eval"].frames == 8
    on_tower = run(folder, tmp_path / "tower", lora={"r": 4, "target_modules": ["qkv", "q_proj"]}, steps=1)
    assert on_tower.losses
    assert any(".visual." in name for name in load_file(tmp_path / "tower" / "adapter_model.safetensors"))


def test_pairs_train_their_completions_alone(folder: Path, tmp_path: Path) -> None:
    rows = []
    for row in tiny_run.picture_rows(folder, pictures=4, videos=0):
        asked, answer = row["messages"]
        rows.append({"prompt": [asked], "completion": [answer]})
    data = tiny_run.write_jsonl(folder / "pairs.jsonl", rows)
    dry = ["train", "--model", str(folder / "model"), "--dataset", str(data), "--max-length", "128", "--dry-run"]
    assert main([*dry, "--trust-remote-code", "--output", str(tmp_path / "dry")]) == 0
    outcome = run(folder, tmp_path / "out", dataset=str(data), steps=2)
    assert len(outcome.losses) == 2


def test_a_dry_run_shows_visual_tokens_and_the_first_row(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max-length", "128"]
    more = ["--vision", "2", "--trust-remote-code", "--output", str(tmp_path / "out"), "--dry-run"]
    assert main(["train", *flags, *more]) == 0
    shown = capsys.readouterr().out
    assert "20 pictures and 20 video frames, 6 to 24 visual tokens per row" in shown
    assert "<|image_pad|> x 6" in shown and "vision: 2" in shown
    assert "vision tower" in shown[shown.index("\nPlan") :], "the tower is planned"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gone.png", "rows.jsonl"])
def test_a_row_without_its_picture_is_refused_before_the_model_is_read(name: str, folder: Path, tmp_path: Path) -> None:
    rows = tiny_run.picture_rows(folder, pictures=3, videos=0)
    rows[1]["messages"][0]["content"][0]["image"] = name
    data = tiny_run.write_jsonl(folder / "bad.jsonl", rows)
    flags = ["--model", str(folder / "model"), "--dataset", str(data), "--trust-remote-code", "--max-length", "128"]
    command = ["train", *flags, "--output", str(tmp_path / "out")]
    assert "loading the weights" not in command_refused(command, "dataset.invalid-row", "row 2", name)
    assert not (tmp_path / "out").exists()


def test_the_group_of_frames_is_saved_and_may_change_in_a_resumed_run(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(folder, tmp_path / "out", steps=2, trainer={"lr_scheduler_type": "constant"})
    assert read_recipe(tmp_path / "out" / "recipe.yaml")["vision"] == 1
    flags = ["--resume", "--output", str(tmp_path / "out"), "--steps", "3", "--vision", "2", "--trust-remote-code"]
    assert main(["train", *flags]) == 0
    assert read_recipe(tmp_path / "out" / "recipe.yaml")["vision"] == 2
    assert "in up to 2 groups" in capfd.readouterr().out
    assert json.loads((tmp_path / "out" / "complete.json").read_text())["step"] == 3
