"""Several nodes: which of them this is, that all would do the same, and whether the others are still running.

The command that waits in front on each node meets the others at a ``TCPStore`` that node 0 serves, before any process
is started, and so before any collective that could hang. Through the same store each node sends a heartbeat.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import USER_ERROR, RunError, UserError
from seqtile.devices import package_version
from seqtile.train.checkpoint_files import digest_of_file
from seqtile.train.recipe import DEMO, shown
from seqtile.train.same_run import PACKAGES

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from seqtile.train.recipe import Recipe

MEETING_SECONDS = 600.0
"""How long the first of the nodes waits for the last, unless the command says otherwise."""

LOST_SECONDS = 40.0
"""A node without a heartbeat for so long is lost."""

BEAT_SECONDS = 2.0
_POLL_SECONDS = 0.1
_READ_SECONDS = 10.0
"""How long node 0 serves a verdict that a node has not read."""

REFUSED_SECONDS = 60.0
"""How long a node that refuses waits for the others, to tell them: they may still be importing."""

MOST_NODES = 100_000
"""More than any cluster has; what is beyond is a slip, for which no tables are made."""

_PIECES, _PIECE_BYTES = 64, 4096
"""How much of a weight file nodes compare: other weights of a model's shape differ everywhere."""

_SLURM_PORTS = (20_000, 20_000)
"""First port, and how many: which of them a Slurm job takes follows from its number."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of one run.

    Attributes:
        count: how many, at least 2.
        rank: which one this is, from 0.
        host, port: where they meet; node 0 is there.
    """

    count: int
    rank: int
    host: str
    port: int

    @property
    def rendezvous(self) -> str:
        """Where they meet, as ``--rendezvous`` takes it."""
        return f"{_bracketed(self.host)}:{self.port}"


def find_nodes(
    count: int | None, rank: int | None, rendezvous: str | None, environment: Mapping[str, str] = os.environ
) -> Nodes | None:
    """The nodes that the flags, or else the environment of torchrun or of a Slurm step, name; None for one node.

    torchrun takes its own flags from ``PET_NNODES``, ``PET_NODE_RANK`` and ``PET_RDZV_ENDPOINT``, or
    ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT``, which operators such as Kubeflow's set; of Slurm the variables of
    ``srun`` are read.

    Raises:
        UserError: one is missing, or is no number in its range.
    """
    said = _torchrun(environment) or _slurm(environment)
    given = {"--nodes": count, "--node-rank": rank, "--rendezvous": rendezvous}
    if count == 1 or (count is None and said.get("--nodes") == "1"):
        own = rank if rank is not None or count is not None else _torchrun(environment).get("--node-rank")
        if str(own or 0) != "0":
            raise UserError(f"got --node-rank {own} of one node; give --nodes too")
        return None
    said |= {flag: str(value) for flag, value in given.items() if value is not None}
    if not said:
        return None
    for flag in given:
        if flag not in said:
            need = "needs" if len(said) == 1 else "need"
            raise UserError(
                f"{' and '.join(said)} {need} {flag} too: --nodes N --node-rank R --rendezvous HOST:PORT, the same N "
                "and HOST:PORT on each node, where HOST is node 0"
            )
    numbers = [_whole(said[flag], flag) for flag in ("--nodes", "--node-rank")]
    if not 0 < numbers[0] <= MOST_NODES:
        raise UserError(f"got --nodes {shown(numbers[0])}, expected at least 1 and at most {MOST_NODES}")
    if numbers[1] >= numbers[0]:
        raise UserError(f"got --node-rank {numbers[1]} of {numbers[0]} nodes; they are numbered from 0")
    place = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):([0-9]{1,5})", said["--rendezvous"], re.ASCII)
    if place is None or not 0 < int(place[3]) < 65536:
        raise UserError(
            f"got --rendezvous {said['--rendezvous']!r}, expected HOST:PORT, an address of node 0 that all reach (of "
            "IPv6 in brackets), and a port that is free there"
        )
    return Nodes(numbers[0], numbers[1], place[1] or place[2], int(place[3]))


def _whole(text: str, flag: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        fixed = "; how many nodes train is fixed at the start" if flag == "--nodes" else ""
        raise UserError(f"got {flag} {shown(text)}, expected a whole number{fixed}")
    return int(text)


def _torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the variables from which torchrun takes its flags."""
    if "PET_NNODES" not in environment:
        return {}
    found = {"--nodes": environment["PET_NNODES"], "--node-rank": environment.get("PET_NODE_RANK", "")}
    place = environment.get("PET_RDZV_ENDPOINT", "")
    if not place and "PET_MASTER_ADDR" in environment:
        place = f"{_bracketed(environment['PET_MASTER_ADDR'])}:{environment.get('PET_MASTER_PORT', '29500')}"
    return {flag: value for flag, value in {**found, "--rendezvous": place}.items() if value}


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the variables that ``srun`` gives each task of a step.

    Raises:
        UserError: there are several tasks on a node.
    """
    count = environment.get("SLURM_STEP_NUM_NODES")
    if count is None:
        return {}
    tasks = environment.get("SLURM_STEP_NUM_TASKS", count)
    if count != "1" and tasks != count:
        raise UserError(
            f"srun started {tasks} tasks on {count} nodes; seqtile train is started once on each and starts the "
            "processes of its devices itself: srun --ntasks-per-node=1"
        )
    first, span = _SLURM_PORTS
    job = _whole(environment.get("SLURM_JOB_ID", "0"), "SLURM_JOB_ID")
    port = environment.get("MASTER_PORT") or str(first + job % span)
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    found = {"--nodes": count, "--node-rank": environment.get("SLURM_NODEID", "")}
    place = f"{_bracketed(host)}:{port}" if host else ""
    return {flag: value for flag, value in {**found, "--rendezvous": place}.items() if value}


def check_tasks(engine: str, environment: Mapping[str, str] = os.environ) -> str:
    """Look at how many tasks ``srun`` has started on the only node of a step: each is a command like this one.

    Returns:
        What to say where each trains a model of its own, by the first of them; else nothing.

    Raises:
        UserError: each of them would start the processes of all devices.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if environment.get("SLURM_STEP_NUM_NODES") != "1" or tasks == "1":
        return ""
    if engine != "single":
        raise UserError(
            f"srun started {tasks} tasks on one node; seqtile train is started once and starts the processes of its "
            "devices itself: srun --ntasks=1"
        )
    said = f"srun started {tasks} tasks on one node, and each trains a model of its own; for one run: srun --ntasks=1"
    return said if environment.get("SLURM_LOCALID", "0") == "0" else ""


def _bracketed(host: str) -> str:
    """A host as a rendezvous names it; an address of IPv6 has colons of its own."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def first_host(hosts: str) -> str:
    """The first of a Slurm list of hosts: ``node[03-05,9],other1`` is ``node03``."""
    head = re.match(r"([^,\[]*)(?:\[([^,\]-]+)[^\]]*\])?([^,\[]*)", hosts)
    return "".join(part or "" for part in head.groups()) if head else hosts


def facts_of(recipe: Recipe, nodes: Nodes) -> dict[str, Any]:
    """What has to be the same on every node, by what it is called in a sentence."""
    found: dict[str, Any] = {"--nodes": nodes.count, "python": ".".join(platform.python_version_tuple()[:2])}
    found |= {name: package_version(name) for name in ("seqtile", *PACKAGES)}
    found |= {f"recipe key {key!r}": value for key, value in recipe.model_dump(mode="json").items()}
    if recipe.engine.startswith("zero"):  # named after the engine, where that differs
        found["deepspeed"] = package_version("deepspeed")
    found["digest of the model's config.json"] = digest_files(recipe.model, "config.json")
    found["revision of the model on the Hub"] = hub_revision(recipe)
    found["digest of pieces of the model's weights"] = digest_pieces(recipe.model)
    for what, name in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        found[f"digest of {what} {name!r}"] = None if name is None else digest_files(name)
    return found


def saving(recipe: Recipe, *, shared: bool) -> Recipe:
    """``recipe`` with checkpoints written once, to a directory that all nodes share, or by each node to its own.

    Raises:
        UserError: the engine writes its shards to one directory, or was not proven to go on from several.
    """
    key = "save_on_each_node"
    trainer = {name: value for name, value in recipe.trainer.items() if name != key}
    if shared:
        return recipe.changed(trainer=trainer)
    if recipe.engine != "ddp":
        raise UserError(
            f"output {recipe.output!r} is another directory on each node, and the checkpoints of engine "
            f"{recipe.engine!r} belong in one; give --output a directory that all nodes share, or use --engine ddp"
        )
    return recipe.changed(trainer={**trainer, key: True})


def digest_files(source: str, pattern: str = "**/*") -> str | None:
    """A digest of a file, or of the files below a directory: names and all of their content.

    None for what is no path, such as a Hub id.

    Cost:
        One read of every file, up to 0.4 seconds per GB beside the disk's own time.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(one for one in path.glob(pattern) if one.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path) if file != path else ''} {digest_of_file(file)} ".encode())
    return digest.hexdigest()


def digest_pieces(source: str) -> str | None:
    """A digest of the weight files in a directory: names, sizes, and :data:`_PIECES` evenly spaced pieces of each.

    None for what is no directory, such as a Hub id.

    Cost:
        256 KiB read per file.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(one for end in ("safetensors", "bin") for one in folder.glob(f"*.{end}")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_PIECES):
                file.seek(max(0, size - _PIECE_BYTES) * number // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def hub_revision(recipe: Recipe) -> str | None:
    """The commit that a Hub id of a model stands for on this node, where an older one may be in the cache.

    None for a directory, for the demo, and where the Hub does not give it.
    """
    if recipe.model == DEMO or Path(recipe.model).expanduser().exists():
        return None
    from transformers.utils import cached_file  # type: ignore[attr-defined]

    with suppress(OSError):
        found = cached_file(recipe.model, "config.json", revision=recipe.model_kwargs.get("revision"))
        return None if found is None else Path(found).parent.name
    return None


class Meeting:
    """One node's connection to the others.

    Args:
        nodes: which one this is.
        seconds: how long to wait for the others.

    Raises:
        UserError: the port is in use on node 0, or this node's number is taken.
        RunError: node 0 does not answer.
    """

    def __init__(self, nodes: Nodes, seconds: float = MEETING_SECONDS) -> None:
        self.nodes, self._seconds = nodes, seconds
        self._store = _serve(nodes) if nodes.rank == 0 else _join(nodes, seconds)
        self._deadline = time.monotonic() + seconds
        self._done, self._lock = threading.Event(), threading.Lock()
        self._others = {rank: f"node {rank}" for rank in range(nodes.count) if rank != nodes.rank}
        self._judged = self._agreed = self._unreachable = False
        self._lost: tuple[int, str] | None = None  # which node, and what has become of it
        if self._store.add(f"claim/{nodes.rank}", 1) > 1:
            raise UserError(
                f"another command says --node-rank {nodes.rank} at {nodes.rendezvous} already; give each node its own"
            )
        threading.Thread(target=self._beat, daemon=True).start()

    def agree(self, facts: Mapping[str, Any], output: Path, start: Path | None) -> dict[str, Any]:
        """Compare every node's facts.

        Args:
            facts: of :func:`facts_of`.
            output: the run's directory on this node.
            start: the newest whole checkpoint on this node, of a run that goes on.

        Returns:
            The same on every node, among it: ``"shared"``, whether all write to one directory; ``"start"``, the newest
            checkpoint that may be whole on all; ``"port"``, for the processes' own rendezvous on node 0.

        Raises:
            UserError: the nodes disagree, or one has refused.
            RunError: a node did not come in time.
        """
        mine: dict[str, Any] = {
            "host": socket.gethostname(),
            "facts": dict(facts),
            "start": start.name if start else None,
        }
        probe = _SharedFile(output) if self.nodes.rank == 0 else None
        try:
            if probe is not None:
                self._store.set("probe", probe.name)
            mine["sees"] = _nearest(output).joinpath(self._wait_for("probe")).exists()
            self._store.set(f"node/{self.nodes.rank}", json.dumps(mine))
            if self.nodes.rank == 0:
                self._store.set("verdict", json.dumps(self._judge()))
                self._judged = True
            verdict: dict[str, Any] = json.loads(self._wait_for("verdict"))
        finally:
            if probe is not None:
                probe.close()
        self._store.set(f"read/{self.nodes.rank}", "")
        if not verdict["refused"] and verdict["count"] != self.nodes.count:
            verdict["refused"] = f"node 0 was told --nodes {verdict['count']} and this one {self.nodes.count}"
        if verdict["refused"]:
            if self.nodes.rank == 0:
                self._wait_until(lambda: all(self._store.check([f"read/{other}"]) for other in verdict["came"]))
            raise (RunError if verdict["missing"] else UserError)(verdict["refused"])
        self._others = {rank: f"node {rank} ({verdict['hosts'][str(rank)]})" for rank in self._others}
        self._agreed = True
        return verdict

    def share(self, value: str | None) -> str:
        """What node 0 says, on every node; on the others ``value`` is None."""
        if value is not None:
            self._store.set("shared", value)
        return self._wait_for("shared")

    def news(self, seconds: float = 0.0) -> str:
        """What has happened to another node, for at most so many seconds to come; empty while all is well."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._lost is not None:
                    return f"{self._others.get(self._lost[0], 'this node')} {self._lost[1]}"
            if time.monotonic() >= end:
                return ""
            time.sleep(_POLL_SECONDS)

    def end(self, code: int, message: str = "") -> None:
        """Tell the others how it ended here.

        Node 0 stays until all others have ended too, or are lost; where it refuses before they have come, for at most
        :data:`REFUSED_SECONDS`.
        """
        with suppress(RuntimeError):
            if self._unreachable:  # nobody is there to be told, and a call would wait for an answer
                self._done.set()
                return
            self._store.set(f"end/{self.nodes.rank}", json.dumps({"code": code, "message": message}))
            refuses = bool(code and message and not self._judged)
            late = time.monotonic() + (REFUSED_SECONDS if refuses else float("inf"))
            while self.nodes.rank == 0 and (refuses or (self._agreed and not self.news())):
                if all(self._store.check([f"end/{other}"]) for other in self._others) or time.monotonic() >= late:
                    break
                time.sleep(_POLL_SECONDS)
            if self.nodes.rank == 0 and code:
                time.sleep(2 * BEAT_SECONDS)  # for those that are to hear it
        self._done.set()

    def _judge(self) -> dict[str, Any]:
        """Node 0's verdict."""
        count = self.nodes.count
        missing = self._wait_for_others()
        keys = {rank: f"node/{rank}" for rank in range(count)}
        here = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        verdict: dict[str, Any] = {"count": count, "refused": "", "missing": False, "port": free_port()}
        verdict["came"] = [*here]
        for rank in range(count):
            if end := self._end_of(rank):
                return {**verdict, "refused": f"node {rank} refuses: {end['message'] or 'it was stopped'}"}
        if missing:
            names, plural = ", ".join(map(str, missing)), "s" if len(missing) > 1 else ""
            words = (
                f"node{plural} {names} of {count} did not come to {self.nodes.rendezvous} within "
                f"{self._seconds:.0f} s; start the same command there, with --node-rank {names}"
            )
            return {**verdict, "refused": words, "missing": True}
        if len(here) < count:
            return {**verdict, "refused": f"{self.news()} (before it had read its model and data)", "missing": True}
        verdict["hosts"] = {rank: node["host"] for rank, node in here.items()}
        for rank, node in here.items():
            for name, value in here[0]["facts"].items():
                other = node["facts"].get(name)
                if other != value:
                    words = (
                        f"nodes disagree: {name} is {value!r} on node 0 ({here[0]['host']}) and {other!r} on node "
                        f"{rank} ({node['host']}); start the same command with the same versions and files on each"
                    )
                    return {**verdict, "refused": words}
        steps = [node["start"] for node in here.values()]
        if None in steps and any(steps):
            on, new = (next(rank for rank in here if bool(here[rank]["start"]) == whole) for whole in (True, False))
            words = (
                f"node {on} ({here[on]['host']}) would go on from {here[on]['start']} and node {new} "
                f"({here[new]['host']}) from the first step; give --resume on each, and node {new} the checkpoint"
            )
            return {**verdict, "refused": words}
        oldest = None if None in steps else min(steps, key=lambda name: int(name.rpartition("-")[2]))
        return {**verdict, "shared": all(node["sees"] for node in here.values()), "start": oldest}

    def _wait_for_others(self) -> list[int]:
        """Wait until all have said what they would do, or one refuses or is lost; returns those that have not come.

        Only to come is there a time limit: how long a node reads its model and data depends on their size.
        """
        late = self._deadline
        while True:
            ended = [rank for rank in range(self.nodes.count) if self._end_of(rank)]
            quiet = [rank for rank in range(self.nodes.count) if not self._store.check([f"node/{rank}"])]
            missing = [rank for rank in quiet if not self._store.check([f"claim/{rank}"])]
            if ended:
                late = min(late, time.monotonic() + REFUSED_SECONDS)
            if not set(quiet) - set(ended) or (time.monotonic() >= late and (missing or ended)):
                return missing
            if not ended and self.news():
                return missing
            time.sleep(_POLL_SECONDS)

    def _end_of(self, rank: int) -> dict[str, Any] | None:
        key = f"end/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _wait_for(self, key: str) -> str:
        """What node 0 sets, unless it ends before: as long as its store answers, it is there."""
        self._wait_until(lambda: self._store.check([key]) or bool(self._end_of(0)), float("inf"))
        if not self._store.check([key]):
            end = self._end_of(0) or {"message": ""}
            raise UserError(f"node 0 refuses: {end['message']}")
        return bytes(self._store.get(key)).decode()

    def _wait_until(self, holds: Callable[[], bool], deadline: float | None = None) -> bool:
        """Whether it comes to hold in time."""
        deadline = time.monotonic() + _READ_SECONDS if deadline is None else deadline
        while True:
            try:
                if holds():
                    return True
            except RunError:
                raise
            except RuntimeError:
                raise RunError(f"the connection to node 0 at {self.nodes.rendezvous} has broken") from None
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def _beat(self) -> None:
        """Give signs of life and look for those of the others."""
        # Node 0 looks at all and tells the others, so that what they ask of its store grows with their number only.
        seen = {rank: (-1, time.monotonic()) for rank in (self._others if self.nodes.rank == 0 else (0,))}
        while not self._done.wait(BEAT_SECONDS):
            try:
                self._store.add(f"beat/{self.nodes.rank}", 1)
                lost = self._look(seen)
                if lost is not None and self.nodes.rank == 0:
                    self._store.set("lost", json.dumps(lost))
            except RuntimeError as error:
                lost = None if self.nodes.rank == 0 else (0, f"is lost: {error}")
                self._unreachable = lost is not None
            with self._lock:
                self._lost = self._lost or lost
            if self._unreachable:
                return

    def _look(self, seen: dict[int, tuple[int, float]]) -> tuple[int, str] | None:
        for rank in seen:
            if end := self._end_of(rank):
                if end["code"]:
                    return rank, f"ended first: {end['message'] or 'exit code ' + str(end['code'])}"
                continue
            if not self._store.check([f"claim/{rank}"]):  # it has not come yet
                seen[rank] = (-1, time.monotonic())
                continue
            beats, since = self._store.add(f"beat/{rank}", 0), seen[rank]
            if beats != since[0]:
                seen[rank] = (beats, time.monotonic())
            elif time.monotonic() - since[1] > LOST_SECONDS:
                return rank, _silent()
        if self.nodes.rank and self._store.check(["lost"]):
            rank, words = json.loads(self._store.get("lost"))
            return rank, words
        return None


def _silent() -> str:
    return f"is lost: no heartbeat for {LOST_SECONDS:.0f} s"


def tell_refusal(nodes: Nodes, message: str, seconds: float) -> None:
    """Tell the other nodes that this one refuses before they have met: else they would wait for it.

    Args:
        nodes: which one this is.
        message: why.
        seconds: how long the others wait for it; at most :data:`REFUSED_SECONDS` are spent here.
    """
    with suppress(UserError, RunError):
        Meeting(nodes, min(seconds, REFUSED_SECONDS)).end(USER_ERROR, message)


class _AnsweringStore:
    """Node 0's store on another node: a call without an answer for :data:`LOST_SECONDS` raises.

    torch's client waits without a limit while the connection is not closed, as on a node that lost its power or its
    network. Seen in torch 2.13: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/TCPStore.cpp
    """

    def __init__(self, store: TCPStore, rendezvous: str) -> None:
        self._store, self._rendezvous = store, rendezvous

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask(self._store.get, key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(call(*arguments))
            except RuntimeError as error:
                answers.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(LOST_SECONDS)
        if not answers:
            raise RunError(f"node 0 at {self._rendezvous} has not answered for {LOST_SECONDS:.0f} s")
        if isinstance(answers[0], RuntimeError):
            raise RunError(f"the connection to node 0 at {self._rendezvous} has broken") from answers[0]
        return answers[0]


class _SharedFile:
    """An empty file beside the output, by which another node sees that it writes to the same directory."""

    def __init__(self, output: Path) -> None:
        descriptor, path = tempfile.mkstemp(prefix=".seqtile-", dir=_nearest(output))
        os.close(descriptor)
        self._path = Path(path)
        self.name = self._path.name

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


def _nearest(path: Path) -> Path:
    """The directory, or the first above it that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _serve(nodes: Nodes) -> TCPStore:
    """Node 0's store, which listens on every address of this machine."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", nodes.port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        raise UserError(
            f"node 0 cannot listen at port {nodes.port} ({error.strerror}); another program, or an earlier run, has "
            "it: give --rendezvous another port, the same on each node"
        ) from None
    return TCPStore(
        "localhost", nodes.port, None, True, timedelta(seconds=LOST_SECONDS), wait_for_workers=False,
        master_listen_fd=server.detach(),
    )  # fmt: skip


def _join(nodes: Nodes, seconds: float) -> _AnsweringStore:
    """The store of node 0, as soon as it is there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + seconds
    while True:  # torch would write a stack to stderr for each try
        try:
            socket.create_connection((nodes.host, nodes.port), timeout=max(1.0, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"node 0 did not answer at {nodes.rendezvous} within {seconds:.0f} s ({error.strerror or error}); "
                    "start the same command there with --node-rank 0, or give --rendezvous an address of it"
                ) from None
            time.sleep(_POLL_SECONDS)
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(
                TCPStore(nodes.host, nodes.port, None, False, timedelta(seconds=LOST_SECONDS), wait_for_workers=False)
            )

    # Whatever else listens there is asked for an answer without a time limit. Seen in torch 2.13:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/TCPStore.cpp
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(_READ_SECONDS, deadline - time.monotonic()))
    if not found:
        raise RunError(
            f"what listens at {nodes.rendezvous} is not seqtile train's node 0; give --rendezvous an address of it"
        )
    return _AnsweringStore(found[0], nodes.rendezvous)
