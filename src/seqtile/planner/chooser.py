"""The fastest settings with which a length fits.

Base settings bound what a layer holds while it runs, and say where checkpoints and frozen weights are: whole layers,
minimal memory or chunks, on the device or the host, in tiles of ``"auto"`` or smaller ones. The memory that they leave
is spent on computing less again: attention's output is saved, gate and up are kept, layers have no checkpoint, for as
many layers or tiles as fit. Each base, so spent, has a time (:mod:`seqtile.planner.step_time`); the least is chosen.

A fake run of a step takes a second, and a base needs several. So bases are planned in the order of the least time that
arithmetic expects of them, as far as that is better than the best that was planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import Any

from seqtile._errors import RunError, UserError
from seqtile.devices import GIB
from seqtile.headwise.install_heads import runs_on_some_heads
from seqtile.options import DEFAULTS, WHOLE_LAYER, TilingOptions, changed, checkpoint_of, layer_policies, offload_of
from seqtile.planner.estimate import Estimate
from seqtile.planner.flops import count_work, is_in_chunks
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.memory_plan import WORTH, Planner
from seqtile.planner.request import Request, attention_cannot_be_saved
from seqtile.planner.sharding_terms import CONSTANTS
from seqtile.planner.step_time import spoken, step_seconds
from seqtile.planner.techniques import CHUNKS, CHUNKS_OF_SEGMENTS, MINIMAL_MEMORY, can_stream
from seqtile.rules import refusal
from seqtile.state.state_layers import can_carry

SMALLEST_TILE = 128
"""Tokens; tiles are whole multiples of as many, and smaller ones have products that no device is fast at."""

TILE_STEP = 4
"""A smaller tile is a quarter: every try that fails costs a step, on several ranks a restart."""

CHOSEN = ("tile", "loss_tile", "keep", "checkpoint", "offload", "blocks", "heads", "state", "chunk", "segment")
"""The options that a length decides."""

GAIN = 0.005
"""Share of a step that memory has to buy, or other settings have to save: below, a step varies by as much anyway."""

SLOW_GAIN = 0.15
"""Share that minimal memory has to be able to save to be planned beside what fits without it: its fake runs take half a
minute for a model of 8B, since each group of heads has operators of its own."""

UNTILED_TERMS = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS)
"""Terms of a plan that do not depend on the size of tiles."""

HIDDEN_SIZES = 7
"""Hidden states that a decoder layer without a checkpoint keeps, beside gate and up: 7.6 of Llama-8B, 9.8 with
adapters. A first guess, which fake runs correct."""


def fixed_settings(
    options: TilingOptions, given: Container[str] = (), *, checkpoint: str | None = None
) -> dict[str, Any]:
    """The settings that are not to be chosen: those that differ from their defaults, and those given at a default.

    ``plan``, ``fit`` and ``train`` differ in their default of ``checkpoint`` alone.

    Args:
        options: as the user wrote them.
        given: names of options that are fixed at their default too.
        checkpoint: the default of ``checkpoint``.
    """
    defaults = {**DEFAULTS, "checkpoint": checkpoint}
    names = [name for name in CHOSEN if name in given or getattr(options, name) != defaults[name]]
    if not options.tiled:
        names += ["tile", "keep"]
    if "vision" in given:
        names.append("vision")
    if options.checkpoint is None and options.offload_room:  # which means "layer"
        names = [name for name in names if name != "checkpoint"]
    return {name: getattr(options, name) for name in names}


@dataclass(frozen=True)
class Chosen:
    """The result of :func:`choose_settings`.

    Attributes:
        settings: the chosen settings; tiles are numbers of tokens, except a given rule and ``tile="auto"`` where it
            leaves the blocks untiled.
        planner, estimate: the plan of these settings.
        seconds: estimated time of a step.
        reasons: why each setting was chosen, by its name.
        sure: whether the high estimate fits too.
    """

    settings: TilingOptions
    planner: Planner
    estimate: Estimate
    seconds: float
    reasons: Mapping[str, str]
    sure: bool


class DoesNotFit(RunError):
    """No settings make a length fit.

    Attributes:
        planner: the planner of the settings with which the longest row fits.
        longest: tokens of the longest row; 0 if none fits.
    """

    def __init__(self, message: str, planner: Planner, longest: int) -> None:
        super().__init__(message)
        self.planner, self.longest = planner, longest


@dataclass(frozen=True)
class _Plan:
    settings: TilingOptions
    planner: Planner
    estimate: Estimate
    seconds: float
    is_outlook: bool

    @property
    def fits(self) -> bool:
        fits = self.planner.fits if self.is_outlook else self.planner.fits_at_the_high_estimate
        return fits(self.estimate)

    @property
    def spare(self) -> float:
        """Bytes of the device that the estimate leaves."""
        return self.planner.request.device.memory - self.device_bytes

    @property
    def device_bytes(self) -> float:
        """Of the device, by the estimate that has to fit."""
        return self.estimate.device.expected if self.is_outlook else self.estimate.device.high


def choose_settings(
    request: Request, tokens: int, fixed: Mapping[str, Any], *, can_offload: bool, checkpointed: bool = False,
    like: Planner | None = None, outlook: bool = False,
) -> Chosen:  # fmt: skip
    """The settings with which a step of rows of ``tokens`` tokens takes least time, and fits at the high estimate.

    Where none fits at the high one: the least memory of those that fit at the expected one, without slow tiles.
    Deterministic: the same for the same arguments.

    Args:
        request: model, device and engine.
        tokens: the length.
        fixed: settings that stay, from :func:`fixed_settings`.
        can_offload: whether checkpoints can be moved to the host.
        checkpointed: whether every layer is checkpointed whatever is chosen.
        like: a plan of the same model, whose fake runs are used again.
        outlook: whether the expected estimate is enough, and minimal memory, which is slow to plan, is tried last.

    Raises:
        DoesNotFit: names the longest sequence that fits with any settings.
    """
    return _Chooser(request, tokens, fixed, can_offload, checkpointed, like, outlook).choose()


class _Chooser:
    """One choice: see :func:`choose_settings`."""

    def __init__(
        self, request: Request, tokens: int, fixed: Mapping[str, Any], can_offload: bool, checkpointed: bool,
        like: Planner | None, outlook: bool,
    ) -> None:  # fmt: skip
        self.request, self.tokens, self.fixed = request, tokens, fixed
        self.can_offload, self.checkpointed, self.outlook = can_offload, checkpointed, outlook
        sizes = ("tile", "loss_tile") if request.options.loss else ("tile",)
        tiles = {name: fixed.get(name, "auto") for name in sizes}
        self.first = Planner(changed(request, checkpoint="layer", keep=0.0, **tiles), tokens, like=like)
        resolved = self.first.resolved(tokens).options
        tiles = {name: getattr(resolved, name) for name in sizes}
        if can_carry(self.first.built.model) and fixed.get("chunk") is None:
            tiles["state"] = "auto"  # at the same products
        self.auto = replace(request.options, **{name: DEFAULTS[name] for name in CHOSEN} | tiles)
        self.counts = self.first.counts
        self.layers = self.counts.layers
        self.possible = [*self.bases()]
        if not self.possible:
            raise UserError(
                "fit.settings-exclude-each-other",
                "got settings that exclude each other with this model and device; drop some of them",
            )

    def choose(self) -> Chosen:
        best, tried = self.best()
        if best is not None:
            return self.chosen(best, not self.outlook)
        possible = [plan for plan in tried if plan.planner.fits(plan.estimate)]
        if not possible:
            raise self.nothing_fits(tried)
        with_auto_tiles = [plan for plan in possible if plan.settings.tile == self.auto.tile] or possible
        return self.chosen(min(with_auto_tiles, key=lambda plan: plan.estimate.device.expected), False)

    def best(self) -> tuple[_Plan | None, list[_Plan]]:
        """The fastest plan that fits, and the first plan of each base."""
        tried: list[_Plan] = []
        best: _Plan | None = None
        # Of equal ones the first, which is simpler.
        for least, base in sorted(((self.worth_less_than(base), base) for base in self.possible), key=itemgetter(0)):
            if best is not None and least >= best.seconds:
                continue
            if self.at_least(base) > self.request.device.memory:
                continue
            if any(smaller_tiles_are_not_enough(plan, base) for plan in tried):
                continue
            plan = self.first_plan(base)
            tried.append(plan)
            if plan.fits:
                spent = self.spend(plan)
                best = spent if best is None or spent.seconds < best.seconds else best
        return best, tried

    def worth_less_than(self, base: TilingOptions) -> float:
        """Seconds from which on a plan of this base can pay off: skip it where a choice takes less."""
        slow = base.heads is not None and "heads" not in self.fixed
        if slow and self.outlook:
            return math.inf
        return self.least_seconds(base) / (1 - (SLOW_GAIN if slow else GAIN))

    def bases(self) -> Iterator[TilingOptions]:
        """Settings that bound memory, with nothing spent; what is given stays as it is."""
        given, auto = self.fixed, self.auto
        # With Ulysses passes divide the heads that a rank has after the exchange, which no plan counts.
        by_heads = self.request.split == 1 and runs_on_some_heads(self.first.built.model)
        minimal = {**MINIMAL_MEMORY.changes} if by_heads else {**MINIMAL_MEMORY.changes, "heads": None}
        bounds: tuple[dict[str, Any], ...] = ({}, minimal, {**CHUNKS.changes}, {**CHUNKS_OF_SEGMENTS.changes})
        streams = self.can_offload and can_stream(self.request)
        hosts = [(False, False), (True, False), (False, True), (True, True)]
        hosts = [host for host in hosts if (self.can_offload or not host[0]) and (streams or not host[1])]
        hosts = [host for host in hosts if self.host_has_room(*host)]
        seen: list[TilingOptions] = []
        for divisor, (checkpoints, weights), bound in product((1, TILE_STEP, TILE_STEP**2), hosts, bounds):
            if divisor > 1 and (bound is not minimal or (checkpoints, weights) != hosts[-1]):
                continue  # smaller tiles are for where nothing else is left
            settings = replace(auto, checkpoint="layer", offload=offload_of(checkpoints, weights), **bound)
            if divisor > 1:
                whole = auto.tile if isinstance(auto.tile, int) else self.first.local(self.tokens) * self.request.batch
                settings = replace(settings, **smaller_tiles(replace(auto, tile=whole), divisor))
            settings = replace(settings, **given)
            if not self.request.options.tiled:
                settings = settings.without_blocks()
            if settings.checkpoint is None and settings.offload_room:
                continue
            if "chunk" in bound and not is_in_chunks(settings, self.tokens, self.request.batch):
                continue
            # Where what is given excludes itself, the plan of the simplest settings says so in a sentence.
            simplest = not (bound or checkpoints or weights)
            if (
                settings.chunk is not None
                and not simplest
                and refusal(replace(self.request, options=settings).combination())
            ):
                continue
            if settings not in seen:
                seen.append(settings)
                yield settings

    def host_has_room(self, checkpoints: bool, weights: bool) -> bool:
        """Whether any checkpoint, and all frozen weights, have room on the host where its memory is known."""
        offload = offload_of(checkpoints, weights)
        planner = self.planner_of(replace(self.auto, checkpoint="layer", offload=offload))
        room = planner.host_room()
        return room is None or room > 0 or not offload

    def buyable(self, settings: TilingOptions) -> tuple[str, ...]:
        """What memory can buy in these settings: attention's output, layers without a checkpoint, gate and up."""
        request, free = replace(self.request, options=settings), []
        if settings.chunk is not None:
            return ()
        if "checkpoint" not in self.fixed:
            saved = count_work(changed(request, checkpoint="attention-saved"), self.counts, self.tokens).total
            work = count_work(request, self.counts, self.tokens).total
            if attention_cannot_be_saved(request) is None and 1 - saved / work >= WORTH:
                free.append("attention")
            if not (self.checkpointed or ("offload" in self.fixed and settings.offload_room)):
                free.append("layers")
        # Smaller tiles are for where memory is short.
        tiled = isinstance(settings.tile, int) and settings.tile in (self.auto.tile, self.fixed.get("tile"))
        fused = tiled and any(block.path == "fused" for block in self.first.built.blocks)
        return (*free, "keep") if "keep" not in self.fixed and fused else tuple(free)

    def with_all(self, settings: TilingOptions, on: str) -> TilingOptions:
        """``settings`` with one of these bought for every layer and tile."""
        if on == "keep":
            return replace(settings, keep=1.0)
        return self.with_layers(settings, on, self.layers)

    def with_layers(self, settings: TilingOptions, on: str, layers: int) -> TilingOptions:
        """``settings`` with attention's output saved in, or no checkpoint around, the last ``layers`` layers."""
        policies = list(layer_policies(settings.checkpoint, self.layers))
        new = "attention-saved" if on == "attention" else None
        for number in range(self.layers - layers, self.layers):
            policies[number] = policies[number] if policies[number] is None else new
        return self.with_checkpoint(settings, checkpoint_of(policies))

    def with_checkpoint(self, settings: TilingOptions, checkpoint: str | None) -> TilingOptions:
        """``settings`` with other checkpoints; without any, none wait on the host."""
        if checkpoint is None and "offload" not in self.fixed:
            settings = replace(settings, offload=offload_of(checkpoints=False, weights=settings.weights_on_host))
        return replace(settings, checkpoint=checkpoint)

    def gain(self, settings: TilingOptions, on: str) -> float:
        """Seconds that it saves."""
        return self.seconds(settings) - self.seconds(self.with_all(settings, on))

    def cost(self, settings: TilingOptions, on: str) -> float:
        """Bytes of the device that it takes, by arithmetic."""
        rows = self.first.local(self.tokens) * self.request.batch
        itemsize = 2 if self.first.setup.autocast else self.first.setup.dtype.itemsize
        if on == "attention":
            return 0.0 if settings.offload_room else self.first.attention_outputs(self.tokens)
        if on == "keep":
            widths = 2 * self.counts.largest_product // self.counts.hidden
            return float(self.layers * rows * widths * itemsize)
        inputs = 0 if settings.offload_room else 1
        return float(self.layers * rows * (HIDDEN_SIZES - inputs) * self.counts.hidden * itemsize)

    def least_seconds(self, base: TilingOptions) -> float:
        """The time that arithmetic allows a base: with all bought that has room beside weights and checkpoints."""
        settings, spare = base, self.request.device.memory - self.at_least(base)
        for _ in self.buyable(base):
            offers = self.by_worth(settings)
            if not offers:
                break
            gain, cost, on = offers[0]
            if cost > max(0.0, spare):
                return self.seconds(settings) - gain * max(0.0, spare) / cost
            settings, spare = self.with_all(settings, on), spare - cost
        return self.seconds(settings)

    def by_worth(self, settings: TilingOptions) -> list[tuple[float, float, str]]:
        """Seconds that each of these saves and bytes that it takes, most seconds for a byte first."""
        offers = [(self.gain(settings, on), self.cost(settings, on), on) for on in self.buyable(settings)]
        offers = [offer for offer in offers if offer[0] >= GAIN * self.seconds(settings)]
        return sorted(offers, key=lambda offer: offer[1] / offer[0])

    def first_plan(self, base: TilingOptions) -> _Plan:
        """The first plan of a base: with all bought that is free or surely fits, or else with nothing."""
        settings, needed = base, self.at_least(base)
        if base.heads is not None:  # slow to plan, and taken where memory is short
            return self.plan(base)
        while offers := self.by_worth(settings):
            _, cost, on = offers[0]
            if cost > 0 and needed + cost > self.request.device.memory / 2:
                break
            settings, needed = self.with_all(settings, on), needed + cost
        plan = self.plan(settings)
        return plan if plan.fits or settings == base else self.plan(base)

    def spend(self, plan: _Plan) -> _Plan:
        """``plan`` with the memory that is left spent, each time on what buys most for a byte."""
        done: set[str] = set()
        while offers := [offer for offer in self.by_worth(plan.settings) if offer[2] not in done]:
            gain, cost, on = offers[0]
            done.add(on)
            if cost > 0 and gain * plan.spare / cost < GAIN * plan.seconds:
                continue
            plan = self.keep_tiles(plan) if on == "keep" else self.most_layers(plan, on, cost / self.layers)
        return plan

    def most_layers(self, plan: _Plan, on: str, each: float) -> _Plan:
        """``plan`` with as many layers of one kind as fit, which take about ``each`` bytes."""
        plan_of: Callable[[int], _Plan] = lambda layers: self.plan(self.with_layers(plan.settings, on, layers))  # noqa: E731
        guess = self.layers if each <= 0 else min(self.layers, max(1, int(plan.spare // each)))
        if on == "attention" and guess:  # layers without a checkpoint come first
            guess = min(self.layers, guess + layer_policies(plan.settings.checkpoint, self.layers).count(None))
        best, most, too_many = plan, 0, self.layers + 1
        while most < guess < too_many:
            tried = plan_of(guess)
            if tried.fits:
                best, most = tried, guess
            else:
                too_many = guess
            # What a layer takes by the two plans that are known is better than the first guess.
            each = (tried.device_bytes - plan.device_bytes) / guess
            guess = min(too_many - 1, int(plan.spare // each) if each > 0 else self.layers)
            if guess >= too_many or (guess <= most and not tried.fits):
                guess = (most + too_many) // 2
        return best

    def keep_tiles(self, plan: _Plan) -> _Plan:
        """``plan`` with gate and up of as many tiles kept as fit."""
        rows = self.first.local(self.tokens) * self.request.batch
        tiles = -(-rows // plan.settings.tile)  # type: ignore[operator]
        best, low, high = plan, 0, tiles + 1
        guess = tiles
        while high - low > 1:
            share = math.ceil(guess / tiles * 10_000) / 10_000
            tried = self.plan(replace(plan.settings, keep=share))
            if tried.fits:
                best, low = tried, guess
            else:
                high = guess
            guess = (low + high) // 2
        return best

    def plan(self, settings: TilingOptions) -> _Plan:
        planner = Planner(replace(self.request, options=settings), self.tokens, like=self.first)
        estimate = planner.estimate(self.tokens)
        self.first.share(planner)
        return _Plan(settings, planner, estimate, planner.seconds(self.tokens, estimate.moved), self.outlook)

    def at_least(self, settings: TilingOptions) -> float:
        return self.planner_of(settings).at_least(self.tokens)

    def planner_of(self, settings: TilingOptions) -> Planner:
        """A planner of ``settings``, of which no fake run has run."""
        return Planner(replace(self.request, options=settings), self.tokens, like=self.first)

    def seconds(self, settings: TilingOptions) -> float:
        """By arithmetic: all that may wait on the host does."""
        keep = self.kept(settings) if isinstance(settings.tile, int) and settings.tiled else None
        return step_seconds(replace(self.request, options=settings), self.counts, self.tokens, keep)

    def kept(self, settings: TilingOptions) -> float:
        """Share of the tiles that keep gate and up; a rule that is given comes to one."""
        if isinstance(settings.keep, str):
            return float(self.planner_of(settings).resolved(self.tokens).options.keep)
        return settings.keep

    def chosen(self, plan: _Plan, sure: bool) -> Chosen:
        return Chosen(plan.settings, plan.planner, plan.estimate, plan.seconds, self.reasons(plan), sure)

    def nothing_fits(self, tried: list[_Plan]) -> DoesNotFit:
        """The error, with the longest row that fits with any settings."""
        request = self.request
        tightest = {(base.offload, base.chunk, base.segment): base for base in self.possible}  # the last of each
        planners = [self.planner_of(base) for base in tightest.values()]
        planners.sort(key=lambda planner: planner.furthest, reverse=True)
        longest, limit, planner = 0, "", planners[0]
        for other in planners:
            if other.furthest <= longest:
                break
            other.share(self.first)
            length, limited = other.longest(None if other.at_least(1) > request.device.memory else self.tokens)
            self.first.share(other)
            if length > longest or not limit:
                longest, limit, planner = length, limited, other
        least = min([plan.estimate.device.expected for plan in tried] or map(self.at_least, self.possible))
        fits = f"the longest that fits is {longest:,} (max_length: {longest})" if longest else "no length fits"
        return DoesNotFit(
            f"{self.tokens:,} tokens per sequence do not fit on {_devices(request)} even with the tightest settings: "
            f"{least / GIB:,.2f} GiB of {request.device.memory / GIB:,.2f} GiB ({limit}); {fits}",
            planner, longest,
        )  # fmt: skip

    def reasons(self, plan: _Plan) -> dict[str, str]:
        """Why each setting was taken, with what others would cost."""
        settings = plan.settings
        small = settings.tile not in (self.auto.tile, self.fixed.get("tile"))
        sizes = "larger tiles do not fit" if small else "the rule of auto"
        moved = ["checkpoints take too much of the device"] * bool(settings.offload_room)
        moved += ["frozen weights leave too little of it"] * settings.weights_on_host
        buys = "what that frees is needed, or buys more time than it takes"
        reasons = {
            "checkpoint": "; ".join([f"{spoken(plan.seconds)} a step by estimate", *self.other_checkpoints(plan)]),
            "keep": f"{self.kept(settings):.0%} of the tiles are not computed again",
            "offload": ", and ".join(moved) or "not needed",
            "tile": "smaller tiles would not lower the peak at this length" if settings.tile == "auto" else sizes,
            "loss_tile": sizes,
            "blocks": buys if settings.blocks == WHOLE_LAYER else "more is not needed",
            "heads": "all at once, as they fit" if settings.heads is None else buys,
        }  # fmt: skip
        if not settings.keep:
            reasons["keep"] = f"the memory that is left would save less than {GAIN:.1%} of a step"
        if settings.loss is None:
            del reasons["loss_tile"]
        if settings.chunk is not None:
            reasons["chunk"] = "layers run on one chunk at a time; whole they do not fit, or take longer"
            reasons["segment"] = "fewer layer inputs are kept" if settings.segment > 1 else "one layer at a time fits"
        if settings.state is not None:
            reasons["state"] = "layers with a state run one tile at a time, with the same FLOPs"
        if "keep" not in self.fixed and not isinstance(settings.tile, int):
            del reasons["keep"]
        return {name: "as given" if name in self.fixed else why for name, why in reasons.items()}

    def gains(self, plan: _Plan, word: str) -> bool:
        """Whether a checkpoint of all layers was open to choice, and worth it."""
        on = "layers" if word == "none" else "attention"
        return any(offer[2] == on for offer in self.by_worth(plan.settings))

    def other_checkpoints(self, plan: _Plan) -> list[str]:
        """What the next faster and the next slower checkpoints of all layers would take."""
        if plan.settings.chunk is not None or "checkpoint" in self.fixed:
            return []
        policies: tuple[str | None, ...] = (None, "attention-saved", "layer")[self.checkpointed :]
        seconds = {policy or "none": self.seconds(self.with_checkpoint(plan.settings, policy)) for policy in policies}
        faster = [word for word in seconds if seconds[word] < plan.seconds and word != plan.settings.checkpoint]
        slower = [word for word in seconds if seconds[word] > plan.seconds and word != plan.settings.checkpoint]
        too_large = [word for word in faster[-1:] if self.gains(plan, word)]
        return [
            *(f"{word} would take {spoken(seconds[word])}, but does not fit" for word in too_large),
            *(f"{word} would take {spoken(seconds[word])}" for word in slower[:1]),
        ]


def smaller_tiles_are_not_enough(plan: _Plan, base: TilingOptions) -> bool:
    """Whether ``base`` differs from ``plan`` by smaller tiles only, while its untiled terms alone exceed the device."""
    sizes: dict[str, Any] = {"tile": plan.settings.tile, "loss_tile": plan.settings.loss_tile}
    if replace(base, **sizes) != plan.settings:
        return False
    held = sum(plan.estimate.terms.get(name, 0.0) for name in UNTILED_TERMS) + CONSTANTS["context"].expected
    return held > plan.planner.request.device.memory


def smaller_tiles(settings: TilingOptions, times: int) -> dict[str, Any]:
    """Tiles of ``settings`` that are ``times`` smaller; a rule stays."""
    both = {"tile": settings.tile, "loss_tile": settings.loss_tile}
    return {
        name: min(size, max(SMALLEST_TILE, size // times)) if isinstance(size, int) else size
        for name, size in both.items()
    }


def would_avoid(request: Request, settings: TilingOptions, tokens: int, short: int) -> tuple[Estimate, str | None]:
    """The estimate of ``settings``, and what would be chosen for a device that is full ``short`` bytes below it."""
    planner = Planner(replace(request, options=settings), tokens)
    now = planner.estimate(tokens)
    smaller = replace(request, device=replace(request.device, memory=int(now.device.high) - short))
    can_offload = request.host_memory is not None
    best, _ = _Chooser(smaller, tokens, {}, can_offload, checkpointed=False, like=planner, outlook=False).best()
    if best is None:
        return now, None
    less = (now.device.expected - best.estimate.device.expected) / GIB
    by_plan = f"{less:,.2f} GiB less, {spoken(best.seconds)} a step, by the plan"
    return now, f"{changes(settings, best.settings)} ({by_plan})"


def changes(settings: TilingOptions, changed_settings: TilingOptions) -> str:
    """The differences, as keys and values of a recipe."""
    keys = []
    for name in CHOSEN:
        value = getattr(changed_settings, name)
        if value != getattr(settings, name):
            keys.append(f"{name}: {'none' if value is None else str(value).lower()}")
    return ", ".join(keys)


def _devices(request: Request) -> str:
    return f"{request.gpus} x {request.device.name}" if request.gpus > 1 else request.device.name
