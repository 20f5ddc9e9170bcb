"""``seqtile train`` on what it must not run or touch: one sentence, exit code 2, nothing run and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny_run
from refusals import command_refused
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


def check_refused(place: Path, recipe: dict[str, Any], code: str, *values: str, flags: tuple[str, ...] = ()) -> None:
    """Run the recipe: a refusal with this id, and not a file more, fewer or other than before."""
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    before = snapshot(place)
    command_refused(["train", "--recipe", str(place / "recipe.yaml"), *flags], code, *values)
    assert snapshot(place) == before


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


def test_code_of_the_model_is_run_only_when_asked_for(place: Path, model: Path):
    own = with_code(place, model, "model")
    check_refused(place, recipe(place, own), "model.custom-code")
    assert not (place / "code-was-run").exists()
    assert main(["train", "--recipe", str(place / "recipe.yaml"), "--trust-remote-code", "--output", "out"]) == 0
    assert (place / "code-was-run").exists()


def test_code_of_the_tokenizer_is_not_run(place: Path, model: Path):
    own = with_code(place, model, "tokenizer")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, own, output=str(place / "out"))))
    main(["train", "--recipe", str(place / "recipe.yaml")])  # transformers falls back to its own class, or refuses
    assert not (place / "code-was-run").exists()


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"dataset": "/dev/null"}, ("dataset.empty",)),
        ({"dataset": "../words.jsonl"}, ("dataset.no-valid-row", "not token ids")),
        ({"output": "/dev/null"}, ("output.not-writable",)),
        ({"output": "../rows.jsonl"}, ("output.contains-input", "'../rows.jsonl'")),
        ({"output": "../recipe.yaml"}, ("output.not-writable",)),
        ({"output": ".."}, ("output.contains-input", "'..'")),
        ({"dataset": "..", "output": "../runs/x"}, ("output.inside-dataset", "'..'")),
        ({"trainer": {"weight_decay": "much"}}, ("trainer.invalid-value", "trainer.weight_decay")),
        ({"optimizer": "no-such-optimizer"}, ("trainer.refused", "no-such-optimizer is not a valid OptimizerNames")),
        ({"trainer": {"lr_scheduler_type": "no-such"}}, ("trainer.refused", "no-such is not a valid SchedulerType")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": ".inf"}}, ("rope-scaling.bad-factor",)),
        ({"rope_scaling": {"rope_type": "no-such", "factor": 2}}, ("rope-scaling.unknown-type", "no-such")),
        ({"attention": "no-such"}, ("model.not-loaded", "weights")),
        ({"model_kwargs": {"no_such_argument": 1}}, ("model-kwargs.unknown", "no_such_argument")),
        ({"lora": {"target_modules": "no-such"}}, ("trainer.rejects",)),
        ({"only": ["no-such"]}, ("only.no-match", "no-such")),
    ],
    ids=str,
)
def test_refused_with_nothing_written(place: Path, model: Path, values: dict[str, Any], refusal: tuple[str, ...]):
    check_refused(place, recipe(place, model, **values), *refusal)


def test_a_model_that_needs_a_package_which_is_not_here(place: Path, model: Path, monkeypatch):
    def without_it(*_: Any, **__: Any) -> None:
        raise ImportError("the package for FlashAttention2 doesn't seem to be installed.\nMore lines.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", without_it)
    check_refused(place, recipe(place, model), "model.package-missing", "(the package for Flash")
    check_refused(place, recipe(place, model, attention="flash"), "model.package-missing", "attention sdpa")


def test_a_model_without_a_tokenizer(place: Path, model: Path):
    weights_alone = shutil.copytree(model, place / "weights", ignore=shutil.ignore_patterns("tokenizer*"))
    check_refused(place, recipe(place, weights_alone), "model.not-loaded", "tokenizer")


@pytest.mark.parametrize("token", [10**9, 257, -1])
def test_token_ids_that_the_model_does_not_have(place: Path, model: Path, token: int):
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3]}] * 3 + [{"input_ids": [1, token, 3]}]
    tiny_run.write_jsonl(place / "rows.jsonl", rows)
    values = (f"row 4: token id {token},", "0 to 256")
    check_refused(place, recipe(place, model), "dataset.token-without-embedding", *values)


def test_overwrite_leaves_a_directory_that_is_no_runs_own(place: Path, model: Path):
    project = place / "project"
    project.mkdir()
    for name in ("README.md", "notes.txt", "package.json"):
        (project / name).write_text("mine")
    shutil.copy(model / "config.json", project)
    (project / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, model, output="runs/first")))
    values = recipe(place, model, output=str(project))
    check_refused(place, values, "output.holds-other-files", "recipe.yaml", flags=("--overwrite",))


def test_overwrite_does_not_follow_a_link(place: Path, model: Path):
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "kept.txt").write_text("mine")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(place, model, output="out")))
    assert main(["train", "--recipe", str(place / "recipe.yaml")]) == 0
    Path("out/checkpoint-7").symlink_to(place / "elsewhere")
    assert main(["train", "--recipe", str(place / "recipe.yaml"), "--overwrite"]) == 0
    assert not Path("out/checkpoint-7").is_symlink()
    assert (place / "elsewhere" / "kept.txt").read_text() == "mine"
