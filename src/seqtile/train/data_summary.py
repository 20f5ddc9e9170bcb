"""What a run trains on, in numbers: counted on the tokenised rows before and after they were cut and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seqtile._log import first_rank_logger
from seqtile.ops.lm_loss.kept_tokens import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

logger = first_rank_logger(__name__)


@dataclass(frozen=True)
class DataSummary:
    """One data set; ``str(summary)`` is one line.

    Attributes:
        rows: rows that were tokenised.
        tokens: their tokens, before any cut.
        longest: tokens of the longest of them.
        max_length: where rows are cut.
        cut: rows that lost their end.
        cut_tokens: tokens that they lost.
        sequences: rows that the trainer sees: without those left out, and packed.
        trained: tokens whose loss counts: neither masked nor the first of a sequence.
        left_out: rows that are not trained on, by reason.
        trains_prompts: whether prompts are among the tokens that train; None where rows have no prompts.
    """

    rows: int
    tokens: int
    longest: int
    max_length: int | None
    cut: int
    cut_tokens: int
    sequences: int
    trained: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    trains_prompts: bool | None = None

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows, {self.tokens:,} tokens, up to {self.longest:,} in a row"]
        if self.cut:
            parts.append(f"{self.cut:,} cut at {self.max_length:,} tokens ({self.cut_tokens:,} tokens lost)")
        sequences = "" if self.sequences == self.rows else f" in {self.sequences:,} sequences"
        parts.append(f"{self.trained:,} tokens train{sequences}{_PROMPTS[self.trains_prompts]}")
        return "; ".join(parts) + _left_out_in_words(self.left_out)


_PROMPTS = {None: "", True: ", prompts among them", False: ", prompts not among them"}


@dataclass
class StreamSummary:
    """A data set that is read while it is trained on; ``str(summary)`` is one line.

    Attributes:
        rows: rows that have come, in the first pass over them.
        left_out: those that were not trained on, by reason.
        trains_prompts: whether prompts are among the tokens that train; None where rows have no prompts.
        tokens: of the rows that were tokenised.
        trained: tokens whose loss counts.
        cut: rows that lost their end.
        cut_tokens: tokens that they lost.
    """

    rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    trains_prompts: bool | None = None
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    cut_tokens: int = 0
    _tokenised: int = field(default=0, repr=False, compare=False)

    def __deepcopy__(self, _: Any) -> StreamSummary:
        return self  # datasets copies what it maps; the counts are one

    def count(self, index: int, problem: str) -> None:
        """Row ``index`` has come; its first few come more than once."""
        if index >= self.rows:
            self.rows = index + 1
            if problem:
                self.left_out[problem] = self.left_out.get(problem, 0) + 1

    def count_tokens(
        self, row: Mapping[str, Any], index: int, max_length: int | None, keep_end: bool
    ) -> dict[str, Any]:
        """Row ``index`` of those that are trained on has been tokenised, and will be cut; gives back no change."""
        if index < self._tokenised:
            return {}
        self._tokenised = index + 1
        length = len(row["input_ids"])
        kept = length if max_length is None else min(length, max_length)
        self.tokens += length
        labels = row["labels"][-kept:] if keep_end else row["labels"][:kept]
        self.trained += sum(label != IGNORED for label in labels[1:])
        if kept < length:
            self.cut, self.cut_tokens = self.cut + 1, self.cut_tokens + length - kept
            if self.cut == 1:
                logger.warning("a row of %s tokens is cut at max_length %s; the last line counts such rows",
                               f"{length:,}", f"{kept:,}")  # fmt: skip
        return {}

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows read as a stream, {self.tokens:,} tokens"]
        if self.cut:
            parts.append(f"{self.cut:,} cut ({self.cut_tokens:,} tokens lost)")
        parts.append(f"{self.trained:,} tokens train{_PROMPTS[self.trains_prompts]}")
        return "; ".join(parts) + _left_out_in_words(self.left_out)


def how_to_change(trains_prompts: bool | None, setting: str) -> str:
    """The sentence after a summary: which setting has prompts trained, or not trained.

    Args:
        trains_prompts: whether they are.
        setting: ``"assistant_only_loss"`` or ``"completion_only_loss"``.
    """
    if trains_prompts is None:
        return ""
    verb = "leaves prompts out" if trains_prompts else "has prompts train"
    return f"; 'trainer: {{{setting}: {str(trains_prompts).lower()}}}' {verb}"


def _left_out_in_words(left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} where {reason}" for reason, count in left_out.items())
    return f"; left out: {reasons}" if reasons else ""


def summarise(
    tokenised: Dataset,
    prepared: Dataset,
    max_length: int | None,
    packing: str | None,
    left_out: Mapping[str, int],
    trains_prompts: bool | None = None,
) -> DataSummary:
    """Count.

    Args:
        tokenised: rows with ``input_ids`` and ``labels``, whole.
        prepared: what the trainer made of them.
        max_length: where it cuts; None nowhere.
        packing: its strategy; None without packing. Only ``"bfd"`` cuts rows then.
        left_out: rows that it was not given, by reason.
        trains_prompts: goes into the summary.

    Cost:
        Two passes over the tokens in Arrow's own arrays, about a second per 10**9 of them.
    """
    from pyarrow import compute  # type: ignore[import-untyped]

    rows = tokens = longest = cut = cut_tokens = 0
    for table in _tables(tokenised, ["input_ids"]):
        lengths = compute.list_value_length(table["input_ids"])
        rows += len(lengths)
        tokens += compute.sum(lengths).as_py() or 0
        longest = max(longest, compute.max(lengths).as_py() or 0)
        if max_length is not None and packing in (None, "bfd"):
            over = compute.filter(lengths, compute.greater(lengths, max_length))
            cut += len(over)
            cut_tokens += (compute.sum(over).as_py() or 0) - max_length * len(over)
    left_out = dict(left_out)
    if packing is None and len(prepared) < rows:
        left_out["no token that counts is left within max_length"] = rows - len(prepared)
    return DataSummary(
        rows=rows, tokens=tokens, longest=longest, max_length=max_length, cut=cut, cut_tokens=cut_tokens,
        sequences=len(prepared), trained=_trained(prepared), left_out=left_out,
        trains_prompts=trains_prompts,
    )  # fmt: skip


def _trained(prepared: Dataset) -> int:
    """Labels that are predicted: all but masked ones and those of each sequence's first token."""
    import numpy
    from pyarrow import compute

    count = 0
    packed = "seq_lengths" in prepared.column_names
    for table in _tables(prepared, ["labels", *(["seq_lengths"] if packed else [])]):
        labels = table["labels"].combine_chunks()
        lengths = table["seq_lengths"].combine_chunks().flatten() if packed else compute.list_value_length(labels)
        flat = labels.flatten().to_numpy(zero_copy_only=False) != IGNORED
        lengths = lengths.to_numpy(zero_copy_only=False)
        starts = numpy.cumsum(lengths) - lengths
        count += int(flat.sum() - flat[starts[lengths > 0]].sum())
    return count


def _tables(rows: Dataset, columns: list[str]) -> Any:
    return rows.select_columns(columns).with_format("arrow").iter(batch_size=1000)
