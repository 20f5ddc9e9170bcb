"""Will it fit? The memory of a step on a device, term by term, and the longest sequence that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from seqtile._errors import UserError
from seqtile.engines.sequence_parallel import refuse_split_states, why_no_ring
from seqtile.models.discover.decoder_layers import states_of
from seqtile.options import changed
from seqtile.planner.encoders import encoder_notes
from seqtile.planner.estimate import Bounds, Estimate, Saving
from seqtile.planner.extrapolate import FARTHEST, Lines, fit_for, partly
from seqtile.planner.fake_step import build, build_bare, build_weights
from seqtile.planner.flops import Work, count_work
from seqtile.planner.grpo import STANDING as BESIDE_THE_STEP
from seqtile.planner.grpo import add_terms, longest_sequence, notes_of, other_parts
from seqtile.planner.kernel_workspace import cpu_workspace, flash2_workspace, flash3_workspace
from seqtile.planner.layer_structure import Counts, Depths, LayerSample, count_layers, count_weights, find_depths
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, KERNELS, OPTIMIZER, WEIGHTS
from seqtile.planner.model_shapes import max_positions, towers_of
from seqtile.planner.names import STATE_BYTES
from seqtile.planner.phases import ATTENTION, BLOCK, BLOCK_AND_NORMS, HEAD, OPTIMIZER_STEP, REST, STATE, Phase
from seqtile.planner.pictures import Pictures
from seqtile.planner.request import Request, attention_cannot_be_saved, check_ranks, check_request
from seqtile.planner.scan_kernels import SOURCES
from seqtile.planner.sharding_terms import (
    BUFFERS,
    CONSTANTS,
    CONTEXT,
    offload_checkpoints,
    on_device,
    on_host,
)
from seqtile.planner.step_config import Built, Setup
from seqtile.planner.tile_choice import head_tile, kept_share, largest_tile, resolve_tiles

MODEL_ERROR = 0.01
"""Largest error of the counted bytes, as measured on the CPU (docs/planning-reference.md)."""

LONGEST = 2**26
"""Longest sequence that is looked at where the model has no limit of its own."""

SHORT = 128
"""Tokens per rank of a row that is named where none fits."""

UNSEEN = 0.003
"""Share of a step by which tiles of about the same size may move its peak, unsaid."""

WORTH = 0.03
"""Share of a step that keeping attention's output must save to be chosen: below, a step varies by as much anyway."""

HOST_PROCESS = "host processes"

_STANDING = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS, *BESIDE_THE_STEP)
_NAMES = {ATTENTION: "attention working set", KERNELS: "attention working set", REST: "other activations",
          STATE: "working set of layers with a state"}  # fmt: skip
_BOUNDS = ("low", "expected", "high")


class _AtBounds(NamedTuple):
    """What a step holds.

    Attributes:
        best: by bound the bytes at the peak, the part of the step that it is in, and its terms.
        kept: what checkpoints keep, by kind.
        share: of that what waits on the host.
    """

    best: dict[str, tuple[float, str, dict[str, float]]]
    kept: dict[str, float]
    share: float


class Planner:
    """Everything about one request that does not depend on the length, and fake runs as they are needed.

    What others call: ``Planner(request, max_length)``, :meth:`estimate`, :meth:`longest`, :meth:`sure`, :meth:`fits`,
    :meth:`fits_at_the_high_estimate`, :meth:`resolved`, :meth:`work` and :meth:`share`. These stay as they are.
    ``host_has_room`` says after :meth:`longest` that nothing on the host limits the length.

    Args:
        request: what is planned.
        max_length: the length that is asked about, checked against the model's positions.
        like: a planner of the same model, whose structure and fake runs are taken where they are the same.

    Raises:
        UserError: a setting that cannot run.
    """

    def __init__(self, request: Request, max_length: int | None = None, like: Planner | None = None) -> None:
        check_request(request, max_length)
        self.request = request
        self.setup = request.setup()
        self.depths: Depths
        self.counts: Counts
        self.states: dict[str, list[str]]
        self.no_ring: str
        self._lines: dict[tuple[Setup, int], Lines] = {}  # by what runs, and the tokens per rank that were asked for
        self._near: int | None = None
        self._longest = LONGEST
        self._beyond = 0
        self.host_has_room = False
        if like is not None and (like.request.config is not request.config or like.request.lora != request.lora):
            like = None
        if like is not None:
            self.share(like)
            self.depths, self.counts, self.states, self.no_ring = like.depths, like.counts, like.states, like.no_ring
        else:
            model = build_bare(request.config, self.setup, "meta")
            self.depths, self.states = find_depths(request.config, model), states_of(model)
            self.no_ring = why_no_ring(model)
        if like is not None and _same_model(like.setup, self.setup):
            self.built: Built = like.built
        else:
            self.built = build(request.config, self.setup, "meta", self.depths.samples[0])
        if like is None:
            first = count_weights(request.config, self.built.model)
            self.counts = count_layers(self.depths, [first, *map(self._count, self.depths.samples[1:])])
        setting = "sp_size" if request.cp_size == 1 else "cp_size"
        refuse_split_states(repr(request.model), self.states, request.split, setting)
        check_ranks(request, self.counts, self.no_ring)
        flash = flash3_workspace if request.attention == "flash3" else flash2_workspace
        # No step is as long; rules for tiles write down every one of them.
        self._beyond = (
            self._furthest(lambda tokens: self.at_least(tokens) <= request.device.memory) + SHORT * request.split
        )
        self.workspace = cpu_workspace if request.device_type == "cpu" else flash

    def _count(self, sample: LayerSample) -> Counts:
        return count_weights(self.request.config, build_weights(self.request.config, self.setup, "meta", sample)[0])

    def share(self, other: Planner) -> None:
        """Take the fake runs of a planner of the same model; runs are found by their settings."""
        self._lines.update(other._lines)

    def notes(self) -> list[str]:
        """What else is to be said of this plan, in sentences."""
        return [
            *self.built.notes,
            *(_scan_note(kind, layers, self.setup.scans) for kind, layers in self.states.items()),
            *(_tower_note(name, self.request.pictures) for name in towers_of(self.request.config)),
            *notes_of(self.request, self.counts),
            *(encoder_notes(self.request.config) if self.request.masked else ()),
            *_checkpoint_notes(self.request.config, self.request.qlora),
        ]

    @property
    def least(self) -> int:
        """Tokens of the shortest row: its pictures', and one more."""
        return 1 if self.request.pictures is None else self.request.pictures.tokens + 1

    def local(self, tokens: int) -> int:
        """Tokens of each row that one rank holds."""
        return -(-tokens // self.request.split)

    def resolved(self, tokens: int) -> Setup:
        """The setup with the tiles that a rank's part of ``tokens`` is cut into."""
        rows = self.local(tokens) * self.request.batch
        kind = self.request.device_type
        tile = largest_tile(self.built, self.setup, rows, kind) if self.setup.options.tiled else None
        asked = self.request.options.loss_tile
        head = asked if isinstance(asked, int) else head_tile(self.built, self.setup, rows, kind)
        keep = kept_share(self.built, self.setup, rows, kind, self.depths)
        return resolve_tiles(changed(self.setup, loss_tile=head, keep=keep), rows, tile)

    def lines(self, tokens: int) -> Lines:
        """What the step holds by tokens per rank, from fake runs with the tiles of ``tokens``."""
        resolved = self.resolved(tokens)
        setup = changed(resolved, keep=partly(resolved.options.keep))
        near: Lines | None = None
        for (known, _), lines in self._lines.items():
            same = changed(known, tile=setup.options.tile, loss_tile=setup.loss_tile)
            if same == setup and self._tell(lines, known, tokens):
                return lines
            if same == setup or (near is None and changed(same, keep=0.0) == setup):
                near = lines
        # On a CPU what kernels take grows in steps, which a run of another length does not tell.
        near = None if self.request.device_type == "cpu" else near
        tiles = {"tile": setup.options.tile, "loss_tile": setup.loss_tile, "keep": setup.options.keep}
        built = self.built if changed(self.setup, **tiles) == setup else None
        config, local = self.request.config, self.local(tokens)
        lines = fit_for(config, resolved, self.depths, local, self.workspace, built, near, self._far(setup))
        self._lines[setup, local] = lines
        return lines

    def _far(self, setup: Setup) -> int:
        """Tokens of the longest fake run that takes little more time than a short one; 0 where none does.

        Most tiles but those at the ends are left out; scans in PyTorch loop over chunks of the row.
        """
        other = self.states or setup.pictures is not None
        return 0 if other or setup.device_type == "cpu" else FARTHEST

    def _tell(self, lines: Lines, known: Setup, tokens: int) -> bool:
        """Whether the ``lines`` of a step with the tiles of ``known`` are right for one of ``tokens`` tokens.

        Where what they hold at the peak moves it by less than :data:`UNSEEN`, tiles may be larger or smaller by up to a
        fifth, or by a twentieth where projections are in tiles or some tiles are kept, and the head's by two fifths.
        Lines that bend at the peak, and those of shorter rows, are right near a length that was run, where a run of
        this one takes no longer.
        """
        setup = self.resolved(tokens)
        many = setup.options.blocks == "mlp+norm+projections" or setup.options.keep  # tiles are in other parts too
        grown = _grown(known, setup, 0.05 if many else 0.2)
        if grown is None:
            return False
        more = {part: max(1.0, factor) for part, factor in grown.items()}
        best = self._peaks(tokens, lines, more).best
        for total, place, found in best.values():
            part = Phase.read(place).part  # tiles are there while their own part runs
            if found.get(part, 0.0) * abs(1 - 1 / grown.get(part, 1.0)) > UNSEEN * total:
                return False
        places = {place for _, place, _ in best.values()}
        local = self.local(tokens)
        # Between two lengths lines are too high, if anything; beyond, another operator may come to be the peak. The
        # number of kept tiles is rounded, and what a row holds with it.
        longer = 1.05 if setup.options.keep else 1.25
        if local > self._far(setup) or any(0.95 * local <= length <= longer * local for length in lines.exact):
            return True
        return not setup.options.keep and local <= 1.25 * max(lines.lengths) and places.isdisjoint(lines.bent)

    def estimate(self, tokens: int, lines: Lines | None = None) -> Estimate:
        """Memory of a step of ``tokens`` tokens per row; ``lines`` of another length save the fake runs."""
        lines = self.lines(tokens) if lines is None else lines
        best, kept, share = self._peaks(tokens, lines)
        total, phase, found = best["expected"]
        budget = 0 if share == 1 else int(self.host_room() or 0)
        host_terms = on_host(self.request, self.counts, {name: share * held for name, held in kept.items()}, budget)
        processes = CONSTANTS["host process"]
        counted_host = sum(host_terms.values())
        host = [counted_host + getattr(processes, bound) * self.request.per_node for bound in _BOUNDS]
        return Estimate(
            tokens=tokens,
            device=Bounds(best["low"][0], total, best["high"][0]),
            host=Bounds(*host),
            peak_at=Phase.read(phase).named(self.depths.layers),
            terms=_named(found, self.setup),
            host_terms={**host_terms, HOST_PROCESS: processes.expected * self.request.per_node},
            square=lines.square,
            moved=share,
        )

    def _peaks(self, tokens: int, lines: Lines, more: Mapping[str, float] | None = None) -> _AtBounds:
        """What a step of ``tokens`` tokens holds at its peak, and its checkpoints; ``more`` has factors by part."""
        local = self.local(tokens)
        parts = lines.at(local, share=float(self.resolved(tokens).options.keep) if self.setup.options.keep else 0.0)
        kept = {name: max(terms.get(name, 0.0) for terms in parts.values()) for name in (CHECKPOINTS, KEPT)}
        share = self._moved(kept)
        best: dict[str, tuple[float, str, dict[str, float]]] = {}
        for phase, terms in other_parts(self.request, parts).items():
            counted = {**terms, "tokens": float(local * self.request.batch)}
            part = Phase.read(phase).part
            if more and part in more:
                counted[part] = more[part] * counted.get(part, 0.0)
            for bound in _BOUNDS:
                found = on_device(self.request, self.counts, counted, phase)
                asleep = getattr(CONSTANTS["sleeping generator"], bound)
                add_terms(self.request, self.counts, found, phase, tokens, asleep)
                if self.request.options.offload:
                    flight = getattr(CONSTANTS["in flight"], bound)
                    offload_checkpoints(found, self.depths.layers, flight, share)
                total = self._finish(found, bound, self._left_over(phase, local))
                if bound not in best or total > best[bound][0]:
                    best[bound] = (total, phase, found)
        return _AtBounds(best, kept, share)

    def host_room(self) -> float | None:
        """Bytes of host memory that one rank's checkpoints may take; None where the host's memory was not given."""
        if self.request.host_memory is None:
            return None
        others = sum(on_host(self.request, self.counts, {}).values())
        each = (self.request.host_memory - others) / self.request.per_node - CONSTANTS["host process"].high
        return max(0.0, each)

    def _moved(self, kept: Mapping[str, float]) -> float:
        """Share of what checkpoints keep that waits on the host: all of it, or what the host has room for."""
        room, held = self.host_room(), sum(kept.values())
        if not self.request.options.offload:
            return 0.0
        if room is None or held <= room:
            return 1.0
        return math.floor(self.depths.layers * room / held) / self.depths.layers  # whole layers are moved

    def _left_over(self, phase: str, local: int) -> float:
        """Bytes that the caching allocator holds on to where whole logits are made.

        The loss turns them into fp32, and the freed half is too small for each of the fp32 gradients that follow.
        """
        now, setup = Phase.read(phase), self.setup
        low = setup.autocast or setup.dtype.itemsize == 2
        if (
            setup.options.loss
            or not low
            or setup.device_type == "cpu"
            or (now.part, now.direction) != (HEAD, "backward")
        ):
            return 0.0
        return 2.0 * self.counts.vocabulary * local * self.request.batch

    def _finish(self, found: dict[str, float], bound: str, left_over: float) -> float:
        """Add context and allocator to ``found``; returns the total."""
        activations = sum(value for name, value in found.items() if name not in _STANDING)
        error = {"low": -MODEL_ERROR, "expected": 0.0, "high": MODEL_ERROR}[bound]
        context: float = getattr(CONSTANTS["context"], bound) + activations * getattr(CONSTANTS["fragmentation"], bound)
        if bound != "low":
            context += left_over
        if self.request.gpus > 1:
            context += getattr(CONSTANTS["communicator"], bound)
        if self.request.sp_size > 1:
            context += getattr(CONSTANTS["all-to-all"], bound)
        found[CONTEXT] = context + activations * error
        return sum(found.values())

    def fits(self, estimate: Estimate) -> bool:
        """Whether the expected memory is there, on the device and, where it is given, on the host."""
        host = self.request.host_memory
        return (
            estimate.device.expected <= self.request.device.memory
            and (host is None or estimate.host.expected <= host)
            and self.is_generated(estimate)
        )

    def is_generated(self, estimate: Estimate) -> bool:
        """Whether the cache of a generator that shares the device holds a row."""
        row = longest_sequence(self.request, self.counts)
        return row is None or estimate.tokens <= row

    def fits_at_the_high_estimate(self, estimate: Estimate) -> bool:
        """Whether the high estimate is there too."""
        host = self.request.host_memory
        return (
            estimate.device.high <= self.request.device.memory
            and (host is None or estimate.host.high <= host)
            and self.is_generated(estimate)
        )

    def sure(self) -> int:
        """The longest sequence that fits at the high estimate too, 0 if none does; faster after :meth:`longest`."""
        found = min(self._reach(self.fits_at_the_high_estimate, self._near)[0], self._longest)
        return found if found >= self.least else 0

    def longest(self, near: int | None = None) -> tuple[int, str]:
        """The longest sequence that fits (0 if none does), and what limits it; the search begins at ``near``."""
        if near is None and self.at_least(1) > self.request.device.memory:
            self._near = SHORT * self.request.split  # a long row's fake runs would tell no more
            return 0, self._limit(self.estimate(self._near))
        found, lines, self._near = self._reach(self.fits, near)
        self._longest = found
        if found < self.least:
            return 0, self._limit(self.estimate(max(self.least, self.request.split), lines))
        positions = max_positions(self.request.config)
        grain = SHORT * self.request.split
        beyond = self.estimate(min(found + max(grain, found // 256), 2**27), lines)
        limit = "positions" if positions and found >= positions else self._limit(beyond)
        everything_moved = beyond.moved == 1.0 or not self.request.options.offload
        self.host_has_room = everything_moved and not limit.startswith("host memory")
        return found, limit

    def _reach(self, holds: Callable[[Estimate], bool], near: int | None = None) -> tuple[int, Lines, int]:
        """The longest sequence whose estimate ``holds``, and the lines of about that length; tiles depend on it.

        The search begins at ``near``; last comes the length that the lines are of.
        """
        reference = near or self._about()
        tried: list[tuple[int, int]] = []
        for _ in range(5):
            lines = self.lines(reference)

            def fits(tokens: int, lines: Lines = lines) -> bool:
                told = any(row.kept for row in lines.rows) or not self.resolved(tokens).options.keep
                return told and holds(self.estimate(tokens, lines))

            found = self._furthest(fits)
            if found and self._tell(lines, self.resolved(reference), found):
                return found, lines, reference
            tried.append((reference, found))
            # The tiles of a long row are too large for a short one, which may fit where no long one does.
            shorter = found or max(SHORT * self.request.split, self.least)
            none = not found and (reference <= shorter or self.at_least(1) > self.request.device.memory)
            if none or shorter < 64:
                break
            between = (_between(*tried[-2:]) if len(tried) > 1 else None) or shorter
            reference = max(between // self.request.split * self.request.split, self.least)
        # Each found a length that is cut otherwise: the longest of them that fits with the tiles of its own.
        fitting = {length // self.request.split * self.request.split for length, reached in tried if reached >= length}
        for length in sorted(fitting | {reached for _, reached in tried if reached}, reverse=True):
            lines, reference = self.lines(length), length
            if length in fitting or holds(self.estimate(length, lines)):
                return length, lines, length
        shorter = self._furthest(lambda tokens: holds(self.estimate(tokens, lines))) if found else 0
        return min(found, shorter), lines, reference if found else tried[-1][0]

    def _about(self) -> int:
        """About how long the longest sequence is, without a fake run; it only says where a search begins.

        Beside :meth:`at_least` each token takes eight hidden states in a layer's backward and gate and up of the tiles
        that keep them, and eager attention 12 bytes a score, in 88 % of what is left.
        """
        counts, setup, keep = self.counts, self.setup, self.setup.options.keep
        intermediate = counts.largest_product // counts.hidden
        kept = 2 * intermediate * counts.layers * (0.0 if isinstance(keep, str) else keep)
        each = (8 * counts.hidden + kept) * setup.dtype.itemsize * self.request.batch

        def fits(tokens: int) -> bool:
            return self.at_least(tokens) + each * self.local(tokens) <= self.request.device.memory

        found, room = self._furthest(fits), 0.88 * (self.request.device.memory - self.at_least(1))
        if self.request.attention == "eager" and room > 0:
            scores = math.isqrt(int(room / (12 * counts.heads * self.request.batch)))
            grain = SHORT * self.request.split
            found = min(found, scores // grain * grain)
        return max(found, min(SHORT * self.request.split, max_positions(self.request.config) or LONGEST), self.least)

    def fits_at_best(self, tokens: int, like: Planner) -> bool:
        """Whether ``tokens`` tokens may fit, by no fake run of its own.

        Args:
            tokens: of a row.
            like: a planner that differs in the optimiser alone, whose fake runs are read without states and updates.
        """
        lines = like.lines(like._near or tokens)
        idle = {
            run: {place: _without_states(place, terms) for place, terms in places.items()}
            for run, places in lines.runs.items()
        }
        return self.fits(self.estimate(tokens, replace(lines, runs=idle)))

    def _furthest(self, holds: Callable[[int], bool]) -> int:
        """The longest sequence for which ``holds`` is true, to half a percent; 0 if there is none."""
        top = min(max_positions(self.request.config) or LONGEST, self._beyond or LONGEST)
        if holds(top):
            return top
        grain = SHORT * self.request.split
        if not holds(min(grain, top)):
            grain = self.request.split
        low, high = 0, -(-top // grain)  # in grains; the first holds, the second does not
        while high - low > max(1, low // 512):
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle * grain) else (low, middle)
        return _round(low * grain, grain)

    def _limit(self, estimate: Estimate) -> str:
        host = self.request.host_memory
        bounded = longest_sequence(self.request, self.counts) is not None
        if host is not None and estimate.host.expected > host:
            terms, place = dict(estimate.host_terms), "host memory"
        else:
            if bounded and estimate.device.expected <= self.request.device.memory:
                return "device memory: the generator's cache"
            terms, place = dict(estimate.terms), "device memory"
        return f"{place}: {max(terms, key=lambda name: terms[name])}"

    def attention_outputs(self, tokens: int) -> float:
        """Bytes that one rank's checkpoints keep with ``"attention-saved"`` beside layer inputs."""
        counts, setup = self.counts, self.setup
        itemsize = 2 if setup.autocast else setup.dtype.itemsize
        each = counts.heads * (counts.head_width * itemsize + 4)  # the output and its log-sum-exp
        return float(counts.attentions * each * self.local(tokens) * self.request.batch)

    def at_least(self, tokens: int) -> float:
        """Bytes on the device that no step of ``tokens`` tokens per row is below, without a fake run."""
        counts, setup = self.counts, self.setup
        size = setup.dtype.itemsize
        inputs = counts.layers * counts.hidden * size * self.local(tokens) * self.request.batch
        terms = {WEIGHTS: float(size * counts.weights)}
        if not self.request.options.offload:
            terms[CHECKPOINTS] = float(inputs)
        found = on_device(self.request, counts, terms, "forward")
        found[OPTIMIZER] = found.get(OPTIMIZER, STATE_BYTES[self.request.optimizer] * size / 4 * counts.trained)
        return sum(found.values()) + CONSTANTS["context"].low

    def work(self, tokens: int) -> Work:
        """Operations of a step of ``tokens`` tokens per row."""
        return count_work(self.request, self.counts, tokens)


def _between(one: tuple[int, int], other: tuple[int, int]) -> int | None:
    """Where a length would find itself, from two lengths that each found another one on the other's side, or None.

    With the tiles of the longer one less fits, and with those of the shorter one more.
    """
    (first, found_first), (second, found_second) = one, other
    above, below = found_first - first, found_second - second
    if above * below >= 0:
        return None
    return round(first + (second - first) * above / (above - below))


def _without_states(place: str, terms: Mapping[str, float]) -> dict[str, float]:
    """What no optimiser changes of ``terms``: in the update the weights, elsewhere all but its states."""
    update = Phase.read(place).part == OPTIMIZER_STEP
    return {name: value for name, value in terms.items() if (name == WEIGHTS if update else name != OPTIMIZER)}


def _same_model(one: Setup, other: Setup) -> bool:
    """Whether models are built alike, however long their rows are and whatever updates them."""
    return one == replace(other, optimizer=one.optimizer, batch=one.batch, accumulation=one.accumulation)


def _scan_note(kind: str, layers: list[str], scans: str) -> str:
    """What the working set of a kind of layers with a state was worked out from."""
    which = f"{len(layers)} layer{'s' if len(layers) > 1 else ''} with a state ({kind})"
    source = SOURCES.get(kind)
    if scans == "pytorch" or source is None:
        return f"{which}: transformers' PyTorch path" + (f", as without {source}" if source else ", there is no other")
    where = "" if scans == "kernels" else ", as far as they are installed"
    return f"{which}: a model of what {source} allocate{where}, read from their sources, not measured"


def _tower_note(name: str, pictures: Pictures | None) -> str:
    """What is counted of a tower for pictures or sound, and what is not."""
    if name == "vision" and pictures is not None:
        one = f"{pictures.count:,} picture{'s' if pictures.count > 1 else ''} of {pictures.size[0]:,} x "
        return (
            f"{one}{pictures.size[1]:,} pixels in each row, {pictures.each:,} tokens each, {pictures.tokens:,} of the "
            "length; the vision tower runs on them, and its operations are not in those of a step"
        )
    return (
        f"its {name} tower: its weights are counted, not what it holds while it reads; the tokens that it makes count "
        "into the length"
    )


def _grown(one: Setup, other: Setup, within: float) -> dict[str, float] | None:
    """By part of a step how much larger ``other`` has its tiles; None where they differ too much.

    Those of blocks may differ by a share of ``within``, the head's by two fifths.
    """
    mine, yours = one.options.tile, other.options.tile
    if one.options.tiled != other.options.tiled or isinstance(mine, int) != isinstance(yours, int):
        return None
    grown = {HEAD: other.loss_tile / one.loss_tile}
    if isinstance(mine, int) and isinstance(yours, int):
        if not 1 - within <= yours / mine <= 1 / (1 - within):
            return None
        grown |= {BLOCK: yours / mine, BLOCK_AND_NORMS: yours / mine}
    return grown if 0.7 <= grown[HEAD] <= 1.4 else None


def _named(found: Mapping[str, float], setup: Setup) -> dict[str, float]:
    """Terms under the names that the table shows."""
    names: dict[str, str] = dict(_NAMES)
    names[BLOCK] = names[BLOCK_AND_NORMS] = "MLP tile" if setup.options.tiled else "MLP"
    names[HEAD] = "loss tile" if setup.options.loss else "logits and loss"
    terms: dict[str, float] = {}
    for name, value in found.items():
        shown = names.get(name, name)
        terms[shown] = terms.get(shown, 0.0) + value
    return terms


def _round(tokens: int, grain: int) -> int:
    """Down to a number that people would write, within half a percent."""
    for unit in (65536, 16384, 4096, 1024):
        if tokens >= 200 * unit // 2 and unit % grain == 0:
            return tokens // unit * unit
    return tokens


def choose_attention_saved(planner: Planner, tokens: int, without: Estimate | None = None) -> tuple[Planner, Saving]:
    """Whether to keep attention's output: where it saves :data:`WORTH` of the step and the high estimate fits.

    Args:
        planner: with checkpoints that keep layer inputs only.
        tokens: the length that is planned.
        without: the estimate of ``planner`` there; where its high one does not fit, no fake run is made for more.

    Returns:
        The planner to go on with, and why.
    """
    request = planner.request
    kept = changed(request, checkpoint="attention-saved")
    share = 1 - count_work(kept, planner.counts, tokens).total / planner.work(tokens).total
    refusal = attention_cannot_be_saved(request)
    if refusal is not None:
        return planner, Saving(False, None, share, refusal)
    if share < WORTH:
        why = f"would save {share:.1%} of the step, less than the {WORTH:.0%} that count; not chosen"
        return planner, Saving(False, None, share, why)
    outputs = planner.attention_outputs(tokens)
    more = 0.0 if request.options.offload else outputs
    words = f"{outputs / 2**30:,.2f} GiB more" + ("" if more else " on the host")
    over = planner.at_least(tokens) + more - request.device.memory
    if over <= 0 and without is not None and not planner.fits_at_the_high_estimate(without):
        beyond = "not chosen: the high estimate does not fit without it (--checkpoint attention-saved plans it)"
        return planner, Saving(False, more, share, f"{words}, would save {share:.0%} of the step; {beyond}")
    if over <= 0:  # worth fake runs
        other = Planner(kept, like=planner)
        found = other.estimate(tokens)
        crowded = found.moved < 1 and more == 0  # the host has no room for all of it
        if crowded or (more and request.pictures is not None):  # of pictures the vision tower's outputs are kept too
            more = max(more, found.device.expected - planner.estimate(tokens).device.expected)
            words = f"{more / 2**30:,.2f} GiB more" + (" on the device, whose host has no room for all" * crowded)
        if other.fits_at_the_high_estimate(found):
            return other, Saving(True, more, share, f"{words}, saves {share:.0%} of the step; fits, chosen")
        if other.fits(found):
            beyond = "fits at the expected estimate, not at the high one; --checkpoint attention-saved takes it"
            return planner, Saving(False, more, share, f"{words}, would save {share:.0%} of the step; {beyond}")
        over = found.device.expected - request.device.memory
    gap = f"at least {over / 2**30:,.2f} GiB too much on the device" if over > 0 else "too much for the host's memory"
    beyond = f"does not fit, {gap}"
    return planner, Saving(False, more, share, f"{words}, would save {share:.0%} of the step; {beyond}")


def plan(request: Request, max_length: int | None = None) -> tuple[Planner, Estimate, int, str, Saving | None]:
    """Plan ``request``: its planner, the estimate at ``max_length`` or at the longest that fits, that, and its limit.

    Where nothing fits at any length, the longest is 0 and the estimate is of :data:`SHORT` tokens a rank. Last comes
    what was decided about attention's output, where the request leaves it to the plan.

    Raises:
        UserError: a setting that cannot run.
    """
    auto = request.options.checkpoint == "auto"
    planner = Planner(changed(request, checkpoint="full") if auto else request, max_length)
    saving = None
    if auto and max_length is not None:
        # A layer has some sixteen [tokens, hidden] live at once. Where those may not fit, the plain step is run first.
        rows = planner.local(max_length) * request.batch
        layer = 16 * rows * planner.counts.hidden * planner.setup.dtype.itemsize
        crowded = planner.at_least(max_length) + layer > request.device.memory
        without = planner.estimate(max_length) if crowded else None
        planner, saving = choose_attention_saved(planner, max_length, without)
    longest, limit = planner.longest(max_length)
    if auto and max_length is None and longest:
        planner, saving = choose_attention_saved(planner, longest, planner.estimate(longest))
        if saving.chosen:  # limited by something else
            longest, limit = planner.longest()
    short = max(SHORT * request.split, planner.least)
    return planner, planner.estimate(max_length or longest or short), longest, limit, saving


def why_nothing_fits(request: Request, short: Estimate, limit: str) -> str:
    """What to say where no length fits, from what :func:`plan` returns."""
    return (
        f"{request.model!r} does not fit {request.gpus} x {request.device.name} at any length: "
        f"{short.device.expected / 2**30:.1f} GiB of {request.device.memory / 2**30:.1f} GiB before the first "
        f"tokens, most of it {limit.partition(': ')[2]}; shard it (--engine zero3 --gpus 8), train adapters "
        "(--lora r=16) or take a larger device"
    )


SPLITS = {"fsdp2": "cp_size", "zero3": "sp_size"}
"""By engine: the setting that says how many ranks share one sequence."""


def longest_by_split(planner: Planner) -> dict[int, int]:
    """The longest sequence that fits by how many ranks share one, all else as planned; 0 where none does.

    Sizes are powers of two that divide the devices, and all of them; those that the engine or the model refuses are
    left out. Empty for an engine that splits no sequences, and for a step of GRPO.
    """
    request, setting = planner.request, SPLITS.get(planner.request.engine)
    if setting is None or request.grpo is not None:
        return {}
    if setting == "cp_size" and request.options.checkpoint == "attention-saved":
        request = changed(request, checkpoint="full")  # a ring keeps no attention output
    powers = {2**power for power in range(request.gpus.bit_length()) if request.gpus % 2**power == 0}
    found = {}
    for size in sorted({*powers, request.gpus, request.split}):
        with suppress(UserError):
            found[size] = Planner(replace(request, **{setting: size}), like=planner).longest()[0]
    return found


def _checkpoint_notes(config: Any, qlora: bool) -> list[str]:
    """What is to be said of weights that the model's files hold in a quantised form."""
    quantised = getattr(config, "quantization_config", None)
    if not quantised or qlora:
        return []
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    return [
        f"the model's files hold weights in {method}: they are counted as if they were loaded in 16 bits (dequantize: "
        "true in its quantization_config), as training them needs"
    ]
