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
from refusals import command_refused
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


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "empty": (first_bytes(0), ("model.corrupt-file",)),
    "truncated": (first_bytes(40_000), ("model.corrupt-file",)),
    "other sizes": (
        configured(intermediate_size=64),
        ("model.weights-mismatch", "mlp.down_proj", "[32, 96]", "[32, 64]"),
    ),
    "more layers": (configured(num_hidden_layers=3), ("model.weights-mismatch", "model.layers.2")),
    "a weight missing": (
        without("model.layers.1.mlp.up_proj.weight"),
        ("model.weights-mismatch", "model.layers.1.mlp.up_proj.weight"),
    ),
}


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_weights(model: Path, tmp_path: Path, case: str, command: str):
    damage, refusal = DAMAGES[case]
    folder = shutil.copytree(model, tmp_path / "model")
    damage(folder)
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows(2))
    more = ["--dataset", str(rows), "--max-length", "64", "--output", str(tmp_path / "out")]
    command_refused([command, "--model", str(folder), *(more if command == "train" else ["--tokens", "64"])], *refusal)


def test_weights_that_are_not_used_are_said(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = shutil.copytree(model, tmp_path / "model")
    configured(num_hidden_layers=1)(folder)
    assert main(["verify", "--model", str(folder), "--tokens", "64"]) == 0
    assert f"9 weights of {str(folder)!r} are not used, for example model.layers.1." in capfd.readouterr().err
