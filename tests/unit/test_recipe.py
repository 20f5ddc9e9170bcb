"""Recipes: what is accepted, what is refused and in which words, and that a saved one comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqtile import UserError
from seqtile.train.recipe import build_recipe, parse_lora, read_recipe, resolve, save_recipe

GIVEN = {"model": "m", "dataset": "d.jsonl"}


def recipe_of(file: dict[str, Any] | None = None, flags: dict[str, Any] | None = None) -> Any:
    return build_recipe({**GIVEN, **(file or {})}, flags or {})[0]


def test_nothing_given_is_the_demo():
    recipe = resolve(build_recipe({}, {})[0])
    assert recipe.is_demo
    assert (recipe.steps, recipe.max_length, recipe.batch_size) == (30, 8192, 1)
    assert recipe.activation_checkpointing and recipe.tiled_mlp and recipe.compare


def test_flags_win_over_the_recipe():
    recipe = recipe_of({"steps": 5, "seed": 1}, {"steps": 9})
    assert (recipe.steps, recipe.seed) == (9, 1)


def test_saved_recipe_comes_back_the_same(tmp_path: Path):
    recipe = resolve(
        recipe_of({"lora": {"r": 4}, "tile": "shards:3", "trainer": {"warmup_steps": 2}, "only": ["*.0.*"]})
    )
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert build_recipe(read_recipe(tmp_path / "recipe.yaml"), {})[0] == recipe


def test_learning_rate_depends_on_what_trains():
    assert resolve(recipe_of()).learning_rate == 2e-5
    assert resolve(recipe_of({"lora": {}})).learning_rate == 2e-4
    assert resolve(recipe_of({"learning_rate": "3e-4"})).learning_rate == 3e-4


@pytest.mark.parametrize(
    ("values", "tile"),
    [
        ({"tiled_mlp": True}, "auto"),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 4}, "shards:4"),
        ({"tiled_mlp_num_shards": "4"}, "shards:4"),
        ({"use_tiled_mlp": "true", "tiled_mlp_num_shards": "8"}, "shards:8"),
        ({"tiled_mlp": "yes", "use_tiled_mlp": True}, "auto"),
        ({"tile": "8192"}, "8192"),
    ],
)
def test_spellings_of_other_trainers(values: dict[str, Any], tile: str):
    for recipe in (recipe_of(values), recipe_of({}, values)):
        assert recipe.tiled_mlp
        assert recipe.options.tile == tile


@pytest.mark.parametrize("key", ["tiled_mlp", "use_tiled_mlp"])
def test_false_trains_untiled(key: str):
    assert not recipe_of({key: False}).tiled_mlp
    assert not recipe_of({"tile": 64}, {key: "false"}).tiled_mlp


@pytest.mark.parametrize("value", [True, False])
def test_original_mlp_is_accepted_and_said_to_change_nothing(value: bool):
    recipe, notes = build_recipe({**GIVEN, "tiled_mlp": True, "tiled_mlp_use_original_mlp": value}, {})
    assert recipe == recipe_of({"tiled_mlp": True})
    assert len(notes) == 1 and "changes nothing" in notes[0]


def test_a_tile_flag_overrides_the_recipes_number_of_shards():
    assert recipe_of({"tiled_mlp_num_shards": 8}, {"tile": "4096"}).options.tile == "4096"
    assert recipe_of({"tile": 4096}, {"tiled_mlp_num_shards": 8}).options.tile == "shards:8"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"qqqq": 3}, "known keys"),
        ({"max_steps": 3}, "here it is called 'steps'"),
        ({"gradient_accumulation_steps": 3}, "here it is called 'gradient_accumulation'"),
        ({"lora": {"rank": 3}}, "unknown recipe key 'lora.rank'"),
        ({"lora": {"r": 0}}, "'lora.r'"),
        ({"tile": 0}, "at least 1"),
        ({"tile": "wide"}, "not a tile rule"),
        ({"steps": 0}, "'steps': got 0"),
        ({"steps": "many"}, "'steps': got 'many'"),
        ({"max_length": 1}, "'max_length'"),
        ({"learning_rate": -1}, "'learning_rate'"),
        ({"tiled_mlp": "perhaps"}, "expected true or false"),
        ({"tiled_mlp_num_shards": 0}, "at least 1"),
        ({"tiled_mlp_num_shards": "few"}, "at least 1"),
        ({"tiled_mlp": True, "use_tiled_mlp": False}, "keep one"),
        ({"tile": 64, "tiled_mlp_num_shards": 4}, "keep one"),
        ({"tiled_mlp": False, "tile": 64}, "keep one"),
        ({"tiled_mlp": False, "tiled_mlp_num_shards": 4}, "keep one"),
        ({"trainer": {"max_steps": 3}}, "use 'steps' instead"),
    ],
)
def test_refused_with_one_sentence(values: dict[str, Any], words: str):
    with pytest.raises(UserError) as caught:
        recipe_of(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tile_flag_contradicts_a_recipe_that_does_not_tile():
    with pytest.raises(UserError, match="drop one of the two"):
        recipe_of({"tiled_mlp": False}, {"tile": "64"})


@pytest.mark.parametrize("values", [{"steps": 3, "epochs": 2}, {"tiled_mlp": False, "compare": True}])
def test_settings_of_which_one_would_be_ignored(values: dict[str, Any]):
    with pytest.raises(UserError, match="keep one"):
        resolve(recipe_of(values))


def test_epochs_in_place_of_steps():
    assert (resolve(recipe_of()).steps, resolve(recipe_of()).epochs) == (None, 1.0)
    demo = resolve(build_recipe({"epochs": 2}, {})[0])
    assert (demo.steps, demo.epochs) == (None, 2.0)


@pytest.mark.parametrize("given", ["model", "dataset"])
def test_model_and_dataset_come_together(given: str):
    with pytest.raises(UserError, match="too"):
        build_recipe({given: "x"}, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nsteps: 4\n", "given twice"),
        ("steps: !!python/object/apply:os.system ['true']\n", "not plain YAML"),
        ("steps: [3\n", "not plain YAML"),
        ("- steps\n", "holds a list"),
        ("3: 4\n", "expected 'key: value'"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, words: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_recipe(path)


def test_a_tag_runs_nothing(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(
        f"model: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{tmp_path}/ran']]\n"
    )
    with pytest.raises(UserError):
        read_recipe(tmp_path / "recipe.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_a_recipe_that_cannot_be_read(tmp_path: Path, path: str):
    with pytest.raises(UserError, match="cannot read recipe"):
        read_recipe(tmp_path / path)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("16", {"r": "16"}),
        ("r=8", {"r": "8"}),
        ("r=16, alpha=32,dropout=0.05", {"r": "16", "alpha": "32", "dropout": "0.05"}),
    ],
)
def test_lora_flag(text: str, section: dict[str, str]):
    assert parse_lora(text) == section
    assert recipe_of({}, {"lora": parse_lora(text)}).lora.r == int(section["r"])


@pytest.mark.parametrize("text", ["", "r=", "=4", "r=8,16"])
def test_lora_flag_refused(text: str):
    with pytest.raises(UserError, match="--lora"):
        parse_lora(text)
