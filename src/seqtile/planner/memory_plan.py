"""The memory of a step on a device, by term, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from seqtile._errors import UserError
from seqtile.engines.sequence_parallel import refuse_split_states, why_no_ring
from seqtile.models.configs import towers_of
from seqtile.models.rope_scaling import scaling_for
from seqtile.options import changed, check_layers, layer_policies
from seqtile.planner.estimate import Bounds, Estimate, Saving
from seqtile.planner.extrapolate import Lines, SampleSteps, fit_for, with_kept_tiles
from seqtile.planner.fake_step import build, build_bare, build_weights
from seqtile.planner.flops import Work, count_work, is_in_chunks, streaming_note
from seqtile.planner.kernel_workspace import cpu_workspace, flash2_workspace, flash3_workspace
from seqtile.planner.kinds import KINDS, step_kinds_of
from seqtile.planner.layer_structure import Counts, Depths, LayerSample, count_layers, count_weights, find_depths
from seqtile.planner.live_at_peaks import (
    CHECKPOINTS,
    CHUNK_STATES,
    GRADIENTS,
    KEPT,
    KERNELS,
    KEYS,
    OPTIMIZER,
    PIECE_GRADIENTS,
    WEIGHTS,
)
from seqtile.planner.names import STATE_BYTES
from seqtile.planner.phases import ATTENTION, BLOCK, BLOCK_AND_NORMS, HEAD, REST, STATE, Phase
from seqtile.planner.request import (
    Request,
    attention_cannot_be_saved,
    check_ranks,
    check_request,
    check_request_combination,
)
from seqtile.planner.sharding_terms import (
    BUFFERS,
    CONSTANTS,
    CONTEXT,
    frozen_bytes,
    offload_checkpoints,
    on_device,
    on_host,
)
from seqtile.planner.step_config import Built, Setup
from seqtile.planner.step_time import attention_bytes, step_seconds
from seqtile.planner.techniques import can_stream
from seqtile.planner.tile_choice import head_tile, kept_share, largest_tile, resolve_tiles
from seqtile.recognise.decoder_layers import states_of
from seqtile.recognise.packed_experts import TOO_LARGE, quantization_of, why_experts_stay_whole

MODEL_ERROR = 0.01
"""Largest error of the counted bytes, as measured on the CPU (docs/planning.md)."""

LONGEST = 2**26
"""Longest sequence that is looked at where the model has no limit of its own."""

MOST_SCALING = 64
"""Largest factor of rotary scaling that a plan looks at unasked: a small model would fit lengths that nobody runs."""

SHORT = 128
"""Length (tokens per rank) shown when no length fits."""

MOST_FITS = 6
"""Lengths that a search makes fake runs for: each has tiles of its own, which move what fits."""

SAME_TILES = 0.005
"""Share of a device's memory by which tiles may differ and be taken for the same: less than the bounds of a plan."""

WORTH = 0.03
"""Share of a step that keeping attention's output must save to be chosen: below, a step varies by as much anyway."""

HOST_PROCESS = "host processes"

_STANDING = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS, *(name for step_kind in KINDS for name in step_kind.standing))
_NAMES = {ATTENTION: "attention working set", KERNELS: "attention working set",
          PIECE_GRADIENTS: "attention working set", REST: "other activations",
          STATE: "working set of layers with a state"}  # fmt: skip
_BOUNDS = ("low", "expected", "high")


class _Peak(NamedTuple):
    """A step's peak at one bound.

    Attributes:
        total: its bytes.
        phase: the part of the step that it is in.
        terms: the bytes by what they are for.
    """

    total: float
    phase: Phase
    terms: dict[str, float]


class _Step(NamedTuple):
    """The memory of a step.

    Attributes:
        peaks: peak bytes by bound.
        kept: what checkpoints keep, by purpose.
        moved: the share of that which waits on the host.
    """

    peaks: dict[str, _Peak]
    kept: dict[str, float]
    moved: float


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
        self.kinds = step_kinds_of(request.config, self.setup)
        self.depths: Depths
        self.counts: Counts
        self.states: dict[str, list[str]]
        self.no_ring: str
        for step_kind in self.kinds:
            step_kind.check(request, max_length)
        check_request_combination(request, max_length)
        self._lines: list[tuple[Setup, int, Lines]] = []  # setup, tokens per rank, and fitted lines of each run
        self._steps: SampleSteps = {}
        self._longest = LONGEST
        self.host_has_room = False
        if like is not None and (like.request.config is not request.config or like.request.lora != request.lora):
            like = None
        if like is not None:
            self.share(like)
            self.depths, self.counts, self.states, self.no_ring = like.depths, like.counts, like.states, like.no_ring
            if like.setup.options.segment != self.setup.options.segment:
                model = build_bare(request.config, self.setup, "meta")
                self.depths = find_depths(request.config, model, self.setup.options.segment)
        else:
            model = build_bare(request.config, self.setup, "meta")
            self.depths = find_depths(request.config, model, self.setup.options.segment)
            self.states = states_of(model)
            self.no_ring = why_no_ring(model)
        check_layers(request.options.checkpoint, self.depths.layers, repr(request.model))
        self.depths = self.depths.with_checkpoint(request.options.checkpoint)
        self._like = like if like is not None and _same_model(like.setup, self.setup) else None
        if like is None:
            counts = [count_weights(request.config, self.built.model), *map(self._count, self.depths.samples[1:])]
            self.counts = count_layers(self.depths, counts)
        setting = "sp_size" if request.cp_size == 1 else "cp_size"
        refuse_split_states(repr(request.model), self.states, request.split, setting)
        check_ranks(request, self.counts, self.no_ring)
        flash = flash3_workspace if request.attention == "flash3" else flash2_workspace
        self.workspace = cpu_workspace if request.device_type == "cpu" else flash
        # An upper bound of lengths: tile rules enumerate every tile.
        self._beyond = LONGEST
        self._beyond = (
            self._furthest(lambda tokens: self.at_least(tokens) <= request.device.memory, LONGEST)
            + SHORT * request.split
        )

    @cached_property
    def built(self) -> Built:
        """The model with the layers of the first sample, on the meta device."""
        if self._like is not None:
            return self._like.built
        return build(self.request.config, self.setup, "meta", self.depths.samples[0])

    @property
    def furthest(self) -> int:
        """Tokens beyond which no row fits, by arithmetic."""
        return self._beyond

    def _count(self, sample: LayerSample) -> Counts:
        return count_weights(self.request.config, build_weights(self.request.config, self.setup, "meta", sample)[0])

    def share(self, planner: Planner) -> None:
        """Take the fake runs of a planner of the same model; runs are found by their settings."""
        present = {id(lines) for _, _, lines in self._lines}
        self._lines += [fit for fit in planner._lines if id(fit[2]) not in present]
        self._steps |= planner._steps

    def notes(self) -> list[str]:
        """Notes of this plan."""
        request = self.request
        streaming = request.options.weights_on_host and streaming_note(
            request, self.counts, frozen_bytes(request, self.counts)
        )
        silent_towers = [name for name in towers_of(request.config) if name != "vision" or request.pictures is None]
        return [
            *self.built.notes,
            *(note for step_kind in self.kinds for note in step_kind.notes(request, self.counts, self.states)),
            *(
                (f"the {name} tower's weights are included, its activations are not; its tokens are part of the length")
                for name in silent_towers
            ),
            *_checkpoint_notes(request, self.counts),
            *([streaming] if streaming else []),
        ]

    @property
    def least(self) -> int:
        """Tokens of the shortest sequence: its pictures', and one more."""
        return max(step_kind.least_tokens(self.request) for step_kind in self.kinds)

    def local(self, tokens: int) -> int:
        """Tokens of each row that one rank holds."""
        return -(-self.request.row_tokens(tokens) // self.request.split)

    def resolved(self, tokens: int) -> Setup:
        """The setup with the tiles that a rank's part of ``tokens`` is cut into."""
        rows = self.local(tokens) * self.request.batch
        device_type = self.request.device_type
        tile = largest_tile(self.built, self.setup, rows, device_type) if self.setup.options.tiled else None
        loss_tile = self.request.options.loss_tile
        head = loss_tile if isinstance(loss_tile, int) else head_tile(self.built, self.setup, rows, device_type)
        keep = kept_share(self.built, self.setup, rows, device_type, self.depths)
        setup = changed(self.setup, loss_tile=head, keep=keep, rollouts=self.request.rollouts(tokens))
        return resolve_tiles(setup, rows, tile)

    def lines(self, tokens: int) -> Lines:
        """The step's memory over tokens per rank, from fake runs with about the tiles of ``tokens``."""
        return with_kept_tiles(self.resolved(tokens), lambda resolved: self._fit(resolved, self.local(tokens)))

    def _fit(self, resolved: Setup, local: int) -> Lines:
        """Lines of a resolved setup that keeps no tile or all of them."""
        window = getattr(self.request.config.get_text_config(), "sliding_window", None) or 0
        for setup, length, lines in self._lines:
            # Of untiled steps the runs are shares of the length; a window's mask is in longer sequences only.
            bounded = resolved.options.tiled or resolved.options.loss or resolved.options.chunk
            is_near = bounded or length / 2 <= local <= 2 * length
            is_near = is_near and (length > window) == (local > window)
            chunked = [is_in_chunks(resolved.options, tokens, resolved.batch) for tokens in (length, local)]
            is_near = is_near and chunked[0] == chunked[1]
            if is_near and self._about_alike(setup, resolved):
                return lines
        lines = fit_for(self.request.config, resolved, self.depths, local, self.workspace, self._steps)
        self._lines.append((resolved, local, lines))
        return lines

    def _about_alike(self, setup: Setup, other_setup: Setup) -> bool:
        """Whether two resolved setups differ in tiles only, and by little of the device's memory."""
        tile, keep = other_setup.options.tile, float(other_setup.options.keep)
        if changed(setup, tile=tile, loss_tile=other_setup.loss_tile, keep=keep) != other_setup:
            return False
        if setup.options.keep != keep and {setup.options.keep, keep} & {0.0, 1.0}:
            return False
        longer = abs(setup.options.tile - tile) if isinstance(setup.options.tile, int) and isinstance(tile, int) else 0
        width = 6 * self.counts.largest_product // self.counts.hidden  # gate, up, their product, and all gradients
        elements = longer * width + abs(setup.loss_tile - other_setup.loss_tile) * self.counts.vocabulary
        return elements * self.setup.dtype.itemsize <= SAME_TILES * self.request.device.memory

    def estimate(self, tokens: int, lines: Lines | None = None) -> Estimate:
        """Memory of a step of ``tokens`` tokens per row; ``lines`` of another length save the fake runs."""
        lines = self.lines(tokens) if lines is None else lines
        peaks, kept, moved = self._step(tokens, lines)
        peak = peaks["expected"]
        budget = 0 if moved == 1 else int(self.host_room() or 0)
        host_terms = on_host(self.request, self.counts, {name: moved * size for name, size in kept.items()}, budget)
        processes = CONSTANTS["host process"]
        counted_host = sum(host_terms.values())
        host = [counted_host + getattr(processes, bound) * self.request.per_node for bound in _BOUNDS]
        return Estimate(
            tokens=tokens,
            device=Bounds(peaks["low"].total, peak.total, peaks["high"].total),
            host=Bounds(*host),
            peak_at=peak.phase.named(self.depths.layers),
            terms=_named(peak.terms, self.setup),
            host_terms={**host_terms, HOST_PROCESS: processes.expected * self.request.per_node},
            square=lines.square,
            moved=moved,
        )

    def _step(self, tokens: int, lines: Lines) -> _Step:
        """Memory of a step of ``tokens`` tokens at its peaks, and of its checkpoints."""
        request, local = self.request, self.local(tokens)
        parts: dict[Phase, Mapping[str, float]] = {**lines.at(local, keep=float(self.resolved(tokens).options.keep))}
        kept = {name: max(terms.get(name, 0.0) for terms in parts.values()) for name in (CHECKPOINTS, KEPT)}
        # While the head runs, segments of chunked layers hold only the keys, values and states that they keep. In a
        # segment's backward those come on top that are computed again: keys and values of its first layer, and states
        # after one chunk.
        in_head, stays = [terms for phase, terms in parts.items() if phase.part == HEAD], dict[str, float]()
        for name in (KEYS, CHUNK_STATES):
            kept[name] = max((terms.get(name, 0.0) for terms in in_head), default=0.0)
            stays[name] = max(terms.get(name, 0.0) for terms in parts.values()) - kept[name]
        moved = self._moved(kept)
        each = {name: size / max(1, self._keeping[name]) for name, size in kept.items()}
        for step_kind in self.kinds:
            parts |= step_kind.other_parts(request, parts)
        peaks: dict[str, _Peak] = {}
        for phase, counted in parts.items():
            for bound in _BOUNDS:
                terms = on_device(request, self.counts, {**counted, "tokens": float(local * request.batch)}, phase)
                for step_kind in self.kinds:
                    step_kind.add_terms(request, self.counts, terms, phase, tokens, bound)
                if request.options.offload_room:
                    flight = getattr(CONSTANTS["in flight"], bound)
                    offload_checkpoints(terms, each, flight, moved, stays)
                total = self._finish(terms, bound, self._left_over(phase, local))
                if bound not in peaks or total > peaks[bound].total:
                    peaks[bound] = _Peak(total, phase, terms)
        return _Step(peaks, kept, moved)

    def host_room(self) -> float | None:
        """Bytes of host memory that one rank's checkpoints may take; None where nothing bounds them."""
        given = self.request.options.offload_room
        bounds = [] if isinstance(given, bool) else [float(given)]
        if self.request.host_memory is not None:
            others = sum(on_host(self.request, self.counts, {}).values())
            each = (self.request.host_memory - others) / self.request.per_node - CONSTANTS["host process"].high
            bounds.append(max(0.0, each))
        return min(bounds, default=None)

    def _moved(self, kept: Mapping[str, float]) -> float:
        """Share of what checkpoints keep that waits on the host: all of it, or what the host has room for."""
        room, total = self.host_room(), sum(kept.values())
        if not self.request.options.offload_room:
            return 0.0
        if room is None or total <= room:
            return 1.0
        keeping, moved = self._keeping, 0.0
        for policy in self._policies:  # what whole layers keep is moved, the first layers' first
            size = kept[CHECKPOINTS] / keeping[CHECKPOINTS] if policy is not None else 0.0
            size += kept[KEPT] / keeping[KEPT] if policy == "attention-saved" else 0.0
            size += (kept[KEYS] + kept[CHUNK_STATES]) / keeping[KEYS]
            if moved + size > room:
                break
            moved += size
        return moved / total

    @property
    def _policies(self) -> tuple[str | None, ...]:
        """The policies of a step's checkpoints: one a layer, or one a segment of chunked layers."""
        segments = -(-self.depths.layers // self.setup.options.segment)
        return layer_policies(self.setup.options.checkpoint, segments)

    @property
    def _keeping(self) -> dict[str, int]:
        """Checkpoints of a step by what they keep."""
        policies, segment, attends = self._policies, self.setup.options.segment, self.depths.attends
        # Layers without attention carry a state; where all attend, as in Falcon-H1, all may.
        carry = sum(not all(attends[n : n + segment]) for n in range(0, len(attends), segment)) or len(policies)
        return {
            CHECKPOINTS: len(policies) - policies.count(None),
            KEPT: policies.count("attention-saved"),
            KEYS: len(policies),
            CHUNK_STATES: carry,
        }

    def _left_over(self, phase: Phase, local: int) -> float:
        """Bytes that the caching allocator holds on to where whole logits are made.

        The loss turns them into fp32, and the freed half is too small for each of the fp32 gradients that follow.
        """
        setup = self.setup
        whole_logits = setup.options.loss is None and setup.device_type != "cpu"
        low = setup.autocast or setup.dtype.itemsize == 2
        if not whole_logits or not low or (phase.part, phase.direction) != (HEAD, "backward"):
            return 0.0
        return 2.0 * self.counts.vocabulary * local * self.request.batch

    def _finish(self, terms: dict[str, float], bound: str, left_over: float) -> float:
        """Add context and allocator to ``terms``; returns the total."""
        activations = sum(value for name, value in terms.items() if name not in _STANDING)
        error = {"low": -MODEL_ERROR, "expected": 0.0, "high": MODEL_ERROR}[bound]
        context: float = getattr(CONSTANTS["context"], bound) + activations * getattr(CONSTANTS["fragmentation"], bound)
        if bound != "low":
            context += left_over
        if self.request.gpus > 1:
            context += getattr(CONSTANTS["communicator"], bound)
        if self.request.sp_size > 1:
            context += getattr(CONSTANTS["all-to-all"], bound)
        terms[CONTEXT] = context + activations * error
        return sum(terms.values())

    def fits(self, estimate: Estimate) -> bool:
        """Whether the expected memory is there, on the device and, where it is given, on the host."""
        host = self.request.host_memory
        return (
            estimate.device.expected <= self.request.device.memory
            and (host is None or estimate.host.expected <= host)
            and self.is_generated(estimate)
        )

    def is_generated(self, estimate: Estimate) -> bool:
        """Whether the cache of a generator that shares the device holds a sequence."""
        most = self._most_tokens()
        return most is None or estimate.tokens <= most

    def _most_tokens(self) -> int | None:
        bounds = [step_kind.most_tokens(self.request, self.counts) for step_kind in self.kinds]
        return min((bound for bound in bounds if bound is not None), default=None)

    def fits_at_the_high_estimate(self, estimate: Estimate) -> bool:
        """Whether the high estimate is there too."""
        host = self.request.host_memory
        return (
            estimate.device.high <= self.request.device.memory
            and (host is None or estimate.host.high <= host)
            and self.is_generated(estimate)
        )

    def sure(self, longest: int | None = None) -> int:
        """The longest sequence that fits at the high estimate too, 0 if none does; faster after :meth:`longest`.

        It is at most ``longest``, by default what :meth:`longest` has found.
        """
        top = self._longest if longest is None else longest
        length = min(self._reach(self.fits_at_the_high_estimate, min(top, self._beyond), longest)[0], top)
        return length if length >= self.least else 0

    def longest_beyond(self, start: int | None = None) -> int:
        """The longest sequence that fits with rotary scaling beyond the model's positions; 0 where none is longer.

        The search ends at :data:`MOST_SCALING` times the positions.
        """
        positions = self.request.positions
        if positions is None or not (self.request.rope_scaling or scaling_for(self.request.config, 2 * positions)):
            return 0
        length, _ = self._reach(self.fits, start, min(MOST_SCALING * positions, LONGEST))
        return length if length > positions else 0

    def longest(self, start: int | None = None, furthest: int | None = None) -> tuple[int, str]:
        """The longest sequence that fits (0 if none does), and what limits it.

        The search begins at ``start`` and ends at ``furthest``, by default the model's positions.
        """
        if start is None and self.at_least(1) > self.request.device.memory:
            self._longest = SHORT * self.request.split  # longer fake runs give no more information
            return 0, self._limit(self.estimate(self._longest))
        length, lines = self._reach(self.fits, start, furthest)
        self._longest = length
        if length < self.least:
            return 0, self._limit(self.estimate(max(self.least, self.request.split), lines))
        positions, grain = self.request.positions, SHORT * self.request.split
        beyond = self.estimate(min(length + max(grain, length // 256), 2**27), lines)
        limit = "positions" if positions and length >= positions else self._limit(beyond)
        everything_moved = beyond.moved == 1.0 or not self.request.options.offload_room
        self.host_has_room = everything_moved and not limit.startswith("host memory")
        return length, limit

    def _reach(
        self, holds: Callable[[Estimate], bool], start: int | None = None, limit: int | None = None
    ) -> tuple[int, Lines]:
        """The longest sequence whose estimate ``holds``, and its lines; the search begins at ``start``.

        No sequence is longer than ``limit``, by default the model's positions.

        Each length has tiles of its own, and lines of another length's tiles are right for it where those are about
        as large; else the search goes on with its tiles.
        """
        grain = SHORT * self.request.split
        shortest = max(grain, self.least)
        limit = limit or self.request.positions or LONGEST
        reference = max(min(start or self._beyond, limit), shortest)
        fitting = 0  # the longest that holds with tiles of its own
        for _ in range(MOST_FITS):
            lines = self.lines(reference)
            length = self._furthest(lambda tokens, lines=lines: holds(self.estimate(tokens, lines)), limit)  # type: ignore[misc]
            if length >= reference:
                fitting = max(fitting, reference)
            if length and self._about_alike(self.resolved(reference), self.resolved(length)):
                return length, lines
            # The tiles of a long sequence are too large for a short one, which may fit where no long one does.
            if not length and (reference <= shortest or self.at_least(1) > self.request.device.memory):
                break
            reference = length // self.request.split * self.request.split or shortest
        return fitting, self.lines(fitting or reference)

    def _furthest(self, holds: Callable[[int], bool], limit: int) -> int:
        """The longest sequence of at most ``limit`` tokens for which ``holds`` is true, to half a percent, or 0."""
        top = min(limit, self._beyond)
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
        bounded = self._most_tokens() is not None
        if host is not None and estimate.host.expected > host:
            terms, memory = dict(estimate.host_terms), "host memory"
        else:
            if bounded and estimate.device.expected <= self.request.device.memory:
                return "device memory: the generator's cache"
            terms, memory = dict(estimate.terms), "device memory"
        return f"{memory}: {max(terms, key=lambda name: terms[name])}"

    def attention_outputs(self, tokens: int, checkpoint: str = "attention-saved") -> float:
        """Bytes that one rank's checkpoints keep beside layer inputs, with ``checkpoint`` in the place of its own."""
        saved = self.counts.attentions_with("attention-saved", checkpoint)
        each = attention_bytes(self.request, self.counts)
        return float(saved * each * self.request.attended_tokens(tokens) / self.request.split)

    def at_least(self, tokens: int) -> float:
        """Bytes on the device that no step of ``tokens`` tokens per row is below, without a fake run."""
        counts, setup = self.counts, self.setup
        size = setup.dtype.itemsize
        policies, offload = self._policies, bool(self.request.options.offload_room)
        # A layer without a checkpoint keeps its input too, on the device wherever the others wait.
        layers = policies.count(None) if offload else len(policies)
        inputs = layers * counts.hidden * size * self.local(tokens) * self.request.batch
        if not offload and is_in_chunks(self.request.options, self.local(tokens), self.request.batch):
            # In the last segment's backward: gradients of its output and input, and keys and values of the others.
            keys = 2 * counts.key_heads * counts.head_width * (2 if setup.autocast else size)
            kept = max(0, counts.attentions - len(policies)) * keys
            inputs += (2 * counts.hidden * size + kept) * self.local(tokens) * self.request.batch
        terms = {WEIGHTS: float(size * counts.weights), CHECKPOINTS: float(inputs)}
        terms = on_device(self.request, counts, terms, Phase(REST, direction="forward"))
        terms.setdefault(OPTIMIZER, STATE_BYTES[self.request.optimizer] * size / 4 * counts.trained)
        return sum(terms.values()) + CONSTANTS["context"].low

    def work(self, tokens: int) -> Work:
        """Operations of a step of ``tokens`` tokens per row."""
        return count_work(self.request, self.counts, tokens, self._kept(tokens))

    def seconds(self, tokens: int, moved: float = 1.0) -> float:
        """Seconds of such a step; a share ``moved`` of what checkpoints keep waits on the host, where it does."""
        request = changed(self.request, tile=self.resolved(tokens).options.tile)
        return step_seconds(request, self.counts, tokens, self._kept(tokens), moved)

    def _kept(self, tokens: int) -> float | None:
        """Share of the tiles that keep gate and up; None where the MLPs run untiled."""
        options = self.resolved(tokens).options
        return float(options.keep) if options.tiled else None


def _same_model(setup: Setup, other_setup: Setup) -> bool:
    """Whether models are built alike, however long their sequences are and whatever updates them."""
    if setup.options.by_layer and other_setup.options.checkpoint is not None:
        other_setup = changed(other_setup, checkpoint=setup.options.checkpoint)
    return setup == replace(other_setup, optimizer=setup.optimizer, batch=setup.batch, accumulation=setup.accumulation)


def _named(terms: Mapping[str, float], setup: Setup) -> dict[str, float]:
    """Terms under the names that the table shows."""
    names: dict[str, str] = dict(_NAMES)
    tiled = setup.options.tiled and setup.options.chunk is None
    names[BLOCK] = names[BLOCK_AND_NORMS] = "MLP tile" if tiled else "MLP"
    names[HEAD] = "loss tile" if setup.options.loss else "logits and loss"
    named: dict[str, float] = {}
    for name, value in terms.items():
        named[names.get(name, name)] = named.get(names.get(name, name), 0.0) + value
    # A part may hold as much at two moments, and its peak be at the first in one run, at the second in another.
    largest = max(named, key=lambda name: named[name])
    for name, value in list(named.items()):
        if value < 0:
            named[largest] += named.pop(name)
    return named


def _round(tokens: int, grain: int) -> int:
    """Down to a number that people would write, within half a percent."""
    for unit in (65536, 16384, 4096, 1024):
        if tokens >= 200 * unit // 2 and unit % grain == 0:
            return tokens // unit * unit
    return tokens


def choose_attention_saved(planner: Planner, tokens: int, without: Estimate | None = None) -> tuple[Planner, Saving]:
    """Whether to keep attention's output: where it saves :data:`WORTH` of the step and the high estimate fits.

    Args:
        planner: a planner with checkpoints that keep layer inputs only.
        tokens: the length that is planned.
        without: the estimate of ``planner`` there; where its high one does not fit, no fake run is made for more.

    Returns:
        The planner to go on with, and why.
    """
    request = planner.request
    kept = changed(request, checkpoint="attention-saved")
    spared = 1 - count_work(kept, planner.counts, tokens).total / planner.work(tokens).total
    refusal = attention_cannot_be_saved(request)
    if refusal is not None:
        return planner, Saving(False, None, spared, refusal)
    if spared < WORTH:
        why = f"not chosen, it saves {spared:.1%} of the step's FLOPs (worth it from {WORTH:.0%})"
        return planner, Saving(False, None, spared, why)
    outputs = planner.attention_outputs(tokens)
    extra = 0.0 if request.options.offload_room else outputs
    benefit = f"saves {spared:.0%} of the step's FLOPs for"
    added = f"{benefit} {outputs / 2**30:,.2f} GiB" + ("" if extra else " on the host")
    over = planner.at_least(tokens) + extra - request.device.memory
    if over <= 0 and without is not None and not planner.fits_at_the_high_estimate(without):
        beyond = "not chosen: the high estimate does not fit even without it"
        return planner, Saving(False, extra, spared, f"{added}; {beyond}")
    if over <= 0:  # worth fake runs
        saving = Planner(kept, like=planner)
        estimate = saving.estimate(tokens)
        crowded = estimate.moved < 1 and extra == 0  # the host or a given size is too small for all of it
        if crowded or (extra and request.pictures is not None):  # of pictures the vision tower's outputs are kept too
            extra = max(extra, estimate.device.expected - planner.estimate(tokens).device.expected)
            bounded = saving.host_room() == request.options.offload_room
            why_here = "beyond the size given to offload" if bounded else "since the host is full"
            added = f"{benefit} {extra / 2**30:,.2f} GiB" + f" on the device, {why_here}" * crowded
        if saving.fits_at_the_high_estimate(estimate):
            return saving, Saving(True, extra, spared, f"{added}; chosen")
        if saving.fits(estimate):
            beyond = "not chosen: fits at the expected estimate, not at the high one"
            return planner, Saving(False, extra, spared, f"{added}; {beyond}")
        over = estimate.device.expected - request.device.memory
    gap = f"at least {over / 2**30:,.2f} GiB over" if over > 0 else "more than host memory"
    return planner, Saving(False, extra, spared, f"{added}; does not fit, {gap}")


class Planned(NamedTuple):
    """A planned request.

    Attributes:
        planner: the planner of the request, with what the request leaves open filled in.
        estimate: estimate of the requested length, or of the longest that fits, or else of :data:`SHORT` tokens a rank.
        longest: tokens of the longest sequence that fits; 0 where none does.
        limit: what limits it.
        saving: the decision about attention's output; None where the request has one.
    """

    planner: Planner
    estimate: Estimate
    longest: int
    limit: str
    saving: Saving | None


def plan(request: Request, max_length: int | None = None, like: Planner | None = None) -> Planned:
    """Plan ``request``, at ``max_length`` or at the longest that fits; ``like`` has made its fake runs already.

    Raises:
        UserError: a setting that cannot run.
    """
    auto = request.options.checkpoint == "auto"
    planner = Planner(changed(request, checkpoint="layer") if auto else request, max_length, like=like)
    saving = None
    tokens = max_length or request.positions or LONGEST  # of the row that should fit
    # A layer has some sixteen [tokens, hidden] live at once. Where those may not fit, the plain step is run first.
    layer = 16 * planner.local(tokens) * request.batch * planner.counts.hidden * planner.setup.dtype.itemsize
    crowded = planner.at_least(tokens) + layer > request.device.memory
    if auto and (max_length is not None or not crowded):
        planner, saving = choose_attention_saved(planner, tokens, planner.estimate(tokens) if crowded else None)
    longest, limit = planner.longest(max_length)
    if auto and max_length is None and longest and (saving is None or not saving.chosen):
        planner, saving = choose_attention_saved(planner, longest, planner.estimate(longest))
        if saving.chosen:  # limited by something else
            longest, limit = planner.longest()
    short = max(SHORT * request.split, planner.least)
    return Planned(planner, planner.estimate(max_length or longest or short), longest, limit, saving)


def why_nothing_fits(request: Request, short: Estimate, limit: str) -> str:
    """The error where no length fits, from the result of :func:`plan`."""
    streams = can_stream(request) and not request.options.weights_on_host
    return (
        f"{request.model!r} does not fit on {request.gpus} x {request.device.name} at any length: it needs "
        f"{short.device.expected / 2**30:.1f} GiB of {request.device.memory / 2**30:.1f} GiB for a few tokens, most "
        f"of it {limit.partition(': ')[2]}; "
        + "offload frozen weights (--offload checkpoints,weights), " * streams
        + "shard it (--engine zero3 --gpus 8), "
        + "train adapters (--lora 16), " * (request.lora is None)
        + "or use a larger device"
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
    if setting == "cp_size" and request.options.saves_attention:
        request = changed(request, checkpoint="layer")  # a ring keeps no attention output
    powers = {2**power for power in range(request.gpus.bit_length()) if request.gpus % 2**power == 0}
    lengths = {}
    for size in sorted({*powers, request.gpus, request.split}):
        with suppress(UserError):
            lengths[size] = Planner(replace(request, **{setting: size}), like=planner).longest()[0]
    return lengths


def _checkpoint_notes(request: Request, counts: Counts) -> list[str]:
    """Notes on quantized checkpoints, and on experts that 4-bit loading leaves whole."""
    method = quantization_of(request.config)
    if request.qlora and method not in ("", "bitsandbytes"):
        return [f"the checkpoint is quantized ({method}), which --qlora does not load; the plan is of a 16-bit copy"]
    if request.qlora:
        whole = counts.large_experts + (0 if request.packs_experts else counts.experts)
        why = TOO_LARGE if request.packs_experts else why_experts_stay_whole(request.config) or "they are loaded whole"
        return [f"{whole / 1e9:,.1f}B weights of experts are not in 4 bits: {why}"] if whole else []
    if not method:
        return []
    return [
        f"the checkpoint is quantized ({method}); weights are counted in 16 bits, as training needs them "
        "(quantization_config: {dequantize: true})"
    ]
