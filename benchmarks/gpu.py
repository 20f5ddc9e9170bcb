"""The GPU suite: `make gpu`. Within ten minutes on one H200-class device; rows of JSON in benchmarks/results.

python benchmarks/gpu.py                          # needs an accelerator
python benchmarks/gpu.py --device cpu --smoke     # tiny, to see that it runs

On a machine with torch, transformers and peft alone, from a clone: PYTHONPATH=src python3 benchmarks/gpu.py --out DIR
--minutes 7. Every row is written when it is measured; a run that was ended, or whose time was up, goes on when it is
started again with the same --out. One process measures them all, and another goes on where it failed. Peers that are
not installed are named.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import halves
import ladder_step
import machine
import one_mlp
from cell import SHAPES, Cell, run_cell, run_pairs
from gpu_estimates import METHODS, record_layer
from ladder_step import Attempt
from seqtile._errors import UserError
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.sharding_terms import CONTEXT
from seqtile.planner.step_config import Lora
from suite import GIB, RESULTS, Row, Suite, show
from technique_ladder import RUNGS

K = 1024
PEERS = ("fused", "generic", "tile-checkpoint", "liger", "deepspeed")
TINY = Path("benchmarks/data/tiny-llama")
ON_DEVICE, ON_HOST, EVERYTHING = (
    next(number for number, rung in enumerate(RUNGS) if rung.name == name)
    for name in ("+ tiled MLP", "+ checkpoints on the host", "+ head-wise attention")
)
"""Rungs of the ladder whose steps are timed: two that differ in where checkpoints wait, and all techniques."""


def main() -> int:
    """Run the suite; 2 where there is no accelerator."""
    options = argparse.ArgumentParser(description="The GPU suite.", allow_abbrev=False)
    options.add_argument("--device", help="leave it out for the accelerator")
    options.add_argument("--smoke", action="store_true", help="tiny shapes and few parts, to see that it runs")
    options.add_argument("--minutes", type=float, default=9.0, help="no part starts after this")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    try:
        run(given.device, given.smoke, given.minutes, given.out)
    except UserError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(device: str | None, smoke: bool, minutes: float, out: Path) -> None:
    """Every part, the most important first."""
    suite = Suite("smoke" if smoke else "gpu", out, minutes)
    here = suite.found["device_type"]
    if (here == "cpu" and device is None) or (device == "cpu" and not smoke):
        raise UserError(
            "benchmark.no-accelerator",
            "the GPU suite needs an accelerator and torch finds none: run it where there is one",
        )
    if device not in (None, "cpu", here):
        raise UserError(
            "benchmark.device-absent", f"--device {device!r} is not here, torch finds {here!r}: leave --device out"
        )
    small = 64 if smoke else 1
    pairs = 3 if smoke else 7
    base = Cell(
        SHAPES["llama-8b"][0] // small, SHAPES["llama-8b"][1] // small, 8 * K, "fused", True, "full", "bfloat16",
        device or here,
    )  # fmt: skip

    def at(tokens: int, **changes: Any) -> Cell:
        return base.changed(tokens=tokens // small, **changes)

    _machine(suite, base, small)
    for tokens in (32 * K,) if smoke else (32 * K, 128 * K, 256 * K, 8 * K):
        methods = ("fused",) if smoke or tokens != 32 * K else PEERS
        bound = 1.0 if tokens >= 32 * K else None
        _pairs(suite, f"llama-8b, checkpoint, {tokens // K}K tokens", at(tokens), methods, pairs, bound)
    _one_mlp(suite, at(256 * K, tile=str(8 * K // small), checkpoint=False), bound_gib=6.0 / small**2)
    _steps(suite, str(TINY) if smoke else "llama-8b", 128 * K // (32 * small if smoke else 1), base.device)
    _one_qwen_mlp(suite, base.device, small)
    width = [width // small for width in SHAPES["ms-swift"]]
    for checkpoint in (True,) if smoke else (True, False):
        cell = at(128 * K, hidden=width[0], intermediate=width[1], checkpoint=checkpoint)
        _published(suite, cell, pairs)
    fewer = 100 if smoke else 1
    _halves(suite, base.changed(tokens=600_000 // fewer, tile=str(7500 // fewer), checkpoint=False))
    for changes in ({"train": "lora"}, {"train": "frozen"}, {"keep": 0.5}, {"keep": 1.0}):
        if not smoke:
            told = ", ".join(f"{name} {value}" for name, value in changes.items())
            _pairs(suite, f"llama-8b, checkpoint, 32K tokens, {told}", at(32 * K, **changes), ("fused",), pairs, 1.0)
    if smoke:
        print("\nA smoke run: the shapes are tiny, so whether a bound holds means nothing here.")
    suite.finish()
    print(table(suite.rows))


def _pairs(suite: Suite, part: str, cell: Cell, methods: tuple[str, ...], pairs: int, bound: float | None) -> list[Row]:
    """Each method against untiled, in a job of its own, so that its rows are kept whatever comes after."""
    found: list[Row] = []
    for method in methods:
        key = {"pair": method, "repeats": pairs}

        def measure(left: float, method: str = method) -> list[Row]:
            return run_pairs(cell, (method,), pairs, timeout_s=left, run=suite.worker.run)

        rows = suite.run(part, key, measure)
        found += rows if not found else rows[1:]
    show(found)
    ours = [row for row in found if row.get("method", "fused") == "fused"]
    base = found[0]
    limit = f" at most {bound:.2f}x untiled" if bound else ""

    def ratio(rows: list[Row]) -> tuple[str, bool | None]:
        if "ratio" not in rows[0]:
            return "untiled did not run", None
        share = rows[0]["peak_allocated_bytes"] / base["peak_allocated_bytes"]
        return f"{rows[0]['ratio']:.3f}x, {share:.0%} of the memory", bound is None or rows[0]["ratio"] <= bound

    suite.claim(f"{part}: time{limit}", ours, ratio)
    return found


def _machine(suite: Suite, cell: Cell, scale: int) -> None:
    """What the device does at best, and whether this torch adds low-precision products into fp32 itself."""
    key = {"device": cell.device, "scale": scale}
    rows = suite.run("machine", key, lambda left: [suite.worker.run(machine.JOB, key, timeout_s=left)])
    for name, value in rows[0].items():
        if name in machine.SHOWN:
            print(f"    {name}: {value:,.1f}" if isinstance(value, float) else f"    {name}: {value}", flush=True)
    suite.claim(
        "weight gradients are summed in fp32 by the product itself (torch 2.12 or newer on CUDA)", rows,
        lambda rows: (str(rows[0]["products_sum_in_fp32"]), rows[0]["products_sum_in_fp32"]),
    )  # fmt: skip


def _one_mlp(suite: Suite, cell: Cell, bound_gib: float) -> None:
    part = f"one MLP, {cell.tokens:,} tokens, {cell.options.tile} per tile, output dropped"
    rows: list[Row] = []
    for one in (cell, cell.changed(method="untiled")):

        def measure(left: float, one: Cell = one) -> list[Row]:
            return [run_cell(one, timeout_s=left, run=suite.worker.run)]

        rows += suite.run(part, one.row(), measure)
    show(rows)
    suite.claim(
        f"{part}: at most {bound_gib:.3g} GiB beyond input, weights and their gradients (published: 12, untiled 60)",
        rows[:1], lambda rows: (f"{rows[0]['beyond_bytes'] / GIB:.2f} GiB", rows[0]["beyond_bytes"] <= bound_gib * GIB),
    )  # fmt: skip


def _steps(suite: Suite, model: str, tokens: int, device: str) -> None:
    """Real steps of two layers of a model with adapters, beside what the others would hold, with three settings."""
    part = f"step of {Path(model).name} with adapters, {tokens:,} tokens"
    base = Attempt(model, ON_DEVICE, tokens, 2, asdict(Lora(16)), "mixed", device, 0)

    def step(rung: int, layers: int) -> Row:
        one = asdict(replace(base, rung=rung, layers=layers))
        key = {**one, "planned": False}
        [row] = suite.run(part, key, lambda left: [suite.worker.run(ladder_step.JOB, one, timeout_s=left)])
        said = row.get("error") or f"{row['step_s']:.3f} s, {row['peak_gib']:.3f} GiB, {', '.join(row['attention'])}"
        print(f"    {RUNGS[rung].name}, {layers} layers: {said}", flush=True)
        return row

    here, there, everything, fewer = step(ON_DEVICE, 2), step(ON_HOST, 2), step(EVERYTHING, 2), step(EVERYTHING, 1)

    def overlap(rows: list[Row]) -> tuple[str, bool | None]:
        ratio = rows[1]["step_s"] / rows[0]["step_s"]
        return f"{ratio:.3f}x", ratio <= 1.05

    suite.claim(f"{part}: layer inputs on the host cost at most 5 % of the time", [here, there], overlap)

    def speed(rows: list[Row]) -> tuple[str, bool | None]:
        each = rows[0]["step_s"] - rows[1]["step_s"]
        whole = rows[0]["step_s"] + (rows[0]["layers_of_model"] - 2) * each
        return f"{tokens / whole:,.0f} tokens/s, {1e3 * each:,.1f} ms a layer, the others extrapolated", each > 0

    suite.claim(f"{part}: every technique", [everything, fewer], speed)
    for row in (here, there, everything):
        one = replace(base, rung=row["rung"])
        key = {**asdict(one), "planned": True}
        [plan] = suite.run(part, key, lambda left, one=one: [_planned(one, suite.found["device_bytes"] or 2**40)])  # type: ignore[misc]
        suite.claim(
            f"{part}, {RUNGS[one.rung].name}: the plan's tensors are the measured peak, -1 to +8 %", [row, plan], _near
        )


def _planned(attempt: Attempt, memory: int) -> Row:
    request = replace(attempt.request(), device=Device(attempt.device, memory, None, ""))
    estimate = Planner(request).estimate(attempt.tokens)
    return {"planned_gib": (estimate.device.expected - estimate.terms.get(CONTEXT, 0.0)) / GIB}


def _near(rows: list[Row]) -> tuple[str, bool | None]:
    measured, planned = rows[0]["peak_gib"], rows[1]["planned_gib"]
    return (
        f"{planned:.3g} GiB planned, {measured:.3g} GiB by {rows[0]['peak_from']}",
        -0.01 <= planned / measured - 1 <= 0.08,
    )


def _one_qwen_mlp(suite: Suite, device: str, scale: int) -> None:
    """transformers#48335: 22.56 GB untiled, 7.97 GB tiled."""
    hidden, intermediate = SHAPES["qwen3-8b"]
    part = f"one Qwen3-8B MLP as in transformers#48335, {one_mlp.TOKENS // scale:,} tokens"
    rows: list[Row] = []
    for tile in (0, one_mlp.TILE // scale):
        for upstream in one_mlp.UPSTREAM if scale == 1 else one_mlp.UPSTREAM[-1:]:
            key = {
                "hidden": hidden // scale, "intermediate": intermediate // scale, "tokens": one_mlp.TOKENS // scale,
                "tile": tile, "upstream": upstream, "device": device,
            }  # fmt: skip
            rows += suite.run(part, key, lambda left, key=key: [suite.worker.run(one_mlp.JOB, key, timeout_s=left)])  # type: ignore[misc]
    suite.claim(f"{part}: less than the published 7.97 GB of 22.56, with a gradient tensor too", rows, _less)


def _less(rows: list[Row]) -> tuple[str, bool | None]:
    said = ", ".join(f"{'tiled' if row['tile'] else 'untiled'} {row['upstream']} {row['peak_gb']:.2f}" for row in rows)
    return f"{said} GB", max(row["peak_gb"] for row in rows if row["tile"]) < 7.97


def _published(suite: Suite, cell: Cell, pairs: int) -> None:
    """ms-swift's shape; as published, the caller holds the output, and all that is allocated counts."""
    around = "under a checkpoint" if cell.checkpoint else "alone"
    part = f"ms-swift's shape, {cell.tokens:,} tokens, {around}"
    rows = _pairs(suite, part, cell.changed(hold_output=True), ("fused",), pairs, 1.0)
    suite.claim(f"{part}: at least 70 % less memory than untiled (published 54 %)", rows, _saved)


def _saved(rows: list[Row]) -> tuple[str, bool | None]:
    untiled, tiled = (row["peak_allocated_bytes"] + row.get("start_bytes", 0) for row in rows[:2])
    return f"{1 - tiled / untiled:.1%} less ({untiled / GIB:.2f} to {tiled / GIB:.2f} GiB)", tiled <= 0.3 * untiled


def _halves(suite: Suite, cell: Cell) -> None:
    part = f"{cell.tokens:,} x {cell.hidden} elements"
    key = cell.row()
    rows = suite.run(part, key, lambda left: [suite.worker.run(halves.JOB, key, timeout_s=left)])

    def same(rows: list[Row]) -> tuple[str, bool | None]:
        row = rows[0]
        # Each half's weight gradient is rounded to bf16 (2**-9 relative) once, the whole one too.
        holds = row["output_equal"] and row["input_gradient_equal"] and row["weight_gradient_error"] < 2**-8
        return (f"output equal {row['output_equal']}, input gradient equal {row['input_gradient_equal']}, "
                f"weight gradients {row['weight_gradient_error']:.1e}"), holds and row["finite"]  # fmt: skip

    suite.claim(f"{part}: the same numbers as two halves", rows, same)


def table(rows: list[Row]) -> str:
    """Tables for the README: pairs beside what ``gpu_estimates.py`` expects of an H200, steps beside the plan."""
    lines = ["", "| block | tokens | | ms | of untiled | peak GiB | units | estimated ms | estimated GiB |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        if "pair" not in row or (row["method"] == "untiled" and row["pair"] != "fused"):
            continue
        start = f"| {row['kind'].split(',')[0]}, {row['train']} | {row['tokens']:,} | {row['method']} |"
        if "error" in row or "step_ms" not in row:
            lines.append(f"{start} {row.get('error', 'not timed')} | | | | | |")
            continue
        ratio = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        lines.append(f"{start} {row['step_ms']:,.1f} | {ratio} | {row['peak_allocated_bytes'] / GIB:.2f} | "
                     f"{row['units']:.2f} | {_estimate(row)} |")  # fmt: skip
    steps = {(row["rung"], row["layers"]): row for row in rows if "step_s" in row}
    plans = {row["rung"]: row["planned_gib"] for row in rows if "planned_gib" in row}
    if steps:
        lines += [
            "",
            "| step | layers run | tokens | s | peak GiB | planned GiB | attention |",
            "|---|---|---|---|---|---|---|",
        ]
    for (rung, layers), row in steps.items():
        planned = f"{plans[rung]:.3g}" if rung in plans and layers == 2 else ""
        ran = f"{layers} of {row['layers_of_model']} | {row['tokens']:,} | {row['step_s']:.3f} | {row['peak_gib']:.3g}"
        lines.append(f"| {RUNGS[rung].name} | {ran} | {planned} | {', '.join(row['attention'])} |")
    return "\n".join(lines)


def _estimate(row: Row) -> str:
    if row["method"] not in METHODS or row["train"] != "full" or not row["checkpoint"] or row["keep"]:
        return " | "
    tile = -(-row["tokens"] // max(1, row["tiles"]))
    found = record_layer(row["method"], row["tokens"], row["hidden"], row["intermediate"], tile)
    return f"{1e3 * found.seconds:,.1f} | {found.peak / GIB:.2f}"


if __name__ == "__main__":
    sys.exit(main())
