"""Which rows of an evaluation count, on every rank, with accelerate's own way of dealing them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.data_loader import BatchSamplerShard

from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.evaluation import Evaluated


def counted(rows: int, batch_size: int, processes: int, ring: int, ulysses: int, rank: int) -> list[int]:
    """The rows that count of those that ``rank`` runs, or runs parts of, in their order."""
    dealt = processes // ring
    batches = BatchSampler(SequentialSampler(range(rows)), batch_size, False)
    shards = [[*BatchSamplerShard(batches, dealt, index)] if dealt > 1 else [*batches] for index in range(dealt)]
    accelerator = SimpleNamespace(
        parallelism_config=SimpleNamespace(cp_size=ring, sp_size=ulysses), num_processes=processes, process_index=rank,
        gather=lambda values: values.repeat(ring * ulysses, 1), maybe_context_parallel=lambda **_: nullcontext(),
    )  # fmt: skip
    loader = SimpleNamespace(dataset=range(rows), total_batch_size=batch_size * dealt)
    evaluated, first = Evaluated(loader, accelerator), rank // ring // ulysses * ulysses
    kept: list[int] = []
    for number in range(len(shards[0])):
        for part in range(ulysses):
            labels = torch.tensor(shards[first + part][number])[:, None].repeat(1, 2)
            with evaluated.split({"input_ids": labels, "labels": labels, "shift_labels": labels}) as batch:
                kept += [row for row in batch["labels"][:, 0].tolist() if row != IGNORED]
            evaluated.add(torch.tensor(float(number)), batch)
    return kept


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("processes", "ring", "ulysses"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2)]
)
def test_each_row_counts_once_and_is_the_same_on_ranks_that_share_it(
    processes: int, ring: int, ulysses: int, batch_size: int
) -> None:
    size = ring * ulysses
    for rows in range(1, 14):
        of_ranks = [counted(rows, batch_size, processes, ring, ulysses, rank) for rank in range(processes)]
        for first in range(0, processes, size):
            assert all(of_ranks[first + more] == of_ranks[first] for more in range(size))
        assert sorted(row for kept in of_ranks[::size] for row in kept) == [*range(rows)]


def test_the_mean_is_over_rows_of_the_loss_of_what_ranks_ran_together() -> None:
    """Two rings of two; of the second batch only the first ring's row counts."""
    gathered = [
        torch.tensor([[6.0, 3.0, 1.0], [6.0, 1.0, 1.0], [8.0, 4.0, 1.0], [0.0, 0.0, 1.0]]),
        torch.tensor([[3.0, 1.0, 1.0], [9.0, 3.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ]
    accelerator = SimpleNamespace(
        parallelism_config=SimpleNamespace(cp_size=2, sp_size=1), num_processes=4, process_index=0,
        gather=lambda _: gathered.pop(0),
    )  # fmt: skip
    evaluated = Evaluated(SimpleNamespace(dataset=range(3), total_batch_size=2), accelerator)
    for _ in range(2):
        evaluated.add(torch.tensor(0.0), {"shift_labels": torch.zeros(1, 2)})
    assert evaluated.mean() == (3 + 2 + 3) / 3
