"""Every option of ``apply`` tiles the same modules at released sizes as in the tiny models of the other tests.

Transformers' default configs have the widths of released models. They are built on the meta device, with one layer of
each kind.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from numerics._states import FAMILIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("no benchmarks here: the tests run from an installed package", allow_module_level=True)

STATES = [family for families in FAMILIES.values() for family in families[:2]]
CAUSAL = sorted(name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING)

DIFFERENT = {
    "xlstm": "its number of layers is derived from other fields, so that all 32 stay",
    "zaya": "two norms run in tiles in the tiny model alone",
}
"""Architectures that are tiled differently at released sizes, and why."""


@pytest.fixture(scope="module")
def architectures() -> Iterator[ModuleType]:
    logger = logging.getLogger("seqtile")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("architectures")
    logger.setLevel(level)
    for name in ("architectures", "tiny_models"):
        sys.modules.pop(name, None)


def check(architectures: ModuleType, names: list[str]) -> int:
    """Compare the named architectures; returns how many could be built."""
    same = 0
    for name in names:
        coverage = architectures.released_coverage(name)
        if coverage.startswith("not built"):
            continue
        assert coverage.startswith("other coverage" if name in DIFFERENT else "the same"), f"{name}: {coverage}"
        same += 1
    return same


def test_models_with_a_state_are_tiled_alike_at_released_sizes(architectures: ModuleType) -> None:
    assert check(architectures, [*STATES, "qwen3_5_moe_text", "inkling_text", "lara_mini", "gpt_oss"]) > 9


@pytest.mark.slow
def test_every_causal_model_is_tiled_alike_at_released_sizes(architectures: ModuleType) -> None:
    assert check(architectures, CAUSAL) > 170
