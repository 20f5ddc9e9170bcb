"""The parts of a step, and how they are written."""

from __future__ import annotations

from seqtile.planner.phases import ATTENTION, HEAD, OPTIMIZER_STEP, Phase


def test_a_phase_has_a_name_for_people() -> None:
    assert Phase(ATTENTION, 3, "backward").named(4) == "backward of attention in the last layer"
    assert Phase(ATTENTION, 0, "forward").named(4) == "forward of attention in the first layer"
    assert Phase(ATTENTION, 2, "forward").named(4) == "forward of attention in layer 3 of 4"
    assert Phase(HEAD, direction="backward").named(4) == "backward of head and loss"
    assert Phase(OPTIMIZER_STEP).named(4) == str(Phase(OPTIMIZER_STEP)) == "optimizer step"
    assert str(Phase(ATTENTION, 0, "recompute")) == "attention#0, recompute"
