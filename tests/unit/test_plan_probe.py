"""``seqtile probe``: one real step beside its plan."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from seqtile.cli import main
from seqtile.planner import measured_step
from seqtile.planner.fake_step import build
from seqtile.planner.step_config import Lora, Setup
from zoo import HIDDEN, causal_lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=256,
        max_position_embeddings=8192, pad_token_id=0,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_every_phase_is_where_the_plan_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it comes with seqtile[train]")
    out = folder / "out"
    arguments = ["--model", str(folder), "--max-length", "2048", "--tile", "512", "--out", str(out), "--json"]
    how = ["--dtype", "float32", "--checkpoint", "attention-saved", "--keep", "0.5"]
    assert main(["probe", *arguments, *how]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["device"]) == (2048, "cpu")
    for side in ("tiled", "untiled"):
        for name, phase in found[side]["phases"].items():
            # Between no kept tile and all of them a forward is planned by a line; one tile's gate and up are both kept
            # and in use at its end.
            slack = 2 * 512 * 512 * 4 / 2**30 if (side, name) == ("tiled", "forward") else 0.0
            planned = pytest.approx(phase["measured_gib"], rel=0.01, abs=slack)
            assert phase["planned_gib"] == planned, (side, name)
        # weights and two states of AdamW
        assert found[side]["standing_gib"] == pytest.approx(3 * 4 * 1_115_264 / 2**30, rel=0.001)
        for name, term in found[side]["terms"].items():
            assert term["planned_gib"] == pytest.approx(term["measured_gib"], rel=0.01, abs=1e-4), (side, name)
        assert found[side]["most_off"] in found[side]["terms"]
        assert found[side]["terms"]["kept attention outputs"]["measured_gib"] > 0
    assert found["snapshot"] is None
    assert "attention ran on FlashAttention of PyTorch's CPU" in found["notes"]
    assert found["tiled"]["peak_gib"] < 0.95 * found["untiled"]["peak_gib"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-length", "9000"], "the 8,192 positions"),
        (["--max-length", "8"], "at least 64"),
        (["--tile", "many"], "not a tile rule"),
        (["--optimizer", "adam"], "expected one of"),
        (["--attention", "flash3"], "expected flash"),
        (["--attention", "linear"], "expected one of flash"),
        (["--checkpoint", "auto"], "for seqtile plan"),
        (["--checkpoint", "attention-saved", "--attention", "eager"], "needs an attention kernel"),
        (["--lora", "4", "--full"], "use one"),
        (["--tile", "none"], "compares tiled with untiled"),
        (["--keep", "2"], "outside 0.0 to 1.0"),
        (["--dtype", "int8"], "expected one of mixed"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    assert main(["probe", "--model", str(folder), "--out", str(out), *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert not out.exists()


class Made(TorchDispatchMode):
    """Elements of the tensors that operators return, by the type of their device."""

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                kind = tensor.device.type
                self.largest[kind] = max(self.largest.get(kind, 0), tensor.numel())
        return result


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_weights_are_drawn_on_the_device_and_nowhere_else(family: str, lora: Lora | None) -> None:
    """An 8B model drawn by one core of the host takes a minute; here the device is the one that draws nothing."""
    config = causal_lm(family).config
    with Made() as made:
        model = build(config, Setup(lora=lora), "meta").model
    assert made.largest["meta"] >= max(weight.numel() for weight in model.parameters())
    assert made.largest.get("cpu", 0) < HIDDEN, "only numbers of a configuration"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_buffers_are_those_of_an_ordinary_model(family: str) -> None:
    ordinary = causal_lm(family)
    buffers = dict(build(copy.deepcopy(ordinary.config), Setup(dtype=torch.float32), "cpu").model.named_buffers())
    expected = dict(ordinary.named_buffers())
    assert any("inv_freq" in name for name in expected) or family == "bamba"
    torch.testing.assert_close(buffers, expected, rtol=0, atol=0)


def test_what_does_not_fit_runs_at_half_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def measure(name: str, config: Any, setup: Setup, tokens: int, *rest: Any) -> str:
        tried.append(tokens)
        if tokens > 9_000:
            raise torch.OutOfMemoryError
        return name

    monkeypatch.setattr(measured_step, "_measure", measure)
    assert measured_step._halving(None, Setup(), 32_768, "cuda", None) == (8_192, "tiled")
    assert tried == [32_768, 16_384, 8_192]
    tried.clear()
    assert measured_step._halving(None, Setup(), 8_192, "cuda", None) == (8_192, "tiled") and tried == [8_192]


def test_a_directory_that_cannot_be_made_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = folder / "config.json"
    before = taken.read_bytes()
    assert main(["probe", "--model", str(folder), "--out", str(taken)]) == 2
    assert "another directory" in capsys.readouterr().err
    assert taken.read_bytes() == before
