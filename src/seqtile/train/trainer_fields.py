"""Values of a recipe's ``trainer:`` section, checked against TRL's ``SFTConfig``, without importing it if need be.

Importing TRL takes ten seconds. The names, types and choices of its arguments are in the sources of TRL and
Transformers, which are read here as text, in the versions that are installed. What only the class can say is left to
:func:`seqtile.train.arguments.trainer_arguments`.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import types
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from seqtile._errors import UserError
from seqtile.train.recipe import Recipe, alternatives, shown

CONFIG = "SFTConfig"

SOURCES = {
    "trl": ("trainer/sft_config.py", "trainer/base_config.py"),
    "transformers": ("training_args.py", "trainer_utils.py"),
}
"""The files of each package that hold ``SFTConfig``, its bases and the enumerations of its fields."""

_SCALARS = {"int": int, "float": float, "bool": bool, "str": str, "None": None}
_KINDS = {int, float, bool, str, types.NoneType}

NEEDS_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedules that look at the evaluation's loss."""

BEST_METRICS = {"loss": False, "aux_loss": False, "mean_token_accuracy": True, "entropy": None}
"""What TRL's trainer measures in an evaluation, and whether more is better; None is for the user to say."""

OF_EVALUATIONS = (
    "metric_for_best_model", "greater_is_better", "load_best_model_at_end", "per_device_eval_batch_size", "eval_delay",
    "eval_on_start", "eval_accumulation_steps", "eval_packing",
)  # fmt: skip
"""Arguments that only evaluations read."""

OF_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
"""Arguments that only DDP reads."""

OF_COMPUTE_METRICS = (
    "include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object", "label_names",
    "do_train", "do_predict",
)  # fmt: skip
"""Arguments for functions and scripts that a recipe cannot name."""

NEEDS_ARGUMENTS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"), "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}  # fmt: skip
"""Schedules that are nothing by themselves, and the keys of ``lr_scheduler_kwargs`` of which each needs one."""

OPTIMIZER_PACKAGES = (
    (r"adamw_torch_[48]bit", "torchao", "torchao"), (r"galore_.*", "galore_torch", "galore-torch"),
    (r"apollo_.*", "apollo_torch", "apollo-torch"), (r"(ada)?lomo", "lomo_optim", "lomo-optim"),
    (r"grokadamw", "grokadamw", "grokadamw"), (r"schedule_free_.*", "schedulefree", "schedulefree"),
    (r"stable_adamw", "optimi", "torch-optimi"),
    (r"paged_.*|lion_.*|ademamix.*|.*_bnb.*|adamw_8bit", "bitsandbytes", "bitsandbytes"),
)  # fmt: skip
"""Optimizers by their names, the module that each is in, and what installs it."""


def check_trainer_section(recipe: Recipe) -> None:
    """Refuse what the ``trainer`` section of a recipe has wrong by itself; imports no heavy library.

    Raises:
        UserError: an unknown key, a value of another type, or none of an argument's choices.
    """
    fields = read_fields()
    if fields is None:  # TRL or Transformers keep them elsewhere now: they are checked when both are imported
        return
    refuse_unknown_fields(recipe.trainer, fields)
    values = typed_values(recipe.trainer, {name: kind for name, kind in fields.items() if not isinstance(kind, tuple)})
    for key, value in values.items():
        choices = fields[key]
        if isinstance(choices, tuple) and value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"got {key} {shown(value)}, expected one of {', '.join(choices)}{hint}")
    _check_schedule(values, recipe.eval_dataset is not None)
    _check_optimizer(values.get("optim"))
    _check_unread(recipe)
    best_metric(recipe)
    warmup = values.get("warmup_steps")
    if isinstance(warmup, int | float) and warmup < 0:
        raise UserError(f"got warmup_steps {warmup:g}, expected a number of steps from 0, or below 1 a part of all")


def best_metric(recipe: Recipe) -> tuple[str, bool]:
    """By what the best checkpoint is known, and whether more of it is better.

    Raises:
        UserError: no evaluation measures it, or the direction is missing or the wrong one.
    """
    name = str(recipe.trainer.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if name not in BEST_METRICS:
        raise UserError(
            f"got metric_for_best_model {name!r}, expected what an evaluation measures: {', '.join(BEST_METRICS)}"
        )
    greater, given = BEST_METRICS[name], recipe.trainer.get("greater_is_better")
    if greater is None and given is None:
        raise UserError(f"metric_for_best_model {name!r} has no direction of its own; give greater_is_better too")
    if given is not None and greater is not None and given is not greater:
        raise UserError(
            f"greater_is_better {str(given).lower()} with metric_for_best_model {name!r} would keep the worst "
            "checkpoint; drop greater_is_better"
        )
    return name, bool(given if greater is None else greater)


def _check_unread(recipe: Recipe) -> None:
    """Refuse what would change nothing, or what the trainer refuses with a cure that a recipe has not."""
    if recipe.trainer.get("padding_free") and not recipe.packing:
        raise UserError(
            "trainer.padding_free without packing leaves rows longer than max_length; give 'packing: true', which "
            "joins rows without padding, or drop padding_free"
        )
    for key in (key for key, value in recipe.trainer.items() if value is not None):
        if key in OF_EVALUATIONS and recipe.eval_dataset is None:
            raise UserError(f"trainer.{key} is of evaluations, and there is nothing to evaluate on; give eval_dataset")
        if key in OF_DDP and recipe.engine != "ddp":
            raise UserError(f"trainer.{key} is of engine 'ddp', got engine {recipe.engine!r}; drop it")
        if key in OF_COMPUTE_METRICS:
            raise UserError(f"trainer.{key} is for scripts of your own, and nothing in a recipe reads it; drop it")
        if key.startswith("hub_") and not recipe.trainer.get("push_to_hub"):
            raise UserError(f"trainer.{key} says how results are pushed; give 'push_to_hub: true' too, or drop it")


def _check_schedule(values: Mapping[str, Any], evaluates: bool) -> None:
    schedule = values.get("lr_scheduler_type")
    if schedule in NEEDS_EVALUATION and not evaluates:
        raise UserError(
            f"lr_scheduler_type {schedule!r} follows the evaluation's loss; give --eval-dataset too, or another one"
        )
    given = values.get("lr_scheduler_kwargs")
    needed = NEEDS_ARGUMENTS.get(str(schedule), ())
    if needed and not isinstance(given, str) and not {*(given or {})} & {*needed}:
        raise UserError(
            f"lr_scheduler_type {schedule!r} needs {' or '.join(needed)}; write 'trainer: {{lr_scheduler_kwargs: "
            f"{{{needed[0]}: VALUE}}}}' into a recipe, or take another schedule"
        )


def _check_optimizer(name: str | None) -> None:
    for pattern, module, package in OPTIMIZER_PACKAGES if name is not None else ():
        if re.fullmatch(pattern, str(name)):
            if find_spec(module) is None:
                raise UserError(f"optim {name!r} needs {package}; install it with: pip install {package}")
            return


def read_fields() -> dict[str, Any] | None:
    """The arguments of the installed ``SFTConfig``, from its source.

    Returns:
        For each argument a type where it is of plain scalars, a tuple of words where it is an enumeration's, else None.
        None in place of them all where a source is not where it was.
    """
    classes: dict[str, ast.ClassDef] = {}
    for package, files in SOURCES.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return None
        for name in files:
            path = Path(spec.origin).parent / name
            if not path.is_file():
                return None
            body = ast.parse(path.read_text(encoding="utf-8")).body
            classes |= {one.name: one for one in body if isinstance(one, ast.ClassDef)}
    found: dict[str, Any] = {}
    line = [CONFIG]
    while line:
        name = line.pop()
        if name not in classes:
            return None
        for one in classes[name].body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found.setdefault(one.target.id, _kind(one.annotation, classes))
        line += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return found


def _kind(annotation: ast.expr, classes: Mapping[str, ast.ClassDef]) -> Any:
    """What ``annotation`` is: a type of scalars, the words of an enumeration, or None."""
    names = [part.strip() for part in ast.unparse(annotation).split("|")]
    if set(names) <= _SCALARS.keys():
        kind: Any = _SCALARS[names[0]]
        for name in names[1:]:
            kind = kind | _SCALARS[name]
        return kind
    enumerations = [name for name in names if name in classes]
    if len(enumerations) != 1 or not {*names} <= {*enumerations, "str"}:
        return None
    values = [one.value for one in classes[enumerations[0]].body if isinstance(one, ast.Assign)]
    words = tuple(one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return words or None


def refuse_unknown_fields(values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse a key that the trainer does not know.

    Raises:
        UserError: with the closest one.
    """
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "it passes on the arguments of TRL's SFTConfig"
            raise UserError(f"unknown recipe key 'trainer.{key}'; {hint}")


def typed_values(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values passed on to the trainer, as the types that its arguments declare.

    YAML reads ``1e-3`` as text, and the trainer would find out in the middle of a run.

    Args:
        values: what a recipe says.
        hints: the type of each argument; those that are no scalars, or have none, are left as they are.

    Raises:
        UserError: a value that is not of its argument's type.
    """
    checked = dict(values)
    for key, value in values.items():
        kinds = alternatives(hints.get(key))
        if not kinds <= _KINDS or (bool not in kinds and isinstance(value, bool)):
            if isinstance(value, bool) and kinds <= _KINDS:
                raise UserError(f"recipe key 'trainer.{key}' does not take {str(value).lower()}")
            continue
        try:
            checked[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            expected = problem[0].lower() + problem[1:]
            raise UserError(f"recipe key 'trainer.{key}': got {shown(value)}; {expected}") from None
        if isinstance(checked[key], float) and not math.isfinite(checked[key]):
            raise UserError(f"recipe key 'trainer.{key}': got {shown(value)}, expected a finite number")
    return checked
