"""Measured and expected times of steps with settings that a plan may choose, on the CPU; docs/planning.md shows them.

Run it from the repository; ``python docs/tables.py`` then writes the page::

    python benchmarks/choice_times.py

One Llama of four layers trains all its weights in fp32 on one thread. The settings take turns, and the least processor
time of each counts. What is expected follows from FLOPs and operators alone (:mod:`seqtile.planner.step_time`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from environment import append_rows, environment, stamp
from seqtile.options import WHOLE_LAYER, TilingOptions
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request

RESULTS = Path(__file__).parent / "results" / "choice-times.jsonl"
SIZES = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=48, vocab_size=8000,
)  # fmt: skip
CHOICES: tuple[dict[str, Any], ...] = (
    {"checkpoint": None},
    {"checkpoint": "none:2+attention-saved:2"},
    {"checkpoint": "attention-saved"},
    {"checkpoint": "attention-saved:2"},
    {"checkpoint": "layer"},
    {"checkpoint": "layer", "keep": 1.0},
    {"checkpoint": "layer", "blocks": WHOLE_LAYER, "heads": 1},
)


def build(tokens: int) -> Any:
    config = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=tokens)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def step(model: Any, ids: torch.Tensor) -> float:
    """Processor seconds of a forward and backward."""
    started = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    took = time.process_time() - started
    model.zero_grad(set_to_none=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens = arguments.tokens
    ids = torch.randint(SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
    fixed: dict[str, Any] = {"tile": 1024, "loss": "tiled", "loss_tile": 1024}
    models, expected = [], []
    for choice in CHOICES:
        model = build(tokens)
        request = Request(
            "it", model.config, Device("CPU", 2**36, None, "this machine"), precision="float32", device_type="cpu",
            attention="sdpa", options=TilingOptions(**fixed, **choice),
        )  # fmt: skip
        expected.append(Planner(request, tokens).seconds(tokens))
        seqtile.apply(model, **fixed, **choice)
        step(model, ids)
        models.append(model)
    measured = [float("inf")] * len(models)
    for _ in range(arguments.turns):
        for number, model in enumerate(models):
            measured[number] = min(measured[number], step(model, ids))
    machine = environment()
    RESULTS.unlink(missing_ok=True)
    rows = []
    for choice, seconds, estimate in zip(CHOICES, measured, expected, strict=True):
        row = {"choice": choice, "tokens": tokens, "seconds": seconds, "expected_seconds": estimate}
        print(f"{seconds / measured[0]:.3f} {estimate / expected[0]:.3f} {seconds:.2f} s {choice}", flush=True)
        rows.append({**stamp(machine), **row})
    append_rows(RESULTS, rows)


if __name__ == "__main__":
    main()
