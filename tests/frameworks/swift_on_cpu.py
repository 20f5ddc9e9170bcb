"""A plugin of the tests for ms-swift: engines on two CPU processes, and the weights that a run ends with.

accelerate turns several processes into FSDP on an accelerator and trains plain DDP on a CPU, without a word; and
DeepSpeed, asked for shards before anyone has started its process group, counts one process.
"""

import os
import re
import sys

import torch
import torch.distributed.fsdp._init_utils
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType
from swift.callbacks import callbacks_map
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback

if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "--deepspeed" in sys.argv:
    import deepspeed

    deepspeed.init_distributed("gloo")

_build = accelerate_state.AcceleratorState.__init__


def _build_on_cpu(self, *args, **kwargs):
    several = accelerate_state.PartialState().distributed_type == DistributedType.MULTI_CPU
    if several and kwargs.get("fsdp_plugin") is not None:
        accelerate_state.PartialState().distributed_type = DistributedType.MULTI_GPU
    _build(self, *args, **kwargs)


accelerate_state.AcceleratorState.__init__ = _build_on_cpu


# FSDP1 calls this device "cpu" in one place and "cpu:0" in another, and refuses itself; without a name it asks nobody.
torch.distributed.fsdp._init_utils._get_device_from_device_id = lambda *_: None


WRAPPERS = r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."


class KeepWeights(TrainerCallback):
    """Writes what trained, and how: the engine's name, the number of processes, and the whole weights."""

    def __init__(self, args, trainer):
        self.trainer = trainer

    def on_train_end(self, args, state, control, **kwargs):
        accelerator = self.trainer.accelerator
        model = self.trainer.model_wrapped
        if isinstance(model, FullyShardedDataParallel):
            # Its state_dict frees on a CPU what it hands out, and crashes (torch 2.13).
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                weights = {re.sub(WRAPPERS, "", name): p.detach().clone() for name, p in model.named_parameters()}
        else:
            weights = accelerator.get_state_dict(model)  # every process gathers
        if accelerator.is_main_process:
            kind = str(accelerator.distributed_type.value)
            if kind == "FSDP":
                kind += "2" if accelerator.is_fsdp2 else "1"
            if accelerator.state.deepspeed_plugin is not None:
                kind += str(accelerator.state.deepspeed_plugin.zero_stage)
            found = {"engine": kind, "processes": accelerator.num_processes, "weights": weights}
            found["history"] = state.log_history
            torch.save(found, os.path.join(args.output_dir, "kept.pt"))


callbacks_map["keep_weights"] = KeepWeights
