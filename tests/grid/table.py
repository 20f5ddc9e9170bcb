"""Run every case and write the tables from the results: ``PYTHONPATH=tests:src python -m grid.table``.

``docs/engines.md`` says which technique works with which engine, and what was run under each. Nothing is written unless
every case has passed.
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

PAGE = ROOT / "docs" / "engines.md"

COLUMNS = ("DDP", "FSDP1", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3", "context parallel", "Ulysses")
ENGINES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "zero12": "ZeRO-1, ZeRO-2",
    "zero3": "ZeRO-3",
    "context": "context parallel",
    "ulysses": "Ulysses",
}
TITLES = {"context parallel": "Context parallel over FSDP2", "Ulysses": "Ulysses over ZeRO-3"}

BEGIN, END = "<!-- cases: written by python -m grid.table -->", "<!-- cases: end -->"


def engine_of(engine: str, case: Case) -> str:
    """The column of a case in the table of techniques."""
    return f"ZeRO-{case.options['stage']}" if engine == "zero12" else ENGINES[engine]


def verdict(case: Case) -> str:
    return case.upstream or ("refused" if case.refused else "equal")


def all_cases() -> Iterator[tuple[str, Case]]:
    for engine in ENGINES:
        for case in importlib.import_module(f"grid.{engine}").CASES:
            yield engine, case


def page(run: str) -> str:
    """docs/engines.md, with today's cases between the marks.

    Args:
        run: when and with which versions the cases ran.
    """
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    lines = [
        before + BEGIN,
        "",
        "## Technique by engine",
        "",
        "The number of cases that were run; a blank was not.",
        "",
        matrix(),
        "",
    ]
    lines += ["## What was run", "", run]
    for column in COLUMNS:
        lines += ["", f"### {TITLES.get(column, column)}", "", "| technique | models | operators | result |"]
        lines += ["|---|---|---|---|"]
        rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        for engine, case in all_cases():
            if engine_of(engine, case) != column:
                continue
            models, paths = rows.setdefault((case.technique.replace(" + ", ", "), verdict(case)), ([], []))
            path = "generic" if case.path == "generic" or case.architecture == "mixtral" else "fused"
            path = "untiled" if case.upstream else path
            models += [case.architecture] if case.architecture not in models else []
            paths += [path] if path not in paths else []
        for (technique, result), (models, paths) in rows.items():
            lines.append(f"| {technique} | {', '.join(models)} | {', '.join(sorted(paths))} | {result} |")
    return "\n".join([*lines, "", END + rest.partition(END)[2]])


def matrix() -> str:
    """Technique x engine, with the number of cases behind each word."""
    cells: dict[str, dict[str, dict[str, int]]] = {}
    for engine, case in all_cases():
        for technique in case.technique.split(" + "):
            counts = cells.setdefault(technique, {}).setdefault(engine_of(engine, case), {})
            word = "wrong upstream" if case.upstream else "refused" if case.refused else "works"
            counts[word] = counts.get(word, 0) + 1
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for technique, engines in cells.items():
        row = [", ".join(f"{word} ({n})" for word, n in engines.get(column, {}).items()) for column in COLUMNS]
        lines.append(f"| {technique} | {' | '.join(row)} |")
    return "\n".join(lines)


def what_ran(seconds: float) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    cases = sum(1 for _ in all_cases())
    command = "PYTHONPATH=tests:src python -m grid.table"
    return f"{date.today()}, `{command}`: {cases} cases in {seconds:.0f} s on 2 CPU cores, {packages}."


def main() -> int:
    seconds, passed = 0.0, True
    for launched in LAUNCHES.values():
        engines = [engine for engine in launched if engine in ENGINES]
        names = [f"{engine}:{case.name}" for engine, case in all_cases() if engine in engines]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(names, Path(folder))
        seconds += time.monotonic() - start
        for engine in engines:
            ended = [result for name, result in results.items() if name.startswith(f"{engine}:")]
            print(f"{engine}: {len(ended)} cases in {sum(result.seconds for result in ended):.0f} s", flush=True)
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
