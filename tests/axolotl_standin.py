"""What the plugin for axolotl relies on, as axolotl 0.19.0 has it, for tests in an environment without axolotl.

``tests/frameworks/test_axolotl.py`` compares names, parameters, defaults and the order of the hooks with the real one.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel
from torch import nn


class DictDefault(dict):
    """axolotl's configuration: a missing key is None, keys are attributes too."""

    def __missing__(self, key: str) -> None:
        return None

    def __getattr__(self, key: str) -> Any:
        return self[key]


class BasePlugin:
    """Every hook that axolotl calls, with its parameters."""

    def __init__(self): ...
    def register(self, cfg): ...
    def on_config_validation_error(self, cfg): ...
    def get_input_args(self): ...
    def get_training_args_mixin(self): ...
    def get_adapter_capabilities(self): ...
    def get_lora_config_kwargs(self, cfg): ...
    def load_adapter(self, model, cfg, inference=False, config_only=False): ...
    def load_datasets(self, cfg, preprocess=False): ...
    def pre_model_load(self, cfg): ...
    def post_model_build(self, cfg, model): ...
    def pre_lora_load(self, cfg, model): ...
    def post_lora_load(self, cfg, model): ...
    def post_model_load(self, cfg, model): ...
    def get_trainer_cls(self, cfg): ...
    def post_trainer_create(self, cfg, trainer): ...
    def get_training_args(self, cfg): ...
    def get_collator_cls_and_kwargs(self, cfg, is_eval=False): ...
    def create_optimizer(self, cfg, trainer): ...
    def create_lr_scheduler(self, cfg, trainer, optimizer, num_training_steps): ...
    def add_callbacks_pre_trainer(self, cfg, model): ...
    def add_callbacks_post_trainer(self, cfg, trainer): ...
    def on_rollouts_scored(self, cfg, trainer, prompts, completions, rewards, advantages): ...
    def post_train(self, cfg, model): ...
    def post_train_unload(self, cfg): ...


class PluginManager:
    """The plugins of the process, in the order of the configuration."""

    _instance: PluginManager | None = None

    def __init__(self) -> None:
        self.plugins: OrderedDict[str, BasePlugin] = OrderedDict()

    @staticmethod
    def get_instance() -> PluginManager:
        if PluginManager._instance is None:
            PluginManager._instance = PluginManager()
        return PluginManager._instance


class FSDPConfig(BaseModel):
    """The one key of it that the plugin reads."""

    activation_checkpointing: bool | None = None


class AxolotlInputConfig(BaseModel):
    """The keys that the plugin reads, with their defaults."""

    plugins: list[str] | None = None
    tiled_mlp: bool | None = None
    tiled_mlp_num_shards: int | None = None
    tiled_mlp_use_original_mlp: bool | None = True
    sequence_parallel_degree: int | None = None
    context_parallel_size: int | None = None
    deepspeed: str | None = None
    adapter: str | None = None
    gradient_checkpointing: str | bool | None = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    activation_offloading: str | bool | None = False
    selective_checkpointing: dict[str, Any] | bool | None = None
    fsdp_config: FSDPConfig | None = None
    lora_mlp_kernel: bool | None = None
    use_kernels: bool | None = None
    chunked_cross_entropy: bool | None = None
    flash_attn_cross_entropy: bool | None = None
    use_eaft: bool | None = None


class OtherPluginsArgs(BaseModel):
    """Keys that are axolotl's own plugins': Liger's, Cut Cross Entropy's, the kernels'."""

    liger_glu_activation: bool | None = None
    liger_cross_entropy: bool | None = None
    liger_fused_linear_cross_entropy: bool | None = None
    cut_cross_entropy: bool | None = None
    use_scattermoe: bool | None = None
    use_sonicmoe: bool | None = None


class ContextParallelArgs(BaseModel):
    """Of the plugin that axolotl 0.21 has for it."""

    context_parallel: dict[str, Any] | None = None


LOADING = (
    "pre_model_load", "patch_tiled_mlp", "post_model_build", "pre_lora_load", "post_lora_load", "post_model_load"
)  # fmt: skip
"""The order in which axolotl loads a model, its own tiled MLP included."""


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-ins in axolotl's place and import the plugin's module afresh."""
    modules = {name: ModuleType(name) for name in (
        "axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.utils", "axolotl.utils.logging"
    )}  # fmt: skip
    vars(modules["axolotl.integrations.base"]).update(BasePlugin=BasePlugin, PluginManager=PluginManager)
    vars(modules["axolotl.utils.logging"]).update(get_logger=logging.getLogger)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(PluginManager, "_instance", None)
    monkeypatch.delitem(sys.modules, "seqtile.integrations.axolotl", raising=False)
    import importlib

    module = importlib.import_module("seqtile.integrations.axolotl")
    monkeypatch.setitem(sys.modules, "seqtile.integrations.axolotl", module)
    return module


def load_config(raw: dict[str, Any], *plugins: BasePlugin) -> DictDefault:
    """What axolotl does with a YAML: register the plugins, merge their classes with its own, validate, drop None.

    The plugins are those that ``raw`` lists, unless it says otherwise: axolotl 0.21 loads an installed one unlisted.
    """
    import importlib

    manager = PluginManager.get_instance()
    cfg = DictDefault({"plugins": [f"{type(plugin).__module__}.{type(plugin).__name__}" for plugin in plugins], **raw})
    for number, plugin in enumerate(plugins):
        manager.plugins[f"{type(plugin).__module__}.{type(plugin).__name__}{number}"] = plugin
    for plugin in plugins:
        plugin.register(cfg)
    bases: list[type] = [AxolotlInputConfig, OtherPluginsArgs, ContextParallelArgs]
    for plugin in plugins:
        if name := plugin.get_input_args():
            module, _, attribute = name.rpartition(".")
            bases.append(getattr(importlib.import_module(module), attribute))
    merged = type("AxolotlInputConfig", tuple(bases), {})
    return DictDefault(merged(**cfg).model_dump(exclude_none=True))


def load_model(cfg: DictDefault, build: Callable[[], nn.Module], adapt: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """What axolotl's ``ModelLoader.load`` does, in its order; its own patch comes before the model is built."""
    plugins = list(PluginManager.get_instance().plugins.values())
    model: Any = None
    for step in LOADING:
        if step == "patch_tiled_mlp":
            if cfg.tiled_mlp:
                patch_tiled_mlp()
            model = build()
            continue
        if step == "post_lora_load":
            model = adapt(model)
        for plugin in plugins:
            getattr(plugin, step)(*((cfg,) if step == "pre_model_load" else (cfg, model)))
    return model


def patch_tiled_mlp() -> None:
    """axolotl's own, which marks the class it patches."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    LlamaMLP._tiled_mlp_dist_impl = None
