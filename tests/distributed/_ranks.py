"""One rank of a run with checkpoints and one broken loss: started by ``test_reliability_ranks``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import tiny_run


def trainer(model_path: Path, output: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig

    import seqtile
    from seqtile.train.data import Loaded
    from seqtile.train.read_data import Data
    from seqtile.train.rendered_rows import RowSet
    from seqtile.train.row_formats import RowFormat
    from seqtile.train.trainer import Trainer

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    seqtile.apply(model, tile=16)
    config = SFTConfig(
        output_dir=str(output), max_length=tiny_run.LENGTH, per_device_train_batch_size=1, learning_rate=1e-2,
        logging_steps=1, save_steps=2, save_total_limit=1, report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, max_steps=4, seed=0,
    )  # fmt: skip
    rows = Dataset.from_list(tiny_run.text_rows())
    row_set = RowSet(Loaded("texts", rows), rows, RowFormat(("text",), ("text",)), rows.select([0]), [0])
    data = Data(config, {"train": row_set}, None)
    return Trainer(data, model=model, processing_class=AutoTokenizer.from_pretrained(model_path))


def losses(one: Any) -> list[float]:
    return [row["loss"] for row in one.state.log_history if "loss" in row]


def main(model_path: Path, folder: Path) -> dict[str, Any]:
    from trl import SFTTrainer

    from seqtile._errors import RunError

    whole = trainer(model_path, folder / "whole")
    assert whole.accelerator.num_processes == 2, "the launch did not distribute"
    whole.train_all(None)
    rank = whole.accelerator.process_index

    first = trainer(model_path, folder / "parts")
    step = SFTTrainer.training_step

    def broken_on_one_rank(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(self, *args, **kwargs)
        return loss * float("nan") if rank == 1 and self.state.global_step == 2 else loss

    SFTTrainer.training_step = broken_on_one_rank
    said = ""
    try:
        first.train_all(None)
    except RunError as error:
        said = str(error)
    SFTTrainer.training_step = step

    resumed = trainer(model_path, folder / "parts")
    resumed.train_all(folder / "parts" / "checkpoint-2")
    resumed.save_result(folder / "parts")
    return {"said": said, "whole": losses(whole), "resumed": losses(resumed)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = main(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[2], f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
