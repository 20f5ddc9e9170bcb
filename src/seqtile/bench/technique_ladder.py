"""``seqtile bench ladder``: what each technique buys in length and costs in time, one on top of the other, by the plan.

The rungs add one technique each (:data:`seqtile.planner.techniques.ABLATION`). The settings that a given length needs
are chosen elsewhere, cheapest first (:mod:`seqtile.planner.ladder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from seqtile.bench.environment import append_rows
from seqtile.models.attention.headwise import runs_on_some_heads
from seqtile.options import changed
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request, attention_cannot_be_saved
from seqtile.planner.techniques import ABLATION, BASELINE, LAYER_CHECKPOINTS, Technique

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
    technique: Technique

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
    found = []
    for rung in RUNGS:
        request = rung.technique.on(request)
        found.append((rung, request))
    return found


def run_ladder(
    request: Request, efficiency: float, stamp: Mapping[str, Any], output: Path | None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:  # fmt: skip
    """The longest sequence of every rung, what limits it, and what a token costs there.

    Args:
        request: model, devices and engine; the rungs set the rest.
        efficiency: share of the devices' speed on paper that is assumed.
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
    for rung, wanted in requests(request):
        on_progress(f"{rung.name}: the longest sequence")
        start = {"kind": "ladder", **stamp, **_asked(request), "rung": rung.name, "efficiency": efficiency}
        start["settings"] = {name: getattr(wanted.options, name) for name in SETTINGS}
        start["settings"]["engine_offload"] = wanted.engine_offload
        like = planners[-1][1] if planners else None
        why = None
        if refused is not None:
            wanted = changed(wanted, checkpoint="full")
            if rung.changes.get("checkpoint") == "attention-saved":
                why = refused
            elif rung is RUNGS[-1]:
                why = "it was never kept"
        whole = _heads_run_whole(wanted, like) if wanted.options.heads is not None and like is not None else None
        if whole is not None:
            wanted = changed(wanted, heads=None)
            why = whole if "heads" in rung.changes else why
        if why is not None:
            rows.append({**start, "skipped": why})
            continue
        planner = Planner(wanted, like=like)
        longest, limit = planner.longest()
        row = {**start, "max_length": longest, "limited_by": limit, **_costs(planner, longest, efficiency)}
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
            row["common"] = {"tokens": min(lengths), **_costs(planner, min(lengths), efficiency)}
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


def _asked(request: Request) -> Row:
    return {
        "model": request.model, "device": request.device.name, "device_gib": request.device.memory / GIB,
        "gpus": request.gpus, "engine": request.engine, "sp_size": request.sp_size, "attention": request.attention,
        "host_gib_given": None if request.host_memory is None else request.host_memory / GIB,
        "train": f"lora r={request.lora.r}" if request.lora else "full", "precision": request.precision,
        "optimizer": request.optimizer, "planned": True,
    }  # fmt: skip


def _costs(planner: Planner, tokens: int, efficiency: float) -> Row:
    """Operations of one token in a row of ``tokens``, and the time that one device takes for them."""
    if not tokens:
        return {}
    work = planner.work(tokens)
    each = planner.request.batch * tokens
    speed = planner.request.device.tflops
    return {
        "tflop_per_token": work.total / each / 1e12,
        "device_us_per_token": None if speed is None else 1e6 * work.seconds(speed, 1, efficiency) / each,
    }


HEAD = ("rung", "longest sequence", "on the host", "limited by", "TFLOP/token", "us/token", "us/token at {common}")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; a rung that was skipped says why in the fourth."""
    common = next((row["common"]["tokens"] for row in rows if "common" in row), 0)
    cells = []
    for row in rows:
        if "skipped" in row:
            cells.append([row["rung"], "", "", f"left out: {row['skipped']}", "", "", ""])
        else:
            both = [_time(row), _time(row.get("common", {}))]
            flop = f"{row['tflop_per_token']:.3f}" if "tflop_per_token" in row else ""
            host = f"{row['on_host']:.0%}" if row.get("on_host") else ""
            cells.append([row["rung"], f"{row['max_length']:,}", host, row["limited_by"], flop, *both])
    return [name.format(common=f"{common:,}") for name in HEAD], cells


def _time(costs: Mapping[str, Any]) -> str:
    value = costs.get("device_us_per_token")
    return "" if value is None else f"{value:,.0f}"


def title(rows: Sequence[Row]) -> str:
    """What the table is of."""
    row = rows[0]
    host = "" if row["host_gib_given"] is None else f", {row['host_gib_given']:,.0f} GiB of host memory"
    shared = f", sp-size {row['sp_size']}" if row["sp_size"] > 1 else ""
    where = f"{row['gpus']} x {row['device']} ({row['device_gib']:.1f} GiB each){host}, {row['engine']}{shared}"
    return f"{row['model']}, {row['train']}, {where}, by the plan"


def footnote(rows: Sequence[Row]) -> str:
    """How the columns are meant."""
    return (
        f"us/token: time of one device by counted operations at {rows[0]['efficiency']:.0%} of its speed on paper, "
        "assumed; copies to the host, communication and smaller kernels are not in it"
    )


def time_bought(before: Row, row: Row) -> float:
    """The part of a token's time that a rung saves at a length of both, if it costs length; 0 if it buys length."""
    times = [one.get("common", {}).get("device_us_per_token") for one in (before, row)]
    if None in times or row["max_length"] >= before["max_length"]:
        return 0.0
    return float(max(0.0, 1 - times[1] / times[0]))


def plot_ladder(rows: Iterable[Row], path: Path) -> None:
    """Draw the longest sequence of every rung, with the time of a token beside; rungs that buy time are marked."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [row for row in rows if "skipped" not in row]
    figure = Figure(figsize=(9.0, 0.45 * len(shown) + 1.4), layout="constrained")
    axes = figure.subplots()
    lengths = [row["max_length"] / 1000 for row in shown]
    bought = [0.0, *(time_bought(*pair) for pair in pairwise(shown))]
    colours = ["#edae49" if share else "#d1495b" for share in bought]
    axes.barh([row["rung"] for row in shown], lengths, color=colours, height=0.62)
    for place, row in enumerate(shown):
        label = f" {row['max_length'] / 1000:,.0f}K" + (f", {_time(row)} us/token" if _time(row) else "")
        if bought[place]:
            label += f"; {bought[place]:.0%} less time a token at the same length"
        axes.text(lengths[place], place, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*lengths, 1.0]))
    axes.set_xlabel("longest sequence, thousands of tokens")
    axes.set_title(title(shown), fontsize=9)
    if any(bought):
        patches = [Patch(color="#d1495b", label="length"), Patch(color="#edae49", label="time, not length")]
        axes.legend(handles=patches, title="it buys", fontsize=8, title_fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
