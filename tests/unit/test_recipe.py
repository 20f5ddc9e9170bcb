"""Recipes: what is accepted, what is refused and in which words, and that a saved one comes back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refusals import refused
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
        ({"tile": "8192"}, 8192),
    ],
)
def test_spellings_of_other_trainers(values: dict[str, Any], tile: int | str):
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
    assert recipe_of({"tiled_mlp_num_shards": 8}, {"tile": "4096"}).options.tile == 4096
    assert recipe_of({"tile": 4096}, {"tiled_mlp_num_shards": 8}).options.tile == "shards:8"


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"stepz": 3}, ("recipe.unknown-key", "'stepz'", "'steps'")),
        ({"qqqq": 3}, ("recipe.unknown-key", "batch_size, ")),
        ({"max_steps": 3}, ("recipe.unknown-key", "use 'steps'")),
        ({"gradient_accumulation_steps": 3}, ("recipe.unknown-key", "use 'gradient_accumulation'")),
        ({"lora": {"rank": 3}}, ("recipe.unknown-key", "'lora.rank'")),
        ({"lora": {"r": 0}}, ("recipe.invalid-value", "'lora.r'")),
        ({"tile": 0}, ("option.malformed", "tile=0")),
        ({"tile": "wide"}, ("option.malformed", "'wide'")),
        ({"steps": 0}, ("recipe.invalid-value", "'steps'", "got 0")),
        ({"steps": "many"}, ("recipe.invalid-value", "'steps'", "'many'")),
        ({"max_length": 1}, ("recipe.invalid-value", "'max_length'")),
        ({"learning_rate": -1}, ("recipe.invalid-value", "'learning_rate'")),
        ({"tiled_mlp": "perhaps"}, ("option.not-a-bool", "tiled_mlp 'perhaps'")),
        ({"tiled_mlp_num_shards": "few"}, ("option.malformed", "'shards:few'")),
        ({"tiled_mlp": True, "use_tiled_mlp": False}, ("tile.contradicting-switches",)),
        ({"tile": 64, "tiled_mlp_num_shards": 4}, ("tile.given-twice",)),
        ({"trainer": {"max_steps": 3}}, ("recipe.key-of-its-own", "use 'steps'")),
    ],
)
def test_refused_with_one_sentence(values: dict[str, Any], refusal: tuple[str, ...]):
    with refused(*refusal):
        recipe_of(values)


@pytest.mark.parametrize("flags", [{}, {"tile": "64"}, {"keep": 0.5}])
def test_tiles_of_a_recipe_that_does_not_tile(flags: dict[str, Any]):
    values = {"tiled_mlp": False} | ({} if flags else {"tiled_mlp_num_shards": 4})
    with refused("blocks.none-with-options"):
        resolve(recipe_of(values, flags))


def test_a_flag_that_does_not_tile_leaves_out_what_the_recipe_says_of_tiles():
    recipe = resolve(recipe_of({"tile": 64, "keep": 0.5}, {"tiled_mlp": "false"}))
    assert not recipe.tiled_mlp and recipe.options.keep == 0


def test_settings_of_which_one_would_be_ignored():
    with refused("steps.with-epochs"):
        resolve(recipe_of({"steps": 3, "epochs": 2}))


def test_epochs_in_place_of_steps():
    assert (resolve(recipe_of()).steps, resolve(recipe_of()).epochs) == (None, 1.0)
    demo = resolve(build_recipe({"epochs": 2}, {})[0])
    assert (demo.steps, demo.epochs) == (None, 2.0)


@pytest.mark.parametrize("given", ["model", "dataset"])
def test_model_and_dataset_come_together(given: str):
    with refused("recipe.model-without-dataset"):
        build_recipe({given: "x"}, {})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("steps: [3\n", "recipe.not-yaml"),
        ("- steps\n", "recipe.not-a-mapping"),
        ("3: 4\n", "recipe.not-a-mapping"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, code: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with refused(code):
        read_recipe(path)


def test_a_tag_runs_nothing(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(
        f"model: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{tmp_path}/ran']]\n"
    )
    with refused("recipe.not-yaml"):
        read_recipe(tmp_path / "recipe.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_a_recipe_that_cannot_be_read(tmp_path: Path, path: str):
    with refused("recipe.unreadable"):
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
    with refused("lora.malformed"):
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
    ("run", "changes", "refusal"),
    [
        ({}, {"gradient_accumulation": 6}, ("resume.key-changed", "gradient_accumulation from 3 to 6")),
        (
            {},
            {"nproc": 4, "gradient_accumulation": 3},
            ("resume.other-batch", "12 rows", "--gradient-accumulation 6"),
        ),
        ({}, {"nproc": 10}, ("resume.other-batch", "30 rows")),
        ({}, {"nproc": 64}, ("resume.other-batch", "192 rows")),
        ({}, {"nproc": 5}, ("nproc.not-multiple-of-split", "5 processes", "cp_size 2")),
        ({"streaming": True, "steps": 5}, {"nproc": 4}, ("resume.other-order", "streaming True")),
        (
            {"trainer": {"train_sampling_strategy": "group_by_length"}},
            {"nproc": 4},
            ("resume.other-order", "train_sampling_strategy 'group_by_length'"),
        ),
        (
            {"trainer": {"dataloader_drop_last": True}},
            {"nproc": 4},
            ("resume.other-order", "dataloader_drop_last"),
        ),
        (
            {"engine": "zero3", "cp_size": 1},
            {"nproc": 4},
            ("resume.other-processes", "nproc from 8 to 4", "'zero3'"),
        ),
        ({"engine": "zero2", "cp_size": 1}, {"nproc": 4}, ("resume.other-processes", "'zero2'")),
        (
            {"engine": "zero3", "cp_size": 1, "sp_size": 2},
            {"sp_size": 4},
            ("resume.key-changed", "sp_size"),
        ),
        ({"cp_size": 1}, {"engine": "ddp", "nproc": 4}, ("resume.key-changed", "engine")),
        ({"engine": "ddp", "cp_size": 1}, {"nproc": 1}, ("engine.ddp-alone",)),
    ],
)
def test_other_processes_that_would_make_it_another_run_are_refused(
    run: dict[str, Any], changes: dict[str, Any], refusal: tuple[str, ...], tmp_path: Path
) -> None:
    save_recipe(resolve(build_recipe({**RUN, **run, "output": str(tmp_path)}, {})[0]), tmp_path / RECIPE_FILE)
    with refused(*refusal):
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
    with refused("qlora.with-quantization-config"):
        resolve(build_recipe(both, {})[0])


@pytest.mark.parametrize(
    "section", [{"model_kwargs": {"attn_implementation": "sdpa"}}, {"trainer": {"optim": "sgd"}}], ids=str
)
def test_a_second_name_is_told_the_first(section: dict[str, Any]) -> None:
    with refused("recipe.key-of-its-own"):
        build_recipe({"model": "m", "dataset": "d", **section}, {})


def test_plain_checkpoints_are_the_trainers() -> None:
    for checkpoint, recomputes, applied in (("layer", True, None), ("attention-saved", True, "attention-saved"),
                                            ("none", False, None)):  # fmt: skip
        recipe, _ = build_recipe({"model": "m", "dataset": "d", "checkpoint": checkpoint}, {})
        assert (recipe.recomputes, recipe.tiling.checkpoint) == (recomputes, applied)
        assert recipe.model_dump()["checkpoint"] == checkpoint
