"""Experts in 4 bits (bitsandbytes' parametrization of 3-D weights): tiled against untiled, judged in float64."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize

import seqtile
from seqtile.recognise.packed_experts import packable_experts, packed_experts

bitsandbytes: Any = pytest.importorskip(
    "bitsandbytes", "0.50", reason="bitsandbytes is not installed, or cannot train packed experts"
)
pytest.importorskip("peft", reason="PEFT is not installed")

TOKENS, VOCABULARY = 37, 104

# No two widths are equal, and no expert's rows fill whole blocks of 64.
COMMON = dict(
    hidden_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=20,
    vocab_size=VOCABULARY, max_position_embeddings=128, num_experts_per_tok=2,
)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=112, moe_intermediate_size=48, num_experts=6
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**COMMON, intermediate_size=48, num_local_experts=6),
    "Mixtral": lambda: transformers.MixtralConfig(**COMMON, intermediate_size=48, num_local_experts=6),
    "Qwen3.5-MoE": lambda: transformers.Qwen3_5MoeTextConfig(
        **COMMON, moe_intermediate_size=48, shared_expert_intermediate_size=52, num_experts=6,
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=12, linear_value_head_dim=28,
    ),
}  # fmt: skip


def adapted(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model with packed experts and adapters on its attention, and the same in float64 with what they unpack to."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype)
    packed = copy.deepcopy(plain)
    for name in packable_experts(plain):
        prefix, _, leaf = name.rpartition(".")
        replace_parameter_4bit(packed.get_submodule(prefix), leaf, compress_statistics=True)
        unpacked = getattr(packed.get_submodule(prefix), leaf)
        plain.get_submodule(prefix).register_parameter(leaf, nn.Parameter(unpacked))
    assert len(packed_experts(packed)) == 4
    plain.set_experts_implementation("eager")  # PyTorch's grouped products have no float64
    models = []
    for model in (packed, plain.double()):
        torch.manual_seed(1)
        targets = ["q_proj", "v_proj", "in_proj_qkv"]
        adapters = LoraConfig(r=3, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        models.append(get_peft_model(model.requires_grad_(False), adapters, autocast_adapter_dtype=False).train())
    weights = {name: weight for name, weight in models[0].named_parameters() if weight.requires_grad}
    for name, weight in models[1].named_parameters():
        if weight.requires_grad:
            weight.data.copy_(weights[name])
    return models[0], models[1]


def gradients(model: Any) -> dict[str, Tensor]:
    """Of a step whose input needs a gradient too."""
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: w.grad for n, w in model.named_parameters() if w.grad is not None}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "checkpoint"),
    [*itertools.product(FAMILIES, [None, "layer"]), ("Qwen3-MoE", "attention-saved")],
)
def test_tiles_add_no_error(family: str, checkpoint: Any, dtype: torch.dtype) -> None:
    model, reference = adapted(family, dtype)
    expected, untiled = gradients(reference), gradients(model)
    report = seqtile.apply(model, tile=2, checkpoint=checkpoint)
    assert report.tiled == 2 + (family == "Qwen3.5-MoE") * 2, report
    tiled = gradients(model)
    assert tiled.keys() == untiled.keys() == expected.keys() and len(tiled) > 6
    for name, value in expected.items():
        error, allowed = (tiled[name].double() - value).norm(), (untiled[name].double() - value).norm()
        assert error <= 2 * allowed + 1e-5 * value.norm(), name


@pytest.mark.parametrize("checkpoint", [None, "layer"])
def test_each_pass_unpacks_a_layer_once_and_keeps_none(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = adapted("Qwen3-MoE", torch.float32)
    report = seqtile.apply(model, tile=2, checkpoint=checkpoint)
    dense: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    dequantize = bitsandbytes.functional.dequantize_4bit

    def recorded(*arguments: Any) -> Tensor:
        weight: Tensor = dequantize(*arguments)
        dense.append(weakref.ref(weight))
        alive.append(still_alive())
        return weight

    def still_alive() -> int:
        return sum(weight() is not None for weight in dense)

    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", recorded)
    ids = torch.randint(VOCABULARY, (2, TOKENS))
    loss = model(input_ids=ids, labels=ids).loss
    assert len(dense) == 4 and not still_alive()  # two weights in each of two layers
    loss.backward()
    assert len(dense) == 8 and not still_alive() and max(alive) == 2
    assert not parametrize._cache and not parametrize._cache_enabled  # what bitsandbytes itself keeps
    seqtile.undo(model)
    assert report.tiled == 2 and len(packed_experts(model)) == 4


def test_a_packed_weight_that_changes_before_the_backward_is_refused() -> None:
    model, _ = adapted("Mixtral", torch.float32)
    seqtile.apply(model, tile=2)
    ids = torch.randint(VOCABULARY, (2, TOKENS))
    loss = model(input_ids=ids, labels=ids).loss
    prefix, _, leaf = packed_experts(model)[0].rpartition(".")
    model.get_submodule(prefix).parametrizations[leaf].original.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()
