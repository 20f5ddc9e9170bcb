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

from grid.cases import GATED_DELTANET, HEADS, REST, SAVED, SDPA, SHORT_CONVOLUTION, STATES, WORLD, Case, named
from grid.training import Parallel

ORIGINAL, FLAT = {"use_orig_params": True}, {"use_orig_params": False}
LINEAR = {"unit": "linear", "use_orig_params": True}
WRAP_THE_BLOCK = r"gate_proj.*auto_wrap_policy.*model\.layers\.0"

CASES = [
    Case("original", "plain", options=ORIGINAL, steps=2),
    Case("original-generic", "plain", options=ORIGINAL, steps=2, path="generic"),
    Case("flat", "use_orig_params=False", options=FLAT, steps=2),
    Case("flat-generic", "use_orig_params=False", options=FLAT, steps=2, path="generic"),
    Case("heads", HEADS, options=ORIGINAL, more={"heads": 1}, steps=2),
    Case("heads-flat", HEADS, options=FLAT, config=SDPA, checkpoint="non-reentrant", more=SAVED),
    Case("states", STATES, **SHORT_CONVOLUTION, options=ORIGINAL),
    Case("states-flat", STATES, **GATED_DELTANET, options=FLAT, checkpoint="non-reentrant"),
    Case("original-checkpoint", "activation checkpointing", options=ORIGINAL, checkpoint="non-reentrant"),
    Case(
        "original-checkpoint-generic", "activation checkpointing", options=ORIGINAL, checkpoint="non-reentrant",
        path="generic",
    ),
    Case("flat-checkpoint", "activation checkpointing", options=FLAT, checkpoint="non-reentrant"),
    Case(
        "flat-checkpoint-generic", "activation checkpointing", options=FLAT, checkpoint="non-reentrant",
        path="generic",
    ),
    Case("original-reentrant", "reentrant checkpointing", options=ORIGINAL, checkpoint="reentrant"),
    Case("flat-reentrant-generic", "reentrant checkpointing", options=FLAT, checkpoint="reentrant", path="generic"),
    Case("block", "per block", options={"unit": "block", **ORIGINAL}),
    Case("block-flat-generic", "per block", options={"unit": "block", **FLAT}, path="generic", checkpoint="reentrant"),
    Case("linear", "per linear layer", options=LINEAR, refused=WRAP_THE_BLOCK),
    Case("keep-gathered", "weights kept gathered", options={"strategy": "SHARD_GRAD_OP", **ORIGINAL}),
    Case(
        "mixed", "mixed precision", options={"mixed": True, **ORIGINAL}, dtype=torch.float32, low_precision=True
    ),
    Case(
        "mixed-flat-generic", "mixed precision", options={"mixed": True, **FLAT}, dtype=torch.float32,
        low_precision=True, path="generic", checkpoint="non-reentrant",
    ),
    Case(  # its clip_grad_norm_ takes no float64
        "accumulate", "accumulation, clipping", options=ORIGINAL, micro_steps=3, clip=0.1,
        dtype=torch.float32,
    ),
    Case(
        "accumulate-flat-generic", "accumulation, clipping", options=FLAT, micro_steps=3, clip=0.1,
        dtype=torch.float32, path="generic", checkpoint="non-reentrant",
    ),
    Case("one-token", "one rank with a single token", options=ORIGINAL, lengths=(9, 1), grow=0),
    Case(
        "one-token-flat-generic", "one rank with a single token", options=FLAT, lengths=(1, 9), grow=0, path="generic"
    ),
    Case("no-token", "one rank without data", options=ORIGINAL, lengths=(9, 0), grow=0),
    Case("no-token-generic", "one rank without data", options=ORIGINAL, lengths=(9, 0), grow=0, path="generic"),
    Case("untiled-rank", "one rank untiled", options=ORIGINAL, tiles=("auto", 3)),
    Case("untiled-rank-flat", "one rank untiled", options=FLAT, tiles=(3, "auto"), checkpoint="non-reentrant"),
    Case("lora", "LoRA", options=ORIGINAL, adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("lora-generic", "LoRA", options=ORIGINAL, adapters=("gate_proj", "up_proj"), path="generic"),
    Case("gemma2", "norms around the MLP", "gemma2", options=ORIGINAL, checkpoint="non-reentrant"),
    Case("rows", "rest of the layer", blocks=REST, options=ORIGINAL, checkpoint="non-reentrant"),
    Case("rows-flat", "rest of the layer", blocks=REST, options=FLAT),
    Case("opt", "linear layers in the decoder layer", "opt", options=ORIGINAL),
    Case("mixtral", "experts", "mixtral", options=ORIGINAL),
    Case(
        "apply-late", "apply after wrapping", options={"apply": "wrapped", **ORIGINAL},
        refused=r"FullyShardedDataParallel already.*before FSDP wraps",
    ),
    Case("tiled-loss", "tiled loss", tiled_loss=True, steps=2, options=ORIGINAL),
    Case("tiled-loss-flat", "tiled loss", tiled_loss=True, options=FLAT, checkpoint="non-reentrant"),
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
        words: dict[str, Any] = {}
        if options.get("mixed"):
            words["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        strategy = ShardingStrategy[options.get("strategy", "FULL_SHARD")]
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units)
        self.call = FullyShardedDataParallel(
            self.model, auto_wrap_policy=policy, use_orig_params=options["use_orig_params"],
            device_id=torch.device("cpu"), sharding_strategy=strategy, **words,
        )  # fmt: skip
        wrapped = FullyShardedDataParallel.fsdp_modules(self.call)
        assert len(wrapped) == len(units) + 1
        assert all(unit.sharding_strategy is strategy and unit.world_size == WORLD for unit in wrapped)
        held = torch.tensor([sum(p.numel() for p in self.call.parameters())])
        dist.all_reduce(held)
        whole = sum(shape.numel() for shape in self.shapes.values())
        assert whole <= held < whole + 64 * len(wrapped)  # padded to equal shards

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
            found: dict[str, Tensor | None] = {**self.weights()}
            for p, value in kept:
                p.copy_(value)
        return found

    def weights(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.state_dict_type(self.call, StateDictType.FULL_STATE_DICT):
            state = self.call.state_dict()
        return {name: state[name].detach().clone().view(self.shapes[name]) for name in self.trained}


ENGINE = Fsdp1
