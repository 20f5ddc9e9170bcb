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
    DEFERRED,
    HEAD_AND_QUERY,
    LOSS,
    LOW_PRECISION,
    RECOMPUTED,
    SCORES,
    WORLD,
    Case,
    usual_cases,
)  # fmt: skip
from seqtile.engines.zero3 import is_marked, is_registered

STINGY = {
    "stage": 3,
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
BF16, SHARDED_BEFORE = {**STINGY, "bf16": True}, {**STINGY, "init": True}
ZERO_INIT = "weights sharded before apply (zero.Init)"
_CASES = [
    *usual_cases(STINGY),
    Case("mlp-only", "plain", blocks="mlp", steps=2),
    Case("mlp-only-generic", "plain", blocks="mlp", path="generic", **RECOMPUTED),
    Case("defaults", "DeepSpeed's own settings", options={"stage": 3}, steps=3),
    Case("offload", "offload to the host", options={**STINGY, "offload_optimizer": zero12.OFFLOAD}, steps=2),
    Case("mixed", LOW_PRECISION, options=BF16, low_precision=True),
    Case("mixed-generic", LOW_PRECISION, options=BF16, low_precision=True, path="generic", **RECOMPUTED),
    Case("sharded-before", ZERO_INIT, path="fused", options=SHARDED_BEFORE),
    Case("sharded-before-mixtral", ZERO_INIT, "mixtral", options=SHARDED_BEFORE),
    Case(
        "apply-late", "apply after wrapping", options={**STINGY, "apply": "wrapped"},
        refused=("engine.zero3-gathers-inside-block", "gate_proj"),
    ),
    Case("tiled-loss-sharded-before", LOSS, tiled_loss=True, options=SHARDED_BEFORE),
    Case(
        "tiled-loss-idle-lora", "tiled loss + LoRA", tiled_loss=True, trained=(0.3, 0.0), adapters=HEAD_AND_QUERY
    ),
    Case("scores", SCORES, tiled_loss=True, scored=True, steps=2),
    Case("scores-checkpoint", SCORES, tiled_loss=True, scored=True, **RECOMPUTED),
    Case("scores-lora", SCORES, tiled_loss=True, scored=True, adapters=HEAD_AND_QUERY),
    Case("scores-idle", SCORES, tiled_loss=True, scored=True, trained=(0.3, 0.0), steps=2),
    Case("scores-idle-lora", SCORES, tiled_loss=True, scored=True, trained=(0.3, 0.0), adapters=HEAD_AND_QUERY),
    Case("deferred-lora", DEFERRED, tiled_loss=True, deferred=True, adapters=HEAD_AND_QUERY),
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
        inside = {child for leaf in leaves for child in leaf.modules() if child is not leaf}
        for module in self.model.modules():
            assert is_registered(module) != (module in inside)
            assert module in leaves or not is_marked(module)
        for name, p in self.model.named_parameters():
            numel = torch.tensor([p.ds_tensor.numel()])
            dist.all_reduce(numel)
            assert p.ds_numel <= numel < p.ds_numel + WORLD, name
            if self.case.options.get("stage3_param_persistence_threshold") == 0:
                assert p.ds_status is ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0, name


start = zero12.start
ENGINE = Zero3
