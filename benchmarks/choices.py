"""The table of docs/planning.md: what a length takes on a device, and what a fixed order of settings took.

Run it from the repository::

    PYTHONPATH=benchmarks python benchmarks/choices.py

The fixed order is that of seqtile before it compared times: the first of :data:`ORDER` that fits at the high estimate,
with all or half of gate and up kept where there is memory. Adapters of rank 16 in bf16, attention by FlashAttention.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pages import write_between
from seqtile._errors import RunError, UserError
from seqtile.devices import package_version
from seqtile.models.configs import read_config
from seqtile.options import WHOLE_LAYER, TilingOptions, offload_of
from seqtile.planner.accelerators import find_device
from seqtile.planner.chooser import Chosen, choose_settings
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora
from seqtile.planner.step_time import spoken

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
MODELS, DEVICES = ("llama-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3.5-9b"), ("rtx4090", "l40s", "h100")
HOSTS, LENGTHS = (0, 64, 512), (32_768, 131_072, 524_288)
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


def rows(models: list[str], devices: list[str], lengths: list[int], hosts: list[int]) -> Iterator[str]:
    """The lines of the table."""
    for model, device, tokens, host in itertools.product(models, devices, lengths, hosts):
        # 4-bit weights on 24 GB, and where 16-bit ones fill 80 GB.
        request = request_of(model, device, host, quantized=device == "rtx4090" or "30b" in model or "32b" in model)
        started, chosen = time.process_time(), None
        try:
            chosen = choose_settings(request, tokens, {}, can_offload=host > 0)
            cells = [said(chosen.settings), spoken(chosen.seconds)]
        except (RunError, UserError) as error:
            cells = [str(error).rpartition("; ")[2], ""]
        took = time.process_time() - started
        fixed = by_fixed_order(request, tokens, chosen, can_offload=host > 0)
        cells += ["" if fixed is None else spoken(fixed), f"{took:.0f}"]
        start = [model, f"{request.device.memory / GIB:.0f}", f"{tokens:,}", str(host)]
        yield f"| {' | '.join([*start, *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--devices", nargs="+", default=[*DEVICES])
    parser.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS])
    parser.add_argument("--hosts", nargs="+", type=int, default=[*HOSTS])
    parser.add_argument("--write", action="store_true", help="into docs/planning.md")
    arguments = parser.parse_args()
    headings = ["model", "GiB", "tokens", "host GiB", "chosen", "a step", "fixed order", "processor seconds"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    print("\n".join(lines))
    for line in rows(arguments.models, arguments.devices, arguments.lengths, arguments.hosts):
        print(line, flush=True)
        lines.append(line)
    versions = ", ".join(f"{package} {package_version(package)}" for package in ("torch", "transformers"))
    lines += ["", f"`python benchmarks/choices.py`, {date.today()}, {versions}."]
    if arguments.write:
        write_between(PAGE, "<!-- choices: begin -->", "<!-- choices: end -->", lines)


if __name__ == "__main__":
    main()
