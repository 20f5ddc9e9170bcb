"""Out-of-memory where and when a test wants it: a real allocation that no machine can give, in a hook of the test's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

PHASES = ("forward", "loss", "backward", "optimizer")


class Fault(TrainerCallback):
    """Run out of memory in one phase of one step, as often as it is told.

    Args:
        phase: one of :data:`PHASES`, or ``"recompute"``. In the optimizer it comes after the weights were changed.
        step: in this optimizer step.
        micro: from this micro-batch of it on.
        times: so often in all.
        flag: a file that is there once it has happened; for runs that start again in a new process.
    """

    def __init__(self, phase: str, step: int, *, micro: int = 1, times: int = 1, flag: Path | None = None) -> None:
        self.phase, self.step, self.micro, self.left, self.flag = phase, step, micro, times, flag
        self.now, self.began = 0, 0

    def _fail(self, *_: Any) -> None:
        if self.now != self.step or self.left <= 0 or (self.flag is not None and self.flag.exists()):
            return
        if self.phase != "optimizer" and self.began < self.micro:
            return
        self.left -= 1
        if self.flag is not None:
            self.flag.touch()
        torch.empty(1 << 50, dtype=torch.uint8)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
                       **_: Any) -> None:  # fmt: skip
        self.now = state.global_step + 1
        plain = getattr(model, "module", model)
        plain = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
        attention = plain.model.layers[1].self_attn
        plain.model.embed_tokens.register_forward_pre_hook(self._count)
        if self.phase == "forward":
            attention.register_forward_pre_hook(_outside_of_backward(self._fail))
        elif self.phase == "recompute":
            attention.register_forward_pre_hook(_inside_of_backward(self._fail))
        elif self.phase == "loss":
            plain.lm_head.register_forward_pre_hook(_outside_of_backward(self._fail))
        elif self.phase == "backward":
            attention.register_forward_hook(lambda _, __, output: output[0].register_hook(self._fail) and None)
        else:
            getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._fail)

    def _count(self, *_: Any) -> None:
        self.began += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.now, self.began = state.global_step + 1, 0


def _outside_of_backward(call: Callable[..., None]) -> Callable[..., None]:
    return lambda *words: call(*words) if torch._C._current_graph_task_id() == -1 else None


def _inside_of_backward(call: Callable[..., None]) -> Callable[..., None]:
    return lambda *words: call(*words) if torch._C._current_graph_task_id() != -1 else None
