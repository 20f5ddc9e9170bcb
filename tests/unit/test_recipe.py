"""Recipes: what is accepted, what is refused and in which words, and that a saved one comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqtile import UserError
from seqtile.train.recipe import RECIPE_FILE, LoraRecipe, build_recipe, parse_lora, read_recipe, resolve, save_recipe
from seqtile.train.resume import resumed_recipe

GIVEN = {"model": "m", "dataset": "d.jsonl"}


def recipe_of(file: dict[str, Any] | None = None, flags: dict[str, Any] | None = None) -> Any:
    return build_recipe({**GIVEN, **(file or {})}, flags or {})[0]


def test_nothing_given_is_the_demo():
    recipe = resolve(build_recipe({}, {})[0])
    assert recipe.is_demo
    assert (recipe.steps, recipe.max_length, recipe.batch_size) == (30, 8192, 1)
    assert recipe.recomputes and recipe.tiled_mlp and recipe.compares


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
    assert len(notes) == 1 and "has no effect" in notes[0]


def test_a_tile_flag_overrides_the_recipes_number_of_shards():
    assert recipe_of({"tiled_mlp_num_shards": 8}, {"tile": "4096"}).options.tile == "4096"
    assert recipe_of({"tile": 4096}, {"tiled_mlp_num_shards": 8}).options.tile == "shards:8"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"qqqq": 3}, "known keys"),
        ({"max_steps": 3}, "use 'steps'"),
        ({"gradient_accumulation_steps": 3}, "use 'gradient_accumulation'"),
        ({"lora": {"rank": 3}}, "unknown recipe key 'lora.rank'"),
        ({"lora": {"r": 0}}, "'lora.r'"),
        ({"tile": 0}, "at least 1"),
        ({"tile": "wide"}, "not a tile rule"),
        ({"steps": 0}, "'steps': got 0"),
        ({"steps": "many"}, "'steps': got 'many'"),
        ({"max_length": 1}, "'max_length'"),
        ({"learning_rate": -1}, "'learning_rate'"),
        ({"tiled_mlp": "perhaps"}, "expected true or false"),
        ({"tiled_mlp_num_shards": "few"}, "not a tile rule"),
        ({"tiled_mlp": True, "use_tiled_mlp": False}, "keep one"),
        ({"tile": 64, "tiled_mlp_num_shards": 4}, "keep one"),
        ({"trainer": {"max_steps": 3}}, "use 'steps' instead"),
    ],
)
def test_refused_with_one_sentence(values: dict[str, Any], words: str):
    with pytest.raises(UserError) as caught:
        recipe_of(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [{}, {"tile": "64"}, {"keep": 0.5}])
def test_tiles_of_a_recipe_that_does_not_tile(flags: dict[str, Any]):
    values = {"tiled_mlp": False} | ({} if flags else {"tiled_mlp_num_shards": 4})
    with pytest.raises(UserError, match="would be ignored"):
        resolve(recipe_of(values, flags))


def test_a_flag_that_does_not_tile_leaves_out_what_the_recipe_says_of_tiles():
    recipe = resolve(recipe_of({"tile": 64, "keep": 0.5}, {"tiled_mlp": "false"}))
    assert not recipe.tiled_mlp and recipe.options.keep == 0


def test_settings_of_which_one_would_be_ignored():
    with pytest.raises(UserError, match="use one"):
        resolve(recipe_of({"steps": 3, "epochs": 2}))


def test_epochs_in_place_of_steps():
    assert (resolve(recipe_of()).steps, resolve(recipe_of()).epochs) == (None, 1.0)
    demo = resolve(build_recipe({"epochs": 2}, {})[0])
    assert (demo.steps, demo.epochs) == (None, 2.0)


@pytest.mark.parametrize("given", ["model", "dataset"])
def test_model_and_dataset_come_together(given: str):
    with pytest.raises(UserError, match=" without a .*--(model|dataset)"):
        build_recipe({given: "x"}, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nsteps: 4\n", "given twice"),
        ("steps: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("steps: [3\n", "not valid YAML"),
        ("- steps\n", "contains a list"),
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


RUN = {
    **GIVEN,
    "engine": "fsdp2",
    "nproc": 8,
    "cp_size": 2,
    "batch_size": 2,
    "gradient_accumulation": 3,
    "max_length": 256,
}
"""24 rows a step, 8 of them at once."""


@pytest.mark.parametrize(
    ("changes", "accumulation"),
    [
        ({}, 3),
        ({"nproc": 4}, 6),
        ({"nproc": 24}, 1),
        ({"nproc": 16, "cp_size": 4}, 3),
        ({"cp_size": 8}, 12),
        ({"nproc": 4, "cp_size": 1, "gradient_accumulation": 3}, 3),
    ],
)
def test_a_resumed_run_keeps_the_rows_of_a_step(changes: dict[str, Any], accumulation: int, tmp_path: Path) -> None:
    save_recipe(resolve(build_recipe({**RUN, "output": str(tmp_path)}, {})[0]), tmp_path / RECIPE_FILE)
    recipe, _ = resumed_recipe({}, {"output": str(tmp_path), **changes})
    assert recipe.gradient_accumulation == accumulation and recipe.rows_of_a_step == 24
    assert (recipe.nproc, recipe.cp_size) == (changes.get("nproc", 8), changes.get("cp_size", 2))


@pytest.mark.parametrize(
    ("run", "changes", "told"),
    [
        ({}, {"gradient_accumulation": 6}, "cannot change gradient_accumulation from 3 to 6"),
        ({}, {"nproc": 4, "gradient_accumulation": 3}, "12 rows instead of 24; use --gradient-accumulation 6"),
        ({}, {"nproc": 10}, "a step would have 30 rows instead of 24; choose processes"),
        ({}, {"nproc": 64}, "a step would have 192 rows instead of 24; choose processes"),
        ({}, {"nproc": 5}, "got 5 processes, expected a multiple of cp_size 2"),
        ({"streaming": True, "steps": 5}, {"nproc": 4}, "with streaming True, .* order of the rows"),
        (
            {"trainer": {"train_sampling_strategy": "group_by_length"}},
            {"nproc": 4},
            "with train_sampling_strategy 'group_by_length'",
        ),
        ({"trainer": {"dataloader_drop_last": True}}, {"nproc": 4}, "with dataloader_drop_last True"),
        (
            {"engine": "zero3", "cp_size": 1},
            {"nproc": 4},
            "nproc from 8 to 4 under engine 'zero3', .* same number of processes",
        ),
        ({"engine": "zero2", "cp_size": 1}, {"nproc": 4}, "nproc from 8 to 4 under engine 'zero2'"),
        ({"engine": "zero3", "cp_size": 1, "sp_size": 2}, {"sp_size": 4}, "cannot change sp_size from 2 to 4"),
        ({"cp_size": 1}, {"engine": "ddp", "nproc": 4}, "cannot change engine"),
        ({"engine": "ddp", "cp_size": 1}, {"nproc": 1}, "needs at least 2 processes"),
    ],
)
def test_other_processes_that_would_make_it_another_run_are_refused(
    run: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    save_recipe(resolve(build_recipe({**RUN, **run, "output": str(tmp_path)}, {})[0]), tmp_path / RECIPE_FILE)
    with pytest.raises(UserError, match=told):
        resumed_recipe({}, {"output": str(tmp_path), **changes})


@pytest.mark.parametrize(
    ("values", "kwargs", "optimizer"),
    [
        ({}, {}, {"optim": "adamw_torch_fused"}),
        ({"attention": "flash"}, {"attn_implementation": "flash_attention_2"}, {"optim": "adamw_torch_fused"}),
        ({"attention": "flash", "engine": "fsdp2", "cp_size": 2, "packing": False, "nproc": 2},
         {"attn_implementation": "sdpa"}, {"optim": "adamw_torch_fused"}),
        ({"attention": "kernels-community/flash-attn3", "optimizer": "rmsprop"},
         {"attn_implementation": "kernels-community/flash-attn3"}, {"optim": "rmsprop"}),
        ({"optimizer": "sgd-momentum"}, {}, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    ],
)  # fmt: skip
def test_the_words_of_a_plan_are_those_of_a_recipe(
    values: dict[str, Any], kwargs: dict[str, Any], optimizer: dict[str, str]
) -> None:
    recipe = resolve(build_recipe({"model": "m", "dataset": "d", **values}, {})[0])
    assert recipe.weights_kwargs == kwargs and recipe.optimizer_arguments == optimizer


def test_qlora_is_adapters_on_four_bits() -> None:
    recipe, _ = build_recipe({}, {"model": "m", "dataset": "d", "qlora": True})
    assert recipe.lora == LoraRecipe() and recipe.weights_kwargs["quantization_config"]["load_in_4bit"]
    assert build_recipe({"lora": {"r": 4}}, {"model": "m", "dataset": "d", "qlora": True})[0].lora == LoraRecipe(r=4)
    both = {"model": "m", "dataset": "d", "qlora": True, "model_kwargs": {"quantization_config": {}}}
    with pytest.raises(UserError, match="use one"):
        resolve(build_recipe(both, {})[0])


@pytest.mark.parametrize(
    "section", [{"model_kwargs": {"attn_implementation": "sdpa"}}, {"trainer": {"optim": "sgd"}}], ids=str
)
def test_a_second_name_is_told_the_first(section: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has its own recipe key; use '(attention|optimizer)' instead"):
        build_recipe({"model": "m", "dataset": "d", **section}, {})


def test_plain_checkpoints_are_the_trainers() -> None:
    for checkpoint, recomputes, applied in (("layer", True, None), ("attention-saved", True, "attention-saved"),
                                            ("none", False, None)):  # fmt: skip
        recipe, _ = build_recipe({"model": "m", "dataset": "d", "checkpoint": checkpoint}, {})
        assert (recipe.recomputes, recipe.tiling.checkpoint) == (recomputes, applied)
        assert recipe.model_dump()["checkpoint"] == checkpoint
