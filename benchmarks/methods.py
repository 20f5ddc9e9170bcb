"""How each method runs a block, and a whole model: what replaces ``forward`` on one instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seqtile
from cell import OURS
from seqtile._errors import UserError
from seqtile.install.apply import apply_options
from seqtile.models.layer_fields import first_layers
from seqtile.options import TilingOptions, changed
from seqtile.planner.fake_step import build_bare
from seqtile.planner.step_config import Setup
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, parse_tile

PACKAGES = {"liger": "liger_kernel", "deepspeed": "deepspeed", "deepspeed-compute": "deepspeed"}
"""The package that a method needs, where it is somebody else's."""


_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


LIGER = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
"""Liger's kernels for a Llama, as ``apply_liger_kernel_to_llama`` names them."""

UseLiger = Callable[[Any, tuple[str, ...]], None]
"""Puts some of :data:`LIGER` on a causal language model."""


@dataclass(frozen=True)
class StepMethod:
    """How a whole training step runs.

    Attributes:
        liger: of :data:`LIGER`.
        mlp: how MLPs run, one of :data:`cell.METHODS`.
        options: of ours, or None.
        fits: ours, with what :func:`seqtile.fit` chooses.
        tiles_loss: head and loss run in DeepSpeed's ``TiledFusedLogitsLoss``.
    """

    liger: tuple[str, ...] = ()
    mlp: str = "untiled"
    options: TilingOptions | None = None
    fits: bool = False
    tiles_loss: bool = False


_OURS = StepMethod(options=TilingOptions(loss="tiled"))
STEP_METHODS = {
    "transformers": StepMethod(),
    "liger": StepMethod(LIGER),
    "liger-tiled": StepMethod(LIGER, "liger"),
    "liger-nightly": StepMethod(LIGER, "tile-checkpoint"),
    "tile-checkpoint": StepMethod(("rope", "rms_norm", "fused_linear_cross_entropy"), "tile-checkpoint"),
    "deepspeed": StepMethod(("rope", "rms_norm", "fused_linear_cross_entropy"), "deepspeed"),
    "deepspeed-compute": StepMethod(("rope", "rms_norm", "fused_linear_cross_entropy"), "deepspeed-compute"),
    "alst": StepMethod(mlp="deepspeed", tiles_loss=True),
    "seqtile": _OURS,
}
"""``liger`` is what people run; Liger's nightly makes a checkpoint per tile. Beside their tiled MLP, all have Liger's
rope, norms and fused loss. ``alst`` is DeepSpeed alone, ``TiledMLP`` and ``TiledFusedLogitsLoss``."""

STEP_SETTINGS: dict[str, Callable[[StepMethod], StepMethod]] = {
    "attention-saved": lambda method: changed(method, checkpoint="attention-saved"),
    "offload": lambda method: changed(method, offload=True),
    "weights": lambda method: changed(method, offload="weights"),
    "offload-weights": lambda method: changed(method, offload="checkpoints+weights"),
    "heads": lambda method: changed(method, heads=1, blocks="mlp+norm+projections"),
    "chunk": lambda method: changed(method, chunk=8192),
    "segment4": lambda method: changed(method, segment=4),
    "liger": lambda method: replace(method, liger=("rope", "rms_norm")),
    "fit": lambda method: replace(method, fits=True),
    "liger-loss": lambda method: changed(method, liger=(*method.liger, "fused_linear_cross_entropy"), loss=None),
}
"""What can follow ``seqtile`` in a method's name, each behind a plus: ``seqtile+attention-saved+liger``."""


def step_method(name: str) -> StepMethod:
    """The method that ``name`` stands for.

    Raises:
        UserError: none.
    """
    base, *settings = name.split("+")
    if base not in STEP_METHODS or (settings and base != "seqtile") or not set(settings) <= STEP_SETTINGS.keys():
        raise UserError(
            "benchmark.unknown-choice",
            f"got the method {name!r}, expected one of {', '.join(STEP_METHODS)}, the last with any of "
            f"+{', +'.join(STEP_SETTINGS)}",
        )
    method = STEP_METHODS[base]
    for setting in settings:
        method = STEP_SETTINGS[setting](method)
    return method


class NotInstalledError(RuntimeError):
    """A peer's package is missing."""


def build_model(config: Any, layers: int, lora: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The first layers of ``config``'s model with activation checkpoints and random weights, untiled.

    Args:
        config: Transformers' configuration.
        layers: decoder layers.
        lora: rank of PEFT's adapters on every linear layer, with small random factors so that no gradient is zero; 0
            trains all weights.
        device: ``torch.device`` type.
        dtype: of weights and adapters.
    """
    model = build_bare(first_layers(config, layers), Setup(dtype=dtype, device_type=device), device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.device(device):
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = torch.empty_like(weight, dtype=dtype).normal_(std=0.1 * weight.shape[1] ** -0.5)
    return model


def install_step(model: Any, method: StepMethod, tokens: int, use_liger: UseLiger) -> str:
    """Make a model of :func:`build_model` run by ``method``; returns what runs it, in words.

    Raises:
        NotInstalledError: the peer's package is missing.
    """
    for package in filter(None, ["liger" if method.liger else "", method.mlp]):
        if package in PACKAGES and find_spec(PACKAGES[package]) is None:
            raise NotInstalledError(f"not installed: {PACKAGES[package]}")
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if method.liger:
        use_liger(causal, method.liger)
    if method.fits:
        return str(seqtile.fit(model, max_length=tokens))
    if method.options is not None:
        return str(apply_options(model, method.options))
    if method.tiles_loss:
        causal.__dict__["forward"] = _deepspeed_loss(causal, math.ceil(tokens / causal.config.hidden_size))
    mlps = {layer.name: model.get_submodule(f"{layer.name}.mlp") for layer in decoder_layers(model)}
    # What Liger and DeepSpeed run by default.
    return install(model, mlps, method.mlp, None, math.ceil(tokens / causal.config.hidden_size))


def use_liger_kernels(model: Any, parts: tuple[str, ...]) -> None:
    """Liger's own installer for a Llama, which also changes a module of Transformers for this process."""
    monkey_patch = import_module("liger_kernel.transformers.monkey_patch")
    monkey_patch.apply_liger_kernel_to_llama(**{part: part in parts for part in LIGER}, model=model)


def install(model: nn.Module, blocks: dict[str, nn.Module], method: str, ours: TilingOptions | None, count: int) -> str:
    """Make ``blocks`` of ``model`` run by ``method``.

    Args:
        model: holds the blocks.
        blocks: MLP modules by qualified name.
        method: one of :data:`cell.METHODS`.
        ours: the options of ours, where the method is ours.
        count: number of tiles for the others.

    Returns:
        What runs the blocks, in words.

    Raises:
        NotInstalledError: the peer's package is missing.
    """
    if method == "untiled":
        return "untiled"
    if ours is not None:
        report = apply_options(model, replace(ours, only=tuple(blocks), trust=("*",)))
        together = sorted({", ".join(block.together) for block in report.blocks if len(block.together) > 1})
        return str(report) + "".join(f"; in one tile: {names}" for names in together)
    if (package := PACKAGES.get(method)) and find_spec(package) is None:
        raise NotInstalledError(f"not installed: {package}")
    build = {
        "tile-checkpoint": _tile_checkpoint, "liger": _liger, "deepspeed": _deepspeed,
        "deepspeed-compute": _deepspeed_compute,
    }[method]  # fmt: skip
    for block in blocks.values():
        block.__dict__["forward"] = build(block, count)
    return f"{method}, {count:,} tiles"


def uninstall(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Take off what :func:`install` put on."""
    seqtile.undo(model)
    for block in blocks:
        block.__dict__.pop("forward", None)


def tile_count(method: str, tile: int | str, tokens: int, shape: BlockShape) -> int:
    """Tiles that a method runs: by the rule; where that leaves the batch whole, the others run DeepSpeed's default.

    That default is ``ceil(tokens / hidden)``; Liger has the same.
    """
    if method == "untiled":
        return 0
    if method == "generic":
        shape = replace(shape, live_widths=LIVE_WIDTHS)
    count = len(parse_tile(tile).tile_sizes(tokens, shape))
    return count if method in OURS else count or math.ceil(tokens / shape.hidden)


def block_shape(mlp: nn.Module, hidden: int, intermediate: int, itemsize: int, device_type: str) -> BlockShape:
    """What the tile rule needs to know of a block that the fused operator runs."""
    trained = [weight for weight in mlp.parameters() if weight.requires_grad]
    return BlockShape(
        hidden, intermediate, itemsize, sum(weight.numel() for weight in trained),
        min((weight.element_size() for weight in trained), default=4), device_type, FUSED_WIDTHS,
    )  # fmt: skip


def _forward_of(block: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """Its forward, Liger's where that has been put on the instance."""
    on_instance = block.__dict__.get("forward")
    return type(block).forward if on_instance is None else lambda module, x: on_instance(x)


def _tile_checkpoint(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    forward = _forward_of(block)

    def run(x: Tensor) -> Tensor:
        tiles = x.chunk(count, dim=-2)
        return torch.cat([checkpoint(forward, block, tile, use_reentrant=False) for tile in tiles], dim=-2)

    return run


def _liger(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    apply_tiled_mlp = import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
    forward, weights = _forward_of(block), list(block.parameters())
    return lambda x: apply_tiled_mlp(forward, block, x, num_shards=count, compute_params=weights)


def _deepspeed(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    run = import_module(_ULYSSES).TiledMLP.apply
    forward, weights = _forward_of(block), list(block.parameters())
    return lambda x: run(forward, block, x, count, weights)


def _deepspeed_compute(block: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
    sequence_tiled_compute = import_module(_ULYSSES).sequence_tiled_compute
    forward, weights = _forward_of(block), [weight for weight in block.parameters() if weight.requires_grad]

    def run(x: Tensor) -> Tensor:
        return sequence_tiled_compute(  # type: ignore[no-any-return]
            lambda x, self: forward(self, x), x.shape[-2], count, {"x": x}, {"self": block}, "x",
            compute_params=weights, output_unshard_dimension=1, output_reduction=None,
        )  # fmt: skip

    return run


def _deepspeed_loss(model: Any, count: int) -> Callable[..., Any]:
    """The forward of a causal language model with labels, whose head and loss are DeepSpeed's."""
    run = import_module(_ULYSSES).TiledFusedLogitsLoss.apply

    def forward(input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
        tokens = (targets != -100).sum()  # inside, since the head's gradient ignores what is done with the loss

        def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model.lm_head(x).float(), y, reduction="sum") / tokens

        return SimpleNamespace(loss=run(loss, model, hidden, targets, None, count, [model.lm_head.weight], "sum"))

    return forward
