"""Wrong values in a recipe: each is one sentence, and nothing is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from refusals import refused
from seqtile.train.recipe import Recipe, build_recipe, read_recipe, resolve
from seqtile.train.trainer_fields import OPTIMIZER_PACKAGES, SCHEDULE_ARGUMENTS, typed_values


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return resolve(build_recipe({"model": "m", "dataset": "d", **read_recipe(path)}, {})[0])


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("!!python/name:os.system x", ("recipe.not-yaml",)),
        ("'steps': 3\nsteps: 4", ("recipe.not-yaml", "given twice")),
        ("trainer: {a: 1, a: 1}", ("recipe.not-yaml", "given twice")),
        ("steps: 3\n---\nsteps: 4", ("recipe.not-yaml",)),
        ("steps: \x01", ("recipe.not-yaml",)),
        ("model: 2020-13-45", ("recipe.not-yaml",)),
        ("model: 2020-01-02", ("recipe.invalid-value", "'model'", "datetime.date")),
        ("seed: 4294967296", ("recipe.invalid-value", "'seed'")),
        ("steps: -1", ("recipe.invalid-value", "'steps'", "got -1")),
        ("batch_size: -1", ("recipe.invalid-value", "'batch_size'")),
        ("max_length: 1e30", ("recipe.invalid-value", "'max_length'")),
        ("steps: true", ("recipe.invalid-value", "cannot be true")),
        ("learning_rate: yes", ("recipe.invalid-value", "cannot be true")),
        ("tile: no", ("recipe.invalid-value", "cannot be false")),
        ("learning_rate: .inf", ("recipe.invalid-value", "finite")),
        ("learning_rate: .nan", ("recipe.invalid-value", "finite")),
        ("epochs: .inf", ("recipe.invalid-value", "finite")),
        ("keep: .nan", ("recipe.invalid-value", "finite")),
        ("lora: {alpha: .inf}", ("recipe.invalid-value", "finite")),
        ("lora: {1: 2}", ("recipe.unknown-key", "'lora.1'")),
        ("lora: [16]", ("recipe.invalid-value", "'lora'")),
        ("trainer: 5", ("recipe.invalid-value", "'trainer'")),
        ("trainer: {1: 2}", ("recipe.invalid-value", "trainer.1")),
        ("model: ''", ("recipe.invalid-value", "'model'")),
        ("model_kwargs: {trust_remote_code: true}", ("recipe.key-of-its-own", "use 'trust_remote_code'")),
        ("model_kwargs: {torch_dtype: float16}", ("recipe.key-of-its-own", "use 'dtype'")),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_refused_in_one_short_sentence(tmp_path: Path, text: str, refusal: tuple[str, ...]):
    with refused(*refusal) as raised:
        read(tmp_path, text)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"weight_decay": "much"}, "trainer.weight_decay"),
        ({"dataloader_num_workers": 1.5}, "trainer.dataloader_num_workers"),
        ({"dataloader_num_workers": [2]}, "trainer.dataloader_num_workers"),
        ({"run_name": 3}, "trainer.run_name"),
        ({"full_determinism": "perhaps"}, "trainer.full_determinism"),
    ],
)
def test_values_for_the_trainer_have_its_types(values: dict[str, Any], key: str):
    SFTConfig = pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]").SFTConfig

    with refused("trainer.invalid-value", key):
        typed_values(values, get_type_hints(SFTConfig))


def test_numbers_that_yaml_reads_as_text_are_numbers_for_the_trainer():
    SFTConfig = pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]").SFTConfig

    given = {"weight_decay": "1e-2", "adam_beta1": 1, "logging_steps": 5, "lr_scheduler_type": "cosine"}
    assert typed_values(given, get_type_hints(SFTConfig)) == {**given, "weight_decay": 0.01, "adam_beta1": 1.0}


def test_schedules_that_need_arguments_are_those_that_transformers_refuses():
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    refused = set()
    for schedule in SchedulerType:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        try:
            get_scheduler(schedule, optimizer, num_warmup_steps=1, num_training_steps=4)
        except (ValueError, TypeError):
            refused.add(schedule.value)
    assert refused == SCHEDULE_ARGUMENTS.keys()


def test_optimizers_of_other_packages_are_known():
    from transformers.training_args import OptimizerNames

    for pattern in OPTIMIZER_PACKAGES:
        assert any(re.fullmatch(pattern, name.value) for name in OptimizerNames)
