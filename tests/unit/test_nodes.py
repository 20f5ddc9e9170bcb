"""Which node this is, and what every process compares before a weight is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refusals import command_refused, refused
from seqtile.train.nodes import Nodes, find_nodes, first_host
from seqtile.train.ranks import SHARED_FILE, agree, digest_pieces
from seqtile.train.recipe import build_recipe

FLAGS = (2, 1, "10.0.0.1:29500")
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]",
}  # fmt: skip

IN_TWO = ["--nodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:29500"]


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((None, None, None), {}, None),
        ((1, None, None), {}, None),
        (FLAGS, {}, Nodes(2, 1, "10.0.0.1:29500")),
        ((2, 0, "[fe80::1]:29500"), {}, Nodes(2, 0, "[fe80::1]:29500")),
        ((None, None, None), SRUN, Nodes(4, 2, "gpu03:24711")),
        ((None, None, None), {**SRUN, "MASTER_ADDR": "ib-gpu03", "MASTER_PORT": "1234"}, Nodes(4, 2, "ib-gpu03:1234")),
        ((None, None, "other:5"), SRUN, Nodes(4, 2, "other:5")),
        ((None, None, None), {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ((None, None, None), {"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0"}, None),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a:1"},
            Nodes(2, 1, "a:1"),
        ),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"},
            Nodes(2, 1, "a:29500"),
        ),
        (
            (None, None, None),
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "fe80::1"},
            Nodes(2, 1, "[fe80::1]:29500"),
        ),
        ((None, None, None), {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
    ],
)
def test_nodes_are_those_of_the_flags_or_of_the_environment(
    flags: tuple[Any, ...], environment: dict[str, str], expected: Nodes | None
) -> None:
    assert find_nodes(*flags, environment) == expected


@pytest.mark.parametrize(
    ("flags", "environment", "refusal"),
    [
        ((2, 1, None), {}, ("nodes.flags-missing", "also need --rendezvous")),
        ((None, 1, None), {}, ("nodes.flags-missing", "also need --nodes and --rendezvous")),
        ((1, 1, None), {}, ("nodes.rank-without-nodes",)),
        ((2, 2, "a:1"), {}, ("nodes.rank-out-of-range", "--node-rank 2", "0 to 1")),
        ((2, 0, "a"), {}, ("nodes.rendezvous-malformed",)),
        ((2, 0, "a:99999"), {}, ("nodes.rendezvous-malformed",)),
        ((2, 0, "fe80::1:29500"), {}, ("nodes.rendezvous-malformed",)),
        ((2, 0, "a,b:1"), {}, ("nodes.rendezvous-malformed",)),
        ((None, None, None), {**SRUN, "SLURM_NODEID": "x"}, ("nodes.not-an-integer", "--node-rank 'x'")),
        ((None, None, None), {**SRUN, "SLURM_STEP_NODELIST": ""}, ("nodes.flags-missing", "also need --rendezvous")),
        (
            (None, None, None),
            {"PET_NNODES": "1:4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
            ("nodes.not-an-integer", "--nodes '1:4'"),
        ),
        (
            (None, None, None),
            {**SRUN, "SLURM_STEP_NUM_TASKS": "32"},
            ("nodes.several-tasks-per-node", "32 tasks"),
        ),
        (
            (None, None, None),
            {**SRUN, "SLURM_STEP_NUM_NODES": "1"},
            ("nodes.several-tasks-per-node", "4 tasks"),
        ),
    ],
)
def test_what_is_missing_or_no_number_is_refused(
    flags: tuple[Any, ...], environment: dict[str, str], refusal: tuple[str, ...]
) -> None:
    with refused(*refusal):
        find_nodes(*flags, environment)


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


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: it comes with seqtile[train]")
@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--wait-nodes", "5"], ("nodes.wait-on-single-node", "--wait-nodes 5")),
        (IN_TWO, ("engine.single-on-several-nodes", "2 nodes")),
        ([*IN_TWO, "--engine", "ddp", "--nproc", "4", "--on-oom", "retry"], ("on-oom.retry-on-several-nodes",)),
    ],
)
def test_the_command_refuses_before_it_waits(
    flags: list[str], refusal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    command_refused(["train", *flags], *refusal)


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: it comes with seqtile[train]")
@pytest.mark.parametrize("flag", ["--nodes", "--node-rank", "--rendezvous", "--wait-nodes"])
def test_under_a_launcher_each_flag_of_nodes_is_refused_as_the_launchers(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command_refused(["train", flag, "1"], "nodes.flag-under-launcher", flag)


class Rank:
    """One of two ranks, whose gather finds what the other one has given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.gathered = folder, list[Any]()
        self.values = {"engine": "ddp", "nproc": 2, "output": str(folder / "out"), "dataset": "d", "model": "demo"}
        self.start: Path | None = None
        self.datasets = pytest.importorskip(
            "datasets", reason="datasets is not installed: it comes with seqtile[train]"
        )
        self.rows = ["a", "b"]
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)
        self.set_local_rank = lambda rank: monkeypatch.setenv("LOCAL_RANK", str(rank))

    def gather(self, everyone: list[Any], mine: Any) -> None:
        self.gathered.append(mine)
        everyone[:] = [self.gathered[0], mine]

    def agree(self, local_rank: int = 0, **changes: Any) -> bool:
        """Whether this rank saves by itself, if its settings are the first one's."""
        self.set_local_rank(local_rank)
        arguments = SimpleNamespace(save_on_each_node=False)
        train = SimpleNamespace(rows=self.datasets.Dataset.from_dict({"text": self.rows}))
        data = SimpleNamespace(sets={"train": train}, arguments=arguments)
        agree(build_recipe({**self.values, **changes}, {})[0], data, self.start)  # type: ignore[arg-type]
        return arguments.save_on_each_node


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["tile", "rows", "--resume", "weights", "torch"])
def test_ranks_that_would_train_otherwise_are_refused(
    what: str, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100_000)
    if what == "weights":
        rank.values["model"] = str(tmp_path)
    assert not rank.agree() and not rank.agree(local_rank=1)
    if what == "weights":  # the other processes of a node read the same files
        (tmp_path / "model.safetensors").write_bytes(b"b" * 100_000)
        assert not rank.agree(local_rank=1)
    elif what == "rows":
        rank.rows = ["a", "c"]
    elif what == "--resume":
        rank.start = Path("checkpoint-3")
    elif what == "torch":
        monkeypatch.setattr("seqtile.train.ranks.package_version", lambda _: "0.1")
    with refused("ranks.settings-differ", f"rank 1 ({socket.gethostname()})") as raised:
        rank.agree(tile=16) if what == "tile" else rank.agree()
    assert what in str(raised.value) or what == "torch"


def test_each_node_saves_where_directories_are_its_own(rank: Rank, tmp_path: Path) -> None:
    shared = tmp_path / SHARED_FILE
    shared.write_text("written by node 0")
    assert not rank.agree() and not rank.agree()
    shared.unlink()
    assert rank.agree()
    rank.gathered.clear()
    shared.write_text("written by node 0")
    rank.agree(engine="fsdp2")
    shared.unlink()
    with refused("output.differs-by-node"):
        rank.agree(engine="fsdp2")


def test_an_older_model_in_one_nodes_cache_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / commit[0] / "models--org--name" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text(commit)
    script = (
        "import sys; from seqtile.train.ranks import hub_revision; from seqtile.train.recipe import build_recipe\n"
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
