"""Wrong values in a recipe: each is one sentence, and nothing is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from seqtile import UserError
from seqtile.train.recipe import Recipe, build_recipe, read_recipe, resolve
from seqtile.train.trainer_fields import OPTIMIZER_PACKAGES, SCHEDULE_ARGUMENTS, typed_values


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return resolve(build_recipe({"model": "m", "dataset": "d", **read_recipe(path)}, {})[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!!python/name:os.system x", "not valid YAML"),
        ("'steps': 3\nsteps: 4", "given twice"),
        ("trainer: {a: 1, a: 1}", "given twice"),
        ("steps: 3\n---\nsteps: 4", "not valid YAML"),
        ("steps: \x01", "not valid YAML"),
        ("model: 2020-13-45", "not valid YAML"),
        ("model: 2020-01-02", "recipe key 'model': got datetime.date"),
        ("seed: 4294967296", "'seed'"),
        ("steps: -1", "'steps': got -1"),
        ("batch_size: -1", "'batch_size'"),
        ("max_length: 1e30", "'max_length'"),
        ("steps: true", "cannot be true"),
        ("learning_rate: yes", "cannot be true"),
        ("tile: no", "cannot be false"),
        ("learning_rate: .inf", "finite"),
        ("learning_rate: .nan", "finite"),
        ("epochs: .inf", "finite"),
        ("keep: .nan", "finite"),
        ("lora: {alpha: .inf}", "finite"),
        ("lora: {1: 2}", "unknown recipe key 'lora.1'"),
        ("lora: [16]", "'lora'"),
        ("trainer: 5", "'trainer'"),
        ("trainer: {1: 2}", "trainer.1"),
        ("model: ''", "is empty"),
        ("model_kwargs: {trust_remote_code: true}", "use 'trust_remote_code' instead"),
        ("model_kwargs: {torch_dtype: float16}", "use 'dtype' instead"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_refused_in_one_short_sentence(tmp_path: Path, text: str, words: str):
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    sentence = str(caught.value)
    assert words in sentence
    assert "\n" not in sentence and len(sentence) < 700


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"weight_decay": "much"}, "trainer.weight_decay"),
        ({"dataloader_num_workers": 1.5}, "trainer.dataloader_num_workers"),
        ({"dataloader_num_workers": [2]}, "trainer.dataloader_num_workers"),
        ({"run_name": 3}, "trainer.run_name"),
        ({"full_determinism": "perhaps"}, "trainer.full_determinism"),
    ],
)
def test_values_for_the_trainer_have_its_types(values: dict[str, Any], words: str):
    SFTConfig = pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]").SFTConfig

    with pytest.raises(UserError, match=words):
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
