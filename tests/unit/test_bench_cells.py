"""A benchmark's cells: what they refuse, and what a failed one looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import child
import methods
from cell import TIMED_OUT, Cell, Worker, run_child
from environment import append_rows, stamp
from seqtile._errors import UserError

CPU = {"device_type": "cpu", "device_count": 0, "device_name": "a CPU", "versions": {"torch": "0"}}


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
