"""Which settings exclude each other: one table for ``apply``, ``train``, ``plan``, the plugins and the callback.

Each of them describes its settings as a :class:`Combination` and calls :func:`check_combination`. A rule is an
id, a condition and a sentence; the first rule that matches refuses the combination. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seqtile._errors import UserError
from seqtile.devices import package_version
from seqtile.options import DEFAULTS, OF_BLOCKS, WHOLE_LAYER, TilingOptions

SHARDED = ("fsdp2", "zero2", "zero3")

FROZEN_WEIGHTS_STAY = (0, 19, 4)
"""From this version on DeepSpeed keeps frozen weights whole until a recompute is over (its pull request 8130)."""

VERIFIED = {"ms-swift": ("blocks", *OF_BLOCKS)}
"""By framework: the options that are verified under its trainer, which has its own loss and checkpoints."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model that rules depend on.

    Attributes:
        name: the model's name for messages, in quotes.
        positions: tokens that a row can have; None where there is no limit.
        scaling: the line of a recipe with which ``max_length`` tokens fit, or "".
        heads, key_heads: query heads and key-value heads; 0 if unknown.
        window: tokens of the sliding window; None without one.
        no_ring: why ring attention does not support the model, or "".
    """

    name: str = "the model"
    positions: int | None = None
    scaling: str = ""
    heads: int = 0
    key_heads: int = 0
    window: int | None = None
    no_ring: str = ""


@dataclass(frozen=True)
class Combination:
    """The settings of one run, as far as the caller knows them.

    Attributes:
        options: options of tiling.
        engine: ``"single"``, ``"ddp"``, ``"fsdp2"``, ``"zero2"`` or ``"zero3"``; None where the caller cannot see it.
        processes, nodes: processes and nodes of the launch.
        sp_size, cp_size: ranks that share one sequence, by Ulysses and by ring attention.
        engine_offload: what the engine keeps on the host: ``"optimizer"`` and ``"weights"``.
        adapters: whether low-rank adapters train on a frozen model.
        attention: ``attn_implementation``, or a plan's name of it.
        recomputes: whether activation checkpointing is on.
        max_length: tokens of a row.
        packing: True, False, or TRL's strategy.
        trainer: arguments of the trainer, by the trainer's names.
        chooses: whether a plan may choose what is ``"auto"``.
        framework: framework whose trainer runs the step, a key of :data:`VERIFIED`, or "".
        mlp_kernels, losses, checkpointers, offloaders: settings of another program that compute the MLP or the loss, or
            decide what activation checkpoints keep, or where.
        product_savers: settings of another program's checkpoints that also keep the MLP's products.
        model: facts of the model, as far as they are known.
    """

    options: TilingOptions = field(default_factory=TilingOptions)
    engine: str | None = None
    processes: int | None = None
    nodes: int = 1
    sp_size: int = 1
    cp_size: int = 1
    engine_offload: tuple[str, ...] = ()
    adapters: bool = False
    attention: str | None = None
    recomputes: bool = True
    max_length: int | None = None
    packing: bool | str | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    chooses: bool = False
    framework: str = ""
    mlp_kernels: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    checkpointers: tuple[str, ...] = ()
    offloaders: tuple[str, ...] = ()
    product_savers: tuple[str, ...] = ()
    model: ModelFacts = ModelFacts()

    @property
    def split(self) -> str:
        """``"sp_size 2"`` or ``"cp_size 2"``."""
        return f"cp_size {self.cp_size}" if self.cp_size > 1 else f"sp_size {self.sp_size}"

    @property
    def multiple(self) -> int:
        """Rows have a multiple of so many tokens: under a ring each process has two parts, one from either end."""
        return 2 * self.cp_size if self.cp_size > 1 else self.sp_size

    @property
    def nearest_length(self) -> int:
        """The longest sequence of such a length, up to ``max_length``."""
        return (self.max_length or 0) // self.multiple * self.multiple or self.multiple

    @property
    def window_length(self) -> int | None:
        """The longest sequence inside the model's sliding window; None where ``max_length`` is not beyond it."""
        window = self.model.window
        return window // self.sp_size * self.sp_size if window and window < (self.max_length or 0) else None

    @property
    def moved(self) -> str:
        """What the engine offloads, for messages."""
        return " and ".join(name for name in ("optimizer", "weights") if name in self.engine_offload)

    @property
    def packs(self) -> bool:
        """Whether documents lie side by side in a row, apart by their positions alone."""
        settings = self.trainer.get("padding_free") or self.trainer.get("eval_packing")
        return bool(settings) or self.packing not in (None, False, "wrapped")

    @property
    def idle_options(self) -> str:
        """Options of blocks that are set although no block is tiled."""
        names = (name for name in OF_BLOCKS if name != "trust" and getattr(self.options, name) != DEFAULTS[name])
        return "" if self.options.tiled else ", ".join(names)

    @property
    def idle_loss(self) -> str:
        """Options of the tiled loss that are set without it."""
        names = (name for name in ("loss_tile", "loss_impl") if getattr(self.options, name) != DEFAULTS[name])
        return ", ".join(names) if self.options.loss is None else ""

    @property
    def bounded_twice(self) -> str:
        """Options that bound the same memory as chunks."""
        options = self.options
        names = [name for name in ("heads", "state") if getattr(options, name) is not None]
        names += [f"blocks {WHOLE_LAYER!r}"] * (options.blocks == WHOLE_LAYER)
        names += [f"checkpoint {options.checkpoint!r}"] * (options.saves_attention or options.by_layer)
        return ", ".join(names)

    @property
    def frees_weights(self) -> str:
        """What has one layer's weights on the device at a time."""
        return "offload 'weights'" if self.options.weights_on_host else f"engine {self.engine!r}"

    @property
    def unverified(self) -> str:
        """Options that are not verified under the framework's trainer."""
        verified = VERIFIED.get(self.framework, tuple(DEFAULTS))
        names = (name for name, default in DEFAULTS.items() if getattr(self.options, name) != default)
        return ", ".join(name for name in names if name not in verified)

    @property
    def why_not_saved(self) -> str | None:
        """Why activation checkpoints cannot keep attention's output, and what to do; None where they can."""
        if self.attention == "eager":
            return "needs an attention kernel; use flash or sdpa attention"
        if self.adapters and adapters_need_reentrant(self.engine or ""):
            return (
                "needs non-reentrant checkpointing, which fails with adapters under zero3 before DeepSpeed 0.19.4; "
                "upgrade it, or use fsdp2 or zero2"
            )
        if self.cp_size > 1:
            return f"does not support ring attention ({self.split}); use checkpoint 'layer'"
        if self.options.chunk:
            return "does not support chunks, which compute attention again; use checkpoint 'layer'"
        return None


def adapters_need_reentrant(engine: str) -> bool:
    """Whether activation checkpoints have to be reentrant with adapters under ``engine``.

    ZeRO-3 of older DeepSpeed takes frozen weights away during a recompute: PyTorch's non-reentrant checkpoint raises
    (https://github.com/deepspeedai/DeepSpeed/pull/8130). Without DeepSpeed here, the newest is assumed.
    """
    version = package_version("deepspeed") if engine == "zero3" else None
    return version is not None and tuple(map(int, re.findall(r"\d+", version)[:3])) < FROZEN_WEIGHTS_STAY


def heads_divide(heads: int, key_heads: int, ranks: int) -> bool:
    """Whether Ulysses can deal out a model's heads: query heads divide, key-value heads divide or are repeated."""
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


Rule = tuple[str, Callable[[Combination], object], str]

RULES: tuple[Rule, ...] = (
    # Options alone.
    ("blocks.none-with-options", lambda c: c.idle_options,
     "blocks 'none' (tiled_mlp: false, --tile none) tiles nothing, so {c.idle_options} would be ignored; drop one"),
    ("loss.options-without-loss", lambda c: c.idle_loss, "{c.idle_loss} needs loss 'tiled'"),
    ("checkpoint.auto-outside-plan", lambda c: c.options.checkpoint == "auto" and not c.chooses,
     "checkpoint 'auto' is for plans; use 'layer' or 'attention-saved', or drop it"),
    ("checkpoint.recompute-off", lambda c: (c.options.checkpoint or c.options.offload_room) and not c.recomputes,
     "checkpoint and offload need activation checkpointing, which is off; turn it on, or drop them"),
    ("framework.unverified-options", lambda c: c.unverified,
     "{c.unverified}: not verified with {c.framework}'s trainer, which has its own loss and checkpoints; drop it"),
    ("segment.without-chunk", lambda c: c.options.segment > 1 and c.options.chunk is None,
     "segment needs chunk; set chunk 'auto', or drop segment"),
    ("chunk.with-keep", lambda c: c.options.chunk and c.options.keep,
     "keep would save gate and up of every chunk, which chunks are to bound; drop keep or chunk"),
    ("chunk.bounded-twice", lambda c: c.options.chunk and c.bounded_twice,
     "chunk and {c.bounded_twice} both bound what a layer takes; drop one"),
    ("segment.streamed-weights", lambda c: c.options.segment > 1 and (c.options.weights_on_host or c.engine in SHARDED),
     "segment {c.options.segment} reads the weights of several layers at a time, which {c.frees_weights} has on the "
     "device one layer at a time; use segment 1"),
    # Other programs that do the same job.
    ("path.fused-with-other-mlp", lambda c: c.options.path == "fused" and c.mlp_kernels,
     "path 'fused' and {c.mlp_kernels[0]} both replace the MLP; set {c.mlp_kernels[0]}: false, or drop path "
     "(tiled_mlp_use_original_mlp: false)"),
    ("loss.with-other-loss", lambda c: c.options.loss and c.losses,
     "loss 'tiled' and {c.losses[0]} both compute the loss; set {c.losses[0]}: false, or drop loss"),
    ("checkpoint.with-other-checkpoints",
     lambda c: (c.options.checkpoint or c.options.offload_room) and c.checkpointers,
     "{c.checkpointers[0]} and checkpoint or offload both decide what activation checkpoints keep; drop one"),
    # A selective checkpoint saves what each tile's products return: all of gate and up, which no backward reads.
    ("tile.with-saved-products", lambda c: c.options.tiled and c.product_savers,
     "{c.product_savers[0]} saves the products of every tile, so tiling frees nothing; drop it, name only "
     "attention's projections in save_modules, or set tiled_mlp: false"),
    ("offload.with-other-offload", lambda c: c.options.offload_room and c.offloaders,
     "offload and {c.offloaders[0]} both offload activations; keep one"),
    # Processes and engines.
    ("engine.single-with-processes", lambda c: c.engine == "single" and (c.processes or 1) > 1,
     "engine 'single' is one process, got {c.processes}; use engine ddp, fsdp2, zero2 or zero3"),
    ("engine.ddp-alone", lambda c: c.engine == "ddp" and c.processes == 1,
     "engine 'ddp' needs at least 2 processes, got 1; use engine single"),
    ("nproc.not-multiple-of-nodes", lambda c: (c.processes or 0) % c.nodes,
     "got {c.processes} processes on {c.nodes} nodes, expected a multiple of {c.nodes} (it counts all nodes)"),
    ("engine-offload.not-sharded", lambda c: c.moved and c.engine not in SHARDED,
     "offload of {c.moved} needs engine zero3 or fsdp2, got {c.engine!r}"),
    ("engine-offload.zero2-weights", lambda c: c.engine == "zero2" and "weights" in c.engine_offload,
     "offload of weights needs an engine that shards them, got engine 'zero2'; use zero3 or fsdp2"),
    ("engine-offload.fsdp2-partly", lambda c: c.engine == "fsdp2" and len({*c.engine_offload}) == 1,
     "engine 'fsdp2' offloads weights and optimizer together, got {c.moved} only; set both, or use zero3"),
    ("offload.weights-several-processes", lambda c: c.options.weights_on_host and c.engine not in (None, "single"),
     "offload 'weights' needs engine 'single', got {c.engine!r}; zero3 and fsdp2 have their own (engine_offload)"),
    ("offload.weights-trained", lambda c: c.options.weights_on_host and c.engine is not None and not c.adapters,
     "offload 'weights' needs frozen weights, and every weight trains; train adapters (lora), or drop 'weights'"),
    ("trainer.save-on-each-node", lambda c: c.engine in SHARDED and c.trainer.get("save_on_each_node"),
     "trainer.save_on_each_node with engine {c.engine!r} would leave no complete checkpoint on any node; drop it, "
     "and use a shared directory for --output"),
    ("checkpoint.attention-saved-unsupported",
     lambda c: c.options.saves_attention and c.why_not_saved, "checkpoint 'attention-saved' {c.why_not_saved}"),
    # Sequences that ranks share.
    ("sp-size.with-cp-size", lambda c: c.sp_size > 1 and c.cp_size > 1,
     "got both cp_size {c.cp_size} and sp_size {c.sp_size}; use one"),
    ("cp-size.needs-fsdp2", lambda c: c.cp_size > 1 and c.engine not in (None, "fsdp2"),
     "{c.split} needs engine fsdp2, got {c.engine!r}"),
    ("sp-size.with-zero2", lambda c: c.sp_size > 1 and c.engine == "zero2",
     "{c.split} with engine 'zero2' makes gradients {c.sp_size} times too large (DeepSpeed divides by too few "
     "processes); use engine zero3"),
    ("sp-size.needs-zero3", lambda c: c.sp_size > 1 and c.engine not in (None, "zero3"),
     "{c.split} needs engine zero3 (DeepSpeed's Ulysses), got {c.engine!r}"),
    ("nproc.not-multiple-of-split", lambda c: (c.processes or 0) % max(c.sp_size, c.cp_size),
     "got {c.processes} processes, expected a multiple of {c.split}"),
    ("max-length.not-multiple-of-split", lambda c: (c.max_length or 0) % c.multiple,
     "max_length {c.max_length} is not a multiple of {c.multiple}, which {c.split} needs; use --max-length "
     "{c.nearest_length}"),
    ("trainer.pad-not-multiple-of-split", lambda c: (c.trainer.get("pad_to_multiple_of") or 0) % c.multiple,
     "trainer.pad_to_multiple_of is not a multiple of {c.multiple}, which {c.split} needs; drop it"),
    ("cp-size.needs-sdpa", lambda c: c.cp_size > 1 and c.attention not in (None, "sdpa", "flash"),
     "{c.split} needs PyTorch's attention, got {c.attention!r}; use sdpa"),
    ("cp-size.with-packing", lambda c: c.cp_size > 1 and (c.packs or c.packing),
     "{c.split} does not support packing or padding_free (ring attention has no document masks); use 'packing: "
     "false'"),
    # Ulysses drops attention masks; where flash attention would read the documents' ends beside it, DeepSpeed 0.19 asks
    # cu_seq_lens for a second dimension, which TRL's have not, and crashes:
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    ("sp-size.with-packing", lambda c: c.sp_size > 1 and c.packs,
     "{c.split} with packing or padding_free would let packed documents attend to each other, and crashes under "
     "flash attention; use 'packing: wrapped' or none"),
    ("cp-size.with-label-smoothing", lambda c: c.cp_size > 1 and c.trainer.get("label_smoothing_factor"),
     "{c.split} does not support label_smoothing_factor: the trainer shifts the labels of each rank's part "
     "separately; drop it"),
    ("chunk.with-sequence-parallel", lambda c: max(c.sp_size, c.cp_size) > 1 and c.options.chunk is not None,
     "{c.split} does not support chunk {c.options.chunk}: each rank has a part of every sequence; drop chunk"),
    ("heads.with-cp-size", lambda c: c.cp_size > 1 and c.options.heads is not None,
     "{c.split} does not support heads {c.options.heads}: ring attention runs all heads at once; drop heads"),
    # The model.
    ("max-length.beyond-positions",
     lambda c: c.max_length and c.model.positions is not None and c.max_length > c.model.positions,
     "{c.max_length:,} tokens exceed the {c.model.positions:,} positions of {c.model.name}; use at most "
     "{c.model.positions}{c.model.scaling}"),
    ("cp-size.model-unsupported",
     lambda c: c.cp_size > 1 and c.model.no_ring, "{c.split} does not support {c.model.name}: {c.model.no_ring}"),
    ("sp-size.heads-do-not-divide",
     lambda c: c.model.heads and not heads_divide(c.model.heads, c.model.key_heads, c.sp_size),
     "{c.split} does not support {c.model.name} with {c.model.heads} attention heads and {c.model.key_heads} "
     "key-value heads; use a size that divides {c.model.heads} and divides, or is a multiple of, "
     "{c.model.key_heads}"),
    ("sp-size.drops-window", lambda c: c.sp_size > 1 and c.window_length and "flash" not in (c.attention or "flash"),
     "{c.split} with {c.attention!r} attention drops the sliding-window mask ({c.model.window} tokens) of "
     "{c.model.name}; use --max-length {c.window_length}, or attention flash"),
)  # fmt: skip
"""Ids, conditions and sentences; the first that matches counts."""


def refusal(combination: Combination) -> UserError | None:
    """Why a combination cannot run or would ignore a setting; None where it can."""
    for code, matches, sentence in RULES:
        if matches(combination):
            return UserError(code, sentence.format(c=combination))
    return None


def check_combination(combination: Combination) -> None:
    """Refuse a combination that cannot run, or that would ignore a setting.

    Raises:
        UserError: the first rule that it breaks.
    """
    if error := refusal(combination):
        raise error
