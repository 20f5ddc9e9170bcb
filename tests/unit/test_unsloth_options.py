"""Unsloth's line, run by seqtile, and models that Unsloth has changed."""

import sys
from types import MethodType

import pytest
import torch
from torch import nn

import seqtile
from refusals import refused
from seqtile.blocks.instance import TiledForward
from seqtile.integrations.unsloth import patch_tiled_mlp
from seqtile.recognise import proof
from zoo import causal_lm


def tiled(model: nn.Module) -> dict[str, str]:
    """Qualified name and rule of all that is tiled, but the norms outside it."""
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules() if "norm" not in name}
    return {name: str(f.setting.rule) for name, f in forwards.items() if isinstance(f, TiledForward)}


@pytest.mark.parametrize(("option", "rule"), [
    ("arctic", "arctic"), ("shards:4", "shards:4"), ("target:1", "memory:1GiB"), ("target:1.5GB", "memory:1.5GiB"),
])  # fmt: skip
def test_what_an_option_means(option: str, rule: str) -> None:
    model, expected = causal_lm("llama"), causal_lm("llama")
    assert patch_tiled_mlp(model, option) is model
    seqtile.apply(expected, tile=rule)
    assert tiled(model) == tiled(expected) and len(tiled(model)) == len(model.model.layers)


@pytest.mark.parametrize("option", ["target", "target:0", "target:a lot", "target:-1", "target:1:mlp", "4 GB"])
def test_other_options_are_refused(option: str) -> None:
    model = causal_lm("llama")
    with refused("option.malformed"):
        patch_tiled_mlp(model, option)
    assert not tiled(model)


def test_a_model_that_unsloth_has_tiled_is_refused() -> None:
    """Its ``patch_mlp`` binds a function of ``unsloth_zoo.tiled_mlp`` to the instance."""

    def tiled_forward(self, x):
        return type(self).forward(self, x)

    tiled_forward.__module__ = "unsloth_zoo.tiled_mlp"
    model = causal_lm("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(tiled_forward, mlp)
    for call in (lambda: patch_tiled_mlp(model), lambda: seqtile.tile_module(mlp), lambda: seqtile.apply(model)):
        with refused("unsloth.tiles-already", "LlamaMLP"):
            call()
    seqtile.apply(model, blocks="none", loss="tiled")


def test_models_are_proven_beside_unsloths_torch_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks ``hasattr(torch, "hpu")`` in a trace, which runs what ``import unsloth`` put there (2026.10.9)."""
    original = vars(torch)["__getattr__"]

    def __getattr__(name: str) -> object:
        try:
            return original(name)
        except AttributeError:
            if sys._getframe(1).f_globals.get("__name__") == "no_such_module":
                raise RuntimeError("torch is too old") from None
            raise

    monkeypatch.setitem(vars(torch), "__getattr__", __getattr__)
    monkeypatch.setattr(proof, "_proofs", type(proof._proofs)())
    model = causal_lm("llama")
    patch_tiled_mlp(model, "shards:2")
    assert len(tiled(model)) == 2
