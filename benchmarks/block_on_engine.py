"""One block under FSDP2 or ZeRO-3, measured on every rank of a group on this machine; rank 0's numbers count."""

from __future__ import annotations

import os
import socket
import statistics
import time
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqtile.bench.block import Upstream, Workload
from seqtile.bench.cell import Cell, Child
from seqtile.bench.measure_block import measure_error, start
from seqtile.counting import count_live_bytes
from seqtile.devices import empty_cache, is_accelerator, peak_bytes, peak_reserved_bytes, reset_peak, synchronize

ENGINES = ("fsdp2", "zero3")
WARM_UP = 2
JOB = f"{__file__}:measure_under"


class Sharded:
    """A workload whose block an engine has taken over."""

    def __init__(self, engine: str, workload: Workload) -> None:
        self.workload = workload
        self._zero: Any = None
        if engine == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(workload.mlp, mesh=init_device_mesh(workload.device.type, (dist.get_world_size(),)))
        else:
            self._zero = _zero3(workload)

    def step(self) -> Tensor | None:
        """Forward and backward; returns the output where the cell's caller holds it."""
        output = (self._zero or self.workload.mlp)(self.workload.x)
        loss = Upstream.apply(output, self.workload.pattern)  # type: ignore[no-untyped-call]
        held = output if self.workload.cell.hold_output else None
        del output
        if self._zero is None:
            loss.backward()
        else:
            self._zero.backward(loss)
        return held

    def clear(self) -> None:
        """Forget gradients; ZeRO-3 wants its optimiser step (at a learning rate of 0) first."""
        if self._zero is not None and self.workload.x.grad is not None:
            self._zero.step()
        self.workload.clear()

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the weights, on every rank; a collective."""
        if self._zero is not None:
            whole = import_module("deepspeed.utils").safe_get_full_grad
            return {name: whole(weight) for name, weight in self.workload.mlp.named_parameters()}
        found: dict[str, Any] = {name: weight.grad for name, weight in self.workload.mlp.named_parameters()}
        return {name: grad.full_tensor() for name, grad in found.items()}


def run_ranks(arguments: dict[str, Any], ranks: int, *, timeout_s: float = 1800.0) -> dict[str, Any]:
    """Run :func:`measure_under` in ``ranks`` processes that form a group; rank 0's result, or the first error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as running:
        children = [
            running.enter_context(Child(JOB, arguments, {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(ranks)
        ]
        # Whoever fails first leaves the others waiting for it: report the one that failed, and end them all.
        until = time.monotonic() + timeout_s
        while any(child.process.poll() is None for child in children) and time.monotonic() < until:
            if any(child.process.poll() for child in children):
                break
            time.sleep(0.1)
        first = next((child for child in children if child.process.poll()), children[0])
        return first.result(max(0.1, until - time.monotonic()))


def measure_under(arguments: dict[str, Any]) -> dict[str, Any]:
    """Median time, peak bytes with input and weights, and gradient error of one block under an engine.

    Args:
        arguments: ``engine``, one of :data:`ENGINES`, and ``cell``, a row of :class:`seqtile.bench.cell.Cell`.

    Every rank holds the same input, so the gradient averaged over ranks is that of one process.
    """
    engine, cell = arguments["engine"], Cell.of(arguments["cell"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(cell.device)
    if is_accelerator(device):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device.type), rank=rank, world_size=world)
    try:
        workload = Workload(cell)
        found = start(workload)
        sharded = Sharded(engine, workload)
        found.update(_peak(sharded))
        times = []
        for number in range(WARM_UP + cell.repeats):
            sharded.clear()
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            sharded.step()
            synchronize(device)
            if number >= WARM_UP:
                times.append(1e3 * (time.perf_counter() - begin))
        found.update(step_ms=statistics.median(times), step_ms_all=times)
        found.update(_error(sharded))
        found.update(engine=engine, ranks=world)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def _peak(sharded: Sharded) -> dict[str, Any]:
    """Peak with everything that was there before: input, weights, what the engine holds."""
    device = sharded.workload.device
    sharded.clear()
    if not is_accelerator(device):
        before = _own_bytes(sharded.workload)
        with count_live_bytes("cpu") as live:
            sharded.step()
        return {"peak_total_bytes": before + live.peak, "peak_reserved_bytes": None, "peak_from": "counted live bytes"}
    sharded.step()
    sharded.clear()
    empty_cache()
    reset_peak()
    sharded.step()
    return {
        "peak_total_bytes": peak_bytes(),
        "peak_reserved_bytes": peak_reserved_bytes(),
        "peak_from": "allocator",
    }


def _own_bytes(workload: Workload) -> int:
    weights: list[Any] = list(workload.mlp.parameters())
    local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    shards = [getattr(weight, "ds_tensor", weight) for weight in local]
    return sum(tensor.numel() * tensor.element_size() for tensor in (workload.x, workload.pattern, *shards))


def _error(sharded: Sharded) -> dict[str, Any]:
    gradients = sharded.gradients()
    whole = Workload(sharded.workload.cell)  # the same seed: the same weights and input, unsharded
    whole.x.grad = sharded.workload.x.grad
    for name, weight in whole.mlp.named_parameters():
        weight.grad = gradients[name].to(weight.dtype)
    return measure_error(whole)


def _zero3(workload: Workload) -> Any:
    deepspeed = import_module("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": workload.dtype == torch.bfloat16},
    }
    optimizer = torch.optim.SGD(workload.mlp.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=workload.mlp, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
