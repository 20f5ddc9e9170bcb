"""``seqtile train --dry-run``: the settings, a row with what counts in its loss, and the plan; nothing is written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import tiny_run
from seqtile.cli import main

CHAT = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the cat."}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights, which are not to be read."""
    model = tiny_run.save_model(tmp_path_factory.mktemp("model"))
    (model / "model.safetensors").unlink()
    return model


def show(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["train", *arguments, "--dry-run"]) == code
    return " ".join(capsys.readouterr().out.split())


def test_a_row_is_shown_with_what_counts_and_nothing_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "who? ", "completion": "the cat."}] * 3)
    shown = show(capsys, "--model", str(model), "--dataset", str(data), "--max-length", "12", "--seed", "7")
    assert "who? ⟦the cat.<end>⟧" in shown
    assert "seed: 7" in shown and "max_length: 12" in shown and "gradient_accumulation" not in shown
    # 14 tokens, of which 12 stay; 7 of these are of the completion
    assert "3 rows, 42 tokens" in shown and "3 truncated to 12 tokens (6 tokens lost)" in shown
    assert "21 tokens in the loss, prompts not among them" in shown and "completion_only_loss: true" not in shown
    assert "12 tokens fit" in shown and "tokens, with 'rope_scaling: {" in shown
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_engines_start_no_processes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 3)
    shown = show(capsys, "--model", str(model), "--dataset", str(data), "--max-length", "64", "--engine", "zero3",
                 "--nproc", "2", "--sp-size", "2", "--output", str(tmp_path / "out"))  # fmt: skip
    assert "⟦user: who?<end>assistant: the cat.<end>⟧" in shown and "zero3" in shown
    assert "'trainer: {assistant_only_loss: true}' leaves prompts out" in shown
    assert not (tmp_path / "out").exists()


def test_the_demo_and_a_stream(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "⟦" in show(capsys, "--max-length", "128")
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 3)
    shown = show(
        capsys, "--model", str(model), "--dataset", str(data), "--streaming", "--steps", "2", "--max-length", "64"
    )
    assert "⟦user: who?<end>assistant: the cat.<end>⟧" in shown


def test_what_a_run_would_refuse_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}])
    show(capsys, "--model", str(model), "--dataset", str(data), code=2)


def test_a_model_without_a_plan_is_shown_all_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optimizer: rmsprop\nmax_length: 64\n")
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 3)
    shown = show(capsys, "--model", str(model), "--dataset", str(data), "--recipe", str(recipe))
    assert "⟦user: who?" in shown and "Plan none: got optimizer 'rmsprop'" in shown


@pytest.mark.parametrize("attention", ["flash", "sdpa", None])
def test_attention_that_is_not_installed(
    attention: str | None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 3)
    more = [] if attention is None else ["--attention", attention]
    shown = show(capsys, "--model", str(model), "--dataset", str(data), "--max-length", "64", *more)
    missing = attention == "flash" and find_spec("flash_attn") is None
    assert ("the run would stop: attention flash: " in shown) == missing
    assert "Dry run: nothing was written" in shown
