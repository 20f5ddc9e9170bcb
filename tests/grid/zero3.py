"""DeepSpeed ZeRO-3: weights in shards too, gathered when a module runs; fp32, and nothing kept by luck.

``stage3_max_live_parameters``, prefetch and reuse distance are so small that a weight is there only while the module
that DeepSpeed gathered it for runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from grid import zero12
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
from seqtile.engines.zero3 import is_marked, is_registered

STINGY = {
    "stage": 3,
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
_CASES = [
    Case("plain", "plain", steps=3),
    Case("generic", "plain", path="generic", steps=3),
    Case("mlp-only", "plain", blocks="mlp", steps=2),
    Case("mlp-only-generic", "plain", blocks="mlp", path="generic", checkpoint="non-reentrant"),
    Case("checkpoint", "activation checkpointing", checkpoint="non-reentrant", steps=2),
    Case("checkpoint-generic", "activation checkpointing", checkpoint="non-reentrant", path="generic", steps=2),
    Case("reentrant", "reentrant checkpointing", checkpoint="reentrant"),
    Case("reentrant-generic", "reentrant checkpointing", checkpoint="reentrant", path="generic"),
    Case("heads", HEADS, more={"heads": 1}, steps=2),
    Case("heads-saved", HEADS, config=SDPA, checkpoint="non-reentrant", more=SAVED, steps=2),
    Case("heads-lora", HEADS, more={"heads": 1}, checkpoint="non-reentrant", adapters=ALL),
    Case("states", STATES, **SHORT_CONVOLUTION),
    Case("states-checkpoint", STATES, **GATED_DELTANET, checkpoint="non-reentrant"),
    Case("states-mamba2", STATES, **MAMBA_2, checkpoint="non-reentrant"),
    Case("defaults", "DeepSpeed's own settings", options={"stage": 3}, steps=3),
    Case("offload", "offload to the host", options={**STINGY, "offload_optimizer": zero12.OFFLOAD}, steps=2),
    Case("mixed", "mixed precision", options={**STINGY, "bf16": True}, low_precision=True),
    Case(
        "mixed-generic", "mixed precision", options={**STINGY, "bf16": True}, low_precision=True, path="generic",
        checkpoint="non-reentrant",
    ),
    Case("accumulate", "accumulation, clipping", micro_steps=3, clip=0.1, steps=2),
    Case("accumulate-generic", "accumulation, clipping", micro_steps=3, clip=0.1, path="generic"),
    Case("one-token", "one rank with a single token", lengths=(9, 1), grow=0),
    Case("no-token", "one rank without data", lengths=(9, 0), grow=0),
    Case("no-token-generic", "one rank without data", lengths=(9, 0), grow=0, path="generic"),
    Case("one-token-generic", "one rank with a single token", lengths=(1, 9), grow=0, path="generic"),
    Case("untiled-rank", "one rank untiled", tiles=("auto", 3)),
    Case("lora", "LoRA", adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("lora-generic", "LoRA", adapters=("gate_proj", "up_proj"), path="generic", checkpoint="non-reentrant"),
    Case("lora-no-input-gradient", "LoRA", adapters=("up_proj", "down_proj"), input_gradients=False, steps=2),
    Case("gemma2", "norms around the MLP", "gemma2", checkpoint="non-reentrant"),
    Case("rows", "rest of the layer", blocks=REST, checkpoint="non-reentrant", steps=2),
    Case("rows-lora", "rest of the layer", blocks=REST, adapters=("q_proj", "o_proj"), input_gradients=False),
    Case("opt", "linear layers in the decoder layer", "opt"),
    Case("mixtral", "experts", "mixtral", steps=2),
    Case("sharded-before", "weights sharded before apply (zero.Init)", path="fused", options={**STINGY, "init": True}),
    Case(
        "sharded-before-mixtral", "weights sharded before apply (zero.Init)", "mixtral",
        options={**STINGY, "init": True},
    ),
    Case(
        "apply-late", "apply after wrapping", options={**STINGY, "apply": "wrapped"},
        refused=r"ZeRO-3 gathers gate_proj on its own.*before deepspeed\.initialize",
    ),
    Case("tiled-loss", "tiled loss", tiled_loss=True, steps=2),
    Case("tiled-loss-checkpoint", "tiled loss", tiled_loss=True, checkpoint="non-reentrant", micro_steps=2),
    Case("tiled-loss-lora", "tiled loss + LoRA", tiled_loss=True, adapters=("lm_head", "q_proj")),
    Case("tiled-loss-sharded-before", "tiled loss", tiled_loss=True, options={**STINGY, "init": True}),
    Case("scores", "token scores (TRL)", tiled_loss=True, scored=True, steps=2),
    Case("scores-checkpoint", "token scores (TRL)", tiled_loss=True, scored=True, checkpoint="non-reentrant"),
    Case("scores-lora", "token scores (TRL)", tiled_loss=True, scored=True, adapters=("lm_head", "q_proj")),
    *hybrids(),
    Case("tiled-loss-idle", "tiled loss", tiled_loss=True, trained=(0.3, 0.0), steps=2),
    Case(
        "tiled-loss-idle-lora", "tiled loss + LoRA", tiled_loss=True, trained=(0.3, 0.0),
        adapters=("lm_head", "q_proj"),
    ),
    Case("scores-idle", "token scores (TRL)", tiled_loss=True, scored=True, trained=(0.3, 0.0), steps=2),
    Case(
        "scores-idle-lora", "token scores (TRL)", tiled_loss=True, scored=True, trained=(0.3, 0.0),
        adapters=("lm_head", "q_proj"),
    ),
    Case("deferred", "deferred logits", tiled_loss=True, deferred=True, steps=2),
    Case("deferred-lora", "deferred logits", tiled_loss=True, deferred=True, adapters=("lm_head", "q_proj")),
]  # fmt: skip
CASES = [replace(case, dtype=torch.float32, options=case.options or STINGY) for case in _CASES]


class Zero3(zero12.Zero):
    @classmethod
    def before(cls, case: Case, model: nn.Module) -> None:
        if case.options.get("init"):
            import deepspeed

            deepspeed.zero.Init(module=model, config_dict_or_path={"train_micro_batch_size_per_gpu": 2})
            assert all(p.numel() == 0 for p in model.parameters())

    def check_placement(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.utils import z3_leaf_module

        leaves = [module for module in self.model.modules() if z3_leaf_module(module)]  # DeepSpeed marks MoE blocks
        inside = {part for leaf in leaves for part in leaf.modules() if part is not leaf}
        for module in self.model.modules():
            assert is_registered(module) != (module in inside)
            assert module in leaves or not is_marked(module)
        for name, p in self.model.named_parameters():
            held = torch.tensor([p.ds_tensor.numel()])
            dist.all_reduce(held)
            assert p.ds_numel <= held < p.ds_numel + WORLD, name
            if self.case.options.get("stage3_param_persistence_threshold") == 0:
                assert p.ds_status is ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0, name


start = zero12.start
ENGINE = Zero3
