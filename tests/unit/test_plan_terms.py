"""The terms of a plan are parts of its total."""

from __future__ import annotations

from seqtile.planner import memory_plan
from seqtile.planner.live_at_peaks import WEIGHTS
from seqtile.planner.phases import ATTENTION, STATE
from seqtile.planner.step_config import Setup


def test_no_term_is_negative_or_more_than_the_total() -> None:
    """Layers of two kinds, at the peak of one: the bytes of the other's mixer were extrapolated below nothing."""
    counted = {WEIGHTS: 37.0, ATTENTION: -147.5, STATE: 211.5}
    terms = memory_plan._named(counted, Setup())
    assert sum(terms.values()) == sum(counted.values())
    assert all(0 <= term <= sum(counted.values()) for term in terms.values())
