"""Candidate settings for a length, fastest first.

:data:`LADDER` is that order. A plan goes down it until the length fits (:func:`choose_rung`); a run that is out of
memory goes on from where it stands (:func:`tighter`). What spends spare memory on speed (``keep``) is tried on the rung
that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqtile._errors import RunError
from seqtile.devices import GIB
from seqtile.headwise.install_heads import runs_on_some_heads
from seqtile.options import DEFAULTS, TilingOptions, changed, offload_of
from seqtile.planner.estimate import Estimate
from seqtile.planner.flops import count_work, is_in_chunks
from seqtile.planner.memory_plan import WORTH, Planner
from seqtile.planner.request import Request, attention_cannot_be_saved
from seqtile.planner.techniques import (
    ATTENTION_SAVED,
    CHECKPOINTS_ON_HOST,
    CHUNKS,
    CHUNKS_OF_SEGMENTS,
    LAYER_CHECKPOINTS,
    MINIMAL_MEMORY,
    WEIGHTS_ON_HOST,
    Dial,
    can_stream,
)
from seqtile.rules import refused
from seqtile.state.state_layers import can_carry

SMALLEST_TILE = 128
"""Tokens; tiles are whole multiples of as many, and smaller ones have products that no device is fast at."""

TILE_STEP = 4
"""A smaller tile is a quarter: every try that fails costs a step, on several ranks a restart."""

KEEPS = (1.0, 0.5)
"""Fractions of the tiles that keep gate and up, where memory is left."""


CHOSEN = ("tile", "loss_tile", "keep", "checkpoint", "offload", "blocks", "heads", "state", "chunk", "segment")
"""The options that a length decides."""


@dataclass(frozen=True)
class Rung:
    """One step down.

    Attributes:
        cost: in time, as a phrase.
        techniques: what is on.
        divisor: tiles are as many times smaller than those of ``"auto"``.
    """

    cost: str
    techniques: tuple[Dial, ...] = ()
    divisor: int = 1

    @property
    def checkpoint(self) -> str | None:
        """``checkpoint`` of :class:`seqtile.options.TilingOptions`."""
        return next(
            (technique.changes["checkpoint"] for technique in self.techniques if "checkpoint" in technique.changes),
            None,
        )

    @property
    def offload(self) -> bool:
        """Whether it waits on the host."""
        return CHECKPOINTS_ON_HOST in self.techniques

    @property
    def weights_on_host(self) -> bool:
        """Whether frozen weights wait on the host."""
        return WEIGHTS_ON_HOST in self.techniques

    @property
    def minimal_memory(self) -> bool:
        """Whether the rest of the layer runs in tiles too, and attention one group of heads at a time."""
        return MINIMAL_MEMORY in self.techniques

    @property
    def chunks(self) -> Dial | None:
        """Decoder layers in chunks of the sequence, if it has them."""
        return next((technique for technique in self.techniques if "chunk" in technique.changes), None)


_SAVED_ON_HOST = (ATTENTION_SAVED, CHECKPOINTS_ON_HOST)
_INPUTS_ON_HOST = (LAYER_CHECKPOINTS, CHECKPOINTS_ON_HOST)
_TIGHTEST = (*_INPUTS_ON_HOST, MINIMAL_MEMORY)

_BY_COST = (
    Rung("no recompute"),
    Rung("layers are recomputed, except attention's kernel", (ATTENTION_SAVED,)),
    Rung("the same, with more and smaller kernels", (ATTENTION_SAVED, MINIMAL_MEMORY)),
    Rung("layers are recomputed", (LAYER_CHECKPOINTS,)),
    Rung("layers are recomputed, with more and smaller kernels", (LAYER_CHECKPOINTS, MINIMAL_MEMORY)),
    Rung("layers are recomputed, one chunk of the sequence at a time", (LAYER_CHECKPOINTS, CHUNKS)),
    Rung("the same, four layers together on each chunk", (LAYER_CHECKPOINTS, CHUNKS_OF_SEGMENTS)),
    Rung("checkpoints are copied to the host and back", _SAVED_ON_HOST),
    Rung("the same, with more and smaller kernels", (*_SAVED_ON_HOST, MINIMAL_MEMORY)),
    Rung("layers are recomputed, and their inputs copied to the host and back", _INPUTS_ON_HOST),
    Rung("the same, with more and smaller kernels", _TIGHTEST),
)
LADDER = (
    *_BY_COST,
    *(
        Rung(f"{rung.cost}; frozen weights are copied from the host", (*rung.techniques, WEIGHTS_ON_HOST))
        for rung in _BY_COST
        if rung.chunks is None
    ),
    Rung("weight gradients are accumulated four times as often", (*_TIGHTEST, WEIGHTS_ON_HOST), TILE_STEP),
    Rung("matrix products over few tokens are slow", (*_TIGHTEST, WEIGHTS_ON_HOST), TILE_STEP**2),
)
"""Cheapest first. What cannot be moved to the host (nothing without an accelerator, no weights that train) stays on the
device in all rungs, and is moved from the first rung on where the weights alone do not fit."""


@dataclass(frozen=True)
class Chosen:
    """The result of :func:`choose_rung`.

    Attributes:
        settings: the choice; tiles are numbers of tokens, but for a rule that is given and for ``tile="auto"`` where it
            leaves the blocks untiled.
        planner, estimate: the plan of it.
        reasons: by setting, why.
        sure: whether the high estimate fits too.
    """

    settings: TilingOptions
    planner: Planner
    estimate: Estimate
    reasons: Mapping[str, str]
    sure: bool


class DoesNotFit(RunError):
    """No settings make a length fit.

    Attributes:
        planner: of the tightest settings.
        longest: tokens of the longest row that fits; 0 if none does.
    """

    def __init__(self, message: str, planner: Planner, longest: int) -> None:
        super().__init__(message)
        self.planner, self.longest = planner, longest


def choose_rung(request: Request, tokens: int, fixed: Mapping[str, Any], *, can_offload: bool) -> Chosen:
    """The first rung on which rows of ``tokens`` tokens fit at the high estimate, else the last at the expected one.

    Deterministic: the same for the same arguments. Takes a few seconds a rung.

    Args:
        request: model, device and engine.
        tokens: the length.
        fixed: those of :data:`CHOSEN` that are not to be chosen.
        can_offload: whether checkpoints can be moved to the host.

    Raises:
        DoesNotFit: names the longest sequence that fits.
    """
    sizes = ("tile", "loss_tile") if request.options.loss else ("tile",)
    tiles = {name: fixed.get(name, "auto") for name in sizes}
    first = Planner(changed(request, checkpoint="layer", keep=0.0, **tiles), tokens)
    resolved = first.resolved(tokens).options
    tiles = {name: getattr(resolved, name) for name in sizes}
    if can_carry(first.built.model) and fixed.get("chunk") is None:
        tiles["state"] = "auto"  # at the same products
    top = replace(request.options, **{name: DEFAULTS[name] for name in CHOSEN} | tiles)
    tried: list[_Tried] = []
    possible: Chosen | None = None
    for rung, settings in _rungs(request, first, top, tokens, fixed, can_offload):
        if settings.checkpoint != "layer" and "checkpoint" not in fixed:
            # Its memory is at least that of checkpointed inputs, which a later rung plans anyway.
            least = replace(settings, checkpoint="layer")
            planner, estimate = _plan(least, request, tokens, first)
            if not planner.fits(estimate):
                tried.append(_Tried(rung, least, planner, estimate))
                continue
        if rung.chunks is not None:  # fake runs of chunks take longer than others
            least_bytes = Planner(replace(request, options=settings), tokens, like=first).at_least(tokens)
            if least_bytes > request.device.memory:
                continue
        planner, estimate = _plan(settings, request, tokens, first)
        tried.append(_Tried(rung, settings, planner, estimate))
        if planner.fits_at_the_high_estimate(estimate):
            return _spend(Chosen(settings, planner, estimate, {}, True), tried, request, tokens, fixed)
        # Where only the expected estimate fits: the least memory without slow tiles.
        if planner.fits(estimate) and (possible is None or rung.divisor == 1):
            possible = Chosen(settings, planner, estimate, _reasons(settings, tried, fixed), False)
    if possible is not None:
        return possible
    tightest = min(reversed(tried), key=lambda attempt: attempt.estimate.device.expected)
    planner, estimate = tightest.planner, tightest.estimate
    longest, limit = planner.longest()
    expected, memory = estimate.device.expected / GIB, request.device.memory / GIB
    raise DoesNotFit(
        f"{tokens:,} tokens per sequence do not fit on {_devices(request)} even with the tightest settings: "
        f"{expected:,.2f} GiB of {memory:,.2f} GiB ({limit}); "
        + (f"the longest that fits is {longest:,} (max_length: {longest})" if longest else "no length fits"),
        planner, longest,
    )  # fmt: skip


def tighter(settings: TilingOptions, *, can_offload: bool) -> TilingOptions | None:
    """The next settings that hold less: smaller tiles, then what the ladder has below; None at its end."""
    smaller = replace(settings, **_smaller(settings, TILE_STEP), keep=0.0)
    if smaller != settings:
        return smaller
    if settings.checkpoint != "layer":
        return replace(settings, checkpoint="layer")
    if not can_offload or settings.offload_room:
        return None
    return replace(settings, offload=offload_of(checkpoints=True, weights=settings.weights_on_host))


def _smaller(settings: TilingOptions, times: int) -> dict[str, Any]:
    """Tiles of ``settings`` that are ``times`` smaller; a rule stays."""
    both = {"tile": settings.tile, "loss_tile": settings.loss_tile}
    return {
        name: min(size, max(SMALLEST_TILE, size // times)) if isinstance(size, int) else size
        for name, size in both.items()
    }


def would_avoid(
    request: Request, settings: TilingOptions, tokens: int, short: int, *, can_offload: bool
) -> tuple[Estimate, str | None]:
    """The estimate of ``settings``, and the first tighter ones whose plan is ``short`` bytes lower, or None."""
    planner, estimate_now = _plan(settings, request, tokens, None)
    settings_below = tighter(settings, can_offload=can_offload)
    while settings_below is not None:
        _, estimate = _plan(settings_below, request, tokens, planner)
        less = estimate_now.device.expected - estimate.device.expected
        if less >= short:
            return estimate_now, f"{changes(settings, settings_below)} ({less / GIB:,.2f} GiB less by the plan)"
        settings_below = tighter(settings_below, can_offload=can_offload)
    return estimate_now, None


def changes(settings: TilingOptions, changed_settings: TilingOptions) -> str:
    """The differences, as keys and values of a recipe."""
    keys = []
    for name in CHOSEN:
        value = getattr(changed_settings, name)
        if value != getattr(settings, name):
            keys.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return ", ".join(keys)


def _plan(settings: TilingOptions, request: Request, tokens: int, like: Planner | None) -> tuple[Planner, Estimate]:
    planner = Planner(replace(request, options=settings), tokens, like=like)
    estimate = planner.estimate(tokens)
    if like is not None:
        like.share(planner)
    return planner, estimate


def _rungs(
    request: Request, planner: Planner, top: TilingOptions, tokens: int, fixed: Mapping[str, Any], can_offload: bool
) -> Iterator[tuple[Rung, TilingOptions]]:
    """Every rung that differs from those before it, with what is given left as it is."""
    seen: list[TilingOptions] = []
    # With Ulysses passes divide the heads that a rank has after the exchange, which no plan counts.
    by_heads = request.split == 1 and runs_on_some_heads(planner.built.model)
    operations = planner.work(tokens).total
    spared = 1 - count_work(changed(request, checkpoint="attention-saved"), planner.counts, tokens).total / operations
    streams = can_offload and can_stream(request)
    crowded = streams and Planner(changed(request, offload=False), like=planner).at_least(1) > request.device.memory
    for rung in LADDER:
        if crowded and not rung.weights_on_host:
            continue
        saved = rung.checkpoint == "attention-saved"
        if saved and (attention_cannot_be_saved(request) is not None or spared < WORTH):
            continue
        offload = offload_of(rung.offload and can_offload, rung.weights_on_host and streams)
        settings = replace(top, checkpoint=rung.checkpoint, offload=offload)
        if rung.divisor > 1:
            whole = top.tile if isinstance(top.tile, int) else planner.local(tokens) * request.batch
            settings = replace(settings, **_smaller(replace(top, tile=whole), rung.divisor))
        if rung.minimal_memory:
            settings = replace(settings, **MINIMAL_MEMORY.changes)
            settings = settings if by_heads else replace(settings, heads=None)
        if rung.chunks is not None:
            settings = replace(settings, **rung.chunks.changes)
        settings = replace(settings, **fixed)
        if not request.options.tiled:
            settings = settings.without_blocks()
        if settings.checkpoint is None and settings.offload_room:
            continue
        if rung.chunks is not None and not is_in_chunks(settings, tokens, request.batch):
            continue
        if settings.chunk is not None and refused(replace(request, options=settings).combination()):
            continue
        if settings not in seen:
            seen.append(settings)
            yield rung, settings


@dataclass(frozen=True)
class _Tried:
    rung: Rung
    settings: TilingOptions
    planner: Planner
    estimate: Estimate


def _spend(
    chosen: Chosen, tried: list[_Tried], request: Request, tokens: int, fixed: Mapping[str, Any]
) -> Chosen:  # fmt: skip
    """``chosen`` with the memory that is left spent on keeping gate and up."""
    fused = any(block.path == "fused" for block in chosen.planner.built.blocks)
    why = "no memory to spare: gate and up are recomputed in every tile"
    if "keep" in fixed or chosen.settings.tile == "auto" or chosen.settings.chunk is not None or not fused:
        return replace(chosen, reasons=_reasons(chosen.settings, tried, fixed))
    for keep in KEEPS if tried[-1].rung.divisor == 1 else ():
        settings = replace(chosen.settings, keep=keep)
        planner, estimate = _plan(settings, request, tokens, chosen.planner)
        if planner.fits_at_the_high_estimate(estimate):
            added_gib = (estimate.device.expected - chosen.estimate.device.expected) / GIB
            why = f"{added_gib:,.2f} GiB more; {keep:.0%} of the tiles are not recomputed"
            chosen = Chosen(settings, planner, estimate, {}, True)
            break
    return replace(chosen, reasons={**_reasons(chosen.settings, tried, fixed), "keep": why})


def _reasons(settings: TilingOptions, tried: list[_Tried], fixed: Mapping[str, Any]) -> dict[str, str]:
    cheaper, rung = "", tried[-1].rung
    if len(tried) > 1:
        last = tried[-2]
        location = " on the host" if last.settings.offload_room else ""
        high, memory = last.estimate.device.high / GIB, last.planner.request.device.memory / GIB
        kept = last.settings.checkpoint or "none"
        cheaper = f"; checkpoint {kept}{location} would use up to {high:,.2f} GiB of {memory:,.2f} GiB"
    reasons = {
        "checkpoint": f"{rung.cost}{cheaper}",
        "offload": ", and ".join(
            ["checkpoints do not fit on the device"] * bool(settings.offload_room)
            + ["frozen weights leave too little of it"] * settings.weights_on_host
        )
        or "not needed",
        "tile": "smaller tiles would not lower the peak at this length"
        if settings.tile == "auto"
        else "the rule of auto" if rung.divisor == 1 else "larger tiles do not fit",
        "loss_tile": "the rule of auto" if rung.divisor == 1 else "larger tiles do not fit",
        "blocks": "untiled norms and projections would not fit" if rung.minimal_memory else "more is not needed",
        "heads": "all heads at once would not fit" if settings.heads else "all at once, as they fit",
    }  # fmt: skip
    if settings.loss is None:
        del reasons["loss_tile"]
    if settings.chunk is not None:
        reasons["chunk"] = "layers run on one chunk at a time; whole they do not fit without the host"
        reasons["segment"] = "fewer layer inputs are kept" if settings.segment > 1 else "one layer at a time fits"
    if settings.state is not None:
        reasons["state"] = "layers with a state run one tile at a time, with the same FLOPs"
    return {name: "as given" if name in fixed else why for name, why in reasons.items()} | (
        {"keep": "as given"} if "keep" in fixed else {}
    )


def _devices(request: Request) -> str:
    return f"{request.gpus} x {request.device.name}" if request.gpus > 1 else request.device.name
