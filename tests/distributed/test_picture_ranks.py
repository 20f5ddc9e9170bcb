"""Rows with and without pictures on two processes, one of which may have no picture: the losses of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tiny_run
from grid.launch import TESTS
from seqtile.cli import main
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train

pytest.importorskip("PIL")

STEPS = 4
TRAINED: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters on the tower": {"lora": {"r": 2, "target_modules": ["qkv", "q_proj"]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, and rows of unlike lengths, every other one without a picture."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_run.save_qwen_vl(folder / "model")
    with_pictures = tiny_run.picture_rows(folder, pictures=6, videos=2)
    rows = []
    for number, row in enumerate(with_pictures):
        text = [{"role": "user", "content": f"what{' and' * number}?"}, {"role": "assistant", "content": "the king."}]
        rows += [row, {"messages": [{**message, "content": [{"type": "text", "text": message["content"]}]}
                                    for message in text]}]  # fmt: skip
    tiny_run.write_jsonl(folder / "rows.jsonl", rows)
    return folder


def values(folder: Path, output: Path, **more: Any) -> dict[str, Any]:
    return dict(
        model=str(folder / "model"), dataset=str(folder / "rows.jsonl"), output=str(output), max_length=128,
        steps=STEPS, learning_rate=1e-2, tile=16, loss_tile=16, vision=1, **more,
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", TRAINED)
def test_a_rank_without_a_picture_trains_as_one_process(
    trained: str, engine: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent / "src") + os.pathsep + str(TESTS))
    one = values(folder, tmp_path / "one", batch_size=2, trust_remote_code=True, report=False, **TRAINED[trained])
    expected = [loss for _, loss in train(build_recipe(one, {})[0]).losses]
    two = values(folder, tmp_path / "two", engine=engine, nproc=2, **TRAINED[trained])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(two))
    assert main(["train", "--recipe", str(recipe), "--trust-remote-code"]) == 0
    report = json.loads((tmp_path / "two" / "report" / "report.json").read_text())
    got = [row["loss"] for row in report["losses"]]
    # Sums in another order, and Adam's first steps divide each gradient by its own size.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=0)
    assert len({*expected}) == STEPS
