"""Two ranks that verify a tiny model under every engine named, right and with a tile lost: a line of JSON for each."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import zoo
from seqtile.verification import across_ranks as engines

MLP = "model.layers.1.mlp"
TILE = 16
apply = engines.apply


def lose_a_tile(model: nn.Module, **words: Any) -> Any:
    """``apply``, and one block passes no gradient through its last tile."""
    report = apply(model, **words)
    (block,) = (module for name, module in model.named_modules() if name.endswith(MLP))
    block.register_forward_hook(lambda _, __, y: torch.cat([y[:, :-TILE], y[:, -TILE:].detach()], 1))
    return report


def model_of(kind: str) -> nn.Module:
    model: Any = zoo.causal_lm("llama")
    if kind == "lora":
        words: dict[str, Any] = {"target_modules": ["q_proj", "gate_proj", "down_proj"], "lora_dropout": 0.3}
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **words))
    return model


def batch_of(rank: int) -> dict[str, Tensor]:
    return {"input_ids": zoo.tokens(1, 60, seed=rank)}


def main(names: list[str], file: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    with file.open("w", encoding="utf-8") as lines:
        for name in names:
            if name.startswith("zero"):
                import deepspeed

                deepspeed.init_distributed("gloo")
            for kind in ("full", "lora", "lost"):
                engines.apply = lose_a_tile if kind == "lost" else apply
                torch.manual_seed(0)
                result = engines.verify_under(name, model_of(kind), batch_of(dist.get_rank()), tile=TILE)
                found = {"engine": name, "kind": kind, "text": str(result), **result.to_dict()}
                lines.write(json.dumps(found) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[2:], Path(sys.argv[1] + os.environ["RANK"]))
    os._exit(0)  # threads of an engine must not hold the process back
