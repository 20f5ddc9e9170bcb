"""Rows that are read while they are trained on: each is looked at as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.train.data import Loaded, silent_datasets, unreadable
from seqtile.train.data_summary import StreamSummary
from seqtile.train.row_formats import RowError, RowFormat, find_kind

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

SAMPLE = 8
"""Rows from the beginning that are rendered and compared before training."""


class Stream:
    """The rows of a data set, from the first on at each iteration.

    Attributes:
        summary: how many rows have come, and how many were left out, by what is wrong with them.
        row_format: how they are read.
        vocabulary: one more than the largest token id that a row may hold; None where that is not looked at.

    Args:
        loaded: what :func:`seqtile.train.data.load_rows` gave for a stream.
        dataset: its name, for messages.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of stopping at them.
        **settings: of :class:`seqtile.train.row_formats.RowFormat`.

    Raises:
        UserError: there is no row, or none of its columns can be trained on.
    """

    def __init__(
        self, loaded: Loaded, dataset: str, *, text_field: str = "text", skip: bool = False, **settings: Any
    ) -> None:
        self.vocabulary: int | None = None
        self._loaded, self._dataset, self._skip = loaded, dataset, skip
        self._columns: list[str] = []
        first = next(self._raw(), None)
        if first is None:
            raise UserError(f"dataset {dataset!r} holds no rows; give one with at least one example to train on")
        self._columns = list(first)
        kind = find_kind(self._columns, dataset, text_field)
        self.row_format = RowFormat(kind, tuple(self._columns), text_field, **settings)
        self.summary = StreamSummary(trains_prompts=self.row_format.trains_prompts)

    def rows(self) -> IterableDataset:
        """The rows that are right, as TRL takes them."""
        from datasets import IterableDataset

        return IterableDataset.from_generator(self._checked)

    def sample(self) -> Dataset:
        """The first of them."""
        from datasets import Dataset

        rows = [row for row, _ in zip(self._checked(counts=False), range(SAMPLE), strict=False)]
        return Dataset.from_list(rows, features=self.row_format.features(rows[0]))

    def __deepcopy__(self, _: Any) -> Stream:
        return self  # datasets copies what it maps; the counts are one

    def _checked(self, counts: bool = True) -> Iterator[dict[str, Any]]:
        good, worst = 0, ""
        for index, row in enumerate(self._raw()):
            try:
                result = self.row_format.read(row)
                self._check_vocabulary(result)
                problem = ""
            except RowError as error:
                result, problem = {}, str(error)
            if counts:
                self.summary.count(index, problem)
            if not problem:
                good += 1
                yield {name: result.get(name) for name in self.row_format.outputs}
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
                if self._loaded.files:
                    raise unreadable(self._loaded.files, error) from None
                reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(
                    f"dataset {self._dataset!r} cannot be read beyond row {count} ({reason}); fix what follows it"
                ) from None
            count += 1
            yield {name: row.get(name) for name in self._columns} if self._columns else row

    def _check_vocabulary(self, row: dict[str, Any]) -> None:
        """Refuse ids that the model does not have.

        Raises:
            RowError: there is one.
        """
        ids = row.get("input_ids")
        if ids and self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise RowError(f"'input_ids' holds an id that the model does not know (0 to {self.vocabulary - 1})")
