"""DeepSpeed ZeRO-1 and 2: whole weights, the optimizer's state (and in 2 the gradients) in shards; fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grid.cases import GENERIC, LOW_PRECISION, MLP, RATE, RECOMPUTED, WORLD, Case, named, usual_cases
from grid.training import Parallel

ONE, TWO = ({"stage": stage} for stage in (1, 2))
OFFLOAD = {"device": "cpu", "pin_memory": False}
BF16: dict[str, Any] = {"low_precision": True}

_CASES = [
    *usual_cases(ONE, "zero1-", untiled_rank={"options": {**ONE, "overlap_comm": True}}),
    *usual_cases(TWO, "zero2-", lora_no_input_gradient={**GENERIC, **RECOMPUTED}),
    Case("zero1-mixed", LOW_PRECISION, options={**ONE, "bf16": True}, **BF16),
    Case("zero1-offload", "offload to the host", options={**ONE, "offload_optimizer": OFFLOAD}, steps=2),
    Case("zero2-mixed", LOW_PRECISION, options={**TWO, "bf16": True}, **BF16),
    Case(
        "zero2-mixed-generic", LOW_PRECISION, options={**TWO, "bf16": True}, **BF16, path="generic",
        checkpoint="non-reentrant",
    ),
    Case("zero2-offload", "offload to the host", options={**TWO, "offload_optimizer": OFFLOAD}, steps=2),
    Case("zero2-untiled-rank-lora", "one rank untiled", options=TWO, tiles=("auto", 3), adapters=MLP),
    Case("zero2-untiled-rank-mixtral", "one rank untiled", "mixtral", options=TWO, tiles=("auto", 3)),
    Case("zero2-apply-late", "apply after wrapping", options={**TWO, "apply": "wrapped"}),
]  # fmt: skip
CASES = [replace(case, dtype=torch.float32) for case in _CASES]


def start() -> None:
    """Once per process: compiles DeepSpeed's communication operator the first time, which takes minutes."""
    import deepspeed

    deepspeed.init_distributed("gloo")


class Zero(Parallel):
    """Any stage; the optimizer steps inside DeepSpeed's engine."""

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
        """Nothing: DeepSpeed's engine holds the optimizer."""

    def check_placement(self) -> None:
        """The optimizer's fp32 weights are shards that make up the whole."""
        numel = torch.tensor([sum(p.numel() for p in self.call.optimizer.single_partition_of_fp32_groups)])
        whole = sum(p.numel() for p in named(self.model).values())
        assert numel < whole
        dist.all_reduce(numel)
        assert whole <= numel < whole + 64  # padded to equal shards

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
