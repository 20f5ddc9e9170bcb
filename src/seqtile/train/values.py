"""Values of a recipe: what no type says about them."""

from __future__ import annotations

import math
import os
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, ValidationInfo, field_validator

from seqtile._errors import UserError

LARGEST = 2**32 - 1
"""No count of tokens, steps or rows is larger, and generators take no larger seed."""

NAMED_MODEL_KEYS = {
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "config": "model",
    "rope_scaling": "rope_scaling",
}
"""Arguments of ``from_pretrained`` that have a name of their own in the recipe."""

_SCALARS = {int, float, bool, str, types.NoneType}


def shown(value: Any) -> str:
    """A value in a message, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class CheckedModel(BaseModel):
    """A part of a recipe; refuses what would be taken for a number, a name or a path and is none."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, bool) and bool not in _alternatives(cls.model_fields[name].annotation):
            raise ValueError(f"recipe key {name!r} does not take {str(value).lower()}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"recipe key {name!r}: got {shown(value)}, which is too large")
        if isinstance(value, str):
            _check_text(name, value)
        return value


def _check_text(name: str, text: str) -> None:
    """A text may be a path, so it has to be one that the system can be asked about."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"recipe key {name!r}: got {shown(text)}, expected a text without control characters")
    if len(text) > 4000 or any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise ValueError(f"recipe key {name!r}: got {shown(text)}, which is too long")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"recipe key {name!r}: got {shown(text)}, but there is no such user") from None


def checked_trainer_values(values: dict[str, Any], schema: type) -> dict[str, Any]:
    """The values passed on to the trainer, as the types that its arguments declare.

    YAML reads ``1e-3`` as text, and the trainer would find out in the middle of a run.

    Raises:
        UserError: a value that is not of its argument's type.
    """
    hints = typing.get_type_hints(schema)
    checked = dict(values)
    for key, value in values.items():
        kinds = _alternatives(hints.get(key))
        if not kinds <= _SCALARS or (bool not in kinds and isinstance(value, bool)):
            if isinstance(value, bool) and kinds <= _SCALARS:
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


def _alternatives(annotation: Any) -> set[Any]:
    """The types of which a value may be one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(_alternatives(part) for part in typing.get_args(annotation)))
    return {annotation}


def parse_bool(value: Any, name: str) -> bool:
    """True or false in the spellings that YAML and other trainers' flags use."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).strip().lower() not in words:
        raise UserError(f"got {name} {value!r}, expected true or false")
    return words[str(value).strip().lower()]
