"""Every command and every line of Python in the README and on the start page of the documentation runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_run
from seqtile.cli import main
from zoo import causal_lm, tokens

ROOT = Path(__file__).parents[2]
BLOCKS = {
    page: re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    for page in ("README.md", "docs/start.md")
    if (ROOT / page).exists()
}
COMMANDS = {
    page: [
        line.partition("  #")[0].strip()
        for language, text in blocks
        if not language
        for line in text.splitlines()
        if line.strip() and not re.match(r"[\s.]|\w+/|src/|tests/", line)
    ]
    for page, blocks in BLOCKS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a dataset and a recipe under the names that the README's commands use."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "PATH").mkdir()
    tiny_run.save_model(folder / "PATH", max_position_embeddings=131072)
    for name in ("PATH_OR_ID", "PATH_OR_CONFIG"):
        shutil.copytree(folder / "PATH", folder / name)
    config = json.loads((folder / "PATH" / "config.json").read_text(encoding="utf-8"))
    (folder / "CONFIG").mkdir()
    (folder / "CONFIG" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**18}))
    rows = [
        {"messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": row["text"]}]}
        for row in tiny_run.text_rows()
    ]
    tiny_run.write_jsonl(folder / "chat.jsonl", rows)
    for name in ("FILE_OR_ID", "FILE"):
        tiny_run.write_jsonl(folder / name, tiny_run.text_rows())
    (folder / "recipe.yaml").write_text("model: PATH\ndataset: chat.jsonl\noutput: out\nmax_length: 64\nsteps: 2\n")
    return folder


def _make(target: str, *words: str) -> None:
    if not (ROOT / "Makefile").exists():
        pytest.skip("no Makefile here: the tests run from an installed package")
    done = subprocess.run(["make", "-n", target, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"demo": "seqtile train", "test": "-m pytest", "docs": "mkdocs build"}[target] in done.stdout


def test_the_readme_has_commands() -> None:
    shown = {" ".join(command.split()[:2]) for command in COMMANDS["README.md"]}
    assert {"seqtile plan", "seqtile verify", "seqtile train", "make demo", "make test"} <= shown


@pytest.mark.parametrize("command", dict.fromkeys(command for page in COMMANDS.values() for command in page))
def test_command(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make`` only up to what it would run: test_train_demo and this very suite are what it runs."""
    monkeypatch.chdir(folder)
    words = command.split()
    if words[0] == "make":
        return _make(words[1])
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(\w+)\]", command) or ["torch"]
        metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(re.search(rf"^{extra} = |\"{extra}>=", metadata, re.M) for extra in extras)  # test_wheel installs
        return None
    assert words[0] == "seqtile", f"the README or the start page has a command that no test runs: {command}"
    if words[1] == "train" and "--recipe" not in words:
        output = folder / f"output-{len(words)}"
        words += ["--steps", "1", "--output", str(output)]
    assert main(words[1:]) == 0
    return None


def test_python_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SFTTrainer:
        """The README's ``...`` stands for arguments; what matters here is a training step on the tiled model."""

        def __init__(self, model: Any, *_: Any) -> None:
            self.model = model

        def train(self) -> None:
            ids = tokens()
            self.model(input_ids=ids, labels=ids).loss.backward()

    monkeypatch.chdir(folder)
    monkeypatch.setattr("trl.SFTTrainer", SFTTrainer)
    ids = tokens()
    names: dict[str, Any] = {
        "model": causal_lm("llama"), "batch": {"input_ids": ids, "labels": ids},
        "my_module": torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)),
    }  # fmt: skip
    lines = 0
    for page, blocks in BLOCKS.items():
        for language, text in blocks:
            if language == "python":
                exec(compile(text, page, "exec"), names)
                lines += len(text.splitlines())
    assert lines >= 10
    assert names["report"].tiled == 2
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in names["model"].parameters())


def test_help_of_the_installed_command() -> None:
    command = Path(sys.executable).parent / "seqtile"
    done = subprocess.run([str(command), "train", "--help"], capture_output=True, text=True, check=True)
    assert "--max-length" in done.stdout


def test_the_start_pages_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration that the page gives, and its command, with fewer tokens."""
    if not (ROOT / "docs").exists():
        pytest.skip("no docs here: the tests run from an installed package")
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    [config] = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    [command] = re.findall(r"^\$ seqtile (verify .*)$", page, re.M)
    words = command.split()
    name, tokens_at = words[words.index("--model") + 1], words.index("--tokens") + 1
    assert f"`{name}`" in page
    (tmp_path / name).write_text(config, encoding="utf-8")
    words[tokens_at] = "256"
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
