"""One rank of Trainer runs with and without ``TilingCallback``, and of the accelerate example."""

from __future__ import annotations

import json
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import seqtile
from seqtile.models.apply import tiled_names


def run(model: Path, output: Path, callbacks: list[Any], fresh: bool = False) -> dict[str, Any]:
    ids = [list(range(1 + row, 33 + row)) for row in range(16)]
    arguments = TrainingArguments(
        str(output), max_steps=6, per_device_train_batch_size=1, learning_rate=0.1, optim="sgd", logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2,
    )  # fmt: skip

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(model)

    trainer = Trainer(
        model=None if fresh else load(),
        model_init=load if fresh else None,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=callbacks,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "tiled": len(tiled_names(trainer.model)),
        "losses": [log["loss"] for log in logs],
        "norms": [log["grad_norm"] for log in logs],
        "weights": float(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).norm()),
        "told": logs[0].get("seqtile", ""),
    }


def loop(model: Path, folder: Path, *more: str) -> list[str]:
    """The losses that ``examples/accelerate_loop.py`` prints."""
    text = folder / "text.txt"
    command = ["--model", str(model), "--text", str(text), "--length", "100", "--lr", "0.001"]
    sys.argv = ["accelerate_loop.py", *command, "--output", str(folder / "looped"), *more]
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "accelerate_loop.py"), run_name="__main__")
    return re.findall(r"loss (\d\.\d{4})", said.getvalue())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    model, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    runs: dict[str, Any] = {
        "untiled": run(model, folder / "untiled", []),
        "tiled": run(model, folder / "tiled", [seqtile.TilingCallback(tile=16)]),
        "a model per run": run(model, folder / "fresh", [seqtile.TilingCallback(tile=16)], fresh=True),
    }
    runs["loops"] = [loop(model, folder), loop(model, folder, "--untiled")]
    (folder / f"rank{rank}.json").write_text(json.dumps(runs))
