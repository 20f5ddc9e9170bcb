"""Records of steps, shown and written to ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback

from seqtile.devices import GIB, accelerator, peak_resident_bytes
from seqtile.train.atomic_files import write_whole

METRICS_FILE = "metrics.jsonl"
LOGS = ("loss", "learning_rate", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss", "eval_mean_token_accuracy")
"""Entries copied from the trainer's log."""


class Display(Protocol):
    """Who shows how a run goes on; called on the first rank only."""

    def stage(self, text: str) -> None:
        """Show the current stage until the next call."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts after ``step`` of ``steps`` steps."""

    def record(self, values: dict[str, Any]) -> None:
        """A step, or an evaluation, was logged."""

    def end(self) -> None:
        """Training has ended."""


class Metrics(TrainerCallback):
    """Makes the records.

    Each has ``step``, ``epoch``, ``seconds`` since training began here, ``seconds_left`` by the mean step so far, what
    :data:`LOGS` names, ``tokens`` and ``tokens_per_s`` of all ranks, and the first rank's ``peak_allocated_gib``, or on
    the CPU ``peak_resident_gib``.

    Args:
        folder: where ``metrics.jsonl`` is. Lines of steps that a resumed run does again are dropped.
        display: told of each record.

    Cost:
        One line is written, and one counter read, per logged step; nothing waits for the device.
    """

    def __init__(self, folder: Path, display: Display) -> None:
        self._file, self._display = folder / METRICS_FILE, display
        self._began = self._last = 0.0
        self._first_step = 0
        self._tokens: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._began = self._last = time.perf_counter()
        self._first_step, self._tokens = state.global_step, 0.0 if state.global_step == 0 else None
        write_whole(self._file, "".join(_lines_up_to(self._file, state.global_step)))
        self._display.begin(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or not {"loss", "eval_loss"} & logs.keys():
            return
        now, done = time.perf_counter(), state.global_step - self._first_step
        values: dict[str, Any] = {
            "step": state.global_step, "epoch": round(float(state.epoch or 0), 4),
            "seconds": round(now - self._began, 3),
        }  # fmt: skip
        if done:
            values["seconds_left"] = round((now - self._began) / done * (state.max_steps - state.global_step), 1)
        values |= {name: float(logs[name]) for name in LOGS if name in logs}
        if "num_tokens" in logs and "loss" in logs:
            values["tokens"] = int(logs["num_tokens"])
            if self._tokens is not None:
                values["tokens_per_s"] = round((logs["num_tokens"] - self._tokens) / (now - self._last), 1)
            self._tokens, self._last = logs["num_tokens"], now
        if accelerator() is not None:
            values["peak_allocated_gib"] = round(torch.accelerator.max_memory_allocated() / GIB, 3)
        elif resident := peak_resident_bytes():
            values["peak_resident_gib"] = round(resident / GIB, 3)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self._display.record({**values, "steps": state.max_steps})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._display.end()


class Silent:
    """A display that shows nothing."""

    def stage(self, text: str) -> None: ...

    def begin(self, step: int, steps: int) -> None: ...

    def record(self, values: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


def _lines_up_to(file: Path, step: int) -> list[str]:
    """The lines of a file, without those of later steps and a part of a line that a killed run left."""
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    return kept
