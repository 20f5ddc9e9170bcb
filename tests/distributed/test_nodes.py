"""``seqtile train --nodes``: two "nodes" on this machine, the results of one process, and a node that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import node_fronts
import tiny_run
from node_fronts import free_port
from seqtile.cli import train_command
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.traffic import bytes_between_nodes
from seqtile.train import launch
from seqtile.train.recipe import RECIPE_FILE, build_recipe, read_recipe, resolve, save_recipe
from seqtile.train.resume import resumed_recipe
from seqtile.train.run_directory import newest_whole

SECONDS = 600

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node_fronts.prepare(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in node_fronts.environment().items():
        monkeypatch.setenv(name, value)


def test_context_and_data_parallel_over_two_nodes_train_as_one_process(folder: Path) -> None:
    """Stopped in the middle of the epoch, and gone on from each rank's shard, with as many processes on one node."""
    values = node_fronts.CASES["FSDP2 + context parallel, 2 processes a node"]
    shown: list[str] = []
    first = node_fronts.train_on_nodes(folder, folder / "ring", say=shown.append, **{**values, "steps": 2})
    assert first == {0: 0, 1: 0}
    assert len(list((folder / "ring" / "checkpoint-2").rglob("*.distcp"))) == 2 * values["nproc"]
    assert node_fronts.train_on_nodes(folder, folder / "ring", nodes=1, resume=True, **values) == {0: 0}
    by_losses, by_weights = node_fronts.differences(folder, folder / "ring", node_fronts.rows_of_a_step(values))
    assert by_losses < 1e-5 and by_weights < 1e-2  # Adam divides each gradient by its own size
    assert sorted(text[:13] for text in shown if text.startswith("node ")) == ["node 0 of 2: ", "node 1 of 2: "]


def test_a_resumed_run_under_context_parallelism_is_the_same_bit_for_bit(folder: Path) -> None:
    """Two ranks share each sequence; stopped in the middle of the epoch."""
    values = node_fronts.CASES["FSDP2 + context parallel"]
    whole, stopped = folder / "through", folder / "interrupted"
    assert node_fronts.train_on_nodes(folder, whole, nodes=1, **values) == {0: 0}
    assert node_fronts.train_on_nodes(folder, stopped, nodes=1, **{**values, "steps": 2}) == {0: 0}
    assert node_fronts.train_on_nodes(folder, stopped, nodes=1, resume=True, **values) == {0: 0}
    assert node_fronts.losses(stopped) == node_fronts.losses(whole) and len(node_fronts.losses(whole)) > 2
    mine, theirs = tiny_run.load_weights(stopped), tiny_run.load_weights(whole)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def go_on(output: Path, **flags: Any) -> int:
    """``--resume`` with other flags, on one node."""
    chosen, _ = resumed_recipe({}, {"output": str(output), **flags})
    return launch.launch(
        chosen, resume=True, resume_from=None, overwrite=False, trust_checkpoint=False, say=lambda _: None,
        worker="ring_worker" if chosen.cp_size > 1 else train_command.WORKER,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"engine": "ddp", "nproc": 4}, {"nproc": 2}),
        ({"engine": "fsdp2", "nproc": 2, "gradient_accumulation": 2, "lora": {"r": 2}}, {"nproc": 4}),
        ({"engine": "fsdp2", "nproc": 4, "cp_size": 4}, {"nproc": 2, "cp_size": 2}),
    ],
    ids=["ddp-4-to-2", "fsdp2-2-to-4", "ring-4-to-2"],
)
def test_a_run_goes_on_with_another_number_of_processes(
    before: dict[str, Any], after: dict[str, Any], folder: Path
) -> None:
    """Stopped in the middle of an epoch, and on into the next: rows, losses and the optimizer's states are the same."""
    rows = node_fronts.rows_of_a_step(before)
    name, steps = "-".join(map(str, [*before.values(), *after.values()])), 12 // rows + 1
    output, whole = folder / f"moved-{name}", folder / f"unmoved-{name}"
    assert node_fronts.train_on_nodes(folder, output, nodes=1, **{**before, "steps": 2}) == {0: 0}
    assert go_on(output, **after, steps=steps) == 0
    assert build_recipe(read_recipe(output / RECIPE_FILE), {})[0].rows_of_a_step == rows
    assert node_fronts.train_on_nodes(folder, whole, nodes=1, **{**before, "steps": steps}) == {0: 0}
    mine, theirs = (torch.tensor(node_fronts.losses(place)) for place in (output, whole))
    assert len(mine) == steps and torch.equal(mine[:2], theirs[:2])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)


def test_nodes_that_were_lost_before_the_first_checkpoint_begin_again(folder: Path) -> None:
    values, output = node_fronts.CASES["DDP"], folder / "requeued"
    output.mkdir()
    save_recipe(resolve(node_fronts.recipe(folder, output, **values)), output / RECIPE_FILE)
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (output / "checkpoint-1").mkdir()
    (output / "checkpoint-1" / "model.safetensors").write_bytes(b"cut off")
    assert node_fronts.train_on_nodes(folder, output, resume=True, **values) == {0: 0, 1: 0}
    by_losses, by_weights = node_fronts.differences(folder, output, node_fronts.rows_of_a_step(values))
    assert by_losses < 1e-5 and by_weights < 1e-2  # as above
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert newest_whole(output)[0] == output / "checkpoint-3"


def test_what_a_step_moves_is_what_the_plan_counts(folder: Path) -> None:
    """One ring over both nodes: of each node, one process's sends leave it."""
    values = {"engine": "fsdp2", "nproc": 4, "cp_size": 4, "steps": 1}
    assert node_fronts.train_on_nodes(folder, folder / "whole-ring", **values) == {0: 0, 1: 0}
    carried = [json.loads((folder / "whole-ring" / f"carried-{rank}.json").read_text()) for rank in range(4)]
    request = Request(
        model="tiny", config=AutoConfig.from_pretrained(folder / "model"), device=Device("any", 2**37, None, "a test"),
        gpus=4, nodes=2, engine="fsdp2", cp_size=4, precision="float32", attention="sdpa",
    )  # fmt: skip
    counts = Planner(request, 96).counts
    planned = bytes_between_nodes(request, counts, carried[0]["tokens"])
    of_the_ring = planned["keys and values"] + planned["gradients of keys and values"]
    for rank in range(4):
        found = carried[rank]["bytes"]
        assert found["ring torch.float32"] == of_the_ring
        # Of W bytes of all ranks together, a ring puts (P - 1) / P * W on each of its links; shards are padded.
        assert found["_reduce_scatter_base_"] * 3 / 4 == pytest.approx(planned["gradients"], rel=0.01)
        at_least = planned["weights"] - 3 / 4 * 4 * counts.root
        assert at_least <= found["_allgather_base_"] * 3 / 4 <= 1.01 * planned["weights"]


def start(folder: Path, rank: int, port: int, *more: str) -> subprocess.Popen[str]:
    """The command of one node, in a session of its own."""
    words = ["train", *more, "--nodes", "2", "--node-rank", str(rank), "--rendezvous", f"127.0.0.1:{port}"]
    with (folder / f"node-{rank}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "seqtile.cli", *words], stdout=log, stderr=log, text=True, start_new_session=True
        )


def said(folder: Path, rank: int) -> str:
    return (folder / f"node-{rank}.log").read_text()


def end_all(fronts: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill what a failed test has left running."""
    for front in fronts:
        for pid in descendants(front.pid):
            if front.poll() is None:
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    children = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in children.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, of in pairs if of == parent]
    return found


@pytest.mark.parametrize(("killed", "engine"), [(1, "ddp"), (0, "fsdp2")])
def test_a_node_is_killed_the_others_end_with_a_sentence_and_the_run_goes_on(
    killed: int, engine: str, folder: Path
) -> None:
    output, port = folder / f"killed-{killed}", free_port()
    values = {"engine": engine, "nproc": 2, "save_steps": 2}
    save_recipe(node_fronts.recipe(folder, output, **values, steps=None).changed(steps=2000), folder / "long.yaml")
    fronts = [start(folder, rank, port, "--recipe", str(folder / "long.yaml")) for rank in range(2)]
    try:
        end = time.monotonic() + 200
        while not (output / "checkpoint-2" / "complete.json").is_file():
            assert time.monotonic() < end and fronts[0].poll() is None, said(folder, 0) + said(folder, 1)
            time.sleep(0.05)
        # Everything of that node at once, as when its power fails.
        for pid in reversed(descendants(fronts[killed].pid)):
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        code = fronts[1 - killed].wait(timeout=120)
        assert time.monotonic() - began < 60
    finally:
        end_all(fronts)
    told = [line for line in said(folder, 1 - killed).splitlines() if line.startswith("seqtile: ")]
    assert code == 1 and len(told) == 1, said(folder, 1 - killed)
    assert re.search(rf"rank {1 - killed} lost its connection.*; the last complete checkpoint is .*--resume", told[0])

    newest, _ = newest_whole(output)
    assert newest is not None
    step = int(newest.name.rpartition("-")[2])
    more = {**values, "steps": step + 1}
    assert node_fronts.train_on_nodes(folder, output, resume=True, **more) == {0: 0, 1: 0}
    assert len(node_fronts.losses(output)) == step + 1
    unbroken = folder / f"unbroken-{engine}"
    assert node_fronts.train_on_nodes(folder, unbroken, **more) == {0: 0, 1: 0}
    assert node_fronts.losses(output) == node_fronts.losses(unbroken)
    weights, expected = (load_file(one / "model.safetensors") for one in (output, unbroken))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("DDP", {"batch_size": 2}),
        ("FSDP2 + context parallel", {}),
        ("FSDP2 + context parallel, 2 processes a node", {"batch_size": 2}),
        ("ZeRO-3 + Ulysses", {}),
        ("ZeRO-3 + Ulysses, 2 processes a node", {"batch_size": 2, "gradient_accumulation": 1}),
    ],
)
def test_an_evaluation_has_the_loss_of_one_process(case: str, more: dict[str, Any], folder: Path) -> None:
    """Of five rows of different lengths, split as those of the training: neither padding counts, nor the rows that fill
    up the last batches."""
    data, length, rows = folder / "five.jsonl", node_fronts.VALUES["max_length"], more.get("batch_size", 1)
    data.write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[:5]))
    values = {**node_fronts.CASES[case], "eval_dataset": str(data), "eval_steps": 1, "steps": 2, **more}
    output = folder / f"evaluated-{case}"
    assert node_fronts.train_on_nodes(folder, output, **values) == {0: 0, 1: 0}
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    _, found = [record["eval_loss"] for record in records if "eval_loss" in record]
    expected = tiny_run.mean_loss(output, data, rows, length)
    assert found == pytest.approx(expected, rel=1e-5)
    report = json.loads((output / "report" / "report.json").read_text())
    ran = re.search(r"batches of up to (\d+) tokens", report["tiling"])
    assert ran is not None and int(ran[1]) <= rows * length / max(values.get("cp_size", 1), values.get("sp_size", 1))


@pytest.mark.parametrize(
    ("asked", "number", "engine"), [((1,), signal.SIGINT, "ddp"), ((0, 1), signal.SIGTERM, "fsdp2")], ids=["one", "all"]
)
def test_a_node_is_asked_to_stop_all_save_and_the_run_goes_on(
    asked: tuple[int, ...], number: signal.Signals, engine: str, folder: Path
) -> None:
    """Ctrl-C comes to one node; before its time limit Slurm sends SIGTERM to all."""
    output, port = folder / f"asked-{engine}", free_port()
    values = {"engine": engine, "nproc": 2}
    save_recipe(node_fronts.recipe(folder, output, **values, save_steps=5000).changed(steps=3000), folder / "long.yaml")
    fronts = [start(folder, rank, port, "--recipe", str(folder / "long.yaml")) for rank in range(2)]
    try:
        end = time.monotonic() + 200
        while not (output / "metrics.jsonl").is_file() or len((output / "metrics.jsonl").read_text().splitlines()) < 2:
            assert time.monotonic() < end and fronts[0].poll() is None, said(folder, 0) + said(folder, 1)
            time.sleep(0.05)
        for rank in asked:
            fronts[rank].send_signal(number)
        began = time.monotonic()
        assert [front.wait(timeout=120) for front in fronts] == [128 + number] * 2, said(folder, 0) + said(folder, 1)
        assert time.monotonic() - began < 60
    finally:
        end_all(fronts)
    (saved,) = output.glob("checkpoint-*")
    assert newest_whole(output)[0] == saved
    sentence = f"{number.name} on one of the nodes stopped the run; resume with --resume"
    assert all(sentence in " ".join(said(folder, rank).split()) for rank in range(2)), said(folder, 0) + said(folder, 1)
    step = int(saved.name.rpartition("-")[2])
    assert node_fronts.train_on_nodes(folder, output, resume=True, **values, steps=step + 1) == {0: 0, 1: 0}
    assert len(node_fronts.losses(output)) == step + 1


SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": "{port}", "SLURM_NODEID": "{rank}", "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "0",
}  # fmt: skip
"""What srun says to each of two tasks, each on a node of its own."""

TORCHRUN = ["torch.distributed.run", "--nnodes=2", "--node-rank={rank}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", "--master-port={port}", "-m"]  # fmt: skip


@pytest.mark.parametrize(("launcher", "environment"), [([], SRUN), (TORCHRUN, {})], ids=["srun", "torchrun"])
def test_the_nodes_are_those_that_a_launcher_names(
    launcher: list[str], environment: dict[str, str], folder: Path
) -> None:
    """The same command on each node, without a flag that says which it is."""
    output, values = folder / f"named-{len(launcher)}", node_fronts.CASES["DDP"]
    save_recipe(node_fronts.recipe(folder, output, **values), folder / "named.yaml")
    port = str(free_port())
    fronts = []
    for rank in range(2):
        words = [*launcher, "seqtile.cli", "train", "--recipe", str(folder / "named.yaml")]
        told = {name: value.format(rank=rank, port=port) for name, value in environment.items()}
        command = [sys.executable, "-m", *(word.format(rank=rank, port=port) for word in words)]
        with (folder / f"node-{rank}.log").open("w") as log:
            fronts.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **told}))
    assert [front.wait(timeout=300) for front in fronts] == [0, 0], said(folder, 0) + said(folder, 1)
    by_losses, _ = node_fronts.differences(folder, output, node_fronts.rows_of_a_step(values))
    assert by_losses < 1e-5
