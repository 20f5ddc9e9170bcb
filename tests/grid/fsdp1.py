"""``FullyShardedDataParallel``: weights flattened per unit, whole only while the unit runs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from grid.cases import LOW_PRECISION, WORLD, Case, named, usual_cases
from grid.training import Parallel

ORIGINAL, FLAT = {"use_orig_params": True}, {"use_orig_params": False}
FLATTENED = {"technique": "use_orig_params=False"}
FP32: dict[str, Any] = {"dtype": torch.float32}
MIXED: dict[str, Any] = {**FP32, "low_precision": True}
WRAP_THE_BLOCK = ("engine.fsdp-wraps-inside-block", "gate_proj", "model.layers.0")

CASES = [
    # clip_grad_norm_ takes no float64. Deferred logits read the head outside of forward, where its weight is empty.
    *usual_cases(ORIGINAL, accumulate=FP32, accumulate_generic=FP32, deferred=None),
    # A flat parameter is trained as a whole or not at all, so there is no LoRA.
    *usual_cases(
        FLAT, "flat-", plain=FLATTENED, generic=FLATTENED, accumulate=FP32, accumulate_generic=FP32, lora=None,
        lora_generic=None, lora_no_input_gradient=None, rows_lora=None, heads_lora=None, tiled_loss_lora=None,
        deferred=None, **{"qwen3.5_lora": None},
    ),
    Case("block", "per block", options={"unit": "block", **ORIGINAL}),
    Case("block-flat-generic", "per block", options={"unit": "block", **FLAT}, path="generic", checkpoint="reentrant"),
    Case("linear", "per linear layer", options={"unit": "linear", **ORIGINAL}, refused=WRAP_THE_BLOCK),
    Case("keep-gathered", "weights kept gathered", options={"strategy": "SHARD_GRAD_OP", **ORIGINAL}),
    Case("mixed", LOW_PRECISION, options={"mixed": True, **ORIGINAL}, **MIXED),
    Case(
        "mixed-flat-generic", LOW_PRECISION, options={"mixed": True, **FLAT}, **MIXED, path="generic",
        checkpoint="non-reentrant",
    ),
    Case(
        "apply-late", "apply after wrapping", options={"apply": "wrapped", **ORIGINAL},
        refused=("engine.wrapped-before-apply",),
    ),
]  # fmt: skip


class Fsdp1(Parallel):
    def wrap(self, rank: int) -> None:
        options = self.case.options
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.trained = list(named(self.model))
        layers = {m for m in self.model.modules() if type(m).__name__.endswith("DecoderLayer")}
        blocks = {layer.mlp for layer in layers if hasattr(layer, "mlp")}
        linear = {m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)}
        units = {"layer": layers, "block": layers | blocks, "linear": linear}[options.get("unit", "layer")]
        settings: dict[str, Any] = {}
        if options.get("mixed"):
            settings["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        strategy = ShardingStrategy[options.get("strategy", "FULL_SHARD")]
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units)
        self.call = FullyShardedDataParallel(
            self.model, auto_wrap_policy=policy, use_orig_params=options["use_orig_params"],
            device_id=torch.device("cpu"), sharding_strategy=strategy, **settings,
        )  # fmt: skip
        wrapped = FullyShardedDataParallel.fsdp_modules(self.call)
        assert len(wrapped) == len(units) + 1
        assert all(unit.sharding_strategy is strategy and unit.world_size == WORLD for unit in wrapped)
        numel = torch.tensor([sum(p.numel() for p in self.call.parameters())])
        dist.all_reduce(numel)
        whole = sum(shape.numel() for shape in self.shapes.values())
        assert whole <= numel < whole + 64 * len(wrapped)  # padded to equal shards

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.call.no_sync()

    def clip(self, bound: float) -> None:
        self.call.clip_grad_norm_(bound)

    def gradients(self) -> dict[str, Tensor | None]:
        """FSDP1 puts together whole weights only, so the gradients take the weights' place for that long."""
        kept = [(p, p.detach().clone()) for p in self.call.parameters()]
        with torch.no_grad():
            for p, _ in kept:
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
            gradients: dict[str, Tensor | None] = {**self.weights()}
            for p, value in kept:
                p.copy_(value)
        return gradients

    def weights(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.state_dict_type(self.call, StateDictType.FULL_STATE_DICT):
            state = self.call.state_dict()
        return {name: state[name].detach().clone().view(self.shapes[name]) for name in self.trained}


ENGINE = Fsdp1
