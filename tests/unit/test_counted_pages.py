"""Tables of the pages whose numbers a benchmark counts (bytes, products) are what its counting function returns today.

Rows that were measured (seconds, errors of real sums) are not counted again. Counts follow the versions of PyTorch and
transformers, whose operators and layers they are of: the tables say which, and are compared with those alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from importlib import import_module, util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs").is_dir() or not (ROOT / "benchmarks").is_dir():
    pytest.skip("no pages here: the tests run from an installed package", allow_module_level=True)

COUNTED_WITH = {"torch": "2.13", "transformers": "5.23"}
pytestmark = pytest.mark.skipif(
    any(not version(package).startswith(f"{known}.") for package, known in COUNTED_WITH.items()),
    reason=f"the pages were counted with {COUNTED_WITH}: other versions allocate otherwise",
)
needs_trl = pytest.mark.skipif(util.find_spec("trl") is None, reason="TRL's own head is counted: needs trl")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def cells(name: str, *first: str) -> list[str]:
    """The cells of the one row of a page that begins with the cells ``first``, without those and without bold."""
    begin = re.escape(" | ".join(first))
    rows = re.findall(rf"^\| {begin} \|(.*)\|$", page(name).replace("**", ""), re.M)
    assert len(rows) == 1, f"docs/{name}.md has {len(rows)} rows that begin with {first}"
    return [cell.strip() for cell in rows[0].split("|")]


def rows_of(name: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without the line of column names and without bold."""
    [section] = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", page(name), re.M | re.S)
    table = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert table, f"docs/{name}.md has no table below {heading}"
    lines = table[0].replace("**", "").splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def script(name: str) -> Any:
    return import_module(name)


def test_every_row_is_asked_for() -> None:
    """The tests below compare every row of the tables."""
    assert [row[0] for row in rows_of("attention", "What it saves")] == list(script("attention_rows").WAYS)
    ways = [name.replace("**", "") for name in script("rl_losses").WAYS]
    assert [row[0] for row in rows_of("rl", "What it costs")] == ways
    asked = [[window_name(name), f"{tokens:,}"] for name, tokens in windows()]
    assert [row[:2] for row in rows_of("states", "Sliding windows")] == asked
    layers = script("layer_rows")
    asked = [[TRAINED[train], f"`{blocks}`"] for train in layers.TRAIN for blocks in layers.BLOCKS]
    assert [row[:2] for row in rows_of("techniques", "The rest of the layer")] == asked
    head = [[dtype, way] for dtype in ("float32", "bfloat16") for way in script("head_cost").WAYS]
    assert [row[:2] for row in rows_of("head", "What it costs")] == head
    nodes = script("many_nodes")
    for heading in ("Which size for which length", "What a step moves between nodes"):
        assert len(rows_of("many-nodes", heading)) == 2 * len(nodes.GPUS)


@pytest.mark.parametrize("way", script("attention_rows").WAYS)
def test_head_wise_attention(way: str) -> None:
    benchmark = script("attention_rows")
    rows = benchmark.count_rows(131072, benchmark.WAYS[way])
    assert cells("attention", way) == [f"{number:.2f}" for number in (rows.held, rows.tensors, rows.kernels)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["untiled", "+ head-wise and attention saved, 1 of 8"])
def test_head_wise_attention_is_the_same_at_a_million_tokens(way: str) -> None:
    benchmark = script("attention_rows")
    rows = benchmark.count_rows(1048576, benchmark.WAYS[way])
    assert cells("attention", way) == [f"{number:.2f}" for number in (rows.held, rows.tensors, rows.kernels)]


@needs_trl
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if "fused" in way else []) for way in script("rl_losses").WAYS]
)
def test_losses_of_long_rollouts(way: str) -> None:
    benchmark = script("rl_losses")
    asked = Namespace(tokens=262_144, hidden=4096, vocabulary=151_936, trained=0.1)
    units, peak = benchmark.count(benchmark.WAYS[way], asked)
    assert cells("rl", way.replace("**", "")) == [f"{units:.3f}", f"{peak:.1f}"]


SIZES = (4096, 256, 32768)
"""Tokens, hidden size and vocabulary of the table in docs/head.md."""


def test_loss_in_fp32() -> None:
    """On real numbers, since the tokens that count are looked at. TRL's rows need more memory than a test may."""
    head_row("seqtile, scalar loss", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("plain PyTorch", torch.float32),
        ("seqtile, log-probabilities, entropy, argmax", torch.float32),
        ("seqtile, log-probabilities, entropy, argmax", torch.bfloat16),
        ("seqtile, scalar loss", torch.bfloat16),
    ],
)
def test_loss_and_scores(way: str, dtype: torch.dtype) -> None:
    head_row(way, dtype)


def head_row(way: str, dtype: torch.dtype) -> None:
    benchmark = script("head_cost")
    units, peak, _ = benchmark.count(benchmark.WAYS[way], benchmark.made(*SIZES, dtype), 512)
    assert cells("head", str(dtype).removeprefix("torch."), way)[:2] == [f"{units:g}", f"{peak:.0f}"]


@pytest.mark.parametrize(
    "tokens", [8192, pytest.param(32768, marks=pytest.mark.slow), pytest.param(131072, marks=pytest.mark.slow)]
)
def test_layers_with_a_state(tokens: int) -> None:
    state_row(f"{tokens:,}", tokens, 2048)


@pytest.mark.slow
def test_a_layer_with_a_state_at_a_million_tokens() -> None:
    state_row("1,048,576 (tiles of 16,384)", 1048576, 16384)


def state_row(name: str, tokens: int, tile: int) -> None:
    benchmark = script("state_tiles")
    counted = [benchmark.count_layer(way, tile, tokens) for way in ("checkpointed", "mixer in tiles", "layer in tiles")]
    assert cells("states", name) == [*(f"{live:.2f}" for live, _, _ in counted), f"{counted[2][1]:.2f}"]
    whole, mixer, layer = (flops for _, _, flops in counted)
    text = " ".join(page("states").split())
    if tile == 2048:
        assert f"With the mixer alone {mixer / whole:.3f}:" in text
        [at_8k, beyond] = re.findall(r"checkpointed layer's: (\S+) at 8,192 tokens and (\S+) from 32,768 on", text)[0]
        assert f"{layer / whole:.3f}" == (at_8k if tokens == 8192 else beyond)


def windows() -> Iterator[tuple[str, int]]:
    benchmark = script("window_tiles")
    for name in benchmark.SHAPES:
        for tokens in benchmark.LENGTHS:
            yield name, tokens


def window_name(name: str) -> str:
    """Model and window, as in the table's first column."""
    return f"{name}, {script('window_tiles').SHAPES[name]['sliding_window']:,}"


@pytest.mark.parametrize(
    ("name", "tokens"),
    [pytest.param(name, n, marks=[pytest.mark.slow] if n > 32768 else []) for name, n in windows()],
)
def test_sliding_windows(name: str, tokens: int) -> None:
    benchmark = script("window_tiles")
    counted = [benchmark.count_layer(benchmark.SHAPES[name], how, tokens) for how in benchmark.HOW]
    assert cells("states", window_name(name), f"{tokens:,}") == [f"{live:.2f} ({kept:.2f})" for live, kept in counted]


TRAINED = {"full": "every weight", "LoRA": "adapters"}


@pytest.mark.parametrize("blocks", ["mlp", "mlp+norm", "mlp+norm+projections"])
@pytest.mark.parametrize("train", TRAINED)
def test_parts_of_a_layer(train: str, blocks: str) -> None:
    """A part's largest phase in the last layer; where the norm is not in the tile it is a part of its own."""
    parts = script("layer_rows").count_parts(train, blocks, 131072)

    def largest(*names: str) -> str:
        last = (name for name in parts if "forward" not in name and "#0" not in name)
        return f"{max(parts[name] for name in last if name.startswith(names)):.2f}"

    attention, mlp, norm = cells("techniques", TRAINED[train], f"`{blocks}`")
    assert attention == largest("attention#31")
    assert mlp == largest("MLP#31", "MLP and norms#31", "rest of the model#31")
    assert norm == largest("rest of the model, backward")


def test_the_example_of_the_formulas() -> None:
    """Llama-8B at 131,072 tokens, by the letters that the page gives."""
    t, d, f, v, h, layers, b, gib = 131072, 4096, 14336, 128256, 32, 32, 2, 2**30
    text = page("techniques")
    for words in (
        f"{layers * t * d * b / gib:.0f} GiB kept",
        f"{5 * t * f * b / gib:.1f} → {4 * 8192 * f * b / gib:.3f} GiB of buffers",
        f"GiB of buffers and {4 * 3 * d * f / gib:.2f} of sums",
        f"{layers * 0.5 * 2 * t * f * b / gib:.0f} GiB at `keep=0.5`",
        f"{14 * t * v / gib:.0f} → 1 GiB (`auto`), and {4 * v * d / gib:.1f} of sums",
        f"{layers * t * d * b / gib:.0f} → {2 * t * d * b / gib:.0f} GiB",
        f"{layers * t * (d * b + 4 * h) / gib:.1f} GiB more",
    ):
        assert words in text, words


@cache
def planned(way: str, gpus: int) -> tuple[str, str]:
    nodes = script("many_nodes")
    like = nodes.planner("ring", nodes.GPUS[0], None)
    one: tuple[str, str] = nodes.table_rows(way, nodes.planner(way, gpus, like))
    return one


@pytest.mark.parametrize(
    ("way", "gpus"),
    [("ring", 8), ("Ulysses", 16)]
    + [pytest.param(way, gpus, marks=pytest.mark.slow) for way in ("ring", "Ulysses") for gpus in (32, 64)],
)
def test_lengths_and_bytes_of_many_machines(way: str, gpus: int) -> None:
    lengths, moved = planned(way, gpus)
    text = page("many-nodes")
    assert lengths in text and moved in text


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted with Python 3.11; 3.12 inlines comprehensions")
@pytest.mark.parametrize(
    ("way", "walk"), [("fused", "MLP and its norm, fused"), ("head-wise", "head-wise attention and its norm")]
)
def test_calls_before_the_first_product(way: str, walk: str) -> None:
    """Today's row below the walk's first."""
    table = rows_of("performance", "The code between a layer and its first product")
    first = next(number for number, row in enumerate(table) if row[0] == walk)
    today = next(row for row in table[first:] if row[1].startswith("today"))
    command = [sys.executable, script("walk").__file__, "--way", way]  # a process of its own: nothing ran before it
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert today[2:5] == [str(found[key]) for key in ("calls", "files", "switches")]
