"""Several "nodes" on one machine: the command in front of each runs in a thread, and they meet over loopback.

``python -m node_fronts FILE`` trains every engine so and compares with one process; what it wrote is in
``benchmarks/results/many-nodes.md``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tiny_run
from seqtile.cli import train_command
from seqtile.devices import package_version
from seqtile.train import launch
from seqtile.train.nodes import Nodes
from seqtile.train.recipe import build_recipe

TESTS = Path(__file__).parent
VALUES = {
    "learning_rate": 1e-2, "tile": 16, "trainer": {"lr_scheduler_type": "constant"}, "max_length": 96, "loss_tile": 16,
    "steps": 3,
}  # fmt: skip
"""Rows are 72 to 96 tokens long: ranks have different numbers of tokens in most steps."""

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")

CASES: dict[str, dict[str, Any]] = {
    "DDP": {"engine": "ddp", "nproc": 2},
    "DDP, 2 processes a node": {"engine": "ddp", "nproc": 4},
    "FSDP2": {"engine": "fsdp2", "nproc": 2},
    "FSDP2, 2 processes a node": {"engine": "fsdp2", "nproc": 4},
    "FSDP2 + context parallel": {"engine": "fsdp2", "nproc": 2, "cp_size": 2},
    "FSDP2 + context parallel, 2 processes a node": {"engine": "fsdp2", "nproc": 4, "cp_size": 2},
    "ZeRO-3": {"engine": "zero3", "nproc": 2},
    "ZeRO-3, 2 processes a node": {"engine": "zero3", "nproc": 4},
    "ZeRO-3 + Ulysses": {"engine": "zero3", "nproc": 2, "sp_size": 2},
    "ZeRO-3 + Ulysses, 2 processes a node": {
        "engine": "zero3", "nproc": 4, "sp_size": 2, "gradient_accumulation": 2,
    },
}  # fmt: skip
"""Under Ulysses accelerate deals rows to data-parallel ranks in another order: two micro-batches hold the same four."""


def prepare(folder: Path) -> Path:
    """A tiny model and rows of different lengths."""
    tiny_run.save_model(folder / "model", num_attention_heads=4, num_key_value_heads=2)
    rows = [{"text": row["text"][: 72 + 5 * (index % 6)]} for index, row in enumerate(tiny_run.text_rows())]
    tiny_run.write_jsonl(folder / "rows.jsonl", rows)
    return folder


def recipe(folder: Path, output: Path, **values: Any) -> Any:
    given = {"model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output": str(output), **values}
    return build_recipe({**VALUES, **given}, {})[0]


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def on_each(count: int, run: Callable[[int], Any]) -> dict[int, Any]:
    """What ``run`` returns, or raises, for each node, all at the same time."""
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except Exception as error:  # noqa: BLE001  a test looks at it
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


def train_on_nodes(
    folder: Path, output: Path, nodes: int = 2, say: Callable[[str], None] = lambda _: None, resume: bool = False,
    **values: Any,
) -> dict[int, Any]:  # fmt: skip
    """Exit codes, or errors, of the commands in front."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    from seqtile.recognise import decoder_layers  # noqa: F401  not for the first time in two threads at once
    from seqtile.train import load  # noqa: F401

    port, of_the_ring = free_port(), int(values.get("cp_size", 1)) > 1
    return on_each(
        nodes,
        lambda rank: launch.launch(
            recipe(folder, output, **values), resume=resume, resume_from=None, overwrite=False,
            trust_checkpoint=False, say=say, worker="ring_worker" if of_the_ring else train_command.WORKER,
            nodes=Nodes(nodes, rank, f"127.0.0.1:{port}") if nodes > 1 else None, wait_seconds=120,
        ),
    )  # fmt: skip


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in json.loads((output / "report" / "report.json").read_text())["losses"]]


def alone(folder: Path, rows: int) -> Path:
    """The output of one untiled process that takes as many rows a step."""
    from seqtile.train.run import train

    output = folder / f"alone-{rows}"
    if not output.exists():
        train(recipe(folder, output, gradient_accumulation=rows, tiled_mlp=False, tile=None))
    return output


def rows_of_a_step(values: dict[str, Any]) -> int:
    split = max(values.get("sp_size", 1), values.get("cp_size", 1))
    return int(values["nproc"] // split * values.get("gradient_accumulation", 1))


def differences(folder: Path, output: Path, rows: int) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a weight against the furthest that a weight has moved."""
    expected = alone(folder, rows)
    a, b = torch.tensor(losses(output)), torch.tensor(losses(expected))
    assert a.shape == b.shape
    start, mine, theirs = (tiny_run.load_weights(place) for place in (folder / "model", output, expected))
    assert mine.keys() == theirs.keys()
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in start)
    apart = max(float((mine[name] - theirs[name]).abs().max()) for name in start)
    return float(((a - b) / b).abs().max()), apart / moved


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]), "DS_ACCELERATOR": "cpu"}


def main() -> None:
    os.environ.update(environment())
    versions = ", ".join(
        f"{name} {package_version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed")
    )
    lines = [
        f"{time.strftime('%Y-%m-%d')}, `python -m node_fronts FILE`: two nodes on one CPU, over loopback; {versions}.",
        "",
    ]
    lines += ["| engine | processes | rows a step | losses differ by | weights differ by, of the furthest moved |"]
    lines += ["|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for case, values in CASES.items():
            output = folder / case.replace(" ", "-")
            ended = train_on_nodes(folder, output, **values)
            rows = rows_of_a_step(values)
            told = (
                f"{ended} | "
                if set(ended.values()) != {0}
                else "{:.1e} | {:.1e}".format(*differences(folder, output, rows))
            )
            lines.append(f"| {case} | {values['nproc']} | {rows} | {told} |")
            print(lines[-1], file=sys.stderr)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
