"""``python benchmarks/technique_ladder.py``: what each technique buys in length and costs in time, by the plan.

The rungs add one technique each (:data:`seqtile.planner.techniques.ABLATION`). The settings that a given length needs
are chosen elsewhere, by least time (:mod:`seqtile.planner.chooser`).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environment import append_rows, environment, stamp
from seqtile._errors import UserError
from seqtile.headwise.install_heads import runs_on_some_heads
from seqtile.options import changed
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request, attention_cannot_be_saved
from seqtile.planner.techniques import ABLATION, BASELINE, LAYER_CHECKPOINTS, Dial

GIB = 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class AblationStep:
    """One step of the ablation.

    Attributes:
        name: in a table.
        technique: what it adds to the rung before.
    """

    name: str
    technique: Dial

    @property
    def changes(self) -> Mapping[str, Any]:
        """The fields of a request that differ from the rung before."""
        return self.technique.changes


RUNGS = (
    AblationStep("baseline", BASELINE),
    *(AblationStep(f"+ {technique.name}", technique) for technique in ABLATION),
    AblationStep("- attention saved", LAYER_CHECKPOINTS),
)
"""The baseline is activation checkpointing alone. Keeping attention's output buys time with memory, not length, so the
last rung drops it again: the longest sequences."""


SETTINGS = ("tile", *dict.fromkeys(name for rung in RUNGS for name in rung.changes))
"""The options that a row shows."""


def requests(request: Request) -> list[tuple[AblationStep, Request]]:
    """Every rung with all that the rungs before it set, on the model, devices and engine of ``request``."""
    rungs = []
    for rung in RUNGS:
        request = rung.technique.on(request)
        rungs.append((rung, request))
    return rungs


def run_ladder(
    request: Request, stamp: Mapping[str, Any], output: Path | None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:  # fmt: skip
    """The longest sequence of every rung, what limits it, and what a token costs there.

    Args:
        request: model, devices and engine; the rungs set the rest.
        stamp: what every row starts with.
        output: file of JSON lines.
        on_progress: called with what is planned next.

    Returns:
        One row a rung; ``"skipped"`` says why a rung cannot be.

    Raises:
        UserError: a request that cannot run.
    """
    rows: list[Row] = []
    planners: list[tuple[Row, Planner]] = []
    refused = attention_cannot_be_saved(request)
    for rung, rung_request in requests(request):
        on_progress(f"{rung.name}: the longest sequence")
        start = {"kind": "ladder", **stamp, **_describe(request), "rung": rung.name}
        start["settings"] = {name: getattr(rung_request.options, name) for name in SETTINGS}
        start["settings"]["engine_offload"] = rung_request.engine_offload
        like = planners[-1][1] if planners else None
        why = None
        if refused is not None:
            rung_request = changed(rung_request, checkpoint="layer")
            if rung.changes.get("checkpoint") == "attention-saved":
                why = refused
            elif rung is RUNGS[-1]:
                why = "it was never kept"
        reason = (
            _heads_run_whole(rung_request, like)
            if rung_request.options.heads is not None and like is not None
            else None
        )
        if reason is not None:
            rung_request = changed(rung_request, heads=None)
            why = reason if "heads" in rung.changes else why
        if why is not None:
            rows.append({**start, "skipped": why})
            continue
        planner = Planner(rung_request, like=like)
        longest, limit = planner.longest()
        row = {**start, "max_length": longest, "sure_length": planner.sure(), "limited_by": limit}
        row.update(_costs(planner, longest))
        if longest:
            estimate = planner.estimate(longest)
            row["peak_device_gib"] = {
                bound: getattr(estimate.device, bound) / GIB for bound in ("low", "expected", "high")
            }
            row.update(peak_at=estimate.peak_at, host_gib=estimate.host.expected / GIB, on_host=estimate.moved)
        rows.append(row)
        planners.append((row, planner))
    lengths = [row["max_length"] for row, _ in planners if row["max_length"]]
    for row, planner in planners:
        if lengths:
            row["common"] = {"tokens": min(lengths), **_costs(planner, min(lengths))}
    if output is not None:
        append_rows(output, rows)
    return rows


def _heads_run_whole(request: Request, planner: Planner) -> str | None:
    """Why attention is not planned one group of heads at a time; None if it is."""
    if request.sp_size > 1:
        left = max(1, planner.counts.key_heads // request.sp_size)
        return (
            f"with sp-size {request.sp_size} passes divide only the {left} key-value head(s) that a rank has after the "
            "exchange, and no plan counts that"
        )
    if not runs_on_some_heads(planner.built.model):
        return "no attention of this model is known to run on some of its heads"
    return None


def _describe(request: Request) -> Row:
    return {
        "model": request.model, "device": request.device.name, "device_gib": request.device.memory / GIB,
        "gpus": request.gpus, "engine": request.engine, "sp_size": request.sp_size, "attention": request.attention,
        "host_gib_given": None if request.host_memory is None else request.host_memory / GIB,
        "train": f"lora r={request.lora.r}" if request.lora else "full", "precision": request.precision,
        "optimizer": request.optimizer, "planned": True,
    }  # fmt: skip


def _costs(planner: Planner, tokens: int) -> Row:
    """Operations of one token in rows of ``tokens``, and the plan's estimates of a step's time."""
    if not tokens:
        return {}
    request, work = planner.request, planner.work(tokens)
    each = request.batch * tokens
    row: Row = {"tflop_per_token": work.total / each / 1e12, "device_us_per_token": None, "step_seconds": None}
    if (tflops := request.device.tflops) is not None:
        seconds = work.seconds(tflops, 1)
        row.update(device_us_per_token=seconds * 1e6 / each, step_seconds=seconds / request.split)
    return row


HEAD = ("rung", "longest", "at the high estimate", "limited by", "a step", "us/token at {common}")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a skipped rung has its reason in the fourth."""
    common = next((row["common"]["tokens"] for row in rows if "common" in row), 0)
    cells = []
    for row in rows:
        if "skipped" in row:
            cells.append([row["rung"], "", "", f"left out: {row['skipped']}", "", ""])
            continue
        step, each = row.get("step_seconds"), row.get("common", {}).get("device_us_per_token")
        cells.append([
            row["rung"], f"{row['max_length']:,}", f"{row['sure_length']:,}", row["limited_by"].rpartition(": ")[2],
            "" if step is None else f"{step:,.0f} s", "" if each is None else f"{each:,.0f}",
        ])  # fmt: skip
    return [name.format(common=f"{common:,}") for name in HEAD], cells


def title(rows: Sequence[Row]) -> str:
    """What the table is of."""
    row = rows[0]
    host = "" if row["host_gib_given"] is None else f", {row['host_gib_given']:,.0f} GiB of host memory"
    shared = f", sp-size {row['sp_size']}" if row["sp_size"] > 1 else ""
    where = f"{row['gpus']} x {row['device']} ({row['device_gib']:.1f} GiB each){host}, {row['engine']}{shared}"
    return f"{row['model']}, {row['train']}, {where}, by the plan"


FOOTNOTE = (
    "A step: the plan's estimate at the longest sequence. us/token: of one device. Copies to the host, communication "
    "and the optimizer are not in them."
)


def main() -> int:
    """Plan the ladder, print it as a table and write its rows; 2 where something is asked for that cannot be."""
    options = argparse.ArgumentParser(description="What each technique buys, by the plan.", allow_abbrev=False)
    options.add_argument("--model", required=True, help="as for `seqtile plan`: a shape such as llama-8b, a directory")
    options.add_argument("--device", default="h200", help="h200, h100, ... or its memory, 141GiB")
    options.add_argument("--host-memory", help="host memory of the node, 128GiB")
    options.add_argument("--gpus", type=int, default=1, help="devices of the node")
    options.add_argument("--engine", default="single", help="single, ddp, fsdp2 or zero3")
    options.add_argument("--sp-size", type=int, default=1, help="ranks that share one sequence")
    options.add_argument("--lora", help="train adapters: a rank, or r=16")
    options.add_argument("--offload", default="", help="on the host from the first rung on: optimizer, weights")
    options.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = options.parse_args()
    try:
        rows = plan_ladder(arguments)
    except UserError as error:
        print(f"technique_ladder.py: {error}", file=sys.stderr)
        return 2
    heads, cells = table(rows)
    print(f"{title(rows)}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for line in cells:
        print(f"| {' | '.join(line)} |")
    print(f"\n{FOOTNOTE}")
    return 0


def plan_ladder(arguments: argparse.Namespace) -> list[Row]:
    """The rows, which are written too."""
    from seqtile.cli.plan_command import host_bytes, parse_adapters, refuse_unreachable
    from seqtile.models.configs import read_config
    from seqtile.planner.accelerators import find_device
    from seqtile.planner.names import check_names, split_offload

    logging.getLogger("transformers").setLevel(logging.ERROR)
    on_host, engine_offload = split_offload(arguments.offload, arguments.engine)
    named = {name: getattr(arguments, name) for name in ("engine", "gpus", "sp_size")}
    named["engine_offload"] = engine_offload
    check_names({**vars(Request), **named})
    refuse_unreachable(arguments.model)
    request = Request(
        model=arguments.model, config=read_config(arguments.model), device=find_device(arguments.device),
        host_memory=host_bytes(arguments.host_memory), lora=parse_adapters(arguments.lora) if arguments.lora else None,
        options=replace(Request.options, offload=on_host), **named,
    )  # fmt: skip
    now = stamp(environment())
    file = arguments.out / f"ladder-{datetime.now(UTC):%Y%m%d-%H%M%S}.jsonl"
    rows = run_ladder(request, now, file, lambda text: print(text, file=sys.stderr))
    print(f"written  {file}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    sys.exit(main())
