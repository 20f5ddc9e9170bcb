"""The table of docs/multi-gpu.md: the plan of one model at 1M and 4M tokens on 8 to 64 devices.

Run it from the repository::

    PYTHONPATH=benchmarks python benchmarks/many_nodes.py

All devices share one sequence: ring attention over FSDP2 (``--cp-size``), and Ulysses over ZeRO-3 (``--sp-size``) up to
the number of query heads. Layer checkpoints on the host, eight devices and 2 TiB of host memory per node.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pages import write_between
from seqtile.devices import package_version
from seqtile.models.configs import read_config
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import find_device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.step_config import PLANNED
from seqtile.planner.traffic import bytes_between_nodes

PAGE = Path(__file__).parents[1] / "docs" / "multi-gpu.md"
MODEL, DEVICE, PER_NODE, HOST = "llama-8b", "h200", 8, 2 * 2**40
MILLIONS, RING, ULYSSES = (1, 4), (8, 16, 32, 64), (8, 16, 32)
GIB, MILLION = 2**30, 2**20
OPTIONS: TilingOptions = replace(PLANNED, loss_tile="auto", checkpoint="layer", offload=True)


def planner(flag: str, gpus: int, like: Planner | None) -> Planner:
    """The plan of one sequence on ``gpus`` devices."""
    split: dict[str, Any] = {flag: gpus}
    request = Request(
        model=MODEL, config=like.request.config if like else read_config(MODEL), device=find_device(DEVICE), gpus=gpus,
        nodes=gpus // PER_NODE, host_memory=HOST, engine="fsdp2" if flag == "cp_size" else "zero3", options=OPTIONS,
        **split,
    )  # fmt: skip
    return Planner(request, like=like)


def table_row(flag: str, plan: Planner) -> str:
    """Device and host memory at each length, the longest sequence, and what leaves each node at 1M tokens."""
    cells = [f"`--{flag.replace('_', '-')} {plan.request.gpus}`"]
    for million in MILLIONS:
        estimate = plan.estimate(million * MILLION)
        memory = f"{estimate.device.expected / GIB:,.0f} + {estimate.host.expected / GIB:,.0f}"
        cells.append(memory if plan.fits(estimate) else f"({memory})")
    longest, limit = plan.longest()
    cells.append("over 16M" if limit == "positions" else f"{longest / MILLION:.1f}M")
    sent = sum(bytes_between_nodes(plan.request, plan.counts, MILLION).values()) if plan.request.nodes > 1 else 0
    return f"| {' | '.join([*cells, f'{sent / GIB:,.0f}'])} |"


def main() -> None:
    headings = ["devices on a sequence", *(f"{million}M tokens" for million in MILLIONS), "longest", "sent by a node"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    like: Planner | None = None
    for flag, sizes in (("cp_size", RING), ("sp_size", ULYSSES)):
        for gpus in sizes:
            plan = planner(flag, gpus, like)
            like = like or plan
            lines.append(table_row(flag, plan))
            print(lines[-1], flush=True)
    versions = ", ".join(f"{package} {package_version(package)}" for package in ("torch", "transformers"))
    source = f"Plan of `python benchmarks/many_nodes.py`, {date.today()}, {versions}."
    write_between(PAGE, "<!-- lengths -->", "<!-- end of lengths -->", [*lines, "", source])


if __name__ == "__main__":
    main()
