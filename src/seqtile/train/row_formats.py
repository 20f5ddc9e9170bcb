"""Convert dataset rows to the columns that TRL trains on.

Read: ShareGPT (``conversations`` with from and value), OpenAI's ``messages`` (content blocks, tool calls), Alpaca
(``instruction``, ``input``, ``output``), ``query`` and ``response``, ``prompt`` and ``completion``, text, and tokenised
rows with their masks. What a row says of the loss is kept for :mod:`seqtile.train.rendered_rows`, or is a
:class:`RowError`: TRL drops it without a word.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.media import (
    MEDIA_COLUMNS,
    PART_COLUMNS,
    SOURCE_COLUMNS,
    RowError,
    media_features,
    media_part,
    place_media,
)

if TYPE_CHECKING:
    from datasets import Features

ROW_KINDS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
"""Columns that say by themselves what a row is; a text column is looked for after them, then :data:`ANSWERED`."""

ANSWERED = (("instruction", "output"), ("instruction", "response"), ("query", "response"))
"""A question and its answer: trained as ``prompt`` and ``completion`` of a chat."""

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "bot": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
    "tool_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""Roles of ShareGPT, LLaMA-Factory and ms-swift by the names that chat templates know."""

ASKING_ROLES = frozenset({"system", "developer", "user"})
"""Roles whose messages a model is not trained to answer with."""

TEXT_BLOCKS = ("text", "input_text", "output_text")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys of a message that leave it out of the loss: OpenAI's, axolotl's two, ms-swift's."""
LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
COUNTED = "counted_messages"
"""Our column: for each message of an assistant, whether it counts in the loss."""


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one data set are read.

    Attributes:
        key_columns: the columns that say what a row is.
        columns: all columns.
        assistant_only: whether messages of assistants alone count in the loss.
        completion_only: TRL's setting; None is its default.
        json_arguments: whether the chat template adds arguments of tool calls up as text; others write objects as JSON.
        media: whether the model takes pictures, so that chats and pairs of messages may have some.
        folder: where relative paths of pictures and videos begin.
        decodes: whether to decode every picture once, or to read its size alone.
    """

    key_columns: tuple[str, ...]
    columns: tuple[str, ...]
    assistant_only: bool = False
    completion_only: bool | None = None
    json_arguments: bool = False
    media: bool = False
    folder: str = ""
    decodes: bool = True

    @property
    def is_chat(self) -> bool:
        """Whether the rows' text is rendered by a chat template."""
        return self.key_columns[0] in ("messages", "conversations")

    @property
    def is_pair(self) -> bool:
        """Whether TRL is given a prompt and its completion."""
        return self.key_columns == ("prompt", "completion") or self.key_columns in ANSWERED

    @property
    def trains_prompts(self) -> bool | None:
        """Whether prompts count in the loss; None for rows that have no prompts."""
        if self.is_chat:
            return not self.assistant_only
        return self.completion_only is False if self.is_pair else None

    @property
    def advice(self) -> str:
        """Hint after a summary: the setting that includes or excludes prompts."""
        if self.trains_prompts is None:
            return ""
        setting = "assistant_only_loss" if self.is_chat else "completion_only_loss"
        effect = "leaves prompts out" if self.trains_prompts else "has prompts train"
        return f"; 'trainer: {{{setting}: {str(self.trains_prompts).lower()}}}' {effect}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that :meth:`read` may give."""
        if self.key_columns == ("input_ids",):
            has_labels = any(name in self.columns for name in ("labels", *LOSS_MASKS))
            return ("input_ids", "labels") if has_labels else self.key_columns
        options = tuple(name for name in ("tools", "chat_template_kwargs") if name in self.columns)
        media = MEDIA_COLUMNS if self.takes_media else ()
        if self.is_chat:
            return ("messages", *options, *([COUNTED] if self.assistant_only else []), *media)
        return ("prompt", "completion", *options, *media) if self.is_pair else self.key_columns

    @property
    def takes_media(self) -> bool:
        """Whether a row may have pictures and videos."""
        return self.media and (self.is_chat or self.is_pair)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that :meth:`read` looks at."""
        names = list(self.key_columns)
        if self.key_columns == ("input_ids",):
            names += ["labels", "attention_mask", "position_ids", "seq_lengths", *LOSS_MASKS]
        elif self.is_chat or self.is_pair:
            names += ["tools", "chat_template_kwargs", "system", "system_prompt"]
            names += ["input", "context", "history"] if self.key_columns in ANSWERED else []
            names += SOURCE_COLUMNS if self.takes_media else []
        return tuple(name for name in self.columns if name in names)

    def features(self, *, text_pairs: bool) -> Features:
        """Types of :attr:`outputs`; objects may have any shape. ``text_pairs``: prompts are texts, not messages."""
        from datasets import Features, Json, List, Value

        text, ids = Value("string"), List(Value("int64"))
        messages = text if text_pairs and self.key_columns == ("prompt", "completion") else List(Json())
        types = {
            "messages": messages, "prompt": messages, "completion": messages, "chat_template_kwargs": Json(),
            "input_ids": ids, "labels": ids, COUNTED: List(Value("int8")), **media_features(),
        }  # fmt: skip
        return Features({name: types.get(name, text) for name in self.outputs})

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One row in TRL's columns.

        Raises:
            RowError: nothing, or something else than the row says, would be trained.
        """
        for column in self.key_columns:
            if row[column] is None:
                raise RowError(f"{column!r} is null")
        if self.key_columns == ("input_ids",):
            return read_ids(row, completion_only=self.completion_only)
        for name in MEDIA:
            if row.get(name) and not (self.takes_media and name in SOURCE_COLUMNS):
                raise RowError(f"{name!r} is not empty, but only text is supported")
        if self.is_chat:
            result = self._read_chat(row)
        elif self.key_columns in ANSWERED:
            result = _read_answered(row, *self.key_columns)
        elif self.is_pair:
            result = _read_pair(row, masks_prompt=self.completion_only is not False, media=self.media)
            if self.json_arguments and isinstance(result["prompt"], list):
                result = {name: with_json_arguments(messages) for name, messages in result.items()}
        else:
            return {self.key_columns[0]: _text(row, self.key_columns[0])}
        if self.takes_media:
            result = self._with_media(row, result)
        tools = row.get("tools")
        tools = _parsed(tools) if isinstance(tools, str) and tools else tools
        if isinstance(tools, str) and tools:
            raise RowError("'tools' is not valid JSON, expected a list of functions")
        if tools:  # TRL reads JSON; templates would announce an empty list
            result["tools"] = json.dumps(_without_nulls(tools), ensure_ascii=False)
        if "chat_template_kwargs" in self.columns:  # TRL unpacks it in every row
            result["chat_template_kwargs"] = _without_nulls(row["chat_template_kwargs"] or {})
        return result

    def _with_media(self, row: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """A row with its pictures and videos; they belong to the messages, or to the prompt."""
        columns = dict[str, Any]()
        for name, column in SOURCE_COLUMNS.items():
            if row.get(name):
                columns[column] = row[name] if name == column else [row[name]]
        asking = "messages" if self.is_chat else "prompt"
        if isinstance(result[asking], str):
            if columns:
                raise RowError(f"{[*columns][0]!r} need 'messages', or 'prompt' and 'completion' of messages")
            return {**result, "images": [], "videos": [], "sizes": {"image": [], "video": [], "fps": []}}
        if any(isinstance(message["content"], list) for message in result.get("completion", ())):
            raise RowError("'completion' has a picture or a video; put it into 'prompt'")
        result[asking], media = place_media(result[asking], columns, self.folder, decodes=self.decodes)
        if media["videos"] and not self.is_chat:
            raise RowError("a pair of prompt and completion has a video; write the row as 'messages'")
        return {**result, **media}

    def _read_chat(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = read_messages(row, self.key_columns[0], media=self.media)
        if {message["role"] for message in messages} <= ASKING_ROLES:
            raise RowError(f"{self.key_columns[0]!r} has a prompt only, without an assistant message")
        messages = _with_system(messages, row)
        counted = _counted_messages(messages, assistant_only=self.assistant_only)
        messages = with_json_arguments(messages) if self.json_arguments else messages
        return {"messages": messages, **({} if all(counted) else {COUNTED: [int(value) for value in counted]})}


def find_key_columns(columns: Sequence[str], dataset: str, text_field: str) -> tuple[str, ...]:
    """The columns that say what a row is: the first of :data:`ROW_KINDS` that is there, or the text column.

    Raises:
        UserError: no supported format.
    """
    for key_columns in (*ROW_KINDS, (text_field,), *ANSWERED):
        if set(key_columns) <= set(columns):
            return key_columns
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(
            "dataset.preferences",
            f"dataset {dataset!r} has preferences (chosen, rejected), but seqtile train does supervised training; "
            "use TRL's DPOTrainer with seqtile.apply, or write the chosen answers as 'messages'",
        )
    raise UserError(
        "dataset.column-missing",
        f"dataset {dataset!r} has columns {', '.join(sorted(columns))}; expected 'messages', 'conversations', "
        f"'prompt' and 'completion', 'instruction' and 'output', 'query' and 'response', 'input_ids' or {text_field!r} "
        "(name another text column with 'trainer: {dataset_text_field: NAME}')",
    )


def read_messages(row: Mapping[str, Any], name: str, *, media: bool = False) -> list[dict[str, Any]]:
    """Messages with role and content, as chat templates take them; ``media``: parts may be pictures and videos.

    Raises:
        RowError: no messages, or one that no chat template renders as it is meant.
    """
    if not isinstance(row[name], list):
        raise RowError(f"{name!r} is {type(row[name]).__name__}, expected a list of messages with role and content")
    messages = [_read_message(message, name, media) for message in row[name]]
    if not any(text.strip() for message in messages for text in texts_of(message)) and not any(
        message.get("tool_calls") for message in messages
    ):
        raise RowError(f"{name!r} holds no text")
    return messages


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message of :func:`read_messages`: one, or several between pictures."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _read_message(message: Any, name: str, media: bool) -> dict[str, Any]:
    # Arrow fills missing keys with nulls, and templates test whether a key is defined.
    fields = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = fields.pop("from", None), fields.pop("value", None)
    role, content = fields.pop("role", role), fields.pop("content", content)
    calls = fields.pop("tool_calls", None) or fields.pop("function_call", None)  # OpenAI's former name of one call
    if role in ("function_call", "tool_call"):
        calls, content = content, ""
    if calls:
        content, fields["tool_calls"] = content or "", _read_calls(calls, name)  # some templates write None
    if not isinstance(role, str) or content is None:
        raise RowError(f"{name!r} has a message without role or content")
    if isinstance(content, list):  # OpenAI's blocks, of which many templates write the Python list
        kinds = {block.get("type") for block in content if isinstance(block, Mapping)} if media else set()
        if kinds & PART_COLUMNS.keys():
            content = [
                media_part(block, name)
                if isinstance(block, Mapping) and block.get("type") in PART_COLUMNS
                else {"type": "text", "text": _read_block(block, name)}
                for block in content
            ]
            return {"role": ROLES.get(role, role), "content": content, **fields}
        content = "".join(_read_block(block, name) for block in content)
    if not isinstance(content, str):
        raise RowError(f"{name!r} has a message with content of type {type(content).__name__}, expected text")
    return {"role": ROLES.get(role, role), "content": content, **fields}


def _read_block(block: Any, name: str) -> str:
    block = block if isinstance(block, Mapping) else {"text": block}
    block_type, text = block.get("type", "text"), block.get("text")
    if block_type not in TEXT_BLOCKS or not isinstance(text, str):
        raise RowError(f"{name!r} has a message with a block of type {block_type!r}, but only text is supported")
    return text


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which templates write as JSON; OpenAI's are JSON already."""
    calls = _parsed(calls) if isinstance(calls, str) else calls
    result = []
    if not isinstance(calls, (list, Mapping)):
        raise RowError(
            f"{name!r} has a tool call of type {type(calls).__name__}, expected an object or a list of objects"
        )
    for call in [calls] if isinstance(calls, Mapping) else calls:
        call = _without_nulls(call)
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if "name" not in function:
            raise RowError(f"{name!r} has a tool call without a function name")
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _parsed(function["arguments"])}
        result.append({**call, "function": function} if "function" in call else dict(function))
    return result


def with_json_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as :func:`read_messages` gives them, the arguments of their tool calls as JSON texts."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if not isinstance(function.get("arguments"), str):
                function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return messages


def _with_system(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = row.get("system") or row.get("system_prompt") or ""
    if not isinstance(system, str) or not system.strip():
        return messages
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if "".join(texts_of(messages[0])).strip() != system.strip():
        raise RowError("'system' and the first message are both system prompts")
    return messages


def _counted_messages(messages: Sequence[Mapping[str, Any]], *, assistant_only: bool) -> list[bool]:
    """Whether each message of an assistant counts in the loss."""
    counted = []
    for message in messages:
        weights = [message[key] for key in LOSS_KEYS if key in message]
        if "train_detail" in message or any(weight not in (0, 1) for weight in weights):
            raise RowError("a message has a fractional loss weight, which is not supported; use 0 or 1")
        if not all(weights) and not assistant_only:
            raise RowError("a message is masked from the loss, which needs 'trainer: {assistant_only_loss: true}'")
        if any(weights) and assistant_only and message["role"] in ASKING_ROLES:
            raise RowError(f"a message of {message['role']!r} is in the loss, which assistant_only_loss excludes")
        if message["role"] == "assistant":
            counted.append(all(weights))
    return counted


def _read_pair(row: Mapping[str, Any], *, masks_prompt: bool, media: bool = False) -> dict[str, Any]:
    if isinstance(row["prompt"], str):
        return {"prompt": row["prompt"], "completion": _text(row, "completion")}
    pair = {name: read_messages(row, name, media=media) for name in ("prompt", "completion")}
    for message in pair["completion"] if masks_prompt else [*pair["prompt"], *pair["completion"]]:
        if any(not message.get(key, 1) for key in LOSS_KEYS):
            raise RowError("a trained message is masked from the loss; write the row as 'messages'")
    return {**pair, "prompt": _with_system(pair["prompt"], row)}


def _read_answered(row: Mapping[str, Any], question: str, answer: str) -> dict[str, Any]:
    """Alpaca's columns: joined as LLaMA-Factory joins them, and rendered by the chat template."""
    messages = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:  # else an object's keys would be trained
            raise RowError("'history' has entries that are not question-answer pairs")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    text, extra = _text(row, question), next((name for name in ("input", "context") if row.get(name)), None)
    messages.append({"role": "user", "content": f"{text}\n{_text(row, extra)}" if extra else text})
    completion = [{"role": "assistant", "content": _text(row, answer)}]
    return {"prompt": _with_system(messages, row), "completion": completion}


def read_ids(row: Mapping[str, Any], *, completion_only: bool | None) -> dict[str, Any]:
    """A tokenised row without padding, with its masks in its labels: TRL reads ``input_ids`` and ``labels`` alone.

    Raises:
        RowError: lists of two lengths, a mask with a hole, or documents that would attend to each other.
    """
    import numpy

    ids = numpy.asarray(row["input_ids"])
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise RowError("'input_ids' is empty or has entries that are not token ids")
    columns = {
        name: numpy.asarray(row[name])
        for name in ("labels", "attention_mask", "position_ids", *LOSS_MASKS)
        if row.get(name) is not None
    }
    for name, values in columns.items():
        if values.shape != ids.shape:
            raise RowError(f"'input_ids' and {name!r} have different lengths")
    labels = columns.get("labels", ids).copy()
    masks = [name for name in LOSS_MASKS if name in columns]
    if completion_only is False:
        masks = [name for name in masks if name != "completion_mask"]
    for name in masks:
        labels[columns[name] == 0] = IGNORED
    visible = columns.get("attention_mask", numpy.ones(len(ids))) != 0
    (positions,) = visible.nonzero()
    if not len(positions):
        raise RowError("'attention_mask' masks every token")
    span = slice(positions[0], positions[-1] + 1)
    if not visible[span].all():
        raise RowError("'attention_mask' masks tokens in the middle, which the trainer would not mask")
    # TRL reads neither: its collator numbers the positions of a row from 0.
    restarts = "position_ids" in columns and (numpy.diff(columns["position_ids"][span]) != 1).any()
    if restarts or len(row.get("seq_lengths") or ()) > 1:
        raise RowError(
            f"{'position_ids' if restarts else 'seq_lengths'!r} marks packed documents, which would attend to each "
            "other; use one document per row, and 'packing: true' to pack them"
        )
    result = {"input_ids": ids[span].tolist()}
    if {"labels", *LOSS_MASKS} & row.keys():
        result["labels"] = labels[span].tolist()
    return result


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise RowError(f"{name!r} is {type(row[name]).__name__}, expected text")
    if not row[name].strip():
        raise RowError(f"{name!r} is empty")
    return row[name]  # type: ignore[no-any-return]


def _without_nulls(value: Any) -> Any:
    """``value`` without the nulls that Arrow fills objects of several shapes with."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    """The value of a JSON text; other text is returned unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
