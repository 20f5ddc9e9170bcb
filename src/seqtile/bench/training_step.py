"""``seqtile bench step``: a whole training step of a model, on whatever engine it is launched under."""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile.bench.cell import METHODS, OURS, SET_HERE, refuse_options, run_child
from seqtile.bench.environment import append_rows, environment, stamp
from seqtile.devices import allocated_bytes, empty_cache, peak_bytes, peak_reserved_bytes, reset_peak
from seqtile.options import TilingOptions, as_row, from_row

Row = dict[str, Any]

_ENGINES = {"NO": "one process", "MULTI_CPU": "DDP", "MULTI_GPU": "DDP", "MULTI_NPU": "DDP", "MULTI_XPU": "DDP"}


@dataclass(frozen=True)
class TrainingStep:
    """A training step to measure.

    Attributes:
        model: directory with ``config.json`` (weights are loaded if they are there), a config file, or a Hub id.
        tokens: length of the one row.
        options: of ours; the others get as many tiles as its ``tile`` cuts.
        checkpoint: activation checkpointing, non-reentrant.
        dtype: of weights and activations; "" for bfloat16 on an accelerator and float32 on the CPU.
        loss_tokens: the loss is taken on this many last tokens, so that the logits do not hide the blocks.
        repeats: timed steps after the warm-up.
        seed: of random weights and tokens.
    """

    model: str
    tokens: int
    options: TilingOptions = TilingOptions()
    checkpoint: bool = True
    dtype: str = ""
    loss_tokens: int = 1024
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise UserError(f"--tokens {self.tokens}: expected at least 2")
        if self.repeats < 5:
            raise UserError(f"--repeats {self.repeats}: a median wants at least 5")
        refuse_options(self.options, SET_HERE)
        path = Path(self.model)
        if not path.exists() and (path.suffix or self.model.startswith((".", "/")) or self.model.count("/") != 1):
            raise UserError(f"--model {self.model!r} does not exist: give a model directory, a config file or a Hub id")

    def row(self) -> Row:
        """Its fields and options as a row of results has them."""
        return as_row(self, ("tile",))

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TrainingStep:
        """The step that a row is of."""
        return from_row(cls, row)


def run_steps(
    step: TrainingStep, methods: Sequence[str], output: Path | None, on_progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Measure the step with each method: in processes of their own, or in turn in this one if it is a launched rank.

    Args:
        step: what to measure.
        methods: ways to run the blocks.
        output: file of JSON lines; None on ranks other than the first.
        on_progress: called with what runs next.
    """
    launched = "RANK" in os.environ
    found = environment() if launched else run_child("environment", {})
    rows: list[Row] = []
    for method in methods:
        on_progress(f"{method}, {step.tokens:,} tokens")
        result = (
            measure_launched(step, method) if launched else run_child("step", {"step": step.row(), "method": method})
        )
        row = {"kind": "step", **stamp(found), **step.row(), "method": method, **result}
        rows.append(row)
        if output is not None:
            append_rows(output, [row])
        if launched and "error" in row and not row["error"].startswith("not installed"):
            break  # the ranks may have stopped at different places: no further collective is safe
    return rows


def measure_launched(step: TrainingStep, method: str) -> Row:
    """:func:`measure_step`, where what stops it is its result."""
    from seqtile.bench.child import guarded

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = guarded(lambda _: measure_step(step, method), {})
    gc.collect()
    return result


def measure_step(step: TrainingStep, method: str) -> Row:
    """Median time of a step (forward, backward, gradient norm, optimiser), peak bytes, loss and gradient norm."""
    import torch

    from seqtile.devices import is_accelerator, synchronize

    if method not in METHODS:
        raise UserError(f"--methods {method!r} is unknown: expected one of {', '.join(METHODS)}")
    accelerator = _join_launch()
    device = accelerator.device
    torch.manual_seed(step.seed)
    model = _load(step, device.type)
    if step.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ran = _install(model, step, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    generator = torch.Generator().manual_seed(step.seed)
    ids = torch.randint(0, model_config(model).vocab_size, (1, step.tokens), generator=generator).to(device)
    kept = min(step.loss_tokens, step.tokens - 1)
    losses, norms, times = [], [], []

    def once() -> None:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept + 1).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, -kept:])
        del logits
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    peak = _peak(once, device, is_accelerator(device))
    for _ in range(step.repeats):
        synchronize(device)
        begin = time.perf_counter()
        once()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    seconds = statistics.median(times) / 1e3
    return {
        "ran": ran, "engine": _ENGINES.get(accelerator.distributed_type.value, accelerator.distributed_type.value),
        "ranks": accelerator.num_processes, "step_ms": 1e3 * seconds, "step_ms_all": times,
        "tokens_per_s": step.tokens * accelerator.num_processes / seconds, **peak,
        "loss_first": float(losses[0]), "loss_last": float(losses[-1]),
        "gradient_norm": None if norms[0] is None else float(norms[0]),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }  # fmt: skip


def _join_launch() -> Any:
    """accelerate's view of this launch.

    Raises:
        UserError: accelerate made another engine than the one that it was launched with.
    """
    import torch
    from accelerate import Accelerator, PartialState

    if not torch.accelerator.is_available():
        PartialState(cpu=True)  # gloo; asked of the Accelerator itself, it would leave DeepSpeed out without a word
    accelerator = Accelerator()
    made = accelerator.distributed_type.value
    for engine in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true" and made != engine:
            raise UserError(
                f"launched with {engine}, but accelerate made {_ENGINES.get(made, made)} of it, as with FSDP on "
                "a CPU: launch it on accelerators, or with another engine"
            )
    return accelerator


def _peak(once: Callable[[], None], device: Any, allocator: bool) -> Row:
    """Attention's operators, and peak bytes of the second step, above what was there before.

    The first one makes the optimiser's state.
    """

    from seqtile.counting import count_live_bytes
    from seqtile.ops.attention.kernel_calls import names_of_kernels

    with names_of_kernels() as operators:
        once()
    attention = {"attention": sorted(operators)}
    if not allocator:
        with count_live_bytes("cpu") as live:
            once()
        found = {"peak_allocated_bytes": live.peak, "peak_reserved_bytes": None, "peak_from": "counted live bytes"}
        return {**attention, **found}
    empty_cache()
    reset_peak(device)
    start = allocated_bytes(device)
    once()
    return {
        **attention,
        "peak_allocated_bytes": peak_bytes(device) - start,
        "peak_reserved_bytes": peak_reserved_bytes(device),
        "peak_from": "allocator",
        "start_bytes": start,
    }


def model_config(model: Any) -> Any:
    """The config of a model, whatever an engine wrapped it in."""
    return (model.module if hasattr(model, "module") else model).config


def _load(step: TrainingStep, device_type: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # left by the method before: the next model would be born in pieces, and this one not
    dtype = getattr(torch, step.dtype or ("float32" if device_type == "cpu" else "bfloat16"))
    path = Path(step.model)
    try:
        if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))) or not path.exists():
            return AutoModelForCausalLM.from_pretrained(step.model, dtype=dtype)
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {step.model!r} cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    with torch.device("cpu" if device_type == "cpu" else device_type):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _install(model: Any, step: TrainingStep, method: str) -> str:
    from seqtile.bench.methods import block_shape, install, tile_count
    from seqtile.models.discover.candidates import find_blocks

    found, _ = find_blocks(model)
    blocks = {block.name: block for block in found if block.kind == "mlp"}
    if not blocks:
        raise UserError(f"--model {step.model!r} has no MLP block to tile: give a decoder with gated or plain MLPs")
    first = next(iter(blocks.values()))
    weight = next(first.module.parameters())
    shape = block_shape(first.module, first.hidden, first.intermediate, weight.element_size(), weight.device.type)
    count = tile_count(method, step.options.tile, step.tokens, shape)
    ours = replace(step.options, path=method) if method in OURS else None
    return install(model, {name: block.module for name, block in blocks.items()}, method, ours, count)


def step_summary(rows: Sequence[Row]) -> list[str]:
    """Ours against untiled."""
    untiled = next((row for row in rows if row["method"] == "untiled" and "error" not in row), None)
    lines = []
    for row in rows:
        if row["method"] not in OURS:
            continue
        if "error" in row:
            lines.append(f"{row['method']}: {row['error']}")
        elif untiled is None:
            lines.append(f"{row['method']}: {row['tokens_per_s']:,.0f} tokens/s; untiled did not run")
        else:
            difference = abs(row["loss_last"] / untiled["loss_last"] - 1)
            time_ratio = row["step_ms"] / untiled["step_ms"]
            share = row["peak_allocated_bytes"] / untiled["peak_allocated_bytes"]
            lines.append(
                f"{row['method']}: {time_ratio:.2f}x the time and {share:.0%} of the memory of untiled, "
                f"loss after {row['repeats'] + 2} steps differs by {difference:.1e}"
            )
    return lines
