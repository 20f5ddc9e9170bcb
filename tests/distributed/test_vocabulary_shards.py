"""A head whose vocabulary is shared out over two gloo ranks: the scores and gradients of the whole head."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import seqtile
from grid.zero3 import STINGY
from numerics._heads import IGNORE, SCALINGS, inputs
from seqtile import token_logprobs
from zoo import causal_lm

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
    engines = {
        "fsdp2": (beside_fsdp2, torch.float64),
        "fsdp2 and tp": (beside_fsdp2_on_a_mesh, torch.float64),
        "zero3": (beside_zero3, torch.float32),  # DeepSpeed takes no float64
    }
    for engine, (beside, dtype) in engines.items():
        alone, found, sizes = trained(beside, dtype)
        assert sizes[:2] == [COUNTED, 3 * COUNTED] and sizes.count(TOKENS * HIDDEN) == 1, (engine, sizes)
        results |= {f"{engine}, {name}": (found[name], value) for name, value in alone.items()}
    model_is_refused(mesh)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


COUNTED = TOKENS - len(range(0, TOKENS, 5))
Wrapped = tuple[nn.Module, Callable[[Tensor], None], Callable[[str, Tensor], Tensor]]


class Model(nn.Module):
    """A body that an engine shards, and a head whose rows are shared out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN, bias=False)).to(dtype)
        self.head = Head(dtype)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x), targets)
        return found


class Head(nn.Linear):
    """A head that returns the loss, from inside the module that engines gather weights for."""

    group: Any = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(HIDDEN, 20, dtype=dtype)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        scores = token_logprobs(
            hidden, self.weight, targets, bias=self.bias, entropy=True, tile=5, vocabulary_group=self.group
        )
        assert scores.entropy is not None
        return (0.3 * scores.entropy - scores.log_probs).sum()


def shared_out(model: Model, mesh: Any) -> None:
    for name in ("weight", "bias"):
        rows = distribute_tensor(getattr(model.head, name).detach(), mesh, [Shard(0)])
        setattr(model.head, name, nn.Parameter(rows))


def full(_: str, gradient: Any) -> Tensor:
    while type(gradient).__name__ == "DTensor":
        gradient = gradient.full_tensor()
    return gradient  # type: ignore[no-any-return]


def beside_fsdp2(model: Model) -> Wrapped:
    """The body in shards over the ranks that share the head's rows out."""
    mesh = init_device_mesh("cpu", (WORLD,))
    shared_out(model, mesh)
    fully_shard(model.body, mesh=mesh)
    return model, lambda loss: loss.backward(), full  # type: ignore[no-untyped-call]


def beside_fsdp2_on_a_mesh(model: Model) -> Wrapped:
    """All of it in FSDP2's hands on one dimension of a mesh, the head's rows shared out over the other."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    shared_out(model, mesh["tp"])
    for part in (model.body, model.head, model):
        fully_shard(part, mesh=mesh["dp"])
    return model, lambda loss: loss.backward(), full  # type: ignore[no-untyped-call]


def beside_zero3(model: Model) -> Wrapped:
    """The body in DeepSpeed's hands, each rank's rows of the head in nobody's."""
    import deepspeed

    os.environ.update(LOCAL_RANK=str(dist.get_rank()), RANK=str(dist.get_rank()), WORLD_SIZE=str(WORLD))
    deepspeed.init_distributed("gloo", dist_init_required=False)
    rows = slice(10 * dist.get_rank(), 10 * dist.get_rank() + 10)
    for name in ("weight", "bias"):
        setattr(model.head, name, nn.Parameter(getattr(model.head, name).detach()[rows].clone()))
    model.head.group = dist.group.WORLD
    config = {
        "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": False}, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**STINGY}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    body = model.body
    weights = dict(body.named_parameters())
    engine, *_ = deepspeed.initialize(model=body, optimizer=torch.optim.SGD(body.parameters(), lr=0.0), config=config)
    model.body = engine

    def gradient(name: str, found: Any) -> Tensor:
        if name.startswith("body."):
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(weights[name.removeprefix("body.")])  # type: ignore[no-any-return, no-untyped-call]
        whole = torch.empty(20, *found.shape[1:], dtype=found.dtype)
        dist.all_gather_into_tensor(whole, found.contiguous())
        return whole

    return model, engine.backward, gradient


def trained(
    beside: Callable[[Model], Wrapped], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Loss and gradients of one process and of the ranks, and the sizes that were reduced for the latter."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6), dtype=dtype)
    targets = whole(20, idle=False)["targets"]
    alone, model = Model(dtype), Model(dtype)
    loss = alone(x, targets)
    loss.backward()
    expected = {"loss": loss.detach(), **{name: weight.grad for name, weight in alone.named_parameters()}}
    names = {id(weight): name for name, weight in model.body.named_parameters()}
    assert len(names) == 3
    wrapped, backward, gradient = beside(model)
    patch = pytest.MonkeyPatch()
    seen = _Reductions(patch)
    loss = wrapped(x, targets)
    backward(loss)
    patch.undo()
    found = {"loss": loss.detach()}
    for name, weight in wrapped.named_parameters():
        plain = name.replace("body.module.", "body.")
        found[plain] = gradient(plain, weight.grad)
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    return expected, found, seen.sizes  # type: ignore[return-value]


def model_is_refused(mesh: Any) -> None:
    model = causal_lm("llama", vocab_size=20).train()
    seqtile.apply(model, blocks="none", loss="tiled")
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    ids = torch.arange(6).view(1, 6)
    with pytest.raises(seqtile.UserError, match="call seqtile.token_logprobs in your own forward"):
        model(input_ids=ids, labels=ids)


@pytest.mark.distributed
def test_scores_and_gradients_of_the_whole_head(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        assert len(results) == 25 + 3 * 6
        for name, (found, expected) in results.items():
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
