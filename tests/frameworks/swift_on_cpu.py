"""A plugin of the tests for ms-swift: engines on two CPU processes, packed rows, and the weights that a run ends with.

accelerate turns several processes into FSDP on an accelerator and trains plain DDP on a CPU, without a word; and
DeepSpeed, asked for shards before anyone has started its process group, counts one process.
"""

import itertools
import os
import re
import sys

import torch
import torch.distributed.fsdp._init_utils
import transformers.modeling_utils
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType
from swift.callbacks import callbacks_map
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


def attention_of_packed_rows(_, query, key, value, mask, *, scaling, position_ids, **__):
    """Stands for flash attention, which ms-swift's packing wants and a CPU does not have: each document sees itself.

    Args:
        query, key, value: [1, heads, tokens, D].
        mask: None.
        scaling: of the scores.
        position_ids: [1, tokens], from 0 in each document.
    """
    assert mask is None
    ends = [*(position_ids[0] == 0).nonzero()[:, 0].tolist(), query.shape[2]]
    assert ends[0] == 0 and len(ends) > 2, "no packed row"
    parts = [
        scaled_dot_product_attention(
            *(tensor[:, :, begin:end] for tensor in (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True
        )
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


if "--packing" in sys.argv:
    PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True
    transformers.modeling_utils.lazy_import_flash_attention = lambda *_, **__: None
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = attention_of_packed_rows


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
