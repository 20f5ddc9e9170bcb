"""DeepSpeed ZeRO-1 and 2: whole weights, the optimiser's state (and in 2 the gradients) in shards; fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grid.cases import HEADS, RATE, REST, SAVED, SDPA, SHORT_CONVOLUTION, STATES, WORLD, Case, named
from grid.training import Parallel

ONE, TWO = ({"stage": stage} for stage in (1, 2))
_MLP = ("gate_proj", "up_proj", "down_proj")
OFFLOAD = {"device": "cpu", "pin_memory": False}

_CASES = [
    Case("zero1", "plain", options=ONE, steps=2),
    Case("zero1-generic", "plain", options=ONE, path="generic"),
    Case("zero1-checkpoint", "activation checkpointing", options=ONE, checkpoint="non-reentrant"),
    Case(
        "zero1-checkpoint-generic", "activation checkpointing", options=ONE, checkpoint="non-reentrant", path="generic"
    ),
    Case("zero1-reentrant", "reentrant checkpointing", options=ONE, checkpoint="reentrant"),
    Case("zero1-mixed", "mixed precision", options={**ONE, "bf16": True}, low_precision=True),
    Case("zero1-offload", "offload to the host", options={**ONE, "offload_optimizer": OFFLOAD}, steps=2),
    Case("zero1-accumulate", "accumulation, clipping", options=ONE, micro_steps=3, clip=0.1, steps=2),
    Case("zero1-one-token", "one rank with a single token", options=ONE, lengths=(9, 1), grow=0),
    Case("zero1-no-token-generic", "one rank without data", options=ONE, lengths=(9, 0), grow=0, path="generic"),
    Case("zero1-untiled-rank", "one rank untiled", options={**ONE, "overlap_comm": True}, tiles=("auto", 3)),
    Case("zero1-lora", "LoRA", options=ONE, adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("zero1-heads", HEADS, options=ONE, config=SDPA, checkpoint="non-reentrant", more=SAVED),
    Case("zero2-heads", HEADS, options=TWO, more={"heads": 1}, micro_steps=2, steps=2),
    Case("zero1-states", STATES, **SHORT_CONVOLUTION, options=ONE, checkpoint="non-reentrant"),
    Case("zero2-states", STATES, **SHORT_CONVOLUTION, options=TWO, micro_steps=2, lengths=(2, 13)),
    Case("zero2", "plain", options=TWO, steps=2),
    Case("zero2-generic", "plain", options=TWO, steps=2, path="generic"),
    Case("zero2-checkpoint", "activation checkpointing", options=TWO, checkpoint="non-reentrant"),
    Case(
        "zero2-checkpoint-generic", "activation checkpointing", options=TWO, checkpoint="non-reentrant", path="generic"
    ),
    Case("zero2-reentrant", "reentrant checkpointing", options=TWO, checkpoint="reentrant"),
    Case("zero2-reentrant-generic", "reentrant checkpointing", options=TWO, checkpoint="reentrant", path="generic"),
    Case("zero2-offload", "offload to the host", options={**TWO, "offload_optimizer": OFFLOAD}, steps=2),
    Case("zero2-mixed", "mixed precision", options={**TWO, "bf16": True}, low_precision=True),
    Case(
        "zero2-mixed-generic", "mixed precision", options={**TWO, "bf16": True}, low_precision=True, path="generic",
        checkpoint="non-reentrant",
    ),
    Case("zero2-accumulate", "accumulation, clipping", options=TWO, micro_steps=3, clip=0.1, steps=2),
    Case("zero2-one-token", "one rank with a single token", options=TWO, lengths=(1, 9), grow=0),
    Case("zero2-no-token", "one rank without data", options=TWO, lengths=(0, 9), grow=0),
    Case("zero2-no-token-generic", "one rank without data", options=TWO, lengths=(0, 9), grow=0, path="generic"),
    Case("zero2-untiled-rank", "one rank untiled", options=TWO, tiles=(3, "auto"), steps=2),
    Case(
        "zero2-untiled-rank-generic", "one rank untiled", options=TWO, tiles=("auto", 3), path="generic",
        checkpoint="non-reentrant",
    ),
    Case("zero2-untiled-rank-lora", "one rank untiled", options=TWO, tiles=("auto", 3), adapters=_MLP),
    Case("zero2-untiled-rank-mixtral", "one rank untiled", "mixtral", options=TWO, tiles=("auto", 3)),
    Case("zero2-lora", "LoRA", options=TWO, adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case(
        "zero2-lora-no-input-gradient", "LoRA", options=TWO, adapters=("up_proj",), input_gradients=False,
        path="generic", checkpoint="non-reentrant",
    ),
    Case("zero2-gemma2", "norms around the MLP", "gemma2", options=TWO),
    Case("zero2-rows", "rest of the layer", blocks=REST, options=TWO, checkpoint="non-reentrant"),
    Case("zero2-mixtral", "experts", "mixtral", options=TWO),
    Case("zero2-apply-late", "apply after wrapping", options={**TWO, "apply": "wrapped"}),
    Case("tiled-loss", "tiled loss", tiled_loss=True, steps=2, options=TWO),
]  # fmt: skip
CASES = [replace(case, dtype=torch.float32) for case in _CASES]


def start() -> None:
    """Once per process: compiles DeepSpeed's communication operator the first time, which takes minutes."""
    import deepspeed

    deepspeed.init_distributed("gloo")


class Zero(Parallel):
    """Any stage; the optimiser steps inside DeepSpeed's engine."""

    def wrap(self, rank: int) -> None:
        import deepspeed

        case, options = self.case, self.case.options
        zero = {k: v for k, v in options.items() if k not in ("apply", "init", "bf16")}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": case.micro_steps,
            "gradient_clipping": case.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            "bf16": {"enabled": bool(options.get("bf16"))},
        }
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=RATE)
        self.call, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        assert self.call.zero_optimization_stage() == options["stage"]
        assert self.call.dp_world_size == WORLD
        assert self.call.bfloat16_enabled() == bool(options.get("bf16"))
        offload = self.call.zero_offload_optimizer()
        assert (offload is not None and offload.device == "cpu") == ("offload_optimizer" in options)
        self.check_placement()

    def prepare(self) -> None:
        """Nothing: DeepSpeed's engine holds the optimiser."""

    def check_placement(self) -> None:
        """The optimiser's fp32 weights are shards that make up the whole."""
        held = torch.tensor([sum(p.numel() for p in self.call.optimizer.single_partition_of_fp32_groups)])
        whole = sum(p.numel() for p in named(self.model).values())
        assert held < whole
        dist.all_reduce(held)
        assert whole <= held < whole + 64  # padded to equal shards

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # DeepSpeed counts the micro steps itself

    def backward(self, loss: Tensor) -> None:
        self.call.backward(loss)

    def clip(self, bound: float) -> None:
        """DeepSpeed clips within its step; the weights after it show."""

    def gradients(self) -> dict[str, Tensor | None]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).clone() for name, p in named(self.model).items()}

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).clone() for name, p in named(self.model).items()}

    def step(self, last: bool) -> None:
        self.call.step()

    def close(self) -> None:
        self.call.destroy()


ENGINE = Zero
