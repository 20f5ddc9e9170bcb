"""The memory of one step, by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from seqtile.planner.live_at_peaks import PartPeak
from seqtile.planner.phases import Phase


@dataclass(frozen=True)
class StepRun:
    """The memory of one step, by phase.

    Attributes:
        layers: number of decoder layers.
        tokens: tokens of the batch.
        peaks: the peak of each phase of the step.
        operators: names of all operators of the step in order.
        square: whether a tensor of ``[tokens, tokens]`` was seen at a peak.
    """

    layers: int
    tokens: int
    peaks: Mapping[Phase, PartPeak]
    operators: tuple[str, ...]
    square: bool

    @property
    def peak(self) -> int:
        """Most bytes live at once, weights and all."""
        return max(phase_peak.total for phase_peak in self.peaks.values())

    def with_more(self, longer: StepRun, times: int) -> StepRun:
        """This step with what ``longer`` holds more, so many times."""
        peaks = {}
        for phase, peak in self.peaks.items():
            terms = dict(peak.terms)
            for name, size in longer.peaks[phase].terms.items():
                terms[name] = terms.get(name, 0) + times * (size - peak.terms.get(name, 0))
            peaks[phase] = PartPeak(sum(terms.values()), terms)
        return replace(self, peaks=peaks, square=self.square or longer.square)
