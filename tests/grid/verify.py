"""``verify`` under an engine: right is right on both ranks, and a lost tile is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import zoo
from grid.cases import WORLD
from seqtile.verification import across_ranks

MLP = "model.layers.1.mlp"
TILE = 16
apply = across_ranks.apply


@dataclass(frozen=True)
class Verified:
    """``compared``: parameters and the loss, or with adapters those with dropout."""

    name: str
    engine: str
    compared: int = 0
    adapters: bool = False


def verified(engine: str) -> list[Verified]:
    return [
        Verified(f"{engine}-full", engine, 21 + 1),
        Verified(f"{engine}-lora", engine, 12 + 1, adapters=True),
        Verified(f"{engine}-lost", engine),
    ]


CASES = [*verified("ddp"), *verified("fsdp2")]


def lose_a_tile(model: nn.Module, **settings: Any) -> Any:
    """``apply``, and one block passes no gradient through its last tile."""
    report = apply(model, **settings)
    (block,) = (module for name, module in model.named_modules() if name.endswith(MLP))
    block.register_forward_hook(lambda _, __, y: torch.cat([y[:, :-TILE], y[:, -TILE:].detach()], 1))
    return report


class ENGINE:
    @staticmethod
    def run(case: Verified, rank: int) -> None:
        torch.manual_seed(0)
        model: Any = zoo.causal_lm("llama")
        if case.adapters:
            settings: dict[str, Any] = {"target_modules": ["q_proj", "gate_proj", "down_proj"], "lora_dropout": 0.3}
            model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
        batch: dict[str, Tensor] = {"input_ids": zoo.tokens(1, 60, seed=rank)}
        with patch.object(across_ranks, "apply", apply if case.compared else lose_a_tile):
            verdict = across_ranks.verify_under(case.engine, model, batch, tile=TILE)
        result = verdict.to_dict()
        both: list[Any] = [None] * WORLD
        dist.all_gather_object(both, {name: result[name] for name in ("parameters", "with_dropout")})
        assert both[0] == both[1]
        assert result["blocks"] == 2 and result["ran"]["cut"] and result["reference"] == "float64"
        # The engine itself gives the mean over the ranks.
        assert max(parameter["untiled_error"] for parameter in result["parameters"]) < 1e-5
        assert result["ok"] == bool(case.compared), str(verdict)
        if case.compared:
            assert len(result["with_dropout" if case.adapters else "parameters"]) == case.compared
        else:
            layer = MLP.removesuffix("mlp")  # its norm loses as much
            assert result["worst"]["name"].startswith(layer), str(verdict)
