"""The worker of ``seqtile train --cp-size`` on the CPU, whose attention PyTorch's ring does not take by itself.

Beside the result it writes what the collectives of the last step's forward and backward carried on this rank, in bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grid.context import open_ring_to_the_cpu
from seqtile._compat import end_process
from seqtile.cli import worker
from seqtile.train import trainer

seen: dict[str, Any] = {}
of_the_ring = Counter[str]()


class Carried(TorchDispatchMode):
    """Bytes of every collective, by its name: of what is gathered, reduced or sent, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, space = operator._opname, operator.namespace
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            sizes = [one.numel() * one.element_size() for one in args if isinstance(one, torch.Tensor)]
            self.bytes[name] += max(sizes, default=0)
        return operator(*args, **(kwargs or {}))


def count_the_ring(carried: Counter[str]) -> None:
    """DTensor runs the ring where no mode sees it."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    send = ring._AllToAllRotater.exchange_buffers

    def exchange_buffers(self: Any, curr_buffer: torch.Tensor) -> None:
        carried[f"ring {curr_buffer.dtype}"] += curr_buffer.numel() * curr_buffer.element_size()
        send(self, curr_buffer)

    ring._AllToAllRotater.exchange_buffers = exchange_buffers


class Counting(trainer.Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = inputs["input_ids"].shape[1]
        of_the_ring.clear()
        with Carried() as carried:
            loss = super().training_step(model, inputs, *args, **kwargs)
        seen.update(tokens=tokens, bytes=dict(carried.bytes + of_the_ring))
        return loss


if __name__ == "__main__":
    open_ring_to_the_cpu()
    count_the_ring(of_the_ring)
    trainer.Trainer = Counting  # type: ignore[misc]
    folder = Path(sys.argv[1])
    code = worker.main(folder)
    from seqtile.train.recipe import RECIPE_FILE, read_recipe

    Path(read_recipe(folder / RECIPE_FILE)["output"], f"carried-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    end_process(code)
