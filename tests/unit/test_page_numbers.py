"""Numbers of pages and README that arithmetic, another page or the source gives: no page says another than these."""

from __future__ import annotations

import json
import math
import re
from importlib import import_module
from pathlib import Path

import pytest

from seqtile.tiling import FUSED_WIDTHS, BlockShape, parse_tile

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs").is_dir() or not (ROOT / "benchmarks").is_dir():
    pytest.skip("no pages here: the tests run from an installed package", allow_module_level=True)


def page(name: str) -> str:
    """Its text on one line for each paragraph, without bold."""
    path = ROOT / name if "." in name else ROOT / "docs" / f"{name}.md"
    return re.sub(r"(?<=\S)\n(?=[^\s|#*`-])", " ", path.read_text(encoding="utf-8").replace("**", ""))


def table(name: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    [section] = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", page(name), re.M | re.S)
    found = re.search(r"(?:^\|.*\n?)+", section, re.M)
    assert found, f"docs/{name}.md has no table below {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]


def says(name: str, *sentences: str) -> None:
    text = page(name)
    assert [one for one in sentences if one not in text] == [], f"{name} says something else"


TOKENS, HIDDEN, LAYERS, HEADS_OF = 10_000_000, 4096, 32, 8
GIB = 2**30


@pytest.mark.parametrize(("devices", "column"), [(16, 2), (32, 3)])
def test_ten_million_tokens(devices: int, column: int) -> None:
    """Every row of the table, from the formulas that it gives."""
    tensor = 2 * HIDDEN * TOKENS / devices / GIB
    node = 8 / devices
    attention, products = 4.5 * 2 * TOKENS**2 * HIDDEN * LAYERS, 5.5e10 * TOKENS
    kept = 3.5 / 4.5 * attention
    hours = 3600 * devices * 0.4 * 989e12
    says("longest", f"sum / (`P` x {0.4 * 989e12:.2e})".replace("e+", "e"))
    [exchanged] = [row[0] for row in table("longest", "To 10 million tokens") if row[0].startswith("the exchange")]
    times = float(re.findall(r", (\d) and (\d) of them", exchanged)[0][column - 2])
    rows = [row[column] for row in table("longest", "To 10 million tokens")]
    assert rows == [
        f"{TOKENS // devices:,}", f"{tensor:.2f} GiB", f"{14.1 * tensor:.1f} GiB", f"{11.1 * tensor:.1f} GiB",
        f"{times * tensor:.1f} GiB", f"{LAYERS * 2 * HIDDEN * TOKENS * node / GIB:,.0f} GiB",
        f"{18 * 8.03e9 * node / GIB:.0f} GiB", f"{attention:.2e}".replace("e+", "e"),
        f"{products:.1e}".replace("e+", "e"), f"{(attention + products) / hours:.1f} hours",
        f"{(kept + products) / hours:.1f} hours",
    ]  # fmt: skip


def ladder(name: str) -> dict[str, int]:
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["rung"]: row["max_length"] for row in map(json.loads, lines) if "skipped" not in row}


def test_what_is_said_of_the_ladders() -> None:
    """The sentences between the tables, from the tables' rows."""
    rungs = ladder("ladder-h200")
    alst, ours = rungs["+ checkpoints on the host"], rungs["- attention saved"]
    inputs = LAYERS * 2 * HIDDEN
    says(
        "longest",
        f"The last rung is {ours / alst - 1:.0%} longer".replace("%", " %"),
        f"At {ours:,} tokens there are {ours * inputs / GIB:.0f} GiB of layer inputs",
        f"one takes {inputs // 1024} KiB of layer inputs",
    )
    rungs = ladder("ladder-qwen3.5-h200")
    longer = rungs["- attention saved"] / rungs["+ checkpoints on the host"] - 1
    says("longest", f"ALST's recipe here too; the last is {longer:.0%} longer".replace("%", " %"))


def test_tiles_by_unsloths_options() -> None:
    """Number and largest tile of each row, by the rules of today; Unsloth's arctic is tiles of ``hidden`` tokens."""
    rows = re.findall(r"^\| ([\d,]+), (\d+), (\d+) \|(.*)\|$", page("unsloth"), re.M)
    assert len(rows) == 5
    for tokens, hidden, intermediate, cells in rows:
        n, d, f = int(tokens.replace(",", "")), int(hidden), int(intermediate)
        theirs, arctic, gib, _, frozen, full = (cell.strip() for cell in cells.split("|"))
        assert theirs == f"{math.ceil(n / d)}, {min(n, d)}"
        for cell, rule, trained in (
            (arctic, "arctic", 0), (frozen, f"memory:{gib}GiB", 0), (full, f"memory:{gib}GiB", 3 * d * f),
        ):  # fmt: skip
            shape = BlockShape(d, f, 2, trained, 2, "cuda", FUSED_WIDTHS)
            if cell.startswith("refused"):
                assert f"the sums take {shape.sum_bytes / GIB:.2f} GiB" in cell
                with pytest.raises(ValueError):
                    parse_tile(rule).tile_sizes(n, shape)
                continue
            sizes = parse_tile(rule).tile_sizes(n, shape)
            assert cell == f"{len(sizes)}, {max(sizes)}", (tokens, rule)


def test_products_of_an_mlp() -> None:
    """The performance page's are in its result files; the other pages repeat them."""
    rows = {row[0]: row[1:] for row in table("performance", "One MLP, counted")}
    alone, _, layer, _ = rows["untiled"]
    tiled_alone, _, tiled_layer, _ = rows["fused, norm in the tile"]
    other_alone, _, other_layer, _ = rows["Liger 0.8.5, DeepSpeed 0.19.8 (`TiledMLP`)"]
    assert tiled_layer == layer
    says("README.md", f"two products more than untiled ({tiled_alone} for {alone})")
    says(
        "how-it-works",
        f"({layer} matrix products untiled and tiled; other tiled MLPs take {other_layer})",
        f"Without activation checkpointing it takes {tiled_alone} products instead of {alone}",
    )
    says("techniques", f"(MLP {alone} → {layer})", f"{layer} and {tiled_layer}; alone {alone} → {tiled_alone}")
    ours = f"{other_alone} GEMM units, {other_layer} under a checkpoint | {tiled_alone}"
    for name in ("axolotl", "deepspeed", "liger", "ms-swift", "unsloth"):
        says(name, ours)
    counted = dict(re.findall(r"^\| (untiled|seqtile) \| (.*) \|$", page("internals"), re.M))
    assert counted["untiled"].split(" | ")[:2] == [alone, layer]
    assert counted["seqtile"].split(" | ")[:2] == [tiled_alone, tiled_layer]
    memory = float(rows["fused, norm in the tile"][1])
    hidden, buffer, gradients = 64, 16384 // 8 * 2816 * 4 // 2**20, round(3 * 1024 * 2816 * 4 / 2**20)
    assert memory == 2 * hidden + 4 * buffer + gradients
    says("performance", f"{memory:.0f} MiB is output {hidden}, input gradient {hidden}, four `[tile, F]` buffers of")


def test_architectures_of_the_loss() -> None:
    rows = table("head", "Which models")
    [(all_of_them, _)] = re.findall(r"causal language models, (\d+) in (\S+),", page("head"))
    assert sum(int(row[0]) for row in rows) == int(all_of_them)
    for count, words in rows:
        if ": " in words and words.split(": ")[0] in (
            "refused, since their loss is computed inside `forward`", "not built tiny from their config alone",
        ):  # fmt: skip
            assert len(words.split(": ", 1)[1].split(", ")) == int(count), words


OTHERS = {"LoRA in Triton's kernels": "LoRA", "Liger's GLU": "one process"}
"""Runs in other kernels, by the run that computes the same; every other run without a row of its own is sharded."""


@pytest.mark.parametrize("heading", ["axolotl", "ms-swift"])
def test_runs_in_frameworks_are_those_without_seqtile(heading: str) -> None:
    """Each run with seqtile beside the same run without it; sharded ones beside DDP's."""
    rows = {row[0]: [[float(number) for number in cell.split()] for cell in row[1:] if cell[:1].isdigit()]
            for row in table("frameworks", heading)}  # fmt: skip
    compared = 0
    for name, curves in rows.items():
        if ", seqtile" not in name:
            continue
        plain = name.partition(", seqtile")[0]
        base = rows.get(plain) or rows[OTHERS.get(plain, "DDP")]
        assert [len(curve) for curve in curves] == [len(curve) for curve in base]
        for ours, untiled in zip(curves, base, strict=True):
            assert ours == pytest.approx(untiled, rel=1e-5), name
        compared += 1
    assert compared >= 5


def test_what_is_assumed_are_the_plans_constants() -> None:
    constants = import_module("plan_constants")
    rows = {row[0]: row[1:] for row in table("planning-reference", "What is assumed")}
    assert rows.keys() == constants.CONSTANTS.keys()
    for name, constant in constants.CONSTANTS.items():
        assert rows[name][0] == constants.shown(constant) and rows[name][-1] == constant.source
    assert f"`{constants.ASKED}`: " in page("planning-reference")


def test_the_demos_step_is_the_one_that_was_measured() -> None:
    found = json.loads((ROOT / "docs" / "pictures" / "memory.json").read_text(encoding="utf-8"))
    [weights] = re.findall(r"([\d,]+) parameters", found["model"])
    size = f"{int(weights.replace(',', '')) / 1e6:.1f}M parameters"
    for name in ("README.md", "index"):
        says(name, f"{size}, {found['tokens']:,} tokens")
    says("start", f"{size} on real text")
