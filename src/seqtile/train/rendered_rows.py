"""A sample of the rows as they will be trained: rendered by TRL, decoded, and compared with what the rows say.

A chat template is a program. One that does not know a role, a tool call or a key renders nothing of it, without a word,
and the loss looks well. So TRL prepares a few rows of each file before any weight is loaded, and every message has to
be in what comes out.
"""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile._compat import prepare_like_sft
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.row_formats import ASKING_ROLES, COUNTED, RowFormat, with_json_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = first_rank_logger(__name__)

KNOWN_ROLES = (*ASKING_ROLES, "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")


class Tokens(NamedTuple):
    """A row as it will be trained, before any cut; the label of a token that does not count is -100."""

    ids: Sequence[int]
    labels: Sequence[int]

    def runs(self) -> list[tuple[bool, list[int]]]:
        """Neighbouring tokens that count, or do not, together."""
        runs: list[tuple[bool, list[int]]] = []
        for token, label in zip(self.ids, self.labels, strict=True):
            counts = label != IGNORED
            if not runs or runs[-1][0] != counts:
                runs.append((counts, []))
            runs[-1][1].append(token)
        return runs

    def trained(self, max_length: int | None) -> int:
        """Tokens whose loss counts once the row is cut: the first of them is predicted by none."""
        return sum(label != IGNORED for label in self.labels[1:max_length])


def check_rendered(
    rows: Dataset,
    row_format: RowFormat,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Any,
    dataset: str,
    place: Callable[[int], str],
) -> list[Tokens]:
    """Refuse rows of which something would not be trained, or would not count as they say; report what is changed.

    Args:
        rows: a sample, in TRL's columns.
        row_format: how they were read.
        tokenizer: of :func:`trained_tokenizer`.
        arguments: the trainer's (``SFTConfig``).
        dataset: its name, for messages.
        place: where the n-th row of the sample stands.

    Returns:
        The sample as it will be trained, whole.

    Raises:
        UserError: the first row that is not what it says, or settings of the loss that no row can heed.
    """
    _check_loss_settings(row_format, arguments, dataset)
    is_chat = row_format.is_chat or isinstance(rows[0].get("prompt"), list)
    if is_chat and not tokenizer.chat_template:
        raise UserError(
            f"dataset {dataset!r} is chat, and the tokenizer has no chat template; give one with "
            "'trainer: {chat_template_path: FILE.jinja}', or write the rows as text"
        )
    try:
        prepared = mask_messages(prepare_like_sft(rows, tokenizer, arguments))
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if is_of_template(error):
            raise UserError(
                f"the model's chat template cannot be used on these rows ({type(error).__name__}: {reason}); fix its "
                "chat_template.jinja, or name another one with 'trainer: {chat_template_path: PATH}'"
            ) from None
        if not isinstance(error, ValueError | TypeError | KeyError | RuntimeError):
            raise
        raise UserError(f"dataset {dataset!r} cannot be tokenised: {reason}") from error
    sample = [Tokens(row["input_ids"], row["labels"]) for row in prepared.select_columns(["input_ids", "labels"])]
    notes: dict[str, list[int]] = {}
    for number, (row, tokens) in enumerate(zip(rows, sample, strict=True)):
        try:
            found = _compare_chat(row, row_format, tokens, tokenizer) if is_chat else _compare_ids(row)
        except ValueError as error:
            raise UserError(f"dataset {dataset!r}, {place(number)}: {error}") from None
        for note in dict.fromkeys(found):
            notes.setdefault(note, []).append(number)
    for note, numbers in notes.items():
        logger.warning("dataset %s, %s: %s (%d of %d rows looked at)", dataset, place(numbers[0]), note, len(numbers),
                       len(sample))  # fmt: skip
    return sample


def is_of_template(error: Exception) -> bool:
    """Whether an error came out of a chat template, which runs as a program of its own."""
    from jinja2 import TemplateError

    return isinstance(error, TemplateError) or any(
        frame.f_code.co_filename == "<template>" for frame, _ in traceback.walk_tb(error.__traceback__)
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
    if path is not None:
        if Path(path).is_file():
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        else:
            from transformers import AutoTokenizer

            try:
                tokenizer.chat_template = AutoTokenizer.from_pretrained(path).chat_template
            except (OSError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(
                    f"trainer.chat_template_path {path!r} is no file and no tokenizer ({reason}); give a .jinja file"
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
        except Exception:  # noqa: BLE001 - a template is a program, and this one wants its calls otherwise
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
            f"a row leaves messages out of the loss, but the chat template marks {answers} parts of its "
            f"{len(row[COUNTED])} messages of assistants; use a template with one {{% generation %}} for each"
        )
    counted, labels = iter(row[COUNTED]), []
    for counts, tokens in runs:
        labels += tokens if counts and next(counted) else [IGNORED] * len(tokens)
    return {"labels": labels}


def _check_loss_settings(row_format: RowFormat, arguments: Any, dataset: str) -> None:
    """Refuse settings of the loss that TRL ignores, or refuses once the weights are loaded."""
    is_text = not row_format.is_chat and row_format.outputs[0] != "prompt"
    if arguments.assistant_only_loss and is_text:
        raise UserError(
            f"assistant_only_loss is of chat, and dataset {dataset!r} has {row_format.kind[0]!r}; drop it, or write "
            "'messages'"
        )
    if arguments.completion_only_loss and row_format.outputs[0] != "prompt" and row_format.kind != ("input_ids",):
        raise UserError(
            f"completion_only_loss is of 'prompt' and 'completion', and dataset {dataset!r} has "
            f"{row_format.kind[0]!r}; "
            + ("use 'trainer: {assistant_only_loss: true}'" if row_format.is_chat else "drop it")
        )


def _compare_chat(row: Mapping[str, Any], row_format: RowFormat, tokens: Tokens, tokenizer: Any) -> list[str]:
    """What the template changes of a row.

    Raises:
        ValueError: it leaves a message out, or one that should count does not.
    """
    messages = row["messages"] if row_format.is_chat else [*row["prompt"], *row["completion"]]
    notes = _left_out_by_template(messages, row, tokenizer)
    text = _bare(tokenizer.decode(tokens.ids))
    counted = _bare("\n".join(tokenizer.decode(run) for counts, run in tokens.runs() if counts))
    answers = iter(row.get(COUNTED) or [])
    first_answer = 0 if row_format.is_chat else len(row["prompt"])
    for number, message in enumerate(messages):
        counts = message["role"] == "assistant" and number >= first_answer and next(answers, True)
        if not _contains(text, message["content"], tokenizer):
            notes.append(f"the chat template changes or shortens messages of {message['role']!r}")
        elif counts and not _contains(counted, message["content"], tokenizer):
            raise ValueError(
                "a message of the assistant does not count in the loss; mark it in the chat template with "
                "{% generation %}, or drop assistant_only_loss"
            )
    unknown = {str(message["role"]) for message in messages} - {*KNOWN_ROLES}
    return notes + [
        f"the chat template knows no role {role!r}" for role in sorted(unknown) if role not in tokenizer.chat_template
    ]


def _left_out_by_template(messages: list[dict[str, Any]], row: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Render the row with a mark in the place of each text, so that a short text is not found in another one."""
    marked, marks = [], list[tuple[str, str]]()
    for number, message in enumerate(messages):
        message = dict(message)
        if message["content"].strip():
            message["content"] = f"seqtile-mark-{number}-"
            marks.append((message["content"], ""))
        for key in REASONING:
            if isinstance(message.get(key), str) and message[key].strip():
                message[key] = f"seqtile-{key}-{number}-"
                marks.append((message[key], f"the chat template leaves out {key!r}"))
        calls = copy.deepcopy(message.get("tool_calls") or [])
        for index, call in enumerate(calls):
            name = f"seqtile-call-{number}-{index}-"
            call.get("function", call)["name"] = name
            marks.append((name, "call"))
        marked.append({**message, "tool_calls": calls} if calls else message)
    tools = copy.deepcopy(json.loads(row["tools"])) if row.get("tools") else []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        function["name"] = f"seqtile-tool-{index}-"
        marks.append((function["name"], "the chat template writes no 'tools'"))
    try:
        text = tokenizer.apply_chat_template(
            marked, tokenize=False, tools=tools or None, **(row.get("chat_template_kwargs") or {})
        )
    except Exception:  # noqa: BLE001 - a template that looks into its messages; it has taken the real ones
        return []
    notes = []
    for mark, note in marks:
        if mark in text:
            continue
        if note in ("", "call"):
            role = messages[int(mark.split("-")[2])]["role"]
            what, cure = ("tool calls", "write them as text") if note else (f"messages of {role!r}", "rename the role")
            raise ValueError(
                f"the chat template writes nothing of {what}, which would not be trained; {cure}, or give a template "
                "that knows them with 'trainer: {chat_template_path: FILE.jinja}'"
            )
        notes.append(note)
    return list(dict.fromkeys(notes))


def _compare_ids(row: Mapping[str, Any]) -> list[str]:
    """Refuse labels that are shifted already: TRL shifts them."""
    ids, labels = row.get("input_ids"), row.get("labels")
    if not ids or not labels:
        return []
    kept = [index for index, label in enumerate(labels) if label != IGNORED]
    if all(labels[index] == ids[index] for index in kept):
        return []
    if all(index + 1 == len(ids) or labels[index] == ids[index + 1] for index in kept):
        raise ValueError("'labels' are shifted by one token, and the trainer shifts them; give them unshifted")
    return ["'labels' are other tokens than 'input_ids'"]


def _contains(text: str, content: str, tokenizer: Any) -> bool:
    """Whether a text holds a message, as it is or as a JSON string; up to spaces and the tokenizer's normaliser."""
    forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])
    return any(_bare(form) in text for form in forms) or any(
        _bare(tokenizer.decode(tokenizer(form, add_special_tokens=False)["input_ids"])) in text for form in forms
    )


def _bare(text: str) -> str:
    return "".join(text.split())
