"""A head whose vocabulary is shared out over the ranks: the scores and gradients of the whole head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import seqtile
from grid.cases import WORLD
from numerics._heads import IGNORE, SCALINGS, inputs
from refusals import refused
from seqtile import token_logprobs
from zoo import causal_lm

TOKENS, HIDDEN, VOCABULARY = 23, 8, 20


@contextmanager
def reduced() -> Iterator[list[int]]:
    """The number of elements of each tensor that is reduced inside."""
    sizes: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        yield sizes


def gathered(rows: Tensor, vocabulary: int) -> Tensor:
    """The whole of what each rank holds some rows of."""
    whole = torch.empty(vocabulary, *rows.shape[1:], dtype=rows.dtype)
    dist.all_gather_into_tensor(whole, rows.contiguous())
    return whole


def distribute(owner: Any, mesh: Any) -> None:
    """The rows of weight and bias over the ranks of the mesh, as DTensors."""
    for name in ("weight", "bias"):
        tensor = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        rows = nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)]))
        if isinstance(owner, dict):
            owner[name] = rows
        else:
            setattr(owner, name, rows)


@dataclass(frozen=True)
class Scores:
    """The operator, with weights as DTensors and as the rows of a process group."""

    name: str
    vocabulary: int = VOCABULARY
    idle: bool = False
    masked: bool = False

    def inputs(self) -> dict[str, Tensor]:
        tensors = inputs(TOKENS, HIDDEN, self.vocabulary, dtype=torch.float64)
        tensors["targets"] = tensors.pop("labels")
        if self.idle:
            tensors["targets"].fill_(IGNORE)
        if self.masked:  # every row of the last rank, as where the vocabulary is padded
            tensors["bias"].data[self.vocabulary // WORLD :] = -torch.inf
            tensors["targets"].clamp_(max=self.vocabulary // WORLD - 1)
        return tensors

    def run(self, rank: int) -> None:
        options = {"scaling": SCALINGS["plain"]} if self.masked else {}
        expected = outcome(self.inputs(), **options)
        tensors = self.inputs()
        distribute(tensors, init_device_mesh("cpu", (WORLD,)))
        with reduced() as sizes:
            results = outcome(tensors, **options)
        counted = int((tensors["targets"] != IGNORE).sum())
        assert sizes == [counted, 3 * counted, TOKENS * HIDDEN]  # nothing of the vocabulary's size travels
        for name in ("weight", "bias"):
            results[name] = results[name].full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(results, expected)
        if self.vocabulary % WORLD == 0:
            tensors = self.inputs()
            for name in ("weight", "bias"):
                tensors[name] = tensors[name].detach().chunk(WORLD)[rank].clone().requires_grad_()
            results = outcome(tensors, vocabulary_group=dist.group.WORLD, **options)
            for name in ("weight", "bias"):
                results[name] = gathered(results[name], self.vocabulary)
            torch.testing.assert_close(results, expected)


def outcome(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Scores of the targets, and the gradients of a sum with a factor of its own for each."""
    options = {"scaling": SCALINGS["capped"], **options}
    scores = token_logprobs(**tensors, temperature=1.3, entropy=True, tile=5, **options)
    factor = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    (factor * scores.log_probs + 0.3 * scores.entropy).sum().backward()  # type: ignore[operator]
    gradients = {name: tensors[name].grad for name in ("hidden", "weight", "bias")}
    return {"log_probs": scores.log_probs.detach(), "entropy": scores.entropy.detach(), **gradients}  # type: ignore


@dataclass(frozen=True)
class Refused:
    """What needs whole rows is refused, and so is a model whose head is in shards."""

    name: str

    def run(self, rank: int) -> None:
        mesh = init_device_mesh("cpu", (WORLD,))
        tensors = Scores("").inputs()
        distribute(tensors, mesh)
        for change in ({"argmax": True}, {"reference": torch.zeros(TOKENS, HIDDEN)}):
            with pytest.raises(ValueError, match="supports log-probabilities and entropies only, got"):
                outcome(tensors, **change)
        few = distribute_tensor(torch.zeros(1, HIDDEN), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="leaves the last of"):
            token_logprobs(torch.zeros(3, HIDDEN), few, torch.zeros(3, dtype=torch.long))
        across = distribute_tensor(torch.zeros(VOCABULARY, HIDDEN), mesh, [Shard(1)])
        with pytest.raises(ValueError, match=r"expected \(Shard\(dim=0\),\)"):
            token_logprobs(torch.zeros(3, HIDDEN), across, torch.zeros(3, dtype=torch.long))
        model = causal_lm("llama", vocab_size=VOCABULARY).train()
        seqtile.apply(model, blocks="none", loss="tiled")
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
        ids = torch.arange(6).view(1, 6)
        with refused("loss.head-not-gathered"):
            model(input_ids=ids, labels=ids)


class Head(nn.Linear):
    """A head that returns the loss, from inside the module that engines gather weights for."""

    group: Any = None

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        scores = token_logprobs(
            hidden, self.weight, targets, bias=self.bias, entropy=True, tile=5, vocabulary_group=self.group
        )
        assert scores.entropy is not None
        return (0.3 * scores.entropy - scores.log_probs).sum()


class Model(nn.Module):
    """A body that an engine shards, and a head whose rows are shared out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN, bias=False)).to(dtype)
        self.head = Head(HIDDEN, VOCABULARY, dtype=dtype)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(x), targets)
        return loss


Backward = Callable[[Tensor], None]
Gradient = Callable[[str, Tensor], Tensor]
"""The whole of a gradient, from its name and what a rank holds of it."""


@dataclass(frozen=True)
class Beside:
    """A head that is shared out beside an engine that has the body, or both."""

    name: str
    wrap: Callable[[Model], tuple[Backward, Gradient]]
    dtype: torch.dtype = torch.float64

    def run(self, rank: int) -> None:
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6), dtype=self.dtype)
        targets = Scores("").inputs()["targets"]
        alone, model = Model(self.dtype), Model(self.dtype)
        expected = alone(x, targets)
        expected.backward()
        backward, gradient = self.wrap(model)
        with reduced() as sizes:
            loss = model(x, targets)
            backward(loss)
        counted = int((targets != IGNORE).sum())
        assert sizes[:2] == [counted, 3 * counted] and sizes.count(TOKENS * HIDDEN) == 1, sizes
        names = {name.replace("body.module.", "body."): p for name, p in model.named_parameters()}
        gradients = {name: gradient(name, p.grad) for name, p in names.items()}
        torch.testing.assert_close(loss.detach(), expected.detach())
        torch.testing.assert_close(gradients, {name: p.grad for name, p in alone.named_parameters()})


def plain_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def full(_: str, gradient: Any) -> Tensor:
    while type(gradient).__name__ == "DTensor":
        gradient = gradient.full_tensor()
    return gradient  # type: ignore[no-any-return]


def fsdp2(model: Model) -> tuple[Backward, Gradient]:
    """The body in shards over the ranks that share the head's rows out."""
    mesh = init_device_mesh("cpu", (WORLD,))
    distribute(model.head, mesh)
    fully_shard(model.body, mesh=mesh)
    return plain_backward, full


def fsdp2_on_a_mesh(model: Model) -> tuple[Backward, Gradient]:
    """All of it in FSDP2's hands on one dimension of a mesh, the head's rows shared out over the other."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    distribute(model.head, mesh["tp"])
    for module in (model.body, model.head, model):
        fully_shard(module, mesh=mesh["dp"])
    return plain_backward, full


CASES = [
    Scores("even"),
    Scores("uneven", vocabulary=19),
    Scores("idle", idle=True),
    Scores("masked", masked=True),
    Refused("refused"),
    Beside("fsdp2", fsdp2),
    Beside("fsdp2-and-tp", fsdp2_on_a_mesh),
]


class ENGINE:
    @staticmethod
    def run(case: Scores | Refused | Beside, rank: int) -> None:
        case.run(rank)
