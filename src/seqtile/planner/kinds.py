"""The kinds of steps that a plan knows."""

from __future__ import annotations

from typing import Any

from seqtile.planner.grpo import GrpoStep
from seqtile.planner.pictures import PictureStep
from seqtile.planner.scans import ScanStep
from seqtile.planner.step_config import Setup
from seqtile.planner.step_kind import StepKind
from seqtile.planner.trainer_kinds import LabelStep, ReferenceStep

KINDS: tuple[StepKind, ...] = (PictureStep(), GrpoStep(), LabelStep(), ReferenceStep(), ScanStep())
"""To add one: a subclass of :class:`.StepKind` in a module of its own, and its instance here."""


def step_kinds_of(config: Any, setup: Setup) -> list[StepKind]:
    """The kinds that a step of this model and setup is of."""
    return [step_kind for step_kind in KINDS if step_kind.applies(config, setup)]
