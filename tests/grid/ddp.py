"""DistributedDataParallel: every weight whole on every rank, gradients averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from grid.cases import LOSS, RECOMPUTED, SHORT_CONVOLUTION, STATES, WORLD, Case, usual_cases
from grid.training import Parallel

STATIC, UNUSED, BF16 = {"static_graph": True}, {"find_unused_parameters": True}, "bf16 compression hook"
CASES = [
    *usual_cases({}, mixtral={"options": UNUSED}),
    Case("static-graph", "static_graph=True", steps=3, options=STATIC),
    Case("static-graph-generic", "static_graph=True", steps=3, path="generic", **RECOMPUTED, options=STATIC),
    Case("static-graph-reentrant", "static_graph=True", steps=3, checkpoint="reentrant", options=STATIC),
    Case("find-unused", "find_unused_parameters=True", steps=2, options=UNUSED),
    Case("find-unused-generic", "find_unused_parameters=True", steps=2, path="generic", **RECOMPUTED, options=UNUSED),
    Case("bf16-hook", BF16, dtype=torch.float32, low_precision=True, options={"bf16_hook": True}),
    Case(
        "bf16-hook-generic", BF16, dtype=torch.float32, low_precision=True, path="generic", **RECOMPUTED,
        options={"bf16_hook": True},
    ),
    Case("states-reentrant", STATES, **SHORT_CONVOLUTION, checkpoint="reentrant"),
    Case("states-lora", STATES, **SHORT_CONVOLUTION, **RECOMPUTED, adapters=("in_proj", "w1")),
    Case("apply-late", "apply after wrapping", options={"apply": "wrapped"}),
    Case("tiled-loss-tied", LOSS, "qwen3", {"tie_word_embeddings": True}, tiled_loss=True, micro_steps=2),
]  # fmt: skip


class Ddp(Parallel):
    def wrap(self, rank: int) -> None:
        settings = {k: v for k, v in self.case.options.items() if k in ("static_graph", "find_unused_parameters")}
        self.call = DistributedDataParallel(self.model, **settings)
        if self.case.options.get("bf16_hook"):
            self.call.register_comm_hook(None, _bf16_compress)
        assert dist.get_world_size(self.call.process_group) == WORLD
        numel = torch.tensor([sum(p.numel() for p in self.call.parameters())])
        both = [torch.empty_like(numel) for _ in range(WORLD)]
        dist.all_gather(both, numel)
        assert both[0] == both[1] == sum(p.numel() for p in self.case.model().parameters())

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.call.no_sync()


def _bf16_compress(state, bucket):  # DDP wants no annotations that are strings
    """PyTorch's own hook under another name: DDP refuses that name without NCCL, although gloo reduces bf16."""
    return bf16_compress_hook(state, bucket)


ENGINE = Ddp
