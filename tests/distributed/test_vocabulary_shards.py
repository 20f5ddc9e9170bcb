"""A head whose vocabulary is shared out over two gloo ranks: the scores and gradients of the whole head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from numerics._heads import IGNORE, SCALINGS, inputs
from seqtile import token_logprobs

WORLD, TOKENS, HIDDEN = 2, 23, 8


def whole(vocabulary: int, idle: bool) -> dict[str, Tensor]:
    given = inputs(TOKENS, HIDDEN, vocabulary, dtype=torch.float64)
    given["targets"] = given.pop("labels")
    if idle:
        given["targets"].fill_(IGNORE)
    return given


def outcome(given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    scores = token_logprobs(**given, scaling=SCALINGS["capped"], temperature=1.3, entropy=True, tile=5, **options)
    factor = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    (factor * scores.log_probs + 0.3 * scores.entropy).sum().backward()  # type: ignore[operator]
    found = {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach()}  # type: ignore[union-attr]
    return found | {name: given[name].grad for name in ("hidden", "weight", "bias")}  # type: ignore[dict-item]


class _Reductions:
    """Counts what is reduced; whatever else travels is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        reduce = dist.all_reduce

        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return reduce(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", noted)


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    patch = pytest.MonkeyPatch()
    seen = _Reductions(patch)
    mesh = init_device_mesh("cpu", (WORLD,))
    results: dict[str, Any] = {}
    for name, vocabulary, idle in (("even", 20, False), ("uneven", 19, False), ("idle", 20, True)):
        expected = outcome(whole(vocabulary, idle))
        as_dtensor = whole(vocabulary, idle)
        for part in ("weight", "bias"):
            sharded = distribute_tensor(as_dtensor[part].detach(), mesh, [Shard(0)])
            as_dtensor[part] = torch.nn.Parameter(sharded)
        seen.sizes.clear()
        runs = {"dtensor": outcome(as_dtensor)}
        counted = int((as_dtensor["targets"] != IGNORE).sum())
        assert seen.sizes == [counted, 3 * counted, TOKENS * HIDDEN], seen.sizes
        for part in ("weight", "bias"):
            runs["dtensor"][part] = runs["dtensor"][part].full_tensor()  # type: ignore[attr-defined]
        if vocabulary % WORLD == 0:
            rows = slice(rank * vocabulary // WORLD, (rank + 1) * vocabulary // WORLD)
            own = whole(vocabulary, idle)
            for part in ("weight", "bias"):
                own[part] = own[part].detach()[rows].clone().requires_grad_()
            runs["group"] = outcome(own, vocabulary_group=dist.group.WORLD)
            for part in ("weight", "bias"):
                full = torch.empty(vocabulary, *own[part].shape[1:], dtype=torch.float64)
                dist.all_gather_into_tensor(full, runs["group"][part].contiguous())
                runs["group"][part] = full
        for way, found in runs.items():
            for key, value in expected.items():
                results[f"{name}, {way}, {key}"] = (found[key], value)
    refusals = []
    for change in ({"argmax": True}, {"reference": torch.zeros(TOKENS, HIDDEN)}):
        with pytest.raises(ValueError, match="computes log-probabilities and entropies, got") as caught:
            outcome(as_dtensor, **change)
        refusals.append(str(caught.value))
    across = distribute_tensor(torch.zeros(20, HIDDEN), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"expected \(Shard\(dim=0\),\)"):
        token_logprobs(torch.zeros(3, HIDDEN), across, torch.zeros(3, dtype=torch.long))
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
def test_scores_and_gradients_of_the_whole_head(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        assert len(results) == 25
        for name, (found, expected) in results.items():
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
