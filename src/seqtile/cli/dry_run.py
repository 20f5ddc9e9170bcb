"""``seqtile train --dry-run``: print the settings, the first sample and the plan; write nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.text import Text

from seqtile._errors import UserError
from seqtile._sentences import counted

if TYPE_CHECKING:
    from seqtile.train.read_data import Data
    from seqtile.train.recipe import Recipe
    from seqtile.train.rendered_rows import Tokens

SHOWN_RUNS, SHOWN_CHARACTERS = 12, 600
"""Parts of a row, and characters of each, that are shown."""

REPEATED = 4
"""Repetitions of a token from which it is written once, with their number."""

OPEN, CLOSE = "⟦", "⟧"


def dry_run(recipe: Recipe, progress: Any, nodes: int = 1) -> None:
    """Show what ``seqtile train`` would do, up to the weights, which are not loaded.

    Args:
        recipe: resolved.
        progress: shows the stages.
        nodes: that the processes are on.

    Raises:
        UserError: what a run would refuse of its rows.
    """
    from seqtile.train.load import tokenizer_of, why_attention_is_missing
    from seqtile.train.read_data import read_data
    from seqtile.train.run import fitted

    if recipe.engine != "single" and recipe.nproc is None:
        import torch

        recipe = recipe.model_copy(update={"nproc": max(1, torch.accelerator.device_count()) * nodes})
    # Rows do not depend on the processes, and accelerate would wait for them.
    alone = recipe.model_copy(update={"engine": "single", "nproc": None, "sp_size": 1, "cp_size": 1})
    data = read_data(alone, Path(recipe.output or "runs"), progress.stage)
    tokenizer = tokenizer_of(recipe)
    progress.stage("planning")
    notes: list[str] = []
    recipe = fitted(recipe, None, notes.append, nodes)
    plan = _plan_or_reason(recipe, nodes, data)
    missing = why_attention_is_missing(recipe)
    progress.end()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print("Settings", style="bold")
    console.print(yaml.safe_dump(_settings(recipe), sort_keys=False), end="")
    for note in notes:
        console.print(note)
    for name, row_set in data.sets.items():
        sample = row_set.sample
        console.print(f"\n{'Data' if name == 'train' else 'Evaluation data'}", style="bold")
        console.print(_describe_rows(data, name))
        console.print(
            f"\nFirst sample, {len(sample[0].ids):,} tokens; the loss covers those between {OPEN} and {CLOSE}:"
        )
        console.print(marked(sample[0], tokenizer))
    console.print("\nPlan", style="bold")
    if isinstance(plan, str):
        console.print(plan)
    else:
        from seqtile.cli.plan_show import show_plan

        show_plan(plan, recipe.max_length)
    if missing:
        console.print(f"\nOn this machine the run would stop: attention {recipe.attention}: {missing}")
    console.print("\nDry run: nothing was written and no weights were loaded.")


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's keys that are not the default."""
    from seqtile.train.recipe import OptionKeys, Recipe

    defaults = {name: field.default for model in (Recipe, OptionKeys) for name, field in model.model_fields.items()}
    values = recipe.model_dump(mode="json")
    return {name: value for name, value in values.items() if value not in (defaults.get(name), None, {}, [])}


def _describe_rows(data: Data, name: str) -> str:
    """Summarise the sampled rows."""
    from seqtile.train.data_summary import DataSummary

    row_set = data.sets[name]
    if row_set.summary is not None:
        return f"{row_set.source.dataset}: {row_set.summary}{row_set.row_format.advice}"
    lengths = [len(row.ids) for row in row_set.sample]
    limit = None if data.arguments.packing else data.arguments.max_length
    over = [] if limit is None else [length - limit for length in lengths if length > limit]
    summary = DataSummary(
        rows=len(lengths), tokens=sum(lengths), longest=max(lengths), max_length=limit, cut=len(over),
        cut_tokens=sum(over), sequences=len(lengths), trained=sum(row.trained(limit) for row in row_set.sample),
        left_out=row_set.left_out, trains_prompts=row_set.row_format.trains_prompts,
    )  # fmt: skip
    count = "as they come" if name == "train" and data.stream else counted(len(row_set.rows), "row")
    return f"{row_set.source.dataset}: {count}; sampled: {summary}{row_set.row_format.advice}"


def marked(row: Tokens, tokenizer: Any) -> Text:
    """A row's text; what counts in the loss is between marks, and green on a terminal."""
    text = Text()
    runs = row.runs()
    for counts, tokens in runs[:SHOWN_RUNS]:
        run_text = _decode(tokens, tokenizer)
        if len(run_text) > SHOWN_CHARACTERS:
            half = SHOWN_CHARACTERS // 2
            run_text = f"{run_text[:half]} ... ({len(tokens):,} tokens) ... {run_text[-half:]}"
        text.append(f"{OPEN}{run_text}{CLOSE}" if counts else run_text, style="green" if counts else "dim")
    if len(runs) > SHOWN_RUNS:
        text.append(f" ... ({sum(len(tokens) for _, tokens in runs[SHOWN_RUNS:]):,} tokens more)")
    return text


def _decode(tokens: list[int], tokenizer: Any) -> str:
    """Text of tokens; many of the same in a row, as those of a picture, are written once."""
    pieces, run = list[str](), list[int]()
    for token, group in itertools.groupby(tokens):
        count = len([*group])
        if count < REPEATED:
            run += [token] * count
        else:
            pieces += [tokenizer.decode(run), f"{tokenizer.decode([token])} x {count:,} "]
            run = []
    return "".join([*pieces, tokenizer.decode(run)])


def _plan_or_reason(recipe: Recipe, nodes: int, data: Data) -> Any:
    """Describe the plan of a step, or why it failed."""
    from seqtile.planner.memory_plan import plan
    from seqtile.train.fit import largest_pictures, request_of, with_pictures

    try:
        request, max_length = request_of(recipe, nodes=nodes), recipe.max_length
        if data.processor is not None:
            pictures = largest_pictures(request.config, data)
            request, max_length = replace(request, pictures=pictures), with_pictures(max_length, pictures)
        return plan(request, max_length)
    except UserError as error:
        return f"none: {error}"
    except Exception as error:  # noqa: BLE001 - the plan is optional: a model that cannot be planned trains all the same
        return f"none: {type(error).__name__}: {error}"
