"""Every line of docs/techniques.md that turns a technique on runs, and changes no gradient."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

import seqtile
from tiny_models import build, tiny_config
from zoo import assert_same_gradients, gradients

PAGE = Path(__file__).parents[2] / "docs" / "techniques.md"
if not PAGE.exists():
    pytest.skip("no pages here: the tests run from an installed package", allow_module_level=True)
LINES = re.findall(r"^(seqtile\.apply\(model.*?\))(?:  #.*)?$", PAGE.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("line", LINES)
def test_the_line_changes_no_gradient(line: str) -> None:
    family = "qwen3_5_text" if "state=" in line else "llama"
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    model = build(transformers.AutoModelForCausalLM, tiny_config(family)).train()
    if "weights" in line:
        model.model.layers.requires_grad_(False)
    token_ids = torch.randint(5, 60, (1, 24))
    loss, expected = gradients(model, token_ids)
    report = eval(line, {"seqtile": seqtile, "model": model})
    tiled_loss, tiled_gradients = gradients(model, token_ids)
    assert report.tiled, "the line tiles the MLPs too"
    torch.testing.assert_close(tiled_loss, loss)
    assert_same_gradients(tiled_gradients, expected)


def test_a_line_for_each_option() -> None:
    """The page has a line for each technique."""
    text = "\n".join(LINES)
    assert all(f"{option}=" in text for option in ("loss", "checkpoint", "offload", "heads", "state", "blocks", "keep"))
