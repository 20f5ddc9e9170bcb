"""The time of a step, by which settings are compared: each thing that takes time makes it longer, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seqtile.models.configs import read_config
from seqtile.options import WHOLE_LAYER, changed
from seqtile.planner.accelerators import Device, device_here, find_device
from seqtile.planner.flops import count_work
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import frozen_bytes
from seqtile.planner.step_config import Lora
from seqtile.planner.step_time import (
    KERNEL_SECONDS,
    OFFLOAD_COST,
    PASS_KERNELS,
    STREAMING_COST,
    TILE_KERNELS,
    checkpoint_bytes,
    spoken,
    step_seconds,
)

TOKENS, LAYERS, GROUPS = 131_072, 32, 8


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Llama-8B with adapters on one H100: structure alone, no fake run."""
    request = Request(model="llama-8b", config=read_config("llama-8b"), device=find_device("h100"), lora=Lora(16))
    return Planner(changed(request, checkpoint="layer", tile=4096))


def seconds(planner: Planner, keep: float = 0.0, device: Device | None = None, tokens: int = TOKENS, **settings: Any):
    request = changed(planner.request, **settings)
    request = request if device is None else replace(request, device=device)
    return step_seconds(request, planner.counts, tokens, keep)


def test_less_is_computed_again_from_one_policy_to_the_next(planner: Planner) -> None:
    layer, mixed, saved, mixed_without, without = (
        seconds(planner, checkpoint=checkpoint)
        for checkpoint in ("layer", "attention-saved:16", "attention-saved", "none:16+attention-saved", None)
    )
    assert layer > mixed > saved > mixed_without > without
    assert mixed == pytest.approx((layer + saved) / 2) and mixed_without == pytest.approx((saved + without) / 2)


def test_tiles_that_keep_gate_and_up_compute_two_products_less(planner: Planner) -> None:
    """Of 11 with a checkpoint and without one, where the tiles compute them again."""
    rows_of_a_layer = 2 * 2 * 4096 * 14336  # a product and a sum, gate and up
    for checkpoint in ("layer", None, "none:8"):
        none, half, every = (
            count_work(changed(planner.request, checkpoint=checkpoint), planner.counts, TOKENS, keep).products
            for keep in (0.0, 0.5, 1.0)
        )
        assert none - every == pytest.approx(LAYERS * TOKENS * rows_of_a_layer) == pytest.approx(2 * (none - half))
    tiled = count_work(changed(planner.request, checkpoint=None), planner.counts, TOKENS, 0.0)
    untiled = count_work(changed(planner.request, checkpoint=None), planner.counts, TOKENS, None)
    assert tiled.products - untiled.products == pytest.approx(LAYERS * TOKENS * rows_of_a_layer)


def test_kernels_take_time(planner: Planner) -> None:
    heads = seconds(planner, heads=1) - seconds(planner)
    assert heads == pytest.approx(LAYERS * GROUPS * PASS_KERNELS * KERNEL_SECONDS)
    smaller = seconds(planner, tile=1024) - seconds(planner)
    assert smaller == pytest.approx(LAYERS * (TOKENS // 1024 - TOKENS // 4096) * TILE_KERNELS * KERNEL_SECONDS)
    assert seconds(planner, chunk=4096) > seconds(planner, chunk=8192) > seconds(planner)
    assert seconds(planner, blocks=WHOLE_LAYER) == seconds(planner)  # what its tiles launch is part of a group's


def test_copies_that_a_layer_hides_take_a_share_and_others_their_time(planner: Planner) -> None:
    plain = seconds(planner)
    assert seconds(planner, offload=True) == pytest.approx(plain * (1 + OFFLOAD_COST))
    assert seconds(planner, offload="weights") == pytest.approx(plain * (1 + STREAMING_COST))
    size = checkpoint_bytes(planner.request, planner.counts, TOKENS)
    assert size == LAYERS * TOKENS * 4096 * 2
    slow = replace(planner.request.device, host_link=1e9)
    exposed = seconds(planner, offload=True, device=slow) - plain * (1 + OFFLOAD_COST)
    assert 0 < 2 * size / 1e9 - plain < exposed <= 2 * size / 1e9
    # Short rows hide little of the weights, which come in twice.
    twice = 2 * frozen_bytes(planner.request, planner.counts) / find_device("h100").host_link
    assert 0.8 * twice < seconds(planner, offload="weights", tokens=512) - seconds(planner, tokens=512) < twice


def test_attention_that_waits_on_the_host_is_copied_too(planner: Planner) -> None:
    mixed = changed(planner.request, checkpoint="none:8+attention-saved:8", offload=True)
    inputs, outputs = 4096 * 2, 32 * (128 * 2 + 4)
    assert checkpoint_bytes(mixed, planner.counts, TOKENS) == TOKENS * (24 * inputs + 8 * outputs)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362.0), ("NVIDIA L40", None), ("NVIDIA RTX A1000", None), ("NVIDIA T400", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_a_whole_word_of_its_name(
    name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqtile.planner.accelerators.total_device_bytes", lambda _: 2**36)
    monkeypatch.setattr("seqtile.planner.accelerators.device_name", lambda _: name)
    assert device_here(0).tflops == tflops


def test_a_time_is_said_in_a_unit_of_its_size() -> None:
    assert [*map(spoken, (0.0104, 8.31, 47.2, 780, 11_000))] == ["10 ms", "8.3 s", "47 s", "13 min", "3.1 h"]
