"""Terminal output of ``seqtile train``: status, steps, and a table at the end."""

from __future__ import annotations

import shlex
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from seqtile.devices import GIB, MIB

if TYPE_CHECKING:
    from seqtile.train.compare_untiled import Comparison
    from seqtile.train.result_report import Outcome

SHOWN_STEPS = 30


class Progress:
    """Show a run's status or progress bar on one line of the terminal, with records printed above it.

    On a terminal the status and the bar are drawn on stderr. Where stderr is no terminal (a pipe, a file,
    ``TERM=dumb``), each status is a plain line there. Records go to stdout, at most about 30 of a run; evaluations all.

    Args:
        enabled: whether this process shows anything.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.console = Console(stderr=True)
        self._enabled = enabled
        self._live = enabled and self.console.is_interactive
        self._stage = ""
        self._status: Status | None = None
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        # What is printed goes above the bar, but never from a pipe of its own to the terminal.
        self._bar = Bar(
            *columns, console=self.console, transient=True, disable=not self._live,
            redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=None, summary="")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_status()
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        if not self._enabled or text == self._stage:
            return
        self._stage = text
        if not self._live:
            print(f"{text} ...", file=sys.stderr, flush=True)
        elif self._status is None:
            self._status = self.console.status(f"{escape(text)} ...")
            self._status.start()
        else:
            self._status.update(f"{escape(text)} ...")

    def begin(self, step: int, steps: int) -> None:
        """Show the bar."""
        self._stage = ""
        self._stop_status()
        self._bar.update(self._task, total=steps, completed=step)
        if self._enabled:
            self._bar.start()

    def record(self, values: dict[str, Any]) -> None:
        """Show one step, or one evaluation."""
        if not self._enabled:
            return
        step, steps = values["step"], values["steps"]
        parts = described(values)
        self._bar.update(self._task, completed=step, summary="  ".join(parts[:1]))
        if "loss" not in values or step in (1, steps) or step % max(1, steps // SHOWN_STEPS) == 0:
            print("  ".join([f"step {step:>{len(str(steps))}}/{steps}", *parts]), flush=True)

    def end(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def described(values: dict[str, Any]) -> list[str]:
    """Format a record, the most important values first."""
    forms = {
        "loss": "loss {:.4f}", "eval_loss": "eval loss {:.4f}", "learning_rate": "lr {:.1e}",
        "grad_norm": "grad norm {:.3g}", "tokens_per_s": "{:,.0f} tokens/s",
        "peak_allocated_gib": "peak {:.2f} GiB", "peak_resident_gib": "host peak {:.2f} GiB",
    }  # fmt: skip
    parts = [form.format(values[name]) for name, form in forms.items() if name in values]
    if "loss" in values and values.get("seconds_left"):
        parts.append(f"{timedelta(seconds=round(values['seconds_left']))} left")
    return parts


def print_outcome(outcome: Outcome) -> None:
    """The table at the end of a run."""
    console = Console()
    table = Table(box=box.SIMPLE_HEAVY, title="seqtile train", title_justify="left", pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    comparison = outcome.comparison
    if comparison is None:
        table.add_column("this run")
    else:
        table.add_column("tiled", justify="right")
        table.add_column("untiled", justify="right")
        table.add_column("ratio", justify="right")
    for row in _table_rows(outcome, comparison):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for name, value in _lines(outcome, comparison):
        console.print(Text.assemble((f"{name:<9}", "bold"), value), soft_wrap=True)


def _table_rows(outcome: Outcome, comparison: Comparison | None) -> list[tuple[str, ...]]:
    if comparison is None:
        seconds = "-" if outcome.step_seconds is None else f"{outcome.step_seconds:.2f}"
        peak = [] if outcome.peak_bytes is None else [("peak memory", size(outcome.peak_bytes))]
        return [("seconds per step", seconds), *peak]
    tiled, untiled = comparison.tiled, comparison.untiled
    rows = [
        ("seconds per step", f"{tiled.step_seconds:.2f}", f"{untiled.step_seconds:.2f}",
         "-" if comparison.time_ratio is None else f"{comparison.time_ratio:.2f}"),
        ("peak activation memory", size(tiled.peak_bytes), size(untiled.peak_bytes),
         f"{tiled.peak_bytes / untiled.peak_bytes:.0%}"),
    ]  # fmt: skip
    if tiled.units is not None and untiled.units is not None:
        units = f"{tiled.units:.2f}", f"{untiled.units:.2f}", f"{tiled.units / untiled.units:.2f}"
        rows.append(("matrix products per MLP", *units))
    return [*rows, ("largest relative gradient difference", f"{comparison.gradient_error:.1e}", "", "")]


def _lines(outcome: Outcome, comparison: Comparison | None) -> list[tuple[str, str]]:
    recipe = outcome.recipe
    lines = []
    if recipe.engine != "single":
        split = f", {recipe.split} per sequence" if recipe.split > 1 else ""
        engine = f"{recipe.engine}, {recipe.nproc} processes{split}; time and memory of rank 0"
        lines.append(("engine", engine))
    sets = {"train": "data", "eval": "eval"}
    lines += [(title, str(outcome.data[name])) for name, title in sets.items() if name in outcome.data]
    if outcome.tiling is None:
        lines.append(("tiled", "nothing (tiled_mlp: false)"))
    else:
        lines.append(("tiled", f"{outcome.tiling.summary.removeprefix('tiled ')}; {outcome.ran}"))
        lines += [("note", note) for note in outcome.tiling.notes]
    if comparison is not None:
        tiled, untiled = comparison.tiled, comparison.untiled
        lines.append(("peak", f"tiled: {tiled.peak_phase}; untiled: {untiled.peak_phase}"))
        lines.append(("measured", comparison.how))
        if comparison.time_ratio is None:
            ratios = ", ".join(f"{ratio:.2f}" for ratio in comparison.pair_ratios)
            lines.append(("note", f"no ratio of seconds: the pairs give {ratios}; something else ran on this machine"))
        lines += [("note", note) for note in comparison.notes]
    if outcome.losses:
        first, last = outcome.losses[0][1], outcome.losses[-5:]
        mean = sum(loss for _, loss in last) / len(last)
        lines.append(
            ("loss", f"{first:.3f} at step 1, {mean:.3f} mean of the last {len(last)} of {outcome.step} steps")
        )
    if outcome.best is not None:
        named = f"evaluation {outcome.best_metric.replace('_', ' ')} {outcome.best[1]:.4f}"
        lines.append(("best", f"{named} at step {outcome.best[0]}"))
    lines.append(("saved", str(outcome.output)))
    if outcome.report is not None:
        lines.append(("report", str(outcome.report)))
    return lines


def print_stopped(outcome: Outcome) -> None:
    """Where an interrupted run can be continued."""
    directory = shlex.quote(str(outcome.recipe.output))
    console = Console(stderr=True)
    console.print(
        f"stopped after step {outcome.step}; checkpoint saved in {outcome.output}\nresume with: seqtile train "
        f"--resume --output {directory}",
        highlight=False,
        soft_wrap=True,
    )


def size(nbytes: int) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
