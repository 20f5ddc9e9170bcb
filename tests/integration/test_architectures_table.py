"""docs/architectures.jsonl is what ``benchmarks/architectures.py`` writes today, for a sample of its lines."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "architectures.jsonl"

if not FILE.exists():
    pytest.skip("no docs here: the tests run from an installed package", allow_module_level=True)

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
def header() -> dict[str, str]:
    header, _ = importlib.import_module("site_hooks").read_architectures()
    return header


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    _, records = importlib.import_module("site_hooks").read_architectures()
    return {record["architecture"]: record for record in records}


@pytest.mark.parametrize("architecture", SAMPLE)
def test_lines_are_todays(
    architecture: str, architectures: ModuleType, header: dict[str, str], records: dict[str, dict[str, Any]]
) -> None:
    if (torch.__version__, transformers.__version__) != (header["torch"], header["transformers"]):
        pytest.skip(f"{FILE.name} was written with torch {header['torch']}, transformers {header['transformers']}")
    today = architectures.line_of(architectures.examine(architecture))
    assert today == records[architecture], f"if that is what you meant, run `{header['command']}` and look at the diff"


def test_no_line_is_wrong(records: dict[str, dict[str, Any]]) -> None:
    states = [record["state"] for record in records.values()]
    assert not {"WRONG", "raises"} & set(states)
    assert states.count("equal") > 400


def test_the_file_was_written_with_the_pinned_transformers(header: dict[str, str]) -> None:
    pins = (ROOT / "constraints" / "highest.txt").read_text(encoding="utf-8")
    assert re.findall(r"^transformers==(\S+)$", pins, re.MULTILINE) == [header["transformers"]]


def test_the_site_shows_every_line() -> None:
    """As a row, whatever HTML would make of an error's text; the counts above the table are of these rows."""
    site_hooks = importlib.import_module("site_hooks")
    block = {"blocks": 2, "where": "layers.*.mlp", "class_name": "MLP"}
    tiled = {**block, "operator": "generic", "why": "a <b> c", "together": "norm + mlp"}
    empty = {"detail": "", "tiled": [], "left": [], "released": ""}
    left = [{**block, "why": "tower"}]
    records = [
        {**empty, "architecture": "a", "state": "equal", "tiled": [tiled], "left": left, "released": "other <state>"},
        {**empty, "architecture": "b", "state": "not built", "detail": "it needs <image>"},
    ]
    html = site_hooks.architectures_table(records)
    assert html.count("<tr data-state=") == 2 and 'value="not built">not built (1)' in html
    text = re.sub(r"<[^>]+>", "", html)
    assert "2 × layers.*.mlp MLP, generic: a &lt;b&gt; c; with norm + mlp" in text and "needs &lt;image&gt;" in text
    assert "other &lt;state&gt;" in text
    summary = site_hooks.architectures_summary(site_hooks.read_architectures()[0], records)
    assert "2 model types" in summary and "1 tiled with gradients equal" in summary and "2 blocks ran" in summary


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


def test_the_file_depends_on_nothing_but_the_records(architectures: ModuleType) -> None:
    block = {"name": "layers.0.mlp", "class_name": "MLP", "path": "generic", "not_fused": "a | b"}
    blocks = [{**block, "together": ["norm", "mlp"]}, {**block, "name": "layers.1.mlp", "together": ["norm", "mlp"]}]
    first = architectures.Record("a", blocks=blocks, result="equal", reached=1)
    second = architectures.Record("b", error="it needs <image> [2, *]")
    text = architectures.lines([first, second], "2026-01-01")
    assert text == architectures.lines([second, first], "2026-01-01")
    header, a, b = map(json.loads, text.splitlines())
    assert header["date"] == "2026-01-01"
    assert a["tiled"] == [
        {"blocks": 2, "where": "layers.*.mlp", "class_name": "MLP", "operator": "generic", "why": "a | b",
         "together": "norm + mlp"}
    ]  # fmt: skip
    assert (a["state"], a["detail"]) == ("equal", "1 of 2 blocks had a gradient")
    assert (b["state"], b["detail"]) == ("not built", "it needs <image> [2, *]")


def test_the_command_writes_a_line_per_architecture(
    architectures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sys, "argv", ["architectures.py", "--only", "llama", "--write", str(file)])
    verbosity = transformers.logging.get_verbosity()
    try:
        architectures.main()
    finally:
        transformers.logging.set_verbosity(verbosity)
    _, record = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert (record["architecture"], record["state"]) == ("llama", "equal")
    assert [(block["blocks"], block["operator"]) for block in record["tiled"]] == [(2, "fused")]
    assert "1 architectures: 1 equal, 0 WRONG" in capsys.readouterr().out


def test_a_step_that_never_ends_is_ended(architectures: ModuleType) -> None:
    with pytest.raises(architectures.TookTooLong), architectures.at_most(0.1):
        while True:
            pass
