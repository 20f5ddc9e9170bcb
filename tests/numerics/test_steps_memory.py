"""Thousands of steps leave no growth: what is live after a step does not depend on how many there were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import seqtile
from seqtile.counting.live import count_live_bytes

WARM = 5


def tiny_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=24, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def live_after_each_step(model: nn.Module, steps: int) -> list[int]:
    """Counted live bytes after every step of training, optimizer states included."""
    optimizer = torch.optim.AdamW(model.parameters())
    live_bytes = []
    with count_live_bytes() as live:
        for step in range(steps):
            # Lengths differ, and with them the number of tiles.
            tokens = torch.arange(9 + step % 3)[None]
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del tokens
            live_bytes.append(live.now)
    return live_bytes


@pytest.mark.slow
@pytest.mark.parametrize("path", ["fused", "generic"])
def test_steps_leave_nothing_behind(path: str):
    model = tiny_llama()
    report = seqtile.apply(model, tile=4, path=path)
    assert [block.path for block in report.blocks] == [path]
    after = live_after_each_step(model, 200)
    assert after[WARM] > 0
    assert {*after[WARM:]} == {after[WARM]}


def test_one_tensor_kept_by_each_step_is_seen():
    model, kept = tiny_llama(), []
    seqtile.apply(model, tile=4)
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: kept.append(output.detach()))
    after = live_after_each_step(model, 20)
    assert after[-1] - after[WARM] >= (20 - WARM - 1) * 9 * 8 * 4
