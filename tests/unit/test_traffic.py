"""What a step moves between nodes, against counts by hand; plans of several nodes and of ring attention."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from refusals import refused
from seqtile.cli import main
from seqtile.planner.accelerators import Device
from seqtile.planner.explain import recipe
from seqtile.planner.memory_plan import Planner, longest_by_split
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import RING_BACKWARD
from seqtile.planner.traffic import bytes_between_nodes, bytes_inside_a_node
from seqtile.train.recipe import build_recipe, resolve

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=144, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    head_dim=10, vocab_size=256, max_position_embeddings=2**20,
)  # fmt: skip


def request(**values: Any) -> Request:
    given: dict[str, Any] = {"model": "tiny", "config": CONFIG, "device": Device("any", 2**36, None, "a test")}
    return Request(**{**given, "gpus": 8, "nodes": 2, "host_memory": 2**40, **values})


@pytest.fixture(scope="module")
def ring() -> Planner:
    return Planner(request(engine="fsdp2", cp_size=8))


def test_a_ring_over_nodes_sends_keys_and_values_on(ring: Planner) -> None:
    tokens, counts = 4096, ring.counts
    found = bytes_between_nodes(ring.request, counts, tokens)
    # One rank's keys and values of one layer, in bf16: tokens / 8 of 2 x 2 heads of 10.
    sent = 2 * (tokens / 8) * 2 * 2 * 10
    assert found["keys and values"] == 3 * 7 * 3 * sent  # layers, turns; forward, recompute, backward
    assert found["gradients of keys and values"] == 3 * 8 * 2 * sent  # in fp32
    assert found["weights"] == 2 * 7 / 8 * 2 * counts.weights and found["gradients"] == 7 / 8 * 2 * counts.weights


def test_a_split_inside_of_a_node_stays_there(ring: Planner) -> None:
    counts = ring.counts
    for split in ({"engine": "fsdp2", "cp_size": 4}, {"engine": "zero3", "sp_size": 4}):
        assert bytes_between_nodes(request(**split), counts, 4096).keys() == {"weights", "gradients"}
    assert bytes_between_nodes(request(engine="fsdp2", cp_size=8, nodes=1), counts, 4096) == {}


def test_inside_a_node_each_link_of_a_ring_carries_as_much(ring: Planner) -> None:
    counts = ring.counts
    assert bytes_inside_a_node(ring.request, counts, 4096) == bytes_between_nodes(ring.request, counts, 4096)
    found = bytes_inside_a_node(request(engine="fsdp2", cp_size=4), counts, 4096)
    sent = 2 * (4096 / 4) * 2 * 2 * 10
    assert found["keys and values"] == 3 * 3 * 3 * sent
    # Of Ulysses' eight ranks three others are on this node, of its four all three others.
    exchanged = 3 * (8 + 8 + 8 + 8) * 10 * 2 * 3
    for split, others in ((8, 3), (4, 3)):
        found = bytes_inside_a_node(request(engine="zero3", sp_size=split), counts, 4096)
        width = exchanged * (4096 / split) if split == 8 else 3 * (8 + 8 + 4 + 4) * 10 * 2 * 3 * (4096 / split)
        assert found["attention heads"] == width * others / split
    assert bytes_inside_a_node(request(engine="ddp", gpus=2), counts, 64) == {}


def test_ulysses_over_nodes_sends_what_is_for_the_others(ring: Planner) -> None:
    found = bytes_between_nodes(request(engine="zero3", sp_size=8), ring.counts, 4096)
    # Query and output, keys and values repeated to 8 heads, of width 10, in bf16; half of the ranks are elsewhere.
    assert found["attention heads"] == 3 * (4096 / 8) * (8 + 8 + 8 + 8) * 10 * 2 * 3 * 4 * (1 / 2)


def test_groups_that_end_elsewhere_than_nodes_send_from_the_node_that_sends_most(ring: Planner) -> None:
    """Two nodes of six, sequences of four: ranks 4 and 5 of node 0 share one with 6 and 7 of node 1."""
    found = bytes_between_nodes(request(engine="zero3", gpus=12, sp_size=4), ring.counts, 4096)
    assert found["attention heads"] == 3 * (4096 / 4) * (8 + 8 + 4 + 4) * 10 * 2 * 3 * (2 * 2) / 4
    # Three nodes of four, rings of six: node 1 has the end of one ring and the beginning of the next.
    uneven = bytes_between_nodes(request(engine="fsdp2", gpus=12, nodes=3, cp_size=6), ring.counts, 4096)
    one_link = bytes_inside_a_node(request(engine="fsdp2", gpus=12, nodes=3, cp_size=6), ring.counts, 4096)
    assert uneven["keys and values"] == 2 * one_link["keys and values"] > 0


def test_a_plan_takes_no_split_of_heads_that_training_refuses() -> None:
    """Twelve query heads on six ranks, and four key-value heads that are neither dealt out nor repeated."""
    config = LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4})
    uneven = replace(request(engine="zero3", gpus=12), config=config)
    with refused("sp-size.heads-do-not-divide", "sp_size 6", "12 attention heads and 4 key-value heads"):
        Planner(replace(uneven, sp_size=6), 4092)
    assert [*longest_by_split(Planner(uneven))] == [1, 2, 4, 12]


def test_data_parallel_engines_move_weights_and_gradients_alone(ring: Planner) -> None:
    weights = ring.counts.weights
    assert bytes_between_nodes(request(engine="ddp"), ring.counts, 64) == {"gradients": 2 * 7 / 8 * 4 * weights}
    twice = bytes_between_nodes(request(engine="zero3", accumulation=2), ring.counts, 64)
    once = bytes_between_nodes(request(engine="zero3"), ring.counts, 64)
    assert twice == {name: 2 * value for name, value in once.items()}


def test_a_plan_of_a_ring_holds_a_part_of_the_row_and_what_comes_round(ring: Planner) -> None:
    assert ring.local(4096) == 512
    attention = ring.estimate(65536, ring.lines(65536))
    alone = Planner(request(engine="fsdp2", cp_size=1), like=ring).estimate(65536 // 8)
    assert attention.device.expected < Planner(request(engine="fsdp2"), like=ring).estimate(65536).device.expected
    # No less than a rank that has so many tokens for itself, and what the ring needs.
    of_the_ring = 65536 / 8 * (RING_BACKWARD[0] * 8 + RING_BACKWARD[1] * 2) * 8
    assert attention.device.expected <= alone.device.expected + 2 * of_the_ring
    assert attention.device.expected >= alone.device.expected


def test_the_emitted_recipe_trains(ring: Planner) -> None:
    values = recipe(ring, 4096)
    chosen = resolve(build_recipe({**values, "dataset": "rows", "model": "path"}, {})[0])
    assert (chosen.engine, chosen.nproc, chosen.cp_size, chosen.attn_implementation) == ("fsdp2", 8, 8, "sdpa")


def test_the_command_plans_a_ring_of_a_length_and_the_bytes_that_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIG.save_pretrained(tmp_path)
    flags = ["--device", "16GiB", "--gpus", "2", "--nodes", "2", "--engine", "fsdp2", "--cp-size", "2"]
    more = ["--max-length", "262144", "--tile", "4096", "--json"]
    assert main(["plan", "--model", str(tmp_path), *flags, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "ring attention" in found["attention_saved"]["why"]
    assert found["command"].startswith("seqtile train --recipe RECIPE --dataset DATA --nodes 2 --node-rank R")
    assert found["between_nodes_gib"]["keys and values"] > 0 and found["inside_a_node_gib"] == {}
    assert [*found["max_length_by_split"]] == ["1", "2"] and found["max_length_by_split"]["2"] == found["max_length"]
    flags[3] = "4"
    more = ["--max-length", "262144", "--recipe", str(tmp_path / "a recipe.yaml")]
    assert main(["plan", "--model", str(tmp_path), *flags, *more]) == 0
    told = capsys.readouterr().out
    assert f"Run on each node: seqtile train --recipe '{tmp_path}/a recipe.yaml' --dataset DATA" in told
    assert "Sent by each node" in told and re.search(r"Sent by each device .* GiB \(weights", told)
    assert re.search(r"by --cp-size: 1: [0-9,]+; 2: [0-9,]+; 4: [0-9,]+\.", told)


def test_a_plan_refuses_a_ring_that_training_refuses() -> None:
    gpt2 = GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=64)
    apart = Planner(request(engine="fsdp2", config=gpt2))
    for like in (None, apart):
        with refused("cp-size.model-unsupported", "cp_size 2", "self_attn"):
            Planner(request(engine="fsdp2", cp_size=2, config=gpt2), like=like)
    assert [*longest_by_split(apart)] == [1]


def test_the_longest_by_split_is_that_of_each_plan(ring: Planner) -> None:
    found = longest_by_split(ring)
    assert [*found] == [1, 2, 4, 8]
    for size in (2, 8):
        assert found[size] == Planner(request(engine="fsdp2", cp_size=size), like=ring).longest()[0]
    # Heads that a size does not divide are left out, and so is what no engine splits.
    heads = longest_by_split(Planner(request(engine="zero3", gpus=64), like=ring))
    assert max(heads) == CONFIG.num_attention_heads
    assert longest_by_split(Planner(request(engine="ddp"), like=ring)) == {}
