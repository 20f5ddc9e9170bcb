"""What `_compat` relies on inside transformers and what trains with it, one behaviour each."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from seqtile import _compat
from zoo import causal_lm


def no_hook(*_: Any) -> None:
    return None


def enable_checkpoints(model: Any) -> None:
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


# ---- transformers ----


def test_models_hand_a_checkpoint_function_to_their_layers() -> None:
    model = causal_lm("llama")
    enable_checkpoints(model)
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing and callable(layer.__dict__.get(_compat.CHECKPOINT_FUNCTION))


def test_a_layers_checkpoint_is_in_its_forward_or_in_its_call() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, x: Any) -> Any:
            return x

    layer, calls = Layer().train(), []

    def checkpointed(function: Any, *args: Any) -> Any:
        calls.append(function)
        return function(*args)

    setattr(layer, _compat.CHECKPOINT_FUNCTION, checkpointed)
    for layer.gradient_checkpointing in (True, False):
        type(layer).forward(layer, 1)
        assert len(calls) == _compat.checkpoints_in_forward(layer)


def test_weights_that_transformers_keeps_in_fp32() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Model(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ["layers.*.q_proj"]
        _keep_in_fp32_modules = ["lm_head"]

    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=10)
    model = Model(LlamaConfig(**sizes))
    names, strict = [*model.state_dict()], {"model.layers.0.self_attn.q_proj.weight"}
    assert _compat.kept_in_fp32(model, names, torch.bfloat16) == strict
    assert _compat.kept_in_fp32(model, names, torch.float16) == strict | {"lm_head.weight"}


def test_a_hook_that_captures_outputs_is_known_and_asked() -> None:
    if find_spec("transformers.utils.output_capturing") is None:
        pytest.skip("this transformers captures outputs without hooks")
    capturing = import_module("transformers.utils.output_capturing")
    layer = nn.Linear(1, 1)
    capturing.install_output_capuring_hook(layer, "router_logits", 0)
    hook = next(iter(layer._forward_hooks.values()))
    assert _compat.captures_nothing(hook) and not _compat.captures_nothing(no_hook)
    logits = torch.ones(1, 1)
    requested: dict[str, list[torch.Tensor]] = {"router_logits": []}
    before = capturing._active_collector.set(requested)
    assert not _compat.captures_nothing(hook) and _compat.captured_by(hook) == "router_logits"
    with _compat.router_logits_apart() as apart:
        layer(logits)
    assert len(apart) == 1 and not requested["router_logits"]
    _compat.capture_router_logits(apart)
    assert requested["router_logits"] == apart
    capturing._active_collector.reset(before)
    before = capturing._active_collector.set({"attentions": []})
    assert _compat.captures_nothing(hook) and not _compat.captures_router_logits()
    capturing._active_collector.reset(before)


def test_attributes_of_a_model() -> None:
    model = causal_lm("llama")
    model.enable_input_require_grads()
    assert any(name in model.__dict__ for name in _compat.INPUT_HOOKS)
    former = model.loss_function
    model.__dict__[_compat.LOSS_FUNCTION] = no_hook
    assert model.loss_function is no_hook
    del model.__dict__[_compat.LOSS_FUNCTION]
    assert model.loss_function is former
    assert _compat.attention_kind(model) == "sdpa"
    _compat.compute_attention_plainly(model.config)
    assert _compat.attention_kind(model) == _compat.attention_kind(model.config) == "eager"


def test_which_attention_a_model_has() -> None:
    from transformers import BertForMaskedLM, BloomConfig, BloomForCausalLM, MPNetForMaskedLM

    with torch.device("meta"):
        bloom = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=8))
    for model, expected in ((causal_lm("llama"), True), (bloom, False)):
        assert _compat.supports_sdpa(model) is expected
        assert (_compat.attention_kind(model) == "sdpa") is expected
    assert _compat.attention_is_exchangeable(BertForMaskedLM)
    assert not _compat.attention_is_exchangeable(MPNetForMaskedLM)


# ---- accelerate and PEFT ----


def test_accelerate_keeps_the_forward_that_it_puts_a_hook_around() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module: Any = nn.Identity()
    module.forward = no_hook
    hooks.add_hook_to_module(module, hooks.ModelHook())
    assert module.__dict__.get(_compat.HOOKED_FORWARD) is no_hook and module.forward is not no_hook
    assert type(module.__dict__.get(_compat.HOOKING)) is hooks.ModelHook


def test_accelerate_keeps_the_forward_that_it_puts_autocast_around() -> None:
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(True)
    model: Any = nn.Linear(2, 2)
    forward = model.forward = no_hook
    prepared = import_module("accelerate").Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    state._reset_state(True)
    assert prepared.__dict__[_compat.PREPARED_FORWARD] is forward and prepared.forward is not forward


def test_what_peft_refuses() -> None:
    pytest.importorskip("peft")
    config = SimpleNamespace(peft_type="LORA")
    assert _compat.refuses_adapter(config, "mamba2", "out_proj")
    assert not _compat.refuses_adapter(config, "mamba2", "in_proj")
    assert not _compat.refuses_adapter(config, "llama", "out_proj")


def test_names_that_peft_turns_into_adapters_on_experts() -> None:
    peft = pytest.importorskip("peft", "0.20")  # 0.19 itself fails at "all-linear" for such a model
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, moe_intermediate_size=24, num_experts=3, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, num_key_value_heads=1, head_dim=20, vocab_size=72)
    )
    for targets in ("all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]):
        config = peft.LoraConfig(r=2, target_modules=targets)
        _compat.drop_expert_targets(config, model)
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        with_adapters = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
        assert "q_proj" in with_adapters and all(name.endswith("_proj") for name in with_adapters)


def test_peft_fails_on_packed_experts() -> None:
    """If it does not, experts in 4 bits can have adapters: see ``seqtile.install.adapters.lora_config``."""
    peft = pytest.importorskip("peft", "0.20")
    packing = pytest.importorskip("bitsandbytes.nn.parametrize")

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.up[0].T

    model = nn.Sequential(Experts())
    packing.replace_parameter_4bit(model[0], "up")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.up"]))
    with pytest.warns(UserWarning, match="Could not find any LoRA parametrization"):
        adapted(torch.randn(5, 32))
    with pytest.raises(RuntimeError, match="floating point"):
        adapted(torch.randn(5, 32))


# ---- TRL ----


def test_trls_fused_head_is_known_by_its_argument_and_says_its_settings() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    model = causal_lm("llama")
    original = model.forward
    assert _compat.trl_head_settings(original) is None
    outputs = ("log_probs", "entropy")
    utils.add_fused_lm_head(model, temperature=0.5, cast_lm_head_to_fp32=True, outputs=outputs)
    settings = _compat.trl_head_settings(model.forward)
    assert settings is not None and settings["original_forward"] == original and settings["temperature"] == 0.5
    assert settings["cast_lm_head_to_fp32"] is True and tuple(settings["outputs"]) == outputs

    original_forward, temperature = original, 0.5

    def moved(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return original_forward, temperature, outputs

    with pytest.raises(KeyError, match="cast_lm_head_to_fp32"):
        _compat.trl_head_settings(moved)


# ---- DeepSpeed ----


def test_marks_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    weight = nn.Parameter(torch.zeros(4))
    assert not _compat.is_in_zero12(weight)
    import_module("deepspeed.utils.mixed_precision_linkage")._init_lp_to_hp_mapping([weight], 0, 4, None)
    assert _compat.is_in_zero12(weight)
    module = nn.Identity()
    module.__dict__[_compat.LEAF] = True
    is_leaf = import_module("deepspeed.utils.z3_leaf_module").z3_leaf_module
    assert is_leaf(module) and not is_leaf(nn.Identity())


def test_the_attention_function_of_ulysses_refers_to_its_object() -> None:
    ulysses_sp = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    register = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers
    function = next(code for code in register.__code__.co_consts if getattr(code, "co_freevars", ()))
    assert "uattn" in function.co_freevars and "uattn" in register.__code__.co_cellvars
