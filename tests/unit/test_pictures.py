"""The pictures are what their script draws, and README and docs say what their results say."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"

if not PICTURES.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

sys.path.insert(0, str(PICTURES))
draw = import_module("draw")


def rows(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    drawn = str(draw.PICTURES[name]())
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python docs/pictures/draw.py"
    picture = ElementTree.fromstring(drawn)
    width, height = (float(picture.attrib[key]) for key in ("width", "height"))
    assert len(picture.attrib["aria-label"]) > 60 and "prefers-color-scheme: dark" in drawn
    for shape in picture.iter():
        x, y = float(shape.attrib.get("x", 0)), float(shape.attrib.get("y", 0))
        assert 0 <= x and x + float(shape.attrib.get("width", 0)) <= width, shape.attrib
        assert 0 <= y and y + float(shape.attrib.get("height", 0)) <= height, shape.attrib


PHONE = 368
"""Pixels for the page's text on a phone of 400."""


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_can_be_read_on_a_phone(name: str) -> None:
    """Letters of at least 10 pixels, and no line that runs off the picture, in a wide font (DejaVu Sans) too."""
    picture = ElementTree.fromstring(str(draw.PICTURES[name]()))
    sizes = {kind: float(size) for kind, size in re.findall(r"\.(\w+) \{ font-size: ([\d.]+)px", draw.STYLE)}
    [usual] = re.findall(r"text \{ font: ([\d.]+)px", draw.STYLE)
    width = float(picture.attrib["width"])
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        kinds = text.attrib["class"].split()
        size = next((sizes[kind] for kind in kinds if kind in sizes), float(usual))
        assert size * PHONE / width >= 10, text.text
        length = len(text.text or "") * size * (0.69 if {"bold", "big"} & set(kinds) else 0.61)
        anchor, x = text.attrib["text-anchor"], float(text.attrib["x"])
        left = x - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
        assert left >= 0 and left + length <= width, f"{text.text} is {length:.0f} wide"


def test_every_picture_is_shown_with_words_for_those_who_cannot_see_it() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in draw.PICTURES:
        shown = re.findall(rf"!\[([^\]]+)\]\(pictures/{name}\.svg\)", pages)
        assert shown and all(len(words) > 20 for words in shown), name


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_headline_is_the_ladders(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lengths = {row["rung"]: row["max_length"] for row in rows("ladder-h100.jsonl")}
    first, longest = lengths["baseline"], max(lengths.values())
    assert f"{first:,} tokens become {longest:,}" in text.replace("\n", " ")
    if page == "README.md":
        assert f"{lengths['+ tiled MLP']:,}" in text and "bench ladder --model llama-8b --device h100" in text
    memory = json.loads((PICTURES / "memory.json").read_text(encoding="utf-8"))
    for side in ("untiled", "tiled"):
        assert f"{memory[side]['peak_bytes'] / 2**20:.0f} MiB" in text


def test_the_ladders_tables_are_the_files() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    ladders = import_module("ladders")
    assert ladders.PAGE.read_text(encoding="utf-8") == ladders.page(), "python docs/ladders.py"
    shown = {found[1] for found in ladders.MARKED.findall(ladders.PAGE.read_text(encoding="utf-8"))}
    assert shown == {path.stem for path in ladders.RESULTS.glob("ladder-*.jsonl")}


def test_the_readme_is_short_and_its_counts_are_those_of_the_pages() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    engines = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    [cases] = re.findall(r"grid\.table`: (\d+) cases", engines)
    assert f"[{cases} cases](docs/engines.md)" in readme
    architectures = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    [(tried, equal, wrong)] = re.findall(r"\*\*(\d+) architectures: (\d+) equal, (\d+) WRONG", architectures)
    said = " ".join(readme.split())
    assert wrong == "0" and f"Of [{tried} architectures](docs/architectures.md) of transformers {equal} were" in said


def test_the_mlps_table_is_that_of_the_performance_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for ours, theirs in (
        ("untiled", "untiled"), ("PyTorch's checkpoint per tile", "PyTorch's checkpoint per tile"),
        ("Liger 0.8.5, DeepSpeed 0.19.8 (tiled MLP)", "Liger 0.8.5, DeepSpeed 0.19.8 (`TiledMLP`)"),
        ("**seqtile**", "fused, norm in the tile"),
    ):  # fmt: skip
        [products, layer, alone] = numbers(readme, ours)
        _, peak_alone, units, peak_layer = numbers(performance, theirs)
        assert (products, layer, alone) == (units, peak_layer, peak_alone)


METHODS = {
    "untiled": ["untiled"],
    "fused": ["fused, norm in the tile", "**fused**"],
    "generic": ["generic, norm in the tile"],
    "tile-checkpoint": ["PyTorch's checkpoint per tile"],
    "liger": ["Liger 0.8.5, DeepSpeed 0.19.8 (`TiledMLP`)", "Liger"],
    "deepspeed": ["Liger 0.8.5, DeepSpeed 0.19.8 (`TiledMLP`)", "DeepSpeed"],
    "deepspeed-compute": ["DeepSpeed 0.19.8 (`sequence_tiled_compute`)"],
}
"""The names in the result files and on the page, in its first table and in its second."""


def test_the_performance_page_is_the_result_files() -> None:
    _, _, counted, timed, _ = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split("\n## ", 4)
    measured = [row for file in sorted((ROOT / "benchmarks/results").glob("cpu-*.jsonl")) for row in rows(file.name)]
    seen = 0
    for row in (row for row in measured if row.get("units")):
        names, peak = METHODS[row["method"]], row["peak_allocated_bytes"] / 2**20
        columns = slice(2, 4) if row["checkpoint"] else slice(0, 2)
        assert numbers(counted, names[0])[columns] == [float(f"{row['units']:.3g}"), round(peak)], row
        if row.get("ratios"):
            pairs = " ".join(f"{ratio:.2f}" for ratio in row["ratios"])
            line = (
                rf"^\| {re.escape(names[1] if len(names) > 1 else names[0])} \| \**{row['ratio']:.2f}\** \| {pairs} \|$"
            )
            assert re.search(line, timed, re.M), line
            seen += 1
    assert seen == 4


def numbers(text: str, name: str) -> list[float]:
    """The cells of the first row with this name."""
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.M)
    assert row, name
    return [float(cell.strip(" *")) for cell in row[1].split("|")]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_first_whom_it_is_for(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if included := re.match(r'--8<-- "(.+)"', text):
        text = (ROOT / included[1]).read_text(encoding="utf-8")
    if page.stem == "index":  # the front page
        return
    _, opening, *_ = text.split("\n\n")
    assert opening.startswith("For ") and opening.count(".") >= 1, opening
