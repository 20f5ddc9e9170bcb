"""``python benchmarks/child.py JOB``: one measurement in this process; arguments on stdin, the result on stdout.

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
        request = json.loads(line)
        result_to.write(json.dumps(guarded(find_job(request["job"]), request["arguments"])) + "\n")
        result_to.flush()
        # The next job finds what a new process would: memory, and no compiled code that counts against the limit of
        # variants, beyond which PyTorch runs eagerly.
        torch.compiler.reset()
        gc.collect()
        empty_cache()


def guarded(job: Callable[[dict[str, Any]], dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """The job's result, or what stopped it."""
    import torch

    from methods import NotInstalledError
    from seqtile._errors import UserError

    try:
        return job(arguments)
    except (NotInstalledError, UserError) as error:
        return {"error": str(error), "user_error": isinstance(error, UserError)}
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is the result of its cell
        message = " ".join(str(error).split())[:500]
        # The CPU's allocator raises a RuntimeError that has no class of its own.
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in message:
            return {"error": "out of memory", "error_detail": message}
        return {"error": f"{type(error).__name__}: {message}"}


def find_job(job: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function of a job; a file is imported with its folder on the path, as if it were run."""
    if (function := _jobs().get(job)) is not None:
        return function
    file, _, name = job.rpartition(":")
    if not file:
        raise ValueError(f"got the job {job!r}, expected one of {', '.join(_jobs())} or FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(file).parent))
    return getattr(import_module(Path(file).stem), name)  # type: ignore[no-any-return]


def _jobs() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    from cell import Cell
    from environment import environment
    from measure_block import measure_cell, measure_pairs

    def cell(arguments: dict[str, Any]) -> dict[str, Any]:
        return measure_cell(Cell.of(arguments))

    def pairs(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"rows": measure_pairs(Cell.of(arguments["cell"]), arguments["methods"], arguments["pairs"])}

    return {"cell": cell, "pairs": pairs, "environment": lambda _: environment()}


if __name__ == "__main__":
    main()
