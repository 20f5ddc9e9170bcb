"""PEFT adapters, added before or after tiling: same gradients, everything trains, dropout masks are the recompute's."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING

import seqtile
from seqtile.install.adapters import lora_config, without_adapters
from seqtile.install.runs import what_ran
from watching import rows_of
from zoo import HIDDEN, assert_same_gradients, causal_lm, gradients, tokens

TARGETS = {
    "llama": ["gate_proj", "up_proj", "down_proj", "q_proj"],
    "gemma2": ["gate_proj", "down_proj"],
    "phi3": ["gate_up_proj", "down_proj"],
    "gpt2": ["c_fc", "c_proj"],
    "opt": ["fc1", "fc2"],
}


def _config(architecture: str, **settings: object) -> LoraConfig:
    fan = {"fan_in_fan_out": True} if architecture == "gpt2" else {}
    return LoraConfig(r=4, target_modules=TARGETS[architecture], **{"lora_dropout": 0.0, **fan, **settings})


def _warm(model: nn.Module) -> nn.Module:
    """The same values in every copy; with the second factor at its initial zero the first one's gradient is zero."""
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1
    return model


@pytest.mark.parametrize("order", ["seqtile first", "peft first"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_lora_gradients_are_the_untiled_ones(architecture: str, order: str) -> None:
    base, ids = causal_lm(architecture, torch.float64), tokens()
    untiled = _warm(get_peft_model(copy.deepcopy(base), _config(architecture)))
    _, expected = gradients(untiled, ids)
    if order == "seqtile first":
        report = seqtile.apply(base, tile=5)
        model = _warm(get_peft_model(base, _config(architecture)))
    else:
        model = _warm(get_peft_model(base, _config(architecture)))
        report = seqtile.apply(model, tile=5)
    assert report.tiled == 2
    _, got = gradients(model, ids)
    trained = [name for name in got if "lora" in name]
    assert trained and all(got[name] is not None and got[name].abs().max() > 0 for name in trained)
    assert_same_gradients(got, expected)
    assert seqtile.undo(model) == 2


def test_an_opt_model_really_tiles_with_adapters_added_later() -> None:
    """The adapters replace the layer's children: the tile must run the new ones, and still be a tile."""
    model = causal_lm("opt")
    seqtile.apply(model, tile=5)
    model = get_peft_model(model, _config("opt"))
    (factor,) = [p for name, p in model.named_parameters() if name.endswith("layers.0.fc1.lora_A.default.weight")]
    with torch.no_grad(), rows_of(factor) as rows:
        model(tokens())
    assert rows == [5, 5, 4, 4, 4, 4]


def test_lora_dropout_draws_the_same_mask_in_the_recompute() -> None:
    """Finite differences along a random direction, with the seed reset, against the analytic gradient."""
    model = causal_lm("llama", torch.float64)
    seqtile.apply(model, tile=5)
    model = _warm(get_peft_model(model, _config("llama", lora_dropout=0.5)))
    mlp = model.base_model.model.model.layers[0].mlp  # alone: the model's norms compute in float32
    x = torch.randn(2, 13, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def loss() -> torch.Tensor:
        torch.manual_seed(11)
        return mlp(x).pow(2).mean()

    loss().backward()
    weights = [p for name, p in mlp.named_parameters() if "lora" in name]
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    analytic = sum((p.grad * d).sum() for p, d in zip(weights, directions, strict=True))
    step = 1e-6
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            for p, d in zip(weights, directions, strict=True):
                p.add_(sign * step * d)
            values.append(loss())
            for p, d in zip(weights, directions, strict=True):
                p.sub_(sign * step * d)
    numeric = (values[0] - values[1]) / (2 * step)
    # central differences in float64: the error is about step**2 plus rounding / step, near 1e-9
    torch.testing.assert_close(analytic, numeric, rtol=1e-6, atol=1e-8)


def test_a_frozen_base_keeps_no_gradient_and_merging_still_works() -> None:
    model, ids = causal_lm("llama"), tokens()
    seqtile.apply(model, tile=5)
    model = _warm(get_peft_model(model, _config("llama")))
    _, got = gradients(model, ids)
    assert all((value is None) == ("lora" not in name) for name, value in got.items())
    with torch.no_grad():
        expected = model(ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)  # merged weights round again


@pytest.mark.parametrize("order", ["seqtile first", "peft first"])
def test_adapters_on_the_experts_weights(order: str, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT sets such weights for the length of a call; the tiles take them as they are then."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=[], target_parameters=targets)
    base, ids = causal_lm("mixtral"), tokens()
    untiled = _warm(get_peft_model(copy.deepcopy(base), config))
    _, expected = gradients(untiled, ids)
    if order == "seqtile first":
        seqtile.apply(base, tile=5)
    model = _warm(get_peft_model(base, config))
    if order == "peft first":
        assert seqtile.apply(model, tile=5).tiled == 2
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    assert what_ran(model).cut == 2 and "untiled" not in caplog.text


ROUTED = {
    "llama4_text": (dict(num_local_experts=4, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=48), "router"),
    "phimoe": (dict(num_local_experts=4, num_experts_per_tok=2), "router"),
    "deepseek_v4": (
        dict(num_key_value_heads=1, head_dim=16, q_lora_rank=16, o_groups=2, o_lora_rank=8, n_routed_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=24), "o_a_proj",
    ),
    "falcon": ({}, None),  # a class of its own, which is linear
}  # fmt: skip


@pytest.mark.parametrize("architecture", ROUTED)
def test_no_adapter_on_a_linear_layer_that_is_not_linear(architecture: str) -> None:
    """A router that inherits from nn.Linear returns a tuple, to which LoRA cannot add."""
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {architecture}")
    settings, left_out = ROUTED[architecture]
    model = causal_lm(architecture, **settings)
    config = lora_config(model, r=4, alpha=None, dropout=0.0, target_modules="all-linear")
    assert config.exclude_modules == ([left_out] if left_out else None)
    assert (left_out or "None") in str(without_adapters(model, config))
    adapted = get_peft_model(model, config)
    _, got = gradients(adapted, tokens())
    assert any(value is not None and "lora" in name for name, value in got.items())


def test_a_module_with_a_destructor_keeps_what_it_shares_with_its_copies() -> None:
    """PEFT's OSF projects gradients in hooks on its weights, and takes them off when a layer goes: our copies did."""
    from peft import OSFConfig

    def model() -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(causal_lm("llama"), OSFConfig(target_modules=["gate_proj", "up_proj", "down_proj"]))

    def hooks(adapted: nn.Module) -> int:
        return sum(len(weight._backward_hooks or ()) for weight in adapted.parameters())

    untiled, tiled, ids = model(), model(), tokens()
    before = hooks(tiled)
    seqtile.apply(tiled, tile=5)
    gc.collect()
    assert before > 0 and hooks(tiled) == before
    _, expected = gradients(untiled, ids)
    _, got = gradients(tiled, ids)
    assert_same_gradients(got, expected)
    assert hooks(tiled) == before
