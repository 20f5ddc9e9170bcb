"""Liger's kernels on a CPU: run as a program, in Triton's interpreter, whose switch belongs to the whole process.

Prints one line of JSON: for each check its name and what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

import triton_interpreter

HIDDEN, INNER, ROWS = 24, 40, 3


def mlps() -> dict[str, nn.Module]:
    """One module for each entry of the table that is an MLP."""
    from types import SimpleNamespace

    from liger_kernel.transformers import geglu, swiglu

    config = SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=INNER, hidden_act="silu", hidden_activation="silu",
        mlp_multipliers=(1.0, 1.0), mlp_bias=True,
    )  # fmt: skip
    scaled = SimpleNamespace(**{**vars(config), "mlp_multipliers": (0.5, 1.75)})
    made = {kind.__name__: kind(config) for kind in (
        swiglu.LigerSwiGLUMLP, swiglu.LigerSwiGLUMLPForMuseGlimmer, swiglu.LigerQwen3MoeSwiGLUMLP,
        swiglu.LigerHunyuanV1SwiGLUMLP, swiglu.LigerBlockSparseTop2MLP, swiglu.LigerPhi3SwiGLUMLP,
        swiglu.LigerFalconH1SwiGLUMLP, geglu.LigerGEGLUMLP, geglu.LigerGEGLUMLPForGemma4,
    )}  # fmt: skip
    return {**made, "LigerFalconH1SwiGLUMLP scaled": swiglu.LigerFalconH1SwiGLUMLP(scaled)}


def norms() -> dict[str, nn.Module]:
    """Each norm of the table, in each way of casting."""
    from liger_kernel.transformers import layer_norm, rms_norm

    made: dict[str, nn.Module] = {"LigerLayerNorm": layer_norm.LigerLayerNorm(HIDDEN)}
    for cast in ("llama", "gemma", "none"):
        for offset in (0.0, 1.0):
            name = f"LigerRMSNorm {cast} {offset}"
            made[name] = rms_norm.LigerRMSNorm(HIDDEN, offset=offset, casting_mode=cast, in_place=False)
    for kind in (rms_norm.LigerRMSNormForGemma4, rms_norm.LigerRMSNormForMuseGlimmer):
        made[kind.__name__] = kind(HIDDEN)
    return made


def errors(module: nn.Module, dtype: torch.dtype) -> list[float]:
    """Largest error of output and gradients of the real module and of its twin, of those of the twin in fp64."""
    from seqtile.recognise.known_kernels import twin_of

    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    x = torch.randn(2, ROWS, HIDDEN)
    upstream = torch.randn(2, ROWS, HIDDEN)

    def run(kind: Callable[[nn.Module], nn.Module], dtype: torch.dtype, values: Any = None) -> list[Tensor]:
        module.to(dtype)
        leaf = x.to(dtype).detach().requires_grad_()
        made = kind(module)
        output = made(leaf)
        weights = [leaf, *module.parameters()]
        return [output, *torch.autograd.grad(output, weights, upstream.to(dtype))]

    def twin(module: nn.Module) -> nn.Module:
        made = twin_of(module)
        assert made is not None and type(made) is not type(module)
        return made

    module.to(dtype)
    x, upstream = x.to(dtype), upstream.to(dtype)
    real, plain = run(lambda m: m, dtype), run(twin, dtype)
    truth = run(twin, torch.float64)

    def worst(found: list[Tensor]) -> float:
        return max(((one.double() - true).abs().max() / true.abs().max()).item()
                   for one, true in zip(found, truth, strict=True))  # fmt: skip

    return [worst(real), worst(plain)]


def model(kind: str, **config: Any) -> nn.Module:
    from zoo import causal_lm

    return causal_lm(kind, torch.float32, **config)


def patch(made: nn.Module) -> nn.Module:
    """Patch the instances of a model, as ``use_liger_kernel=True`` does; its classes are Liger's afterwards."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(made, fused_linear_cross_entropy=False)
    return made


def with_mlp(name: str) -> nn.Module:
    """A Llama with another MLP in both layers."""
    made: Any = model("llama", hidden_size=HIDDEN, intermediate_size=INNER)
    for layer in made.model.layers:
        layer.mlp = mlps()[name]
        layer.mlp.apply(made._init_weights)
    return made


def with_adapters(made: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(made, LoraConfig(r=4, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(5)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=generator)
    return made


def effects(untiled: nn.Module, tiled: nn.Module) -> dict[str, Any]:
    """What runs of a model with Liger's kernels: paths, tiles, and how far its gradients are from untiled ones."""
    import seqtile
    from seqtile.install.runs import what_ran
    from zoo import tokens

    def step(model: Any) -> dict[str, Tensor]:
        ids = tokens(1, 8)  # the interpreter runs row by row
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    report = seqtile.apply(tiled, tile=3)
    expected, got = step(untiled), step(tiled)
    assert expected.keys() == got.keys()
    worst = max(((got[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)
    ran = what_ran(tiled)
    return {
        "classes": sorted({block.class_name for block in report.blocks}),
        "paths": sorted({block.path for block in report.blocks}), "blocks": report.tiled, "cut": ran.cut,
        "together": sorted({block.together for block in report.blocks}), "worst": worst,
    }  # fmt: skip


def tiled_by_liger() -> list[list[str]]:
    """What is left of a model with Liger's own tiled MLP."""
    from liger_kernel.transformers import LigerTiledSwiGLUMLP

    import seqtile

    made: Any = model("llama")
    made.model.layers[0].mlp = LigerTiledSwiGLUMLP(made.config)
    report = seqtile.apply(made, tile=5)
    return [[block.name for block in report.blocks], [f"{left.name}: {left.why}" for left in report.left]]


def main() -> None:
    found: dict[str, Any] = {"errors": {}}
    for name, module in (mlps() | norms()).items():
        for dtype in (torch.float32, torch.float16):  # NumPy, which the interpreter is made of, has no bfloat16
            found["errors"][f"{name} {str(dtype).removeprefix('torch.')}"] = errors(module, dtype)
    found["tiled by Liger"] = tiled_by_liger()
    cases = {}
    for kind in ("llama", "gemma2", "phi3"):
        bases = [model(kind) for _ in range(4)]  # of the model's own classes
        cases[f"{kind}, instances"] = [patch(base) for base in bases[:2]]
        cases[f"{kind}, instances, adapters"] = [with_adapters(patch(base)) for base in bases[2:]]
    for name in ("LigerQwen3MoeSwiGLUMLP", "LigerFalconH1SwiGLUMLP scaled"):
        cases[name] = [with_mlp(name) for _ in range(2)]
    cases["LigerQwen3MoeSwiGLUMLP, adapters"] = [with_adapters(with_mlp("LigerQwen3MoeSwiGLUMLP")) for _ in range(2)]
    found["effects"] = {name: effects(*pair) for name, pair in cases.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    with triton_interpreter.liger_kernels():
        main()
