"""What `_compat` relies on inside transformers and what trains with it, one behaviour each."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from seqtile import _compat
from zoo import causal_lm


def no_hook(*_: Any) -> None:
    return None


def text_of(package: str, *path: str) -> str:
    """A module's source, without running it or its package; skipped where the package is not installed."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0], *path).read_text(encoding="utf-8")


def enable_checkpoints(model: Any) -> None:
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


# ---- transformers ----


def test_models_hand_a_checkpoint_function_to_their_layers() -> None:
    model = causal_lm("llama")
    enable_checkpoints(model)
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing and callable(layer.__dict__.get(_compat.CHECKPOINT_FUNCTION))
    parameters = inspect.signature(getattr(model, _compat.SET_CHECKPOINTING)).parameters
    assert {"enable", "gradient_checkpointing_func"} <= parameters.keys()


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


def test_a_hook_that_captures_outputs_is_known_and_asked() -> None:
    if find_spec("transformers.utils.output_capturing") is None:
        pytest.skip("this transformers captures outputs without hooks")
    capturing = import_module("transformers.utils.output_capturing")
    layer = nn.Linear(1, 1)
    capturing.install_output_capuring_hook(layer, "router_logits", 0)
    hook = next(iter(layer._forward_hooks.values()))
    assert _compat.captures_nothing(hook) and not _compat.captures_nothing(no_hook)
    before = capturing._active_collector.set({"router_logits": []})
    assert not _compat.captures_nothing(hook)
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


def test_recurrent_gemmas_scan_is_a_method() -> None:
    module = import_module("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    parameters = inspect.signature(getattr(module.RecurrentGemmaRglru, _compat.RG_LRU_SCAN)).parameters
    assert {"hidden_states", "recurrent_gate", "reset"} <= parameters.keys()


# ---- accelerate and PEFT ----


def test_accelerate_keeps_the_forward_that_it_puts_a_hook_around() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module: Any = nn.Identity()
    module.forward = no_hook
    hooks.add_hook_to_module(module, hooks.ModelHook())
    assert module.__dict__.get(_compat.HOOKED_FORWARD) is no_hook and module.forward is not no_hook
    assert type(module.__dict__.get(_compat.HOOKING)) is hooks.ModelHook
    accelerator = import_module("accelerate").Accelerator
    assert _compat.PREPARED_FORWARD in inspect.getsource(accelerator.prepare_model)


def test_what_peft_does_per_sequence_and_refuses() -> None:
    lora = pytest.importorskip("peft.tuners.lora.model")
    hooks = ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook")
    for hook, argument in zip(hooks, _compat.PER_SEQUENCE, strict=True):
        assert argument in inspect.signature(getattr(lora, hook)).parameters
    assert "partial(" in inspect.getsource(lora.LoraModel._enable_peft_forward_hooks)
    config = SimpleNamespace(peft_type="LORA")
    assert _compat.refuses_adapter(config, "mamba2", "out_proj")
    assert not _compat.refuses_adapter(config, "mamba2", "in_proj")
    assert not _compat.refuses_adapter(config, "llama", "out_proj")


# ---- TRL ----


@pytest.mark.parametrize("name", sorted(_compat.OVERRIDDEN | set(_compat.GRADIENT_NORM_METHODS)))
def test_a_method_that_our_trainer_overrides_is_called(name: str) -> None:
    trl, transformers = pytest.importorskip("trl"), import_module("transformers")
    assert callable(getattr(trl.SFTTrainer, name, None))
    methods = [*vars(transformers.Trainer).values(), *vars(trl.SFTTrainer).values()]
    callers = [method for method in methods if isinstance(method, FunctionType) and method.__name__ != name]
    assert any(f"self.{name}(" in inspect.getsource(method) for method in callers)
    if name == "_save_checkpoint":
        assert list(inspect.signature(trl.SFTTrainer._save_checkpoint).parameters) == ["self", "model", "trial"]


def test_the_sums_of_trls_trainer() -> None:
    trainer = pytest.importorskip("trl").SFTTrainer
    source = inspect.getsource(trainer.__init__)
    assert "self._metrics" in source and "self._total_train_tokens" in source
    assert "_metrics" in inspect.getsource(trainer.compute_loss)


def test_rows_are_prepared_by_trls_method() -> None:
    prepare = pytest.importorskip("trl").SFTTrainer._prepare_dataset
    expected = ["self", "dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"]
    assert list(inspect.signature(prepare).parameters) == expected
    source = inspect.getsource(prepare)
    assert all(f"self.{name}" in source for name in ("_tokenizer", "chat_template", "completion_only_loss"))


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


def test_losses_of_trls_experimental_trainers() -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer

    assert "take_along_dim" in inspect.getsource(getattr(OnlineDPOTrainer, _compat.ONLINE_DPO_FORWARD))
    expected = ["student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction", "num_items_in_batch"]
    assert list(inspect.signature(GKDTrainer.generalized_jsd_loss).parameters) == expected
    assert "generalized_jsd_loss(" in inspect.getsource(GKDTrainer.compute_loss)


# ---- DeepSpeed, axolotl, ms-swift and Unsloth ----


def test_marks_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    weight = nn.Parameter(torch.zeros(4))
    assert not _compat.is_in_zero12(weight)
    import_module("deepspeed.utils.mixed_precision_linkage")._init_lp_to_hp_mapping([weight], 0, 4, None)
    assert _compat.is_in_zero12(weight)
    offload = inspect.getsource(import_module("deepspeed.runtime.zero.parameter_offload"))
    assert all(f"{mark} = " in offload or f'"{mark}"' in offload for mark in _compat.ZERO3_MARKS)
    module = nn.Identity()
    module.__dict__[_compat.LEAF] = True
    is_leaf = import_module("deepspeed.utils.z3_leaf_module").z3_leaf_module
    assert is_leaf(module) and not is_leaf(nn.Identity())
    sharding = text_of("deepspeed", "runtime", "zero", "partition_parameters.py")
    assert "param.ds_shape = " in sharding and "param.ds_id = " in sharding


def test_marks_of_frameworks_own_tiles() -> None:
    assert "_tiled_mlp_dist_impl" in text_of("axolotl", "monkeypatch", "tiled_mlp", "patch.py")


def test_unsloth_binds_its_tiled_forward_to_the_instance() -> None:
    assert "mlp_module.forward = MethodType(" in text_of("unsloth_zoo", "tiled_mlp.py")


def test_ms_swift_runs_plugins_by_a_method_and_keeps_torchs_checkpoint() -> None:
    assert "_old_checkpoint" in text_of("swift", "trainers", "mixin.py")
    assert f"def {_compat.SWIFT_IMPORTS_PLUGINS}(self" in text_of("swift", "arguments", "base_args", "base_args.py")
