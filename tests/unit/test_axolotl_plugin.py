"""The plugin's contract with axolotl, against stand-ins; the real one runs in ``make test-frameworks``."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import axolotl_standin as standin
import seqtile
from refusals import refused
from seqtile import rules
from seqtile.integrations import axolotl_checks

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=10)  # fmt: skip


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield standin.install(monkeypatch)
    if hasattr(LlamaMLP, "_tiled_mlp_dist_impl"):
        del LlamaMLP._tiled_mlp_dist_impl


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def with_lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"]))


def load(raw: dict[str, Any], *plugins: Any, adapt: Any = lambda model: model) -> tuple[Any, nn.Module]:
    cfg = standin.load_config(raw, *plugins)
    return cfg, standin.load_model(cfg, build, adapt)


def test_tiled_mlp_means_ours(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "axolotl.seqtile"):
        cfg, model = load({"tiled_mlp": True, "tiled_mlp_num_shards": 4}, ours.SeqtilePlugin())
    assert not hasattr(LlamaMLP, "_tiled_mlp_dist_impl"), "axolotl's own patch ran too"
    assert cfg.tiled_mlp is True  # put back: the configuration that is saved says what ran
    assert "tiled 2 of 2 MLPs (LlamaMLP), 4 tiles, fused" in caplog.text
    assert seqtile.undo(model) == 2


def test_a_length_chooses_the_settings(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "axolotl.seqtile"):
        _, model = load({"seqtile": {"max_length": 64}}, ours.SeqtilePlugin(), adapt=with_lora)
    assert "loss of LlamaForCausalLM tiled" in caplog.text and "64 tokens per sequence on this host" in caplog.text
    assert model(input_ids=(ids := torch.zeros(1, 64, dtype=torch.long)), labels=ids).logits is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_of_a_length_is_read(ours: Any, stage: int, tmp_path: Path) -> None:
    (file := tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    config = {
        "deepspeed": str(file),
        "optimizer": "adamw_8bit",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    asked = axolotl_checks.fit_question(config)
    assert asked == {"engine": f"zero{stage}" if stage > 1 else None, "optimizer": "adamw_8bit", "batch_size": 2,
                     "autocast": False, "gradient_accumulation": 4}  # fmt: skip


def test_without_the_plugin_axolotls_own_patch_runs(ours: Any) -> None:
    load({"tiled_mlp": True})
    assert hasattr(LlamaMLP, "_tiled_mlp_dist_impl")


def test_adapters_are_tiled(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "axolotl.seqtile"):
        _, model = load({"seqtile": {"tile": 8}}, ours.SeqtilePlugin(), adapt=with_lora)
    assert "tiled 2 of 2 MLPs (LlamaMLP), 8 tokens per tile, fused" in caplog.text
    assert seqtile.undo(model) == 2


def test_a_second_model_is_tiled_too(ours: Any) -> None:
    """The reference model of DPO is loaded with the same configuration."""
    cfg, _ = load({"tiled_mlp": True}, ours.SeqtilePlugin())
    assert seqtile.undo(standin.load_model(cfg, build, lambda model: model)) == 2
    assert not hasattr(LlamaMLP, "_tiled_mlp_dist_impl")


def test_the_trainers_logs_say_what_was_tiled(ours: Any) -> None:
    plugin = ours.SeqtilePlugin()
    cfg, model = load({"tiled_mlp": True}, plugin)
    standin.load_model(cfg, build, lambda model: model)  # a reference model
    (callback,) = plugin.add_callbacks_pre_trainer(cfg, model)
    assert callback.report._model() is model
    assert plugin.add_callbacks_pre_trainer(cfg, build()) == []


def test_tiled_mlp_false_leaves_the_blocks_alone(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, model = load({"tiled_mlp": False}, ours.SeqtilePlugin())
    assert seqtile.undo(model) == 0
    with caplog.at_level(logging.INFO, "axolotl.seqtile"):
        _, model = load({"tiled_mlp": False, "seqtile": {"loss": "tiled"}}, ours.SeqtilePlugin())
    assert "loss of LlamaForCausalLM tiled" in caplog.text
    assert not any("forward" in part.__dict__ for part in model.modules() if isinstance(part, LlamaMLP))


@pytest.mark.parametrize(
    ("cfg", "given"),
    [
        ({}, {}),
        ({"tiled_mlp": True}, {}),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 4}, {"tile": "shards:4"}),
        ({"tiled_mlp_use_original_mlp": False}, {"path": "fused"}),
        ({"seqtile": {"tile": 4096, "keep": 0.5, "offload": "1GiB"}},
         {"tile": 4096, "keep": 0.5, "offload": "1GiB"}),
        ({"tiled_mlp": False, "tiled_mlp_num_shards": 4, "seqtile": {"offload": True}},
         {"offload": True, "blocks": "none"}),
        ({"seqtile": {"only": ["*.layers.0.*"], "loss": "tiled", "loss_tile": 512, "checkpoint": "attention-saved"}},
         {"only": ["*.layers.0.*"], "loss": "tiled", "loss_tile": 512, "checkpoint": "attention-saved"}),
    ],
)  # fmt: skip
def test_keys_become_arguments(ours: Any, cfg: dict[str, Any], given: dict[str, Any]) -> None:
    assert ours.apply_arguments(standin.load_config(cfg, ours.SeqtilePlugin())) == given


REFUSED: list[tuple[Any, ...]] = [
    ({"tiled_mlp_use_original_mlp": False, "liger_glu_activation": True},
     "path.fused-with-other-mlp", "liger_glu_activation"),
    ({"tiled_mlp_use_original_mlp": False, "lora_mlp_kernel": True}, "path.fused-with-other-mlp", "lora_mlp_kernel"),
    ({"tiled_mlp_use_original_mlp": False, "use_scattermoe": True}, "path.fused-with-other-mlp", "use_scattermoe"),
    ({"tiled_mlp_use_original_mlp": False, "seqtile": {"path": "generic"}},
     "axolotl.original-mlp-contradicts-path", "generic"),
    ({"tiled_mlp": True, "tiled_mlp_num_shards": 4, "seqtile": {"tile": 512}}, "tile.given-twice"),
    ({"tiled_mlp": True, "tiled_mlp_num_shards": 0}, "option.malformed", "shards:0"),
    ({"tiled_mlp": True, "seqtile": {"blocks": "none", "loss": "tiled"}}, "axolotl.tiled-mlp-contradicts-blocks"),
    ({"tiled_mlp": False, "seqtile": {"tile": 512}}, "blocks.none-with-options", "so tile would"),
    ({"seqtile": {"tyle": 512}}, "option.unknown", "'tyle'", "tile?"),
    ({"seqtile": {"tile": "half"}}, "option.malformed", "half"),
    ({"seqtile": {"keep": 2.0}}, "option.malformed", "keep"),
    ({"seqtile": {"heads": 0}}, "option.not-a-count", "heads"),
    ({"seqtile": {"loss_tile": 512}}, "loss.options-without-loss", "loss_tile"),
    ({"seqtile": {"loss": "tiled"}, "cut_cross_entropy": True}, "loss.with-other-loss"),
    ({"seqtile": {"loss": "tiled"}, "chunked_cross_entropy": True}, "loss.with-other-loss"),
    ({"seqtile": {"offload": True}, "activation_offloading": "legacy"},
     "checkpoint.with-other-checkpoints", "activation_offloading"),
    ({"seqtile": {"offload": True}, "gradient_checkpointing": "offload"},
     "checkpoint.with-other-checkpoints", "gradient_checkpointing: offload"),
    ({"seqtile": {"checkpoint": "layer"}, "fsdp_config": {"activation_checkpointing": True}},
     "checkpoint.with-other-checkpoints", "fsdp_config"),
    ({"seqtile": {"max_length": 64}, "cut_cross_entropy": True}, "loss.with-other-loss"),
    ({"seqtile": {"max_length": 64}, "context_parallel_size": 8},
     "axolotl.max-length-unplanned-step", "context_parallel_size"),
    ({"selective_checkpointing": {"save_matmul_min_k": 64}}, "tile.with-saved-products", "save_matmul_min_k: 64"),
    ({"selective_checkpointing": {"save": ["attention", "aten::mm"]}}, "tile.with-saved-products", "save: aten::mm"),
    ({"selective_checkpointing": {"save_modules": ["o_proj", "mlp.down_proj"]}},
     "tile.with-saved-products", "mlp.down_proj"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[code for _, code, *_ in REFUSED])
def test_refused(ours: Any, case: tuple[Any, ...]) -> None:
    cfg, code, *values = case
    with pytest.raises(ValidationError) as raised:
        standin.load_config(cfg, ours.SeqtilePlugin())
    with refused(code, *values):
        raise raised.value.errors()[0]["ctx"]["error"]


@pytest.mark.parametrize("key", ["liger_glu_activation", "lora_mlp_kernel"])
def test_another_kernels_mlp_is_tiled_as_it_is(ours: Any, key: str) -> None:
    cfg = standin.load_config({"tiled_mlp": True, key: True}, ours.SeqtilePlugin())
    assert "path" not in ours.apply_arguments(cfg)


def test_a_lora_kernel_that_cannot_be_traced_is_named(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    """axolotl's default with LoRA: a kernel of CUDA in the place of each MLP's forward. It runs untiled."""

    def with_kernel(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, LlamaMLP):
                # Fake tensors have no memory, as a kernel of Triton would find.
                kernel: Any = lambda x, of: of.down_proj(of.up_proj(x)) * float(x.data_ptr() > 0)  # noqa: E731
                scope = {"__name__": "axolotl.kernels.lora", "float": float}
                module.forward = FunctionType(kernel.__code__, scope, "apply_lora_mlp", (module,))
        return model

    for kernel in (False, True):
        caplog.clear()
        _, model = load({"tiled_mlp": True, "lora_mlp_kernel": kernel}, ours.SeqtilePlugin(), adapt=with_kernel)
        assert "no MLP is tiled under lora_mlp_kernel" in caplog.text or not kernel
        assert "set lora_mlp_kernel: false" not in caplog.text or kernel
        assert model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_parallel_degree", 8), ("context_parallel_size", 8), ("context_parallel", {"size": 8}),
     ("selective_checkpointing", {"save": ["attention"], "save_modules": ["self_attn.o_proj"]})],
)  # fmt: skip
def test_what_stays_axolotls(ours: Any, key: str, value: Any) -> None:
    assert standin.load_config({"tiled_mlp": True, key: value}, ours.SeqtilePlugin())[key] == value


def test_selective_checkpoints_may_keep_products_of_untiled_mlps(ours: Any) -> None:
    selective = {"selective_checkpointing": {"save_matmul_min_k": 64}}
    standin.load_config({"tiled_mlp": False, "seqtile": {"loss": "tiled"}, **selective}, ours.SeqtilePlugin())


def test_axolotls_own_patch_that_ran_all_the_same_is_refused(ours: Any) -> None:
    standin.patch_tiled_mlp()
    with refused("axolotl.tiles-already", "LlamaMLP"):
        load({"tiled_mlp": True}, ours.SeqtilePlugin())


@pytest.mark.parametrize("first", [True, False])
def test_the_model_is_tiled_after_every_plugin_that_changes_it(ours: Any, first: bool) -> None:
    """axolotl 0.21 puts plugins that it finds by entry point before the listed ones."""
    tiled_before_change = []

    class Changing(standin.BasePlugin):
        def post_model_load(self, cfg: Any, model: Any) -> None:
            tiled_before_change.append("forward" in model.model.layers[0].mlp.__dict__)

    plugin = ours.SeqtilePlugin()
    plugins = [plugin, Changing()] if first else [Changing(), plugin]
    cfg, model = load({"tiled_mlp": True}, *plugins, standin.BasePlugin())
    reference = standin.load_model(cfg, build, lambda model: model)
    assert len(plugin.add_callbacks_pre_trainer(cfg, model)) == 1
    assert tiled_before_change == [False, False]
    assert seqtile.undo(model) == seqtile.undo(reference) == 2


def test_unlisted_and_without_its_keys_the_plugin_does_nothing(ours: Any) -> None:
    """axolotl 0.21 loads it in every run, by its entry point."""
    others = {"gradient_checkpointing": True, "sequence_parallel_degree": 2, "context_parallel_size": 4,
              "liger_glu_activation": True, "cut_cross_entropy": True, "plugins": None}  # fmt: skip
    plugin = ours.SeqtilePlugin()
    cfg, model = load(others, plugin)
    assert cfg.gradient_checkpointing_kwargs is None
    assert plugin.add_callbacks_pre_trainer(cfg, model) == [] and seqtile.undo(model) == 0
    for key in ({"tiled_mlp": True}, {"seqtile": {}}):
        standin.PluginManager.get_instance().plugins.clear()
        assert seqtile.undo(load({"plugins": None, **key}, ours.SeqtilePlugin())[1]) == 2


def test_checkpoints_are_not_reentrant_unless_asked_for(ours: Any) -> None:
    """axolotl's default runs each block once more."""
    kwargs = {"use_reentrant": True}
    for raw, want in [
        ({"gradient_checkpointing": True}, {"use_reentrant": False}),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}, kwargs),
        ({"gradient_checkpointing": True, "activation_offloading": "legacy"}, None),
        ({"gradient_checkpointing": True, "deepspeed": "zero3.json"}, {"use_reentrant": False}),
        ({}, None),
    ]:
        assert standin.load_config(raw, ours.SeqtilePlugin()).gradient_checkpointing_kwargs == want


def test_an_older_deepspeed_keeps_reentrant_checkpoints_with_adapters(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ZeRO-3 takes frozen weights away during a non-reentrant recompute, upon which PyTorch raises."""
    recomputed = {"gradient_checkpointing": True, "deepspeed": "zero3.json"}
    for version, more, want in [
        ("0.19.3", {"adapter": "lora"}, None), ("0.19.4", {"adapter": "lora"}, {"use_reentrant": False}),
        ("0.19.3", {}, {"use_reentrant": False}),
    ]:  # fmt: skip
        monkeypatch.setattr(rules, "package_version", lambda _, version=version: version)
        cfg = standin.load_config({**recomputed, **more}, ours.SeqtilePlugin())
        assert cfg.gradient_checkpointing_kwargs == want


def test_settings_are_the_arguments_of_apply(ours: Any) -> None:
    arguments = [p.name for p in inspect.signature(seqtile.apply).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(ours.SeqtileSettings.model_fields) == ["max_length", *arguments]


def test_hooks_have_axolotls_names_and_parameters(ours: Any) -> None:
    own = {name: value for name, value in vars(ours.SeqtilePlugin).items() if inspect.isfunction(value)}
    hooks = {name: value for name, value in own.items() if not name.startswith("_")}
    assert {"register", "get_input_args", "pre_model_load", "post_model_load"} <= set(hooks)
    for name, hook in hooks.items():
        assert list(inspect.signature(hook).parameters) == list(
            inspect.signature(getattr(standin.BasePlugin, name)).parameters
        )
