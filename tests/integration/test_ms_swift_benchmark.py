"""`python benchmarks/ms_swift.py`: a published benchmark beside its run here, by hand-made rows and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ms_swift
from block_on_engine import run_ranks
from seqtile._errors import UserError
from seqtile.bench.cell import Cell


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "ddp"], "fsdp2, zero3"),
        (["--scale", "0"], "--scale 0"),
        (["--scale", "1024"], "--scale 1024"),
        (["--ranks", "0"], "--ranks 0"),
        (["--repeats", "4"], "at least 5"),
        (["--tokens", "-3"], "whole numbers from 1"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ms_swift.py", *arguments, "--out", str(tmp_path / "out")])
    assert ms_swift.main() == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("ms_swift.py: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_zero3_without_deepspeed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms_swift, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install 'seqtile\[deepspeed\]'"):
        ms_swift.check("zero3", 16, None, 5)
    ms_swift.check("fsdp2", 16, None, 5)


def test_the_published_tables_are_whole() -> None:
    for engine in ms_swift.ENGINES:
        lines = ms_swift.published(engine)
        assert {line.device for line in lines} == {"h800", "npu-910b"}
        for device in ("h800", "npu-910b"):
            assert [line.tokens for line in lines if line.device == device] == [2048 * 2**n for n in range(7)]
    longest = ms_swift.published("fsdp2")[6]
    assert (longest.regular_ms, longest.tiled_ms, longest.regular_mb, longest.tiled_mb) == (
        391.5,
        501.15,
        22240.0,
        10176.0,
    )


def published_rows() -> list[dict[str, Any]]:
    found = []
    for (method, tile), ms, mib in zip(ms_swift.COLUMNS, (100.0, 110.0, 105.0), (200, 50, 60), strict=True):
        found.append({
            "method": method, "tile": tile, "tokens": 131072, "step_ms": ms, "ranks": 1, "tiles": 4,
            "peak_total_bytes": mib * 2**20, "engine": "fsdp2", "gradient_error": 1e-7, "device_name": "a CPU",
            "hidden": 4, "intermediate": 8, "dtype": "float32",
        })  # fmt: skip
    return found


def test_the_published_columns_stand_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    ms_swift.print_published(published_rows())
    shown = capsys.readouterr().out
    assert "391.5 > 501.1" in shown and "+28%" in shown and "-54%" in shown  # published, H800
    assert "601.3 > 791.4" in shown and "+32%" in shown  # published, NPU
    assert "100.0 > 110.0" in shown and "-75%" in shown  # ours
    assert shown.count("other hardware") == 2 and "1 rank," in shown


def test_the_published_summary_has_both_sides() -> None:
    lines = ms_swift.summary(published_rows())
    assert lines[0].startswith(
        "131,072 tokens, tiles 4, 1 rank: +10% time, -75% memory (published: h800 +28% time -54%"
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_the_published_benchmark_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--scale", "64", "--tokens", "2048", "--device", "cpu", "--engine", "fsdp2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["ms_swift.py", *arguments])
    assert ms_swift.main() == 0
    [file] = tmp_path.glob("*.jsonl")
    untiled, tiled, chosen = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(row["method"], row["tile"]) for row in (untiled, tiled, chosen)] == [
        ("untiled", "auto"), ("fused", "shards:4"), ("fused", "auto"),
    ]  # fmt: skip
    for row in (untiled, tiled, chosen):
        assert row.keys() >= {"date", "command", "device_name", "versions", "python", "kind"}
        assert row["command"].startswith("python benchmarks/ms_swift.py --scale 64") and row["versions"]["torch"]
        assert row["ranks"] == 2 and row["engine"] == "fsdp2"
        assert row["gradient_error"] < 1e-6  # averaged over two ranks with the same input: that of one process
    assert tiled["peak_total_bytes"] < untiled["peak_total_bytes"]
    out = capsys.readouterr().out
    assert "18.6 > 23.5" in out and "other hardware (h800, 2 ranks)" in out and "2 ranks, 64 x 192" in out


@pytest.mark.distributed
def test_a_rank_that_fails_is_a_result_and_ends_the_others() -> None:
    cell = Cell(16, 48, 64, "untiled", dtype="float32")
    found = run_ranks({"engine": "fsdp2", "cell": {**cell.row(), "dtype": "float31"}}, 2, timeout_s=500)
    assert "float31" in found["error"]
