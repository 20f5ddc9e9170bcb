"""Run in Unsloth's environment by ``test_unsloth.py``: prints ``RESULT`` and a JSON object.

``train FOLDER full|lora untiled|seqtile|unsloth``: four steps of a model that ``FastLanguageModel`` loads.
``ddp STORE RANK zoo|loader``: one of two processes; the gradients with Unsloth's own tiles against those without.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import unsloth  # before transformers and TRL, which it changes

# isort: split
import datasets
import torch
import torch.distributed as dist
import trl
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from unsloth_zoo.tiled_mlp import patch_tiled_mlp

import tiny_run
from seqtile import UserError
from seqtile.integrations import unsloth as ours


def say(**found: Any) -> None:
    print("RESULT", json.dumps(found))


def train(folder: str, kind: str, tiles: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        folder, max_seq_length=1024, dtype=torch.float32, load_in_4bit=False, full_finetuning=kind == "full",
        unsloth_tiled_mlp=tiles == "unsloth",
    )  # fmt: skip
    if kind == "lora":
        model = unsloth.FastLanguageModel.get_peft_model(model, r=8)
    if tiles == "seqtile":
        ours.patch_tiled_mlp(model, "arctic")
    unsloth.FastLanguageModel.for_training(model)
    settings = trl.SFTConfig(
        output_dir=str(Path(folder).with_name("output")), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", optim="adamw_torch", report_to="none", save_strategy="no",
        max_length=512, use_cpu=True, bf16=False, seed=0,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=settings, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(tiny_run.text_rows(16)),
    )  # fmt: skip
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    forwards = [module.__dict__.get("forward") for name, module in model.named_modules() if name.endswith(".mlp")]
    say(
        loss=[row["loss"] for row in history], grad_norm=[float(row["grad_norm"]) for row in history],
        forwards=[type(one).__name__ if one else "" for one in forwards],
    )  # fmt: skip


def ddp(store: str, rank: int, patched_by: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=100)
    )
    sizes = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    plain, model = LlamaForCausalLM(sizes).train(), LlamaForCausalLM(sizes).train()
    model.load_state_dict(plain.state_dict())
    patch_tiled_mlp(model, "arctic")
    if patched_by == "loader":  # what it calls next in a distributed run; the loader itself needs a GPU to be imported
        path = Path(unsloth.__path__[0], "models")
        assert (
            "            if is_distributed():\n                patch_tiled_mlp_for_ddp()\n"
            in (path / "loader.py").read_text()
        )
        spec = importlib.util.spec_from_file_location("tiled_mlp_ddp", path / "_tiled_mlp_ddp.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.patch_tiled_mlp_for_ddp()
    refused = ""
    try:
        ours.patch_tiled_mlp(model, "arctic")
    except UserError as error:
        refused = str(error)
    ids = torch.randint(0, 64, (2, 2, 100))[rank]  # seven tiles of 32 tokens at most
    gradients: list[list[torch.Tensor]] = []
    for one in (plain, model):
        wrapped = DistributedDataParallel(one)
        try:
            wrapped(input_ids=ids, labels=ids).loss.backward()
        except RuntimeError as error:
            say(error=str(error).partition(".")[0], refused=refused)
            return
        gradients.append([parameter.grad for parameter in one.parameters() if parameter.grad is not None])
    worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*gradients, strict=True))
    say(worst=worst, refused=refused)
    dist.destroy_process_group()


if sys.argv[1] == "train":
    train(*sys.argv[2:])
else:
    ddp(sys.argv[2], int(sys.argv[3]), sys.argv[4])
