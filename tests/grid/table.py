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

HEAD = """# Engines

For those who train on several devices: which technique was run under DDP, FSDP, ZeRO and sequence parallelism, and
what to look out for.

Every line was run by `PYTHONPATH=tests:src python -m grid.table`, which wrote this page: two gloo processes on the CPU,
with batches of different lengths and tile counts on the ranks. "Equal" means that gradients and the weights after each
optimiser step equal an untiled single process's; in low precision, that they are no further from it than the untiled
run under the same engine. Each case asserts the kind of engine, the world size and where the shards are. `make test`
runs the same cases.

Call `seqtile.apply(model)` before the engine takes the model over. DDP, `fully_shard` and ZeRO-1 and 2 also work when
it comes later; FSDP1 and ZeRO-3 are refused then. Under ZeRO-3 the tiled decoder layers (or MLPs) are marked as leaf
modules; call `apply` on every rank. An engine that would gather weights inside a tile, such as FSDP around each linear
layer, is refused with the name of the module to wrap.

With LoRA under ZeRO-3, TRL's trainer makes activation checkpoints reentrant, because DeepSpeed before 0.19.4 takes
frozen weights away during a recompute. From 0.19.4 on `seqtile train --engine zero3 --lora` makes them non-reentrant
again. With an older one each block is computed once more than under the other engines, and its report says so. Layers
that share keys and values (Gemma 3n, Gemma 4) lose a part of their gradient under reentrant checkpoints, tiled or not:
there they are refused.

Under ZeRO-1 and 2 a batch that `tile="auto"` would leave untiled runs as one tile: ZeRO-2 sums the ranks' gradients in
the order in which they arrive, which must be the same where one rank's batch is tiled and another's is not.

## Sequence parallelism

Both ranks hold a part of every row, so a tile is a slice of what the rank holds. Through Transformers' `Trainer` and
accelerate's `ParallelismConfig`, loss, gradients and steps equal one process with whole rows, also with padding that is
uneven over the ranks and with a rank that holds nothing but padding.

- Ulysses (`sp_backend="deepspeed"`): over ZeRO-3. Over ZeRO-2, and without seqtile too, its gradients are `sp_size`
  times too large (DeepSpeed 0.19.8, accelerate 1.15.0): Adam hides it, clipping and SGD do not. A test sees that it
  is still so, and `seqtile train` refuses it.
- Context parallel (`cp_size`, `seqtile train --cp-size`): over FSDP2. accelerate and PyTorch offer it on accelerators
  only; the test adds the CPU's attention to PyTorch's ring, and is skipped, with the reason, where PyTorch has changed
  that private part.

## Packed documents

Tiles do not look at documents: a block works on one token at a time, and the boundaries (`position_ids` that start
again, `cu_seq_lens`) reach the attention as they are. `tests/numerics/test_packing.py` changes one packed document
and sees that another's logits and gradients stay, tiled and untiled, with eager, SDPA and (logits only) FlexAttention;
flash attention needs a CUDA device. What mixes documents *without* seqtile, in transformers 5.0 to 5.23:

- OPT, Falcon and gpt-oss, with eager and SDPA: their masks are made without `position_ids`. `seqtile train` asks the
  model before it packs, and refuses.
- `attention_mask` beside `position_ids` (a mask of ones too), and `use_cache=True`: the boundaries are not looked for.
  TRL passes no mask when it packs, and `use_cache=False`; do so in a loop of your own.
- `cu_seq_lens` without `position_ids`, except with flash attention.
- Ulysses drops the mask, and with flash attention crashes on `cu_seq_lens` (DeepSpeed 0.19.8). `seqtile train` refuses
  to pack with `sp_size` above 1.
- packing "wrapped" joins documents to one text on purpose.
"""


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
    """docs/engines.md.

    Args:
        run: when and with which versions the cases ran.
    """
    lines = [
        HEAD,
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
    return "\n".join([*lines, ""])


def matrix() -> str:
    """Technique x engine, with the number of cases behind each word."""
    cells: dict[str, dict[str, dict[str, int]]] = {}
    for engine, case in all_cases():
        for technique in case.technique.split(" + "):
            words = cells.setdefault(technique, {}).setdefault(engine_of(engine, case), {})
            word = "wrong upstream" if case.upstream else "refused" if case.refused else "works"
            words[word] = words.get(word, 0) + 1
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
    for engines in LAUNCHES.values():
        names = [f"{engine}:{case.name}" for engine, case in all_cases() if engine in engines]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(names, Path(folder))
        seconds += time.monotonic() - start
        for engine in engines:
            mine = [result for name, result in results.items() if name.startswith(f"{engine}:")]
            print(f"{engine}: {len(mine)} cases in {sum(result.seconds for result in mine):.0f} s", flush=True)
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
