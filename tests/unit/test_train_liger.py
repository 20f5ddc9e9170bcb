"""Liger's rotary embedding and norms, which ``seqtile train`` turns on where there is CUDA: read, and not run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import seqtile
import zoo
from seqtile.recognise.known_kernels import own_forward
from seqtile.train import load
from seqtile.train.recipe import Recipe

pytestmark = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "mistral", "qwen3_moe", "olmo2")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device by its name alone; what Liger changes in a model's source is put back."""
    monkeypatch.setattr(load, "device_type", lambda: "cuda")
    for architecture in ARCHITECTURES:
        source = sys.modules[type(zoo.causal_lm(architecture)).__module__]
        for name in [*vars(source)]:
            if not name.startswith("__"):
                monkeypatch.setattr(source, name, getattr(source, name))


def package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def recipe(**settings: Any) -> Recipe:
    return Recipe(model="m", dataset="d", max_length=64, **settings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rotary_embedding_and_norms_and_nothing_else(architecture: str) -> None:
    model = zoo.causal_lm(architecture)
    source = sys.modules[type(model).__module__]
    assert "rotary embedding" in load.use_liger(model, recipe())
    bare_norms = 0
    for name, module in model.named_modules():
        is_norm, by_liger = "norm" in type(module).__name__.lower(), package(own_forward(module)) == "liger_kernel"
        assert is_norm or not by_liger, name
        bare_norms += is_norm and not by_liger
    assert bare_norms == (4 if architecture == "olmo2" else 0)  # its norms of queries and keys
    assert package(source.apply_rotary_pos_emb) == "liger_kernel"
    assert package(torch.nn.functional.cross_entropy) == "torch"
    report = seqtile.apply(model)
    assert report.tiled == 2 and report.norms == bare_norms and not report.left
    assert "Liger's kernels run the rotary embedding and the norms" in str(report)


@pytest.mark.parametrize(
    "settings",
    [{"trainer": {"use_liger_kernel": True}}, {"trainer": {"use_liger_kernel": False}},
     {"model_kwargs": {"use_kernels": True}}],
)  # fmt: skip
def test_a_recipe_that_says_so_itself_is_heeded(settings: dict[str, Any]) -> None:
    model = zoo.causal_lm("llama")
    assert load.use_liger(model, recipe(**settings)) == ""
    assert not any(own_forward(module) for module in model.modules())


def test_models_that_liger_does_not_know_and_devices_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load.use_liger(zoo.causal_lm("gpt2"), recipe()) == ""
    monkeypatch.setattr(load, "device_type", lambda: "cpu")
    model = zoo.causal_lm("llama")
    assert load.use_liger(model, recipe()) == ""
    assert not any(own_forward(module) for module in model.modules())


def test_a_liger_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers.integrations.liger

    def fails(*_: Any) -> None:
        raise ImportError("cannot import name 'lce_forward'")

    monkeypatch.setattr(transformers.integrations.liger, "apply_liger_kernel", fails)
    assert load.use_liger(zoo.causal_lm("llama"), recipe()) == ""
    assert "lce_forward" in caplog.text
