"""The memory of a step at any length and depth, from fake runs at a few small ones.

Within one part of the step (the backward of the first layer's MLP, say) what is live is a sum over the layers, each of
a kind, and an affine function of the tokens at a fixed tile size; a mask of ``[tokens, tokens]`` adds a square. The
peak of the step is the highest of these lines. Each is followed for the first and the last layer of each kind only:
what a layer in between holds lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seqtile.options import changed
from seqtile.planner.fake_step import StepRun, build, build_bare, fake_step
from seqtile.planner.layer_structure import Depths, find_depths
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS, Workspace
from seqtile.planner.phases import OPTIMIZER_STEP, Phase
from seqtile.planner.step_config import Setup
from seqtile.planner.tile_choice import kept_share, largest_tile, other_lengths, resolve_tiles

Terms = Mapping[str, float]

KEPT_TILES = "kept gate and up"


@dataclass(frozen=True)
class Lines:
    """What each part of a step holds, by tokens and layers.

    Attributes:
        depths: where the fake runs were made, and which layers they tell apart.
        runs: the fake runs, by (tokens, number of the sample).
        square: whether a ``[tokens, tokens]`` tensor was seen.
        kept: the same where tiles keep gate and up; None where none does.
        share: of the tiles that keep them.
    """

    depths: Depths
    runs: Mapping[tuple[int, int], Mapping[str, Terms]] = field(repr=False)
    square: bool = False
    kept: Lines | None = field(default=None, repr=False)
    share: float = 0.0

    def at(self, tokens: int, *, share: float = 0.0) -> dict[str, dict[str, float]]:
        """For each part of the step the bytes at its peak, by what they are for; ``share`` of the tiles are kept."""
        found = self.interpolated(tokens)
        if share and self.kept is not None:
            none, some = self._more(0), self._more(tokens)
            for phase, terms in found.items():
                # The buffers that kept and other tiles do not share are there for any share; the rest grows with it.
                more = none[phase] + share / self.kept.share * (some[phase] - none[phase])
                terms[KEPT_TILES] = max(0.0, more)
        return found

    def _more(self, tokens: int) -> dict[str, float]:
        """Bytes of each part with kept tiles, beyond those without."""
        assert self.kept is not None
        kept = self.kept.interpolated(tokens)
        return {
            phase: sum(kept.get(phase, terms).values()) - sum(terms.values())
            for phase, terms in self.interpolated(tokens).items()
        }

    def interpolated(self, tokens: int) -> dict[str, dict[str, float]]:
        lengths = sorted({length for length, _ in self.runs})
        shares = _weights(lengths, tokens)
        result: dict[str, dict[str, float]] = {}
        for name in self.runs[lengths[0], 0]:
            phase, total = Phase.read(name), dict[str, float]()
            for run, layer, weight in self.depths.terms_of(phase.layer):
                where = str(replace(phase, layer=layer))
                for share, length in zip(shares, lengths, strict=True):
                    for term, value in self.runs[length, run].get(where, {}).items():
                        total[term] = total.get(term, 0.0) + share * weight * value
            result[name] = total
        return result


def _weights(points: Sequence[int], at: float) -> list[float]:
    """Lagrange's weights: the polynomial through ``points`` at ``at`` is their values' sum with these."""
    weights = []
    for one in points:
        weight = 1.0
        for other in points:
            if other != one:
                weight *= (at - other) / (one - other)
        weights.append(weight)
    return weights


def fit_lines(config: Any, setup: Setup, depths: Depths, lengths: Sequence[int], workspace: Workspace | None) -> Lines:
    """Run the step on fake tensors at the given lengths, with the layers of each sample."""
    runs: dict[tuple[int, int], Mapping[str, Terms]] = {}
    square: dict[bool, bool] = {}  # by whether a length cannot tell
    first, copies = lengths[0], dict[int, Mapping[str, Terms]]()
    for number, sample in enumerate(depths.samples):
        # Liger's shapes hold their own modules, and a vision tower is made at several depths.
        alone = setup.liger or setup.pictures is not None
        built = None if alone else build(config, setup, "meta", sample)
        added: Mapping[str, Terms] | None = None
        for length in lengths:
            if number and length != first and added is not None:
                runs[length, number] = _with_added(runs[length, 0], added, length / first)
                continue
            run = fake_step(config, setup, length, workspace, sample, built)
            square[run.as_wide] = square.get(run.as_wide, False) or run.square
            runs[length, number] = by_place(run, sample.layers, depths)
            if length == first:
                copies[number] = by_place(run, sample.layers, depths, copies=True)
                added = _added_plainly(runs[first, 0], runs[first, number], copies[0], copies[number], first)
    return Lines(depths, runs, square.get(False, True) and any(square.values()))


_STANDING, _OF_TOKENS = (WEIGHTS, GRADIENTS, OPTIMIZER), (CHECKPOINTS, KEPT)


def _added_plainly(
    fewer: Mapping[str, Terms], more: Mapping[str, Terms], copies: Mapping[str, Terms],
    more_copies: Mapping[str, Terms], tokens: int,
) -> dict[str, Terms] | None:  # fmt: skip
    """What one more layer adds in each place, where a row of another length need not be run to know it there.

    That is where it adds nothing but weights, their copies, gradients and states, which do not depend on the length,
    what checkpoints keep, which is so many bytes a token, and numbers that take less than a byte a token; else None.

    Args:
        fewer: of a run without the layer.
        more: of a run with it, of the same length.
        copies, more_copies: of both, what of it is copies of weights.
        tokens: their length.
    """
    if fewer.keys() != more.keys():
        return None
    found: dict[str, Terms] = {}
    for place, terms in fewer.items():
        names = terms.keys() | more[place].keys()
        added = {name: more[place].get(name, 0.0) - terms.get(name, 0.0) for name in names}
        copied = {name: more_copies[place].get(name, 0.0) - copies[place].get(name, 0.0) for name in names}
        update = Phase.read(place).part == OPTIMIZER_STEP  # where no activation is left
        for name, value in added.items():
            if abs(value - copied[name]) >= tokens and name not in (*_STANDING, *_OF_TOKENS) and not update:
                return None
        found[place] = added
    return found


def _with_added(fewer: Mapping[str, Terms], added: Mapping[str, Terms], times: float) -> dict[str, Terms]:
    """A run with one more layer, from one without it, and what it adds in a row that is ``times`` shorter."""
    return {
        place: {
            name: terms.get(name, 0.0) + added[place].get(name, 0.0) * (times if name in _OF_TOKENS else 1.0)
            for name in (*terms, *(added[place].keys() - terms.keys()))
        }
        for place, terms in fewer.items()
    }


def fit_for(
    config: Any, setup: Setup, depths: Depths, tokens: int, workspace: Workspace | None
) -> tuple[Lines, tuple[int, ...]]:
    """Lines for steps of about ``tokens`` tokens, from fake runs at the lengths that come second; ``setup`` resolved.

    Where ``setup`` keeps tiles, half of them or all are kept in runs of their own, whose lengths can be halved.
    """
    plain, keep = changed(setup, keep=0.0), setup.options.keep
    lengths = other_lengths(setup, tokens)
    if keep:
        unit = math.gcd(*lengths)
        lengths = tuple(n * unit for n in (2, 4, 6) if n * unit != tokens)[:2]
    lines = fit_lines(config, plain, depths, lengths, workspace)
    if lines.square:
        lengths = other_lengths(setup, tokens, points=3)
        lines = fit_lines(config, plain, depths, lengths, workspace)
    if keep:
        share = partly(keep)
        kept = fit_lines(config, changed(setup, keep=share), depths, lengths, workspace)
        lines = replace(lines, kept=replace(kept, share=share))
    return lines, lengths


def partly(keep: float | str) -> float:
    """The share that fake runs keep for a share of ``keep``: none, half or all of the tiles."""
    return 0.0 if not keep else 1.0 if keep == 1 else 0.5


def by_place(run: StepRun, layers: Sequence[int], depths: Depths, *, copies: bool = False) -> dict[str, Terms]:
    """Phases by the number that their layer has in the whole model, of those that are told apart.

    Args:
        run: a step.
        layers: the numbers of its layers.
        depths: which ones are told apart.
        copies: only what is copies of weights.
    """
    found: dict[str, Terms] = {}
    for name, part in run.peaks.items():
        phase = Phase.read(name)
        if phase.layer is not None:
            phase = replace(phase, layer=layers[phase.layer])
            if phase.layer not in depths.ends:
                continue
        found[str(phase)] = part.copies if copies else part.terms
    return found


@dataclass(frozen=True)
class Prediction:
    """The peak of one step, from fake runs at other lengths and depths.

    Attributes:
        parts: for each part of the step what it holds at its peak, in bytes, by what they are for.
        lengths: lengths of the fake runs.
        depths: their depths.
        setup: with the tiles' sizes as numbers.
        square: whether a ``[tokens, tokens]`` tensor was seen.
    """

    parts: Mapping[str, Mapping[str, float]]
    lengths: tuple[int, ...]
    depths: Depths
    setup: Setup
    square: bool

    @property
    def peak(self) -> float:
        """Bytes at the peak, weights and all."""
        return max(sum(terms.values()) for terms in self.parts.values())

    @property
    def peak_at(self) -> str:
        """The part of the step that holds them."""
        return max(self.parts, key=lambda part: sum(self.parts[part].values()))


def predict(config: Any, setup: Setup, tokens: int, *, workspace: Workspace | None, device_type: str) -> Prediction:
    """What a step of ``tokens`` tokens holds, part by part, in a few seconds.

    Args:
        config: Transformers' configuration of the whole model.
        setup: how the step runs.
        tokens: tokens of each row.
        workspace: bytes inside kernels.
        device_type: of the device that is planned for, which ``tile="auto"`` asks for.
    """
    depths = find_depths(config, build_bare(config, setup, "meta"))
    built = build(config, setup, "meta", depths.samples[0])
    tile = largest_tile(built, setup, tokens * setup.batch, device_type) if setup.options.tiled else None
    keep = kept_share(built, setup, tokens * setup.batch, device_type, depths)
    resolved = resolve_tiles(changed(setup, keep=keep), tokens * setup.batch, tile)
    lines, lengths = fit_for(config, resolved, depths, tokens, workspace)
    return Prediction(lines.at(tokens, share=keep), lengths, depths, resolved, lines.square)
