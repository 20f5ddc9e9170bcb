"""``TilingCallback`` under DDP: tiled before the model is wrapped, and after; and the accelerate example."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

import seqtile
import tiny_run
from seqtile.install.apply import tiled_names


@dataclass(frozen=True)
class Run:
    name: str
    check: Callable[[Path, int], None]


def train(folder: Path, callbacks: list[Any], fresh: bool = False) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    ids = [list(range(1 + row, 33 + row)) for row in range(16)]
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=6, per_device_train_batch_size=1, learning_rate=0.1, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "model")

    trainer = Trainer(
        model=None if fresh else load(),
        model_init=load if fresh else None,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=callbacks,
    )
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    assert len(tiled_names(trainer.model)) == (2 if callbacks else 0)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    if callbacks:
        assert logs[0]["seqtile"].startswith("tiled 2 of 2 MLPs (LlamaMLP), 16 tokens per tile")
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "weights": float(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).norm()),
    }


def callback(folder: Path, rank: int) -> None:
    untiled = train(folder, [])
    for fresh in (False, True):  # a model that is made for each run
        tiled = train(folder, [seqtile.TilingCallback(tile=16)], fresh)
        for key, value in untiled.items():
            # The order of sums differs by tile; six steps of plain SGD add it up.
            assert tiled[key] == pytest.approx(value, rel=1.3e-5), key


def example(folder: Path, rank: int) -> None:
    text = folder / f"{rank}.txt"
    text.write_text("\n".join(tiny_run.SENTENCES), encoding="utf-8")
    flags = ["--model", str(folder / "model"), "--text", str(text), "--length", "100", "--lr", "0.001"]
    script = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
    losses = []
    for untiled in ([], ["--untiled"]):
        argv = ["accelerate_loop.py", *flags, "--output", str(folder / "looped"), *untiled]
        environment = {"ACCELERATE_USE_CPU": "true"}
        with patch.object(sys, "argv", argv), patch.dict("os.environ", environment), redirect_stdout(StringIO()) as out:
            runpy.run_path(str(script), run_name="__main__")
        losses.append([float(loss) for loss in re.findall(r"loss (\d\.\d+)", out.getvalue())])
        AcceleratorState._reset_state(True)
    # Eleven rows, half of them and one each; only the first process prints. The last digit may round the other way.
    assert len(losses[0]) == (6 if rank == 0 else 0)
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


CASES = [Run("trainer", callback), Run("accelerate-loop", example)]


class ENGINE:
    @staticmethod
    def run(case: Run, rank: int) -> None:
        folder = Path.cwd() / case.name  # both ranks' log folder
        if rank == 0:
            tiny_run.save_model(folder / "model")
        dist.barrier()
        try:
            case.check(folder, rank)
        finally:
            AcceleratorState._reset_state(True)
            PartialState._reset_state()
