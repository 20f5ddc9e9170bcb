"""Checks of axolotl's configuration, for the plugin; nothing here needs axolotl."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model, model_validator

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, TilingOptions, file_type, unknown_keys
from seqtile.rules import Combination, check_combination

# Other settings that compute the MLP or the loss, or decide what activation checkpoints keep.
_MLP_KERNELS = ("liger_glu_activation", "lora_mlp_kernel", "use_kernels", "use_scattermoe", "use_sonicmoe")
_LOSSES = ("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy",
           "flash_attn_cross_entropy", "use_eaft")  # fmt: skip
_CHECKPOINTS = ("activation_offloading", "selective_checkpointing")
_MLP_NAMES = r"(^|[._*])(mlp|ffn|feed_forward|experts|gate_proj|up_proj|gate_up_proj|down_proj|fc1|fc2)$"

AXOLOTL_PLUGIN = "seqtile.integrations.axolotl.SeqtilePlugin"
"""The plugin's name in axolotl's ``plugins:``."""


def asks_for_seqtile(cfg: Mapping[str, Any]) -> bool:
    """Whether a configuration lists the plugin or has a key of it: axolotl 0.21 and newer loads it in every run."""
    listed = AXOLOTL_PLUGIN in (name.replace(":", ".") for name in cfg.get("plugins") or [])
    return listed or cfg.get("seqtile") is not None or bool(cfg.get("tiled_mlp"))


_SettingKeys = create_model(
    "SettingKeys",
    __config__=ConfigDict(extra="forbid", strict=True),
    max_length=(int | None, None),
    **{name: (file_type(name, choices=False) | None, None) for name in DEFAULTS},  # type: ignore[call-overload]
)


class SeqtileSettings(_SettingKeys):  # type: ignore[valid-type,misc]
    """The arguments of :func:`seqtile.apply`, and ``max_length`` of :func:`seqtile.fit`; an unknown key is an error."""

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, data: Any) -> Any:
        """Name the keys that there are."""
        if isinstance(data, Mapping) and (sentence := unknown_keys(key for key in data if key != "max_length")):
            raise UserError("option.unknown", f"seqtile: {sentence}, max_length")
        return data


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Refuse before anything is loaded what :func:`seqtile.apply` would refuse, and what excludes it.

    Args:
        cfg: axolotl's configuration with ``seqtile:`` as keys and values.

    Raises:
        UserError: in one sentence.
    """
    try:
        SeqtileSettings.model_validate(cfg.get("seqtile") or {})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("seqtile", *problem["loc"][:1])))
        raise UserError("axolotl.invalid-value", f"{key}: got {problem['input']!r}; {problem['msg']}") from None
    checkpointers = [key for key in _CHECKPOINTS if cfg.get(key)]
    if isinstance(cfg.get("gradient_checkpointing"), str):
        checkpointers.append(f"gradient_checkpointing: {cfg['gradient_checkpointing']}")
    if (cfg.get("fsdp_config") or {}).get("activation_checkpointing"):
        checkpointers.append("fsdp_config.activation_checkpointing")
    arguments = apply_arguments(cfg)
    if arguments.pop("max_length", None) is not None:
        arguments = {"loss": "tiled", "checkpoint": "layer", **arguments}  # what may be chosen
        fit_question(cfg)
    check_combination(Combination(
        TilingOptions(**arguments),
        mlp_kernels=tuple(key for key in _MLP_KERNELS if cfg.get(key)),
        losses=tuple(key for key in _LOSSES if cfg.get(key)),
        checkpointers=tuple(checkpointers),
        product_savers=tuple(_product_savers(cfg)),
    ))  # fmt: skip


def fit_question(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`seqtile.fit` for axolotl's run.

    Raises:
        UserError: a run that no plan describes.
    """
    for key in ("rl", "context_parallel_size", "sequence_parallel_degree", "context_parallel"):
        if (value := cfg.get(key)) not in (None, 1):
            raise UserError(
                "axolotl.max-length-unplanned-step",
                f"seqtile.max_length plans a supervised step on unpacked sequences, got {key}: {value}; use "
                "seqtile's settings instead, such as loss: tiled",
            )
    engine = "fsdp2" if cfg.get("fsdp_config") or cfg.get("fsdp") else None
    if deepspeed := cfg.get("deepspeed"):
        values = deepspeed if isinstance(deepspeed, Mapping) else json.loads(Path(deepspeed).read_text("utf-8"))
        stage = values.get("zero_optimization", {}).get("stage", 0)
        engine = f"zero{stage}" if stage in (2, 3) else None
    return {
        "engine": engine, "optimizer": str(getattr(cfg.get("optimizer"), "value", cfg.get("optimizer")) or "adamw"),
        "batch_size": cfg.get("micro_batch_size") or 1, "autocast": bool(cfg.get("bf16") or cfg.get("fp16")),
        "gradient_accumulation": cfg.get("gradient_accumulation_steps") or 1,
    }  # fmt: skip


def _product_savers(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Keys of axolotl's selective checkpoints that keep linear layers' products wherever they are in the layer."""
    selective = cfg.get("selective_checkpointing")
    if not isinstance(selective, Mapping):
        return
    if selective.get("save_matmul_min_k"):
        yield f"selective_checkpointing.save_matmul_min_k: {selective['save_matmul_min_k']}"
    for operator in selective.get("save") or ():
        if re.search(r"mm|linear", str(operator)):
            yield f"selective_checkpointing.save: {operator}"
    for pattern in selective.get("save_modules") or ():
        if re.search(_MLP_NAMES, str(pattern)):
            yield f"selective_checkpointing.save_modules: {pattern}"


def apply_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`seqtile.apply`, or with ``max_length`` :func:`seqtile.fit`'s; empty: nothing to do.

    Args:
        cfg: axolotl's configuration, or anything with its keys.

    Raises:
        UserError: two keys that contradict each other.
    """
    kwargs = {key: value for key, value in (cfg.get("seqtile") or {}).items() if value is not None}
    tiled, blocks = cfg.get("tiled_mlp"), kwargs.get("blocks")
    if tiled is not None and blocks is not None and tiled == (blocks == "none"):
        raise UserError(
            "axolotl.tiled-mlp-contradicts-blocks",
            f"tiled_mlp: {tiled} and seqtile.blocks: {blocks} contradict each other; drop one",
        )
    if tiled is False:
        return {**kwargs, "blocks": "none"} if kwargs else {}
    if (shards := cfg.get("tiled_mlp_num_shards")) is not None:
        if "tile" in kwargs:
            raise UserError(
                "tile.given-twice",
                f"tiled_mlp_num_shards: {shards} and seqtile.tile: {kwargs['tile']} both set the tile size; keep one",
            )
        kwargs["tile"] = f"shards:{shards}"
    if cfg.get("tiled_mlp_use_original_mlp") is False and kwargs.setdefault("path", "fused") != "fused":
        raise UserError(
            "axolotl.original-mlp-contradicts-path",
            f"tiled_mlp_use_original_mlp: false selects path: fused, but seqtile.path is {kwargs['path']}; drop one",
        )
    return kwargs
