"""The request of a plan: model, devices, engine and settings, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from seqtile._errors import UserError
from seqtile.models.configs import max_positions
from seqtile.models.rope_scaling import lift
from seqtile.ops.attention.prefix import KEYS_AT_ONCE
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import Device
from seqtile.planner.layer_structure import Counts
from seqtile.planner.names import check_names
from seqtile.planner.step_config import PLANNED, Grpo, Lora, Pictures, Rollouts, Setup, TrainerStep
from seqtile.recognise.packed_experts import why_experts_stay_whole
from seqtile.rules import SHARDED, Combination, ModelFacts, check_combination

PROMPT_SHARES = 64
"""Shares of a row that a plan takes a shared prompt to be: multiples of one over this."""


@dataclass(frozen=True)
class Request:
    """One training configuration to plan.

    Attributes:
        model: name that the user gave the model.
        config: the model's configuration.
        device: each accelerator.
        gpus: number of devices, on all nodes together.
        nodes: number of hosts, with equally many devices each.
        host_memory: bytes of each node's host memory; None if not given.
        engine: one of :data:`seqtile.planner.names.ENGINES`.
        sp_size: ranks that share one sequence (Ulysses).
        cp_size: ranks that share one sequence (ring attention over FSDP2, with PyTorch's own attention kernel).
        lora: adapters on a frozen model.
        qlora: whether the frozen model is in 4 bits.
        experts_packed: whether the experts are too; None is as :func:`seqtile.train.load.load_model` loads them.
        optimizer: one of :data:`seqtile.planner.names.STATE_BYTES`.
        engine_offload: what the engine keeps on the host, of :data:`seqtile.planner.names.ENGINE_OFFLOADS`.
        attention: one of :data:`seqtile.planner.names.ATTENTIONS`.
        scans: how layers with a state run: in the fast ``"kernels"``, in transformers' ``"pytorch"`` paths, or in the
            kernels that are ``"installed"`` here.
        options: options of :func:`seqtile.apply`. ``checkpoint`` None is no activation checkpointing; ``"auto"``
            chooses between ``"layer"`` and ``"attention-saved"`` at the planned length.
        precision: ``"mixed"`` (fp32 weights, bf16 products; a frozen model in bf16), ``"bfloat16"`` or ``"float32"``.
        batch: rows per rank and micro-batch.
        accumulation: micro-batches whose gradients one update sums.
        liger: whether Liger's norm and SwiGLU kernels run (``use_liger_kernel``), which overwrite what was saved.
        device_type: type of the device, which ``tile="auto"`` depends on.
        grpo: generation and scoring of a GRPO step; None for a supervised step.
        pictures: pictures of each row; None for text alone.
        trainer: what a trainer's step does beside a supervised or a GRPO one.
        rope_scaling: rotary scaling that extended ``config`` beyond the model's own positions.
        own_positions: the positions of the model itself, where ``config`` has more.
    """

    model: str
    config: Any = field(repr=False)
    device: Device
    gpus: int = 1
    nodes: int = 1
    host_memory: int | None = None
    engine: str = "single"
    sp_size: int = 1
    cp_size: int = 1
    lora: Lora | None = None
    qlora: bool = False
    experts_packed: bool | None = None
    optimizer: str = "adamw"
    engine_offload: tuple[str, ...] = ()
    attention: str = "flash"
    scans: str = "kernels"
    options: TilingOptions = replace(PLANNED, loss_tile="auto")
    precision: str = "mixed"
    batch: int = 1
    accumulation: int = 1
    liger: bool = False
    device_type: str = "cuda"
    grpo: Grpo | None = None
    pictures: Pictures | None = None
    trainer: TrainerStep | None = None
    rope_scaling: dict[str, Any] | None = None
    own_positions: int | None = None

    @property
    def positions(self) -> int | None:
        """Positions of the model without further rotary scaling; None where it has no limit."""
        return self.own_positions or max_positions(self.config)

    @property
    def per_node(self) -> int:
        """Devices, and processes, of each node."""
        return self.gpus // self.nodes

    @property
    def split(self) -> int:
        """Ranks that share one sequence, by whichever way."""
        return max(self.sp_size, self.cp_size)

    @property
    def has_recipe(self) -> bool:
        """Whether ``seqtile train`` runs it: a supervised step."""
        return self.grpo is None

    @property
    def sharded(self) -> bool:
        """Whether the engine cuts weights into shards."""
        return self.engine in SHARDED

    def combination(self, max_length: int | None = None, model: ModelFacts | None = None) -> Combination:
        """The input of :data:`seqtile.rules.RULES`."""
        return Combination(
            options=self.options, engine=self.engine, processes=self.gpus, nodes=self.nodes, sp_size=self.sp_size,
            cp_size=self.cp_size, engine_offload=self.engine_offload, adapters=self.lora is not None,
            attention=self.attention, recomputes=self.options.checkpoint is not None, max_length=max_length,
            chooses=True, model=model or ModelFacts(),
        )  # fmt: skip

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a row of the model whose samples have ``tokens``."""
        return tokens if self.grpo is None else self.grpo.row_tokens(tokens)

    def attended_tokens(self, tokens: int) -> int:
        """Queries of a step on samples of ``tokens``, those of completions once for each call of a kernel."""
        row = self.row_tokens(tokens)
        if self.grpo is not None and row > tokens:
            shared = self.grpo.prompt - 1
            row += -(-shared // KEYS_AT_ONCE) * (row - shared)
        return self.batch * row

    def rollouts(self, tokens: int | None = None) -> Rollouts | None:
        """The rollouts of one rank's GRPO steps, of samples of ``tokens``; None for a supervised step."""
        grpo = self.grpo
        if grpo is None:
            return None
        rollouts = Rollouts(self.batch * self.accumulation * grpo.branches, grpo.numbers, grpo.reference)
        if not grpo.prompt:
            return rollouts
        # In steps, so that about as long samples have the same fake runs.
        share = 1.0 if tokens is None else (grpo.prompt - 1) / grpo.row_tokens(tokens)
        share = min(max(round(PROMPT_SHARES * share), 1), PROMPT_SHARES - 1) / PROMPT_SHARES
        return replace(rollouts, group=grpo.group, prompt=share, at_once=min(1.0, KEYS_AT_ONCE / grpo.prompt))

    @property
    def packs_experts(self) -> bool:
        """Whether the experts are in 4 bits."""
        packed = self.experts_packed
        return self.qlora and (not why_experts_stay_whole(self.config) if packed is None else packed)

    def setup(self) -> Setup:
        """How one rank runs the step; with sharded weights, on the bf16 copies that the engine gathers."""
        frozen = self.lora is not None
        gathered = self.sharded or frozen or self.precision == "bfloat16"
        dtype = torch.float32 if self.precision == "float32" or not gathered else torch.bfloat16
        return Setup(
            dtype=dtype,
            autocast=self.precision == "mixed" and (frozen or not self.sharded),
            options=replace(self.options, offload=False, loss_tile=PLANNED.loss_tile),
            lora=self.lora,
            packs_experts=self.packs_experts,
            optimizer=self.optimizer,
            attention=self.attention if self.attention in ("sdpa", "eager") else "flash",
            batch=self.batch,
            accumulation=min(self.accumulation, 2),  # a third adds nothing
            device_type=self.device_type,
            scans="pytorch" if self.device_type == "cpu" else self.scans,
            liger=self.liger,
            rollouts=self.rollouts(),
            pictures=self.pictures,
            trainer=self.trainer,
        )


def attention_cannot_be_saved(request: Request) -> str | None:
    """Why activation checkpoints cannot keep attention's output, and what to do; None if they can."""
    return request.combination().why_not_saved


def check_request(request: Request, max_length: int | None) -> None:
    """Refuse what cannot run.

    Raises:
        UserError: with what to do instead.
    """
    options = request.options
    check_names(vars(request))
    check_keep(options)
    if request.qlora and request.lora is None:
        raise UserError("qlora.without-lora", "qlora needs the rank of the adapters; add lora, such as --lora r=16")
    if request.qlora and request.sharded:
        raise UserError(
            "qlora.engine-unsupported",
            f"plans do not support 4-bit weights under {request.engine}; use --engine ddp or one GPU",
        )
    if max_length is not None and max_length < 2:
        raise UserError("max-length.too-small", f"got max length {max_length}, expected at least 2 tokens")


def check_request_combination(request: Request, max_length: int | None) -> None:
    """Refuse settings that do not go together; after what a kind of step refuses, whose advice is nearer.

    Raises:
        UserError: with what to do instead.
    """
    facts = ModelFacts(repr(request.model), max_positions(request.config), lift(request.config, max_length))
    check_combination(request.combination(max_length, facts))


def check_keep(options: TilingOptions) -> None:
    """Refuse a ``keep`` that no plan knows.

    Raises:
        UserError: with what to give instead.
    """
    if options.keep_rule(1).kind == "auto":
        raise UserError(
            "keep.auto-in-plan",
            "got keep 'auto', which depends on free memory and cannot be planned; use a fraction or 'memory:4GiB'",
        )


def check_ranks(request: Request, counts: Counts, no_ring: str) -> None:
    """Refuse a number of ranks that the model cannot be divided over.

    Args:
        request: what is planned.
        counts: counts of the model, for its heads.
        no_ring: result of :func:`seqtile.engines.sequence_parallel.why_no_ring`.

    Raises:
        UserError: with numbers that would do, or why ring attention cannot compute the model's.
    """
    facts = ModelFacts(repr(request.model), heads=counts.heads, key_heads=counts.key_heads, no_ring=no_ring)
    check_combination(request.combination(model=facts))
