"""What Python users see: one sentence at the call where something is wrong, and results that read as sentences."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import seqtile
import zoo


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return zoo.causal_lm("llama")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a name": (lambda _: seqtile.apply("llama"), "apply got the text 'llama', expected an nn.Module"),
    "no model": (lambda _: seqtile.apply(None), "apply got NoneType, expected an nn.Module"),
    "undo": (lambda _: seqtile.undo("llama"), "undo got the text"),
    "verify": (lambda _: seqtile.verify("llama", {}), "verify got the text"),
    "check_gradients": (lambda _: seqtile.check_gradients(None), "check_gradients got NoneType"),
    "a batch": (lambda m: seqtile.verify(m, "ids"), "verify got a batch of type str"),
    "no batch": (lambda m: seqtile.verify(m, None), "verify got a batch of type NoneType"),
    "only": (lambda m: seqtile.apply(m, only=5), "only=5: expected a block's name or pattern"),
    "only of numbers": (lambda m: seqtile.apply(m, only=[5]), "only=.5.: expected a block's name or pattern"),
    "trust": (lambda m: seqtile.apply(m, trust=5), "trust=5: expected a block's name or pattern"),
    "heads": (lambda m: seqtile.apply(m, heads=99), "heads=99 is more than the 2 key-value heads of LlamaForCausalLM"),
    "DataParallel": (lambda m: seqtile.apply(nn.DataParallel(m)), "wrapped in DataParallel"),
    "a callback": (lambda _: seqtile.TilingCallback(tile=-1), "tile=-1: got -1 tokens per tile, expected at least 1"),
    "its heads": (lambda _: seqtile.TilingCallback(heads=0), "heads=0: expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence_at_the_call(model: nn.Module, case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(seqtile.UserError, match=words) as refused:
        call(model)
    assert "\n" not in str(refused.value)
    assert seqtile.undo(model) == 0  # nothing was left behind


def test_results_read_as_sentences(model: nn.Module) -> None:
    with seqtile.applied(model, tile=8) as report:
        assert repr(report) == str(report) and "tiled 2 of 2 MLPs" in repr(report)
        assert report._repr_html_().startswith("<p>tiled 2 of 2 MLPs (LlamaMLP), 8 tokens per tile")
    result = seqtile.verify(model, {"input_ids": torch.arange(32)[None] % zoo.VOCABULARY}, tile=8)
    assert repr(result) == str(result) and "same gradients" in result._repr_html_()
    assert "untiled -&gt; tiled" in result._repr_html_()  # escaped


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"], ["doctor"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_failure(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # what head does when it has its line
    command = [sys.executable, "-m", "seqtile.cli", *arguments]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=500)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")
