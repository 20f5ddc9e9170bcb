"""DistributedDataParallel: every weight whole on every rank, gradients averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from grid.cases import (
    ALL,
    GATED_DELTANET,
    HEADS,
    MAMBA_2,
    REST,
    SAVED,
    SDPA,
    SHORT_CONVOLUTION,
    STATES,
    WORLD,
    Case,
    hybrids,
)  # fmt: skip
from grid.training import Parallel

CASES = [
    Case("plain", "plain"),
    Case("generic", "plain", path="generic"),
    Case("checkpoint", "activation checkpointing", checkpoint="non-reentrant"),
    Case("checkpoint-generic", "activation checkpointing", checkpoint="non-reentrant", path="generic"),
    Case("reentrant", "reentrant checkpointing", checkpoint="reentrant"),
    Case("reentrant-generic", "reentrant checkpointing", checkpoint="reentrant", path="generic"),
    Case("static-graph", "static_graph=True", steps=3, options={"static_graph": True}),
    Case(
        "static-graph-generic", "static_graph=True", steps=3, path="generic",
        checkpoint="non-reentrant", options={"static_graph": True},
    ),
    Case(
        "static-graph-reentrant", "static_graph=True", steps=3, checkpoint="reentrant", options={"static_graph": True}
    ),
    Case("find-unused", "find_unused_parameters=True", steps=2, options={"find_unused_parameters": True}),
    Case(
        "find-unused-generic", "find_unused_parameters=True", steps=2, path="generic", checkpoint="non-reentrant",
        options={"find_unused_parameters": True},
    ),
    Case(
        "bf16-hook", "bf16 compression hook", dtype=torch.float32, low_precision=True, options={"bf16_hook": True}
    ),
    Case(
        "bf16-hook-generic", "bf16 compression hook", dtype=torch.float32, low_precision=True, path="generic",
        checkpoint="non-reentrant", options={"bf16_hook": True},
    ),
    Case("accumulate", "accumulation, clipping", micro_steps=3, clip=0.1, steps=2),
    Case(
        "accumulate-generic", "accumulation, clipping", micro_steps=3, clip=0.1, steps=2, path="generic",
        checkpoint="non-reentrant",
    ),
    Case("heads", HEADS, more={"heads": 1}, micro_steps=2, clip=0.1, steps=2),
    Case("heads-saved", HEADS, config=SDPA, checkpoint="non-reentrant", more=SAVED),
    Case("heads-lora", HEADS, config=SDPA, checkpoint="non-reentrant", more=SAVED, adapters=ALL),
    Case("states", STATES, **SHORT_CONVOLUTION, micro_steps=2, clip=0.1),
    Case("states-checkpoint", STATES, **GATED_DELTANET, checkpoint="non-reentrant"),
    Case("states-mamba2", STATES, **MAMBA_2, checkpoint="non-reentrant"),
    Case("states-reentrant", STATES, **SHORT_CONVOLUTION, checkpoint="reentrant"),
    Case("states-lora", STATES, **SHORT_CONVOLUTION, checkpoint="non-reentrant", adapters=("in_proj", "w1")),
    Case("one-token", "one rank with a single token", lengths=(9, 1), grow=0),
    Case("no-token", "one rank without data", lengths=(9, 0), grow=0),
    Case("no-token-generic", "one rank without data", lengths=(9, 0), grow=0, path="generic"),
    Case("one-token-generic", "one rank with a single token", lengths=(1, 9), grow=0, path="generic"),
    Case("untiled-rank", "one rank untiled", tiles=(3, "auto")),
    Case("untiled-rank-generic", "one rank untiled", tiles=("auto", 3), path="generic", checkpoint="non-reentrant"),
    Case("lora", "LoRA", adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("lora-checkpoint", "LoRA", adapters=("gate_proj", "up_proj"), checkpoint="non-reentrant", path="generic"),
    Case("lora-no-input-gradient", "LoRA", adapters=("up_proj", "down_proj"), input_gradients=False),
    Case("gemma2", "norms around the MLP", "gemma2", checkpoint="non-reentrant"),
    Case("rows", "rest of the layer", blocks=REST, checkpoint="non-reentrant", steps=2),
    Case("rows-lora", "rest of the layer", blocks=REST, adapters=("q_proj", "o_proj"), input_gradients=False),
    Case("opt", "linear layers in the decoder layer", "opt"),
    Case("mixtral", "experts", "mixtral", steps=2, options={"find_unused_parameters": True}),
    Case("apply-late", "apply after wrapping", options={"apply": "wrapped"}),
    Case("tiled-loss", "tiled loss", tiled_loss=True, steps=2),
    Case("tiled-loss-tied", "tiled loss", "qwen3", {"tie_word_embeddings": True}, tiled_loss=True, micro_steps=2),
    *hybrids(),
    Case("tiled-loss-idle", "tiled loss", tiled_loss=True, trained=(0.3, 0.0), steps=2),
    Case("deferred", "deferred logits", tiled_loss=True, deferred=True, steps=2),
]  # fmt: skip


class Ddp(Parallel):
    def wrap(self, rank: int) -> None:
        words = {k: v for k, v in self.case.options.items() if k in ("static_graph", "find_unused_parameters")}
        self.call = DistributedDataParallel(self.model, **words)
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
