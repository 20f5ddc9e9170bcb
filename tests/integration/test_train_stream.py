"""Rows that are read while they are trained on: each is looked at as it comes, and what is wrong is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import tiny_run
from refusals import refused
from seqtile.train.data import load_rows
from seqtile.train.data_summary import DataSummary
from seqtile.train.recipe import build_recipe, resolve
from seqtile.train.run import train
from seqtile.train.stream import Stream

GOOD = {"text": "the cat sees the house. " * 3}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def stream(path: Path, *, skip: bool = False) -> Stream:
    return Stream(load_rows(str(path), streaming=True), skip=skip)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, {"text": None}], "row 2: 'text' is null; fix it, or skip such rows with --skip-bad-rows"),
        ([GOOD, GOOD, {"text": " "}], "row 3: 'text' is empty; fix it"),
        ([GOOD, {"other": 1}], "row 2: 'text' is null"),
        ([GOOD, '{"text": "a'], "rows.jsonl', line 2: Unterminated string"),
        ([CHAT, {"messages": []}], "row 2: 'messages' holds no text"),
        ([CHAT, {"messages": [{"role": "user", "content": "a"}]}], "row 2: 'messages' has a prompt only"),
        ([{"input_ids": [1, 2]}, {"input_ids": []}], "row 2: 'input_ids' is empty"),
        ([{"input_ids": [1, 2], "labels": [1]}], "row 1: 'input_ids' and 'labels' have different lengths"),
        (
            [{"input_ids": [1, 2]}, {"input_ids": [1, 9]}],
            "row 2: 'input_ids' has an id outside the vocabulary",
        ),
    ],
)
def test_a_bad_row_stops_the_run_when_it_comes(tmp_path: Path, rows: list[Any], words: str):
    opened = None
    with refused("dataset.unreadable" if "line 2" in words else "dataset.invalid-row", words):
        opened = stream(write(tmp_path / "rows.jsonl", rows))
        opened.vocabulary = 9
        [*opened.rows()]
    assert opened is None or "line 2" in words or opened.summary.rows == len(rows)


def test_bad_rows_are_left_out_and_counted_once(tmp_path: Path):
    rows = [GOOD, {"text": None}, GOOD, {"text": ""}, {"text": None}]
    opened = stream(write(tmp_path / "rows.jsonl", rows), skip=True)
    for _ in range(2):
        assert len([*opened.rows()]) == 2
    assert opened.summary == DataSummary(5, left_out={"'text' is null": 2, "'text' is empty": 1})
    assert "left out: 2 where 'text' is null, 1 where 'text' is empty" in str(opened.summary)


@pytest.mark.parametrize(
    ("name", "rows", "refusal"),
    [("rows.jsonl", [], ("dataset.empty",)), ("rows.jsonl", [{"a": 1}], ("dataset.column-missing", "columns a;")),
     ("rows.txt", ["text"], ("dataset.text-files-streamed",))],
)  # fmt: skip
def test_what_is_known_from_the_start_is_refused_there(
    tmp_path: Path, name: str, rows: list[Any], refusal: tuple[str, ...]
):
    with refused(*refusal):
        stream(write(tmp_path / name, rows))


def test_no_row_that_can_be_trained_on(tmp_path: Path):
    opened = stream(write(tmp_path / "rows.jsonl", [{"text": ""}, {"text": None}]), skip=True)
    with refused("dataset.no-valid-row", "row 1"):
        [*opened.rows()]


def test_files_of_other_kinds_are_streamed(tmp_path: Path):
    Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "rows.parquet")
    assert [row["text"] for row in stream(tmp_path / "rows.parquet").rows()] == ["one", "two"]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"epochs": 2}, "streaming.without-steps"),
        ({"steps": 2, "packing": "bfd"}, "streaming.with-packing"),
        ({"steps": 2, "packing": True}, "streaming.with-packing"),
        ({"steps": 2, "engine": "zero3", "sp_size": 2}, "streaming.with-sp-size"),
        ({"steps": 2, "dataset": "demo"}, "streaming.demo"),
    ],
)
def test_settings_that_need_all_rows_are_refused(values: dict[str, Any], code: str):
    recipe, _ = build_recipe({"model": "m", "dataset": "rows.jsonl", "streaming": True, **values}, {})
    with refused(code):
        resolve(recipe)


def test_a_run_over_a_stream_is_the_run_over_its_rows_and_resumes(tmp_path: Path):
    model = tiny_run.save_model(tmp_path / "model")
    data = write(tmp_path / "rows.jsonl", [{"text": None}, *tiny_run.text_rows(3)])
    values = dict(
        model=str(model), dataset=str(data), streaming=True, skip_bad_rows=True, max_length=64, tile=32, report=False,
        learning_rate=1e-2, save_steps=2, trainer={"lr_scheduler_type": "constant"},
    )  # fmt: skip

    def losses(output: str, steps: int, **how: Any) -> tuple[tuple[int, float], ...]:
        recipe, _ = build_recipe({**values, "output": str(tmp_path / output), "steps": steps}, {})
        outcome = train(recipe, **how)
        data = outcome.data["train"]
        assert (data.rows, data.left_out) == (4, {"'text' is null": 1})
        # Three rows of a token a character and the end of text; each keeps 64 tokens, of which 63 are predicted.
        lengths = [len(row["text"]) + 1 for row in tiny_run.text_rows(3)]
        assert (data.tokens, data.trained, data.cut) == (sum(lengths), 63 * len(lengths), len(lengths))
        assert data.cut_tokens == sum(lengths) - 64 * len(lengths)
        return outcome.losses

    whole = losses("whole", 5)  # into the second pass
    assert len({loss for _, loss in whole}) == 5
    assert losses("parts", 2) == whole[:2]
    assert losses("parts", 5, resume=True) == whole
