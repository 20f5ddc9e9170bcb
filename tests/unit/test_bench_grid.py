"""`seqtile bench`: what is asked for, what comes out, and what a failed cell looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqtile._errors import UserError
from seqtile.bench import child, grid, methods, plots
from seqtile.bench.cell import SHAPES, TIMED_OUT, Cell, Worker, run_child
from seqtile.cli import bench_show, main
from seqtile.options import TilingOptions

CPU = {"device_type": "cpu", "device_count": 0, "device_name": "a CPU", "versions": {"torch": "0"}}
HALF = TilingOptions(keep=0.5)
GPU = {"device_type": "npu", "device_count": 1, "device_name": "an NPU", "versions": {"torch": "0"}}


def words(**changes: Any) -> dict[str, Any]:
    given = {
        "shape": None, "hidden": None, "intermediate": None, "tokens": None, "tiles": "auto",
        "methods": "untiled,fused",
        "checkpoint": "both", "train": "full", "dtype": None, "device": None, "repeats": 5, "pairs": 0,
        "options": TilingOptions(),
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench"], "say what to measure"),
        (["bench", "mlp", "--shape", "llama"], "llama-8b, qwen3-8b, ms-swift"),
        (["bench", "mlp", "--hidden", "64"], "give both"),
        (["bench", "mlp", "--hidden", "0", "--intermediate", "4"], "at least 1 each"),
        (["bench", "mlp", "--shape", "llama-8b", "--hidden", "4", "--intermediate", "4"], "one of the two"),
        (["bench", "mlp", "--tokens", "8K"], "'8K' is no number of tokens"),
        (["bench", "mlp", "--tokens", "0"], "'0' is no number of tokens"),
        (["bench", "mlp", "--tiles", "shards:0"], "not a tile rule"),
        (["bench", "mlp", "--tiles", "memory:1B"], "--tiles memory:1B"),
        (["bench", "mlp", "--methods", "fast"], "'fast' is unknown"),
        (["bench", "mlp", "--methods", ","], "is empty"),
        (["bench", "mlp", "--checkpoint", "maybe"], "no, yes, both"),
        (["bench", "mlp", "--train", "half"], "full, frozen, lora"),
        (["bench", "mlp", "--dtype", "int8"], "'int8' is unknown"),
        (["bench", "mlp", "--dtype", "float32,float64"], "'float32,float64' is unknown"),
        (["bench", "mlp", "--keep", "lots"], "keep"),
        (["bench", "mlp", "--repeats", "3"], "at least 5"),
        (["bench", "mlp", "--pairs", "-1"], "--pairs -1"),
        (["bench", "step", "--model", "/nowhere"], "'/nowhere' does not exist"),
        (["bench", "step", "--model", ".", "--tokens", "1"], "at least 2"),
        (["bench", "step", "--model", ".", "--tile", "wide"], "not a tile rule"),
        (["bench", "step", "--model", ".", "--tile", "none"], "untiled measures that"),
        (["bench", "step", "--model", ".", "--repeats", "1"], "at least 5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = [] if arguments == ["bench"] else ["--out", str(tmp_path / "out")]
    assert main([*arguments, *out]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("seqtile: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another directory"):
        bench_show.free_stem(str(tmp_path / "file"), "mlp")


def test_results_are_never_written_over(tmp_path: Path) -> None:
    directory, first = bench_show.free_stem(str(tmp_path), "mlp")
    (directory / f"{first}.jsonl").write_text("kept")
    again = {bench_show.free_stem(str(tmp_path), "mlp")[1]}
    assert first not in again


def test_the_defaults_follow_the_device() -> None:
    asked = grid.build_grid(**words())
    _, on_cpu = grid.resolve_grid(asked, CPU)
    _, on_npu = grid.resolve_grid(asked, GPU)
    assert {(c.hidden, c.dtype, c.device) for group in on_cpu for c in group} == {(512, "float32", "cpu")}
    assert {(c.hidden, c.dtype, c.device) for group in on_npu for c in group} == {(4096, "bfloat16", "npu")}
    assert [len(group) for group in on_npu] == [2] * 6  # three lengths, alone and under a checkpoint
    with pytest.raises(UserError, match="found npu"):
        grid.resolve_grid(grid.build_grid(**words(device="cuda")), GPU)
    with pytest.raises(UserError, match="found no accelerator"):
        grid.resolve_grid(grid.build_grid(**words(device="npu")), CPU)


def test_pairs_run_each_tile_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []

    def run_pairs(cell: Cell, others: list[str], pairs: int) -> list[dict[str, Any]]:
        assert others == ["generic"]
        ran.append(cell.options.tile)
        return []

    monkeypatch.setattr(grid, "run_pairs", run_pairs)
    given = words(tiles="shards:2,shards:4", methods="untiled,generic", checkpoint="no", tokens="8", pairs=5)
    asked, groups = grid.resolve_grid(grid.build_grid(**given), CPU)
    grid.run_grid(asked, groups, CPU, tmp_path / "rows.jsonl")
    assert ran == ["shards:2", "shards:4"]


def test_untiled_runs_once_whatever_the_tile_rules() -> None:
    asked = grid.build_grid(
        **words(tiles="auto,shards:4", tokens="64", checkpoint="no", shape="ms-swift", options=HALF)
    )
    _, [cells] = grid.resolve_grid(asked, CPU)
    assert [(c.method, c.options.tile, c.options.keep) for c in cells] == [
        ("untiled", "auto", 0.0), ("fused", "auto", 0.5), ("fused", "shards:4", 0.5),
    ]  # fmt: skip
    assert (cells[0].hidden, cells[0].intermediate) == SHAPES["ms-swift"]


def rows() -> list[dict[str, Any]]:
    base = {
        "hidden": 4, "intermediate": 8, "checkpoint": True, "train": "full", "dtype": "float32", "device": "cpu",
        "device_name": "a CPU", "tile": "auto", "tiles": 8, "units": 11.0, "gradient_error": 1e-7, "keep": 0.0,
    }  # fmt: skip
    sizes = {("untiled", 1024): (10.0, 400), ("fused", 1024): (11.0, 100), ("fused", 2048): (20.0, 150)}
    found = [
        {**base, "method": method, "tokens": tokens, "step_ms": ms, "peak_allocated_bytes": mib * 2**20}
        for (method, tokens), (ms, mib) in sizes.items()
    ]
    return [*found, {**base, "method": "untiled", "tokens": 2048, "error": "out of memory"}]


def test_ratios_are_to_untiled_at_the_same_length() -> None:
    ratios = {(row["method"], row["tokens"]): row.get("time_ratio") for row in grid.with_ratios(rows())}
    assert ratios == {("untiled", 1024): 1.0, ("fused", 1024): 1.1, ("fused", 2048): None, ("untiled", 2048): None}
    peaks = [row["peak_ratio"] for row in grid.with_ratios(rows()) if "peak_ratio" in row]
    assert peaks == [1.0, 0.25]


def test_the_ratio_of_pairs_is_theirs_and_not_that_of_the_medians() -> None:
    paired = [{**row, **({"ratio": 0.9} if row["method"] == "fused" else {})} for row in rows()]
    assert grid.with_ratios(paired)[1]["time_ratio"] == 0.9


def test_pairs_have_an_untiled_row_for_each_tile_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paired = [*rows()[:2], *({**row, "tile": "shards:2", "step_ms": 2 * row["step_ms"]} for row in rows()[:2])]
    assert [row["time_ratio"] for row in grid.with_ratios(paired)] == [1.0, 1.1, 1.0, 1.1]
    labels: list[str] = []
    draw = plots._line
    monkeypatch.setattr(plots, "_line", lambda *a: (labels.append(a[-1]["label"]), draw(*a))[1])
    plots.plot_grid(paired, tmp_path, "mlp")
    assert labels[::2] == ["untiled", "fused, auto", "fused, shards:2"]


def test_the_summary_says_when_untiled_did_not_fit() -> None:
    [line] = grid.grid_summary(rows())
    assert "2,048 tokens" in line and "untiled did not run" in line
    [line] = grid.grid_summary(rows()[:2])
    assert "1.10x the time and 25% of the memory" in line


def test_an_out_of_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bench_show.print_grid(rows())
    shown = capsys.readouterr().out
    assert "untiled, 2,048 tokens: out of memory" in shown
    assert "25%" in shown and "1.0e-07" in shown


def test_plots_show_every_line_and_the_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k))[1])
    [file] = plots.plot_grid(rows(), tmp_path, "mlp")
    assert file.name == "mlp-full-checkpoint.png" and file.stat().st_size > 10_000
    times, peaks = seen[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in times.lines}
    assert lines == {"untiled": [1.0], "fused": [1.1]}
    crosses = [line for line in peaks.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[2048]]
    assert [list(line.get_ydata()) for line in peaks.lines if line.get_label() == "fused"] == [[100.0, 150.0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"method": "fast"}, "fast"), ({"train": "some"}, "some"), ({"dtype": "int8"}, "int8"), ({"tokens": 0}, "tokens"),
     ({"method": "generic", "keep": 0.5}, "keep"), ({"loss": "tiled"}, "loss='tiled' has no effect"),
     ({"heads": 1}, "heads"), ({"path": "generic"}, "path"), ({"blocks": "none"}, "untiled measures that")],
)  # fmt: skip
def test_a_cell_refuses_what_it_does_not_know(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Cell(8, 16, 4).changed(**changes)


def test_running_out_of_memory_is_a_result() -> None:
    def exhaust(_: dict[str, Any]) -> dict[str, Any]:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    assert child.guarded(exhaust, {}) == {"error": "out of memory", "error_detail": "tried to allocate 9 GiB"}
    on_cpu = child.guarded(lambda _: {"bytes": torch.empty(2**62, dtype=torch.int8).nbytes}, {})
    assert on_cpu["error"] == "out of memory"


def test_a_peer_that_is_missing_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    block = torch.nn.Linear(2, 2)
    for method, package in methods.PACKAGES.items():
        found = child.guarded(
            lambda _, method=method: {"ran": methods.install(block, {"": block}, method, None, 2)}, {}
        )
        assert found["error"] == f"not installed: {package}"


def test_a_process_that_dies_is_a_result() -> None:
    assert "no_such_job" in run_child("no_such_job", {})["error"]
    assert run_child("cell", {"hidden": 8, "intermediate": 16, "tokens": 4, "method": "wrong"})["error"].startswith(
        "method"
    )


def test_rows_are_lines_of_json(tmp_path: Path) -> None:
    from seqtile.bench.environment import append_rows, stamp

    append_rows(tmp_path / "deep" / "rows.jsonl", [stamp(CPU, ["make", "gpu"])])
    append_rows(tmp_path / "deep" / "rows.jsonl", [{"error": "out of memory"}])
    first, second = [json.loads(line) for line in (tmp_path / "deep" / "rows.jsonl").read_text().splitlines()]
    assert first["command"] == "make gpu" and first["device_name"] == "a CPU" and first["date"].startswith("20")
    assert second == {"error": "out of memory"}


def test_a_worker_runs_job_after_job_and_is_replaced_where_one_fails(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "import os, time\n"
        "def pid(arguments):\n    print('a library prints on stdout')\n    return {'pid': os.getpid(), **arguments}\n"
        "def fails(arguments):\n    raise RuntimeError('no such kernel')\n"
        "def hangs(arguments):\n    time.sleep(600)\n"
        "def dies(arguments):\n    os._exit(3)\n"
    )

    def run(job: str, seconds: float = 500.0) -> dict[str, Any]:
        return worker.run(f"{tmp_path / 'jobs.py'}:{job}", {"given": 1}, timeout_s=seconds)

    worker = Worker()
    try:
        first, second = run("pid"), run("pid")
        assert first == second and first["given"] == 1
        assert run("fails") == {"error": "RuntimeError: no such kernel"}
        third = run("pid")
        assert third["pid"] != first["pid"]
        assert run("dies")["error"] == "ended with exit code 3"
        assert run("hangs", 0.1)["error"].startswith(TIMED_OUT)
        assert run("pid")["pid"] != third["pid"]
    finally:
        worker.close()
