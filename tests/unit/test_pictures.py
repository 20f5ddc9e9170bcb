"""Pictures and the tables of planning are what their scripts make of the committed results."""

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


def test_the_tables_of_planning_are_the_files() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    tables = import_module("tables")
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(), "python docs/tables.py"
    shown = {name for _, name, _ in tables.MARKED.findall(text)}
    ladders = {path.stem for path in tables.RESULTS.glob("ladder-*.jsonl")}
    assert shown == ladders | {"choices", "choice-times", "frames", "plan-accuracy", "plan-constants", "plan-published"}
