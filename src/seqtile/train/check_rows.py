"""Every row is looked at before training: what is wrong with it, where it stands, and what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile import __version__
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import cpu_cores
from seqtile.train.data import Loaded
from seqtile.train.row_formats import LOSS_MASKS, MEDIA, RowError, RowFormat, find_kind, kinds_of, rows_of

if TYPE_CHECKING:
    from datasets import Dataset

logger = first_rank_logger(__name__)

ROWS_PER_PROCESS = 5_000
"""Fewer are looked at, and tokenised, faster than another process starts."""

SAMPLE_OF_A_FILE, SAMPLE = 8, 256
"""Rows of each file, and of all, that are rendered and compared with what was rendered."""


class Checked(NamedTuple):
    """The rows that are right.

    Attributes:
        rows: in TRL's columns.
        row_format: how they were read.
        left_out: how many were left out, by what is wrong with them.
        sample: rows of each file, by their number in ``rows``, with their number in ``loaded``.
        loaded: what they were read from.
    """

    rows: Dataset
    row_format: RowFormat
    left_out: dict[str, int]
    sample: dict[int, int]
    loaded: Loaded


def processes_for(rows: int) -> int | None:
    """Processes to go through so many rows with, as ``Dataset.map`` takes them; None is this one alone."""
    count = min(cpu_cores(), rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def check_rows(
    loaded: Loaded, dataset: str, *, text_field: str = "text", skip: bool = False, **settings: Any
) -> Checked:
    """Look at every row, in parallel where there are many; datasets caches what was seen of rows that lie on disk.

    Args:
        loaded: what :func:`seqtile.train.data.load_rows` gave.
        dataset: its name, for messages.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of refusing them.
        **settings: of :class:`seqtile.train.row_formats.RowFormat`.

    Raises:
        UserError: the first row that is wrong; or, with ``skip``, that no other is there.
    """
    rows = loaded.rows
    _refuse_media(rows, dataset)
    find_kind(rows.column_names, dataset, text_field)
    kinds = [kind for kind in kinds_of(text_field) if set(kind) <= set(rows.column_names)]
    kind = kinds[0] if len(kinds) == 1 else _most_frequent(rows, kinds)
    row_format = RowFormat(kind, tuple(rows.column_names), text_field, **settings)
    if kind == ("input_ids",) and not _has_masks(rows):
        row_format = replace(row_format, columns=tuple(c for c in ("input_ids", "labels") if c in rows.column_names))
        look: Any = {"function": _look_at_ids}
    else:
        look = {"function": _look, "fn_kwargs": {"row_format": row_format, "version": __version__}}
    used = rows.select_columns(list(row_format.used))
    if look["function"] is _look_at_ids:
        used = used.with_format("arrow")
    processes = processes_for(len(rows))
    seen = used.map(
        **look, batched=True, remove_columns=used.column_names, num_proc=processes, desc="Checking rows"
    ).with_format(None)
    problems: Sequence[str] = seen["problem"][:]
    bad = [index for index, problem in enumerate(problems) if problem]
    if bad:
        first = f"dataset {dataset!r}, {loaded.place(bad[0])}: {problems[bad[0]]}"
        if len(bad) == len(rows):
            raise UserError(f"{first}; no row of {len(rows):,} can be trained on: fix them")
        if not skip:
            raise UserError(
                f"{first} ({len(bad):,} of {len(rows):,} rows are wrong); fix it, or leave such rows out with "
                "--skip-bad-rows"
            )
    sample = _sample(loaded, problems)
    changes = any(seen["changes"])
    if bad:
        rows = rows.select([index for index, problem in enumerate(problems) if not problem])
    rows = rows.select_columns(list(row_format.used))
    if changes:
        rows = rows.map(
            _read, batched=True, remove_columns=rows.column_names, num_proc=processes, desc="Reading rows",
            features=row_format.features(rows[0]), fn_kwargs={"row_format": row_format, "version": __version__},
        )  # fmt: skip
    else:
        rows = rows.select_columns([name for name in row_format.outputs if name in rows.column_names])
    if row_format.unused:
        logger.info("dataset %s: columns that are not used: %s", dataset, ", ".join(row_format.unused))
    return Checked(rows, row_format, dict(Counter(problems[index] for index in bad)), sample, loaded)


def _refuse_media(rows: Dataset, dataset: str) -> None:
    """Refuse pictures beside the text, which would be dropped."""
    from pyarrow import compute, types  # type: ignore[import-untyped]

    for name in MEDIA:
        if name not in rows.column_names:
            continue
        for table in rows.select_columns([name]).with_format("arrow").iter(batch_size=10_000):
            column = table[name]
            if types.is_list(column.type) or types.is_large_list(column.type):
                column = compute.list_value_length(column).filter(compute.list_value_length(column).cast("bool"))
            if column.null_count < len(column):
                raise UserError(
                    f"dataset {dataset!r} has a column {name!r} that is not empty, and seqtile train reads only text; "
                    "remove the column, or train pictures with TRL's SFTTrainer and seqtile.apply"
                )


def _has_masks(rows: Dataset) -> bool:
    """Whether a column beside ``input_ids`` says more than that every token is shown and counts."""
    import numpy
    from pyarrow import compute

    masks = [name for name in ("attention_mask", *LOSS_MASKS) if name in rows.column_names]
    names = [*masks, *(name for name in ("position_ids", "seq_lengths") if name in rows.column_names)]
    if "seq_lengths" in names:
        return True
    for table in rows.select_columns(names).with_format("arrow").iter(batch_size=1000) if names else ():
        for name in names:
            lists = table[name].combine_chunks()
            values = lists.flatten()
            if lists.null_count or values.null_count:
                return True
            if name in masks and compute.min(values).as_py() == 0:
                return True
            if name == "position_ids":
                starts = numpy.cumsum(compute.list_value_length(lists).to_numpy())[:-1]
                steps = numpy.diff(values.to_numpy(zero_copy_only=False))
                if (numpy.delete(steps, starts - 1) != 1).any():
                    return True
    return False


def _most_frequent(rows: Dataset, kinds: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The kind whose columns are filled in the most rows, the first of equal ones. One pass over these columns."""
    from pyarrow import compute

    filled: Counter[tuple[str, ...]] = Counter()
    columns = list(dict.fromkeys(column for kind in kinds for column in kind))
    for batch in rows.select_columns(columns).with_format("arrow").iter(batch_size=10_000):
        for kind in kinds:
            valid = [compute.is_valid(batch[column]) for column in kind]
            filled[kind] += compute.sum(valid[0] if len(valid) == 1 else compute.and_(*valid)).as_py()
    return max(kinds, key=filled.__getitem__)


def _look(batch: Mapping[str, Sequence[Any]], row_format: RowFormat, version: str) -> dict[str, list[Any]]:
    """What is wrong with each row, and whether TRL needs it in other columns than it has."""
    problems, changes = [], []
    for row in rows_of(batch):
        try:
            result = row_format.read(row)
            problems.append("")
            changes.append(any(row.get(name) != result.get(name) for name in row_format.outputs))
        except RowError as error:
            problems.append(str(error))
            changes.append(False)
    return {"problem": problems, "changes": changes}


def _read(batch: Mapping[str, Sequence[Any]], row_format: RowFormat, version: str) -> dict[str, list[Any]]:
    results = [row_format.read(row) for row in rows_of(batch)]
    return {name: [result.get(name) for result in results] for name in row_format.outputs}


def _look_at_ids(batch: Any) -> dict[str, list[Any]]:
    """What is wrong with rows of token ids, of which a row may hold millions: without a Python object for each.

    What is no list of whole numbers is left to :func:`seqtile.train.data.check_ids`.
    """
    import pyarrow as pa
    from pyarrow import compute

    ids = batch["input_ids"].combine_chunks()
    if not pa.types.is_list(ids.type) and not pa.types.is_large_list(ids.type):
        return {"problem": [""] * len(ids), "changes": [False] * len(ids)}
    empty = compute.fill_null(compute.equal(compute.list_value_length(ids), 0), True)
    problems = ["'input_ids' is empty" if bad else "" for bad in empty.to_pylist()]
    flat = ids.flatten()
    if flat.null_count:
        for index in compute.indices_nonzero(compute.is_null(flat)).to_pylist():
            problems[compute.list_parent_indices(ids)[index].as_py()] = "'input_ids' holds a null"
    return {"problem": problems, "changes": [False] * len(ids)}


def _sample(loaded: Loaded, problems: Sequence[str]) -> dict[int, int]:
    """Good rows of each file: the first, the last and some between, by their number among the good ones."""
    counts = loaded.counts()
    each = max(1, min(SAMPLE_OF_A_FILE, SAMPLE // len(counts)))
    wanted, start = set[int](), 0
    for count in counts[:SAMPLE]:
        places = range(count) if count <= each else [i * (count - 1) // max(1, each - 1) for i in range(each)]
        wanted |= {start + place for place in places}
        start += count
    sample, good = {}, 0
    for index, problem in enumerate(problems):
        if not problem:
            if index in wanted:
                sample[good] = index
            good += 1
    return sample or {0: problems.index("")}
