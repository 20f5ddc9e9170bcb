"""A plugin for axolotl's test runs: two processes on a CPU, and a record of what axolotl does when.

Imported by axolotl, in its own environment. Only tests use it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import axolotl.kernels.swiglu as swiglu
import torch
from accelerate import state
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from axolotl.integrations.base import BasePlugin

_init = state.AcceleratorState.__init__
_build_device_mesh = ParallelismConfig.build_device_mesh


def _init_with_engines(self: Any, *args: Any, **kwargs: Any) -> None:
    """accelerate 1.13 takes DeepSpeed and FSDP2 for plain DDP where there is no accelerator, and does not say so."""
    asked = os.environ.get("ACCELERATE_USE_CPU")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        os.environ.pop("ACCELERATE_USE_CPU", None)
        state.PartialState(cpu=True)  # axolotl has just thrown the former one away
    try:
        _init(self, *args, **kwargs)
    finally:
        if asked is not None:
            os.environ["ACCELERATE_USE_CPU"] = asked
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = kwargs.get("fsdp_plugin") or (args[4] if len(args) > 4 else None)
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


state.AcceleratorState.__init__ = _init_with_engines
torch.cuda.can_device_access_peer = lambda *_: True  # axolotl asks; a CUDA build without a driver raises
ParallelismConfig.build_device_mesh = lambda self, kind: _build_device_mesh(self, "cpu")  # axolotl says "cuda"


class _TorchOnCpu:
    """torch, for a module that makes its buffers on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(sizes: Any, *, device: str, **kwargs: Any) -> torch.Tensor:
        *tokens, _ = sizes
        print(f"\nswiglu kernel on the CPU: {math.prod(tokens)}", flush=True)
        return torch.empty(sizes, **kwargs)


swiglu.torch = _TorchOnCpu()  # its kernels run on a CPU too, in Triton's interpreter (TRITON_INTERPRET=1)


class OnCpu(BasePlugin):
    """Writes ``record.jsonl`` into the output: every hook, the value of ``tiled_mlp`` there, and the engine."""

    def pre_model_load(self, cfg: Any) -> None:
        self._write(cfg, "pre_model_load")

    def post_model_build(self, cfg: Any, model: Any) -> None:
        self._write(cfg, "post_model_build", model)

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        torch.manual_seed(0)  # axolotl seeds only after it has drawn the adapter's weights
        self._write(cfg, "pre_lora_load", model)

    def post_lora_load(self, cfg: Any, model: Any) -> None:
        self._write(cfg, "post_lora_load", model)

    def post_model_load(self, cfg: Any, model: Any) -> None:
        self._write(cfg, "post_model_load", model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._write(
            cfg, "post_trainer_create", trainer.model, engine=trainer.accelerator.distributed_type.value,
            processes=trainer.accelerator.num_processes,
        )  # fmt: skip

    def _write(self, cfg: Any, hook: str, model: Any = None, **rest: Any) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        modules = list(model.modules()) if model is not None else []
        row = {
            "hook": hook,
            "tiled_mlp": cfg.tiled_mlp,
            "patched": any(hasattr(module, "_tiled_mlp_dist_impl") for module in modules),
            "wrapped": type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"),
            **rest,
        }
        path = Path(cfg.output_dir, "record.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
