"""A head whose vocabulary is shared out beside a body in DeepSpeed's hands, in fp32: DeepSpeed takes no float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grid import zero12
from grid.cases import WORLD
from grid.vocabulary import ENGINE, VOCABULARY, Backward, Beside, Gradient, Model, gathered
from grid.zero3 import STINGY


def zero3(model: Model) -> tuple[Backward, Gradient]:
    """The body in DeepSpeed's hands, each rank's rows of the head in nobody's."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    for name in ("weight", "bias"):
        rows = getattr(model.head, name).detach().chunk(WORLD)[dist.get_rank()].clone()
        setattr(model.head, name, nn.Parameter(rows))
    model.head.group = dist.group.WORLD
    config = {
        "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": False}, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**STINGY}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    weights = dict(model.body.named_parameters())
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model.body, optimizer=optimizer, config=config)
    model.body = engine

    def gradient(name: str, rows: Any) -> Tensor:
        if name.startswith("body."):
            return safe_get_full_grad(weights[name.removeprefix("body.")])  # type: ignore[no-any-return, no-untyped-call]
        return gathered(rows, VOCABULARY)

    return engine.backward, gradient


CASES = [Beside("zero3", zero3, dtype=torch.float32)]
start = zero12.start
__all__ = ["CASES", "ENGINE", "start"]
