"""What people's rows say reaches TRL's columns, or is refused: formats of axolotl, LLaMA-Factory, ms-swift, OpenAI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from refusals import refused
from seqtile.train.data import load_rows
from seqtile.train.media import RowError
from seqtile.train.read_data import check_rows
from seqtile.train.row_formats import COUNTED, RowFormat, find_key_columns

ASK, ANSWER = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "the cat."}
SYSTEM = {"role": "system", "content": "be short."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat", "n": 2}}}


def read(row: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return RowFormat(find_key_columns([*row], "rows", "text"), tuple(row), **settings).read(row)


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages]}


READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "be short."}, {"from": "human", "value": "who?"},
                           {"from": "gpt", "value": "the cat."}]},
        chat(SYSTEM, ASK, ANSWER),
    ),
    "ShareGPT with OpenAI's column": (
        {"messages": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "the cat."}]}, chat(ASK, ANSWER),
    ),
    "ShareGPT's roles with OpenAI's keys": (
        {"conversations": [{"role": "human", "content": "who?"}, {"role": "gpt", "content": "the cat."}]},
        chat(ASK, ANSWER),
    ),
    "LLaMA-Factory's calls": (
        {"conversations": [{"from": "human", "value": "who?"},
                           {"from": "function_call", "value": json.dumps(CALL["function"])},
                           {"from": "observation", "value": "cat"}, {"from": "gpt", "value": "the cat."}],
         "system": "be short.", "tools": '[{"name": "look"}]'},
        {**chat(SYSTEM, ASK, {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]},
                {"role": "tool", "content": "cat"}, ANSWER), "tools": '[{"name": "look"}]'},
    ),
    "OpenAI's blocks": (
        chat({"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "o?"}]},
             {"role": "assistant", "content": [{"type": "text", "text": "the cat."}]}),
        chat(ASK, ANSWER),
    ),
    "OpenAI's calls, their arguments in JSON, and nulls of Arrow": (
        chat({**ASK, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": '{"at": "cat", "n": 2}'}}]}),
        chat(ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
    ),
    "arguments that Arrow filled": (
        chat(ASK, {**ANSWER, "tool_calls": [{"name": "look", "arguments": {"at": "cat", "other": None}}]}),
        chat(ASK, {**ANSWER, "tool_calls": [{"name": "look", "arguments": {"at": "cat"}}]}),
    ),
    "OpenAI's former call": (
        chat(ASK, {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}),
        chat(ASK, {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {}}]}),
    ),
    "tools that Arrow filled": (
        {**chat(ASK, ANSWER), "tools": [{"name": "look", "strict": None}]},
        {**chat(ASK, ANSWER), "tools": '[{"name": "look"}]'},
    ),
    "no tools": ({**chat(ASK, ANSWER), "tools": "[]"}, chat(ASK, ANSWER)),
    "arguments of the template": (
        {**chat(ASK, ANSWER), "chat_template_kwargs": None}, {**chat(ASK, ANSWER), "chat_template_kwargs": {}},
    ),
    "a prompt beside messages": ({"prompt": "who?", "prompt_id": "x", **chat(ASK, ANSWER)}, chat(ASK, ANSWER)),
    "a system prompt that is there already": ({**chat(SYSTEM, ASK, ANSWER), "system": "be short. "},
                                              chat(SYSTEM, ASK, ANSWER)),
    "Alpaca": (
        {"instruction": "Translate.", "input": "le chat", "output": "the cat"},
        {"prompt": [{"role": "user", "content": "Translate.\nle chat"}],
         "completion": [{"role": "assistant", "content": "the cat"}]},
    ),
    "ms-swift's query": (
        {"query": "who?", "response": "the cat.", "system": "be short.", "history": [["hm?", "yes."]]},
        {"prompt": [SYSTEM, {"role": "user", "content": "hm?"}, {"role": "assistant", "content": "yes."}, ASK],
         "completion": [ANSWER]},
    ),
    "pairs of messages": ({"prompt": [ASK], "completion": [ANSWER]}, {"prompt": [ASK], "completion": [ANSWER]}),
    "padding at the end": ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, {"input_ids": [5, 6]}),
    "padding at the beginning, and labels": (
        {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "labels": [-100, -100, 6], "position_ids": [1, 0, 1]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ),
    "a mask of the completion": (
        {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "loss_mask": [1, 1, 0]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_rows_of_other_tools_are_read(case: str) -> None:
    row, expected = READ[case]
    assert read(row) == expected


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_a_message_that_is_left_out_of_the_loss_is_heeded_or_refused(key: str) -> None:
    row = chat(ASK, {**ANSWER, key: 0}, ASK, {**ANSWER, key: 1})
    assert read(row, assistant_only=True)[COUNTED] == [0, 1]
    with pytest.raises(RowError, match="assistant_only_loss: true"):
        read(row)
    assert COUNTED not in read(chat(ASK, {**ANSWER, key: True}), assistant_only=True)
    with pytest.raises(RowError, match="fractional loss weight"):
        read(chat(ASK, {**ANSWER, key: 0.5}), assistant_only=True)
    with pytest.raises(RowError, match="a message of 'user' is in the loss"):
        read(chat({**ASK, key: True}, ANSWER), assistant_only=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a history of objects": (
        {"query": "who?", "response": "the cat.", "history": [{"user": "hm?", "assistant": "yes."}]},
        "'history'",
    ),
    "an input that is a list": ({"instruction": "Count.", "input": ["a", "b"], "output": "2"}, "'input' is list"),
    "calls that are a number": (chat(ASK, {**ANSWER, "tool_calls": "5"}), "a tool call of type int"),
    "a picture in a message": (
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER),
        "'image_url'",
    ),
    "a part of a message": (chat(ASK, {**ANSWER, "train_detail": [{"begin_offset": 0}]}), "fractional loss weight"),
    "both system prompts": ({**chat(SYSTEM, ASK, ANSWER), "system": "be long."}, "both system prompts"),
    "tools that are no JSON": ({**chat(ASK, ANSWER), "tools": "look()"}, "not valid JSON"),
    "a call without a name": (chat(ASK, {**ANSWER, "tool_calls": [{"id": "1"}]}), "without a function name"),
    "ShareGPT without an answer": ({"conversations": [{"from": "human", "value": "who?"}]}, "has a prompt only"),
    "an answer left out of a pair": ({"prompt": [ASK], "completion": [{**ANSWER, "weight": 0}]}, "as 'messages'"),
    "a hole in the mask": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "in the middle"),
    "nothing but padding": ({"input_ids": [5], "attention_mask": [0]}, "masks every token"),
    "packed documents": ({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, "marks packed documents"),
    "packed documents by length": ({"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, "marks packed documents"),
    "a mask of another length": ({"input_ids": [5, 6, 7], "completion_mask": [1]}, "different lengths"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_something_else_is_refused(case: str) -> None:
    row, words = REFUSED[case]
    with pytest.raises(RowError, match=words):
        read(row)


def test_preferences_and_pictures_are_named() -> None:
    with refused("dataset.preferences"):
        find_key_columns(["prompt", "chosen", "rejected"], "rows", "text")


def test_a_column_of_pictures_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{**chat(ASK, ANSWER), "images": []}] * 2)
    assert len(check_rows(load_rows(str(path))).rows) == 2
    tiny_run.write_jsonl(path, [{**chat(ASK, ANSWER), "images": ["cat.png"]}, {**chat(ASK, ANSWER), "images": []}])
    with refused("dataset.media-column-in-text", "'images'"):
        check_rows(load_rows(str(path)))


@pytest.mark.parametrize("ending", ["parquet", "stream"])
@pytest.mark.parametrize("case", READ)
def test_they_stay_what_they_are_in_datasets(tmp_path: Path, case: str, ending: str) -> None:
    from datasets import Dataset

    from seqtile.train.stream import Stream

    row, expected = READ[case]
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [row] * 2)
    if ending == "parquet":
        path = tmp_path / "rows.parquet"
        Dataset.from_list([row] * 2).to_parquet(path)
    if ending == "stream":
        rows = [*Stream(load_rows(str(path), streaming=True)).rows()]
    else:
        rows = check_rows(load_rows(str(path))).rows.to_list()
    assert [{name: value for name, value in row.items() if value is not None} for row in rows] == [expected] * 2


def test_rows_with_calls_of_several_shapes_keep_them(tmp_path: Path) -> None:
    from datasets import Dataset

    calls = [{"name": "look", "arguments": {"at": "cat"}}, {"name": "go", "arguments": {"to": 3}}]
    rows = [chat(ASK, {"role": "assistant", "content": "", "tool_calls": [call]}) for call in calls]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert check_rows(load_rows(str(tmp_path / "rows.parquet"))).rows.to_list() == rows


def test_columns_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "who?", "weight": 0.5, **chat(ASK, ANSWER)}] * 2)
    with caplog.at_level("INFO", "seqtile"):
        rows = check_rows(load_rows(str(path))).rows
    assert rows.column_names == ["messages"]
    assert "unused columns: prompt, weight" in caplog.text
