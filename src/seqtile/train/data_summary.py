"""Summarise a run's data, counted before and after rows are truncated and packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seqtile._sentences import counted
from seqtile.ops.lm_loss.kept_tokens import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class DataSummary:
    """One data set; ``str(summary)`` is one line. Of a stream it grows while the rows come in their first pass.

    Attributes:
        rows: rows that were tokenised; of a stream all that have come.
        tokens: their tokens, before any cut.
        longest: tokens of the longest of them.
        max_length: where rows are cut.
        cut: rows that lost their end.
        cut_tokens: tokens that they lost.
        sequences: rows that the trainer sees: without those left out, and packed; None for a stream.
        trained: tokens whose loss counts: neither masked nor the first of a sequence; None where it is not known
            before the rows are trained on.
        left_out: rows that are not trained on, by reason.
        trains_prompts: whether prompts are among the tokens that train; None where rows have no prompts.
        pictures: number of pictures in all rows.
        frames: frames of videos in all rows.
        largest_picture, largest_frame: the most tokens of one picture, and of one frame of a video.
        visual: the fewest and the most tokens of a row that features of pictures and frames replace; None for text.
    """

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    max_length: int | None = None
    cut: int = 0
    cut_tokens: int = 0
    sequences: int | None = None
    trained: int | None = 0
    left_out: dict[str, int] = field(default_factory=dict)
    trains_prompts: bool | None = None
    pictures: int = 0
    frames: int = 0
    largest_picture: int = 0
    largest_frame: int = 0
    visual: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = [f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}, longest {self.longest:,}"]
        if self.cut:
            parts.append(
                f"{self.cut:,} truncated to {self.max_length:,} tokens ({counted(self.cut_tokens, 'token')} lost)"
            )
        if self.visual:
            counts = [
                counted(count, noun)
                for count, noun in ((self.pictures, "picture"), (self.frames, "video frame"))
                if count
            ]
            least, most = self.visual
            per_row = f"{most:,}" if least == most else f"{least:,} to {most:,}"
            parts.append(f"{' and '.join(counts)}, {per_row} visual tokens per row")
        sequences = "" if self.sequences in (None, self.rows) else f" in {counted(self.sequences or 0, 'sequence')}"
        prompts = {None: "", True: ", including prompts", False: ", prompts not among them"}[self.trains_prompts]
        if self.trained is not None:
            parts.append(f"{counted(self.trained, 'token')} in the loss{sequences}{prompts}")
        if self.left_out:
            parts.append(
                "left out: " + ", ".join(f"{count:,} where {reason}" for reason, count in self.left_out.items())
            )
        return "; ".join(parts)

    def add_row(self, length: int) -> int:
        """Count a tokenised row; returns how many tokens a cut leaves of it."""
        kept = length if self.max_length is None else min(length, self.max_length)
        self.tokens, self.longest = self.tokens + length, max(self.longest, length)
        self.cut, self.cut_tokens = self.cut + (kept < length), self.cut_tokens + length - kept
        return kept


def summarise(
    tokenised: Dataset, prepared: Dataset, max_length: int | None, packing: str | None, left_out: Mapping[str, int],
    trains_prompts: bool | None = None,
) -> DataSummary:  # fmt: skip
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
    import numpy
    from pyarrow import compute  # type: ignore[import-untyped]

    batches = [compute.list_value_length(table["input_ids"]) for table in _tables(tokenised, ["input_ids"])]
    lengths = numpy.concatenate([batch.to_numpy() for batch in batches]).astype(numpy.int64)
    over = lengths[lengths > max_length] if max_length is not None and packing in (None, "bfd") else lengths[:0]
    left_out = dict(left_out)
    if packing is None and len(prepared) < len(lengths):
        left_out["no token of the loss is left within max_length"] = len(lengths) - len(prepared)
    trained = 0
    is_packed = "seq_lengths" in prepared.column_names
    for table in _tables(prepared, ["labels", *(["seq_lengths"] if is_packed else [])]):
        labels = table["labels"].combine_chunks()
        documents = (
            table["seq_lengths"].combine_chunks().flatten() if is_packed else compute.list_value_length(labels)
        ).to_numpy(zero_copy_only=False)
        counts = labels.flatten().to_numpy(zero_copy_only=False) != IGNORED
        firsts = (numpy.cumsum(documents) - documents)[documents > 0]  # no token predicts a document's first
        trained += int(counts.sum() - counts[firsts].sum())
    return DataSummary(
        rows=len(lengths), tokens=int(lengths.sum()), longest=int(lengths.max(initial=0)), max_length=max_length,
        cut=len(over), cut_tokens=int(over.sum()) - len(over) * (max_length or 0), sequences=len(prepared),
        trained=trained, left_out=left_out, trains_prompts=trains_prompts,
    )  # fmt: skip


def _tables(rows: Dataset, columns: list[str]) -> Any:
    return rows.select_columns(columns).with_format("arrow").iter(batch_size=1000)
