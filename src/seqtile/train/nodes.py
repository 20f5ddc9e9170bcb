"""Find this node's rank from flags, torchrun's variables or those of a Slurm step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from seqtile._errors import UserError

WAIT_SECONDS = 600.0
"""How long the first of the nodes waits for the last, unless the command says otherwise."""

SLURM_PORT, SLURM_PORTS = 20_000, 20_000
"""First port, and how many: which of them a Slurm job takes follows from its number."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of one run.

    Attributes:
        count: how many, at least 2.
        rank: which one this is, from 0.
        rendezvous: where they meet, ``HOST:PORT``; node 0 is there.
    """

    count: int
    rank: int
    rendezvous: str


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
    values = _from_torchrun(environment) or _from_slurm(environment)
    if count == 1 or (count is None and values.get("--nodes") == "1"):
        if rank:
            raise UserError("nodes.rank-without-nodes", f"got --node-rank {rank} without --nodes")
        return None
    flags = {"--nodes": count, "--node-rank": rank, "--rendezvous": rendezvous}
    values |= {flag: str(value) for flag, value in flags.items() if value is not None}
    if not values:
        return None
    if missing := [flag for flag in flags if not values.get(flag)]:
        raise UserError(
            "nodes.flags-missing",
            f"several nodes also need {' and '.join(missing)}: --nodes N --node-rank R --rendezvous HOST:PORT, with "
            "the same N and the address of node 0 on each node",
        )
    for flag in ("--nodes", "--node-rank"):
        if not (values[flag].isascii() and values[flag].isdigit()):
            raise UserError(
                "nodes.not-an-integer",
                f"got {flag} {values[flag]!r}, expected an integer; the number of nodes is fixed",
            )
    nodes = Nodes(int(values["--nodes"]), int(values["--node-rank"]), values["--rendezvous"])
    if nodes.rank >= nodes.count:
        raise UserError("nodes.rank-out-of-range", f"got --node-rank {nodes.rank}, expected 0 to {nodes.count - 1}")
    address = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):([0-9]{1,5})", nodes.rendezvous, re.ASCII)
    if address is None or not 0 < int(address[2]) < 65536:
        raise UserError(
            "nodes.rendezvous-malformed",
            f"got --rendezvous {nodes.rendezvous!r}, expected HOST:PORT with an address of node 0 that all nodes "
            "reach (IPv6 in brackets) and a free port",
        )
    return nodes


def _from_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    if "PET_NNODES" not in environment:
        return {}
    rendezvous = environment.get("PET_RDZV_ENDPOINT", "")
    if not rendezvous and "PET_MASTER_ADDR" in environment:
        rendezvous = f"{_bracketed(environment['PET_MASTER_ADDR'])}:{environment.get('PET_MASTER_PORT', '29500')}"
    rank = environment.get("PET_NODE_RANK", "")
    return {"--nodes": environment["PET_NNODES"], "--node-rank": rank, "--rendezvous": rendezvous}


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the variables that ``srun`` sets for each task of a step."""
    count = environment.get("SLURM_STEP_NUM_NODES")
    if count is None:
        return {}
    tasks = environment.get("SLURM_STEP_NUM_TASKS", count)
    if tasks != count:
        raise UserError(
            "nodes.several-tasks-per-node",
            f"srun started {tasks} tasks on {count} nodes, expected one per node (seqtile train starts the "
            "processes of the devices); use srun --ntasks-per-node=1",
        )
    job = environment.get("SLURM_JOB_ID", "0")
    port = environment.get("MASTER_PORT") or str(SLURM_PORT + (int(job) if job.isdigit() else 0) % SLURM_PORTS)
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    rendezvous = f"{_bracketed(host)}:{port}" if host else ""
    return {"--nodes": count, "--node-rank": environment.get("SLURM_NODEID", ""), "--rendezvous": rendezvous}


def _bracketed(host: str) -> str:
    """A host as a rendezvous names it; an IPv6 address has colons of its own."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def first_host(hosts: str) -> str:
    """The first of a Slurm list of hosts: ``node[03-05,9],other1`` is ``node03``."""
    head = re.match(r"([^,\[]*)(?:\[([^,\]-]+)[^\]]*\])?([^,\[]*)", hosts)
    return "".join(group or "" for group in head.groups()) if head else hosts
