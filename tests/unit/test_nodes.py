"""Nodes meet before anything could hang: who is missing, what differs, whose port is taken, who is lost."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from node_fronts import on_each
from seqtile._errors import USER_ERROR, RunError, UserError
from seqtile.cli import main
from seqtile.train import nodes as module
from seqtile.train.launch import launch_command
from seqtile.train.nodes import (
    Meeting,
    Nodes,
    check_tasks,
    digest_files,
    digest_pieces,
    facts_of,
    find_nodes,
    first_host,
    free_port,
    saving,
)
from seqtile.train.recipe import build_recipe, resolve

FLAGS = (2, 1, "10.0.0.1:29500")
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]", "SLURM_JOB_NUM_NODES": "4",
}  # fmt: skip

IN_TWO = ["--nodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:29500"]


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((None, None, None), {}, None),
        ((1, None, None), {}, None),
        (FLAGS, {}, Nodes(2, 1, "10.0.0.1", 29500)),
        ((2, 0, "[fe80::1]:29500"), {}, Nodes(2, 0, "fe80::1", 29500)),
        ((None, None, None), SRUN, Nodes(4, 2, "gpu03", 24711)),
        ((None, None, None), {**SRUN, "MASTER_ADDR": "ib-gpu03", "MASTER_PORT": "1234"}, Nodes(4, 2, "ib-gpu03", 1234)),
        ((None, None, "other:5"), SRUN, Nodes(4, 2, "other", 5)),
        ((None, None, None), {**SRUN, "SLURM_STEP_NUM_NODES": "1"}, None),
        ((None, None, None), {"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0"}, None),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a:1"},
            Nodes(2, 1, "a", 1),
        ),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"},
            Nodes(2, 1, "a", 29500),
        ),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "fe80::1"},
            Nodes(2, 1, "fe80::1", 29500),
        ),
        ((None, None, None), {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
    ],
)
def test_nodes_are_those_of_the_flags_or_of_the_environment(
    flags: tuple[Any, ...], environment: dict[str, str], expected: Nodes | None
) -> None:
    assert find_nodes(*flags, environment) == expected


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        ((2, 1, None), {}, "--rendezvous too"),
        ((None, 1, None), {}, "--nodes and --rendezvous|--nodes too"),
        ((1, 1, None), {}, "of one node"),
        ((2, 2, "a:1"), {}, "--node-rank 2 of 2 nodes"),
        ((2, 0, "a"), {}, "expected HOST:PORT"),
        ((2, 0, "a:99999"), {}, "expected HOST:PORT"),
        ((2, 0, "a:²"), {}, "expected HOST:PORT"),
        ((2, 0, "::1"), {}, "IPv6 in brackets"),
        ((2, 0, "fe80::1:29500"), {}, "IPv6 in brackets"),
        ((2, 0, "[]:5"), {}, "expected HOST:PORT"),
        ((2, 0, "tcp://a:1"), {}, "expected HOST:PORT"),
        ((2, 0, "[fe80::1%eth0]:1"), {}, "expected HOST:PORT"),  # torch's launcher takes neither this nor the next
        ((2, 0, "a,b:1"), {}, "expected HOST:PORT"),
        ((2, 0, " a:1"), {}, "expected HOST:PORT"),
        ((0, 0, "a:1"), {}, "--nodes 0, expected at least 1"),
        ((10**20, 0, "a:1"), {}, "--nodes '100000000000000000000', expected a whole number"),
        ((10**6, 0, "a:1"), {}, "--nodes 1000000, expected at least 1 and at most"),
        ((1, -1, None), {}, "--node-rank -1 of one node"),
        ((None, None, None), {**SRUN, "SLURM_JOB_ID": "abc"}, "got SLURM_JOB_ID 'abc', expected a whole number$"),
        ((None, None, None), {**SRUN, "SLURM_JOB_ID": "9" * 5000}, "got SLURM_JOB_ID '999"),
        ((None, None, None), {**SRUN, "SLURM_NODEID": "x"}, "got --node-rank 'x', expected a whole number$"),
        ((None, None, None), {**SRUN, "SLURM_STEP_NUM_NODES": "x", "SLURM_STEP_NUM_TASKS": "x"}, "--nodes 'x'"),
        ((None, None, None), {"PET_NNODES": "1", "PET_NODE_RANK": "1"}, "--node-rank 1 of one node"),
        ((None, None, None), {**SRUN, "SLURM_STEP_NODELIST": ""}, "need --rendezvous too"),
        ((None, None, None), {"PET_NNODES": "1:4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}, "fixed at the start"),
        ((None, None, None), {**SRUN, "SLURM_STEP_NUM_TASKS": "32"}, "--ntasks-per-node=1"),
    ],
)
def test_what_is_missing_or_no_number_is_refused(
    flags: tuple[Any, ...], environment: dict[str, str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        find_nodes(*flags, environment)


def test_several_tasks_on_one_node_are_refused_or_said() -> None:
    alone = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0"}
    for engine in ("ddp", "fsdp2", "zero2", "zero3"):
        with pytest.raises(UserError, match="srun started 8 tasks on one node; .* srun --ntasks=1"):
            check_tasks(engine, alone)
    assert "each trains a model of its own" in check_tasks("single", alone)
    for environment in ({}, SRUN, {**alone, "SLURM_STEP_NUM_TASKS": "1"}):
        assert check_tasks("ddp", environment) == ""
    assert check_tasks("single", {**alone, "SLURM_LOCALID": "3"}) == ""


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[03-05,9],m1", "n03"),
        ("a[1,3]-b,c", "a1-b"),
        ("x-y[7]", "x-y7"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_accelerate_is_told_of_the_nodes() -> None:
    recipe = resolve(build_recipe({"engine": "ddp", "nproc": 16}, {})[0])
    words = launch_command(recipe, "worker", ["folder"], Path("config.yaml"), Nodes(2, 1, "10.0.0.1", 29500), 4000)
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args(words[3:])
    assert (parsed.num_processes, parsed.num_machines, parsed.machine_rank) == (16, 2, 1)
    assert (parsed.main_process_ip, parsed.main_process_port, parsed.module) == ("10.0.0.1", 4000, True)
    assert parsed.training_script == "worker" and parsed.training_script_args == ["folder"]


def agree(
    tmp_path: Path, facts: list[dict[str, Any]], *, ranks: list[int] | None = None, seconds: float = 5.0,
    outputs: list[Path] | None = None, starts: list[Path | None] | None = None, together: bool = False,
) -> dict[int, Any]:  # fmt: skip
    """What each node is told; ``ranks`` are those that come; ``together``: none ends before all have been told."""
    port, told = free_port(), threading.Barrier(len(facts))

    def one(place: int) -> Any:
        rank = ranks[place] if ranks else place
        count = facts[place].get("--nodes", len(facts))
        meeting = Meeting(Nodes(count, rank, "127.0.0.1", port), seconds)
        code = 1
        try:
            output = outputs[place] if outputs else tmp_path / "out"
            verdict = meeting.agree(facts[place], output, starts[place] if starts else None)
            verdict["shared value"] = meeting.share("from node 0" if rank == 0 else None)
            code = 0
            return verdict
        finally:
            if together:
                told.wait(60)
            meeting.end(code)

    return on_each(len(facts), one)


def test_nodes_that_agree_are_told_the_same_and_leave_nothing(tmp_path: Path) -> None:
    told = agree(
        tmp_path, [{"torch": "2"}] * 3, starts=[Path("checkpoint-20"), Path("checkpoint-10"), Path("checkpoint-20")]
    )
    assert told[0] == told[1] == told[2] and told[0]["shared"] is True
    assert told[0]["start"] == "checkpoint-10" and told[0]["shared value"] == "from node 0"
    assert list(tmp_path.iterdir()) == []


def test_one_that_would_begin_while_another_goes_on_is_refused(tmp_path: Path) -> None:
    told = agree(tmp_path, [{}] * 3, starts=[Path("checkpoint-20"), None, Path("checkpoint-20")])
    for error in told.values():
        assert isinstance(error, UserError) and "node 0 (" in str(error)
        assert "would go on from checkpoint-20 and node 1 (" in str(error)


def test_directories_of_their_own_are_seen(tmp_path: Path) -> None:
    outputs = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    for output in outputs:
        output.parent.mkdir()
    assert [verdict["shared"] for verdict in agree(tmp_path, [{}, {}], outputs=outputs).values()] == [False, False]


def test_each_is_told_what_they_disagree_on(tmp_path: Path) -> None:
    told = agree(tmp_path, [{"torch": "2", "recipe key 'seed'": 0}, {"torch": "2", "recipe key 'seed'": 1}])
    assert {type(error) for error in told.values()} == {UserError}
    for error in told.values():
        assert "nodes disagree: recipe key 'seed' is 0 on node 0" in str(error) and "1 on node 1" in str(error)


def test_another_number_of_nodes_is_told(tmp_path: Path) -> None:
    told = agree(tmp_path, [{"--nodes": 2}, {"--nodes": 3}])
    assert "--nodes is 2 on node 0" in str(told[1])
    told = agree(tmp_path, [{"--nodes": 2}, {"--nodes": 2}, {"--nodes": 3}], together=True)
    assert isinstance(told[0], dict) and "node 0 was told --nodes 2 and this one 3" in str(told[2])


def test_a_missing_node_is_named_within_the_time(tmp_path: Path) -> None:
    began = time.monotonic()
    told = agree(tmp_path, [{"--nodes": 3}, {"--nodes": 3}], seconds=1.5)
    assert time.monotonic() - began < 30
    assert all(isinstance(error, RunError) and "node 2 of 3 did not come" in str(error) for error in told.values())


def test_a_node_that_reads_longer_than_others_wait_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it reads its data, and how long node 0 plans, is not known before: only coming has a time limit."""
    monkeypatch.setattr(module, "_READ_SECONDS", 0.2)
    port = free_port()

    def one(rank: int) -> Any:
        meeting = Meeting(Nodes(2, rank, "127.0.0.1", port), 1.0)
        time.sleep(2.0 * rank)
        verdict = meeting.agree({}, tmp_path / "out", None)
        time.sleep(2.0 * (1 - rank))
        shared = meeting.share("chosen" if rank == 0 else None)
        meeting.end(0)
        return verdict["refused"], shared

    assert on_each(2, one) == {0: ("", "chosen"), 1: ("", "chosen")}


def test_a_node_that_is_lost_while_it_reads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_SECONDS", 5.0)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    port = free_port()

    def one(rank: int) -> Any:
        meeting = Meeting(Nodes(2, rank, "127.0.0.1", port), 60.0)
        if rank == 1:
            meeting._done.set()
            return ""
        try:
            return meeting.agree({}, tmp_path / "out", None)
        finally:
            meeting.end(1, "lost")

    error = on_each(2, one)[0]
    assert isinstance(error, RunError) and "node 1 is lost: no heartbeat for 5 s (before" in str(error)


def test_a_refusal_does_not_wait_for_a_missing_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSED_SECONDS", 1.0)
    port, began = free_port(), time.monotonic()

    def one(rank: int) -> Any:
        meeting = Meeting(Nodes(3, rank, "127.0.0.1", port), 60.0)
        try:
            if rank == 1:
                raise UserError("no such directory")
            meeting.agree({}, tmp_path / "out", None)
        finally:
            meeting.end(2, "no such directory" if rank else "")

    told = on_each(2, one)
    assert str(told[0]) == "node 1 refuses: no such directory" and time.monotonic() - began < 30


def test_node_0_is_missed_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"node 0 did not answer at 127.0.0.1:\d+ within 1 s"):
        Meeting(Nodes(2, 1, "127.0.0.1", free_port()), 1.0)


def test_a_number_that_is_taken_is_refused(tmp_path: Path) -> None:
    told = agree(tmp_path, [{}, {}, {}], ranks=[0, 1, 1], seconds=1.5)
    assert sum("another command says --node-rank 1" in str(error) for error in told.values()) == 1


def test_a_port_in_use_is_refused_at_once() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at port {port}"):
            Meeting(Nodes(2, 0, "127.0.0.1", port), 60)


def test_what_else_listens_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(RunError, match="is not seqtile train's"):
        Meeting(Nodes(2, 1, "127.0.0.1", server.getsockname()[1]), 0.5)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("how", ["silent", "ended"])
def test_the_others_hear_of_a_lost_node(gone: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_SECONDS", 5.0)  # a busy machine takes a second to answer
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    port, received = free_port(), threading.Event()

    def one(rank: int) -> str:
        meeting = Meeting(Nodes(2, rank, "127.0.0.1", port), 10)
        meeting.agree({}, tmp_path / "out", None)
        meeting.share("" if rank == 0 else None)
        if rank == gone:
            if how == "ended":
                meeting.end(1, "out of memory")
            else:
                meeting._done.set()
            received.wait(60)
            return ""
        news = meeting.news(seconds=20)
        received.set()
        meeting.end(1)
        return news

    news = on_each(2, one)[1 - gone]
    assert news.startswith(f"node {gone} (")
    assert ("ended first: out of memory" if how == "ended" else "is lost: no heartbeat") in news


def test_a_third_node_hears_of_a_lost_one_from_node_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOST_SECONDS", 5.0)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    port, received = free_port(), threading.Barrier(3)

    def one(rank: int) -> str:
        meeting = Meeting(Nodes(3, rank, "127.0.0.1", port), 10)
        meeting.agree({}, tmp_path / "out", None)
        if rank == 2:
            meeting._done.set()
        news = meeting.news(seconds=20)
        received.wait(60)
        meeting.end(1)
        return news

    told = on_each(3, one)
    for rank in (0, 1):
        assert re.fullmatch(r"node 2 \(.*\) is lost: no heartbeat for 5 s", told[rank])


NODE_0 = """
import sys
from pathlib import Path
from seqtile.train.nodes import Meeting, Nodes
meeting = Meeting(Nodes(2, 0, "127.0.0.1", int(sys.argv[1])), 60)
print("here", flush=True)
if sys.argv[2] == "after":
    meeting.agree({}, Path(sys.argv[3]), None)
    print("agreed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_frozen_node_0_keeps_nobody(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay open, as where a machine loses its power, and no call to it is answered."""
    monkeypatch.setattr(module, "LOST_SECONDS", 5.0)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    port = free_port()
    command = [sys.executable, "-c", NODE_0, str(port), when, str(tmp_path / "out")]
    told: list[str] = []

    def other(first: subprocess.Popen[str]) -> None:
        meeting = Meeting(Nodes(2, 1, "127.0.0.1", port), 60)
        if when == "before":
            first.send_signal(signal.SIGSTOP)
            with pytest.raises(RunError) as refused:
                meeting.agree({}, tmp_path / "out", None)
            told.append(str(refused.value))
        else:
            meeting.agree({}, tmp_path / "out", None)
            assert first.stdout is not None and first.stdout.readline() == "agreed\n"
            first.send_signal(signal.SIGSTOP)
            told.append(meeting.news(seconds=60))
        meeting.end(1, "lost")

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "here\n"
            thread = threading.Thread(target=other, args=(first,), daemon=True)
            thread.start()
            thread.join(120)
            assert not thread.is_alive() and told
            assert ("has not answered for 5 s" if when == "before" else "node 0 (") in told[0]
        finally:
            first.kill()


def test_all_that_has_to_be_the_same_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="xxhash is not installed: it comes with seqtile[train]")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    values = {"engine": "zero3", "nproc": 2, "model": "demo", "dataset": str(tmp_path / "rows.jsonl")}
    nodes = Nodes(2, 0, "a", 1)
    facts = facts_of(build_recipe(values, {})[0], nodes)
    names = [*facts]
    assert names.index("recipe key 'engine'") < names.index("deepspeed")  # the reason stands before what follows of it
    assert {"seqtile", "torch", "accelerate", "deepspeed", "python", "recipe key 'max_length'"} <= facts.keys()
    other = facts_of(build_recipe({**values, "max_length": 4096}, {})[0], nodes)
    assert [name for name in facts if facts[name] != other[name]] == ["recipe key 'max_length'"]
    (tmp_path / "rows.jsonl").write_text('{"text": "b"}\n')
    other = facts_of(build_recipe(values, {})[0], nodes)
    assert [name for name in facts if facts[name] != other[name]] == [f"digest of dataset '{tmp_path / 'rows.jsonl'}'"]


def test_a_digest_sees_names_sizes_and_content(tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="xxhash is not installed: it comes with seqtile[train]")
    (tmp_path / "a").write_bytes(b"x" * 10)
    found = {digest_files(str(tmp_path))}
    (tmp_path / "a").write_bytes(b"x" * 11)
    found.add(digest_files(str(tmp_path)))
    (tmp_path / "a").rename(tmp_path / "b")
    found.add(digest_files(str(tmp_path)))
    content = bytearray(2**20)
    for place in (None, 300_000):  # far from the ends and the middle
        if place:
            content[place] ^= 1
        (tmp_path / "b").write_bytes(content)
        found.add(digest_files(str(tmp_path)))
    assert len(found) == 5 and digest_files("owner/name") is None


def test_each_node_saves_where_directories_are_its_own() -> None:
    values = {"engine": "ddp", "nproc": 2, "output": "out", "trainer": {"save_on_each_node": True, "bf16": False}}
    recipe = build_recipe(values, {})[0]
    assert saving(recipe, shared=True).trainer == {"bf16": False}
    assert saving(recipe, shared=False).trainer == {"bf16": False, "save_on_each_node": True}
    for engine in ("fsdp2", "zero2", "zero3"):
        assert saving(recipe.changed(engine=engine), shared=True).engine == engine
        with pytest.raises(UserError, match="give --output a directory that all nodes share"):
            saving(recipe.changed(engine=engine), shared=False)


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: it comes with seqtile[train]")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--wait-nodes", "5"], "got --wait-nodes 5 of one node, which waits for none"),
        ([*IN_TWO, "--engine", "ddp", "--wait-nodes", "0"], "got --wait-nodes 0, expected a number of seconds above 0"),
        ([*IN_TWO, "--engine", "ddp", "--wait-nodes", "nan"], "got --wait-nodes nan, expected a number of seconds"),
        (IN_TWO, "engine 'single' is one process, got 2 nodes"),
    ],
)
def test_the_command_refuses_before_it_waits(
    flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "REFUSED_SECONDS", 0.1)
    for name in ("LOCAL_RANK", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", *flags]) == USER_ERROR
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: it comes with seqtile[train]")
@pytest.mark.parametrize(("refusing", "slip"), [(0, "--recipe"), (1, "--recipe"), (1, "--learning-rates")])
def test_what_one_node_refuses_before_they_meet_the_others_hear(
    refusing: int, slip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe, or a flag, with a slip on one node; the others would wait for it for ten minutes."""
    for name in ("LOCAL_RANK", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").write_text("engine: ddp\nnproc: 2\nlearning_rates: 1e-4\n")
    port, received = free_port(), list[BaseException]()

    def other() -> None:
        meeting = Meeting(Nodes(2, 1 - refusing, "127.0.0.1", port), 60.0)
        try:
            meeting.agree({}, tmp_path / "out", None)
        except UserError as error:
            received.append(error)
        meeting.end(2, "received")

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    place = ["--nodes", "2", "--node-rank", str(refusing), "--rendezvous", f"127.0.0.1:{port}"]
    began = time.monotonic()
    assert main(["train", slip, str(tmp_path / "recipe.yaml"), *place]) == USER_ERROR
    thread.join(60)
    assert time.monotonic() - began < 40  # not the minute for which it is offered
    said = capsys.readouterr().err
    assert len(re.findall("learning[_-]rates", said)) == 1 and "telling the other nodes, for at most 60 s" in said
    assert len(received) == 1 and str(received[0]).startswith(f"node {refusing} refuses: ")
    assert re.search("learning[_-]rates", str(received[0]))


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: it comes with seqtile[train]")
def test_an_older_model_in_one_nodes_cache_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / commit[0] / "models--org--name" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text(commit)
    script = (
        "import sys; from seqtile.train.nodes import hub_revision; from seqtile.train.recipe import build_recipe\n"
        "print(*(hub_revision(build_recipe({'model': one, 'dataset': 'd'}, {})[0]) for one in sys.argv[1:]))"
    )
    found = []
    for folder in "ab":
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / folder))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        words = [sys.executable, "-c", script, "org/name", "org/other", "demo", str(tmp_path)]
        found.append(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.split())
    assert found == [["a" * 40, "None", "None", "None"], ["b" * 40, "None", "None", "None"]]


def test_other_weights_of_the_same_shape_have_another_digest(tmp_path: Path) -> None:
    """Each node that reads a model of its own would train a part of it."""
    for folder, byte in (("a", b"a"), ("b", b"a"), ("c", b"c")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.safetensors").write_bytes(b"x" * 500_000 + byte * 20_000 + b"x" * 500_000)
    one, same, other = (digest_pieces(str(tmp_path / folder)) for folder in "abc")
    assert one == same != other
    assert digest_pieces("org/model") is None
