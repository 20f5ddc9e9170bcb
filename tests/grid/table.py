"""Run every case and write the table of engines: ``PYTHONPATH=tests:src python -m grid.table``.

The table in ``docs/multi-gpu.md`` shows which technique was run under which engine. It is written only if every case
passes.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

from grid.cases import Case
from grid.launch import LAUNCHES, ROOT, run_cases

PAGE = ROOT / "docs" / "multi-gpu.md"
BEGIN, END = "<!-- engines: written by python -m grid.table -->", "<!-- engines: end -->"

ENGINES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "zero12": "ZeRO-1/2",
    "zero3": "ZeRO-3",
    "context": "ring",
    "ulysses": "Ulysses",
}
"""The column of each module of cases."""

CHUNKS = ("chunks", "chunks_zero")
"""Modules whose cases begin with the engine's name."""

ATTENTION_SAVED, OFFLOADED = "attention saved", "checkpoints on the host"
LEFT_WHOLE = "head-wise attention asked for: left whole"

ROWS: dict[str, tuple[str, ...]] = {
    "tiled MLP": ("plain", "linear layers in the decoder layer"),
    "norms, projections": ("norms around the MLP", "rest of the layer"),
    "experts": ("experts",),
    "tiled loss": ("tiled loss",),
    "logits, token scores (TRL)": ("deferred logits", "token scores (TRL)"),
    "shared prompts (TRL)": ("shared prompts",),
    "head-wise attention": ("head-wise attention", LEFT_WHOLE),
    "chunks through decoder layers": ("chunks",),
    "layers with a state": ("layers with a state", "hybrid models"),
    "activation checkpointing": ("activation checkpointing",),
    "reentrant checkpointing": ("reentrant checkpointing",),
    "attention saved": (ATTENTION_SAVED,),
    "checkpoints on the host": (OFFLOADED,),
    "weights, optimizer on the host": ("offload to the host",),
    "LoRA": ("LoRA",),
    "mixed precision": ("mixed precision",),
    "accumulation, clipping": ("accumulation, clipping",),
    "uneven ranks": (
        "one rank with a single token", "one rank without data", "one rank untiled", "a rank with nothing but padding",
    ),
    "other options of the engine": (
        "static_graph=True", "find_unused_parameters=True", "bf16 compression hook", "use_orig_params=False",
        "per block", "whole model in one unit", "weights kept gathered", "DeepSpeed's own settings",
        "weights sharded before apply (zero.Init)",
    ),
    "a unit per linear layer": ("per linear layer",),
    "`apply` after wrapping": ("apply after wrapping",),
}  # fmt: skip
"""The techniques of the cases behind each row of the table."""


def all_cases() -> Iterator[tuple[str, Case]]:
    for module in (*ENGINES, *CHUNKS):
        for case in importlib.import_module(f"grid.{module}").CASES:
            yield module, case


def engine_of(module: str, case: Case) -> str:
    return case.name.partition("-")[0] if module in CHUNKS else module


def techniques_of(case: Case) -> list[str]:
    """The techniques that a case is for, and those that its settings add."""
    added = {
        ATTENTION_SAVED: "attention-saved" in case.more.get("checkpoint", ""),
        OFFLOADED: bool(case.more.get("offload")),
    }
    return [*case.technique.split(" + "), *(name for name, is_on in added.items() if is_on)]


def outcome(case: Case, technique: str) -> str:
    if technique == LEFT_WHOLE:
        return "whole"
    return "refused" if case.refused else "yes"


def table() -> str:
    """One row per group of techniques, one column per engine; empty where nothing was run.

    Cases of what is wrong without seqtile too are left out: they train untiled.
    """
    cells: dict[tuple[str, str], set[str]] = {}
    for module, case in all_cases():
        for technique in () if case.upstream else techniques_of(case):
            cells.setdefault((technique, engine_of(module, case)), set()).add(outcome(case, technique))
    lines = [f"| | {' | '.join(ENGINES.values())} |", "|---" * (len(ENGINES) + 1) + "|"]
    for row, techniques in ROWS.items():
        outcomes = [
            set().union(*(cells.get((technique, engine), set()) for technique in techniques)) for engine in ENGINES
        ]
        lines.append(f"| {row} | {' | '.join('/'.join(sorted(words, reverse=True)) for words in outcomes)} |")
    return "\n".join(lines)


def page(run: str) -> str:
    """docs/multi-gpu.md with the table of today's cases between the marks.

    Args:
        run: when and with which versions the cases ran.
    """
    before, _, tail = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([before + BEGIN, "", table(), "", run, "", END + tail.partition(END)[2]])


def what_ran(seconds: float) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    cases = sum(1 for _ in all_cases())
    command = "PYTHONPATH=tests:src python -m grid.table"
    return f"{date.today()}, `{command}`: {cases} cases in {seconds:.0f} s on 2 CPU cores, {packages}."


def main() -> int:
    seconds, passed = 0.0, True
    for launched in LAUNCHES.values():
        modules = [module for module in launched if module in (*ENGINES, *CHUNKS)]
        cases = list(all_cases())  # in the order of the launch
        names = [f"{module}:{case.name}" for module in modules for of, case in cases if of == module]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(names, Path(folder))
        seconds += time.monotonic() - start
        for module in modules:
            ended = [result for name, result in results.items() if name.startswith(f"{module}:")]
            print(f"{module}: {len(ended)} cases in {sum(result.seconds for result in ended):.0f} s", flush=True)
        for name, result in results.items():
            if result.problem:
                passed = False
                print(f"{name}: {result.problem}", flush=True)
    if not passed:
        print("nothing is written unless every case passes")
        return 1
    PAGE.write_text(page(what_ran(seconds)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
