"""``TilingCallback`` under DDP, two ranks: tiled before the model is wrapped, and after; and the accelerate example."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_run

LIMIT = 180  # far above the twenty seconds that it takes: a rank that waits for the other for ever ends here


def test_two_ranks_train_to_the_untiled_losses(tmp_path: Path) -> None:
    model = tiny_run.save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(tiny_run.SENTENCES), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, logs = [], [tmp_path / f"rank{rank}.log" for rank in range(2)]
    for rank, log in enumerate(logs):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        script = str(Path(__file__).with_name("_callback_ranks.py"))
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, script, str(model), str(tmp_path), str(rank)], stdout=file, stderr=file,
                    env=environment, cwd=tmp_path,
                )
            )  # fmt: skip
    try:
        codes = [process.wait(LIMIT) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    for rank in range(2):
        runs = json.loads((tmp_path / f"rank{rank}.json").read_text())
        untiled = runs.pop("untiled")
        tiled_loop, untiled_loop = runs.pop("loops")
        # Eleven rows, half of them and one each; only the first process prints. The last digit may round the other way.
        assert len(tiled_loop) == (6 if rank == 0 else 0)
        assert [float(loss) for loss in tiled_loop] == pytest.approx([float(loss) for loss in untiled_loop], abs=1.1e-4)
        assert untiled["wrapped"] == "DistributedDataParallel" and untiled["tiled"] == 0
        for run in runs.values():
            assert run["wrapped"] == "DistributedDataParallel" and run["tiled"] == 2
            assert run["told"].startswith("tiled 2 of 2 MLPs (LlamaMLP), 16 tokens per tile")
            # The order of sums differs by tile; six steps of plain SGD add it up.
            for key in ("losses", "norms", "weights"):
                assert run[key] == pytest.approx(untiled[key], rel=1.3e-5)
