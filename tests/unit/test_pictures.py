"""Pictures and the tables of lengths are what their scripts make of the committed results."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"

if not PICTURES.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

sys.path.insert(0, str(PICTURES))
draw = import_module("draw")


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


def test_the_ladders_tables_are_the_files() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    ladders = import_module("ladders")
    assert ladders.PAGE.read_text(encoding="utf-8") == ladders.page(), "python docs/ladders.py"
    shown = {found[1] for found in ladders.MARKED.findall(ladders.PAGE.read_text(encoding="utf-8"))}
    assert shown == {path.stem for path in ladders.RESULTS.glob("ladder-*.jsonl")}
