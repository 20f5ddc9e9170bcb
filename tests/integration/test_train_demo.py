"""The embedded default: ``seqtile train`` with nothing said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from seqtile.cli import main
from seqtile.train import callbacks, demo
from seqtile.train.compare_untiled import Comparison
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train


def test_text_and_rows_are_the_same_every_time():
    tokenizer = demo.load_tokenizer()
    assert len(tokenizer) == demo.VOCAB_SIZE
    rows = demo.demo_rows(tokenizer, 8192)
    assert len(rows) >= 30 and all(len(row) == 8192 for row in rows["input_ids"])
    assert rows["input_ids"] == demo.demo_rows(demo.load_tokenizer(), 8192)["input_ids"]
    text = demo.library_text()[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_short_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--steps", "2", "--max-length", "512", "--tile", "100"]) == 0
    shown = capsys.readouterr()
    assert "tiled 2 of 2 MLPs (Qwen3MLP), 100 tokens per tile" in shown.err
    assert "step 2/2" in shown.out and "peak activation memory" in shown.out and "runs/demo" in shown.out
    numbers = json.loads((tmp_path / "runs" / "demo" / "report" / "report.json").read_text())["comparison"]
    # 11 units on both sides: the tile's recompute is the only one under activation checkpointing.
    assert numbers["tiled"]["units"] == pytest.approx(11, abs=1e-9) == numbers["untiled"]["units"]
    assert 0 < numbers["gradient_error"] < 1e-5
    # Counted once as a whole and once by part: the same step, so the same bytes.
    for side in (numbers["tiled"], numbers["untiled"]):
        assert 0 < side["peak_bytes"] == max(side["phases"].values())
    assert numbers["tiled"]["phases"] != numbers["untiled"]["phases"]
    page = Path(__file__).parents[2] / "docs" / "start.md"
    if page.exists():  # the page's numbers are of a longer run; its words are a run's
        training = page.read_text(encoding="utf-8").partition("### Train\n")[2]
        blocks = re.findall(r"^```text\n((?:loading|data ).*?)^```", training, re.M | re.S)
        assert len(blocks) == 2
        printed = {words_of(line) for line in (shown.err + shown.out).splitlines()}
        assert [line for block in blocks for line in block.splitlines() if words_of(line) not in printed] == []


def test_a_slow_demo_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(callbacks, "DEMO_SECONDS", 0.0)
    monkeypatch.setattr(callbacks, "LEAST_STEPS", 3)
    values = {"output": str(tmp_path / "out"), "max_length": 64, "report": False}
    with caplog.at_level("INFO", "seqtile"):
        outcome = train(build_recipe(values, {})[0])
    assert outcome.step == 3 and "ends after 3 of 30 steps" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_comparison_of_adapters_over_a_frozen_base(tmp_path: Path):
    values = {"output": str(tmp_path / "out"), "max_length": 64, "steps": 1, "lora": {"r": 2}, "tile": 16}
    comparison = train(build_recipe(values, {})[0]).comparison
    assert comparison is not None
    assert comparison.tiled.units == pytest.approx(8, abs=1e-9)
    assert 0 < comparison.gradient_error < 1e-5
    # PEFT's wrapper hides neither the head nor the attention from the labels.
    parts = {phase.part for phase in comparison.tiled.phases}
    assert {"attention", "head and loss"} < parts and any(part.startswith("MLP") for part in parts)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [((0.93, 0.95, 0.91), 0.93), ((1.3, 0.9, 1.1), None), ((1.0, 1.02, 0.99), 1.0), ((1.5, 1.4, 1.3), 1.4)],
)
def test_pairs_that_disagree_give_no_ratio(ratios: tuple[float, ...], expected: float | None):
    comparison = Comparison(None, None, 1, 0.0, "", "", ratios)  # type: ignore[arg-type]
    assert comparison.time_ratio == expected


def words_of(line: str) -> str:
    """A line without its numbers, and without the directory, which the page gives another name."""
    return " ".join(re.sub(r"\S*\d\S*", "#", line).replace("runs/demo", "out").split())


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a guard against a hang: about four minutes on two cores that do nothing else
def test_the_default_demo_learns_and_halves_the_peak(tmp_path: Path):
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "MKL_NUM_THREADS": str(os.cpu_count())}
    command = [sys.executable, "-m", "seqtile.cli", "train", "--steps", "31"]  # and so for as long as they take
    result = subprocess.run(command, cwd=tmp_path, env={**os.environ, **threads}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    numbers = json.loads((tmp_path / "runs/demo/report/report.json").read_text())
    losses = [row["loss"] for row in numbers["losses"]]
    assert len(losses) == 31
    assert losses[0] - sum(losses[-5:]) / 5 >= 1.5
    tiled, untiled = numbers["comparison"]["tiled"], numbers["comparison"]["untiled"]
    assert tiled["peak_bytes"] <= 0.6 * untiled["peak_bytes"]
    assert untiled["peak_phase"].startswith("MLP"), "another part of the step hides what tiling saves"
    assert tiled["units"] == pytest.approx(11, abs=1e-9)
    assert untiled["units"] == pytest.approx(11, abs=1e-9)
    # Both sides compute in fp32; sums in another order differ by some units in its last place (6e-8).
    assert numbers["comparison"]["gradient_error"] < 1e-5
    for words in ("runs/demo", "peak     tiled: ", "matrix products per MLP", "8,192 tokens"):
        assert words in result.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/demo")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/demo")
    prompt = tokenizer("import os\n", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=8, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
