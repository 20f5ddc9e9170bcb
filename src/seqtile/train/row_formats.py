"""What rows say, in the columns that TRL trains on.

Read: ShareGPT (``conversations`` with from and value), OpenAI's ``messages`` (content blocks, tool calls), Alpaca
(``instruction``, ``input``, ``output``), ``query`` and ``response``, ``prompt`` and ``completion``, text, and tokenised
rows with their masks. What a row says of the loss is kept for :mod:`seqtile.train.rendered_rows`, or is a
:class:`RowError`: TRL drops it without a word.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.ops.lm_loss.kept_tokens import IGNORED

if TYPE_CHECKING:
    from datasets import Features

ANSWERED = (("instruction", "output"), ("instruction", "response"), ("query", "response"))
"""A question and its answer: trained as ``prompt`` and ``completion`` of a chat."""

ROW_KINDS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
"""Columns that say by themselves what a row is; a text column is looked for after them, then :data:`ANSWERED`."""

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


class RowError(ValueError):
    """What is wrong with a row, in words that follow its place."""


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one data set are read.

    Attributes:
        kind: the columns that say what a row is.
        columns: all columns.
        text_field: name of the text column.
        assistant_only: whether messages of assistants alone count in the loss.
        completion_only: TRL's setting; None is its default.
        json_arguments: whether the chat template adds arguments of tool calls up as text; others write objects as JSON.
    """

    kind: tuple[str, ...]
    columns: tuple[str, ...]
    text_field: str = "text"
    assistant_only: bool = False
    completion_only: bool | None = None
    json_arguments: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the rows' text is rendered by a chat template."""
        return self.kind[0] in ("messages", "conversations")

    @property
    def trains_prompts(self) -> bool | None:
        """Whether prompts count in the loss; None for rows that have no prompts."""
        if self.is_chat:
            return not self.assistant_only
        if self.kind == ("prompt", "completion") or self.kind in ANSWERED:
            return self.completion_only is False
        return None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that :meth:`read` may give."""
        if self.kind == ("input_ids",):
            has_labels = any(name in self.columns for name in ("labels", *LOSS_MASKS))
            return ("input_ids", "labels") if has_labels else self.kind
        beside = tuple(name for name in ("tools", "chat_template_kwargs") if name in self.columns)
        if self.is_chat:
            return ("messages", *beside, *([COUNTED] if self.assistant_only else []))
        if self.kind == ("prompt", "completion") or self.kind in ANSWERED:
            return ("prompt", "completion", *beside)
        return self.kind

    @property
    def beside(self) -> tuple[str, ...]:
        """The columns that :meth:`read` looks at beside those of the kind."""
        if self.kind == ("input_ids",):
            names = ["labels", "attention_mask", "position_ids", "seq_lengths", *LOSS_MASKS]
        elif self.kind == (self.text_field,):
            names = []
        else:
            names = ["tools", "chat_template_kwargs", "system", "system_prompt"]
            names += ["input", "context", "history"] if self.kind in ANSWERED else []
        return tuple(name for name in names if name in self.columns)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that :meth:`read` looks at, and those that say which other kind a row is of."""
        kinds = {column for kind in kinds_of(self.text_field) for column in kind}
        return tuple(name for name in self.columns if name in kinds or name in self.beside)

    @property
    def unused(self) -> tuple[str, ...]:
        """The columns that nothing reads."""
        return tuple(name for name in self.columns if name not in (*self.kind, *self.beside))

    def features(self, first: Mapping[str, Any]) -> Features:
        """Types of :attr:`outputs`, ``first`` being a row before it was read; objects may have any shape."""
        from datasets import Features, Json, List, Value

        text, ids = Value("string"), List(Value("int64"))
        is_text = self.kind == ("prompt", "completion") and isinstance(first["prompt"], str)
        messages = text if is_text else List(Json())
        types = {
            "messages": messages, "prompt": messages, "completion": messages, "chat_template_kwargs": Json(),
            "input_ids": ids, "labels": ids, COUNTED: List(Value("int8")),
        }  # fmt: skip
        return Features({name: types.get(name, text) for name in self.outputs})

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One row in TRL's columns.

        Raises:
            RowError: nothing, or something else than the row says, would be trained.
        """
        for column in self.kind:
            if row[column] is None:
                other = next((name for name in self.used if row.get(name) is not None and name not in self.kind), None)
                mixed = f" and {other!r} is not: rows of two kinds are mixed" if other else ""
                raise RowError(f"{column!r} is null{mixed}")
        if self.kind == ("input_ids",):
            return read_ids(row, completion_only=self.completion_only)
        for name in MEDIA:
            if row.get(name):
                raise RowError(f"{name!r} is not empty, and only text is trained here")
        if self.is_chat:
            result = self._read_chat(row)
        elif self.kind in ANSWERED:
            result = _read_answered(row, *self.kind)
        elif self.kind == ("prompt", "completion"):
            result = _read_pair(row, masks_prompt=self.completion_only is not False)
            if self.json_arguments and isinstance(result["prompt"], list):
                result = {name: with_json_arguments(messages) for name, messages in result.items()}
        else:
            return {self.kind[0]: _text(row[self.kind[0]], self.kind[0])}
        if tools := _read_tools(row.get("tools")):
            result["tools"] = tools
        if "chat_template_kwargs" in self.columns:  # TRL unpacks it in every row
            result["chat_template_kwargs"] = _without_nulls(row["chat_template_kwargs"] or {})
        return result

    def _read_chat(self, row: Mapping[str, Any]) -> dict[str, Any]:
        name = self.kind[0]
        messages = read_messages(row[name], name)
        if {message["role"] for message in messages} <= ASKING_ROLES:
            raise RowError(f"{name!r} is only a prompt, without a message of an assistant")
        messages = _with_system(messages, row)
        counted = _counted_messages(messages, assistant_only=self.assistant_only)
        messages = with_json_arguments(messages) if self.json_arguments else messages
        return {"messages": messages, **({} if all(counted) else {COUNTED: [int(value) for value in counted]})}


def find_kind(columns: Sequence[str], dataset: str, text_field: str) -> tuple[str, ...]:
    """The columns that say what a row is: the first of :data:`ROW_KINDS` that is there, or the text column.

    Raises:
        UserError: there is none that can be trained on.
    """
    for kind in kinds_of(text_field):
        if set(kind) <= set(columns):
            return kind
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(
            f"dataset {dataset!r} holds preferences (chosen, rejected), and seqtile train does supervised training; "
            "write what is to be learned as 'messages', or use TRL's DPOTrainer with seqtile.apply"
        )
    raise UserError(
        f"dataset {dataset!r} has columns {', '.join(sorted(columns))}; expected 'messages', 'conversations', "
        f"'prompt' and 'completion', 'instruction' and 'output', 'query' and 'response', 'input_ids' or {text_field!r} "
        "(name another text column with 'trainer: {dataset_text_field: NAME}')"
    )


def kinds_of(text_field: str) -> tuple[tuple[str, ...], ...]:
    """All kinds of rows, the first that is there is taken."""
    return (*ROW_KINDS, (text_field,), *ANSWERED)


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages with role and content, as chat templates take them.

    Raises:
        RowError: no messages, or one that no chat template renders as it is meant.
    """
    if not isinstance(value, list):
        raise RowError(f"{name!r} is {_described(value)}, expected a list of messages with role and content")
    if not value:
        raise RowError(f"{name!r} is an empty list")
    messages = [_read_message(message, name) for message in value]
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise RowError(f"{name!r} holds only empty messages")
    return messages


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError(f"{name!r} holds {_described(message)}, expected messages with role and content")
    # Arrow fills missing keys with nulls, and templates ask whether a key is there.
    extra = {key: value for key, value in message.items() if value is not None}
    role, source = extra.pop("role", None), extra.pop("from", None)
    content, other = extra.pop("content", None), extra.pop("value", None)
    role, content = (source if role is None else role), (other if content is None else content)
    if not isinstance(role, str):
        raise RowError(f"{name!r} holds a message without a role")
    if "function_call" in extra:  # OpenAI's former name of one call
        extra["tool_calls"] = [{"type": "function", "function": extra.pop("function_call")}]
    calls = _read_calls(extra.pop("tool_calls", None), name)
    if role in ("function_call", "tool_call"):
        calls, content = _read_calls(content, name), ""
    if content is None and calls:
        content = ""  # some templates write None
    result = {"role": ROLES.get(role, role), "content": _read_content(content, name), **extra}
    return {**result, "tool_calls": calls} if calls else result


def _read_content(content: Any, name: str) -> str:
    """A message's text; the text of OpenAI's blocks, of which many templates write the Python list."""
    if isinstance(content, str):
        return content
    if content is None:
        raise RowError(f"{name!r} holds a message without content")
    if not isinstance(content, list):
        raise RowError(f"{name!r} holds a message whose content is {_described(content)}, expected text")
    texts = []
    for block in content:
        kind = block.get("type", "text") if isinstance(block, Mapping) else "text"
        text = block.get("text") if isinstance(block, Mapping) else block
        if kind not in TEXT_BLOCKS or not isinstance(text, str):
            raise RowError(f"{name!r} holds a message with a block of type {kind!r}, and only text is trained here")
        texts.append(text)
    return "".join(texts)


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, which templates write as JSON; OpenAI's are JSON already."""
    if isinstance(calls, str):
        calls = _parsed(calls)
    if isinstance(calls, Mapping):
        calls = [calls]
    result = []
    for call in calls or []:
        call = _without_nulls(call)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            raise RowError(f"{name!r} holds a tool call without a function's name")
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


def _read_tools(tools: Any) -> str | None:
    """Descriptions of functions as JSON, which TRL reads; None for none, or templates would announce an empty list."""
    if isinstance(tools, str) and tools.strip():
        parsed = _parsed(tools)
        if isinstance(parsed, str):
            raise RowError("'tools' is a text that is no JSON, expected a list of functions")
        return tools if parsed else None
    return json.dumps(_without_nulls(tools), ensure_ascii=False) if tools else None


def _with_system(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = row.get("system") or row.get("system_prompt")
    if not isinstance(system, str) or not system.strip():
        return messages
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"].strip() == system.strip():
            return messages
        raise RowError("'system' and the first message are two system prompts")
    return [{"role": "system", "content": system}, *messages]


def _counted_messages(messages: Sequence[Mapping[str, Any]], *, assistant_only: bool) -> list[bool]:
    """Whether each message of an assistant counts in the loss."""
    counted = []
    for message in messages:
        if "train_detail" in message:
            raise RowError("'train_detail' leaves a part of a message out of the loss, which is not supported")
        values = [(key, message[key]) for key in LOSS_KEYS if key in message]
        for key, value in values:
            if value not in (0, 1):  # True and False are equal to them
                raise RowError(f"{key!r} of a message is {value!r}, expected 0 or 1")
            if not value and not assistant_only:
                raise RowError(
                    f"{key!r} leaves a message out of the loss, which 'trainer: {{assistant_only_loss: true}}' heeds"
                )
            if value and assistant_only and message["role"] in ASKING_ROLES:
                raise RowError(f"{key!r} counts a message of {message['role']!r}, and assistant_only_loss does not")
        if message["role"] == "assistant":
            counted.append(all(value for _, value in values))
    return counted


def _read_pair(row: Mapping[str, Any], *, masks_prompt: bool) -> dict[str, Any]:
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        pair = {name: read_messages(row[name], name) for name in ("prompt", "completion")}
        for message in pair["completion"] if masks_prompt else [*pair["prompt"], *pair["completion"]]:
            if any(not message.get(key, 1) for key in LOSS_KEYS):
                raise RowError("a message that would be trained is left out of the loss; write the row as 'messages'")
        return {**pair, "prompt": _with_system(pair["prompt"], row)}
    if not isinstance(row["prompt"], str):
        raise RowError(f"'prompt' is {_described(row['prompt'])}, expected text or a list of messages")
    if row["completion"] == "":
        raise RowError("'completion' is empty, so that the row is only a prompt")
    return {"prompt": row["prompt"], "completion": _text(row["completion"], "completion")}


def _read_answered(row: Mapping[str, Any], question: str, answer: str) -> dict[str, Any]:
    """Alpaca's columns: joined as LLaMA-Factory joins them, and rendered by the chat template."""
    asked = _text(row[question], question)
    beside = next((name for name in ("input", "context") if row.get(name)), None)
    messages = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise RowError("'history' holds something else than pairs of a question and its answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": f"{asked}\n{_text(row[beside], beside)}" if beside else asked})
    completion = [{"role": "assistant", "content": _text(row[answer], answer)}]
    return {"prompt": _with_system(messages, row), "completion": completion}


def read_ids(row: Mapping[str, Any], *, completion_only: bool | None) -> dict[str, Any]:
    """A tokenised row without padding, with its masks in its labels: TRL reads ``input_ids`` and ``labels`` alone.

    Raises:
        RowError: lists of two lengths, a mask with a hole, or documents that would attend to each other.
    """
    import numpy

    ids = row["input_ids"]
    if not isinstance(ids, list):
        raise RowError(f"'input_ids' is {_described(ids)}, expected a list of token ids")
    if not ids:
        raise RowError("'input_ids' is empty")
    tokens = numpy.asarray(ids)
    if tokens.dtype.kind not in "iu":
        raise RowError(f"'input_ids' holds {'a null' if None in ids else 'something else than token ids'}")
    beside = {
        name: numpy.asarray(row[name])
        for name in ("labels", "attention_mask", "position_ids", *LOSS_MASKS)
        if row.get(name) is not None
    }
    for name, values in beside.items():
        if values.shape != (len(ids),):
            raise RowError(f"'input_ids' and {name!r} are of two lengths")
    labels = beside.get("labels", tokens).copy()
    masks = [name for name in LOSS_MASKS if name in beside]
    if completion_only is False:
        masks = [name for name in masks if name != "completion_mask"]
    for name in masks:
        labels[beside[name] == 0] = IGNORED
    kept = beside.get("attention_mask", numpy.ones(len(ids))) != 0
    (places,) = kept.nonzero()
    if not len(places):
        raise RowError("'attention_mask' hides every token")
    span = slice(places[0], places[-1] + 1)
    if not kept[span].all():
        raise RowError("'attention_mask' hides tokens in the middle, which the trainer would show")
    # TRL reads neither: its collator counts the positions of a row through.
    restarts = "position_ids" in beside and (numpy.diff(beside["position_ids"][span]) != 1).any()
    if restarts or len(row.get("seq_lengths") or ()) > 1:
        raise RowError(
            f"{'position_ids' if restarts else 'seq_lengths'!r} packs several documents, which would attend to "
            "each other; give one document a row, and 'packing: true' packs them"
        )
    result = {"input_ids": ids if kept.all() else ids[span]}
    if masks or "labels" in beside:
        result["labels"] = labels[span].tolist()
    return result


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name!r} is {_described(value)}, expected text")
    if not value.strip():
        raise RowError(f"{name!r} is empty")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without the nulls that Arrow fills objects of several shapes with."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    """The value of a JSON text; a text that is none stays."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _described(value: Any) -> str:
    if value is None:
        return "null"
    words = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")


def rows_of(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of columns."""
    return (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
