"""What a configuration of axolotl may ask of seqtile: the checks of the plugin and of ``seqtile doctor --axolotl``.

Nothing here needs axolotl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model, model_validator

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, OF_BLOCKS, TilingOptions, file_type, unknown_keys

_BLOCK_KEYS = ("blocks", *OF_BLOCKS)

# What else computes the MLP, the loss, or decides what activation checkpoints keep.
_MLP_KERNELS = ("liger_glu_activation", "lora_mlp_kernel", "use_kernels", "use_scattermoe", "use_sonicmoe")
_LOSSES = ("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy",
           "flash_attn_cross_entropy", "use_eaft")  # fmt: skip
_CHECKPOINTS = ("activation_offloading", "selective_checkpointing")


_Keys = create_model(
    "Keys",
    __config__=ConfigDict(extra="forbid", strict=True),
    **{name: (file_type(name, choices=False) | None, None) for name in DEFAULTS},  # type: ignore[call-overload]
)


class SeqtileSettings(_Keys):  # type: ignore[valid-type,misc]
    """The arguments of :func:`seqtile.apply`, with its defaults; an unknown key is an error."""

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, data: Any) -> Any:
        """Name the keys that there are."""
        if isinstance(data, Mapping) and (said := unknown_keys(data)):
            raise UserError(f"seqtile: {said}")
        return data


def check_settings(cfg: Mapping[str, Any]) -> None:
    """Refuse before anything is loaded what :func:`seqtile.apply` would refuse, and what excludes it.

    Args:
        cfg: axolotl's configuration with ``seqtile:`` as keys and values.

    Raises:
        UserError: in one sentence.
    """
    from seqtile.models.loss_and_checkpoints import Rest

    check_parallel_sizes(cfg)
    try:
        SeqtileSettings.model_validate(cfg.get("seqtile") or {})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("seqtile", *problem["loc"][:1])))
        raise UserError(f"{key}: got {problem['input']!r}; {problem['msg']}") from None
    given = apply_arguments(cfg)
    Rest(TilingOptions(**given)).check_options()
    check_conflicts(cfg, given)


def check_parallel_sizes(cfg: Mapping[str, Any]) -> None:
    """Both names of the number of ranks that share a row are axolotl's; refuse two values for them.

    Raises:
        UserError: names both.
    """
    old, new = cfg.get("sequence_parallel_degree"), cfg.get("context_parallel_size")
    if old is not None and new is not None and old != new:
        raise UserError(
            f"sequence_parallel_degree: {old} and context_parallel_size: {new} are two names of one number; "
            "give context_parallel_size alone"
        )


def apply_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of :func:`seqtile.apply` that a configuration asks for; empty: nothing to do.

    Args:
        cfg: axolotl's configuration, or anything with its keys.

    Raises:
        UserError: two keys that contradict each other.
    """
    given = {key: value for key, value in (cfg.get("seqtile") or {}).items() if value is not None}
    if cfg.get("tiled_mlp") is False:
        if idle := [f"seqtile.{key}" for key in given if key in _BLOCK_KEYS]:
            raise UserError(
                f"tiled_mlp: false tiles no MLP, so {', '.join(idle)} would be ignored; leave one of them out"
            )
        return {**given, "blocks": "none"} if given else {}
    if cfg.get("tiled_mlp") and given.get("blocks") == "none":
        raise UserError("tiled_mlp: true and seqtile.blocks: none contradict each other; leave one of them out")
    shards = cfg.get("tiled_mlp_num_shards")
    if shards is not None:
        if "tile" in given:
            raise UserError(
                f"tiled_mlp_num_shards: {shards} and seqtile.tile: {given['tile']} both say how long a tile is; "
                "give one of them"
            )
        if shards < 1:
            raise UserError(f"tiled_mlp_num_shards: {shards}: expected a number of tiles from 1")
        given["tile"] = f"shards:{shards}"
    if cfg.get("tiled_mlp_use_original_mlp") is False:
        if given.get("path", "fused") != "fused":
            raise UserError(
                f"tiled_mlp_use_original_mlp: false asks for seqtile's own operator, seqtile.path: {given['path']} for "
                "another; leave one of them out"
            )
        given["path"] = "fused"
    return given


def check_conflicts(cfg: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse settings of axolotl that do the same job as what ``given`` asks of :func:`seqtile.apply`.

    Raises:
        UserError: there is one; it names both keys.
    """
    if given.get("path") == "fused":
        for key in _on(cfg, _MLP_KERNELS):
            itself = " (axolotl switches it on with LoRA unless it is given)" if key == "lora_mlp_kernel" else ""
            raise UserError(
                f"tiled_mlp_use_original_mlp: false replaces the MLP that {key}{itself} replaces too; "
                f"set {key}: false, or leave tiled_mlp_use_original_mlp (seqtile.path) out"
            )
    if given.get("loss"):
        for key in _on(cfg, _LOSSES):
            raise UserError(
                f"seqtile.loss: tiled and {key} both compute the loss; set {key}: false or drop seqtile.loss"
            )
    if given.get("checkpoint") or given.get("offload"):
        ours = "seqtile.offload" if given.get("offload") else "seqtile.checkpoint"
        others = _on(cfg, _CHECKPOINTS)
        if isinstance(cfg.get("gradient_checkpointing"), str):
            others.append(f"gradient_checkpointing: {cfg['gradient_checkpointing']}")
        if (cfg.get("fsdp_config") or {}).get("activation_checkpointing"):
            others.append("fsdp_config.activation_checkpointing")
        for key in others:
            raise UserError(f"{ours} and {key} both decide what activation checkpoints keep; leave one of them out")


def _on(cfg: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if cfg.get(key)]
