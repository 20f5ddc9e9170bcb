"""Values of a recipe's ``trainer:`` section, checked against TRL's ``SFTConfig`` and the rest of the recipe."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import TypeAdapter, ValidationError

from seqtile._errors import UserError
from seqtile.train.recipe import Recipe, alternatives, shown

BEST_METRICS = ("loss", "aux_loss", "mean_token_accuracy", "entropy")
"""Evaluation metrics of TRL's trainer."""

SCHEDULE_ARGUMENTS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"), "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}  # fmt: skip
"""Schedules that are nothing by themselves, and the keys of ``lr_scheduler_kwargs`` of which each needs one."""

OPTIMIZER_PACKAGES = {
    r"adamw_torch_[48]bit": "torchao",
    r"paged_.*|lion_.*|ademamix.*|.*_bnb.*|adamw_8bit": "bitsandbytes",
}
"""Optimizers by their names, and the package of each, which Transformers misses only when the weights are loaded."""


def check_trainer_section(recipe: Recipe) -> None:
    """Refuse what the trainer would find out late, or not at all; imports no heavy library.

    Raises:
        UserError: with what to do.
    """
    best_metric(recipe)
    for pattern, package in OPTIMIZER_PACKAGES.items():
        if re.fullmatch(pattern, recipe.optimizer_arguments["optim"]) and find_spec(package) is None:
            raise UserError(
                "optimizer.package-missing",
                f"optimizer {recipe.optimizer!r} needs {package}; run: pip install {package}",
            )
    schedule, kwargs = recipe.trainer.get("lr_scheduler_type"), recipe.trainer.get("lr_scheduler_kwargs") or {}
    needed = SCHEDULE_ARGUMENTS.get(str(schedule), ())
    if needed and not any(key in kwargs for key in needed):
        raise UserError(
            "trainer.schedule-needs-argument",
            f"lr_scheduler_type {schedule!r} needs {' or '.join(needed)}; add 'trainer: {{lr_scheduler_kwargs: "
            f"{{{needed[0]}: VALUE}}}}' to the recipe, or use another schedule",
        )
    if recipe.trainer.get("padding_free") and not recipe.packing:
        raise UserError(
            "trainer.padding-free-unpacked",
            "trainer.padding_free without packing leaves rows longer than max_length; set 'packing: true', which "
            "packs without padding, or drop padding_free",
        )
    for key, value in recipe.trainer.items():
        if key.startswith("hub_") and value is not None and not recipe.trainer.get("push_to_hub"):
            raise UserError("trainer.hub-key-without-push", f"trainer.{key} needs 'push_to_hub: true'")


def best_metric(recipe: Recipe) -> str:
    """The metric by which the best checkpoint is chosen.

    Raises:
        UserError: no evaluation measures it, which the trainer would find out at the first one.
    """
    name = str(recipe.trainer.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if name not in BEST_METRICS:
        raise UserError(
            "trainer.unknown-best-metric",
            f"got metric_for_best_model {name!r}, expected one of {', '.join(BEST_METRICS)}",
        )
    return name


def trainer_values(recipe: Recipe) -> dict[str, Any]:
    """The ``trainer`` section, each value as the type that ``SFTConfig`` declares.

    YAML reads ``1e-3`` as text, and the trainer would find out in the middle of a run.

    Raises:
        UserError: a key that ``SFTConfig`` does not know, or a value that is not of its type.
    """
    from trl import SFTConfig  # type: ignore[attr-defined]

    hints = typing.get_type_hints(SFTConfig)
    for key in recipe.trainer:
        if key not in SFTConfig.__dataclass_fields__:
            close = difflib.get_close_matches(key, SFTConfig.__dataclass_fields__, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "expected an argument of TRL's SFTConfig"
            raise UserError("trainer.unknown-key", f"unknown recipe key 'trainer.{key}'; {hint}")
    return typed_values(recipe.trainer, hints)


def typed_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as their hints say; those whose hint is more than plain scalars stay as they are.

    Raises:
        UserError: a value that is not of its type.
    """
    checked = dict(values)
    for key, value in values.items():
        if alternatives(hints[key]) <= {int, float, bool, str, types.NoneType}:
            try:
                checked[key] = TypeAdapter(hints[key]).validate_python(value)
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]["msg"]
                raise UserError(
                    "trainer.invalid-value", f"recipe key 'trainer.{key}': got {shown(value)}; {problem}"
                ) from None
    return checked
