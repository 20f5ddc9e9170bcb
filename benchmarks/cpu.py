"""The CPU claims: `make bench-cpu`, about half an hour on two cores.

One MLP, 1024 x 2816, fp32, 16,384 tokens, 8 tiles. Under a layer checkpoint: time of ours against untiled, seven
interleaved pairs, every pair printed, others beside it. Alone and under the checkpoint: peak live bytes, counted.

Whole steps of a small model, `--part steps`: forward and backward of four layers under activation checkpoints, 512 /
1,408 wide, vocabulary 32,000, fp32, 4,096 tokens in one thread, all weights and LoRA. The methods take turns, and each
is compared with Transformers in its own turn, by processor time: a busy machine changes it little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cell import Cell, run_pairs
from child import guarded
from seqtile._errors import UserError
from seqtile.options import TilingOptions
from suite import RESULTS, Row, Suite, show

OURS = ("fused",)
PEERS = ("tile-checkpoint", "liger", "deepspeed")
COUNTED = (*OURS, *PEERS, "generic", "deepspeed-compute")
STEPS = ("transformers", "alst", "seqtile", "seqtile+attention-saved", "seqtile+fit")
STEPS_JOB = f"{__file__}:measure_whole_steps"
LORA = 16
MIB = 2**20


def main() -> int:
    """Run the suite."""
    options = argparse.ArgumentParser(description="The CPU claim.", allow_abbrev=False)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--peer-pairs", type=int, default=7)
    options.add_argument("--turns", type=int, default=3, help="of whole steps")
    options.add_argument("--part", choices=("all", "alone", "counted", "ours", "others", "steps"), default="all")
    options.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    try:
        run(given.pairs, given.peer_pairs, given.turns, given.smoke, given.part, given.out)
    except UserError as error:
        print(f"cpu.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(pairs: int, peer_pairs: int, turns: int, smoke: bool, part: str, out: Path) -> None:
    """Count and time each part."""
    suite = Suite("smoke" if smoke else "cpu", out, minutes=120)
    hidden, intermediate, tokens = (64, 176, 1024) if smoke else (1024, 2816, 16384)
    cell = Cell(hidden, intermediate, tokens, dtype="float32", options=TilingOptions(tile="shards:8"))
    if part in ("all", "alone"):
        alone = _once(suite, "alone, counted", cell, COUNTED, 0)
        show(alone)
        suite.claim("alone: peak live bytes the lowest of all", alone[:2], lambda _: _lowest(alone, strictly=True))
    under = replace(cell, checkpoint=True)
    if part in ("all", "ours"):
        ours = _in_pairs(suite, under, OURS, pairs)
        suite.claim(
            "under a checkpoint: at most 1.05x the untiled time, median of the pairs", ours,
            lambda rows: (f"{rows[1]['ratio']:.3f}x", rows[1]["ratio"] <= 1.05),
        )  # fmt: skip
    if part in ("all", "others"):
        _in_pairs(suite, under, PEERS, peer_pairs)
    if part in ("all", "counted"):
        counted = _once(suite, "under a checkpoint, counted", under, COUNTED, 0)
        show(counted)
        claim = "under a checkpoint: peak live bytes not above any"
        suite.claim(claim, counted[:2], lambda _: _lowest(counted, strictly=False))
    if part in ("all", "steps"):
        for train, lora in (("all weights", 0), ("LoRA r=16", LORA)):
            rows = _whole_steps(suite, lora, turns, smoke)
            print(steps_table(rows, train), flush=True)
            claim = f"a step, {train}: at most Transformers' processor time and below ALST's, median of the turns"
            suite.claim(claim, rows, _fastest)
    suite.finish()


def _whole_steps(suite: Suite, lora: int, turns: int, smoke: bool) -> list[Row]:
    key: Row = {"methods": list(STEPS), "lora": lora, "turns": turns, "layers": 4, "tokens": 4096}
    key |= {"hidden": 512, "intermediate": 1408, "vocabulary": 32_000}
    if smoke:
        key |= {"layers": 1, "tokens": 256, "hidden": 64, "intermediate": 176, "vocabulary": 320}

    def measure(left: float) -> list[Row]:
        result = suite.worker.run(STEPS_JOB, key, timeout_s=left)
        return result["rows"] if "rows" in result else [result]

    return suite.run("whole steps", key, measure)


def measure_whole_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps of all methods in turn, forward and backward in one thread; the first of each is counted, not timed.

    Args:
        arguments: ``methods``, the first of which the others are compared with, ``lora`` (rank, 0 for all weights),
            ``turns``, ``layers``, ``tokens``, ``hidden``, ``intermediate``, ``vocabulary``.

    Returns:
        ``rows``, one a method: ``ran``, ``peak_allocated_bytes`` (counted, with the gradients and without the weights),
        ``gradient_error`` (worst weight, relative L2, from the first method's), ``step_ms_all`` and ``cpu_ms_all``,
        ``ratios`` of processor time in each turn, ``wall_ratios``, ``ratio`` and ``wall_ratio``, their medians.
    """
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, arguments["vocabulary"], (1, arguments["tokens"]), generator=generator)
    models: dict[str, Any] = {}
    gradients: dict[str, Any] = {}

    def first_step(row: Row) -> Row:
        models[row["method"]], costs = _first_step(row["method"], arguments, ids, gradients)
        return row | costs

    rows = [{"method": method} | guarded(first_step, {"method": method}) for method in arguments["methods"]]
    timed = {row["method"]: row | {"step_ms_all": [], "cpu_ms_all": []} for row in rows if "error" not in row}
    for turn in range(arguments["turns"]):
        for method in timed if turn % 2 == 0 else reversed(timed):
            begin, cpu = time.perf_counter(), time.process_time()
            _step(models[method], ids)
            timed[method]["cpu_ms_all"].append(1e3 * (time.process_time() - cpu))
            timed[method]["step_ms_all"].append(1e3 * (time.perf_counter() - begin))
    base = timed.get(arguments["methods"][0], {})
    for row in timed.values() if base else ():
        for name, times in (("ratio", "cpu_ms_all"), ("wall_ratio", "step_ms_all")):
            row[f"{name}s"] = [ms / other for ms, other in zip(row[times], base[times], strict=True)]
            row[name] = statistics.median(row[f"{name}s"])
    return {"rows": [timed.get(row["method"], row) for row in rows]}


def _first_step(method: str, arguments: dict[str, Any], ids: Any, expected: dict[str, Any]) -> tuple[Any, Row]:
    """The model, and the row of its first step; ``expected`` takes the gradients of the first method."""
    import torch
    from transformers import LlamaConfig

    from methods import build_model, install_step, step_method, use_liger_kernels
    from seqtile.counting.live import count_live_bytes

    config = LlamaConfig(
        hidden_size=arguments["hidden"], intermediate_size=arguments["intermediate"], num_attention_heads=8,
        vocab_size=arguments["vocabulary"], num_hidden_layers=arguments["layers"],
        max_position_embeddings=arguments["tokens"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(config, arguments["layers"], arguments["lora"], "cpu", torch.float32)
    ran = install_step(model, step_method(method), arguments["tokens"], use_liger_kernels)
    with count_live_bytes("cpu") as live:
        _step(model, ids)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if not expected:
        expected.update(gradients)
    error = max(float((gradients[name] - true).norm() / true.norm()) for name, true in expected.items())
    row = {"ran": ran, "peak_allocated_bytes": live.peak, "peak_from": "counted live bytes", "gradient_error": error}
    return model, row


def _step(model: Any, ids: Any) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def steps_table(rows: Sequence[Row], train: str) -> str:
    """The rows of one :func:`measure_whole_steps`, for docs/performance.md."""
    lines = [
        "",
        f"| {train} | processor seconds, lowest to highest | of Transformers' | peak MiB |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if "ratio" not in row:
            lines.append(f"| {row.get('method', '')} | {row.get('error', 'not measured')} | | |")
            continue
        seconds = sorted(ms / 1e3 for ms in row["cpu_ms_all"])
        spread = f"{statistics.median(seconds):.1f}, {seconds[0]:.1f} to {seconds[-1]:.1f}"
        lines.append(f"| {row['method']} | {spread} | {row['ratio']:.2f} | {row['peak_allocated_bytes'] / MIB:,.0f} |")
    return "\n".join(lines)


def _fastest(rows: list[Row]) -> tuple[str, bool]:
    ratio = {row["method"]: row["ratio"] for row in rows}
    value = ", ".join(f"{method} {share:.2f}" for method, share in ratio.items())
    return value, ratio["seqtile"] <= 1.0 and ratio["seqtile"] < ratio["alst"]


def _once(suite: Suite, part: str, cell: Cell, methods: tuple[str, ...], pairs: int) -> list[Row]:
    key = {"methods": list(methods), "pairs": pairs}
    return suite.run(part, key, lambda left: run_pairs(cell, methods, pairs, timeout_s=left))


def _in_pairs(suite: Suite, cell: Cell, methods: tuple[str, ...], pairs: int) -> list[Row]:
    rows = _once(suite, "under a checkpoint, interleaved pairs", cell, methods, pairs)
    show(rows)
    for row in rows[1:]:
        if "pairs_ms" in row:
            told = " ".join(f"{untiled:.0f}/{tiled:.0f}" for untiled, tiled in row["pairs_ms"])
            ratios = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
            print(f"    untiled/{row['method']} ms: {told}; ratios {ratios}", flush=True)
    return rows


def _lowest(rows: list[Row], *, strictly: bool) -> tuple[str, bool]:
    """Ours against the lowest of the others; what could not run is not compared."""
    ours = next(row for row in rows if row["method"] == "fused")["peak_allocated_bytes"]
    others = {
        row["method"]: row["peak_allocated_bytes"]
        for row in rows
        if row["method"] not in ("fused", "generic") and "error" not in row
    }
    name, best = min(others.items(), key=lambda item: item[1])
    return f"{ours / MIB:.2f} MiB, next {name} with {best / MIB:.2f} MiB", ours < best if strictly else ours <= best


if __name__ == "__main__":
    sys.exit(main())
