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
    ATTENTION,
    DEFERRED,
    GENERIC,
    HEAD_AND_QUERY,
    HEADS,
    LOSS,
    LOW_PRECISION,
    RECOMPUTED,
    SAVED,
    SCORES,
    SDPA,
    WORLD,
    Case,
    named,
    usual_cases,
)  # fmt: skip
from grid.training import Parallel

LAYER, BLOCK, LINEAR, ROOT = ({"unit": unit} for unit in ("layer", "block", "linear", "root"))
HEAD, GATHERED = {**LAYER, "head": True}, {**LAYER, "reshard": False}
LATE = "apply after wrapping"
WRAP_THE_BLOCK = ("engine.fsdp2-shards-inside-block", "gate_proj", "model.layers.0")
MIXED: dict[str, Any] = {"technique": LOW_PRECISION, "dtype": torch.float32, "low_precision": True}
SCORED: dict[str, Any] = {"technique": SCORES, "tiled_loss": True, "scored": True, "dtype": torch.float32}

CASES = [
    *usual_cases(LAYER, lora_no_input_gradient=RECOMPUTED),
    Case("heads-block", HEADS, options=BLOCK, more={"heads": 1}, **RECOMPUTED),
    Case("heads-qwen3-lora", HEADS, "qwen3", options=LAYER, config=SDPA, more={"heads": 1}, adapters=ATTENTION),
    Case(
        "heads-mixed", options={**LAYER, "mixed": True}, config=SDPA, **RECOMPUTED, more=SAVED,
        **{**MIXED, "technique": HEADS},
    ),
    Case("block", "per block", options=BLOCK, steps=2),
    Case("block-generic", "per block", options=BLOCK, **RECOMPUTED, **GENERIC),
    Case("root", "whole model in one unit", options=ROOT),
    Case("linear", "per linear layer", options=LINEAR, refused=WRAP_THE_BLOCK),
    Case("linear-generic", "per linear layer", options=LINEAR, **GENERIC, refused=WRAP_THE_BLOCK),
    Case(
        "linear-opt", "per linear layer", "opt", options=LINEAR,
        refused=("engine.fsdp2-shards-inside-block", "fc1", "layers.0"),
    ),
    Case("keep-gathered", "weights kept gathered", options=GATHERED),
    Case("keep-gathered-generic", "weights kept gathered", options=GATHERED, **RECOMPUTED, **GENERIC),
    Case("reshard-generic", "plain", options={**LAYER, "reshard": True}, **RECOMPUTED, **GENERIC),
    Case("mixed", options={**LAYER, "mixed": True}, **MIXED),
    Case("mixed-generic", options={**LAYER, "mixed": True}, **MIXED, **RECOMPUTED, **GENERIC),
    Case("mixed-offload-gathered", options={**GATHERED, "mixed": True, "offload": True}, **MIXED, **RECOMPUTED),
    Case("offload", "offload to the host", options={**LAYER, "offload": True}),
    Case("offload-generic", "offload to the host", options={**LAYER, "offload": True}, **GENERIC),
    Case(
        "offload-block-gathered", "offload to the host", options={**BLOCK, "offload": True, "reshard": False},
        micro_steps=2, clip=0.1, **RECOMPUTED, **GENERIC,
    ),
    Case("gemma2-block", "norms around the MLP", "gemma2", options=BLOCK),
    Case("apply-late", LATE, options={**LAYER, "apply": "wrapped"}),
    Case("apply-late-linear", LATE, options={**LINEAR, "apply": "wrapped"}, refused=WRAP_THE_BLOCK),
    Case("tiled-loss-head", LOSS, tiled_loss=True, options=HEAD),
    Case(
        "tiled-loss-tied", LOSS, "qwen3", {"tie_word_embeddings": True}, tiled_loss=True, options=LAYER, **RECOMPUTED
    ),
    Case("tiled-loss-idle-head", LOSS, tiled_loss=True, trained=(0.3, 0.0), options=HEAD, steps=2),
    Case("scores", options=LAYER, **SCORED),
    Case("scores-head", options=HEAD, **SCORED, steps=2),
    Case("scores-head-lora", options=HEAD, **SCORED, adapters=HEAD_AND_QUERY),
    Case("scores-idle", options=HEAD, **SCORED, trained=(0.3, 0.0), steps=2),
    Case("deferred-head", DEFERRED, tiled_loss=True, deferred=True, options=HEAD, steps=2),
]  # fmt: skip


def start() -> None:
    """Once per process: what FSDP2 says of a head that returns a view fails the case (OPT's own layers return one)."""
    warnings.filterwarnings("error", r"FSDP2-wrapped module \(.*FSDPLinear", UserWarning)


class Fsdp2(Parallel):
    def wrap(self, rank: int) -> None:
        options, mesh = self.case.options, init_device_mesh("cpu", (WORLD,))
        settings: dict[str, Any] = {"mesh": mesh}
        if "reshard" in options:
            settings["reshard_after_forward"] = options["reshard"]
        if options.get("mixed"):
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if options.get("offload"):
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
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
            fully_shard(unit, **settings)
        fully_shard(self.model, **settings)

        assert sum(isinstance(m, FSDPModule) for m in self.model.modules()) == len(units) + 1
        for name, p in self.model.named_parameters():
            assert isinstance(p, DTensor) and p.placements == (Shard(0),) and p.device_mesh.size() == WORLD, name
            numel_of_ranks = torch.tensor([p.to_local().numel()])
            dist.all_reduce(numel_of_ranks)
            assert numel_of_ranks == numel[name], name

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.full_tensor() for name, p in named(self.model).items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().full_tensor().clone() for name, p in named(self.model).items()}


ENGINE = Fsdp2
