"""The ladder: by the plan, and by real steps in the script that `make gpu-ladder` starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

import gpu_ladder as script
import technique_ladder
from child import guarded
from environment import environment
from ladder_step import Attempt, measure_attempt, places
from seqtile.options import WHOLE_LAYER
from seqtile.planner.accelerators import find_device
from seqtile.planner.estimate import Bounds
from seqtile.planner.flops import Work
from seqtile.planner.model_shapes import read_config
from seqtile.planner.request import Request

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=32768, pad_token_id=0,
)  # fmt: skip
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ladder") / "model"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    return str(folder)


class Planned:
    """A planner in whose place every rung holds less than the one before, but where attention's output is kept."""

    def __init__(self, request: Request, like: Any = None) -> None:
        self.request, self.built = request, SimpleNamespace(model=None)
        self.counts = SimpleNamespace(key_heads=2)

    def longest(self) -> tuple[int, str]:
        options = self.request.options
        each = 8 if options.loss is None else 4 if not options.tiled else 0
        each += 1 + (not options.offload) + (options.heads is None)
        each += (options.checkpoint == "attention-saved") + (options.blocks != WHOLE_LAYER)
        return 1024 * (24 // each), "device memory: something"

    def sure(self) -> int:
        return self.longest()[0] // 2

    def estimate(self, tokens: int) -> Any:
        return SimpleNamespace(device=Bounds(1, 2, 3), host=Bounds(1, 2, 3), peak_at="head", moved=0.5)

    def work(self, tokens: int) -> Any:
        saved = self.request.options.checkpoint == "attention-saved"
        return Work(6e9 * tokens, (4.5 - saved) * 1e5 * tokens**2)


def test_each_rung_adds_one_thing_to_those_before(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique_ladder, "Planner", Planned)
    monkeypatch.setattr(technique_ladder, "runs_on_some_heads", lambda _: True)
    h200 = find_device("h200")
    rows = technique_ladder.run_ladder(
        Request(model, read_config(model), h200, engine_offload=("optimizer",)), {}, None
    )
    assert [row["rung"] for row in rows] == [rung.name for rung in technique_ladder.RUNGS]
    settings = [row["settings"] for row in rows]
    assert settings[0] == {"tile": "auto", "blocks": "none", "loss": None, "offload": False, "checkpoint": "layer",
                           "heads": None, "engine_offload": ("optimizer",)}  # fmt: skip
    for before, after, rung in zip(settings, settings[1:], technique_ladder.RUNGS[1:], strict=False):
        assert {name for name in after if after[name] != before[name]} == rung.changes.keys()
    assert settings[-1] == {"tile": "auto", "blocks": WHOLE_LAYER, "loss": "tiled", "offload": True,
                            "checkpoint": "layer", "heads": 1, "engine_offload": ("optimizer",)}  # fmt: skip
    assert max(rows, key=lambda row: row["max_length"]) is rows[-1]
    assert {row["common"]["tokens"] for row in rows} == {min(row["max_length"] for row in rows)}
    last, saved = rows[-1]["common"], rows[-2]["common"]
    assert saved["tflop_per_token"] < last["tflop_per_token"] == rows[0]["tflop_per_token"]
    assert rows[-1]["step_seconds"] == pytest.approx(rows[-1]["device_us_per_token"] * rows[-1]["max_length"] / 1e6)
    assert all(row["sure_length"] == row["max_length"] // 2 for row in rows)

    monkeypatch.setattr(technique_ladder, "runs_on_some_heads", lambda _: False)
    eager = technique_ladder.run_ladder(Request(model, read_config(model), h200, attention="eager"), {}, None)
    skipped = {row["rung"]: row["skipped"] for row in eager if "skipped" in row}
    assert [*skipped] == ["+ attention saved", "+ head-wise attention", "- attention saved"]
    assert "needs an attention kernel" in skipped["+ attention saved"] and "heads" in skipped["+ head-wise attention"]
    ranks = Request(model, read_config(model), h200, gpus=2, engine="zero3", sp_size=2)
    [last] = [row for row in technique_ladder.run_ladder(ranks, {}, None) if "skipped" in row]
    assert last["rung"] == "+ head-wise attention" and "the 1 key-value head(s) that a rank has" in last["skipped"]
    heads, cells = technique_ladder.table(eager)
    assert heads[-1].startswith("us/token at ") and cells[4][3].startswith("left out: needs an attention kernel")


def test_the_script_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model")  # of so few positions that no fake run is long
    sizes = {**SIZES, "max_position_embeddings": 1024, "vocab_size": 8192}
    AutoConfig.for_model("llama", **sizes).save_pretrained(model)
    monkeypatch.setattr(technique_ladder, "RUNGS", technique_ladder.RUNGS[:2])
    arguments = ["--model", model, "--device", "1GiB", "--lora", "r=4", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["technique_ladder.py", *arguments])
    assert technique_ladder.main() == 0
    [file] = tmp_path.glob("ladder-*.jsonl")
    full, tiled = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert full["max_length"] == tiled["max_length"] == 1024 and full["limited_by"] == "positions"
    assert full["peak_device_gib"]["expected"] > tiled["peak_device_gib"]["expected"]
    assert tiled["common"]["tokens"] == 1024 and tiled["device_us_per_token"] is None
    assert full["command"] == " ".join(["python", "benchmarks/technique_ladder.py", *arguments])
    assert full["versions"]["torch"] and full["date"] and full["train"] == "lora r=4"
    assert "| + tiled loss | 1,024 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["technique_ladder.py", "--model", model, "--device", "h201"])
    assert technique_ladder.main() == 2
    assert "did you mean 'h200'" in capsys.readouterr().err


def attempt_of(model: str, **changes: Any) -> Attempt:
    return Attempt(**{"model": model, "rung": 0, "tokens": 1024, "layers": 2, "lora": None, "precision": "float32",
                      "device": "cpu", "host_bytes": 0, **changes})  # fmt: skip


@pytest.mark.parametrize(("rung", "lora"), [(0, None), (2, {"r": 4, "target_modules": ["q_proj", "down_proj"]})])
def test_layers_that_are_left_out_take_what_they_would_hold(model: str, rung: int, lora: Any) -> None:
    some, whole = (measure_attempt(asdict(attempt_of(model, rung=rung, lora=lora, layers=n))) for n in (2, 4))
    assert some["layers_of_model"] == whole["layers_of_model"] == 4
    # What the loop over layers itself holds beside their tensors is far below a hundredth.
    assert some["peak_gib"] == pytest.approx(whole["peak_gib"], rel=0.01)


def test_where_checkpoints_of_a_bounded_host_are() -> None:
    assert places(32, 2, 10, 0) == (2, 0)  # all on the host
    assert places(32, 2, 10, 160) == (1, 15)
    assert places(32, 2, 10, 9) == (0, 30)
    for run in (1, 2, 4):
        for room in range(0, 340, 7):
            mine, others = places(32, run, 10, room)
            on_host = 32 if not room else min(32, room // 10)
            assert (run - mine) + others == 32 - on_host or mine in (0, run)


class Runs:
    """The script in this process: its attempts too, but for the first one; ``most`` of them until it is ended."""

    def __init__(self, real: Callable[..., Any], most: int) -> None:
        self.real, self.most, self.ran = real, most, [0]
        self.made: list[tuple[int, int, int]] = []

    def __call__(self, job: str, arguments: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        if job == "environment":
            return environment()
        if len(self.made) == self.most:
            raise KeyboardInterrupt
        self.made.append((arguments["rung"], arguments["tokens"], arguments["layers"]))
        if len(self.made) == 1 and self.most:
            return self.real(job, arguments, timeout_s=500)
        return guarded(measure_attempt, arguments)


@pytest.mark.slow
def test_the_script_measures_and_goes_on_where_it_was_ended(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["gpu_ladder.py", "--model", model, "--device", "cpu", "--memory", "16MiB", "--precision", "float32",
             "--start", "1024", "--within", "0.5", "--rungs", "0,2", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    real, runs = script.run_child, []
    for most in (2, 3, 100, 0):
        runs.append(Runs(real, most))
        monkeypatch.setattr(script, "run_child", runs[-1])
        if most in (2, 3):
            with pytest.raises(KeyboardInterrupt):
                script.main()
            out.write_text(out.read_text(encoding="utf-8") + '{"kind": "att', encoding="utf-8")
        else:
            assert script.main() == 0
    made = [one for run in runs for one in run.made]
    assert len(made) == len(set(made)) and not runs[-1].made  # nothing was measured twice
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len([row for row in rows if row["kind"] == "attempt"]) == len(made)
    rungs = [row for row in rows if row["kind"] == "rung"]
    assert [row["rung"] for row in rungs] == [0, 2]
    lengths = [row["max_length"] for row in rungs]
    assert lengths == sorted(set(lengths)), lengths
    for row in rungs:
        assert row["max_length"] < row["shortest_that_failed"] <= 1.5 * row["max_length"] + 16
        assert row["peak_gib"] * 2**30 <= 16 * MIB and row["limited_by"] == "device memory"
        assert (row["layers_run"], row["layers_extrapolated"], row["search_ended"]) == (2, 2, "close enough")
        assert row["whole_step_s"] > 0 and row["versions"]["torch"] and "--rungs 0,2" in row["command"]
        assert {one.name for one in fields(Attempt)} - {"tokens"} <= row.keys()
    assert "2 layers run, 2 extrapolated" in capsys.readouterr().out.splitlines()[-1]


def test_the_search_starts_near_the_plan(model: str) -> None:
    planned = script.planned_length(attempt_of(model, memory=32 * MIB), 32 * MIB)
    tried = []

    def attempt(one: Attempt) -> dict[str, Any]:
        tried.append(one.tokens)
        return (
            {"tokens": one.tokens}
            if one.tokens <= 1.1 * planned
            else {"tokens": one.tokens, "error": script.DEVICE_FULL[0]}
        )

    fits, fails, timely = script.search(attempt_of(model, tokens=planned), attempt, 1 / 16)
    assert timely and fits is not None and fails is not None
    assert fits["tokens"] <= 1.1 * planned < fails["tokens"] <= fits["tokens"] * 17 / 16 + 16
    assert tried[0] == planned >= 16 and len(tried) <= 4


@pytest.mark.slow
def test_a_rung_ends_when_its_time_is_up_and_the_script_says_what_it_needs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "run_child", Runs(script.run_child, 0))
    out = tmp_path / "rows.jsonl"
    words = ["gpu_ladder.py", "--model", model, "--device", "cpu", "--memory", "32MiB", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "--minutes", "0", "--rungs", "7"])
    assert script.main() == 0
    [row] = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert (row["max_length"], row["search_ended"], row["name"]) == (0, "the time was up", "- attention saved")
    assert script.main() == 0 and len(out.read_text(encoding="utf-8").splitlines()) == 2, "which is not done"
    for more, said in (([*words[:5], "--out", str(out)], "--memory SIZE"), ([*words, "--rungs", "9"], "expected numb"),
                       ([*words, "--host-memory", "x"], "expected a size")):  # fmt: skip
        monkeypatch.setattr("sys.argv", more)
        assert script.main() == 2
        assert said in capsys.readouterr().err
    taken = asdict(attempt_of(model, memory=1, tokens=64))
    assert guarded(measure_attempt, taken)["error"] == "out of memory"


def test_what_fails_otherwise_is_written_and_the_other_rungs_go_on(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, broken = script.run_child, ["RuntimeError: no such kernel"]

    def run_child(job: str, arguments: dict[str, Any], **words: Any) -> dict[str, Any]:
        if job == "environment":
            return real(job, arguments, **words)
        if arguments["rung"] == 0 and broken:
            return {"error": broken[0]}
        if arguments["tokens"] > 100:
            return {"error": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"}
        return {"peak_gib": 1.0, "peak_from": "a stand-in", "step_s": 1.0, "layers_of_model": 2, "attention": ["math"]}

    monkeypatch.setattr(script, "run_child", run_child)
    out = tmp_path / "rows.jsonl"
    words = [
        "--model",
        model,
        "--device",
        "cpu",
        "--memory",
        "32MiB",
        "--start",
        "96",
        "--layers",
        "1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", ["gpu_ladder.py", *words, "--rungs", "0,1"])
    assert script.main() == 2 and "no such kernel" in capsys.readouterr().err
    rows = [row for row in script.read_rows(out) if row["kind"] != "machine"]
    assert [row.get("error") for row in rows if row["rung"] == 0] == broken
    [rung] = [row for row in rows if row["kind"] == "rung"]
    assert rung["rung"] == 1 and rung["limited_by"] == "device memory" and rung["attention"] == ["math"]
    broken.clear()
    assert script.main() == 0
    assert [row["rung"] for row in script.read_rows(out) if row["kind"] == "rung"] == [1, 0]
