"""The table of docs/planning.md: what a length takes on a device, and what a fixed order of settings took.

Run it from the repository; ``python docs/tables.py`` then writes the page::

    python benchmarks/choices.py

The fixed order is that of seqtile before it compared times: the first of :data:`ORDER` that fits at the high estimate,
with all or half of gate and up kept where there is memory. Adapters of rank 16 in bf16, attention by FlashAttention.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import append_rows, environment, stamp
from seqtile._errors import RunError
from seqtile.models.configs import read_config
from seqtile.options import DEFAULTS, WHOLE_LAYER, TilingOptions, offload_of
from seqtile.planner.accelerators import find_device
from seqtile.planner.chooser import Chosen, choose_settings
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora

RESULTS = Path(__file__).parent / "results" / "choices.jsonl"
CASES = (
    ("llama-8b", "h100", 32_768, 0),
    ("llama-8b", "h100", 131_072, 0),
    ("llama-8b", "h100", 131_072, 512),
    ("llama-8b", "l40s", 131_072, 512),
    ("qwen3.5-9b", "h100", 131_072, 512),
    ("qwen3.5-9b", "h100", 131_072, 0),
    ("qwen3-32b", "h100", 32_768, 512),
    ("qwen3-30b-a3b", "h100", 32_768, 512),
    ("qwen3.5-9b", "h100", 32_768, 0),
    ("qwen3.5-9b", "h100", 65_536, 0),
)
"""Model, device, tokens and GiB of host memory; weights of over 20B parameters in 4 bits."""
GIB = 2**30
MINIMAL: dict[str, Any] = {"blocks": WHOLE_LAYER, "heads": 1}
ORDER: tuple[dict[str, Any], ...] = (
    {"checkpoint": None},
    {"checkpoint": "attention-saved"},
    {"checkpoint": "attention-saved", **MINIMAL},
    {"checkpoint": "layer"},
    {"checkpoint": "layer", **MINIMAL},
    {"checkpoint": "attention-saved", "offload": True},
    {"checkpoint": "attention-saved", "offload": True, **MINIMAL},
    {"checkpoint": "layer", "offload": True},
    {"checkpoint": "layer", "offload": True, **MINIMAL},
)


def request_of(model: str, device: str, host: int, quantized: bool) -> Request:
    """LoRA on ``device`` beside ``host`` GiB of memory."""
    return Request(
        model=model, config=read_config(model), device=find_device(device), host_memory=host * GIB or None,
        lora=Lora(16), qlora=quantized,
    )  # fmt: skip


def by_fixed_order(request: Request, tokens: int, chosen: Chosen | None, can_offload: bool) -> float | None:
    """Seconds of the first settings in :data:`ORDER` that fit, then with weights on the host; None if none do."""
    like = None if chosen is None else chosen.planner
    orders = [*ORDER, *({**rung, "offload": offload_of(bool(rung.get("offload")), weights=True)} for rung in ORDER)]
    base = TilingOptions(loss="tiled", state=None if chosen is None else chosen.settings.state)
    for rung in orders if can_offload else [rung for rung in ORDER if "offload" not in rung]:
        planner = Planner(replace(request, options=replace(base, **rung)), tokens, like=like)
        if planner.at_least(tokens) > request.device.memory:
            continue
        estimate = planner.estimate(tokens)
        if not planner.fits_at_the_high_estimate(estimate):
            continue
        for keep in (1.0, 0.5):
            kept = Planner(replace(request, options=replace(base, keep=keep, **rung)), tokens, like=planner)
            if kept.fits_at_the_high_estimate(kept.estimate(tokens)):
                return kept.seconds(tokens, kept.estimate(tokens).moved)
        return planner.seconds(tokens, estimate.moved)
    return None


def said(settings: TilingOptions) -> str:
    """The settings that are not the default, in a cell."""
    names = [f"`{settings.checkpoint or 'none'}`"]
    names += [f"keep {settings.keep:g}"] if settings.keep else []
    names += [f"host: {str(settings.offload).replace('True', 'checkpoints')}"] if settings.offload else []
    names += ["minimal"] if settings.blocks == WHOLE_LAYER else []
    names += [f"chunks, {settings.segment} layers"] if settings.chunk is not None else []
    return ", ".join(names)


def row_of(model: str, device: str, tokens: int, host: int, without: list[str]) -> dict[str, Any]:
    """What is chosen, in how many seconds of processor time, and the time of a step beside the fixed order's."""
    request = request_of(model, device, host, quantized="32b" in model or "30b" in model)
    started, chosen = time.process_time(), None
    row: dict[str, Any] = {"model": model, "device": device, "tokens": tokens, "host_gib": host}
    try:
        fixed = {name: DEFAULTS[name] for name in without}
        chosen = choose_settings(request, tokens, fixed, can_offload=host > 0)
        row |= {"chosen": said(chosen.settings), "seconds": chosen.seconds}
    except RunError as error:
        row |= {"chosen": str(error), "seconds": None}
    row["processor_seconds"] = time.process_time() - started
    if without:
        return {**row, "without": without}
    return {**row, "fixed_seconds": by_fixed_order(request, tokens, chosen, can_offload=host > 0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", type=int, default=[*range(len(CASES))], help="numbers, from 0 on")
    parser.add_argument("--without", nargs="+", default=[], help="options that stay at their default; rows are printed")
    arguments = parser.parse_args()
    machine = environment()
    if len(arguments.cases) == len(CASES) and not arguments.without:
        RESULTS.unlink(missing_ok=True)
    for number in arguments.cases:
        row = row_of(*CASES[number], arguments.without)
        print(row, flush=True)
        if not arguments.without:
            append_rows(RESULTS, [{**stamp(machine), **row}])


if __name__ == "__main__":
    main()
