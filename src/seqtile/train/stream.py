"""Rows that are read while they are trained on: each is looked at as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.train.check_rows import problem_of
from seqtile.train.data import ROW_KINDS, Loaded, refuse_broken_rows, row_kind, silent_datasets
from seqtile.train.data_summary import StreamSummary

if TYPE_CHECKING:
    from datasets import IterableDataset


class Stream:
    """The rows of a data set, from the first on at each iteration.

    Attributes:
        summary: how many rows have come, and how many were left out, by what is wrong with them.
        vocabulary: one more than the largest token id that a row may hold; None where that is not looked at.

    Args:
        loaded: what :func:`seqtile.train.data.load_rows` gave for a stream.
        dataset: its name, for messages.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of stopping at them.

    Raises:
        UserError: there is no row, or none of its columns can be trained on.
    """

    def __init__(self, loaded: Loaded, dataset: str, *, text_field: str, skip: bool) -> None:
        self.summary = StreamSummary()
        self.vocabulary: int | None = None
        self._loaded, self._dataset, self._skip = loaded, dataset, skip
        self._columns: list[str] = []
        first = next(self._raw(), None)
        if first is None:
            raise UserError(f"dataset {dataset!r} holds no rows; give one with at least one example to train on")
        self._columns = list(first)
        self._kind = row_kind(self._columns, dataset, text_field)
        named = dict.fromkeys(column for columns in (*ROW_KINDS, (text_field,)) for column in columns)
        self._kinds = [column for column in named if column in self._columns]

    def rows(self) -> IterableDataset:
        """The rows that are right, as TRL takes them."""
        from datasets import IterableDataset

        return IterableDataset.from_generator(self._checked)

    def __deepcopy__(self, _: Any) -> Stream:
        return self  # datasets copies what it maps; the counts are one

    def _checked(self) -> Iterator[dict[str, Any]]:
        good, worst = 0, ""
        for index, row in enumerate(self._raw()):
            problem = problem_of({name: row[name] for name in self._kinds}, self._kind) or self._of_ids(row)
            self.summary.count(index, problem)
            if not problem:
                good += 1
                yield row
                continue
            worst = worst or f"dataset {self._dataset!r}, {self._loaded.place(index)}: {problem}"
            if not self._skip:
                raise UserError(f"{worst}; fix it, or leave such rows out with --skip-bad-rows")
        if not good:
            raise UserError(f"{worst}; no row can be trained on: fix them")

    def _raw(self) -> Iterator[dict[str, Any]]:
        """Every row with the first row's columns; a row that cannot be read is one sentence."""
        rows, count = iter(self._loaded.rows), 0
        while True:
            try:
                with silent_datasets():
                    row: Any = next(rows)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - the readers raise many unrelated types
                refuse_broken_rows(self._loaded.files)
                reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"dataset {self._dataset!r} cannot be read beyond row {count} ({reason}); fix what follows it"
                ) from None
            count += 1
            yield {name: row.get(name) for name in self._columns} if self._columns else row

    def _of_ids(self, row: dict[str, Any]) -> str:
        """What is wrong with a row of token ids, "" for nothing."""
        if self._kind != ("input_ids",):
            return ""
        ids = row["input_ids"]
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            return "'input_ids' is no list of token ids"
        if not ids:
            return "'input_ids' is empty"
        if "labels" in row and len(row["labels"] or ()) != len(ids):
            return "'input_ids' and 'labels' are of two lengths"
        if self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            return f"'input_ids' holds an id that the model does not know (0 to {self.vocabulary - 1})"
        return ""
