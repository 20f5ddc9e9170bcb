"""Will it fit? The memory of a step on a device, term by term, and the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqtile._errors import UserError
from seqtile.memory.engines import BUFFERS, CONSTANTS, CONTEXT, offload_checkpoints, on_device, on_host
from seqtile.memory.flops import Work, count_work
from seqtile.memory.kernels import cpu_workspace, flash2_workspace, flash3_workspace
from seqtile.memory.lines import Lines, fit_lines
from seqtile.memory.phases import ATTENTION, BLOCK, BLOCK_AND_NORMS, HEAD, REST
from seqtile.memory.request import Request, attention_cannot_be_saved, check_request, check_split
from seqtile.memory.setup import Setup
from seqtile.memory.shapes import max_positions
from seqtile.memory.step import build
from seqtile.memory.structure import Counts, Depths, count_weights, find_depths
from seqtile.memory.tiles import head_tile, largest_tile, other_lengths, resolve
from seqtile.memory.track import CHECKPOINTS, GRADIENTS, KEPT, KERNELS, OPTIMIZER, WEIGHTS

MODEL_ERROR = 0.01
"""Largest error of the counted bytes, as measured on the CPU (docs/planning.md)."""

WORTH = 0.03
"""Share of a step that keeping attention's output must save to be chosen: below, a step varies by as much anyway."""

HOST_PROCESS = "host processes"

_STANDING = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS)
_NAMES = {ATTENTION: "attention working set", KERNELS: "attention working set", REST: "other activations"}
_BOUNDS = ("low", "expected", "high")


@dataclass(frozen=True)
class Bounds:
    """Bytes: at least, most likely, at most."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """The memory of one step of one length.

    Attributes:
        tokens: of each row.
        device: bytes on one rank's device at the peak of the step.
        host: bytes on the node's host.
        peak_at: the part of the step at whose peak that is.
        terms: bytes on the device at that point, by what they are for.
        host_terms: the same of the host.
        square: whether a ``[tokens, tokens]`` mask is built.
    """

    tokens: int
    device: Bounds
    host: Bounds
    peak_at: str
    terms: Mapping[str, float]
    host_terms: Mapping[str, float]
    square: bool


@dataclass(frozen=True)
class Saving:
    """Whether activation checkpoints keep attention's output, and why.

    Attributes:
        chosen: whether they do.
        more: bytes on the device that it adds to the expected peak; None where that was not looked at.
        share: of the step's operations that it saves.
        why: in words.
    """

    chosen: bool
    more: float | None
    share: float
    why: str


class Planner:
    """Everything about one request that does not depend on the length, and fake runs as they are needed."""

    def __init__(self, request: Request, max_length: int | None = None) -> None:
        check_request(request, max_length)
        self.request = request
        self.setup = request.setup()
        built = build(request.config, self.setup, "meta")
        self.built = built
        self.counts: Counts = count_weights(request.config, built.model)
        check_split(request, self.counts)
        self.depths: Depths = find_depths(request.config, built.model)
        flash = flash3_workspace if request.attention == "flash3" else flash2_workspace
        self.workspace = cpu_workspace if request.device_type == "cpu" else flash
        self._lines: dict[Setup, Lines] = {}

    def share(self, other: Planner) -> None:
        """Take the fake runs of a planner of the same model; runs are found by their settings."""
        self._lines.update(other._lines)

    def local(self, tokens: int) -> int:
        """Tokens of each row that one rank holds."""
        return -(-tokens // self.request.sp_size)

    def resolved(self, tokens: int) -> Setup:
        """The setup with the tiles that a rank's part of ``tokens`` is cut into."""
        rows = self.local(tokens) * self.request.batch
        kind = self.request.device_type
        tile = largest_tile(self.built, self.setup, rows, kind) if self.setup.tile is not None else None
        head = self.request.loss_tile or head_tile(self.built, self.setup, rows, kind)
        return resolve(replace(self.setup, loss_tile=head), rows, tile)

    def lines(self, tokens: int) -> Lines:
        """What the step holds by tokens per rank, from fake runs with the tiles of ``tokens``."""
        setup = self.resolved(tokens)
        for known, lines in self._lines.items():
            if replace(known, tile=setup.tile, loss_tile=setup.loss_tile) == setup and _alike(known, setup):
                return lines
        if setup not in self._lines:
            local = self.local(tokens)
            lengths = other_lengths(setup, local)
            lines = fit_lines(self.request.config, setup, self.depths, lengths, self.workspace)
            if lines.square:
                lengths = other_lengths(setup, local, points=3)
                lines = fit_lines(self.request.config, setup, self.depths, lengths, self.workspace)
            self._lines[setup] = lines
        return self._lines[setup]

    def estimate(self, tokens: int, lines: Lines | None = None) -> Estimate:
        """Memory of a step of ``tokens`` tokens per row; ``lines`` of another length save the fake runs."""
        lines = self.lines(tokens) if lines is None else lines
        local = self.local(tokens)
        best: dict[str, tuple[float, str, dict[str, float], float]] = {}
        for phase, terms in lines.at(local).items():
            counted = {**terms, "tokens": float(local * self.request.batch)}
            for bound in _BOUNDS:
                found = on_device(self.request, self.counts, counted, phase)
                moved = 0.0
                if "checkpoints" in self.request.offload:
                    flight = getattr(CONSTANTS["in flight"], bound)
                    moved = offload_checkpoints(found, self.depths.layers, flight)
                total = self._finish(found, bound)
                if bound not in best or total > best[bound][0]:
                    best[bound] = (total, phase, found, moved)
        total, phase, found, _ = best["expected"]
        parts = lines.at(local).values()
        kept = {name: max(terms.get(name, 0.0) for terms in parts) for name in (CHECKPOINTS, KEPT)}
        host_terms = on_host(self.request, self.counts, kept)
        processes = CONSTANTS["host process"]
        counted_host = sum(host_terms.values())
        host = [counted_host + getattr(processes, bound) * self.request.gpus for bound in _BOUNDS]
        return Estimate(
            tokens=tokens,
            device=Bounds(best["low"][0], total, best["high"][0]),
            host=Bounds(*host),
            peak_at=name_phase(phase, self.depths.layers),
            terms=_named(found, self.setup),
            host_terms={**host_terms, HOST_PROCESS: processes.expected * self.request.gpus},
            square=lines.square,
        )

    def _finish(self, found: dict[str, float], bound: str) -> float:
        """Add context and allocator to ``found``; returns the total."""
        activations = sum(value for name, value in found.items() if name not in _STANDING)
        error = {"low": -MODEL_ERROR, "expected": 0.0, "high": MODEL_ERROR}[bound]
        context: float = getattr(CONSTANTS["context"], bound) + activations * getattr(CONSTANTS["fragmentation"], bound)
        if self.request.gpus > 1:
            context += getattr(CONSTANTS["communicator"], bound)
        found[CONTEXT] = context + activations * error
        return sum(found.values())

    def fits(self, estimate: Estimate) -> bool:
        """Whether the expected memory is there, on the device and, where it is given, on the host."""
        host = self.request.host_memory
        return estimate.device.expected <= self.request.device.memory and (
            host is None or estimate.host.expected <= host
        )

    def surely_fits(self, estimate: Estimate) -> bool:
        """Whether the high estimate is there too."""
        host = self.request.host_memory
        return estimate.device.high <= self.request.device.memory and (host is None or estimate.host.high <= host)

    def sure(self) -> int:
        """The longest row that fits at the high estimate too, from the fake runs there are."""
        lines = next(iter(self._lines.values()))
        grain = 128 * self.request.sp_size
        low, high = 0, (max_positions(self.request.config) or 2**26) // grain + 1
        while high - low > max(1, low // 512):
            middle = (low + high) // 2
            low, high = (middle, high) if self.surely_fits(self.estimate(middle * grain, lines)) else (low, middle)
        return _round(low * grain, grain)

    def longest(self) -> tuple[int, str]:
        """The longest row that fits (0 if none does), and what limits it."""
        positions = max_positions(self.request.config)
        top = positions or 2**26
        grain = 128 * self.request.sp_size
        reference = min(top, 131072)
        for _ in range(3):  # the tiles, and so the line, depend a little on the length
            lines = self.lines(reference)

            def fits(units: int, lines: Lines = lines) -> bool:
                return self.fits(self.estimate(min(units * grain, top), lines))

            low, high = 0, max(1, top // grain)
            if fits(high):
                low = high
            while high - low > max(1, low // 512):
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            if low == 0:
                break
            found = min(low * grain, top)
            if _alike(self.resolved(found), self.resolved(reference)):
                break
            reference = found
        if low == 0:
            return 0, self._limit(self.estimate(grain, lines))
        longest = _round(low * grain, grain) if low * grain < top else top
        beyond = self.estimate(min(longest + max(grain, longest // 256), 2**27), lines)
        return longest, "positions" if longest >= top and positions else self._limit(beyond)

    def _limit(self, estimate: Estimate) -> str:
        host = self.request.host_memory
        if host is not None and estimate.host.expected > host:
            terms, place = dict(estimate.host_terms), "host memory"
        else:
            terms, place = dict(estimate.terms), "device memory"
        return f"{place}: {max(terms, key=lambda name: terms[name])}"

    def work(self, tokens: int) -> Work:
        """Operations of a step of ``tokens`` tokens per row."""
        return count_work(self.request, self.counts, tokens)


def _alike(one: Setup, other: Setup) -> bool:
    """Whether tiles are equal within a twentieth, which moves a peak by less than a hundredth."""
    if (one.tile is None) != (other.tile is None):
        return False
    tiles = [(one.loss_tile, other.loss_tile)]
    if isinstance(one.tile, int) and isinstance(other.tile, int):
        tiles.append((one.tile, other.tile))
    return all(abs(a - b) <= 0.05 * max(a, b) for a, b in tiles)


def name_phase(phase: str, layers: int) -> str:
    """``"backward of attention in the last layer"`` of ``"attention#-1, backward"``."""
    part, _, when = phase.partition(", ")
    part, _, number = part.partition("#")
    if not when:
        return part
    place = ""
    if number:
        index = int(number) % layers
        words = {0: "the first layer", layers - 1: "the last layer"}
        place = f" in {words.get(index, f'layer {index + 1} of {layers}')}"
    return f"{when} of {part}{place}"


def _named(found: Mapping[str, float], setup: Setup) -> dict[str, float]:
    """Terms under the names that the table shows."""
    names: dict[str, str] = dict(_NAMES)
    names[BLOCK] = names[BLOCK_AND_NORMS] = "MLP tile" if setup.tile is not None else "MLP"
    names[HEAD] = "loss tile" if setup.loss == "tiled" else "logits and loss"
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


def choose(planner: Planner, estimate: Estimate) -> tuple[Planner, Estimate, Saving]:
    """Whether to keep attention's output: where it saves :data:`WORTH` of the step and the high estimate fits.

    Args:
        planner: with checkpoints that keep layer inputs only.
        estimate: of the length that is planned.

    Returns:
        The planner to go on with, its estimate, and why.
    """
    request, tokens = planner.request, estimate.tokens
    kept = replace(request, checkpoint="attention-saved")
    before = planner.work(tokens).total
    share = 1 - count_work(kept, planner.counts, tokens).total / before
    refusal = attention_cannot_be_saved(request)
    if refusal is not None:
        return planner, estimate, Saving(False, None, share, refusal)
    if share < WORTH:
        why = f"would save {share:.1%} of the step, less than the {WORTH:.0%} that count; not chosen"
        return planner, estimate, Saving(False, None, share, why)
    other = Planner(kept)
    found = other.estimate(tokens)
    more = found.device.expected - estimate.device.expected
    words = f"{max(more, 0.0) / 2**30:,.2f} GiB more"
    if found.host.expected > estimate.host.expected:
        words += f" and {(found.host.expected - estimate.host.expected) / 2**30:,.2f} GiB more on the host"
    if other.surely_fits(found):
        return other, found, Saving(True, more, share, f"{words}, saves {share:.0%} of the step; fits, chosen")
    if other.fits(found):
        beyond = "fits at the expected estimate, not at the high one; --checkpoint attention-saved takes it"
    elif found.device.expected > request.device.memory:
        over = (found.device.expected - request.device.memory) / 2**30
        beyond = f"does not fit, {over:,.2f} GiB too much on the device"
    else:
        beyond = "does not fit into the host's memory"
    return planner, estimate, Saving(False, more, share, f"{words}, would save {share:.0%} of the step; {beyond}")


def plan(request: Request, max_length: int | None = None) -> tuple[Planner, Estimate, int, str, Saving | None]:
    """Plan ``request``: its planner, the estimate at ``max_length`` or at the longest that fits, that, and its limit.

    Last comes what was decided about attention's output, where the request leaves it to the plan.

    Raises:
        UserError: a setting that cannot run, or nothing that fits.
    """
    auto = request.checkpoint == "auto"
    planner = Planner(replace(request, checkpoint="layer") if auto else request, max_length)
    longest, limit = planner.longest()
    if max_length is None and longest == 0:
        short: Any = planner.estimate(128 * request.sp_size)
        raise UserError(
            f"{request.model!r} does not fit {request.gpus} x {request.device.name} at any length: "
            f"{short.device.expected / 2**30:.1f} GiB of {request.device.memory / 2**30:.1f} GiB before the first "
            f"tokens, most of it {limit.partition(': ')[2]}; shard it (--engine zero3 --gpus 8), train adapters "
            "(--lora r=16) or take a larger device"
        )
    estimate = planner.estimate(max_length or longest)
    if not auto:
        return planner, estimate, longest, limit, None
    chosen, estimate, saving = choose(planner, estimate)
    if saving.chosen:
        longest, limit = chosen.longest()
    return chosen, estimate, longest, limit, saving
