"""The rows of a recipe: read, checked, and a sample of them rendered, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile.train import demo
from seqtile.train.arguments import trainer_arguments
from seqtile.train.check_rows import Checked, check_rows
from seqtile.train.data import load_rows
from seqtile.train.data_summary import how_to_change
from seqtile.train.load import load_config, tokenizer_of
from seqtile.train.recipe import DEMO, Recipe
from seqtile.train.rendered_rows import Tokens, check_rendered, takes_json_arguments, trained_tokenizer
from seqtile.train.row_formats import RowFormat
from seqtile.train.stream import Stream

if TYPE_CHECKING:
    from trl import SFTConfig  # type: ignore[attr-defined]


@dataclass
class Data:
    """What a run trains and evaluates on; the dictionaries' keys are ``"train"`` and ``"eval"``.

    Attributes:
        arguments: the trainer's.
        rows: to train on, in TRL's columns.
        stream: where they are from, if they are read while they are trained on.
        evaluated: rows to evaluate on, or None.
        left_out: how many rows were left out, by what is wrong with them.
        trains_prompts: whether prompts count in the loss.
        advice: which setting would change that.
        sample: rows as they will be trained.
    """

    arguments: SFTConfig
    rows: Any
    stream: Stream | None = None
    evaluated: Any = None
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    trains_prompts: dict[str, bool | None] = field(default_factory=dict)
    advice: dict[str, str] = field(default_factory=lambda: {"train": "", "eval": ""})
    sample: dict[str, list[Tokens]] = field(default_factory=dict)


def read_data(recipe: Recipe, output: Path, stage: Callable[[str], None]) -> Data:
    """Read and check the rows of ``recipe``.

    Args:
        recipe: resolved.
        output: the run's directory, which the trainer's arguments name; nothing is written.
        stage: is told what is being done.

    Raises:
        UserError: rows or settings of which something would be trained that they do not say.
    """
    load_config(recipe)  # what it refuses costs no reading
    tokenizer = trained_tokenizer(tokenizer_of(recipe), recipe.trainer)
    how = {
        "text_field": recipe.trainer.get("dataset_text_field", "text"),
        "skip": recipe.skip_bad_rows,
        "assistant_only": bool(recipe.trainer.get("assistant_only_loss")),
        "completion_only": recipe.trainer.get("completion_only_loss"),
        "json_arguments": takes_json_arguments(tokenizer),
    }

    def read(key: str, dataset: str, split: str) -> Checked:
        stage(f"reading {dataset}")
        loaded = load_rows(dataset, key=key, split=split, text_field=how["text_field"])
        stage(f"checking {len(loaded.rows):,} rows")
        return check_rows(loaded, dataset, **how)

    stream: Stream | None = None
    checked: dict[str, Checked] = {}
    if recipe.streaming:
        stage(f"reading {recipe.dataset}")
        loaded = load_rows(recipe.dataset, split=recipe.dataset_split, text_field=how["text_field"], streaming=True)
        stream = Stream(loaded, recipe.dataset, **how)
    elif recipe.dataset != DEMO:
        checked["train"] = read("dataset_split", recipe.dataset, recipe.dataset_split)
    if recipe.eval_dataset is not None:
        checked["eval"] = read("eval_split", recipe.eval_dataset, recipe.eval_split)
    rows = checked["train"].rows if "train" in checked else None
    documents = "train" in checked and checked["train"].loaded.documents
    arguments = trainer_arguments(recipe, output, documents=documents, rows=0 if rows is None else len(rows))
    data = Data(
        arguments,
        stream.rows() if stream else demo.demo_rows(tokenizer, recipe.max_length) if rows is None else rows,
        stream,
        checked["eval"].rows if "eval" in checked else None,
    )
    if stream is None and rows is None:
        data.sample["train"] = [Tokens(row["input_ids"], row["input_ids"]) for row in data.rows.select([0])]
        data.trains_prompts["train"] = None
    stage("rendering a sample of the rows")

    def render(name: str, dataset: str, sample: Any, row_format: RowFormat, place: Callable[[int], str]) -> None:
        data.sample[name] = check_rendered(sample, row_format, tokenizer, arguments, dataset, place)
        data.trains_prompts[name] = row_format.trains_prompts
        setting = "assistant_only_loss" if row_format.is_chat else "completion_only_loss"
        data.advice[name] = how_to_change(row_format.trains_prompts, setting)

    if stream is not None:
        render("train", recipe.dataset, stream.sample(), stream.row_format, lambda number: f"row {number + 1}")
    for name, checked_rows in checked.items():
        dataset = recipe.dataset if name == "train" else str(recipe.eval_dataset)
        numbers, data.left_out[name] = [*checked_rows.sample], checked_rows.left_out
        render(name, dataset, checked_rows.rows.select(numbers), checked_rows.row_format, partial(_place, checked_rows))
    return data


def _place(checked: Checked, number: int) -> str:
    """Where a row of the sample stands."""
    return checked.loaded.place([*checked.sample.values()][number])
