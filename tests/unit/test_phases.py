"""The parts of a step, and how they are written."""

from __future__ import annotations

import pytest

from seqtile.planner.phases import ATTENTION, BLOCK_AND_NORMS, HEAD, OPTIMIZER_STEP, Phase

WRITTEN = {
    Phase(OPTIMIZER_STEP): "optimiser step",
    Phase(HEAD, direction="backward"): "head and loss, backward",
    Phase(ATTENTION, 0, "recompute"): "attention#0, recompute",
    Phase(BLOCK_AND_NORMS, -1, "backward"): "MLP and norms#-1, backward",
}


@pytest.mark.parametrize("phase", WRITTEN, ids=str)
def test_a_phase_is_read_as_it_was_written(phase: Phase) -> None:
    assert str(phase) == WRITTEN[phase]
    assert Phase.read(WRITTEN[phase]) == phase


def test_a_phase_has_a_name_for_people() -> None:
    assert Phase(ATTENTION, -1, "backward").named(4) == "backward of attention in the last layer"
    assert Phase(ATTENTION, 0, "forward").named(4) == "forward of attention in the first layer"
    assert Phase(ATTENTION, 2, "forward").named(4) == "forward of attention in layer 3 of 4"
    assert Phase(HEAD, direction="backward").named(4) == "backward of head and loss"
    assert Phase(OPTIMIZER_STEP).named(4) == "optimiser step"
