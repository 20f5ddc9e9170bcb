"""The chooser against a plan of every setting that it may choose from, for small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from transformers import AutoConfig

from seqtile._errors import UserError
from seqtile.options import TilingOptions, checkpoint_of, offload_of
from seqtile.planner.accelerators import Device
from seqtile.planner.chooser import choose_settings
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora
from seqtile.planner.techniques import CHUNKS

TOKENS, TILE, LAYERS = 8192, 2048, 4
GIVEN: dict[str, Any] = {"blocks": "auto", "heads": None, "state": None}
"""Minimal memory takes a minute to plan by every policy."""

SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=704, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=48, vocab_size=1024, max_position_embeddings=65536,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 352},
}  # fmt: skip


def settings() -> Iterator[TilingOptions]:
    """Every checkpoint by layer, with no, half and all tiles kept, on the device and the host; and chunks."""
    start = TilingOptions(tile=TILE, loss="tiled", loss_tile=TILE, checkpoint="layer")
    for plain, saved in product(range(LAYERS + 1), repeat=2):
        if plain + saved > LAYERS:
            continue
        policies = ["layer"] * (LAYERS - plain - saved) + ["attention-saved"] * saved + [None] * plain
        checkpoint = checkpoint_of(policies)
        for keep, host in product((0.0, 0.5, 1.0), (False, True)):
            if not host or checkpoint is not None:
                yield replace(start, checkpoint=checkpoint, keep=keep, offload=offload_of(host, False))
    for segment, host in product((1, 4), (False, True)):
        yield replace(start, **{**CHUNKS.changes, "segment": segment, "offload": offload_of(host, False)})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [("llama", None), ("qwen3_moe", Lora(4))], ids=str)
def test_no_setting_that_fits_is_faster(name: str, lora: Lora | None) -> None:
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
    options = TilingOptions(loss="tiled")
    request = Request(name, config, Device("large", 2**40, 100.0, "made up"), options=options, lora=lora)
    planner = Planner(replace(request, options=replace(options, tile=TILE, loss_tile=TILE)), TOKENS)
    found: list[tuple[float, float, TilingOptions]] = []
    for one in settings():
        try:
            candidate = Planner(replace(request, options=one), TOKENS, like=planner)
        except UserError:  # chunks that this model's attention has no form for
            continue
        estimate = candidate.estimate(TOKENS)
        planner.share(candidate)
        found.append((candidate.seconds(TOKENS, estimate.moved), estimate.device.high, one))
    least, most = (pick(high for _, high, _ in found) for pick in (min, max))
    for share in (0.02, 0.3, 0.6, 1.0):
        memory = int(least + share * (most - least)) + 1
        device = Device("small", memory, 100.0, "made up")
        given = {**GIVEN, "tile": TILE, "loss_tile": TILE}
        chosen = choose_settings(replace(request, device=device), TOKENS, given, can_offload=True, like=planner)
        fastest = min((one for one in found if one[1] <= memory), key=lambda one: one[0])
        assert chosen.sure and chosen.seconds <= 1.02 * fastest[0], (chosen.settings, chosen.seconds, fastest)
