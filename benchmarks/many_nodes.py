"""The tables of docs/many-nodes.md: what seqtile plan says of one model from 1M to 16M tokens on 8 to 64 devices.

Run it from the repository::

    PYTHONPATH=benchmarks python benchmarks/many_nodes.py

Every device on one row: ring attention over FSDP2 (``--cp-size``), and Ulysses over ZeRO-3 (``--sp-size``) as far as
the query heads go; checkpoints on the host, full activation checkpointing, eight devices and 2 TiB of host memory a
node.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pages import write_between
from seqtile.devices import package_version
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import find_device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.model_shapes import read_config
from seqtile.planner.request import Request
from seqtile.planner.step_config import PLANNED
from seqtile.planner.traffic import bytes_between_nodes

PAGE = Path(__file__).parents[1] / "docs" / "many-nodes.md"
MODEL, DEVICE, PER_NODE, HOST = "llama-8b", "h200", 8, 2 * 2**40
MILLIONS, GPUS = (1, 2, 4, 8, 16), (8, 16, 32, 64)
GIB = 2**30
OPTIONS: TilingOptions = replace(PLANNED, loss_tile="auto", checkpoint="layer", offload=True)


def planner(way: str, gpus: int, like: Planner | None) -> Planner:
    """Ring attention or Ulysses with one row on all devices, or on as many as the heads allow."""
    ring = way == "ring"
    split: dict[str, Any] = {"cp_size": gpus} if ring else {"sp_size": min(gpus, 32)}
    request = Request(
        model=MODEL, config=like.request.config if like else read_config(MODEL), device=find_device(DEVICE), gpus=gpus,
        nodes=gpus // PER_NODE, host_memory=HOST, engine="fsdp2" if ring else "zero3", options=OPTIONS, **split,
    )  # fmt: skip
    return Planner(request, like=like)


def table_rows(way: str, one: Planner) -> tuple[str, str]:
    """A line of each table: what a device and a node's host hold, and what leaves each node."""
    gpus, split = one.request.gpus, one.request.split
    name = f"`--engine fsdp2 --cp-size {split}`" if way == "ring" else f"`--engine zero3 --sp-size {split}`"
    cells, between = [], []
    for million in MILLIONS:
        tokens = million * 2**20
        estimate = one.estimate(tokens)
        host = estimate.host.expected / GIB
        told = f"{estimate.device.expected / GIB:,.0f} + {host:,.0f}"
        cells.append(told if one.fits(estimate) else f"({told})")
        bytes_out = sum(bytes_between_nodes(one.request, one.counts, tokens).values())
        between.append(f"{bytes_out / GIB:,.0f}" if one.request.nodes > 1 else "0")
    longest, limit = one.longest()
    cells.append(f"{longest / 2**20:.1f}M, {limit.split(':')[0]}")
    moved = f"| {name} | {gpus} | {one.request.nodes} | {' | '.join(between)} |"
    return f"| {name} | {gpus} | {' | '.join(cells)} |", moved


def main() -> None:
    lengths = [f"| {' | '.join(['way', 'devices', *(f'{m}M tokens' for m in MILLIONS), 'longest'])} |"]
    lengths += ["|---" * (len(MILLIONS) + 3) + "|"]
    moved = [f"| {' | '.join(['way', 'devices', 'nodes', *(f'{m}M tokens' for m in MILLIONS)])} |"]
    moved += ["|---" * (len(MILLIONS) + 3) + "|"]
    like: Planner | None = None
    for way in ("ring", "Ulysses"):
        for gpus in GPUS:
            one = planner(way, gpus, like)
            like = like or one
            fits, leaves = table_rows(way, one)
            lengths.append(fits)
            moved.append(leaves)
            print(lengths[-1], moved[-1], sep="\n", flush=True)
    versions = ", ".join(f"{package} {package_version(package)}" for package in ("torch", "transformers"))
    said = f"Written by `python benchmarks/many_nodes.py` on {date.today()} ({versions}); planned, not measured."
    write_between(PAGE, "<!-- lengths -->", "<!-- end of lengths -->", [said, "", *lengths])
    write_between(PAGE, "<!-- moved -->", "<!-- end of moved -->", [said, "", *moved])


if __name__ == "__main__":
    main()
