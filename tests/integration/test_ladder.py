"""The ladder: by the plan, and the layers that its real steps leave out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import technique_ladder
from ladder_step import Attempt, measure_attempt

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=32768, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ladder") / "model"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    return str(folder)


def test_the_script_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model")  # of so few positions that no fake run is long
    sizes = {**SIZES, "max_position_embeddings": 1024, "vocab_size": 8192}
    AutoConfig.for_model("llama", **sizes).save_pretrained(model)
    monkeypatch.setattr(technique_ladder, "RUNGS", technique_ladder.RUNGS[:2])
    arguments = ["--model", model, "--device", "1GiB", "--lora", "r=4", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["technique_ladder.py", *arguments])
    assert technique_ladder.main() == 0
    [file] = tmp_path.glob("ladder-*.jsonl")
    full, tiled = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert full["max_length"] == tiled["max_length"] == 1024 and full["limited_by"] == "positions"
    assert full["peak_device_gib"]["expected"] > tiled["peak_device_gib"]["expected"]
    assert tiled["common"]["tokens"] == 1024 and tiled["device_us_per_token"] is None
    assert full["command"] == " ".join(["python", "benchmarks/technique_ladder.py", *arguments])
    assert full["versions"]["torch"] and full["date"] and full["train"] == "lora r=4"
    assert "| + tiled loss | 1,024 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["technique_ladder.py", "--model", model, "--device", "h201"])
    assert technique_ladder.main() == 2
    assert "did you mean 'h200'" in capsys.readouterr().err


def attempt_of(model: str, **changes: Any) -> Attempt:
    return Attempt(**{"model": model, "rung": 0, "tokens": 1024, "layers": 2, "lora": None, "precision": "float32",
                      "device": "cpu", "host_bytes": 0, **changes})  # fmt: skip


@pytest.mark.parametrize(("rung", "lora"), [(0, None), (2, {"r": 4, "target_modules": ["q_proj", "down_proj"]})])
def test_layers_that_are_left_out_take_what_they_would_hold(model: str, rung: int, lora: Any) -> None:
    some, whole = (measure_attempt(asdict(attempt_of(model, rung=rung, lora=lora, layers=n))) for n in (2, 4))
    assert some["layers_of_model"] == whole["layers_of_model"] == 4
    # What the loop over layers itself holds beside their tensors is far below a hundredth.
    assert some["peak_gib"] == pytest.approx(whole["peak_gib"], rel=0.01)
