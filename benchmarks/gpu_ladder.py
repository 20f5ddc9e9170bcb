"""The longest sequence of every rung of the ladder, by the allocator: `make gpu-ladder`. Under ten minutes a rung.

    python benchmarks/gpu_ladder.py --lora r=16 --host-memory 128GiB          # Llama-8B on this machine's accelerator
    python benchmarks/gpu_ladder.py --device cpu --memory 40MiB --model DIR   # counted bytes, to see that it runs

Runs where torch, transformers and peft are, from a clone, with PYTHONPATH=src. Real steps of a few of the model's
layers; what the others would hold is held too (ladder_step.py). Every
attempt is a process of its own and a row of its own in the results, so that a run that was ended goes on where it was:
start it again with the same arguments. A rung whose time was up is not done: the next run goes on with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from cell import TIMED_OUT, run_child
from environment import append_rows, stamp
from ladder_step import JOB, Attempt, host_room
from seqtile._errors import UserError
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.step_config import Lora
from seqtile.tiling import parse_bytes
from suite import RESULTS, Row, read_rows
from technique_ladder import RUNGS

SMALLEST = 16
"""Tokens; a rung that does not hold them has no length."""

GRAIN = 1024
"""The first attempt of a long rung is of whole multiples of this."""

CLOSE = "close enough"
"""How the search of a rung ends that is done."""

DEVICE_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
HOST_FULL = ("SIGKILL", "offload would put")
"""What an attempt says that was too long: for the device, for the host."""


def main() -> int:
    """Run the ladder; 2 where something is asked for that cannot be."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                      allow_abbrev=False)  # fmt: skip
    options.add_argument("--model", default="llama-8b", help="a shape, config.json, model directory or Hub id")
    options.add_argument("--layers", type=int, default=2, help="layers that run")
    options.add_argument("--lora", help="rank of adapters, 16 or r=16; without it every weight trains")
    options.add_argument("--precision", default="mixed", help="mixed, bfloat16 or float32")
    options.add_argument("--host-memory", default="", help="of this machine for checkpoints, such as 128GiB")
    options.add_argument("--device", help="leave it out for the accelerator")
    options.add_argument("--memory", default="", help="what counts as the device's memory; the CPU needs it")
    options.add_argument("--start", type=int, default=0, help="tokens of each rung's first attempt; else the plan's")
    options.add_argument("--within", type=float, default=1 / 16, help="how close, as a share of the length")
    options.add_argument("--minutes", type=float, default=9.0, help="of each rung")
    options.add_argument("--rungs", default="", help="numbers from 0, such as 3,6,7")
    options.add_argument("--out", type=Path, default=RESULTS / "gpu-ladder.jsonl")
    given = options.parse_args()
    try:
        run(given)
    except UserError as error:
        print(f"gpu_ladder.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(given: argparse.Namespace) -> list[Row]:
    """Every rung that the results do not have yet; all of the ladder's rows."""
    memory = _bytes("--memory", given.memory)
    found = run_child("environment", {})
    if "error" in found:
        raise UserError("benchmark.cannot-start", f"cannot start a measurement: {found['error']}")
    device = given.device or found["device_type"]
    if device == "cpu" and not (given.device and memory):
        raise UserError(
            "benchmark.no-accelerator",
            "the ladder needs an accelerator; with --device cpu --memory SIZE bytes are counted instead",
        )
    if device not in ("cpu", found["device_type"]):
        raise UserError(
            "benchmark.device-absent",
            f"--device {device!r} is not here, torch finds {found['device_type']!r}: leave --device out",
        )
    host = host_room(_bytes("--host-memory", given.host_memory)) if given.host_memory else 0
    numbers = _numbers(given.rungs)
    # As it comes back from a line of JSON, so that rows of an earlier run are known again.
    adapters = json.loads(json.dumps(asdict(_adapters(given.lora)))) if given.lora else None
    base = Attempt(
        given.model, 0, given.start, given.layers, adapters, given.precision, device, host, memory,
    )  # fmt: skip
    rows = read_rows(given.out)
    failed: list[str] = []
    key: Row = {}
    for number in numbers:
        first = replace(base, rung=number)
        key = {name: value for name, value in asdict(first).items() if name != "tokens"}
        mine = [row for row in rows if all(row.get(name) == value for name, value in key.items())]
        here = [row for row in mine if row["device_name"] == found["device_name"]]
        done = next((row for row in here if row["kind"] == "rung" and row["search_ended"] == CLOSE), None)
        if done is not None:
            print(f"{RUNGS[number].name}: done on {done['date']}", flush=True)
            continue
        tried = [row for row in here if row["kind"] == "attempt" and _tells(row)]

        def write(row: Row, key: Row = key, number: int = number) -> Row:
            words = ["python", "benchmarks/gpu_ladder.py", *sys.argv[1:]]
            row = {"kind": "rung", **stamp(found, words), **key, "name": RUNGS[number].name, **row}
            append_rows(given.out, [row])
            rows.append(row)
            return row

        if not given.start:
            first = replace(first, tokens=planned_length(first, memory or found["device_bytes"]))
        try:
            _rung(first, tried, write, given.within, 60 * given.minutes)
        except UserError as error:  # its row is written; the other rungs may run all the same
            failed.append(str(error))
            print(f"    {error}", flush=True)
    last = {json.dumps({name: row.get(name) for name in key}): row for row in rows if row["kind"] == "rung"}
    mine = list(last.values())
    show(mine)
    if failed:
        raise UserError("benchmark.rungs-failed", "; ".join(failed))
    return mine


def planned_length(attempt: Attempt, memory: int) -> int:
    """Tokens that this rung holds by the plan, where the search starts."""
    request = attempt.request()
    planned, _ = Planner(replace(request, device=Device(attempt.device, memory, None, ""))).longest()
    grain = GRAIN if planned >= 64 * GRAIN else SMALLEST
    return max(SMALLEST, planned // grain * grain)


def _rung(first: Attempt, tried: list[Row], write: Callable[[Row], Row], within: float, seconds: float) -> None:
    """Search one rung's longest sequence; what was tried in an earlier run is not tried again."""
    until = time.monotonic() + seconds
    print(f"{RUNGS[first.rung].name}" + (f", going on after {len(tried)} attempts" if tried else ""), flush=True)

    def attempt(one: Attempt) -> Row | None:
        for row in tried:
            if row["tokens"] == one.tokens and row["layers_run"] == one.layers:
                return row
        left = until - time.monotonic()
        if left <= 0:
            return None
        begin = time.monotonic()
        found = run_child(JOB, asdict(one), timeout_s=left)
        taken = {"kind": "attempt", "tokens": one.tokens, "layers_run": one.layers, "seconds": time.monotonic() - begin}
        if TIMED_OUT in found.get("error", ""):
            return None
        row = write({**taken, **found})
        if "error" in found and not any(word in found["error"] for word in (*DEVICE_FULL, *HOST_FULL)):
            raise UserError("benchmark.rung-failed", f"{RUNGS[one.rung].name}, {one.tokens:,} tokens: {found['error']}")
        tried.append(row)
        print(f"    {one.tokens:>10,} tokens, {one.layers} layers: " + row.get(
            "error", f"{row.get('peak_gib', 0):.3f} GiB, {row.get('step_s', 0):.2f} s"), flush=True)  # fmt: skip
        return row

    fits, fails, timely = search(first, attempt, within)
    row: Row = {
        "max_length": fits["tokens"] if fits else 0, "shortest_that_failed": fails["tokens"] if fails else None,
        "limited_by": _limit(fails), "search_ended": CLOSE if timely else "the time was up",
        "layers_run": first.layers,
    }  # fmt: skip
    if fits:
        row.update({name: fits[name] for name in ("peak_gib", "peak_from", "step_s", "layers_of_model", "attention")})
        row["layers_extrapolated"] = fits["layers_of_model"] - first.layers
        fewer = attempt(replace(first, tokens=fits["tokens"], layers=first.layers - 1)) if first.layers > 1 else None
        if fewer is not None and "step_s" in fewer:
            each = fits["step_s"] - fewer["step_s"]
            row["whole_step_s"] = fits["step_s"] + (fits["layers_of_model"] - first.layers) * each
            row["us_per_token"] = 1e6 * row["whole_step_s"] / fits["tokens"]
    write(row)


def search(
    first: Attempt, attempt: Callable[[Attempt], Row | None], within: float
) -> tuple[Row | None, Row | None, bool]:
    """The longest attempt that fits and the shortest that does not: farther each time from the first, then between.

    Returns:
        Both rows, and whether they are as close as asked for; None from ``attempt`` means that the time is up.
    """
    fits: Row | None = None
    fails: Row | None = None
    tokens, away = first.tokens, 1 / 8
    while True:
        row = attempt(replace(first, tokens=tokens))
        if row is None:
            return fits, fails, False
        if "error" in row:
            fails = row
        else:
            fits = row
        if fits is None:
            if tokens <= SMALLEST:
                return fits, fails, True
            tokens = max(SMALLEST, int(tokens / (1 + away)) // SMALLEST * SMALLEST)
            away = min(1.0, 2 * away)
        elif fails is None:
            tokens = (int(tokens * (1 + away)) // SMALLEST + 1) * SMALLEST
            away = min(1.0, 2 * away)
        else:
            low, high = fits["tokens"], fails["tokens"]
            if high - low <= max(within * low, SMALLEST):
                return fits, fails, True
            tokens = (low + high) // 2 // SMALLEST * SMALLEST
            if tokens <= low:
                return fits, fails, True


def show(rows: list[Row]) -> None:
    """One line a rung."""
    for row in rows:
        if not row["max_length"]:
            print(f"{row['name']:30} no length fits")
            continue
        time_said = f"{row['us_per_token']:,.0f} us/token" if "us_per_token" in row else f"{row['step_s']:.1f} s"
        said = f"{row['max_length']:>10,} tokens, {row['peak_gib']:.3f} GiB by {row['peak_from']}, {time_said}"
        print(f"{row['name']:30} {said}; {row['layers_run']} layers run, {row['layers_extrapolated']} extrapolated; "
              f"{row['search_ended']}")  # fmt: skip


def _tells(attempt: Row) -> bool:
    """Whether an attempt says what fits; one that failed otherwise is made again."""
    return "error" not in attempt or any(word in attempt["error"] for word in (*DEVICE_FULL, *HOST_FULL))


def _limit(fails: Row | None) -> str:
    if fails is None:
        return "nothing that was tried"
    return "device memory" if any(word in fails["error"] for word in DEVICE_FULL) else "host memory"


def _bytes(name: str, text: str) -> int:
    if not text:
        return 0
    size = parse_bytes(text)
    if not size:
        raise UserError("benchmark.size-malformed", f"got {name} {text!r}, expected a size such as 128GiB")
    return size


def _adapters(text: str) -> Lora:
    rank = text.removeprefix("r=")
    if not rank.isdigit() or not int(rank):
        raise UserError("benchmark.lora-malformed", f"got --lora {text!r}, expected a rank such as 16 or r=16")
    return Lora(int(rank))


def _numbers(text: str) -> list[int]:
    words = [word for word in text.split(",") if word] or [str(number) for number in range(len(RUNGS))]
    if not all(word.isdigit() and int(word) < len(RUNGS) for word in words):
        names = ", ".join(f"{number} ({rung.name})" for number, rung in enumerate(RUNGS))
        raise UserError("benchmark.unknown-choice", f"got --rungs {text!r}, expected numbers of {names}")
    return [int(word) for word in words]


if __name__ == "__main__":
    sys.exit(main())
