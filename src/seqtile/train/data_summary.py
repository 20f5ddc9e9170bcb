"""What a run trains on, in numbers: counted on the tokenised rows before and after they were cut and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


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

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows, {self.tokens:,} tokens, up to {self.longest:,} in a row"]
        if self.cut:
            parts.append(f"{self.cut:,} cut at {self.max_length:,} tokens ({self.cut_tokens:,} tokens lost)")
        sequences = "" if self.sequences == self.rows else f" in {self.sequences:,} sequences"
        parts.append(f"{self.trained:,} tokens train{sequences}")
        return "; ".join(parts) + _told_left_out(self.left_out)


@dataclass
class StreamSummary:
    """A data set that is read while it is trained on; ``str(summary)`` is one line.

    Attributes:
        rows: rows that have come, in the first pass over them.
        left_out: those that were not trained on, by reason.
    """

    rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def count(self, index: int, problem: str) -> None:
        """Row ``index`` has come; its first few come more than once."""
        if index >= self.rows:
            self.rows = index + 1
            if problem:
                self.left_out[problem] = self.left_out.get(problem, 0) + 1

    def __str__(self) -> str:
        return f"{self.rows:,} rows read as a stream{_told_left_out(self.left_out)}"


def _told_left_out(left_out: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} where {reason}" for reason, count in left_out.items())
    return f"; left out: {reasons}" if reasons else ""


def summarise(
    tokenised: Dataset, prepared: Dataset, max_length: int | None, packing: str | None, left_out: Mapping[str, int]
) -> DataSummary:
    """Count.

    Args:
        tokenised: rows with ``input_ids`` and ``labels``, whole.
        prepared: what the trainer made of them.
        max_length: where it cuts; None nowhere.
        packing: its strategy; None without packing. Only ``"bfd"`` cuts rows then.
        left_out: rows that it was not given, by reason.

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
    )  # fmt: skip


def _trained(prepared: Dataset) -> int:
    """Labels that are predicted: all but masked ones and those of each sequence's first token."""
    import numpy
    from pyarrow import compute

    from seqtile.ops.lm_loss.kept_tokens import IGNORED

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
