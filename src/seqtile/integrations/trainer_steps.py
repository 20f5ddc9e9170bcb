"""What a plan has to know of a trainer, read from it: transformers' own, or one of TRL's (1.16.0).

Rows, heads and frozen models were read in ``trl/trainer`` and ``trl/experimental``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from seqtile._compat import TRL_FORWARDS, TRL_LOSSES
from seqtile.fitting import planned_optimizer
from seqtile.planner.step_config import Grpo, TrainerStep

MARGIN = 0.15
"""Share of the device that is left free for a step that no plan knows."""

STEPS = {
    "SFTTrainer": TrainerStep(),
    "DPOTrainer": TrainerStep(rows=2, head="scores", reference=True),
    "KTOTrainer": TrainerStep(head="scores", reference=True),
    "CPOTrainer": TrainerStep(rows=2, head="pairs"),
    "ORPOTrainer": TrainerStep(rows=2, head="pairs"),
    "RewardTrainer": TrainerStep(rows=2),
    "GRPOTrainer": TrainerStep(head="scores"),
    "RLOOTrainer": TrainerStep(head="scores"),
    "AsyncGRPOTrainer": TrainerStep(head="scores", margin=MARGIN),
    "OnlineDPOTrainer": TrainerStep(rows=2, head="pairs", reference=True, can_defer=True, margin=MARGIN),
    "DistillationTrainer": TrainerStep(head="hidden", reference=True, margin=MARGIN),
    "GKDTrainer": TrainerStep(head="divergence", reference=True, can_defer=True, margin=MARGIN),
}
"""The steps of TRL's trainers. Teachers are models of their own sizes, and generation is in no plan but GRPO's: hence
the margins."""

GENERATING = ("GRPOTrainer", "RLOOTrainer")
"""Trainers whose generation and scoring are planned too."""

UNKNOWN_STEP = TrainerStep(head="pairs", margin=MARGIN)
"""Of any other trainer of TRL."""


def question_of(trainer: Trainer) -> dict[str, Any]:
    """Arguments of :func:`seqtile.fitting.choose_for` for a trainer."""
    args: Any = trainer.args
    engine, processes = None, trainer.accelerator.num_processes
    if trainer.is_fsdp_enabled:
        engine = "fsdp2"
    elif trainer.is_deepspeed_enabled:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        engine = f"zero{stage}" if stage > 1 else None  # ZeRO-1 holds what DDP does, but for states
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    step, accumulation = step_of(trainer, engine, processes), args.gradient_accumulation_steps
    if step.grpo is not None:  # whole generations, which may be more batches than an update has
        accumulation = -(-accumulation // args.steps_per_generation) * args.steps_per_generation
    return {
        "engine": engine, "sp_size": getattr(parallelism, "sp_size", 1), "cp_size": getattr(parallelism, "cp_size", 1),
        "optimizer": planned_optimizer(str(getattr(args.optim, "value", args.optim)), args.optim_args),
        "batch": args.per_device_train_batch_size, "recomputes": args.gradient_checkpointing,
        "accumulation": accumulation, "autocast": args.bf16 or args.fp16, "step": step,
    }  # fmt: skip


def step_of(trainer: Trainer, engine: str | None, processes: int) -> TrainerStep:
    """What the trainer's step does beside a supervised one."""
    name, step = known_step(type(trainer))
    if not name:
        # LLaMA-Factory's preference trainers are TRL's with arguments of transformers; others have TRL's arguments.
        bases = (*type(trainer).__mro__, *type(trainer.args).__mro__)
        of_trl = {base.__name__ for base in bases if base.__module__.startswith("trl.")}
        step = UNKNOWN_STEP if of_trl and "SFTConfig" not in of_trl else step
    args = trainer.args
    if name in GENERATING:
        step = replace(step, grpo=generation_of(args))
    # Built after the trainer's event, so that they are arguments of its constructor still.
    reference, teacher = (_argument(trainer, name) for name in ("ref_model", "teacher_model"))
    adapters = hasattr(trainer.model, "peft_config")
    notes = []
    if step.reference and teacher is None and getattr(args, "precompute_ref_log_probs", False):
        step = replace(step, reference=False)
    elif step.grpo is None and (reference is not None or (step.reference and teacher is None and not adapters)):
        step = replace(step, reference=True, own_reference=True)
    rewards = _argument(trainer, "reward_funcs")
    rewards = rewards if isinstance(rewards, (list, tuple)) else [rewards]
    size = sum(_weight_bytes(model) for model in rewards if isinstance(model, nn.Module))
    if teacher is not None and teacher is not trainer.model:  # SDFT's may be the policy
        step = replace(step, reference=True)
        size += _weight_bytes(teacher) / (processes if engine == "zero3" else 1)
    if size:
        notes.append(f"{size / 2**30:,.2f} GiB are reserved for frozen models beside the one that trains")
    if step.margin:
        notes.append(
            f"{step.margin:.0%} of the device is left free: no plan knows all of a step of {type(trainer).__name__}"
        )
    return replace(step, frozen=size, notes=tuple(notes))


def known_step(trainer: type) -> tuple[str, TrainerStep]:
    """The name and the step of the nearest trainer that is known, with a margin where a subclass changes the step."""
    names_changed: set[str] = set()
    inside_trl: set[str] = set()
    for base in trainer.__mro__:
        name, of_trl = base.__name__, base.__module__.startswith("trl.")
        if of_trl and name in STEPS:
            step = STEPS[name]
            if name == "SFTTrainer":  # a user's subclass of it keeps the model's loss
                return name, UNKNOWN_STEP if inside_trl & TRL_LOSSES else step
            if names_changed & TRL_LOSSES:
                step = replace(step, margin=MARGIN)
            if names_changed & TRL_FORWARDS and name not in GENERATING:
                step = replace(step, head="pairs")
            return name, step
        names_changed |= vars(base).keys()
        inside_trl |= vars(base).keys() if of_trl else set()
    return "", TrainerStep()


def generation_of(args: Any) -> Grpo:
    """Generation and scoring by a trainer's arguments."""
    generator = "model"
    if args.use_vllm:
        generator = "server"
        if args.vllm_mode == "colocate":
            generator = "sleep" if args.vllm_enable_sleep_mode else "colocate"
    memory = args.vllm_gpu_memory_utilization if generator in ("colocate", "sleep") else None
    return Grpo(args.num_generations, reference=args.beta != 0, generator=generator, memory=memory)


def _argument(trainer: Trainer, name: str) -> Any:
    """An attribute of the trainer, or while it is being built the argument of its constructor.

    TRL sets these attributes after the event at which the callback chooses, so they are read from the call stack.
    """
    if (value := getattr(trainer, name, None)) is not None:
        return value
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is trainer and frame.f_locals.get(name) is not None:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _weight_bytes(model: Any) -> float:
    """Bytes of a model's weights, or of one that a trainer loads by this name."""
    if not isinstance(model, nn.Module):
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return float(sum(getattr(w, "ds_numel", w.numel()) * w.element_size() for w in model.parameters()))
