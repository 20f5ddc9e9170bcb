"""Data is checked before it is trained on: every row, with its file, and counted."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_run
from refusals import command_refused, refused
from seqtile.train.data import load_rows
from seqtile.train.data_summary import DataSummary
from seqtile.train.read_data import check_rows
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train
from seqtile.train.stream import Stream

GOOD = {"text": "the cat sees the house."}
ASK, ANSWER = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "the cat."}
CHAT = {"messages": [ASK, ANSWER]}
PAIR = {"prompt": "who? ", "completion": "the cat."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def checked(path: Path, *, skip: bool = False) -> tuple[int, dict[str, int]]:
    result = check_rows(load_rows(str(path)), skip=skip)
    return len(result.rows), result.left_out


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "null text": (GOOD, {"text": None}, "'text' is null"),
    "empty text": (GOOD, {"text": " \n"}, "'text' is empty"),
    "a number": (GOOD, {"text": 3}, "'text' is int, expected text"),
    "messages that are a text": (CHAT, {"messages": "who?"}, "'messages' is str, expected a list of messages"),
    "no messages": (CHAT, {"messages": []}, "'messages' holds no text"),
    "no role": (CHAT, {"messages": [{"content": "who?"}]}, "a message without role or content"),
    "no content": (CHAT, {"messages": [{"role": "assistant"}]}, "a message without role or content"),
    "no answer": (CHAT, {"messages": [ASK]}, "'messages' has a prompt only"),
    "mixed kinds": (CHAT, GOOD, "'messages' is null"),
    "an empty completion": (PAIR, {"prompt": "who?", "completion": ""}, "'completion' is empty"),
    "no ids": ({"input_ids": [1, 2]}, {"input_ids": []}, "'input_ids' is empty"),
    "a null id": ({"input_ids": [1, 2]}, {"input_ids": [1, None]}, "entries that are not token ids"),
    "labels of another length": ({"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1]},
                                 "'input_ids' and 'labels' have different lengths"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, case: str) -> None:
    good, bad, words = BAD[case]
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [good, good, bad])
    with refused("dataset.invalid-row", words, "rows.jsonl', row 3:", "1 of 3 rows", "--skip-bad-rows"):
        checked(path)
    count, left_out = checked(path, skip=True)
    assert count == 2 and [*left_out.values()] == [1] and words in next(iter(left_out))


def test_nothing_right_is_refused_even_where_bad_rows_are_left_out(tmp_path: Path) -> None:
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}] * 2)
    with refused("dataset.no-valid-row", "row 1", "2 rows"):
        checked(path, skip=True)


@pytest.mark.parametrize("row", [GOOD, CHAT, PAIR, {"input_ids": [1, 2]}, {
    "conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "the cat."}]}, {
    "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}]}, {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "who?"}]}, ANSWER]}, {
    "prompt": [ASK], "completion": [ANSWER]}, {"prompt": "", "completion": "the cat."},
])  # fmt: skip
def test_good_rows_stay(tmp_path: Path, row: dict[str, Any]) -> None:
    assert checked(tiny_run.write_jsonl(tmp_path / "rows.jsonl", [row] * 3)) == (3, {})


def test_a_bad_row_of_several_files_is_named_with_its_file(tmp_path: Path) -> None:
    from datasets import Dataset

    for ending in ("jsonl", "json", "parquet"):
        folder = tmp_path / ending
        folder.mkdir()
        for name, rows in (("a", [GOOD] * 3), ("b", [GOOD, {"text": ""}])):
            if ending == "parquet":
                Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
            elif ending == "json":
                (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
            else:
                tiny_run.write_jsonl(folder / f"{name}.jsonl", rows)
        with refused("dataset.invalid-row", f"file 'b.{ending}', row 2"):
            checked(folder)


ROW = b'{"text": "tea"}\n'
BROKEN: list[tuple[str, bytes, str]] = [
    ("rows.jsonl", ROW + b'{"text": \n' + ROW, "line 2: Expecting value"),
    ("rows.jsonl", ROW * 3 + b'{"text": "a\n' + ROW, "line 4: Unterminated string"),
    ("rows.jsonl", ROW + b"\n\n" + b'{"text": "a"', "line 4: Expecting ','"),
    ("rows.jsonl", ROW + b'{"text": "a"} x\n', "line 2: Extra data at character 15"),
    ("rows.jsonl", ROW + b'["a"]\n', "line 2: expected an object"),
    ("rows.jsonl", ROW + b'{"text": "a", "text": "b"}\n', "line 2: 'text' is there twice"),
    ("rows.jsonl", b"<html>\n", "line 1: Expecting value"),
    ("rows.jsonl", '{"text": "tea"}\n{"text": "caf\u00e9"}\n'.encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
    ("rows.json", b'[{"text": "a"},\n{"text": "b"\n]', "line 3: Expecting ','"),
    ("rows.jsonl.gz", gzip.compress(ROW * 2 + b'{"text": \n'), "line 3: Expecting value"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_named(tmp_path: Path, name: str, content: bytes, words: str, streaming: bool) -> None:
    """Lines are counted from 1, as an editor does, in the second of two files too."""
    good = tmp_path / f"a.{name.partition('.')[2]}"
    good.write_bytes(
        ROW if name.endswith("jsonl") else gzip.compress(ROW) if name.endswith("gz") else b"[" + ROW + b"]"
    )
    (tmp_path / name).write_bytes(content)
    with refused("dataset.unreadable", f"{tmp_path / name}', {words}"):
        [*Stream(load_rows(str(tmp_path), streaming=True)).rows()] if streaming else load_rows(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "refusal"),
    [
        ("rows.csv", "text\ntea\ncaf\u00e9\n".encode("latin-1"), ("dataset.unreadable", "'utf-8' codec")),
        ("rows.csv", b'text\n"tea"\n"never closed\nmilk\n', ("dataset.unreadable", "EOF inside string")),
        ("rows.jsonl", b"", ("dataset.empty",)),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, name: str, content: bytes, refusal: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(*refusal, name):
        load_rows(str(tmp_path / name))


NEW = "<new>"
NEW_TOKEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": ([GOOD, GOOD, {"text": f"the {NEW} cat"}], {}),
    "a chat": ([CHAT, CHAT, {"messages": [ASK, {"role": "assistant", "content": NEW}]}], {}),
    "a pair": ([PAIR, PAIR, {"prompt": NEW, "completion": "the cat."}], {}),
    "after a row that is left out": ([GOOD, {"text": ""}, {"text": NEW}], {"skip_bad_rows": True}),
    "packed": ([GOOD, GOOD, {"text": NEW}], {"packing": "bfd"}),
    "beyond the cut": ([GOOD, GOOD, {"text": "the cat " * 20 + NEW}], {}),
    "adapters": ([GOOD, GOOD, {"text": NEW}], {"lora": {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}}),
    "a stream": ([GOOD, GOOD, {"text": NEW}], {"streaming": True}),
}


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("case", NEW_TOKEN)
def test_a_token_without_an_embedding_is_refused_before_the_first_step(
    model: Path, tmp_path: Path, case: str, kind: str
) -> None:
    """A token was added to the tokenizer, and the model was not resized; one row of the last has it."""
    from transformers import AutoTokenizer

    own = Path(shutil.copytree(model, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.add_tokens([NEW])
    tokenizer.save_pretrained(own)
    rows, values = NEW_TOKEN[case]
    bad = tiny_run.write_jsonl(tmp_path / "bad.jsonl", rows)
    sets = {"dataset": str(bad)}
    if kind == "eval":
        values = {key: value for key, value in values.items() if key not in ("streaming", "skip_bad_rows")}
        rows = [row for row in rows if row != {"text": ""}]
        bad = tiny_run.write_jsonl(tmp_path / "bad.jsonl", [rows[0], *rows])
        sets = {"dataset": str(tiny_run.write_jsonl(tmp_path / "good.jsonl", rows[:1])), "eval_dataset": str(bad)}
    defaults = dict(max_length=64, steps=3, batch_size=3, report=False, tile=16)
    recipe, _ = build_recipe({**defaults, "model": str(own), "output": str(tmp_path / "out"), **sets, **values}, {})
    number = len(bad.read_text().splitlines())
    with refused("dataset.token-without-embedding", f"row {number}: ", "257 ('<new>')"):
        train(recipe)
    assert values.get("streaming") or not (tmp_path / "out").exists()


def test_csv_has_columns_of_text_and_is_no_prose(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,completion\n"who,\nand why?",NA\n12,007\n', encoding="utf-8")
    assert load_rows(str(path)).rows[:] == {"prompt": ["who,\nand why?", "12"], "completion": ["NA", "007"]}
    assert load_rows(str(path)).documents is False
    (tmp_path / "rows.tsv").write_text("text\tnumber\na, b\t1\n")
    assert load_rows(str(tmp_path / "rows.tsv")).rows["text"][:] == ["a, b"]
    path.write_text("question,answer\na,b\n")
    with refused("dataset.column-missing", "answer, question"):
        checked(path)


def texts(*lengths: int) -> list[dict[str, Any]]:
    """Rows of so many bytes, each a token, after which the trainer puts the end-of-text token."""
    return [{"text": "x" * length} for length in lengths]


def pairs(*lengths: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"prompt": "p" * prompt, "completion": "c" * completion} for prompt, completion in lengths]


MASKED = "no token of the loss is left within max_length"
COUNTED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], DataSummary]] = {
    # 10, 80 and 64 tokens; the second loses 16; the first token of each is predicted by none.
    "text": (texts(9, 79, 63), {}, DataSummary(3, 154, 80, 64, 1, 16, 3, 9 + 63 + 63)),
    # 15 tokens of which 5 train, end of text included; 76 of which the first 64 are prompt; 60 and 10, 4 of these left.
    "pairs": (pairs((10, 4), (70, 5), (60, 9)), {}, DataSummary(3, 15 + 76 + 70, 76, 64, 2, 12 + 6, 2, 5 + 4,
                                                                {MASKED: 1}, False)),
    "left out": ([*texts(9), {"text": ""}, {"text": None}, *texts(9), {"text": ""}], {"skip_bad_rows": True},
                 DataSummary(2, 20, 10, 64, 0, 0, 2, 18, {"'text' is empty": 2, "'text' is null": 1})),
    # 150 tokens in one stream: 64, 64 and 22.
    "wrapped": (texts(9, 79, 59), {"packing": "wrapped"}, DataSummary(3, 150, 80, 64, 0, 0, 3, 147)),
    # 10 + 50 in one sequence and 64 in another: three documents, each with a first token.
    "packed": (texts(9, 79, 49), {"packing": "bfd"}, DataSummary(3, 140, 80, 64, 1, 16, 2, 9 + 63 + 49)),
    "ids": ([{"input_ids": [*range(1, 41)]}, {"input_ids": [5]}], {}, DataSummary(2, 41, 40, 64, 0, 0, 2, 39)),
    "labels": ([{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}], {}, DataSummary(1, 3, 3, 64, 0, 0, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_the_summary_is_what_was_counted_by_hand(
    model: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from seqtile.train.trainer import Trainer

    class Seen(BaseException):
        pass

    seen: list[DataSummary] = []

    def stop(trainer: Any, _: Any) -> None:
        seen.append(trainer.data["train"])
        raise Seen

    monkeypatch.setattr(Trainer, "train_all", stop)
    rows, values, expected = COUNTED[case]
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", rows)
    given = {"model": str(model), "dataset": str(path), "output": str(tmp_path / "out"), "max_length": 64, "steps": 1}
    with caplog.at_level("INFO", "seqtile"), pytest.raises(Seen):
        train(build_recipe({**given, **values}, {})[0])
    assert seen == [expected]
    assert f"data: {expected}" in caplog.text


@pytest.mark.parametrize(
    "rows",
    [pairs((70, 5)), [{"input_ids": [5]}], [{"input_ids": [1, 2, 3], "labels": [7, -100, -100]}]],
    ids=["the prompt fills max_length", "one token", "masked labels"],
)
def test_nothing_is_trained_where_no_token_counts(model: Path, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", rows)
    command = ["train", "--model", str(model), "--dataset", str(path), "--max-length", "64"]
    command_refused([*command, "--output", str(tmp_path / "out")], "dataset.no-label", "train data")
    assert not (tmp_path / "out").exists()


def test_many_rows_are_checked_by_several_processes_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("seqtile.train.data.cpu_cores", lambda: 2)
    monkeypatch.setattr("seqtile.train.data.ROWS_PER_PROCESS", 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [GOOD] * 5 + [{"text": ""}])
    assert checked(path, skip=True) == (5, {"'text' is empty": 1})
    monkeypatch.setattr("seqtile.train.row_formats.RowFormat.read", lambda *_: pytest.fail("looked at again"))
    assert checked(path, skip=True) == (5, {"'text' is empty": 1})
