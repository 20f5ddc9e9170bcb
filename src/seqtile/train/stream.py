"""Stream rows while training, and check each one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.data import SAMPLE_OF_A_FILE, Loaded, find_broken_line, reason_of
from seqtile.train.data_summary import DataSummary
from seqtile.train.media import RowError
from seqtile.train.rendered_rows import no_embedding
from seqtile.train.row_formats import RowFormat, find_key_columns

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = first_rank_logger(__name__)


class Stream:
    """The rows of a data set, from the first on at each iteration.

    Attributes:
        summary: the rows that have come in the first pass over them, and those that were left out.
        row_format: how they are read.
        vocabulary: one more than the largest token id that a row may hold; None where that is not checked.
        tokenizer: tokenizer of rows of text.

    Args:
        source: what :func:`seqtile.train.data.load_rows` gave for a stream.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of stopping at them.
        **settings: fields of :class:`seqtile.train.row_formats.RowFormat`.

    Raises:
        UserError: there is no row, or none of its columns can be trained on.
    """

    def __init__(self, source: Loaded, *, text_field: str = "text", skip: bool = False, **settings: Any) -> None:
        self.vocabulary: int | None = None
        self.tokenizer: Any = None
        self._source, self._skip = source, skip
        self._tokenised = 0
        first = next(self._read(), None)
        if first is None:
            raise UserError("dataset.empty", f"dataset {source.dataset!r} has no rows")
        self.row_format = RowFormat(find_key_columns([*first], source.dataset, text_field), tuple(first), **settings)
        self.summary = DataSummary(trains_prompts=self.row_format.trains_prompts)

    def rows(self) -> IterableDataset:
        """The rows that are right, as TRL takes them."""
        from datasets import IterableDataset

        return IterableDataset.from_generator(self._check)

    def sample(self) -> Dataset:
        """The first of them."""
        from datasets import Dataset

        rows = [row for row, _ in zip(self._check(counts=False), range(SAMPLE_OF_A_FILE), strict=False)]
        text_pairs = isinstance(rows[0].get("prompt"), str)
        return Dataset.from_list(rows, features=self.row_format.features(text_pairs=text_pairs))

    def count_tokens(self, row: Mapping[str, Any], index: int, keep_end: bool) -> dict[str, Any]:
        """Row ``index`` of those that are trained on has been tokenised, and will be cut; gives back no change."""
        if index < self._tokenised:
            return {}
        self._tokenised = index + 1
        ids, length = row["input_ids"], len(row["input_ids"])
        if ids and self.vocabulary is not None and max(ids) >= self.vocabulary:
            raise UserError(
                "dataset.token-without-embedding",
                f"dataset {self._source.dataset!r}, trained row {index + 1}: "
                f"{no_embedding(max(ids), self.vocabulary, self.tokenizer)}",
            )
        kept = self.summary.add_row(length)
        labels = row["labels"][-kept:] if keep_end else row["labels"][:kept]
        self.summary.trained = (self.summary.trained or 0) + sum(label != IGNORED for label in labels[1:])
        if kept < length and self.summary.cut == 1:
            logger.warning("a row of %s tokens is truncated to max_length %s; the last line counts such rows",
                           f"{length:,}", f"{kept:,}")  # fmt: skip
        return {}

    def __deepcopy__(self, _: Any) -> Stream:
        return self  # datasets copies what it maps; the counts are one

    def _check(self, counts: bool = True) -> Iterator[dict[str, Any]]:
        has_good, first_problem = False, ""
        for index, row in enumerate(self._read()):
            # The first few rows are read more than once.
            is_new = counts and index >= self.summary.rows
            self.summary.rows += is_new
            try:
                result = self.row_format.read({name: row.get(name) for name in self.row_format.columns})
                ids = result.get("input_ids")
                if ids and self.vocabulary is not None and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                    raise RowError(f"'input_ids' has an id outside the vocabulary (0 to {self.vocabulary - 1})")
            except RowError as error:
                first_problem = (
                    first_problem or f"dataset {self._source.dataset!r}, {self._source.place(index)}: {error}"
                )
                if not self._skip:
                    raise UserError(
                        "dataset.invalid-row", f"{first_problem}; fix it, or skip such rows with --skip-bad-rows"
                    ) from None
                if is_new:
                    self.summary.left_out[str(error)] = self.summary.left_out.get(str(error), 0) + 1
                continue
            has_good = True
            yield {name: result.get(name) for name in self.row_format.outputs}
        if not has_good:
            raise UserError("dataset.no-valid-row", f"{first_problem}; no row can be trained on")

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._source.rows
        except Exception as error:  # the readers raise many unrelated types
            reason = f"cannot read dataset {self._source.dataset!r}: {reason_of(error)}"
            raise UserError("dataset.unreadable", find_broken_line(self._source.files) or reason) from error
