"""Output of ``seqtile plan``: tables, JSON and recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqtile.devices import GIB
from seqtile.models.configs import NAMED
from seqtile.options import to_flag
from seqtile.planner.estimate import Bounds, Estimate
from seqtile.planner.explain import (
    NOT_MODELLED,
    NextSetting,
    beyond_positions,
    explain,
    not_modelled,
    recipe,
    recipe_lacks,
    rope_scaling_key,
)
from seqtile.planner.memory_plan import SPLITS, Planned
from seqtile.planner.request import Request
from seqtile.planner.step_time import spoken
from seqtile.planner.traffic import bytes_between_nodes, bytes_inside_a_node


def show_plan(
    planned: Planned, max_length: int | None, *, as_json: bool = False, reasons: bool = False,
    recipe_file: str | None = None, better: Callable[[], NextSetting | None] = lambda: None,
    by_split: Callable[[], dict[int, int]] = dict, why: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the plan, and why its settings were chosen (``why``); write what was asked for.

    Once the answer is printed, ``by_split`` works out the longest sequence by how many ranks share one, and ``better``
    looks for what buys length.
    """
    planner, estimate, _, _, saving = planned
    # Without a requested length, the longest that fits at the high estimate.
    length = estimate.tokens if max_length is not None else planner.sure() or estimate.tokens
    chosen = recipe(planner, length) if planner.request.has_recipe else None
    if recipe_file is not None and chosen is not None:
        _write_recipe(chosen, recipe_lacks(planner.request), Path(recipe_file).expanduser())
    if as_json:
        print_object(planned, chosen, better(), by_split(), recipe_file, why)
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    request = planner.request
    device = request.device
    console.print(
        f"{request.model}: {_count(planner.counts.weights)} parameters, {_count(planner.counts.trained)} trainable; "
        f"{request.gpus} x {device.name} ({device.memory / GIB:.1f} GiB)"
        + (f" on {request.nodes} nodes" if request.nodes > 1 else "")
        + f", engine {request.engine}"
    )
    console.print(_table(estimate))
    _print_verdict(console, planned, max_length, better, by_split, bool(why) and planner.fits(estimate))
    if command := start_command(request, recipe_file):
        console.print(f"Run on each node: {command}")
    for sentence in why:
        console.print(f"{'Chosen: ' * planner.fits(estimate)}{sentence}.")
    if saving is not None:
        console.print(f"--checkpoint attention-saved: {saving.why}.")
    for note in [*planner.notes(), *beyond_positions(request, estimate.tokens)]:
        console.print(f"Note: {note}.")
    if reasons:
        for line in explain(planner, estimate):
            console.print(f"  {line}")
    lacks = not_modelled(request, estimate)
    if not reasons:
        lacks = [*(text for text in lacks if text not in NOT_MODELLED), "what --explain lists"]
    console.print(f"Not included: {'; '.join(lacks)}.", style="dim")
    if recipe_file is not None:
        console.print(f"recipe: {recipe_file}")


def _table(estimate: Estimate) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{estimate.tokens:,} tokens per sequence, peak in the {estimate.peak_at}")
    table.title_justify = "left"
    table.add_column("GiB at the peak")
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    names = dict.fromkeys([*estimate.terms, *estimate.host_terms])
    for name in sorted(names, key=lambda term: -estimate.terms.get(term, 0.0)):
        device, host = estimate.terms.get(name, 0.0), estimate.host_terms.get(name, 0.0)
        if max(device, host) >= 0.005 * GIB:
            table.add_row(name, _gib(device), _gib(host))
    table.add_section()
    for bound in ("low", "expected", "high"):
        row = [bound, f"{getattr(estimate.device, bound) / GIB:,.1f}", f"{getattr(estimate.host, bound) / GIB:,.1f}"]
        table.add_row(*(Text(word, style="bold" if bound == "expected" else "") for word in row))
    return table


def _count(weights: int) -> str:
    return f"{weights / 1e9:.2f}B" if weights >= 10**8 else f"{weights / 1e6:.1f}M"


def _gib(value: float) -> str:
    return f"{value / GIB:,.2f}" if value else ""


def _print_verdict(
    console: Console, planned: Planned, max_length: int | None, better: Callable[[], NextSetting | None],
    by_split: Callable[[], dict[int, int]], is_chosen: bool = False,
) -> None:  # fmt: skip
    planner, estimate, longest, limit, _ = planned
    request = planner.request
    fits = planner.fits(estimate)
    room = request.device.memory - estimate.device.expected
    if max_length is not None:
        if fits:
            sure = "" if planner.fits_at_the_high_estimate(estimate) else " (not at the high estimate)"
            console.print(f"{estimate.tokens:,} tokens fit, {room / GIB:,.1f} GiB to spare{sure}.", style="bold")
        elif not planner.is_generated(estimate):
            console.print(f"{estimate.tokens:,} tokens exceed the generator's KV cache.", style="bold")
        elif room < 0:
            console.print(f"{estimate.tokens:,} tokens do not fit: {-room / GIB:,.1f} GiB over.", style="bold")
        else:
            console.print(f"{estimate.tokens:,} tokens do not fit in host memory.", style="bold")
    high = f"({planner.sure():,} at the high estimate)"
    settings = " with these settings" if is_chosen else ""  # a longer one takes others
    console.print(f"Longest sequence that fits{settings}: {longest:,} tokens {high}. Limited by {limit}.")
    if limit == "positions" and (further := planner.longest_beyond(estimate.tokens)):
        console.print(f"Beyond the model's positions: {further:,} tokens, with {rope_scaling_key(request, further)}.")
    if len(lengths := by_split()) > 1:
        sizes = ", ".join(f"{size}: {length:,}" for size, length in lengths.items())
        console.print(f"Longest by --{SPLITS[request.engine].replace('_', '-')}: {sizes.replace(', ', '; ')}.")
    if (step := better()) is not None:
        console.print(f"Next: {step.flags} reaches {step.length:,} tokens ({step.why}).", soft_wrap=True)
    work = planner.work(estimate.tokens)
    batch = "1 sequence" if request.batch == 1 else f"{request.batch:,} sequences"
    if request.grpo is not None and request.grpo.prompt:
        each = f"{request.grpo.group} sequences with one prompt, {request.row_tokens(estimate.tokens):,} tokens"
        batch = each if request.batch == 1 else f"{request.batch:,} times {each}"
    line = f"Step of {batch}: {work.total:.3g} FLOPs, {work.attention / work.total:.0%} in attention"
    if request.device.tflops is not None:
        seconds = planner.seconds(estimate.tokens, estimate.moved)
        share = work.total / (1e12 * request.device.tflops * request.split * seconds)
        line += f"; estimated {spoken(seconds)} at {share:.0%} of {request.device.tflops:g} TFLOPS"
    console.print(line + ".")
    if moved := bytes_between_nodes(request, planner.counts, estimate.tokens):
        console.print(f"Sent by each node per step: {_traffic(moved)}.")
    if request.nodes > 1 and (inside := bytes_inside_a_node(request, planner.counts, estimate.tokens)):
        console.print(f"Sent by each device inside its node: {_traffic(inside)}.")


def _traffic(by_part: dict[str, float]) -> str:
    """``"3.2 GiB (weights 2.0, gradients 1.2)"``."""
    parts = ", ".join(f"{name} {value / GIB:,.1f}" for name, value in by_part.items())
    return f"{sum(by_part.values()) / GIB:,.1f} GiB ({parts})"


def start_command(request: Request, recipe_file: str | None) -> str | None:
    """The command that starts the emitted recipe on every node; Slurm and torchrun do not need the last three flags.

    None for one node, and where there is no recipe.
    """
    if request.nodes == 1 or not request.has_recipe:
        return None
    recipe = "RECIPE" if recipe_file is None else shlex.quote(recipe_file)
    return (
        f"seqtile train --recipe {recipe} --dataset DATA --nodes {request.nodes} --node-rank R --rendezvous HOST:PORT"
    )


def print_object(
    planned: Planned, chosen: dict[str, Any] | None, better: NextSetting | None, by_split: dict[int, int],
    recipe_file: str | None = None, why: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the plan as one JSON object."""
    planner, estimate, longest, limit, saving = planned
    request = planner.request
    work = planner.work(estimate.tokens)
    tflops = request.device.tflops
    seconds = planner.seconds(estimate.tokens, estimate.moved)
    beyond = planner.longest_beyond(estimate.tokens) if limit == "positions" else 0
    between, inside = (
        moved(request, planner.counts, estimate.tokens) for moved in (bytes_between_nodes, bytes_inside_a_node)
    )
    plan = {
        "fits": planner.fits(estimate),
        "tokens": estimate.tokens,
        "row_tokens": request.row_tokens(estimate.tokens),
        "device_gib": request.device.memory / GIB,
        "peak_device_gib": _bounds(estimate.device),
        "peak_host_gib": _bounds(estimate.host),
        "peak_at": estimate.peak_at,
        "terms": {
            "device_gib": {name: value / GIB for name, value in estimate.terms.items()},
            "host_gib": {name: value / GIB for name, value in estimate.host_terms.items()},
        },
        "max_length": longest,
        "sure_length": planner.sure(),
        "limited_by": limit,
        "max_length_beyond_positions": beyond or None,
        "sure_length_beyond_positions": planner.sure(beyond) if beyond else None,
        "max_length_by_split": by_split,
        "next": None if better is None else {"flags": better.flags, "max_length": better.length, "why": better.why},
        "checkpoint": to_flag("checkpoint", request.options.checkpoint),
        "attention_saved": None
        if saving is None
        else {
            "chosen": saving.chosen,
            "more_gib": None if saving.more is None else saving.more / GIB,
            "saves": saving.share,
            "why": saving.why,
        },
        "why": [*why],
        "recipe": chosen,
        "recipe_lacks": recipe_lacks(request) if request.has_recipe else [],
        "nodes": request.nodes,
        "between_nodes_gib": {name: value / GIB for name, value in between.items()},
        "inside_a_node_gib": {name: value / GIB for name, value in inside.items()},
        "flops": work.total,
        "step_seconds": None if tflops is None else seconds,
        "efficiency": None if tflops is None else work.total / (1e12 * tflops * request.split * seconds),
        "notes": [*planner.notes(), *beyond_positions(request, estimate.tokens)],
        "not_modelled": not_modelled(request, estimate),
        "command": start_command(request, recipe_file),
    }
    print(json.dumps(plan))


def _bounds(bounds: Bounds) -> dict[str, float]:
    return {"low": bounds.low / GIB, "expected": bounds.expected / GIB, "high": bounds.high / GIB}


def _write_recipe(chosen: dict[str, Any], lacks: list[str], path: Path) -> None:
    import yaml

    header = "# Chosen by seqtile plan; run it with: seqtile train --recipe THIS_FILE --dataset FILE_OR_ID\n"
    if chosen["model"] in NAMED:
        header += "# 'model' names a shape only: put the path or Hub id of your model there\n"
    header += "".join(f"# not set by this recipe: {setting}\n" for setting in lacks)
    path.write_text(header + yaml.safe_dump(chosen, sort_keys=False), encoding="utf-8")
