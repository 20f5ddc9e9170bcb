"""``seqtile verify``."""

from __future__ import annotations

import json
import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from seqtile._errors import UserError
from seqtile._log import log_to_stderr
from seqtile.cli.flags import flag, option_flags, recipe_flags, takes
from seqtile.train.recipe import parse_lora

if TYPE_CHECKING:
    from seqtile.train.recipe import Recipe
    from seqtile.verification import VerifyResult

SAME_PEAK = 0.99
DIFFERS = 1
NO_ANSWER = 70  # EX_SOFTWARE of sysexits.h: a crash must differ from "gradients differ"


@dataclass(frozen=True)
class VerifyFlags:
    """The flags of ``seqtile verify``; ``keys`` are those that ``seqtile train`` has too."""

    model: str = flag(..., "Model directory or Hub id; random weights for a config.json alone", "PATH")
    tokens: int = flag(None, "Tokens per sequence (default 2048, or the model's positions if fewer)", "N")
    batch_size: int = flag(1, "Sequences", "N")
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = flag("layer", "Activation checkpointing of both runs: layer or none", "NAME")
    keys: dict[str, Any] = field(default_factory=dict)
    as_json: bool = flag(False, "Print one JSON object", names=("--json",))


@takes(
    VerifyFlags,
    keys=recipe_flags("lora", "dtype", "seed", "trust_remote_code"),
    options=option_flags("verify", show_default=False, defaults={"tile": "shards:8"}),
)
def command(flags: VerifyFlags) -> None:
    """Compare the gradients of a tiled and an untiled training step.

    Exit code 0: gradients are equal up to rounding. 1: a gradient differs; its parameter is named. 2: invalid input.
    70: the comparison failed.
    """
    settings = {
        **flags.keys, **flags.options, "model": flags.model, "batch_size": flags.batch_size,
        "checkpoint": flags.checkpoint,
    }  # fmt: skip
    if "lora" in settings:
        settings["lora"] = parse_lora(settings["lora"])
    if flags.tokens is not None:
        settings["max_length"] = flags.tokens
    from seqtile.train.check_early import check_model

    if not (flags.model.endswith(".json") and Path(flags.model).expanduser().is_file()):
        check_model(flags.model)
    from seqtile.train.verify_model import check, check_recipe, with_default_length

    recipe = check_recipe(settings)
    log_to_stderr()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if flags.tokens is None:
        recipe = with_default_length(recipe)
    try:
        result = check(recipe)
    except UserError:
        raise
    except Exception:  # noqa: BLE001 (any error is shown, and is not a result)
        traceback.print_exc()
        raise typer.Exit(NO_ANSWER) from None
    if flags.as_json:
        print(json.dumps(as_object(recipe, result), allow_nan=False))
    else:
        show(recipe, result)
    if not result.ok:
        raise typer.Exit(DIFFERS)


def as_object(recipe: Recipe, result: VerifyResult) -> dict[str, Any]:
    """The result for ``--json``; what is no finite number is null."""
    from seqtile.devices import package_version

    untiled, tiled, worst = result.untiled, result.tiled, result.worst
    report: dict[str, Any] = {
        "verdict": "same" if result.ok else "differ",
        "worst": {
            "name": worst.name, "difference": worst.l2, "untiled_error": worst.untiled_error,
            "tiled_error": worst.tiled_error, "of_allowed": worst.score, "problem": worst.problem,
            "dropout": worst.dropout,
        },
        "units": {"untiled": untiled.units, "tiled": tiled.units},
        "peak_gib": {"untiled": untiled.peak_bytes / 2**30, "tiled": tiled.peak_bytes / 2**30},
        "tiled": {"blocks": result.blocks, "tile": recipe.options.tile, "most_tiles": result.ran.tiles},
        "groups": {
            name: {
                "parameters": group.parameters, "difference": group.l2, "untiled_error": group.untiled_error,
                "tiled_error": group.tiled_error, "of_allowed": group.score,
            }
            for name, group in result.groups.items()
        },
        "with_dropout": {
            "compared": len(result.with_dropout),
            "difference": max((difference.l2 for difference in result.with_dropout), default=None),
        },
        "loss": {"untiled": untiled.loss, "tiled": tiled.loss},
        "seconds": {"untiled": untiled.seconds, "tiled": tiled.seconds},
        "truth": result.reference,
        "model": recipe.model,
        "tokens": recipe.max_length,
        "batch_size": recipe.batch_size,
        "notes": list(result.notes),
        "versions": {name: package_version(name) for name in ("seqtile", "torch", "transformers")},
    }  # fmt: skip
    finite: dict[str, Any] = _nulls_for_infinite(report)
    return finite


def _nulls_for_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nulls_for_infinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(recipe: Recipe, result: VerifyResult) -> None:
    """Two tables and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    from seqtile.cli.show import size

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAVY, title="seqtile verify", title_justify="left", pad_edge=False)
    table.add_column("gradients of", min_width=max(map(len, result.groups)))
    for name in ("number", "difference", "untiled error", "tiled error", "of allowed"):
        table.add_column(name.replace(" ", "\n"), justify="right")
    for name, group in result.groups.items():
        errors = [_scientific(error) for error in (group.untiled_error, group.tiled_error)]
        table.add_row(name, str(group.parameters), _scientific(group.l2), *errors, f"{group.score:.2f}")
    if result.with_dropout:
        most = max(result.with_dropout, key=lambda difference: difference.score)
        row = (str(len(result.with_dropout)), _scientific(most.l2), "-", "-", f"{most.score:.2f}")
        table.add_row("all, dropout on", *row)
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, needed)  # else a narrow terminal cuts the last column
    console.print(table)
    truth = f"; errors are against {result.reference}" if result.reference else ""
    console.print(
        f"difference: tiled against untiled{truth}; relative, the largest of each kind of parameter", soft_wrap=True
    )
    untiled, tiled = result.untiled, result.tiled
    costs = Table(box=box.SIMPLE_HEAVY, pad_edge=False)
    costs.add_column("")
    costs.add_column("untiled", justify="right")
    costs.add_column("tiled", justify="right")
    costs.add_row("loss", f"{untiled.loss:.6f}", f"{tiled.loss:.6f}")
    costs.add_row("matrix products per MLP", *(_scientific(run.units, ".2f") for run in (untiled, tiled)))
    costs.add_row("peak memory of the step", size(untiled.peak_bytes), size(tiled.peak_bytes))
    costs.add_row("seconds, including counting", f"{untiled.seconds:.2f}", f"{tiled.seconds:.2f}")
    console.print(costs)
    if tiled.peak_bytes >= SAME_PEAK * untiled.peak_bytes:
        console.print(
            "the peak of this step is outside the tiled blocks (usually the logits), so tiles do not lower it; use "
            "longer sequences (--tokens) to see their effect",
            soft_wrap=True,
        )
    console.print(
        f"{recipe.batch_size} x {recipe.max_length:,} random tokens, {result.blocks} blocks tiled, "
        f"tile {recipe.options.tile}: {result.ran}",
        soft_wrap=True,
    )
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    verdict = "same gradients" if result.ok else f"GRADIENTS DIFFER: {result.worst.name}: {result.worst.what()}"
    console.print(f"verdict: {verdict}", style="bold green" if result.ok else "bold red", soft_wrap=True, markup=False)


def _scientific(value: float | None, form: str = ".1e") -> str:
    return "-" if value is None else format(value, form)
