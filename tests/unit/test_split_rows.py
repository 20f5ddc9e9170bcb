"""Rows under Ulysses that begin in the middle of an epoch; DeepSpeed's adapter is a stand-in that splits as it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import Dataset

from seqtile.train.split_rows import SplitRows

ROWS, SIZE = 6, 2


class Rows(Dataset[int]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        self.read.append(row)
        return row


class Adapter:
    """One part of each process's row after the other, as ``UlyssesSPDataLoaderAdapter``; the other's row is -row."""

    def __init__(self, loader: Any) -> None:
        self.rows, self.parts = iter(loader), deque[int]()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.parts:
            row = int(next(self.rows)[0])
            self.parts += [row, -row]
        return self.parts.popleft()


def loader() -> tuple[SplitRows, Rows]:
    rows = Rows()
    sampler = SeedableRandomSampler(rows, data_seed=3)
    return SplitRows(DataLoaderShard(rows, batch_size=1, sampler=sampler), Adapter, SIZE), rows


def epoch(split: SplitRows, number: int, skip: int = 0) -> list[int]:
    split.begin_epoch(number)
    return list(skip_first_batches(split, skip) if skip else split)


def test_each_epoch_has_every_part_in_an_order_of_its_own():
    split, _ = loader()
    orders = [epoch(split, number) for number in range(3)]
    assert len(split) == ROWS * SIZE
    for order in orders:
        assert sorted(order) == sorted([*range(ROWS), *(-row for row in range(ROWS))])
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("skip", [0, 1, 6, 7, 11])
def test_an_epoch_that_begins_in_the_middle_is_the_end_of_the_whole_one(number: int, skip: int):
    whole = [epoch(loader()[0], earlier) for earlier in range(number + 2)]
    split, rows = loader()
    assert epoch(split, number, skip) == whole[number][skip:]
    assert len({*rows.read}) == ROWS - skip // SIZE  # what is skipped is not read
    assert epoch(split, number + 1) == whole[number + 1]
