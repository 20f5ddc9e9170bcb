"""Adapters (PEFT) on a model: where they are left out, because nothing would train them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from seqtile._compat import refuses_adapter
from seqtile.models.discover.decoder_layers import decoder_layers

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
_MAMBA_2 = "mamba2"
"""The model type by which PEFT is asked about every Mamba-2 mixer, whatever model it is in."""


def lora_config(
    model: nn.Module, *, r: int, alpha: float | None, dropout: float, target_modules: str | Sequence[str]
) -> LoraConfig:
    """PEFT's configuration of low-rank adapters for ``model``.

    With ``"all-linear"`` the linear layers that PEFT refuses are left out, by its own list: the fused kernel of Mamba-2
    takes the weight of ``out_proj`` itself and passes the adapter by. PEFT looks at five model types; here its list
    holds for every Mamba-2 mixer. Layers that are given by name are PEFT's to refuse.

    Args:
        model: without adapters; its weights may be on the meta device.
        r: rank.
        alpha: scale; None is twice the rank.
        dropout: of the adapters' inputs.
        target_modules: which layers get one, as PEFT takes them.
    """
    from peft import LoraConfig

    config = LoraConfig(
        r=r,
        lora_alpha=alpha or 2 * r,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,  # an encoder has no task
    )
    if target_modules == ALL_LINEAR:
        config.exclude_modules = _refused(model, config) or None
    return config


def without_adapters(config: LoraConfig | None) -> str | None:
    """One sentence on the layers that :func:`lora_config` left out, None where every one got its adapters."""
    if config is None or not config.exclude_modules:
        return None
    names = ", ".join(sorted(config.exclude_modules))
    return f"no adapters on {names}: PEFT refuses them, because Mamba's fused kernel would pass them by"


def _refused(model: nn.Module, config: Any) -> list[str]:
    """Ends of the names of the linear layers that PEFT refuses."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    names = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    found = {name for name in names if refuses_adapter(config, model_type, name)}
    for layer in decoder_layers(model):
        for mixer in layer.mixers:
            if mixer.kind != "Mamba-2":
                continue
            for name, part in model.get_submodule(f"{layer.name}.{mixer.name}").named_children():
                if isinstance(part, nn.Linear) and name not in found and refuses_adapter(config, _MAMBA_2, name):
                    found.add(f"{mixer.name.rpartition('.')[2]}.{name}")
    return sorted(found)
