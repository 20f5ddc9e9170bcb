"""A sample of the rows is rendered as it will be trained, and compared with what the rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny_run
from refusals import refused
from seqtile.train.read_data import Data, read_data
from seqtile.train.recipe import build_recipe, resolve

ASK, ANSWER = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "the cat."}
CALL = {"name": "look", "arguments": {"at": "cat"}}

STRICT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content.split('</think>')[-1] }}<end>"
    "{% endgeneration %}{% elif m.role == 'user' %}U:{{ m.content | trim }}<end>{% elif m.role == 'tool' %}T:"
    "{{ m.content | tojson }}<end>{% endif %}{% endfor %}"
)
"""Knows users, assistants, whose thoughts it leaves out, and tools; nothing else."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import AutoTokenizer

    models = {}
    for name, template in {"any role": None, "strict": STRICT, "none": ""}.items():
        models[name] = tiny_run.save_model(tmp_path_factory.mktemp("model"))
        if template is not None:
            tokenizer = AutoTokenizer.from_pretrained(models[name])
            tokenizer.chat_template = template or None
            (models[name] / "chat_template.jinja").unlink()
            tokenizer.save_pretrained(models[name])
    return models


def read(model: Path, path: Path, rows: list[dict[str, Any]], **trainer: Any) -> Data:
    tiny_run.write_jsonl(path, rows)
    values = {"model": str(model), "dataset": str(path), "max_length": 64, "trainer": trainer}
    return read_data(resolve(build_recipe(values, {})[0]), path.parent / "out", lambda _: None)


def counted(data: Data, model: Path) -> list[str]:
    """The text of each part of the first row that counts in the loss."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(run) for counts, run in data.sets["train"].sample[0].runs() if counts]


ASSISTANT = {"assistant_only_loss": True}
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "all of a chat": ({"messages": [ASK, ANSWER]}, {}, ["U:who?<end>A:the cat.<end>"]),
    "assistants": ({"messages": [ASK, ANSWER, ASK, ANSWER]}, ASSISTANT, ["the cat.<end>"] * 2),
    "ShareGPT's assistants": (
        {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "the cat."}]}, ASSISTANT,
        ["the cat.<end>"],
    ),
    "one assistant of two": (
        {"messages": [ASK, {**ANSWER, "weight": 0}, ASK, {"role": "assistant", "content": "a dog.", "weight": 1}]},
        ASSISTANT, ["a dog.<end>"],
    ),
    "completions": ({"instruction": "who?", "output": "the cat."}, {}, ["A:the cat.<end>"]),
    "pairs, prompts too": ({"prompt": "who? ", "completion": "the cat."}, {"completion_only_loss": False},
                           ["who? the cat.<end>"]),
    "ids with a mask": ({"input_ids": [70, 71, 72], "completion_mask": [0, 1, 1]}, {}, ["GH"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_the_tokens_that_count_are_what_the_row_says(models: dict[str, Path], tmp_path: Path, case: str) -> None:
    row, trainer, expected = COUNTED[case]
    data = read(models["strict"], tmp_path / "rows.jsonl", [row] * 2, **trainer)
    if case == "ids with a mask":
        expected = counted(read(models["strict"], tmp_path / "text.jsonl", [{"input_ids": [71, 72]}]), models["strict"])
    assert counted(data, models["strict"]) == expected


def long(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "a role": ("strict", {"messages": [ASK, {"role": "critic", "content": "a"}, ANSWER]}, {},
               ("dataset.rendered-row-wrong", "'critic'")),
    "a system prompt": ("strict", {"messages": [ASK, ANSWER], "system": "a"}, {},
                        ("dataset.rendered-row-wrong", "'system'")),
    "tool calls": ("strict", {"messages": [ASK, {**ANSWER, "tool_calls": [CALL]}]}, {},
                   ("dataset.rendered-row-wrong", "tool calls")),
    "no template": ("none", {"messages": [ASK, ANSWER]}, {}, ("dataset.chat-without-template",)),
    "a setting of chat": ("strict", {"text": "the cat."}, ASSISTANT, ("trainer.assistant-loss-without-chat",)),
    "a setting of pairs": ("strict", {"messages": [ASK, ANSWER]}, {"completion_only_loss": True},
                           ("trainer.completion-loss-without-pairs", "assistant_only")),
    "shifted labels": ("strict", {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, {},
                       ("dataset.rendered-row-wrong", "shifted")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_trained_is_refused_with_its_line(models: dict[str, Path], tmp_path: Path, case: str) -> None:
    model, row, trainer, refusal = REFUSED[case]
    with refused(*refusal):
        read(models[model], tmp_path / "rows.jsonl", [row] * 2, **trainer)


REPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "thoughts": ("strict", {"messages": [ASK, long("<think>hm, a cat</think>the cat.")]}, "changes or shortens"),
    "thoughts beside": ("strict", {"messages": [ASK, {**ANSWER, "reasoning_content": "hm"}]}, "'reasoning_content'"),
    "tools": ("strict", {"messages": [ASK, ANSWER], "tools": [{"name": "look"}]}, "drops 'tools'"),
    "a role of its own": ("any role", {"messages": [ASK, {"role": "critic", "content": "a"}, ANSWER]}, "'critic'"),
    "other labels": ("strict", {"input_ids": [5, 6, 7], "labels": [5, 6, 8]}, "differ from"),
}  # fmt: skip


@pytest.mark.parametrize("case", REPORTED)
def test_what_the_template_changes_is_reported(
    models: dict[str, Path], tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, row, words = REPORTED[case]
    with caplog.at_level("WARNING", "seqtile"):
        read(models[model], tmp_path / "rows.jsonl", [row] * 2)
    assert words in caplog.text and "row 1" in caplog.text and "2 of 2 rows" in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, ANSWER, {"role": "tool", "content": '{"at":\n"cat"}'}, ANSWER]},
        {"messages": [{"role": "user", "content": "  a\n\n b 🐈 é <end> "}, ANSWER]},
        {"prompt": "", "completion": "the cat."},
        {"text": "the cat."},
    ],
)
def test_nothing_is_said_of_rows_that_are_trained_as_they_are(
    models: dict[str, Path], tmp_path: Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "seqtile"):
        read(models["strict"], tmp_path / "rows.jsonl", [row] * 2)
    assert not caplog.records


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<turn>"
    "{% endgeneration %}{% else %}{{ m.content }}<turn>{% endif %}\n{% endfor %}"
)
STOPS: dict[str, tuple[str, list[int] | int | None, dict[str, Any], str]] = {
    "another token": (CHATML, None, {}, "trainer: {eos_token: '<turn>'}"),
    "another token, in a list that lacks it": (CHATML, [0, 5], {}, "trainer: {eos_token: '<turn>'}"),
    "another token, assistants alone": (CHATML, None, ASSISTANT, "trainer: {eos_token: '<turn>'}"),
    "another token, named": (CHATML, None, {"eos_token": "<turn>"}, ""),
    "one of generation's list": (CHATML, [0, 257], {}, ""),
    "the only one of generation's": (CHATML, 257, {}, ""),
    "no token": (CHATML.replace("<turn>", "."), None, {}, "ends with"),
    "a mark that ends before it": (
        CHATML.replace("<turn>{% endgen", "{% endgen").replace("{% else", "<turn>{% else"), 257, ASSISTANT, "loss"),
    "that mark, and a loss of all": (
        CHATML.replace("<turn>{% endgen", "{% endgen").replace("{% else", "<turn>{% else"), 257, {}, ""),
    "the tokenizer's": (CHATML.replace("<turn>", "<end>"), None, ASSISTANT, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPS)
def test_a_turn_that_generation_would_not_end_is_reported(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, which names what to do; none where a token that is trained stops generation."""
    from transformers import AutoTokenizer, GenerationConfig

    template, stops, trainer, words = STOPS[case]
    model = tiny_run.save_model(tmp_path / "model", vocab_size=258)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").unlink()
    if stops is not None:
        GenerationConfig(eos_token_id=stops).save_pretrained(model)
    with caplog.at_level("WARNING", "seqtile"):
        read(model, tmp_path / "rows.jsonl", [{"messages": [ASK, ANSWER, ASK, ANSWER]}] * 3, **trainer)
    assert len(caplog.records) == bool(words), caplog.text
    assert words in caplog.text and ("3 of 3 rows" in caplog.text or not words)


@pytest.mark.parametrize("written", ["{{ c.function.arguments | tojson }}", "{{ 'with ' + c.function.arguments }}"])
@pytest.mark.parametrize("arguments", [{"at": "cat"}, '{"at": "cat"}'])
def test_arguments_of_calls_are_written_once(
    models: dict[str, Path], tmp_path: Path, written: str, arguments: Any
) -> None:
    """Whether the row has them as an object or as OpenAI's JSON, and whichever of these the template takes."""
    template = tmp_path / "template.jinja"
    call = "{% for c in m.tool_calls %}C:{{ c.function.name }}" + written + "{% endfor %}"
    template.write_text("{% for m in messages %}{{ m.content }}" + call + "{% endfor %}")
    rows = [
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]},
            ]
        }
    ]
    data = read(models["strict"], tmp_path / "rows.jsonl", rows, chat_template_path=str(template))
    assert counted(data, models["strict"])[0].replace("with ", "") == 'who?C:look{"at": "cat"}'


def test_a_template_that_marks_other_parts_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    rows = [{"messages": [ASK, {**ANSWER, "weight": 0}, {**ANSWER, "weight": 1}]}]
    template.write_text(STRICT.replace("A:{% generation %}", "{% generation %}"))  # two answers side by side are one
    with refused("dataset.masked-spans-differ", "1 spans for its 2"):
        read(models["strict"], tmp_path / "rows.jsonl", rows, chat_template_path=str(template), **ASSISTANT)
    template.write_text("{% for m in messages %}{{ m.content }}{% generation %}<end>{% endgeneration %}{% endfor %}")
    with refused("dataset.rendered-row-wrong", "row 1"):
        read(models["strict"], tmp_path / "rows.jsonl", [{"messages": [ASK, ANSWER]}], **ASSISTANT,
             chat_template_path=str(template))  # fmt: skip


def test_a_sample_of_each_file_is_looked_at(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "c.jsonl"):
        tiny_run.write_jsonl(tmp_path / "rows" / name, [{"messages": [ASK, ANSWER]}] * 100)
    bad = {"messages": [ASK, {"role": "critic", "content": "a"}, ANSWER]}
    tiny_run.write_jsonl(tmp_path / "rows" / "b.jsonl", [bad])
    values = {"model": str(models["strict"]), "dataset": str(tmp_path / "rows"), "max_length": 64}
    recipe = resolve(build_recipe(values, {})[0])
    with refused("dataset.rendered-row-wrong", "file 'b.jsonl', row 1", "'critic'"):
        read_data(recipe, tmp_path / "out", lambda _: None)


@pytest.mark.parametrize(
    ("case", "streaming"),
    [("one assistant of two", False), ("one assistant of two", True), ("completions", False),
     ("pairs, prompts too", True), ("ids with a mask", False), ("ids with a mask", True)],
)  # fmt: skip
def test_the_sample_is_what_the_trainer_trains(
    models: dict[str, Path], tmp_path: Path, case: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqtile.train.run import train
    from seqtile.train.trainer import Trainer

    class Seen(BaseException):
        pass

    seen: list[dict[str, Any]] = []

    def stop(trainer: Any, _: Any) -> None:
        seen.extend(dict(row) for row in trainer.train_dataset)
        raise Seen

    monkeypatch.setattr(Trainer, "train_all", stop)
    row, trainer, _ = COUNTED[case]
    data = read(models["strict"], tmp_path / "rows.jsonl", [row] * 2, **trainer)
    values = {"model": str(models["strict"]), "dataset": str(tmp_path / "rows.jsonl"), "streaming": streaming,
              "max_length": 64, "trainer": trainer, "output": str(tmp_path / "out"), "steps": 1}  # fmt: skip
    with pytest.raises(Seen):
        train(build_recipe(values, {})[0])
    assert [(row["input_ids"], row["labels"]) for row in seen] == [
        tuple(tokens) for tokens in data.sets["train"].sample
    ]
