"""``seqtile train`` on what it must not run or touch: one sentence, exit code 2, nothing run and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny_run
from seqtile.cli import main

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({trace!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "seqtile-test-own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory beside some rows."""
    tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    tiny_run.write_jsonl(tmp_path / "words.jsonl", [{"input_ids": ["a", "b"]}])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def snapshot(directory: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def refused(place: Path, capsys: Any, values: dict[str, Any], *flags: str) -> str:
    """Run the recipe: exit code 2, one sentence, and not a file more, fewer or other than before."""
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    before = snapshot(place)
    capsys.readouterr()
    assert main(["train", "--recipe", str(place / "recipe.yaml"), *flags]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("seqtile: ")
    assert snapshot(place) == before
    return sentence


def recipe(place: Path, model: Path, **values: Any) -> dict[str, Any]:
    return {"model": str(model), "dataset": str(place / "rows.jsonl"), "max_length": 64, "steps": 1, "report": False,
            **values}  # fmt: skip


def with_code(place: Path, model: Path, what: str) -> Path:
    """A copy of the model that brings code of its own, for its model or for its tokenizer."""
    own = Path(shutil.copytree(model, place / "own"))
    (own / "own.py").write_text(CODE.format(trace=str(place / "code-was-run")))
    config = json.loads((own / "config.json").read_text())
    if what == "model":
        config |= {"model_type": "seqtile-test-own", "architectures": ["OwnForCausalLM"]}
        config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        (own / "config.json").write_text(json.dumps(config))
    else:
        tokenizer = json.loads((own / "tokenizer_config.json").read_text())
        tokenizer |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
        (own / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return own


def test_code_of_the_model_is_run_only_when_asked_for(place: Path, model: Path, capsys):
    own = with_code(place, model, "model")
    assert "needs its own code; review it" in refused(place, capsys, recipe(place, own))
    assert not (place / "code-was-run").exists()
    assert main(["train", "--recipe", str(place / "recipe.yaml"), "--trust-remote-code", "--output", "out"]) == 0
    assert (place / "code-was-run").exists()


def test_code_of_the_tokenizer_is_not_run(place: Path, model: Path, capsys):
    own = with_code(place, model, "tokenizer")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, own, output=str(place / "out"))))
    main(["train", "--recipe", str(place / "recipe.yaml")])  # transformers falls back to its own class, or refuses
    assert not (place / "code-was-run").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset": "/dev/null"}, "has no rows"),
        ({"dataset": "../words.jsonl"}, "has entries that are not token ids"),
        ({"output": "/dev/null"}, "cannot write to output"),
        ({"output": "../rows.jsonl"}, "output '../rows.jsonl' contains"),
        ({"output": "../recipe.yaml"}, "cannot write to output"),
        ({"output": ".."}, "output '..' contains"),
        ({"dataset": "..", "output": "../runs/x"}, "lies inside the dataset '..'"),
        ({"trainer": {"weight_decay": "much"}}, "trainer.weight_decay"),
        ({"optimizer": "no-such-optimizer"}, "no-such-optimizer is not a valid OptimizerNames"),
        ({"trainer": {"lr_scheduler_type": "no-such"}}, "no-such is not a valid SchedulerType"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": ".inf"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "no-such", "factor": 2}}, "no-such"),
        ({"attention": "no-such"}, "cannot load the weights"),
        ({"model_kwargs": {"no_such_argument": 1}}, "neither an argument of from_pretrained"),
        ({"lora": {"target_modules": "no-such"}}, "rejects this model, dataset or recipe"),
        ({"only": ["no-such"]}, "no-such"),
    ],
    ids=str,
)
def test_refused_with_nothing_written(place: Path, model: Path, values: dict[str, Any], words: str, capsys):
    assert words in refused(place, capsys, recipe(place, model, **values))


def test_a_model_that_needs_a_package_which_is_not_here(place: Path, model: Path, monkeypatch, capsys):
    def without_it(*_: Any, **__: Any) -> None:
        raise ImportError("the package for FlashAttention2 doesn't seem to be installed.\nMore lines.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", without_it)
    assert "a package is missing (the package for Flash" in refused(place, capsys, recipe(place, model))
    assert "use attention sdpa in place of flash" in refused(place, capsys, recipe(place, model, attention="flash"))


def test_a_model_without_a_tokenizer(place: Path, model: Path, capsys):
    weights_alone = shutil.copytree(model, place / "weights", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "tokenizer's files" in refused(place, capsys, recipe(place, weights_alone))


@pytest.mark.parametrize("token", [10**9, 257, -1])
def test_token_ids_that_the_model_does_not_have(place: Path, model: Path, token: int, capsys):
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3]}] * 3 + [{"input_ids": [1, token, 3]}]
    tiny_run.write_jsonl(place / "rows.jsonl", rows)
    sentence = refused(place, capsys, recipe(place, model))
    assert f"row 4: token id {token}, but the model's vocabulary is 0 to 256; tokenize" in sentence


def test_overwrite_leaves_a_directory_that_is_no_runs_own(place: Path, model: Path, capsys):
    project = place / "project"
    project.mkdir()
    for name in ("README.md", "notes.txt", "package.json"):
        (project / name).write_text("mine")
    shutil.copy(model / "config.json", project)
    (project / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, model, output="runs/first")))
    sentence = refused(place, capsys, recipe(place, model, output=str(project)), "--overwrite")
    assert "has a recipe.yaml of another run, and --overwrite would delete the files beside it" in sentence


def test_overwrite_does_not_follow_a_link(place: Path, model: Path):
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "kept.txt").write_text("mine")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, model, output="out")))
    assert main(["train", "--recipe", str(place / "recipe.yaml")]) == 0
    Path("out/checkpoint-7").symlink_to(place / "elsewhere")
    assert main(["train", "--recipe", str(place / "recipe.yaml"), "--overwrite"]) == 0
    assert not Path("out/checkpoint-7").is_symlink()
    assert (place / "elsewhere" / "kept.txt").read_text() == "mine"
