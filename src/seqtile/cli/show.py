"""What ``seqtile train`` shows: a progress bar with the loss, one table at the end."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from seqtile.train.compare_untiled import Comparison
    from seqtile.train.recipe import Recipe
    from seqtile.train.run import Outcome

MIB = 2**20
GIB = 2**30
SHOWN_LOSSES = 30


class Progress:
    """A progress bar that appears when training starts; losses are printed above it, at most about 30 of them."""

    def __init__(self) -> None:
        self.console = Console()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def callback(self) -> Any:
        """The trainer's side of the bar."""
        from transformers import TrainerCallback

        bar, console = self._bar, self.console

        class Show(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.is_world_process_zero:
                    bar.start()
                    self.task = bar.add_task("training", total=state.max_steps, completed=state.global_step, loss="")

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.is_world_process_zero:
                    bar.update(self.task, completed=state.global_step)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if not state.is_world_process_zero or "loss" not in (logs or {}):
                    return
                loss, step = float(logs["loss"]), state.global_step
                bar.update(self.task, loss=f"loss {loss:.3f}")
                every = max(1, state.max_steps // SHOWN_LOSSES)
                if step % every == 0 or step == 1:
                    digits = len(str(state.max_steps))
                    console.print(f"step {step:>{digits}}/{state.max_steps}  loss {loss:.4f}", highlight=False)

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                bar.stop()

        return Show()


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
    for row in _rows(outcome, comparison):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for name, value in _lines(outcome, comparison):
        console.print(Text.assemble((f"{name:<9}", "bold"), value), soft_wrap=True)


def _rows(outcome: Outcome, comparison: Comparison | None) -> list[tuple[str, ...]]:
    if comparison is None:
        rows: list[tuple[str, ...]] = [
            ("seconds per step", "-" if outcome.step_seconds is None else f"{outcome.step_seconds:.2f}")
        ]
        if outcome.peak_bytes is not None:
            rows.append(("peak memory", size(outcome.peak_bytes)))
        return rows
    tiled, untiled = comparison.tiled, comparison.untiled
    return [
        ("seconds per step", f"{tiled.step_seconds:.2f}", f"{untiled.step_seconds:.2f}",
         f"{tiled.step_seconds / untiled.step_seconds:.2f}"),
        ("peak activation memory", size(tiled.peak_bytes), size(untiled.peak_bytes),
         f"{tiled.peak_bytes / untiled.peak_bytes:.0%}"),
        *_units(tiled.units, untiled.units),
        ("largest relative gradient difference", f"{comparison.gradient_error:.1e}", "", ""),
    ]  # fmt: skip


def _units(tiled: float | None, untiled: float | None) -> list[tuple[str, ...]]:
    if tiled is None or untiled is None:
        return []
    return [("GEMM FLOPs / (2 N D F) per MLP", f"{tiled:.2f}", f"{untiled:.2f}", f"{tiled / untiled:.2f}")]


def _lines(outcome: Outcome, comparison: Comparison | None) -> list[tuple[str, str]]:
    recipe = outcome.recipe
    lines = [] if recipe.engine == "single" else [("engine", _engine(recipe))]
    lines += [("tiled", str(outcome.tiling) if outcome.tiling is not None else "nothing (tiled_mlp: false)")]
    if comparison is not None:
        tiled, untiled = comparison.tiled, comparison.untiled
        lines.append(("peak", f"tiled in {tiled.peak_phase}; untiled in {untiled.peak_phase}"))
        lines.append(("measured", comparison.how))
        lines += [("note", note) for note in comparison.notes]
    if outcome.losses:
        first, last = outcome.losses[0][1], outcome.losses[-5:]
        mean = sum(loss for _, loss in last) / len(last)
        lines.append(("loss", f"{first:.3f} at first, {mean:.3f} over the last {len(last)} of {outcome.step} steps"))
    lines.append(("saved", str(outcome.output)))
    if outcome.report is not None:
        lines.append(("report", str(outcome.report)))
    return lines


def _engine(recipe: Recipe) -> str:
    split = f", {recipe.sp_size} of them to a sequence" if recipe.sp_size > 1 else ""
    return f"{recipe.engine}, {recipe.nproc} processes{split}; seconds and memory are the first one's"


def print_plain(text: str) -> None:
    """Text as it is, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_stopped(outcome: Outcome) -> None:
    """Where an interrupted run can be continued."""
    directory = shlex.quote(str(outcome.recipe.output))
    console = Console(stderr=True)
    console.print(
        f"stopped after step {outcome.step}; checkpoint saved in {outcome.output}\n"
        f"continue with: seqtile train --resume --output {directory}",
        highlight=False,
        soft_wrap=True,
    )


def size(nbytes: int) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
