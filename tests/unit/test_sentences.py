"""Reports and results read as sentences, in a notebook too."""

from __future__ import annotations

import torch

import seqtile
import zoo


def test_results_read_as_sentences() -> None:
    model = zoo.causal_lm("llama")
    with seqtile.applied(model, tile=8) as report:
        assert repr(report) == str(report) and "tiled 2 of 2 MLPs" in repr(report)
        assert report._repr_html_().startswith("<p>tiled 2 of 2 MLPs (LlamaMLP), 8 tokens per tile")
    result = seqtile.verify(model, {"input_ids": torch.arange(32)[None] % zoo.VOCABULARY}, tile=8)
    assert repr(result) == str(result) and "untiled -&gt; tiled" in result._repr_html_()  # escaped
