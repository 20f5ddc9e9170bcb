"""Whole training steps, ours beside what people run, and the loss table.

    python benchmarks/step.py --quick --out DIR        # within four minutes on one H100: faults, then figures
    python benchmarks/step.py --minutes 9              # every setting; goes on where it was ended
    python benchmarks/step.py --parts steps --layers 32 --methods seqtile seqtile+weights    # a whole model
    python benchmarks/step.py --device cpu --smoke     # tiny, to see that it runs

Steps (forward, backward, clipping, AdamW) of Llama-8B's shape with 2 and 4 layers, so that the time of a layer and of
the rest come apart. First each method's gradients and Transformers' own are compared with fp32, then all methods take
turns, each in a process of its own. A method that fails says why in its row, and the others go on. Every turn is a
line of JSON as soon as it has been measured.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import head_cost
import machine
from cell import Worker
from methods import STEP_METHODS, build_model, install_step, step_method, use_liger_kernels
from seqtile._errors import UserError
from seqtile.counting.live import count_live_bytes
from seqtile.devices import empty_cache, is_accelerator, synchronize
from seqtile.models.configs import read_config
from seqtile.planner.fake_step import update
from seqtile.planner.step_config import make_optimizer
from suite import GIB, RESULTS, Row, Suite

K = 1024
OURS = ("seqtile", *(f"seqtile+{settings}" for settings in (
    "attention-saved", "liger", "attention-saved+liger", "offload", "heads+offload", "weights", "offload-weights",
)))  # fmt: skip
PEERS = tuple(name for name in STEP_METHODS if name != "seqtile")
QUICK = ("liger", "liger-tiled", "seqtile", "seqtile+attention-saved", "seqtile+attention-saved+liger")
LAYERS = (2, 4)
PARTS = ("gradients", "steps", "machine", "loss")
LORA = 16
TINY = Path(__file__).parent / "data" / "tiny-llama"
STEPS, GRADIENTS, READY = (f"{__file__}:{name}" for name in ("measure_steps", "compare_gradients", "get_ready"))


def main() -> int:
    """Run the parts; 2 where there is no accelerator or a method is unknown."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="32,768 tokens and fewer methods, within four minutes")
    options.add_argument("--methods", nargs="+", help="names of methods.py; default: all")
    options.add_argument("--tokens", type=int, nargs="+", help="default: 32768 131072 8192")
    options.add_argument("--train", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    options.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="two, or one; default: 2 4")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--rounds", type=int, default=2, help="turns of each method")
    options.add_argument("--device", help="leave it out for the accelerator")
    options.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    options.add_argument("--minutes", type=float, help="no part starts after this; default: 9, with --quick 3.5")
    options.add_argument("--out", type=Path, default=RESULTS)
    flags = options.parse_args()
    try:
        run(flags)
    except UserError as error:
        print(f"step.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(flags: argparse.Namespace) -> None:
    """Faults first, then figures."""
    methods = flags.methods or (QUICK if flags.quick else (*PEERS, *OURS))
    for method in methods:
        step_method(method)
    suite = Suite("step-smoke" if flags.smoke else "step", flags.out, flags.minutes or (3.5 if flags.quick else 9.0))
    device = flags.device or suite.found["device_type"]
    if device == "cpu" and not flags.smoke:
        raise UserError(
            "benchmark.no-accelerator",
            "whole steps need an accelerator and torch finds none: add --smoke for tiny ones",
        )
    lengths = flags.tokens or ([256] if flags.smoke else [32 * K] if flags.quick else [32 * K, 128 * K, 8 * K])
    base = {"model": str(TINY) if flags.smoke else "llama-8b", "device": device}
    workers = {method: Worker() for method in methods}
    try:
        with ThreadPoolExecutor(len(workers)) as pool:  # they import side by side, and only then take turns
            list(pool.map(lambda worker: worker.run(READY, {}, timeout_s=suite.left), workers.values()))
        for train in flags.train if "gradients" in flags.parts else ():
            key = {**base, "lora": LORA if train == "lora" else 0, "layers": flags.layers[0]}
            key["tokens"] = min(16 * K, lengths[0])
            for method in methods if train == "lora" else without_frozen(methods):
                _measure(suite, workers[method], GRADIENTS, f"gradients, {train}", {**key, "method": method})
        for tokens in lengths if "steps" in flags.parts else ():
            _take_turns(suite, workers, base, flags.train, tokens, flags.layers, flags.rounds)
        ceilings: Row = {}
        if "machine" in flags.parts:
            key = {"device": device, "scale": 64 if flags.smoke else 1}
            ceilings = _measure(suite, suite.worker, machine.JOB, "machine", key)
        if "loss" in flags.parts:
            _losses(suite, device, flags.smoke)
        for tokens, train in itertools.product(lengths if "steps" in flags.parts else (), flags.train):
            print(table(suite.rows, train, tokens, flags.layers, ceilings), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
        suite.finish()


def without_frozen(methods: Iterable[str]) -> list[str]:
    """The methods that can train all weights: not those that keep frozen ones on the host."""
    return [method for method in methods if "weights" not in method]


def _measure(suite: Suite, worker: Worker, job: str, part: str, key: Row) -> Row:
    [row] = suite.run(part, key, lambda left: [worker.run(job, key, timeout_s=left)])
    shown = ("error", "gradient_error", "own_error", "worst", "step_ms", "peak_gib", "ms", "gemm_tflops", "attention")
    summary = ", ".join(f"{name} {row[name]}" for name in shown if name in row)
    print(f"    {row.get('method') or row.get('way', '')} {row.get('layers', '')}: {summary}", flush=True)
    return row


def _take_turns(
    suite: Suite,
    workers: dict[str, Worker],
    base: Row,
    trains: Sequence[str],
    tokens: int,
    depths: Sequence[int],
    rounds: int,
) -> None:
    """Steps of each method one after another, and again; what failed once is not tried again."""
    failed = {("full", method) for method in workers} - {("full", method) for method in without_frozen(workers)}
    for turn in range(rounds):
        for train, (method, worker) in itertools.product(trains, workers.items()):
            for layers in () if (train, method) in failed else depths:
                key = {**base, "lora": LORA if train == "lora" else 0, "layers": layers, "tokens": tokens}
                row = _measure(suite, worker, STEPS, f"steps, {train}", {**key, "method": method, "turn": turn})
                if "error" in row:
                    failed.add((train, method))
                    break


def _losses(suite: Suite, device: str, smoke: bool) -> None:
    """In bf16, 16,384 tokens x 248,320 x 2,048 as trl#6858 measures it, and 4,096 x 128,256 x 4,096 as Liger#1369."""
    shapes = [(64, 512, 32)] if smoke else [(16 * K, 248_320, 2048), (4 * K, 128_256, 4096)]
    for (tokens, vocabulary, hidden), way in itertools.product(shapes, head_cost.WAYS):
        key = {"way": way, "tokens": tokens, "vocabulary": vocabulary, "hidden": hidden, "device": device}
        _measure(suite, suite.worker, head_cost.JOB, "loss", key)


def get_ready(arguments: dict[str, Any]) -> dict[str, Any]:
    """Nothing more: the imports of this file have been made."""
    return {}


def measure_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps of one method.

    Args:
        arguments: ``model``, ``device``, ``method``, ``layers``, ``tokens``, ``lora`` (rank, 0 for all weights).

    Returns:
        ``ran`` (what runs it, in words), ``step_ms`` of each step after a warm-up, ``peak_gib`` with weights and
        optimizer (on the CPU of counted tensors, without the weights), ``losses`` of all steps, ``layers_of_model``.
    """
    model, batch, ran = _build(arguments)
    device = batch["input_ids"].device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = make_optimizer("adamw", weights)

    def step() -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        update(optimizer, weights)
        return loss.detach()

    on_cpu = not is_accelerator(device)
    with count_live_bytes("cpu") if on_cpu else nullcontext() as live:
        losses = [step()]
    if not on_cpu:
        torch.accelerator.reset_peak_memory_stats(device)
    step_ms = []
    for _ in range(1 if arguments["tokens"] > 64 * K else 2):
        synchronize(device)
        begin = time.perf_counter()
        losses.append(step())
        synchronize(device)
        step_ms.append(1e3 * (time.perf_counter() - begin))
    peak = live.peak if live is not None else torch.accelerator.max_memory_allocated(device)
    depth = read_config(arguments["model"]).num_hidden_layers
    return {"ran": ran, "step_ms": step_ms, "peak_gib": peak / GIB, "losses": [loss.item() for loss in losses],
            "layers_of_model": depth}  # fmt: skip


def compare_gradients(arguments: dict[str, Any]) -> dict[str, Any]:
    """The gradients of one method and those of Transformers, both in bf16, beside the same model's in fp32.

    Args:
        arguments: as of :func:`measure_steps`.

    Returns:
        ``gradient_error``, ``|method - fp32| / |fp32|`` of the ``worst`` weight: the one whose error is the largest
        multiple of Transformers' own; ``own_error``, Transformers' for that weight; ``ran``.
    """
    model, batch, _ = _build({**arguments, "method": "transformers"})
    # SDPA has no fused kernel for grouped heads in fp32: without one, this length needs 34 GiB.
    with patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", return_value=False):
        truth = _gradients(copy.deepcopy(model).float(), batch)
    empty_cache()
    own = _gradients(model, batch)
    model.zero_grad(set_to_none=True)
    empty_cache()
    ran = install_step(model, step_method(arguments["method"]), arguments["tokens"], use_liger_kernels)
    gradients = _gradients(model, batch)
    errors = {name: (_difference(gradients[name], true), _difference(own[name], true)) for name, true in truth.items()}
    worst = max(errors, key=lambda name: errors[name][0] / max(errors[name][1], 2**-16))
    return {"gradient_error": errors[worst][0], "own_error": errors[worst][1], "worst": worst, "ran": ran}


def _gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    model(**batch, use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def _difference(gradient: Tensor | None, expected: Tensor | None) -> float:
    if gradient is None or expected is None:
        return float("inf")
    difference = ((gradient.float() - expected).norm() / expected.norm()).item()
    return difference if difference == difference else float("inf")


def _build(arguments: dict[str, Any]) -> tuple[Any, dict[str, Tensor], str]:
    """Model and batch, the same for every method."""
    torch.manual_seed(0)
    config = read_config(arguments["model"])
    model = build_model(config, arguments["layers"], arguments["lora"], arguments["device"])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (1, arguments["tokens"]), generator=generator).to(arguments["device"])
    ran = install_step(model, step_method(arguments["method"]), arguments["tokens"], use_liger_kernels)
    return model, {"input_ids": ids, "labels": ids}, ran


def table(rows: Sequence[Row], train: str, tokens: int, depths: Sequence[int], ceilings: Row) -> str:
    """One setting, medians of all turns: of two depths the time of a layer and of the rest, of one the whole step."""
    split = len(depths) > 1
    columns = ("ms a layer", "ms of the rest", "floor of a layer, of the rest") if split else ("ms",)
    columns = (
        "method",
        *columns,
        "peak GiB",
        "tokens/s, all layers" if split else "tokens/s",
        "gradient error, Transformers' own",
    )
    title = f"Steps, {train}, {tokens:,} tokens, {' and '.join(map(str, depths))} layers:"
    lines = ["", title, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    turns = [
        row for row in rows
        if row["kind"] == f"steps, {train}" and row["tokens"] == tokens and row["layers"] in depths
    ]  # fmt: skip
    errors = {
        row["method"]: f"{row['gradient_error']:.1e}, {row['own_error']:.1e}"
        for row in rows if row["kind"] == f"gradients, {train}" and "gradient_error" in row
    }  # fmt: skip
    for method in dict.fromkeys(row["method"] for row in turns):
        method_turns = [row for row in turns if row["method"] == method]
        error = next((row["error"] for row in method_turns if "error" in row), None)
        times = [
            [ms for row in method_turns if row["layers"] == layers for ms in row.get("step_ms", ())]
            for layers in depths
        ]
        if error is not None or not all(times):
            lines.append(f"| {method} | {error or 'not measured'} |" + " |" * (len(columns) - 2))
            continue
        whole = statistics.median(times[0])
        cells = [f"{whole:,.1f}"]
        if split:
            layer = (statistics.median(times[1]) - whole) / (depths[1] - depths[0])
            outside = whole - depths[0] * layer
            whole = outside + method_turns[0]["layers_of_model"] * layer
            cells = [f"{layer:,.1f}", f"{outside:,.1f}", _floor(method_turns[0], ceilings)]
        peak = max(row["peak_gib"] for row in method_turns)
        cells = [method, *cells, f"{peak:.2f}", f"{1e3 * tokens / whole:,.0f}", errors.get(method, "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _floor(row: Row, ceilings: Row) -> str:
    """Milliseconds of products and attention kernels at the ceilings of this run, under checkpoints.

    Every product of a layer once more but the last, attention once.
    """
    attention = ceilings.get("attention", {}).get("chosen", {})
    if "gemm_tflops" not in ceilings or "forward_tflops" not in attention:
        return ""
    config, tokens = read_config(row["model"]), row["tokens"]
    width, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or width // heads
    mlp = width * config.intermediate_size
    weights = 2 * width * head * (heads + config.num_key_value_heads) + 3 * mlp
    passes = 3 if row["lora"] else 4  # forward, recompute, the input's gradient, the weights'
    products = 2 * tokens * (passes * weights - mlp) / ceilings["gemm_tflops"]
    causal = 2 * tokens**2 * heads * head
    kernels = causal / attention["forward_tflops"] + 2.5 * causal / attention["backward_tflops"]
    outside = 2 * tokens * (passes - 1) * width * config.vocab_size / ceilings["gemm_tflops"]
    return f"{(products + kernels) / 1e9:,.1f}, {outside / 1e9:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
