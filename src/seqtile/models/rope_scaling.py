"""Rotary scaling for sequences beyond a model's positions, of the model's own type.

A scaling of factor ``f`` that reaches ``P`` positions reaches ``P * F / f`` with factor ``F``. Llama 3.1 has 131,072
positions with factor 8 over 8,192: its factor is no ratio of positions, and 262,144 need 16. A model without scaling
has factor 1, and takes YaRN.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from seqtile._errors import UserError
from seqtile.models.configs import max_positions

UNSCALED = "default"
LARGEST_FACTOR = 10_000


def scaling_for(config: Any, tokens: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` with which ``config`` reaches rows of ``tokens`` tokens; None where there is none."""
    layers = _of_whole_rows(config.get_text_config())
    positions = max_positions(config)
    if not layers or positions is None:
        return None
    rope_type = layers[0].get("rope_type", UNSCALED)
    factor = math.ceil(tokens * _factor(layers[0], positions) / positions)
    return {"rope_type": "yarn" if rope_type == UNSCALED else rope_type, "factor": factor}


def lift(config: Any, tokens: int | None) -> str:
    """The end of a sentence about too few positions: how a recipe extends them; "" where it cannot."""
    scaling = None if tokens is None else scaling_for(config, tokens)
    if not scaling:
        return ""
    keys = ", ".join(f"{key}: {value}" for key, value in scaling.items())
    return f", or extend them with 'rope_scaling: {{{keys}}}' in a recipe, or rope_parameters of the model's config"


def scale_positions(config: Any, scaling: dict[str, Any], model: str) -> None:
    """Write ``scaling`` into a model's configuration, whose other rotary parameters stay.

    With ``longrope`` every long factor grows with the factor: it has one for each frequency.

    Raises:
        UserError: it is invalid, or does not fit the model.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = config.get_text_config()
    text.rope_parameters = copy.deepcopy(getattr(text, "rope_parameters", None))
    layers, positions = _of_whole_rows(text), max_positions(config)
    if not layers or positions is None:
        raise UserError(
            "rope-scaling.no-rotary-positions",
            f"rope_scaling does not apply to {model!r}, which has no rotary positions; drop it",
        )
    if not {"rope_type", "factor"} <= scaling.keys():
        raise UserError(
            "rope-scaling.incomplete",
            "rope_scaling needs at least rope_type and factor, such as {rope_type: yarn, factor: 4}",
        )
    rope_type, factor = scaling["rope_type"], scaling["factor"]
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= LARGEST_FACTOR:
        raise UserError(
            "rope-scaling.bad-factor",
            f"rope_scaling: got factor {factor!r}, expected a number from 1 to {LARGEST_FACTOR:,}",
        )
    if rope_type not in ROPE_INIT_FUNCTIONS or rope_type == UNSCALED:
        types = ", ".join(name for name in ROPE_INIT_FUNCTIONS if name != UNSCALED)
        raise UserError(
            "rope-scaling.unknown-type", f"rope_scaling: got rope_type {rope_type!r}, expected one of {types}"
        )
    old_type = layers[0].get("rope_type", UNSCALED)
    if old_type not in (UNSCALED, rope_type):
        raise UserError(
            "rope-scaling.other-type-than-trained",
            f"rope_scaling: got rope_type {rope_type!r}, but {model!r} was trained with {old_type!r}; use rope_type "
            f"{old_type}",
        )
    growth = factor / _factor(layers[0], positions)
    original: float = positions
    if old_type == UNSCALED:
        original = scaling.get("original_max_position_embeddings") or positions
    for layer in layers:
        if old_type == UNSCALED:
            layer |= {"original_max_position_embeddings": original, **scaling}
            continue
        if "long_factor" in layer:
            layer["long_factor"] = [value * growth for value in layer["long_factor"]]
        layer |= scaling
    if rope_type != "dynamic":  # whose base follows from the row's length and the positions without scaling
        text.max_position_embeddings = int(original * growth)


def _of_whole_rows(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of the layers that attend to whole rows; those of a sliding window need no scaling."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if kinds:
        return [value for name, value in kinds.items() if "sliding" not in name]
    return [rope] if rope else []


def _factor(layer: dict[str, Any], positions: int) -> float:
    """The factor of rotary parameters that reach ``positions``."""
    if layer.get("rope_type", UNSCALED) == "longrope" and not layer.get("factor"):
        return positions / float(layer["original_max_position_embeddings"])
    return float(layer.get("factor") or 1.0)
