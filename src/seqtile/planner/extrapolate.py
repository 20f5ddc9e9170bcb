"""The memory of a step at any length and depth, from fake runs at a few small ones.

Within one part of the step (the backward of the first layer's MLP, say) what is live is a sum over the layers, each of
a kind, and an affine function of the tokens at a fixed tile size; a mask of ``[tokens, tokens]`` adds a square. The
peak of the step is the highest of these lines. Each is followed for the first and the last layer of each kind only:
what a layer in between holds lies between them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from seqtile.options import changed
from seqtile.planner.fake_step import StepRun, build, build_bare, fake_step, fake_update
from seqtile.planner.layer_structure import Depths, LayerSample, find_depths
from seqtile.planner.live_at_peaks import (
    CHECKPOINTS,
    KEPT,
    KEPT_TILES,
    SQUARED,
    WEIGHTS,
    Held,
    PartPeak,
    Workspace,
)
from seqtile.planner.phases import BLOCK_AND_NORMS, OPTIMIZER_STEP, Phase
from seqtile.planner.step_config import Built, Setup
from seqtile.planner.tile_choice import kept_share, largest_tile, other_lengths, resolve_tiles
from seqtile.tiling import sizes_within

Terms = Mapping[str, float]

FARTHEST = 2**22
"""Longest fake row: what its square counts still fits 64 bits, and more tokens change no part's peak."""


class Row(NamedTuple):
    """What a fake run is of.

    Attributes:
        tokens: of each row.
        kept: those of them in tiles that keep gate and up.
    """

    tokens: int
    kept: float = 0.0


@dataclass(frozen=True)
class Lines:
    """What each part of a step holds, by tokens, tokens of kept tiles and layers.

    Attributes:
        depths: where the fake runs were made, and which layers they tell apart.
        runs: the fake runs, by (row, number of the sample).
        square: whether a ``[tokens, tokens]`` tensor was seen.
        parabola: whether terms that grow with the square of the length are told apart (:data:`.SQUARED`), so that two
            lengths tell a parabola; else it takes three.
        exact: lengths at which they are what a fake run held.
        bent: parts whose peak another operator makes at another length; in between they are too high.
    """

    depths: Depths
    runs: Mapping[tuple[Row, int], Mapping[str, Terms]] = field(repr=False)
    square: bool = False
    parabola: bool = False
    exact: tuple[int, ...] = ()
    bent: frozenset[str] = frozenset()

    def at(self, tokens: int, *, share: float = 0.0) -> dict[str, dict[str, float]]:
        """For each part of the step the bytes at its peak, by what they are for; ``share`` of the tiles are kept."""
        shares = self._shares(Row(tokens, share * tokens))
        result: dict[str, dict[str, float]] = {}
        for name in self.runs[min(self.runs)]:
            phase = Phase.read(name)
            result[name] = self._summed(phase, self.depths.terms_of(phase.layer), shares)
            if phase.layer in self.depths.inner and phase.direction != "forward":
                layer, terms = self.depths.inner[phase.layer]
                result[str(replace(phase, layer=layer))] = self._summed(phase, terms, shares)
        return result

    def _summed(
        self, phase: Phase, terms: Sequence[tuple[int, int | None, float]], shares: Sequence[_Share]
    ) -> dict[str, float]:
        """Bytes of a part of the step, whose ``terms`` are as ``Depths.terms_of`` has them."""
        total: dict[str, float] = {}
        for run, layer, weight in terms:
            where = str(replace(phase, layer=layer))
            for share in shares:
                for term, value in self.runs[share.row, run].get(where, {}).items():
                    kind = term.removesuffix(SQUARED)
                    total[kind] = total.get(kind, 0.0) + share.of(term) * weight * value
        if total.get(KEPT_TILES, 1.0) < 1:  # no tile is kept, or one that is done
            del total[KEPT_TILES]
        return {kind: float(round(size)) for kind, size in total.items()}  # what is allocated in chunks rounds up

    def with_tiles_of(self, one: Lines) -> Lines | None:
        """These lines for the tiles that the run of ``one`` has; None if it has other parts.

        Tiles of another size add as much to a part at every length; what grows with the length, or with its square,
        grows as before.
        """
        (row,) = one.rows
        places = {number: self.runs[self.rows[0], number].keys() for _, number in self.runs}
        if one.square != self.square or any(one.runs[row, number].keys() != names for number, names in places.items()):
            return None
        both = {(at, number): self.runs[at, number] for at, number in self.runs if at == self.rows[-1]}
        if self.parabola and not _are_parabolas({**both, **one.runs}, self.bent):
            return None
        shares = self._shares(row)
        runs: dict[tuple[Row, int], dict[str, dict[str, float]]] = {key: {} for key in self.runs}
        for number, names in places.items():
            for place in names:
                there = one.runs[row, number][place]
                here = {at: self.runs[at, number].get(place, {}) for at in self.rows}
                more = {
                    term: round(
                        there.get(term, 0.0) - sum(one.of(term) * here[one.row].get(term, 0.0) for one in shares)
                    )
                    for term in {*there, *(term for terms in here.values() for term in terms)}
                    if not (self.parabola and term[-1] == SQUARED)
                }
                for at, terms in here.items():
                    runs[at, number][place] = {
                        **terms,
                        **{name: terms.get(name, 0.0) + add for name, add in more.items()},
                    }
        return replace(self, runs=runs, exact=one.exact)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of the fake runs, the shortest first."""
        return tuple(sorted({row for row, _ in self.runs}))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of those rows, the fewest first."""
        return tuple(sorted({row.tokens for row in self.rows}))

    def _shares(self, at: Row) -> list[_Share]:
        """Each row with the factors of its terms in ``at``."""
        rows = self.rows
        shortest, longest = rows[0], rows[-1]
        squared = kept = [0.0] * (len(rows) - 1)
        squared = [*squared, (at.tokens / longest.tokens) ** 2]
        if shortest.kept != longest.kept:
            grown = (at.kept - shortest.kept) / (longest.kept - shortest.kept)
            kept = [1 - grown, *kept[1:], grown]
        else:
            kept = [*kept, 1.0]
        plain = _weights([row.tokens for row in rows], at.tokens)
        return list(map(_Share, rows, plain, squared if self.parabola else plain, kept))


class _Share(NamedTuple):
    """What the terms of one row count in another one.

    Attributes:
        row: the one that was run.
        plain: the factor of most terms, by their tokens.
        squared: of those called :data:`.SQUARED`, of which the longest one tells.
        kept: of :data:`.KEPT_TILES`, by the kept tokens.
    """

    row: Row
    plain: float
    squared: float
    kept: float

    def of(self, term: str) -> float:
        """The factor of a term."""
        return self.squared if term[-1] == SQUARED else self.kept if term == KEPT_TILES else self.plain


def _weights(points: Sequence[float], at: float) -> list[float]:
    """Lagrange's weights: the polynomial through ``points`` at ``at`` is their values' sum with these."""
    weights = []
    for one in points:
        weight = 1.0
        for other in points:
            if other != one:
                weight *= (at - other) / (one - other)
        weights.append(weight)
    return weights


def fit_lines(
    config: Any,
    setup: Setup,
    depths: Depths,
    rows: Sequence[Row],
    workspace: Workspace | None,
    steps: dict[tuple[int, Row], StepRun] | None = None,
    models: dict[int, Built] | None = None,
) -> Lines:
    """Run the step on fake tensors for the given rows, with the layers at the ends.

    With one more layer of a kind it is run too where that cannot be told from those (:func:`_like_its_ends`).

    Args:
        config: Transformers' configuration of the whole model.
        setup: how the step runs, resolved; how many tiles are kept the rows say.
        depths: which layers are run.
        rows: what is run.
        workspace: bytes inside kernels.
        steps: runs of the same setup by (number of the sample, row); those made here are added.
        models: models of the same setup by the number of the sample; those built here are added.
    """
    steps = {} if steps is None else steps
    models = {} if models is None else models
    # Liger's shapes hold their own modules, a vision tower is made at several depths, and tiles with a state are tried
    # out in the first step of a model.
    alone = setup.liger or setup.pictures is not None or setup.options.state is not None
    losses_of_layers = getattr(config.get_text_config(), "output_router_logits", False)  # what the head makes of them
    square: dict[bool, bool] = {}  # by whether a length cannot tell

    def run_all(number: int, sample: LayerSample) -> dict[Row, StepRun]:
        missing = [row for row in rows if (number, row) not in steps]
        if missing and not alone and number not in models:
            models[number] = build(config, setup, "meta", sample)
        for row in missing:
            built = None if alone else models[number]
            keeping = changed(setup, keep=row.kept / row.tokens)
            steps[number, row] = fake_step(config, keeping, row.tokens, workspace, sample, built)
        found = {row: steps[number, row] for row in rows}
        for step in found.values():
            square[step.as_wide] = square.get(step.as_wide, False) or step.square
        return found

    ends = run_all(0, depths.samples[0])
    runs = {(row, 0): by_place(step, depths.ends, depths) for row, step in ends.items()}
    for number, sample in enumerate(depths.samples[1:], 1):
        (layer,) = set(sample.layers) - set(depths.ends)
        more = None if losses_of_layers else _like_its_ends(ends, setup, depths, layer)
        if more is None:
            more = {row: by_place(step, sample.layers, depths) for row, step in run_all(number, sample).items()}
        runs |= {(row, number): places for row, places in more.items()}
    at: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in ends.values():
        for name, part in step.peaks.items():
            at[str(in_model(name, depths.ends))].append((part.operator, step.ran[name] - part.operator))
    # Rows that are cut into more tiles have more operators in between: the same one is as far from an end as before.
    bent = {place for place, found in at.items() if all(len(set(end)) > 1 for end in zip(*found, strict=True))}
    for phase in map(Phase.read, [*bent]):
        if phase.layer in depths.inner:
            bent.add(str(replace(phase, layer=depths.inner[phase.layer][0])))
    seen = square.get(False, True) and any(square.values())
    parabola = seen and not square.get(True, False) and _are_parabolas(runs, bent)
    return Lines(depths, runs, seen, parabola, tuple(row.tokens for row in ends), frozenset(bent))


def _are_parabolas(runs: Mapping[tuple[Row, int], Mapping[str, Terms]], bent: Set[str]) -> bool:
    """Whether what is called :data:`.SQUARED` grows so from one length to the others, but for ``bent`` parts."""
    shortest = min(row for row, _ in runs)
    for (row, number), places in runs.items():
        for place, terms in places.items():
            if place in bent:
                continue
            former = runs[shortest, number].get(place, {})
            names = {name for name in {*terms, *former} if name[-1] == SQUARED}
            here, there = row.tokens**2, shortest.tokens**2
            pairs = [(terms.get(name, 0.0) / here, former.get(name, 0.0) / there) for name in names]
            if not all(math.isclose(*pair) for pair in pairs):
                return False
    return True


def _like_its_ends(
    ends: Mapping[Row, StepRun], setup: Setup, depths: Depths, layer: int
) -> dict[Row, dict[str, Terms]] | None:
    """Steps with one more ``layer``, worked out from those with the layers at the ends.

    While another layer runs, it holds its weights and their copies, gradients and states, and what it saved. Between
    its forward and its backward that is what the first layer of its kind holds then, before and afterwards what the
    last one does; without what goes as soon as the next layer has taken it over, such as its output. What the
    optimiser's step makes of its weights is run.

    Args:
        ends: the step of each row.
        setup: how it runs.
        depths: which layers are at the ends.
        layer: the number of another one in the whole model.

    Returns:
        For each row the bytes by place, as of :func:`by_place`; None where that is not told by layer.
    """
    # On a CPU a checkpoint also keeps the generator's state, which is made outside of its layer.
    if setup.device_type == "cpu":
        return None
    alike = [number for number, end in enumerate(depths.ends) if depths.kinds[end] == depths.kinds[layer]]
    trained = next(iter(ends.values())).trained
    same = [weight for weight in trained if weight.layer == alike[0]]
    once, twice = (
        fake_update(setup.optimizer, setup.device_type, weights).terms for weights in (trained, (*trained, *same))
    )
    update = {what: float(size - once.get(what, 0)) for what, size in twice.items() if what != WEIGHTS}
    found: dict[Row, dict[str, Terms]] = {}
    for row, step in ends.items():
        if not setup.options.checkpoint and not _save_alike(step, alike, depths):
            return None
        found[row] = {}
        for name, part in step.peaks.items():
            has_run = part.running is not None and layer < depths.ends[part.running]
            like = alike[0 if has_run else -1]
            held = _held_without_outputs(step, name, part, has_run, like)
            if held is None:
                return None
            in_update = Phase.read(name).part == OPTIMIZER_STEP
            more = dict(update) if in_update else {}
            for (number, what), size in held.items():
                if number == like and not (in_update and what in update):
                    more[what] = more.get(what, 0.0) + size
            summed = {what: part.terms.get(what, 0.0) + more.get(what, 0.0) for what in {*part.terms, *more}}
            found[row][str(in_model(name, depths.ends))] = summed
    return found


def _held_without_outputs(step: StepRun, name: str, part: PartPeak, has_run: bool, like: int) -> Held | None:
    """What layers hold at a peak, without what goes as soon as the next layer has taken it over, such as outputs.

    Args:
        step: a step.
        name: of a phase of it.
        part: its peak.
        has_run: whether the layer that is asked about comes before the one that ran last.
        like: the layer that it is like.

    Returns:
        What they hold; None where a layer that should be done still has its checkpoint: phases run ahead there.
    """
    phase = Phase.read(name)
    if part.running is None or phase.part == OPTIMIZER_STEP:
        return part.held
    if phase.direction == "forward":
        return step.left.get((part.running, True), part.held) if has_run else part.held
    if has_run:  # its backward is to come, however far the phases are behind what runs
        return step.left.get((None, True), part.held)
    after = step.left.get((part.running, False), part.held)
    ahead = any(part.held.get((like, what), 0) > after.get((like, what), 0) for what in (CHECKPOINTS, KEPT))
    return None if ahead else after


def _save_alike(step: StepRun, alike: Sequence[int], depths: Depths) -> bool:
    """Whether the first and the last layer of a kind save as much, all of it filed under its layer and in order."""
    whole = {Phase.read(name).layer for name in step.peaks if Phase.read(name).part == BLOCK_AND_NORMS}
    first, last = (
        {what: size for (number, what), size in step.left[None, True].items() if number == one}
        for one in (alike[0], alike[-1])
    )
    return step.in_order and first == last and whole.issuperset(range(len(depths.ends)))


def fit_for(
    config: Any,
    setup: Setup,
    depths: Depths,
    tokens: int,
    workspace: Workspace | None,
    built: Built | None = None,
    known: Lines | None = None,
    far: int = 0,
) -> Lines:
    """Lines for steps of about ``tokens`` tokens; ``setup`` resolved.

    ``built`` is the model with the layers at the ends, from :func:`.build` with this setup but for the sizes of tiles
    and how many are kept. ``known`` are lines for tiles of other sizes, from which one run tells these. For ``far`` see
    :func:`_lengths_for`.
    """
    near, two, three = _lengths_for(setup, tokens, far)
    models = {} if built is None else {0: built}
    steps: dict[tuple[int, Row], StepRun] = {}

    def lines_at(rows: Sequence[Row]) -> Lines:
        return fit_lines(config, setup, depths, rows, workspace, steps, models)

    if known is not None and not (known.square and not known.parabola) and 4 * max(known.lengths) >= near:
        moved = known.with_tiles_of(lines_at([_row(setup, near)]))
        if moved is not None:
            return moved
    lines = lines_at(_rows_for(setup, two, tokens))
    if lines.square and not lines.parabola:
        lines = lines_at(_rows_for(setup, three, tokens))
    return lines


def _lengths_for(setup: Setup, tokens: int, far: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Lengths of fake runs for steps of about ``tokens`` tokens; ``setup`` resolved.

    Which operator makes a part's peak may depend on how many tiles there are. Where rows of up to ``far`` tokens take
    little more time than short ones, one run is made at about ``tokens``; beyond, both have many tiles.

    Returns:
        One length where lines of other tiles are known, two for a line, three for a parabola.
    """
    two, three = other_lengths(setup, tokens), other_lengths(setup, tokens, points=3)
    unit, some = math.gcd(*two), 0 < float(setup.options.keep) < 1
    if not far:
        if some:
            three = tuple(n * unit for n in (4, 6, 8, 10) if n * unit != tokens)[:3]
        return two[0], three[:2] if some else two, three
    unit = unit // setup.batch if unit % setup.batch == 0 else unit
    untiled = setup.loss_tile if setup.options.loss else 1
    tile = setup.options.tile if isinstance(setup.options.tile, int) else untiled
    fewest = -(-(4 if some else 3) * tile // (unit * setup.batch))  # one between two tiles, or two that are kept
    last = max(round(min(tokens, far) / unit), fewest)
    first = (max(last // 2, fewest) if tokens > far else fewest) * unit
    near = last * unit if tokens > far else tokens  # whose own cuts are the right ones
    two = (first, first + unit) if first == near else (min(first, near), max(first, near))
    # A mask of local attention is there in rows that are longer than its window.
    middle: tuple[int, ...] = (max(last // 2, fewest) * unit, max(3 * last // 4, fewest + 1) * unit)
    if not middle[0] < middle[1] < near:
        middle = tuple(n * unit for n in range(fewest, fewest + 3) if n * unit != near)[:2]
    return near, two, tuple(sorted((*middle, near)))


def _rows_for(setup: Setup, lengths: Sequence[int], tokens: int) -> list[Row]:
    """What is run to tell of rows of about ``tokens`` tokens: ``lengths``, each with tiles that it keeps, if any.

    The first and the last keep different numbers of them, which tell what one more adds, unless one alone is asked for.
    The first of several kept tiles makes another peak than one alone does, so that there are several in all of them or
    in none.
    """
    least = 1
    if 0 < float(setup.options.keep) < 1:
        least = min(2, max(1, math.floor(float(setup.options.keep) * _tiles(setup, tokens) + 1e-9)))
    rows = [_row(setup, length, least) for length in lengths]
    if least == 2 and 0 < rows[-1].kept < rows[-1].tokens:
        (fewer, few), (more, many) = ((row.tokens, _tiles(setup, row.tokens)) for row in (rows[0], rows[-1]))
        first, last = round(rows[0].kept / fewer * few), round(rows[-1].kept / more * many)
        if first == last > 2:
            rows[0] = Row(fewer, (first - 1) / few * fewer)
        elif first == last and many > last + 1:
            rows[-1] = Row(more, (last + 1) / many * more)
    return rows


def _row(setup: Setup, tokens: int, least: int = 1) -> Row:
    """A row that keeps as many of its tiles as ``setup`` says, but of those with some at least so many, and not all."""
    keep = float(setup.options.keep)
    if keep in (0, 1):
        return Row(tokens, keep * tokens)
    tiles = _tiles(setup, tokens)
    kept = max(1, min(max(least, math.floor(keep * tiles + 1e-9)), tiles - 1))
    return Row(tokens, kept / tiles * tokens)


def _tiles(setup: Setup, tokens: int) -> int:
    """Tiles of a block in a batch of rows of so many tokens; ``setup`` resolved, with tiles."""
    assert isinstance(setup.options.tile, int)
    return len(sizes_within(tokens * setup.batch, setup.options.tile))


def partly(keep: float | str) -> float:
    """The share that fake runs keep for a share of ``keep``: none, half or all of the tiles."""
    return 0.0 if not keep else 1.0 if keep == 1 else 0.5


def by_place(run: StepRun, layers: Sequence[int], depths: Depths) -> dict[str, Terms]:
    """Phases by the number that their layer has in the whole model, of those that are told apart.

    Args:
        run: a step.
        layers: the numbers of its layers.
        depths: which ones are told apart.
    """
    found: dict[str, Terms] = {}
    for name, part in run.peaks.items():
        phase = in_model(name, layers)
        if phase.layer is None or phase.layer in depths.ends:
            found[str(phase)] = part.terms
    return found


def in_model(name: str, layers: Sequence[int]) -> Phase:
    """A phase of a step with some ``layers`` of a model, with the number that its layer has there."""
    phase = Phase.read(name)
    return phase if phase.layer is None else replace(phase, layer=layers[phase.layer])


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
    lines = fit_for(config, resolved, depths, tokens, workspace)
    return Prediction(lines.at(tokens, share=keep), lines.lengths, depths, resolved, lines.square)
