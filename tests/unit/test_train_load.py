"""Weights that are damaged, or another configuration's: one sentence, from ``train`` and ``verify`` alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny_run
from seqtile.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def first_bytes(count: int) -> Callable[[Path], Any]:
    def cut(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:count])

    return cut


def configured(**values: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return write


def without(name: str) -> Callable[[Path], Any]:
    def drop(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return drop


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (first_bytes(0), "a file is corrupt or truncated"),
    "truncated": (first_bytes(40_000), "a file is corrupt or truncated"),
    "other sizes": (configured(intermediate_size=64), "mlp.down_proj.weight has shape [32, 96], expected [32, 64]"),
    "more layers": (configured(num_hidden_layers=3), "do not match its configuration: model.layers.2"),
    "a weight missing": (without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
}


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_weights(model: Path, tmp_path: Path, case: str, command: str, capfd: pytest.CaptureFixture[str]):
    damage, words = DAMAGES[case]
    folder = shutil.copytree(model, tmp_path / "model")
    damage(folder)
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows(2))
    more = ["--dataset", str(rows), "--max-length", "64", "--output", str(tmp_path / "out")]
    capfd.readouterr()
    assert main([command, "--model", str(folder), *(more if command == "train" else ["--tokens", "64"])]) == 2
    shown = capfd.readouterr()
    sentence = shown.err.splitlines()[-1]
    assert sentence.startswith("seqtile: ") and words in sentence
    assert "Traceback" not in shown.err + shown.out


def test_weights_that_are_not_used_are_said(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = shutil.copytree(model, tmp_path / "model")
    configured(num_hidden_layers=1)(folder)
    assert main(["verify", "--model", str(folder), "--tokens", "64"]) == 0
    assert f"9 weights of {str(folder)!r} are not used, for example model.layers.1." in capfd.readouterr().err
