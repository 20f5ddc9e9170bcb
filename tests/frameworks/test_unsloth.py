"""Models that Unsloth's ``FastLanguageModel`` loads, tiled by its option strings, and Unsloth's own tiles under DDP.

``SEQTILE_UNSLOTH`` names an environment with Unsloth. None is made by ``make``: on a CPU its requirements have to be
installed by hand (docs/integrations.md).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_run

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(
        "SEQTILE_UNSLOTH" not in os.environ,
        reason="SEQTILE_UNSLOTH is not set: the path of an environment with Unsloth (docs/integrations.md)",
    ),
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (HERE.parents[1] / "src", HERE.parent)))
    command = [str(Path(os.environ["SEQTILE_UNSLOTH"], "bin", "python")), str(HERE / "unsloth_on_cpu.py"), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=400)
    found = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert process.returncode == 0 and found, said[-6000:]
    return json.loads(found[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_losses_of_fast_language_model(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU Unsloth leaves out its own tiles, although they are asked for."""
    model = str(tiny_run.save_model(tmp_path / "model", max_position_embeddings=4096))
    runs = {tiles: result(start(tmp_path, "train", model, kind, tiles)) for tiles in ("untiled", "seqtile", "unsloth")}
    assert runs["seqtile"]["forwards"] == ["TiledForward"] * 2
    assert runs["untiled"]["forwards"] == runs["unsloth"]["forwards"] == ["", ""]
    for name in ("loss", "grad_norm"):
        assert len(runs["untiled"][name]) == 4
        assert runs["seqtile"][name] == pytest.approx(runs["untiled"][name], rel=1e-5)
    with capsys.disabled():
        for tiles, run in runs.items():
            losses, norms = (" ".join(f"{value:.6f}" for value in run[name]) for name in ("loss", "grad_norm"))
            print(f"\n| {kind}, {tiles} | {losses} | {norms} |", end="")


@pytest.mark.parametrize("patched_by", ["zoo", "loader"])
def test_unsloths_own_tiles_under_ddp(patched_by: str, tmp_path: Path) -> None:
    """``patch_tiled_mlp`` alone fails; with what the loader calls besides, the gradients are the untiled ones."""
    started = [start(tmp_path, "ddp", str(tmp_path / "store"), str(rank), patched_by) for rank in range(2)]
    for found in [result(one) for one in started]:
        assert found["refused"].startswith("Unsloth's own tiled MLP already runs LlamaMLP")
        if patched_by == "loader":
            assert found["worst"] < 1e-5
        else:
            assert found["error"] == "Expected to mark a variable ready only once"


def test_what_is_relied_on_is_there(tmp_path: Path) -> None:
    """With Unsloth's own packages, which `tests/compat` skips where they are not installed."""
    python = Path(os.environ["SEQTILE_UNSLOTH"], "bin", "python")
    code = "import inspect, unsloth_zoo.tiled_mlp as tiled; print(inspect.getsource(tiled))"
    source = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=400
    ).stdout  # fmt: skip
    assert "mlp_module.forward = MethodType(" in source
