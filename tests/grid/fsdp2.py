"""``fully_shard``: every weight is a DTensor, gathered when the wrapped module runs."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

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
    named,
)  # fmt: skip
from grid.training import Parallel

LAYER, BLOCK, LINEAR, ROOT = ({"unit": unit} for unit in ("layer", "block", "linear", "root"))
WRAP_THE_BLOCK = r"gate_proj.*fully_shard.*model\.layers\.0"

CASES = [
    Case("layer", "plain", options=LAYER, steps=2),
    Case("layer-generic", "plain", options=LAYER, steps=2, path="generic"),
    Case("layer-checkpoint", "activation checkpointing", options=LAYER, checkpoint="non-reentrant"),
    Case(
        "layer-checkpoint-generic", "activation checkpointing", options=LAYER, checkpoint="non-reentrant",
        path="generic",
    ),
    Case("layer-reentrant", "reentrant checkpointing", options=LAYER, checkpoint="reentrant"),
    Case(
        "layer-reentrant-generic", "reentrant checkpointing", options=LAYER, checkpoint="reentrant",
        path="generic",
    ),
    Case("heads", HEADS, options=LAYER, more={"heads": 1}, steps=2),
    Case("heads-saved", HEADS, options=LAYER, config=SDPA, checkpoint="non-reentrant", more=SAVED),
    Case("heads-block", HEADS, options=BLOCK, more={"heads": 1}, checkpoint="non-reentrant"),
    Case("heads-qwen3-lora", HEADS, "qwen3", options=LAYER, config=SDPA, more={"heads": 1}, adapters=ALL),
    Case("states", STATES, **SHORT_CONVOLUTION, options=LAYER),
    Case("states-checkpoint", STATES, **GATED_DELTANET, options=LAYER, checkpoint="non-reentrant"),
    Case("states-mamba2", STATES, **MAMBA_2, options=LAYER, checkpoint="non-reentrant"),
    Case(
        "heads-mixed", HEADS, options={**LAYER, "mixed": True}, dtype=torch.float32, low_precision=True, config=SDPA,
        checkpoint="non-reentrant", more=SAVED,
    ),
    Case("block", "per block", options=BLOCK, steps=2),
    Case("block-generic", "per block", options=BLOCK, checkpoint="non-reentrant", path="generic"),
    Case("root", "whole model in one unit", options=ROOT),
    Case("linear", "per linear layer", options=LINEAR, refused=WRAP_THE_BLOCK),
    Case("linear-generic", "per linear layer", options=LINEAR, path="generic", refused=WRAP_THE_BLOCK),
    Case("linear-opt", "per linear layer", "opt", options=LINEAR, refused=r"fc1.*fully_shard.*layers\.0"),
    Case("keep-gathered", "weights kept gathered", options={**LAYER, "reshard": False}),
    Case(
        "keep-gathered-generic", "weights kept gathered", options={**LAYER, "reshard": False}, path="generic",
        checkpoint="non-reentrant",
    ),
    Case("reshard-generic", "plain", options={**LAYER, "reshard": True}, path="generic", checkpoint="non-reentrant"),
    Case("mixed", "mixed precision", options={**LAYER, "mixed": True}, dtype=torch.float32, low_precision=True),
    Case(
        "mixed-generic", "mixed precision", options={**LAYER, "mixed": True}, dtype=torch.float32, low_precision=True,
        path="generic", checkpoint="non-reentrant",
    ),
    Case("offload", "offload to the host", options={**LAYER, "offload": True}),
    Case("offload-generic", "offload to the host", options={**LAYER, "offload": True}, path="generic"),
    Case(
        "offload-block-gathered", "offload to the host", options={**BLOCK, "offload": True, "reshard": False},
        micro_steps=2, clip=0.1, path="generic", checkpoint="non-reentrant",
    ),
    Case(
        "mixed-offload-gathered", "mixed precision", dtype=torch.float32, low_precision=True,
        options={**LAYER, "mixed": True, "offload": True, "reshard": False}, checkpoint="non-reentrant",
    ),
    Case("accumulate", "accumulation, clipping", options=LAYER, micro_steps=3, clip=0.1),
    Case(
        "accumulate-generic", "accumulation, clipping", options=LAYER, micro_steps=3, clip=0.1,
        path="generic", checkpoint="non-reentrant",
    ),
    Case("one-token", "one rank with a single token", options=LAYER, lengths=(9, 1), grow=0),
    Case("one-token-generic", "one rank with a single token", options=LAYER, lengths=(1, 9), grow=0, path="generic"),
    Case("no-token", "one rank without data", options=LAYER, lengths=(9, 0), grow=0),
    Case("no-token-generic", "one rank without data", options=LAYER, lengths=(9, 0), grow=0, path="generic"),
    Case("untiled-rank", "one rank untiled", options=LAYER, tiles=("auto", 3)),
    Case("lora", "LoRA", options=LAYER, adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("lora-generic", "LoRA", options=LAYER, adapters=("gate_proj", "up_proj"), path="generic"),
    Case(
        "lora-no-input-gradient", "LoRA", options=LAYER, adapters=("up_proj", "down_proj"), input_gradients=False,
        checkpoint="non-reentrant",
    ),
    Case("gemma2", "norms around the MLP", "gemma2", options=LAYER, checkpoint="non-reentrant"),
    Case("gemma2-block", "norms around the MLP", "gemma2", options=BLOCK),
    Case("rows", "rest of the layer", blocks=REST, options=LAYER, checkpoint="non-reentrant"),
    Case("rows-lora", "rest of the layer", blocks=REST, options=LAYER, adapters=("q_proj", "o_proj")),
    Case("opt", "linear layers in the decoder layer", "opt", options=LAYER),
    Case("mixtral", "experts", "mixtral", options=LAYER),
    Case("apply-late", "apply after wrapping", options={**LAYER, "apply": "wrapped"}),
    Case("apply-late-linear", "apply after wrapping", options={**LINEAR, "apply": "wrapped"}, refused=WRAP_THE_BLOCK),
    Case("tiled-loss", "tiled loss", tiled_loss=True, options=LAYER, steps=2),
    Case("tiled-loss-head", "tiled loss", tiled_loss=True, options={**LAYER, "head": True}),
    Case(
        "tiled-loss-tied", "tiled loss", "qwen3", {"tie_word_embeddings": True}, tiled_loss=True, options=LAYER,
        checkpoint="non-reentrant",
    ),
    Case(
        "tiled-loss-lora", "tiled loss + LoRA", tiled_loss=True, options=LAYER,
        adapters=("lm_head", "q_proj"),
    ),
    Case("scores", "token scores (TRL)", tiled_loss=True, scored=True, options=LAYER, dtype=torch.float32),
    Case(
        "scores-head", "token scores (TRL)", tiled_loss=True, scored=True, options={**LAYER, "head": True},
        dtype=torch.float32, steps=2,
    ),
    Case(
        "scores-head-lora", "token scores (TRL)", tiled_loss=True, scored=True, options={**LAYER, "head": True},
        dtype=torch.float32, adapters=("lm_head", "q_proj"),
    ),
    *hybrids(options=LAYER),
    Case(
        "tiled-loss-idle", "tiled loss", tiled_loss=True, trained=(0.3, 0.0), options={**LAYER, "head": True},
        steps=2,
    ),
    Case(
        "scores-idle", "token scores (TRL)", tiled_loss=True, scored=True, trained=(0.3, 0.0),
        options={**LAYER, "head": True}, dtype=torch.float32, steps=2,
    ),
    Case("deferred", "deferred logits", tiled_loss=True, deferred=True, options=LAYER, steps=2),
    Case("deferred-head", "deferred logits", tiled_loss=True, deferred=True, options={**LAYER, "head": True}, steps=2),
]  # fmt: skip


def start() -> None:
    """Once per process: what FSDP2 says of a head that returns a view fails the case (OPT's own layers return one)."""
    warnings.filterwarnings("error", r"FSDP2-wrapped module \(.*FSDPLinear", UserWarning)


class Fsdp2(Parallel):
    def wrap(self, rank: int) -> None:
        options, mesh = self.case.options, init_device_mesh("cpu", (WORLD,))
        words: dict[str, Any] = {"mesh": mesh}
        if "reshard" in options:
            words["reshard_after_forward"] = options["reshard"]
        if options.get("mixed"):
            words["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if options.get("offload"):
            words["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        numel = {name: p.numel() for name, p in self.model.named_parameters()}
        layers = [m for m in self.model.modules() if type(m).__name__.endswith("DecoderLayer")]
        assert layers
        units = {
            "layer": layers,
            "block": [module for layer in layers for module in (layer.mlp, layer)] if hasattr(layers[0], "mlp") else [],
            "linear": [m for layer in layers for m in layer.modules() if isinstance(m, nn.Linear)],
            "root": [],
        }[options["unit"]]
        if options.get("head"):
            units = [*units, self.model.lm_head]
        for unit in units:
            fully_shard(unit, **words)
        fully_shard(self.model, **words)

        assert sum(isinstance(m, FSDPModule) for m in self.model.modules()) == len(units) + 1
        for name, p in self.model.named_parameters():
            assert isinstance(p, DTensor) and p.placements == (Shard(0),) and p.device_mesh.size() == WORLD, name
            held = torch.tensor([p.to_local().numel()])
            dist.all_reduce(held)
            assert held == numel[name], name

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.full_tensor() for name, p in named(self.model).items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().full_tensor().clone() for name, p in named(self.model).items()}


ENGINE = Fsdp2
