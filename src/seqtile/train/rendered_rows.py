"""Render a sample of rows with TRL, decode it, and compare it with the rows.

A chat template is a program. One that does not know a role, a tool call or a key renders nothing of it, without a word,
and the loss looks well. So TRL prepares a few rows of each file before any weight is loaded, and every message has to
be in what comes out.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile._compat import prepare_like_sft
from seqtile._errors import UserError, in_its_words, is_ours
from seqtile._log import first_rank_logger
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.media import MEDIA_COLUMNS
from seqtile.train.row_formats import ASKING_ROLES, COUNTED, RowFormat, texts_of, with_json_arguments

if TYPE_CHECKING:
    from datasets import Dataset

    from seqtile.train.data import Loaded
    from seqtile.train.data_summary import DataSummary

logger = first_rank_logger(__name__)

KNOWN_ROLES = (*ASKING_ROLES, "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Tokens(NamedTuple):
    """A row as it will be trained, before any cut; the label of a token that does not count is -100."""

    ids: Sequence[int]
    labels: Sequence[int]

    def runs(self) -> list[tuple[bool, list[int]]]:
        """Neighbouring tokens that count, or do not, together."""
        pairs = zip(self.ids, self.labels, strict=True)
        groups = itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED)
        return [(counts, [token for token, _ in group]) for counts, group in groups]

    def trained(self, max_length: int | None) -> int:
        """Tokens whose loss counts once the row is cut: the first of them is predicted by none."""
        return sum(label != IGNORED for label in self.labels[1:max_length])


@dataclass
class RowSet:
    """Rows to train, or to evaluate, on.

    Attributes:
        source: where they are from.
        rows: those that are right, in TRL's columns.
        row_format: how they were read.
        sample_rows: some of each file.
        sampled: the number of each of these in the source.
        left_out: how many rows were left out, by what is wrong with them.
        numbers: number of each row of ``rows`` in the source; None where they are the same.
        sample: ``sample_rows`` as they will be trained.
        summary: summary of rows with pictures, whose tokens are counted beforehand.
    """

    source: Loaded
    rows: Any
    row_format: RowFormat
    sample_rows: Dataset
    sampled: Sequence[int]
    left_out: dict[str, int] = field(default_factory=dict)
    numbers: Sequence[int] | None = None
    sample: list[Tokens] = field(default_factory=list)
    summary: DataSummary | None = None

    @property
    def media(self) -> set[tuple[bool, bool]]:
        """Whether rows have pictures, and videos: as many kinds as there are; empty if none has any."""
        if not self.row_format.takes_media:
            return set()
        kinds = {(bool(sizes["image"]), bool(sizes["video"])) for sizes in self.rows["sizes"][:]}
        return set() if kinds == {(False, False)} else kinds

    def drop_media(self) -> None:
        """No row has any: the rows are text."""
        if self.row_format.takes_media:
            self.rows = self.rows.remove_columns(MEDIA_COLUMNS)
            self.sample_rows = self.sample_rows.remove_columns(MEDIA_COLUMNS)


def _check_settings(dataset: str, row_format: RowFormat, is_chat: bool, tokenizer: Any, arguments: Any) -> None:
    """Refuse chat without a template, and settings of the loss that the rows do not support."""
    columns = " and ".join(row_format.key_columns)
    if is_chat and not tokenizer.chat_template:
        raise UserError(
            "dataset.chat-without-template",
            f"dataset {dataset!r} is chat, but the tokenizer has no chat template; set 'trainer: "
            "{chat_template_path: FILE.jinja}', or write the rows as text",
        )
    if arguments.assistant_only_loss and not (row_format.is_chat or row_format.is_pair):
        raise UserError(
            "trainer.assistant-loss-without-chat",
            f"assistant_only_loss needs chat messages, but dataset {dataset!r} has {columns}; drop it",
        )
    if arguments.completion_only_loss and not row_format.is_pair and row_format.key_columns != ("input_ids",):
        raise UserError(
            "trainer.completion-loss-without-pairs",
            f"completion_only_loss needs 'prompt' and 'completion', but dataset {dataset!r} has {columns}; drop it, "
            "or for chat use 'trainer: {assistant_only_loss: true}'",
        )


def check_rendered(
    row_set: RowSet, tokenizer: Any, arguments: Any, stops: Set[int] = frozenset(), collator: Any = None
) -> list[Tokens]:
    """Render the sample of a set; refuse rows that would lose messages or labels, report what the template changes.

    Args:
        tokenizer: result of :func:`trained_tokenizer`.
        stops: ids of the tokens at which the trained model stops generating.
        collator: makes batches of rows with pictures.

    Returns:
        The sample as it will be trained, before any cut.

    Raises:
        UserError: the first invalid row, or settings of the loss that no row supports.
    """
    rows, row_format, source, dataset = row_set.sample_rows, row_set.row_format, row_set.source, row_set.source.dataset
    is_chat = row_format.is_chat or isinstance(rows[0].get("prompt"), list)
    _check_settings(dataset, row_format, is_chat, tokenizer, arguments)
    try:
        if collator is None:
            prepared = mask_messages(prepare_like_sft(rows, tokenizer, arguments))
            prepared = prepared.select_columns(["input_ids", "labels"])
            sample = [Tokens(row["input_ids"], row["labels"]) for row in prepared]
        else:
            batches = [collator([row]) for row in rows]
            sample = [Tokens(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]
    except Exception as error:
        if isinstance(error, UserError) or is_ours(error):
            raise
        raise UserError(
            "dataset.not-rendered",
            f"dataset {dataset!r} cannot be rendered and tokenized: {in_its_words(error)}; fix the rows, or set "
            "another chat template with 'trainer: {chat_template_path: FILE.jinja}'",
        ) from error
    notes: dict[str, list[int]] = {}
    for number, (row, tokens) in enumerate(zip(rows, sample, strict=True)):
        try:
            row_notes = _compare_chat(row, row_format, tokens, tokenizer) if is_chat else _compare_ids(row)
        except ValueError as error:
            raise UserError(
                "dataset.rendered-row-wrong", f"dataset {dataset!r}, {source.place(row_set.sampled[number])}: {error}"
            ) from None
        if is_chat and stops:
            row_notes += _compare_end(row, row_format, tokens, tokenizer, stops)
        for note in dict.fromkeys(row_notes):
            notes.setdefault(note, []).append(number)
    for note, numbers in notes.items():
        first = source.place(row_set.sampled[numbers[0]])
        logger.warning("dataset %s, %s: %s (%d of %d rows checked)", dataset, first, note, len(numbers), len(sample))
    return sample


def check_ids(tokenised: Dataset, row_set: RowSet, vocabulary: int, tokenizer: Any) -> None:
    """Refuse token ids that the model has no embedding for; on some devices they would only crash, in their step.

    Cost: one pass over the ids, about a second per 10**9 of them.

    Args:
        tokenised: ``row_set.rows``, tokenised and not yet cut.
        row_set: where they are from.
        vocabulary: rows of the model's embedding.
        tokenizer: that made the ids, unless the rows came with them.

    Raises:
        UserError: with the first such id, its row and the cure.
    """
    from pyarrow import compute  # type: ignore[import-untyped]

    start = 0
    for table in tokenised.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1000):
        ids = table["input_ids"].combine_chunks()
        bounds = compute.min_max(ids.flatten()).as_py()
        for token in (bounds["min"], bounds["max"]):
            if token is not None and not 0 <= token < vocabulary:
                index = start + next(index for index, row in enumerate(ids.to_pylist()) if token in row)
                number = index if row_set.numbers is None else row_set.numbers[index]
                raise UserError(
                    "dataset.token-without-embedding",
                    f"dataset {row_set.source.dataset!r}, {row_set.source.place(number)}: "
                    + no_embedding(token, vocabulary, None if "input_ids" in row_set.rows.column_names else tokenizer),
                )
        start += len(ids)


def no_embedding(token: int, vocabulary: int, tokenizer: Any) -> str:
    """Describe a token id without an embedding, and the cure; without a tokenizer the ids are the dataset's own."""
    limit = f"but the model's vocabulary is 0 to {vocabulary - 1}"
    if tokenizer is None:
        return f"token id {token}, {limit}; tokenize the dataset with this model's tokenizer"
    return (
        f"the tokenizer gives token id {token} ({tokenizer.convert_ids_to_tokens(token)!r}), {limit}; save the model "
        "after model.resize_token_embeddings(len(tokenizer)), or use the tokenizer that came with it"
    )


def trained_tokenizer(tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """A tokenizer with what TRL's trainer changes of it.

    Args:
        tokenizer: the model's.
        settings: the recipe's section ``trainer``.

    Raises:
        UserError: no chat template at the path that the settings name.
    """
    path = settings.get("chat_template_path")
    if path is not None and Path(path).is_file():
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        from transformers import AutoTokenizer

        try:
            tokenizer.chat_template = AutoTokenizer.from_pretrained(path).chat_template
        except (OSError, ValueError) as error:
            raise UserError(
                "trainer.chat-template-unreadable",
                f"trainer.chat_template_path {path!r} is neither a file nor a tokenizer ({in_its_words(error)}); "
                "expected a .jinja file",
            ) from None
    if settings.get("eos_token") is not None:
        tokenizer.eos_token = settings["eos_token"]
    return tokenizer


def takes_json_arguments(tokenizer: Any) -> bool:
    """Whether the chat template cannot write a tool call with an object of arguments, and can with a JSON text."""
    call = {"type": "function", "function": {"name": "seqtile-call", "arguments": {"at": "cat"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]

    def is_written(messages: list[dict[str, Any]]) -> bool:
        try:
            return "seqtile-call" in tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # noqa: BLE001 - a template is a program, and this one needs other calls
            return False

    return bool(tokenizer.chat_template) and not is_written(messages) and is_written(with_json_arguments(messages))


def mask_messages(rows: Any) -> Any:
    """Labels of the messages that :data:`seqtile.train.row_formats.COUNTED` leaves out become -100.

    Args:
        rows: prepared by TRL with ``assistant_only_loss``: each message of an assistant is one run of labels.

    Raises:
        UserError: the chat template marks more or fewer runs.
    """
    from trl.data_utils import get_dataset_column_names

    return rows.map(_mask_messages) if COUNTED in get_dataset_column_names(rows) else rows


def _mask_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    if row[COUNTED] is None:
        return {"labels": row["labels"]}
    runs = Tokens(row["input_ids"], row["labels"]).runs()
    answers = sum(counts for counts, _ in runs)
    if answers != len(row[COUNTED]):
        raise UserError(
            "dataset.masked-spans-differ",
            f"a row masks messages, but the chat template marks {answers} spans for its {len(row[COUNTED])} "
            "assistant messages; use a template with one {% generation %} for each",
        )
    counted, labels = iter(row[COUNTED]), []
    for counts, tokens in runs:
        labels += tokens if counts and next(counted) else [IGNORED] * len(tokens)
    return {"labels": labels}


def _compare_chat(row: Mapping[str, Any], row_format: RowFormat, tokens: Tokens, tokenizer: Any) -> list[str]:
    """Describe what the template changes in a row; raise if a message is lost, or left out of the loss."""
    messages = row["messages"] if row_format.is_chat else [*row["prompt"], *row["completion"]]
    notes = _find_left_out(messages, row, tokenizer)
    text = _without_spaces(tokenizer.decode(tokens.ids))
    counted_text = _without_spaces("\n".join(tokenizer.decode(run) for counts, run in tokens.runs() if counts))
    answers = iter(row.get(COUNTED) or [])
    first_answer = 0 if row_format.is_chat else len(row["prompt"])
    for number, message in enumerate(messages):
        counts = message["role"] == "assistant" and number >= first_answer and next(answers, True)
        if not all(_contains(text, piece, tokenizer) for piece in texts_of(message)):
            notes.append(f"the chat template changes or shortens messages of {message['role']!r}")
        elif counts and not all(_contains(counted_text, piece, tokenizer) for piece in texts_of(message)):
            raise ValueError(
                "an assistant message is not in the loss; mark it in the chat template with {% generation %}, or "
                "drop assistant_only_loss"
            )
    unknown = {str(message["role"]) for message in messages} - {*KNOWN_ROLES}
    return notes + [
        f"the chat template does not support role {role!r}"
        for role in sorted(unknown)
        if role not in tokenizer.chat_template
    ]


def _compare_end(
    row: Mapping[str, Any], row_format: RowFormat, tokens: Tokens, tokenizer: Any, stops: Set[int]
) -> list[str]:
    """Report a chat of which no trained token would stop generation: the model would not learn to end its turn."""
    messages = row["messages" if row_format.is_chat else "completion"]
    trained = {token for token, label in zip(tokens.ids, tokens.labels, strict=True) if label != IGNORED}
    if messages[-1]["role"] != "assistant" or trained & stops:
        return []
    stop_words = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in sorted(stops))
    if stops & {*tokens.ids}:
        return [
            f"the token that stops generation ({stop_words}) is not in the loss, so the model would not learn to end "
            "its turn; move {% endgeneration %} of the chat template behind it"
        ]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    end = next((token for token in reversed(tokens.ids) if token in special), None)
    if end is None:
        return [
            f"a turn of the chat template ends with {tokenizer.decode(tokens.ids[-8:])!r}, but generation stops at "
            f"{stop_words}; end the assistant's turns with it in the template"
        ]
    name = tokenizer.convert_ids_to_tokens(end)
    return [
        f"a turn of the chat template ends with {name!r}, but generation stops at {stop_words}; set 'trainer: "
        f"{{eos_token: {name!r}}}'"
    ]


def _find_left_out(messages: list[dict[str, Any]], row: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Render the row with a mark in the place of each text, so that a short text is not found in another one."""
    marked: list[dict[str, Any]] = copy.deepcopy(messages)
    tools = json.loads(row["tools"]) if row.get("tools") else []
    required, optional = dict[str, str](), dict[str, str]()
    for number, message in enumerate(marked):
        has_parts = isinstance(message["content"], list)
        if not has_parts and message["content"].strip():
            message["content"] = f"seqtile-mark-{number}-"
            required[message["content"]] = f"messages of {message['role']!r}"
        pieces = [part for part in message["content"] if part["type"] == "text"] if has_parts else []
        for index, part in enumerate(pieces):
            if part["text"].strip():
                part["text"] = f"seqtile-mark-{number}-{index}-"
                required[part["text"]] = f"messages of {message['role']!r}"
        for key in REASONING_KEYS:
            if message.get(key):
                message[key] = f"seqtile-{key}-{number}-"
                optional[message[key]] = f"the chat template drops {key!r}"
        for index, call in enumerate(message.get("tool_calls", ())):
            call.get("function", call)["name"] = f"seqtile-call-{number}-{index}-"
            required[f"seqtile-call-{number}-{index}-"] = "tool calls"
    for index, tool in enumerate(tools):
        tool.get("function", tool)["name"] = f"seqtile-tool-{index}-"
        optional[f"seqtile-tool-{index}-"] = "the chat template drops 'tools'"
    kwargs = row.get("chat_template_kwargs") or {}
    try:
        text = tokenizer.apply_chat_template(marked, tokenize=False, tools=tools or None, **kwargs)
    except Exception:  # noqa: BLE001 - a template that inspects its messages; it has accepted the real ones
        return []
    for mark, content in required.items():
        if mark not in text:
            raise ValueError(
                f"the chat template drops {content}, which would not be trained; rename the role, write calls as "
                "text, or set a template that supports them with 'trainer: {chat_template_path: FILE.jinja}'"
            )
    return [note for mark, note in optional.items() if mark not in text]


def _compare_ids(row: Mapping[str, Any]) -> list[str]:
    """Refuse labels that are shifted already: TRL shifts them."""
    ids, labels = row.get("input_ids"), row.get("labels")
    if not ids or not labels:
        return []
    counted = [index for index, label in enumerate(labels) if label != IGNORED]
    if all(labels[index] == ids[index] for index in counted):
        return []
    if all(index + 1 == len(ids) or labels[index] == ids[index + 1] for index in counted):
        raise ValueError("'labels' are shifted by one token, but the trainer shifts them itself; pass them unshifted")
    return ["'labels' differ from 'input_ids'"]


def _contains(text: str, content: str, tokenizer: Any) -> bool:
    """Whether a text holds a message, as it is or as a JSON string; up to spaces and the tokenizer's normaliser."""
    forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
    return any(_without_spaces(form) in text for form in forms) or any(
        _without_spaces(tokenizer.decode(tokenizer(form, add_special_tokens=False)["input_ids"])) in text
        for form in forms
    )


def _without_spaces(text: str) -> str:
    return "".join(text.split())
