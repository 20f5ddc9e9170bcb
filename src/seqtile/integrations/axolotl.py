"""axolotl's plugin: ``plugins: [seqtile.integrations.axolotl.SeqtilePlugin]`` in its YAML.

axolotl 0.21 and newer finds it by its entry point and loads it in every run: without ``seqtile:``, ``tiled_mlp: true``
or its line under ``plugins:`` it does nothing.

It reads axolotl's own keys (``tiled_mlp``, ``tiled_mlp_num_shards``, ``tiled_mlp_use_original_mlp``) and ours, the
arguments of :func:`seqtile.apply`, under ``seqtile:``. axolotl patches the MLP's class when it finds ``tiled_mlp`` set
right after the plugins' ``pre_model_load`` and before it builds the model. So the key is taken out of the
configuration there and put back once the model is loaded: nothing of axolotl's is replaced.
"""

from __future__ import annotations

import weakref
from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager  # type: ignore[import-not-found]
from axolotl.utils.logging import get_logger  # type: ignore[import-not-found]
from pydantic import BaseModel, model_validator

from seqtile._compat import is_tiled_by_axolotl
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.integrations.axolotl_checks import (
    SeqtileSettings,
    apply_arguments,
    asks_for_seqtile,
    check_settings,
    fit_question,
)
from seqtile.rules import adapters_need_reentrant

# axolotl shows INFO of loggers below its own name only; before the processes know each other, it shows every rank's.
LOG = get_logger(first_rank_logger("axolotl.seqtile").name)


class SeqtileArgs(BaseModel):
    """The plugin's keys in axolotl's configuration; axolotl merges it with its own classes."""

    seqtile: SeqtileSettings | None = None

    @model_validator(mode="after")
    def check_seqtile(self) -> Any:
        """Refuse before anything is loaded what :func:`seqtile.apply` would refuse, and what excludes it."""
        cfg = {key: value.model_dump() if isinstance(value, BaseModel) else value for key, value in vars(self).items()}
        if asks_for_seqtile(cfg):
            check_settings(cfg)
        return self


class SeqtilePlugin(BasePlugin):  # type: ignore[misc]
    """Tiles the model after every adapter and plugin, before the engine wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: Any = None
        self._untiled: list[weakref.ref[Any]] = []  # loaded models that another plugin may still change
        self._tiled: list[tuple[weakref.ref[Any], Any]] = []  # the model that is trained, and DPO's reference

    def register(self, cfg: dict[str, Any]) -> None:
        """Write our defaults into the configuration as given, where axolotl's other plugins look for them."""
        if not asks_for_seqtile(cfg):
            return
        if cfg.get("tiled_mlp_use_original_mlp") is None:
            cfg["tiled_mlp_use_original_mlp"] = True
        recompute = cfg.get("gradient_checkpointing") is True and not cfg.get("activation_offloading")
        # Under ZeRO-3 of an older DeepSpeed a non-reentrant recompute with adapters raises CheckpointError.
        may_need_reentrant = cfg.get("adapter") and cfg.get("deepspeed") and adapters_need_reentrant("zero3")
        if recompute and cfg.get("gradient_checkpointing_kwargs") is None and not may_need_reentrant:
            # axolotl's default is reentrant, from 0.21 on under ZeRO-3 alone: each block runs once more.
            cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}

    def get_input_args(self) -> str:
        """The class that admits ``seqtile:`` to the configuration."""
        return f"{__name__}.SeqtileArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Take ``tiled_mlp`` out of axolotl's sight before it patches the MLP's class."""
        self._taken, cfg["tiled_mlp"] = cfg.get("tiled_mlp"), None

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Tile the model, adapters included; logs the report through axolotl's logger.

        Where another plugin changes the loaded model after this one, it is tiled in :meth:`add_callbacks_pre_trainer`.

        Raises:
            UserError: axolotl tiles the MLPs too, or :func:`seqtile.apply` refuses.
        """
        cfg["tiled_mlp"] = self._taken
        if not asks_for_seqtile(cfg):
            return
        if self._is_last():
            self._tile(cfg, model)
        else:
            self._untiled.append(weakref.ref(model))

    def _tile(self, cfg: Any, model: Any) -> None:
        import seqtile

        kwargs = apply_arguments(cfg)
        if not kwargs and self._taken is False:
            LOG.info("seqtile: tiled_mlp: false, nothing was changed")
            return
        if tiled_class := next((type(m).__name__ for m in model.modules() if is_tiled_by_axolotl(m)), ""):
            raise UserError(
                "axolotl.tiles-already",
                f"axolotl's own tiled MLP already runs {tiled_class} and this plugin could not disable it; drop "
                "tiled_mlp from the configuration and set seqtile.tile",
            )
        if "max_length" in kwargs:
            report = seqtile.fit(model, **fit_question(cfg), **kwargs)
        else:
            report = seqtile.apply(model, **kwargs)
        LOG.info("seqtile: %s", report)
        for left in report.left:
            LOG.info("seqtile left %s (%s) untiled: %s", left.name, left.class_name, left.why)
        if not report.blocks and report.left and cfg.get("lora_mlp_kernel"):
            LOG.warning(
                "seqtile: no MLP is tiled under lora_mlp_kernel, which axolotl enables by default with LoRA; set "
                "lora_mlp_kernel: false"
            )
        self._tiled.append((weakref.ref(model), report))

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Add the callback that logs what was tiled and where memory peaks."""
        from seqtile.integrations.callback import TilingCallback

        loaded_models, self._untiled = [loaded() for loaded in self._untiled], []
        for loaded_model in loaded_models:
            if loaded_model is not None:
                self._tile(cfg, loaded_model)
        return [TilingCallback(report) for tiled, report in self._tiled if tiled() is model]

    def _is_last(self) -> bool:
        """Whether no plugin after this one changes the loaded model, which could take the tiles off unseen."""
        plugins = list(PluginManager.get_instance().plugins.values())
        later_plugins = plugins[plugins.index(self) + 1 :] if self in plugins else []
        return all(type(plugin).post_model_load is BasePlugin.post_model_load for plugin in later_plugins)
