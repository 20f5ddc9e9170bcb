"""Data loader under Ulysses that can start in the middle of an epoch.

DeepSpeed's adapter takes one row of each process of a group and gives each of them a part of every row, one after the
other. It is an iterator without a data set, and begins where its own loader begins: a run that goes on in the middle of
an epoch cannot skip in it (``'UlyssesSPDataLoaderAdapter' object has no attribute 'dataset'``), and one that goes on in
the second epoch would see the order of the first. Here the parts are the items of a data set, read in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler


class SplitRows(DataLoader[Any]):
    """Replaces DeepSpeed's data-loader adapter; accelerate can skip its first batches.

    Args:
        rows: the loader of whole rows, prepared by accelerate.
        split: makes DeepSpeed's adapter of such a loader.
        size: processes that share a row.

    Attributes:
        rows: the loader of whole rows.
    """

    def __init__(self, rows: Any, split: Callable[[Any], Any], size: int) -> None:
        self.rows, self._parts = rows, _Parts(rows, split, size)
        super().__init__(
            self._parts, batch_sampler=BatchSampler(SequentialSampler(self._parts), 1, False), collate_fn=itemgetter(0)
        )

    def begin_epoch(self, epoch: int) -> None:
        """The order of the rows is that of this epoch from the next first row on."""
        self._parts.epoch = epoch


class _Parts(Dataset[Any]):
    """The parts of this process by number, given in ascending order: what is skipped is not read."""

    def __init__(self, rows: Any, split: Callable[[Any], Any], size: int) -> None:
        self._rows, self._split, self._size = rows, split, size
        self._next = -1
        self._iterator: Iterator[Any] = iter(())
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._rows) * self._size

    def __getitem__(self, number: int) -> Any:
        if number == 0 or number != self._next:
            self._iterator = self._from(number)
        self._next = number + 1
        item = next(self._iterator)
        if self._next == len(self):
            next(self._iterator, None)  # accelerate counts loaders that are not exhausted
        return item

    def _from(self, number: int) -> Iterator[Any]:
        from accelerate import skip_first_batches

        rows, parts = divmod(number, self._size)
        # Every process of the group skips as much, so that they gather the same rows.
        remaining = skip_first_batches(self._rows, rows) if rows else self._rows
        # accelerate 1.12 restarts a skipped loader at epoch 0:
        # https://github.com/huggingface/accelerate/blob/v1.12.0/src/accelerate/data_loader.py
        if hasattr(remaining, "set_epoch"):
            remaining.set_epoch(self.epoch)
        iterator: Iterator[Any] = iter(self._split(remaining))
        for _ in range(parts):
            next(iterator)
        return iterator
