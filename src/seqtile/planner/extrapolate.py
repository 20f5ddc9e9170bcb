"""The memory of a step at any length and depth, from fake runs at a few small ones.

Within one part of the step (the backward of the first layer's MLP, say) what is live is a sum over the layers, each of
a kind, and an affine function of the tokens at a fixed tile size; a mask of ``[tokens, tokens]`` adds a square. The
peak of the step is the highest of these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seqtile.models.layer_fields import experts_of
from seqtile.ops.attention.prefix import KEYS_AT_ONCE
from seqtile.options import changed
from seqtile.planner.fake_step import build, build_bare, fake_step
from seqtile.planner.layer_structure import Depths, LayerSample, find_depths
from seqtile.planner.live_at_peaks import KEPT_TILES, KERNELS, PIECE_GRADIENTS, Workspace
from seqtile.planner.phases import Phase
from seqtile.planner.step_config import Setup
from seqtile.planner.step_kind import Terms
from seqtile.planner.tile_choice import kept_share, largest_tile, resolve_tiles, sample_lengths

Points = Mapping[int, Mapping[Phase, Terms]]
"""By length what the parts of a step hold."""


@dataclass(frozen=True)
class Lines:
    """Memory of each phase of the whole model's step, by tokens and the share of kept tiles.

    Attributes:
        points: what a fake run's parts held, by length.
        square: whether a ``[tokens, tokens]`` tensor was seen.
        kept_points: where some tiles are kept and some are not, the same with every tile kept; ``points`` have none.
        bounded: tokens from which attention of chunks reads as many keys at once as it ever does; None without chunks.
    """

    points: Points = field(repr=False)
    square: bool = False
    kept_points: Points = field(default_factory=dict, repr=False)
    bounded: int | None = None

    def at(self, tokens: int, *, keep: float = 0.0) -> dict[Phase, dict[str, float]]:
        """For each part of the step the bytes at its peak, by what they are for; tiles ``keep`` a share of themselves.

        The first tiles keep gate and up: the others' forward runs beside all that is kept. In the backward the kept
        tiles run first; when the others make gate and up again, at least as much is gone.
        """
        parts = _through(self.points, tokens)
        if self.bounded is not None and tokens > self.bounded:
            for phase, terms in _through(self.points, self.bounded).items():
                parts[phase].update({name: terms[name] for name in (PIECE_GRADIENTS, KERNELS) if name in terms})
        for phase, with_kept in _through(self.kept_points, tokens).items() if self.kept_points else ():
            kept = float(round(keep * with_kept.get(KEPT_TILES, 0.0)))
            others = with_kept if phase.direction == "backward" else parts.get(phase, {})
            parts[phase] = {**others, KEPT_TILES: kept}
        return parts


def _through(points: Points, tokens: int) -> dict[Phase, dict[str, float]]:
    """The polynomial through ``points`` at ``tokens``, by Lagrange's weights."""
    weights: dict[int, float] = {}
    for length in points:
        weights[length] = 1.0
        for other_length in points.keys() - {length}:
            weights[length] *= (tokens - other_length) / (length - other_length)
    parts: dict[Phase, dict[str, float]] = {}
    for phase in points[min(points)]:
        total: dict[str, float] = {}
        for length, weight in weights.items():
            for term, size in points[length].get(phase, {}).items():
                total[term] = total.get(term, 0.0) + weight * size
        parts[phase] = {term: float(round(size)) for term, size in total.items()}
    return parts


SampleSteps = dict[tuple[Setup, int, LayerSample], tuple[Mapping[Phase, Terms], bool]]
"""What the parts of fake steps held, and whether there was a ``[tokens, tokens]`` tensor."""


def fit_lines(
    config: Any, setup: Setup, depths: Depths, lengths: Sequence[int], workspace: Workspace | None,
    steps: SampleSteps | None = None,
) -> Lines:  # fmt: skip
    """Run the step on fake tensors at two of ``lengths``, and at all where a ``[tokens, tokens]`` tensor is seen.

    ``setup`` is resolved and keeps no tile or every one. Runs that are in ``steps`` are not made again, and new ones
    are added there: where checkpoints differ by layer, they are those of each policy alone.
    """
    steps = {} if steps is None else steps

    def step(policy: str | None, length: int, sample: LayerSample) -> tuple[Mapping[Phase, Terms], bool]:
        uniform = changed(setup, checkpoint=policy)
        if (uniform, length, sample) not in steps:
            run = fake_step(config, uniform, length, workspace, sample)
            parts = {phase: peak.terms for phase, peak in run.peaks.items()}
            steps[uniform, length, sample] = parts, run.square
        return steps[uniform, length, sample]

    points: dict[int, Mapping[Phase, Terms]] = {}
    policies = [*dict.fromkeys(depths.policies)] if depths.sample_of_kind else []
    square = True  # at one length alone it may be a weight that is as wide
    for length in lengths:
        if len(points) == 2 and not square:
            break
        runs = {
            policy: [step(policy, length, sample) for sample in depths.samples]
            for policy in policies or [setup.options.checkpoint]
        }
        square &= any(is_square for own_runs in runs.values() for _, is_square in own_runs)
        points[length] = depths.whole_model({
            policy: [parts for parts, _ in own_runs] for policy, own_runs in runs.items()
        })  # fmt: skip
    chunk = setup.options.chunk
    return Lines(points, square, bounded=chunk + KEYS_AT_ONCE if isinstance(chunk, int) else None)


def fit_for(
    config: Any, setup: Setup, depths: Depths, tokens: int, workspace: Workspace | None,
    steps: SampleSteps | None = None,
) -> Lines:  # fmt: skip
    """Lines for steps of about ``tokens`` tokens; ``setup`` resolved."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    # Experts use more memory in two tiles than in three, since there is no middle tile.
    fewest = 3 if experts_of(text) else 2
    return fit_lines(config, setup, depths, sample_lengths(setup, tokens, window, fewest), workspace, steps)


def with_kept_tiles(setup: Setup, fit: Callable[[Setup], Lines]) -> Lines:
    """The result of ``fit`` for a resolved setup; where some tiles are kept, for none and for all of them."""
    if not 0 < float(setup.options.keep) < 1:
        return fit(setup)
    lines = fit(changed(setup, keep=0.0))
    return replace(lines, kept_points=fit(changed(setup, keep=1.0)).points)


@dataclass(frozen=True)
class Prediction:
    """The peak of one step, from fake runs at a few lengths and depths.

    Attributes:
        parts: bytes that each part of the step holds at its peak, by purpose.
        lengths: lengths of the fake runs.
        depths: their depths.
        setup: setup with tile sizes as numbers.
        square: whether a ``[tokens, tokens]`` tensor was seen.
    """

    parts: Mapping[Phase, Mapping[str, float]]
    lengths: tuple[int, ...]
    depths: Depths
    setup: Setup
    square: bool

    @property
    def peak(self) -> float:
        """Bytes at the peak, weights and all."""
        return max(sum(terms.values()) for terms in self.parts.values())

    @property
    def peak_at(self) -> Phase:
        """The part of the step that holds them."""
        return max(self.parts, key=lambda phase: sum(self.parts[phase].values()))


def predict(config: Any, setup: Setup, tokens: int, *, workspace: Workspace | None, device_type: str) -> Prediction:
    """The memory of a step of ``tokens`` tokens by phase, in a few seconds.

    Args:
        config: Transformers' configuration of the whole model.
        setup: how the step runs.
        tokens: tokens of each sequence.
        workspace: bytes inside kernels.
        device_type: type of the planned device, which ``tile="auto"`` depends on.
    """
    depths = find_depths(config, build_bare(config, setup, "meta"), setup.options.segment)
    depths = depths.with_checkpoint(setup.options.checkpoint)
    built = build(config, setup, "meta", depths.samples[0])
    tile = largest_tile(built, setup, tokens * setup.batch, device_type) if setup.options.tiled else None
    keep = kept_share(built, setup, tokens * setup.batch, device_type, depths)
    resolved = resolve_tiles(changed(setup, keep=keep), tokens * setup.batch, tile)
    lines = with_kept_tiles(resolved, lambda setup: fit_for(config, setup, depths, tokens, workspace))
    return Prediction(lines.at(tokens, keep=keep), tuple(lines.points), depths, resolved, lines.square)
