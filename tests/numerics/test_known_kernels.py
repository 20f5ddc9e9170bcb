"""Library modules that no trace can follow are tiled, by plain twins that compute what they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from seqtile.install.runs import what_ran
from seqtile.recognise.known_kernels import own_forward, twin_of
from zoo import assert_same_gradients, causal_lm, tokens

TESTS = Path(__file__).parents[1]


def gradients(model: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# ---- Liger, in Triton's interpreter


@pytest.fixture(scope="module")
def liger() -> dict[str, Any]:
    """What ``liger_on_cpu.py`` found."""
    for package in ("liger_kernel", "triton"):
        pytest.importorskip(package, reason=f"{package} is not installed: Liger's kernels are not compared")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, TESTS / "liger_on_cpu.py"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_ligers_twins_on_values(liger: dict[str, Any]) -> None:
    """In output and every gradient the twin is as far from the truth as the kernel: some roundings."""
    assert len(liger["errors"]) == 2 * 19
    for name, (real, twin) in liger["errors"].items():
        rounding = 2**-10 if "float16" in name else 2**-20
        assert real < 2 * rounding and twin < 2 * rounding, f"{name}: the kernel is {real} off, its twin {twin}"


def test_ligers_blocks_run_by_the_fused_operator(liger: dict[str, Any]) -> None:
    assert len(liger["effects"]) == 9
    for name, seen in liger["effects"].items():
        path = "generic" if "scaled" in name else "fused"  # no formula of the operator has multipliers
        assert (seen["paths"], seen["blocks"], seen["cut"]) == ([path], 2, 2), f"{name}: {seen}"
        assert all(len(names) > 1 for names in seen["together"]), f"{name}: Liger's norm is not in the tile"
        assert seen["worst"] < 1e-5, f"{name}: {seen['worst']}"


def test_ligers_own_tiled_mlp_is_left_and_named(liger: dict[str, Any]) -> None:
    tiled, left = liger["tiled by Liger"]
    assert tiled == ["model.layers.1.mlp"]
    assert len(left) == 1 and left[0].startswith("model.layers.0.mlp: Liger tiles it already")


# ---- bitsandbytes


def quantised(layer: nn.Linear, kind: str, computes: torch.dtype | None = torch.float32) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: its layers are not compared")
    if kind == "4-bit":
        made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, compute_dtype=computes, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=made)
    else:
        made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    made.bias = None if layer.bias is None else nn.Parameter(layer.bias.data.clone())
    return made.to("cpu")  # type: ignore[no-any-return]


def dense(layer: Any) -> Tensor:
    import bitsandbytes as bnb

    if hasattr(layer, "compute_dtype"):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)  # type: ignore[no-any-return]
    return layer.weight.CB.float() * layer.weight.SCB[:, None] / 127  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("computes", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["4-bit", "8-bit"])
def test_quantised_twins_on_values(kind: str, dtype: torch.dtype, computes: torch.dtype | None, autocast: bool) -> None:
    if kind == "8-bit" and (autocast or computes is not None):
        return  # it has no dtype of its own, and on a CPU autocast reaches into its product
    torch.manual_seed(0)
    layer: Any = quantised(nn.Linear(64, 48), kind, computes)
    matrix = dense(layer)
    twin: Any = twin_of(layer)
    twin.weight = nn.Parameter(matrix.to(twin.weight.dtype), requires_grad=False)
    x, upstream = torch.randn(7, 64).to(dtype), torch.randn(7, 48).to(dtype)
    results = []
    for module in (layer, twin):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(leaf)
        results.append([output, *torch.autograd.grad(output, [leaf, module.bias], upstream)])
    for real, plain in zip(*results, strict=True):
        assert real.dtype == plain.dtype
        # One product, rounded once or twice in the dtype that it is computed in: autocast's too, on a CPU.
        rounding = 2**-6 if autocast or torch.bfloat16 in (dtype, computes) else 2**-18
        assert (real - plain).abs().max() <= rounding * plain.abs().max()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("order", ["apply first", "adapters first"])
@pytest.mark.parametrize("kind", ["4-bit", "8-bit"])
def test_quantised_models_are_tiled(kind: str, order: str, checkpoint: bool) -> None:
    from peft import LoraConfig, get_peft_model

    def make(tiles: bool) -> tuple[Any, Any]:
        base: Any = causal_lm("llama", torch.float32, hidden_size=64, intermediate_size=128, head_dim=24)
        for layer in base.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(layer.mlp, name, quantised(getattr(layer.mlp, name), kind))
        base.is_loaded_in_4bit, base.is_loaded_in_8bit = kind == "4-bit", kind == "8-bit"
        report = seqtile.apply(base, tile=5) if tiles and order == "apply first" else None
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(5)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.1, generator=generator)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        report = seqtile.apply(model, tile=5) if tiles and report is None else report
        return model.train(), report

    (untiled, _), (tiled, report) = make(False), make(True)
    assert_same_gradients(gradients(tiled), gradients(untiled))
    assert what_ran(tiled).cut == 2 and what_ran(tiled).tiles > 1
    # In 8 bits the layers quantise what they read too, each row by itself, which no dense weight would.
    assert {block.path for block in report.blocks} == {"fused" if kind == "4-bit" else "generic"}


# ---- accelerate's hooks


def dispatched(model: Any) -> Any:
    """With a hook on every module, as ``device_map`` leaves a model that is on more than one device."""
    from accelerate import dispatch_model

    places = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{number}": "cpu" for number in range(2)}
    return dispatch_model(model, places, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("order", ["apply first", "hooks first"])
def test_models_with_accelerates_hooks_are_tiled(order: str, adapters: bool) -> None:
    from peft import LoraConfig, get_peft_model

    def make(steps: list[Callable[[Any], Any]]) -> Any:
        model: Any = causal_lm("llama", torch.float64)
        for change in steps:
            model = change(model) or model
        if adapters:
            torch.manual_seed(2)
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        return model

    def tile(model: Any) -> None:
        report = seqtile.apply(model, tile=5)
        assert {block.path for block in report.blocks} == {"fused"} and "tiled 2 of 2" in str(report)

    tiled = make([tile, dispatched] if order == "apply first" else [dispatched, tile])
    assert_same_gradients(gradients(tiled), gradients(make([])))
    assert what_ran(tiled).cut == 2 and what_ran(tiled).tiles > 1
    assert seqtile.undo(tiled) == 2


def test_rows_of_models_with_accelerates_hooks_are_tiled() -> None:
    tiled = dispatched(causal_lm("llama", torch.float64))
    report = seqtile.apply(tiled, tile=5, blocks="mlp+norm+projections")
    assert "norms and 8 projections" in report.done["blocks"]
    assert_same_gradients(gradients(tiled), gradients(causal_lm("llama", torch.float64)))


@pytest.mark.parametrize("order", ["apply first", "hooks first"])
def test_weights_that_accelerate_fetches_are_left_and_named(order: str, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate import cpu_offload

    expected: Any = causal_lm("llama", torch.float64)
    model: Any = causal_lm("llama", torch.float64)
    if order == "hooks first":
        report = seqtile.apply(cpu_offload(model, "cpu"), tile=5)
        assert report.tiled == 0 and all("accelerate loads" in left.why for left in report.left)
        assert "model.layers.0.mlp" in str(report) and "accelerate loads" in str(report)
    else:
        seqtile.apply(model, tile=5)
        with torch.no_grad():
            model(input_ids=tokens())
        cpu_offload(model, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens()).logits, expected(input_ids=tokens()).logits)
    assert order == "hooks first" or "accelerate loads" in caplog.text


def test_a_hook_of_ones_own_is_not_looked_through() -> None:
    from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module

    class Doubles(ModelHook):  # type: ignore[misc]
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    for hook in (Doubles(), SequentialHook(ModelHook(), Doubles())):
        model: Any = causal_lm("llama", torch.float64)
        mlp = model.model.layers[0].mlp
        add_hook_to_module(mlp, hook)
        assert own_forward(mlp) is mlp.forward
        expected = gradients(model)
        seqtile.apply(model, tile=5)
        assert_same_gradients(gradients(model), expected)
