"""``python -m seqtile.bench.child JOB``: one measurement in this process; arguments on stdin, the result on stdout.

Without a JOB it takes one after another, ``{"job": ..., "arguments": ...}`` in a line each, until stdin ends.

Both are one line of JSON. Running out of memory is a result, and so is a peer that is missing or raises. A job is a
name of :func:`_jobs`, or ``FILE.py:FUNCTION``, which takes and returns a dict.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Run the job that the command line names."""
    # Libraries print on stdout when they are imported; the result must be the last line there, alone.
    result_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    if len(sys.argv) == 1:
        _serve(result_to)
        return
    arguments = json.load(sys.stdin)
    result = guarded(find_job(sys.argv[1]), arguments)
    result_to.write(json.dumps(result) + "\n")
    result_to.flush()
    if "error" in result and "RANK" in os.environ:
        # The other ranks may wait for this one in a collective, and so may this one's own exit: leave at once.
        sys.stderr.write(result["error"] + "\n")
        sys.stderr.flush()
        os._exit(1)


def _serve(result_to: TextIO) -> None:
    import torch

    from seqtile.devices import empty_cache

    for line in sys.stdin:
        asked = json.loads(line)
        result_to.write(json.dumps(guarded(find_job(asked["job"]), asked["arguments"])) + "\n")
        result_to.flush()
        # The next job finds what a new process would: memory, and no compiled code that counts against the limit of
        # variants, beyond which PyTorch runs eagerly.
        torch.compiler.reset()
        gc.collect()
        empty_cache()


def guarded(job: Callable[[dict[str, Any]], dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The job's result, or what stopped it."""
    import torch

    from seqtile._errors import UserError
    from seqtile.bench.methods import NotInstalledError

    try:
        return job(arguments)
    except (NotInstalledError, UserError) as error:
        return {"error": str(error), "user_error": isinstance(error, UserError)}
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is the result of its cell
        said = " ".join(str(error).split())[:500]
        # The CPU's allocator raises a RuntimeError that has no class of its own.
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in said:
            return {"error": "out of memory", "error_detail": said}
        return {"error": f"{type(error).__name__}: {said}"}


def find_job(job: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function of a job; a file is imported with its folder on the path, as if it were run."""
    if (found := _jobs().get(job)) is not None:
        return found
    file, _, function = job.rpartition(":")
    if not file:
        raise ValueError(f"got the job {job!r}, expected one of {', '.join(_jobs())} or FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(file).parent))
    return getattr(import_module(Path(file).stem), function)  # type: ignore[no-any-return]


def _jobs() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    from seqtile.bench.cell import Cell
    from seqtile.bench.environment import environment
    from seqtile.bench.measure_block import measure_cell, measure_pairs

    def cell(arguments: dict[str, Any]) -> dict[str, Any]:
        return measure_cell(Cell.of(arguments))

    def pairs(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"rows": measure_pairs(Cell.of(arguments["cell"]), arguments["methods"], arguments["pairs"])}

    def step(arguments: dict[str, Any]) -> dict[str, Any]:
        from seqtile.bench.training_step import TrainingStep, measure_step

        return measure_step(TrainingStep.of(arguments["step"]), arguments["method"])

    return {"cell": cell, "pairs": pairs, "step": step, "environment": lambda _: environment()}


if __name__ == "__main__":
    main()
