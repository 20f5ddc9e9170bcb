"""Models with layers and kernels of other libraries: gradients as exact in tiles as they are without seqtile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import seqtile
import triton_interpreter
from numerics._errors import assert_as_exact_in_bf16
from zoo import causal_lm, gradients, tokens

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]  # the libraries' own

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 24}
SETTINGS = {
    "tiled": {"tile": 8},
    "everything": {"tile": 8, "blocks": "mlp+norm+projections", "heads": 1, "loss": "tiled", "loss_tile": 16,
                   "checkpoint": "attention-saved", "offload": True},
}  # fmt: skip


def llama(**config: Any) -> nn.Module:
    return causal_lm("llama", torch.bfloat16, use_cache=False, attn_implementation="sdpa", **{**SIZES, **config})


def with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.enable_input_require_grads()
    return model


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(module).to(module.weight.device))
    return model


def bitsandbytes(bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def quantised(linear: nn.Linear) -> nn.Module:
        weight, sizes = linear.weight.data.cpu(), (linear.in_features, linear.out_features)
        if bits == 4:
            layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="cpu")
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer)
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, device="cpu")
            layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return layer

    model = replace_linears(llama(), quantised)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return with_adapters(model)


def torchao_int8() -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama()
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(), lambda m, name: type(m) is nn.Linear and not name.endswith("lm_head")
    )
    return with_adapters(model)


def liger() -> nn.Module:
    transformers = pytest.importorskip("liger_kernel.transformers", reason="liger-kernel is not installed")
    model = llama()
    if triton_interpreter.is_on():  # which computes nan in bf16
        model = model.float()
    transformers.apply_liger_kernel_to_llama(model=model, rope=False)  # rope is replaced in the module of all models
    return model


PEERS = {"PEFT": lambda: with_adapters(llama()), "bitsandbytes, 4 bit": lambda: bitsandbytes(4),
         "bitsandbytes, 8 bit": lambda: bitsandbytes(8), "torchao, int8": torchao_int8, "Liger": liger,
         "Liger and PEFT": lambda: with_adapters(liger())}  # fmt: skip


def dense(model: nn.Module) -> nn.Module:
    """``model`` with ordinary layers of the same weights for quantised ones."""
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")  # an adapter's layer hands the weight inside it on as its own
        if type(weight).__name__ == "Params4bit":
            import bitsandbytes

            numbers = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif type(weight).__name__ == "Int8Params":
            scales, rows = (weight.SCB, weight.CB) if weight.SCB is not None else (module.state.SCB, module.state.CB)
            numbers = rows.float() * scales[:, None] / 127
        elif "torchao" in type(weight).__module__:
            numbers = weight.dequantize()
        else:
            continue
        parent, _, child = name.rpartition(".")
        linear = nn.Linear(numbers.shape[1], numbers.shape[0], bias=False, device=numbers.device, dtype=torch.float32)
        linear.weight = nn.Parameter(numbers.float(), requires_grad=False)
        setattr(model.get_submodule(parent), child, linear)
    return model


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("peer", PEERS)
def test_as_exact_as_without_seqtile(peer: str, settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if peer.startswith("Liger") and triton_interpreter.is_on():
        request.getfixturevalue("liger_on_cpu")
    torch.manual_seed(0)
    model = PEERS[peer]()
    if "checkpoint" in settings:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = tokens(2, 33)
    truth_model = dense(copy.deepcopy(model)).float()
    loss, expected = gradients(model, batch)
    seqtile.apply(model, **settings)
    tiled_loss, tiled = gradients(model, batch)
    true_loss, truth = gradients(truth_model, batch)
    assert_as_exact_in_bf16({"loss": tiled_loss, **tiled}, {"loss": loss, **expected}, {"loss": true_loss, **truth})
