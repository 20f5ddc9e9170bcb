"""Every row is looked at before training: what is wrong with it, where it stands, and what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.devices import cpu_cores
from seqtile.train.data import ROW_KINDS, Loaded, row_kind

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_PROCESS = 5_000
"""Fewer are looked at, and tokenised, faster than another process starts."""

ASKING_ROLES = frozenset({"system", "developer", "user", "human"})
"""Roles whose messages a model is not trained to answer with."""


def processes_for(rows: int) -> int | None:
    """Processes to go through so many rows with, as ``Dataset.map`` takes them; None is this one alone."""
    count = min(cpu_cores(), rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def check_rows(loaded: Loaded, dataset: str, *, text_field: str, skip: bool) -> tuple[Dataset, dict[str, int]]:
    """Look at every row, in parallel where there are many; datasets caches what was found of rows that lie on disk.

    Args:
        loaded: what :func:`seqtile.train.data.load_rows` gave.
        dataset: its name, for messages.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of refusing them.

    Returns:
        The rows that are right, and how many were left out, by what is wrong with them.

    Raises:
        UserError: the first row that is wrong; or, with ``skip``, that no other is there.
    """
    rows = loaded.rows
    row_kind(rows.column_names, dataset, text_field)
    there = [one for one in (*ROW_KINDS, (text_field,)) if set(one) <= set(rows.column_names)]
    kind = there[0] if len(there) == 1 else _most_frequent(rows, there)
    named = dict.fromkeys(column for columns in (*ROW_KINDS, (text_field,)) for column in columns)
    kinds = [column for column in named if column in rows.column_names]
    seen = rows.select_columns(kinds)
    if kind != there[0]:  # TRL would take the first: rows of the others are left out, and their columns with them
        rows = rows.remove_columns([column for column in kinds if column not in kind])
    found = seen.with_format("arrow").map(
        _problems_of_ids, batched=True, remove_columns=kinds, num_proc=processes_for(len(rows)), desc="Checking rows"
    ) if kind == ("input_ids",) else seen.map(
        _problems, batched=True, fn_kwargs={"kind": kind, "kinds": kinds}, remove_columns=kinds,
        num_proc=processes_for(len(rows)), desc="Checking rows",
    )  # fmt: skip
    problems: Sequence[str] = found.with_format(None)["problem"][:]
    bad = [index for index, problem in enumerate(problems) if problem]
    if not bad:
        return rows, {}
    first = f"dataset {dataset!r}, {loaded.place(bad[0])}: {problems[bad[0]]}"
    if len(bad) == len(rows):
        raise UserError(f"{first}; no row of {len(rows):,} can be trained on: fix them")
    if not skip:
        raise UserError(
            f"{first} ({len(bad):,} of {len(rows):,} rows are wrong); fix it, or leave such rows out with "
            "--skip-bad-rows"
        )
    return rows.select([index for index, problem in enumerate(problems) if not problem]), dict(
        Counter(problems[index] for index in bad)
    )


def _most_frequent(rows: Dataset, there: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The kind whose columns are filled in the most rows, the first of equal ones. One pass over these columns."""
    from pyarrow import compute  # type: ignore[import-untyped]

    filled: Counter[tuple[str, ...]] = Counter()
    columns = list(dict.fromkeys(column for kind in there for column in kind))
    for batch in rows.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        for kind in there:
            valid = [compute.is_valid(batch[column]) for column in kind]
            filled[kind] += compute.sum(valid[0] if len(valid) == 1 else compute.and_(*valid)).as_py()
    return max(there, key=filled.__getitem__)


def problem_of(row: Mapping[str, Any], kind: Sequence[str]) -> str:
    """What is wrong with a row whose columns ``kind`` say what it is; "" if nothing is."""
    for column in kind:
        if row[column] is None:
            other = next((name for name, value in row.items() if value is not None and name not in kind), None)
            mixed = f" and {other!r} is not: rows of two kinds are mixed" if other else ""
            return f"{column!r} is null{mixed}"
    if kind[0] in ("messages", "conversations"):
        return _problem_of_messages(row[kind[0]], kind[0], answer=True)
    if kind == ("input_ids",):
        return ""  # of which there may be millions in a row: not one by one
    if len(kind) == 1:
        return _problem_of_text(row[kind[0]], kind[0])
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        for column in kind:
            if problem := _problem_of_messages(row[column], column, answer=False):
                return problem
        return ""
    if not isinstance(row["prompt"], str):
        return f"'prompt' is {_described(row['prompt'])}, expected text or a list of messages"
    if row["completion"] == "":
        return "'completion' is empty, so that the row is only a prompt"
    return _problem_of_text(row["completion"], "completion")


def _problems(batch: Mapping[str, Sequence[Any]], kind: Sequence[str], kinds: Sequence[str]) -> dict[str, list[str]]:
    rows = zip(*(batch[name] for name in kinds), strict=True)
    return {"problem": [problem_of(dict(zip(kinds, row, strict=True)), kind) for row in rows]}


def _problems_of_ids(batch: Any) -> dict[str, list[str]]:
    """What is wrong with rows of token ids, of which a row may hold millions: without a Python object for each.

    What is no list of whole numbers is left to :func:`seqtile.train.data.check_ids`.
    """
    import pyarrow as pa
    from pyarrow import compute

    ids = batch["input_ids"].combine_chunks()
    if not pa.types.is_list(ids.type) and not pa.types.is_large_list(ids.type):
        return {"problem": [""] * len(ids)}
    empty = compute.fill_null(compute.equal(compute.list_value_length(ids), 0), True)
    broken = {compute.list_parent_indices(ids)[i].as_py() for i in _nulls(ids)}
    problems = ["'input_ids' is empty" if bad else "" for bad in empty.to_pylist()]
    for index in broken:
        problems[index] = "'input_ids' holds a null"
    return {"problem": problems}


def _nulls(ids: Any) -> list[int]:
    from pyarrow import compute

    flat = ids.flatten()
    return compute.indices_nonzero(compute.is_null(flat)).to_pylist() if flat.null_count else []


def _problem_of_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        return f"{name!r} is {_described(text)}, expected text"
    return "" if text.strip() else f"{name!r} is empty"


def _problem_of_messages(messages: Any, name: str, *, answer: bool) -> str:
    """What is wrong with a conversation, "" for nothing.

    Args:
        messages: the column's value.
        name: the column.
        answer: whether one of the messages has to be an answer.
    """
    if not isinstance(messages, list):
        return f"{name!r} is {_described(messages)}, expected a list of messages with role and content"
    if not messages:
        return f"{name!r} is an empty list"
    roles, filled = set(), False
    for message in messages:
        if not isinstance(message, Mapping):
            return f"{name!r} holds {_described(message)}, expected messages with role and content"
        role = message.get("role") or message.get("from")
        content = message["content"] if message.get("content") is not None else message.get("value")
        if not isinstance(role, str):
            return f"{name!r} holds a message without a role"
        if content is None and not message.get("tool_calls"):
            return f"{name!r} holds a message without content"
        if not isinstance(content, str | list | None):
            return f"{name!r} holds a message whose content is {_described(content)}, expected text"
        roles.add(role)
        filled = filled or bool(message.get("tool_calls") or (content.strip() if isinstance(content, str) else content))
    if not filled:
        return f"{name!r} holds only empty messages"
    if answer and roles <= ASKING_ROLES:
        return f"{name!r} is only a prompt, without a message of an assistant"
    return ""


def _described(value: Any) -> str:
    if value is None:
        return "null"
    words = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")
