"""docs/architectures.md is what ``benchmarks/architectures.py`` writes today, for a sample of its rows."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architectures.md"

if not PAGE.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

COMMAND = "python benchmarks/architectures.py --write docs/architectures.md"
SAMPLE = ("bart", "bert", "deepseek_v3", "gemma3", "gpt2", "llama", "mamba", "qwen3_next", "t5", "vit")
"""Dense and sparse, causal, encoders, both, with a vision tower left alone, and one with nothing to tile."""


@pytest.fixture(scope="module")
def architectures() -> Iterator[ModuleType]:
    logger = logging.getLogger("seqtile")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("architectures")
    logger.setLevel(level)  # the command silences it
    for name in ("architectures", "tiny_models"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def _tables(text: str) -> dict[str, list[str]]:
    """The rows below each heading, without the two of the table's head."""
    sections = [section.partition("\n") for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return {name: re.findall(r"^\| .*\|$", body, re.MULTILINE)[1:] for name, _, body in sections}


def _architectures(rows: list[str]) -> set[str]:
    return {row.split(" | ")[0].removeprefix("| ") for row in rows}


@pytest.mark.parametrize("architecture", SAMPLE)
def test_rows_are_todays(architecture: str, architectures: ModuleType, text: str) -> None:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__},"
    if versions not in text:
        pytest.skip(f"docs/architectures.md was written with other versions than {versions}")
    record = architectures.examine(architecture)
    today = [row for rows in architectures.rows_of(record).values() for row in rows]
    written = [row for rows in _tables(text).values() for row in rows if row.startswith(f"| {architecture} |")]
    assert today == written, (
        f"docs/architectures.md says\n{chr(10).join(written)}\nand today it is\n{chr(10).join(today)}\n"
        f"If that is what you meant, run `{COMMAND}` and look at the page's diff."
    )


def test_no_row_is_wrong(text: str) -> None:
    tiled = _tables(text)["Tiled"]
    wrong = [row for row in tiled if "| WRONG" in row]
    assert not wrong, "gradients differ:\n" + "\n".join(wrong)
    assert _architectures([row for row in tiled if "| raises: " in row]) == set()
    assert len(_architectures([row for row in tiled if row.rstrip(" |").endswith("| equal")])) > 400


def test_the_page_was_written_with_the_pinned_transformers(text: str) -> None:
    pins = (ROOT / "constraints" / "highest.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^transformers==(\S+)$", pins, re.MULTILINE)
    assert re.findall(r"transformers ([\d.]+),", text)[:1] == pinned, f"run `{COMMAND}`"


def test_the_counts_are_of_the_rows(text: str) -> None:
    """The summary is of the same run as the tables."""
    tables = _tables(text)
    said = {state: int(number) for number, state in re.findall(r"(\d+) ([a-zA-Z ]+?)[,;]", text.partition("\n\n- ")[0])}
    results = {row.split(" | ")[0]: row.rsplit(" | ", 1)[1] for row in tables["Tiled"]}
    assert said["equal"] == sum(result.startswith("equal") for result in results.values())
    assert said["not compared"] == sum(result.startswith("could not be run") for result in results.values())
    assert said["left untiled"] + said["refused"] == len(tables["Nothing tiled"])
    assert said["not built"] == len(tables["Not built"])


def test_a_wrong_gradient_is_seen(architectures: ModuleType) -> None:
    """One percent in one gradient, one that is small beside the others, one that is missing, one that is no number."""
    draw = torch.Generator().manual_seed(0)
    loss = torch.tensor(2.0)
    good = {"head": 1e3 * torch.randn(8, 8, generator=draw), "mlp": torch.randn(8, 8, generator=draw), "none": None}
    assert architectures.difference((loss, dict(good)), (loss, good)) == "equal"
    rounded = {**good, "mlp": good["mlp"] * (1 + 1e-6)}
    assert architectures.difference((loss, rounded), (loss, good)) == "equal"
    for bad in (
        {**good, "head": good["head"] * 1.01},
        {**good, "mlp": good["mlp"] * 1.01},
        {**good, "mlp": None},
        {**good, "none": torch.zeros(2)},
        {**good, "mlp": good["mlp"] * float("nan")},
    ):
        assert architectures.difference((loss, bad), (loss, good)).startswith("WRONG")
    assert architectures.difference((loss * 1.01, good), (loss, good)).startswith("WRONG")


def test_the_page_depends_on_nothing_but_the_records(architectures: ModuleType) -> None:
    block = {
        "name": "layers.0.mlp",
        "class_name": "MLP",
        "kind": "mlp",
        "path": "generic",
        "not_fused": "a | b",
        "why": "",
    }
    first = architectures.Record("a", blocks=[{**block, "together": ["norm", "mlp"]}], result="equal", reached=1)
    second = architectures.Record("b", error="it needs <image> [2, *]")
    page = architectures.page([first, second], "2026-01-01")
    assert page == architectures.page([second, first], "2026-01-01")
    assert r"| a | 1 × `layers.*.mlp` | MLP | generic: a \| b | norm + mlp | equal |" in page
    assert r"| b | it needs &lt;image> \[2, \*\] |" in page


def test_the_command_writes_a_line_per_architecture(
    architectures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sys, "argv", ["architectures.py", "--only", "llama", "--jsonl", str(lines)])
    verbosity = transformers.logging.get_verbosity()
    try:
        architectures.main()
    finally:
        transformers.logging.set_verbosity(verbosity)
    (record,) = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
    assert record["architecture"] == "llama" and record["result"] == "equal"
    assert [block["path"] for block in record["blocks"]] == ["fused", "fused"]
    assert "1 architectures: 1 equal, 0 WRONG" in capsys.readouterr().out


def test_a_step_that_never_ends_is_ended(architectures: ModuleType) -> None:
    with pytest.raises(architectures.TookTooLong), architectures.at_most(0.1):
        while True:
            pass
