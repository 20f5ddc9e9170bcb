"""The trainer looks once whether everything inside the tiled blocks trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import seqtile
import tiny_run
import zoo
from seqtile.train import callbacks
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train


def test_it_looks_once_and_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.causal_lm("llama")
    seqtile.apply(model, tile=5)
    zoo.gradients(model, zoo.tokens())
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad = None
    caplog.clear()
    callback = callbacks.CheckFirstStep()
    callback.on_pre_optimizer_step(None, None, None, model=model)
    assert "1 trainable parameters inside tiled blocks have no gradient: model.layers.1.mlp.up" in caplog.text
    caplog.clear()
    callback.on_pre_optimizer_step(None, None, None, model=model)
    assert not caplog.records
    weight.ds_id = 1  # as DeepSpeed marks it
    callbacks.CheckFirstStep().on_pre_optimizer_step(None, None, None, model=model)
    assert "could not check the gradients of the first step: DeepSpeed owns the gradients" in caplog.text


def test_a_run_looks_at_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]")
    seen: list[bool] = []

    def look(model: nn.Module) -> list[str]:
        names = seqtile.check_gradients(model)
        seen.append(not names and any(p.grad is not None for p in model.parameters()))
        return names

    monkeypatch.setattr(callbacks, "check_gradients", look)
    values: dict[str, Any] = {
        "model": str(tiny_run.save_model(tmp_path / "model")),
        "dataset": str(tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())),
        "output": str(tmp_path / "out"),
        "max_length": tiny_run.LENGTH,
        "steps": 2,
        "tile": 16,
        "lora": {"r": 2},
        "report": False,
    }
    train(build_recipe({}, values)[0])
    assert seen == [True]
