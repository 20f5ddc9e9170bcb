"""Run every case and write docs/engines.md from the results: ``PYTHONPATH=tests:src python -m grid.table``."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from grid.launch import ROOT, Result, run_cases

ENGINES = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero12": "ZeRO-1, ZeRO-2", "zero3": "ZeRO-3"}
PAGE = ROOT / "docs" / "engines.md"
HEAD = """# Engines

Every line was run by `python -m grid.table` (`tests/grid`), which wrote this page: two gloo processes on the CPU, with
batches of different lengths and tile counts on the ranks. "Equal" means that gradients and the weights after each
optimiser step equal an untiled single process's; in low precision, that they are no further from it than the untiled
run under the same engine. `make test` runs the same cases.

Call `seqtile.apply(model)` before the engine takes the model over. DDP, `fully_shard` and ZeRO-1 and 2 also work when
it comes later; FSDP1 and ZeRO-3 are refused then. Under ZeRO-3 the tiled decoder layers (or MLPs) are marked as leaf
modules; call `apply` on every rank. An engine that would gather weights inside a tile, such as FSDP around each linear
layer, is refused with the name of the module to wrap.
"""


def write(results: dict[str, dict[str, Result]]) -> str:
    """The page; raises if a case failed, so that no page says less than the truth."""
    lines = [HEAD]
    for engine, title in ENGINES.items():
        lines += [f"## {title}", "", "| technique | models | operators | result |", "|---|---|---|---|"]
        rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        for case in importlib.import_module(f"grid.{engine}").CASES:
            result = results[engine][case.name]
            if result.problem:
                raise SystemExit(f"{engine}-{case.name}: {result.problem}")
            models, paths = rows.setdefault((case.technique, "refused" if case.refused else "equal"), ([], []))
            path = "generic" if case.path == "generic" or case.architecture == "mixtral" else "fused"
            models += [case.architecture] if case.architecture not in models else []
            paths += [path] if path not in paths else []
        for (technique, verdict), (models, paths) in rows.items():
            lines.append(f"| {technique} | {', '.join(models)} | {', '.join(sorted(paths))} | {verdict} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES:
            names = [case.name for case in importlib.import_module(f"grid.{engine}").CASES]
            results[engine] = run_cases(engine, names, Path(folder, engine))
            print(engine, [name for name, result in results[engine].items() if result.problem], flush=True)
    PAGE.write_text(write(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
