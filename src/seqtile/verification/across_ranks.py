"""The same comparison in several processes: tiled under an engine against untiled under the same engine.

Every rank calls :func:`verify_under` with the same model and a batch of its own. The truth needs no engine: it is the
mean over the ranks of what each computes alone in higher precision, which is what every engine is to give.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile.checkpointing.reentrant import non_reentrant
from seqtile.install.apply import apply
from seqtile.options import Only
from seqtile.recognise.candidates import find_blocks
from seqtile.verification.compare import NON_REENTRANT, judged, truth_of
from seqtile.verification.one_step import BlockSizes, Measured, tiled_of
from seqtile.verification.plain_autograd import without_recompute
from seqtile.verification.result import VerifyResult
from seqtile.verification.state import kept, refuse_what_cannot_be_compared


class Engine:
    """A model under DDP: whole weights, and gradients that are means over the ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.call: Any = model
        self.wrap()

    def wrap(self) -> None:
        """Let the engine take the model over."""
        # An expert that no token of this rank reaches has no gradient here; where there is none, DDP warns of this.
        unused = any("expert" in name for name, _ in self.model.named_modules())
        self.call = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=unused)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients of what trains, by the names of the model that is not wrapped; the same on every rank."""
        return {name: self.gradient(p) for name, p in self.model.named_parameters() if p.requires_grad}

    def gradient(self, weight: Any) -> Tensor | None:
        return None if weight.grad is None else weight.grad.detach().clone()

    def close(self) -> None:
        """Release what outlives the model."""


class Fsdp2(Engine):
    """``fully_shard`` around every decoder layer with a block, and the whole."""

    def wrap(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(self.model.parameters()).device.type, (dist.get_world_size(),))
        blocks = find_blocks(self.model, everything=True)[0]
        for name in dict.fromkeys(block.layer or block.name for block in blocks):
            fully_shard(self.model.get_submodule(name), mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def gradient(self, weight: Any) -> Tensor | None:
        return None if weight.grad is None else weight.grad.full_tensor()


class Zero(Engine):
    """DeepSpeed, which steps its own optimizer."""

    stage = 2

    def wrap(self) -> None:
        import deepspeed

        trained = [p for p in self.model.parameters() if p.requires_grad]
        if torch.float16 in {p.dtype for p in self.model.parameters()}:
            raise UserError(
                "verify does not support float16 under DeepSpeed, which scales the loss itself; use float32 or bfloat16"
            )
        size = sum(p.numel() for p in trained)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # Its buckets are of one size, a billion bytes and more, however small the model.
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": min(500_000_000, size)},
            "bf16": {"enabled": torch.bfloat16 in {p.dtype for p in self.model.parameters()}},
        }
        self.call, *_ = deepspeed.initialize(
            model=self.model, optimizer=torch.optim.SGD(trained, lr=1.0), config=config
        )

    def backward(self, loss: Tensor) -> None:
        self.call.backward(loss)

    def gradient(self, weight: Any) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(weight)
        return None if gradient is None else gradient.detach().clone()

    def close(self) -> None:
        self.call.destroy()


class Zero3(Zero):
    """DeepSpeed's ZeRO-3: as ZeRO-2, the weights sharded too."""

    stage = 3


ENGINE_CLASSES: dict[str, type[Engine]] = {"ddp": Engine, "fsdp2": Fsdp2, "zero2": Zero, "zero3": Zero3}


def verify_under(
    engine: str,
    model: nn.Module,
    batch: Any,
    *,
    tile: int | str = "auto",
    only: Only | None = None,
    seed: int = 0,
) -> VerifyResult:
    """:func:`seqtile.verify` under an engine, in an initialised process group of at least two ranks.

    Args:
        engine: ``"ddp"``, ``"fsdp2"``, ``"zero2"`` or ``"zero3"``.
        model: the same on every rank, neither tiled nor wrapped; it stays so.
        batch: this rank's own, of the same length everywhere; ``model(**batch).loss`` is its loss.
        tile: as in :func:`seqtile.apply`.
        only: the same.
        seed: of the random state that every run starts from, ranks apart.

    Returns:
        The same verdict on every rank; counts and seconds are this rank's.

    Cost:
        As :func:`seqtile.verify`, and two copies of the model.

    Raises:
        UserError: there is nothing to compare, or one process alone.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world < 2:
        raise UserError(f"engine {engine!r} was started with {world} process, expected at least 2")
    refuse_what_cannot_be_compared(model)
    seed += dist.get_rank()
    notes: list[str] = [f"under {engine} on {world} processes; costs are per process"]
    with kept(model, seed):
        model.train()
        with non_reentrant(model) as was_reentrant:
            truth, precision = truth_of(model, batch, None, seed, notes)
        if was_reentrant:
            notes.append(NON_REENTRANT)
        truth = _mean_over_ranks(truth)
        precision = None if truth is None else precision
        blocks, sizes = _blocks(model, tile, only)

        def run(tiled: bool, dropout: bool = False, plainly: bool = False) -> Measured:
            twin = copy.deepcopy(model)
            if tiled:
                apply(twin, tile=tile, only=only)
            wrapped = ENGINE_CLASSES[engine](twin)
            try:
                if not tiled:
                    with non_reentrant(twin):
                        return _measure_rank(wrapped, batch, seed, dropout)
                if not plainly:
                    return _measure_rank(wrapped, batch, seed, dropout)
                with without_recompute(twin):
                    return _measure_rank(wrapped, batch, seed, dropout)
            finally:
                wrapped.close()

        untiled, tiled = run(tiled=False), run(tiled=True)
        dropping = None
        if tiled.dropouts:
            again = run(tiled=True, dropout=True)
            dropping = run(tiled=True, dropout=True, plainly=True), again
    return judged(model, untiled, tiled, dropping, truth, precision, sizes, blocks, notes)


def _measure_rank(engine: Engine, batch: Any, seed: int, dropout: bool) -> Measured:
    measured = Measured(engine.call, batch, None, seed, dropout=dropout, engine=engine)
    measured.gradients["loss"] = _mean(measured.gradients["loss"])
    return measured


def _blocks(model: nn.Module, tile: int | str, only: Only | None) -> tuple[int, BlockSizes]:
    """How many blocks are tiled, and the sizes of their weights while these are whole."""
    twin = copy.deepcopy(model)
    candidates = find_blocks(twin, everything=True)[0]
    apply(twin, tile=tile, only=only)
    blocks = tiled_of(twin, candidates)
    return len(blocks), BlockSizes(twin, blocks, candidates)


def _mean_over_ranks(truth: dict[str, Tensor | None] | None) -> dict[str, Tensor | None] | None:
    """Reduce every rank's gradients as an engine does; a missing one counts as zeros if another rank has it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    shapes = None if truth is None else {n: None if g is None else g.shape for n, g in truth.items()}
    dist.all_gather_object(everyone, shapes)
    if truth is None or None in everyone:
        return None
    result: dict[str, Tensor | None] = {}
    for name, gradient in truth.items():
        shape = next((rank[name] for rank in everyone if rank[name] is not None), None)
        own_gradient = torch.zeros(shape, dtype=torch.float64) if gradient is None and shape is not None else gradient
        result[name] = None if own_gradient is None else _mean(own_gradient)
    return result


def _mean(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
