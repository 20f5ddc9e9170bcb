"""Translate a recipe into TRL's ``SFTConfig`` and PEFT's ``LoraConfig``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.install.adapters import ALL_LINEAR, leave_out, lora_config, without_adapters
from seqtile.rules import adapters_need_reentrant
from seqtile.train.data import processes_for
from seqtile.train.recipe import LoraRecipe, Recipe, shown
from seqtile.train.trainer_fields import best_metric, trainer_values

if TYPE_CHECKING:
    from peft import LoraConfig
    from trl import SFTConfig  # type: ignore[attr-defined]

logger = first_rank_logger(__name__)

KEPT_CHECKPOINTS = 2

CHECKPOINT_KWARGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
"""The trainer's new and old name of how activation checkpoints are made."""


def trainer_arguments(recipe: Recipe, output: Path, *, documents: bool, rows: int = 0) -> SFTConfig:
    """The trainer's arguments for a resolved recipe.

    ``documents`` that are whole text files are joined and cut into rows of ``max_length`` tokens, so that no text is
    dropped, unless the recipe sets ``packing``. Many ``rows`` are tokenised by several processes.

    Raises:
        UserError: ``trainer:`` holds a key that ``SFTConfig`` does not know, or values that it refuses.
    """
    import torch
    from transformers.utils import is_torch_bf16_gpu_available  # type: ignore[attr-defined]
    from trl import SFTConfig  # type: ignore[attr-defined]

    on_cpu = not torch.accelerator.is_available()
    values: dict[str, Any] = {
        "output_dir": str(output),
        "max_length": recipe.max_length,
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        "num_train_epochs": recipe.epochs or 1.0,
        "max_steps": recipe.steps or -1,
        "seed": recipe.seed,
        "trust_remote_code": recipe.trust_remote_code,
        "dataset_num_proc": processes_for(rows),
        "logging_steps": 1,
        "save_total_limit": KEPT_CHECKPOINTS,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "bf16": not on_cpu and recipe.dtype != "float32" and is_torch_bf16_gpu_available(),
        **recipe.optimizer_arguments,
        **_packing(recipe, documents),
        **_sequence_split(recipe),
        **_evaluation(recipe),
    }
    if recipe.is_demo:
        values |= {"warmup_steps": 3, "lr_scheduler_type": "cosine"}
    values |= trainer_values(recipe)
    values |= _checkpointing(recipe, SFTConfig.__dataclass_fields__)
    if values["use_cpu"] and (idle := [key for key in ("fp16", "activation_offloading") if values.get(key)]):
        raise UserError(
            "trainer.needs-accelerator", f"trainer.{idle[0]} needs an accelerator, and none is available; drop it"
        )
    try:
        with warnings.catch_warnings():
            # TRL itself sets the name that Transformers has deprecated.
            warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
            return SFTConfig(**values)
    except (ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            "trainer.refused", f"the trainer refuses these settings ({reason}); fix 'trainer:' in the recipe"
        ) from None


def adapter_config(lora: LoraRecipe | None, model: nn.Module, frozen: Sequence[str] = ()) -> LoraConfig | None:
    """PEFT's configuration of the adapters on ``model``, or None to train every weight.

    Args:
        lora: adapters of the recipe.
        model: without adapters.
        frozen: modules that text does not reach; ``"all-linear"`` leaves them out.
    """
    if lora is None:
        return None
    if lora.start is not None:
        from peft import LoraConfig

        saved: LoraConfig = LoraConfig.from_pretrained(lora.start)
        saved.inference_mode = False
        return saved
    config = lora_config(model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules)
    left_out = without_adapters(model, config)
    if left_out is not None:
        logger.warning(left_out)
    if lora.target_modules == ALL_LINEAR and frozen:
        leave_out(config, model, frozen)
    return config


def load_adapters(model: Any, lora: LoraRecipe) -> None:
    """Give a model's new adapters the weights of those that ``lora.start`` names.

    Raises:
        UserError: they do not fit this model.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        loaded: Any = set_peft_model_state_dict(model, load_peft_weights(str(lora.start), device="cpu"))
        unexpected = loaded.unexpected_keys
    except (RuntimeError, ValueError, OSError) as error:
        unexpected = [str(error).strip().splitlines()[0]]
    if unexpected:
        raise UserError(
            "lora.start-does-not-fit",
            f"the adapters of lora.start {lora.start!r} do not fit this model: {unexpected[0]}",
        )


def describe_adapters(model: nn.Module) -> str:
    """One line on a model with adapters: which layers have them, how many parameters train, and whether experts do."""
    trained, of_experts, linear = dict[str, int](), 0, set[str]()
    experts = {name for name, module in model.named_modules() if "expert" in type(module).__name__.lower()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = re.sub(r"(\.base_layer)*\.(lora_\w+|modules_to_save|original_module)\..*$", "", name)
        in_expert = ".experts." in f"{owner}." or any(f"{owner}.".startswith(f"{expert}.") for expert in experts)
        count = int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 holds none of it here
        of_experts += count * in_expert
        layer = "experts" if in_expert else owner.rpartition(".")[2]
        trained[layer] = trained.get(layer, 0) + count
        if not in_expert and isinstance(getattr(model.get_submodule(owner), "base_layer", None), nn.Linear):
            linear.add(layer)
    line = f"adapters train {_short(sum(trained.values()))} parameters, on {', '.join(sorted(trained))}"
    if of_experts:
        others = ", ".join(sorted(linear))
        line += f" (experts: {_short(of_experts)}); 'lora: {{target_modules: [{others}]}}' leaves the experts out"
    elif experts or any(".experts." in name for name, _ in model.named_modules()):
        line += "; the experts have none"
    return line


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}" if count < 100 * unit else f"{count / unit:,.0f}{name}"
    return f"{count:,}"


def _evaluation(recipe: Recipe) -> dict[str, Any]:
    if recipe.eval_dataset is None:
        return {"save_steps": recipe.save_steps} if recipe.save_steps else {}
    # Each at a step that is saved, so that the best checkpoint is one that can be kept.
    every = recipe.eval_steps or recipe.save_steps or 500
    return {
        "eval_strategy": "steps", "eval_steps": every, "save_steps": recipe.save_steps or every,
        "per_device_eval_batch_size": recipe.batch_size, "metric_for_best_model": best_metric(recipe),
        "prediction_loss_only": True,
    }  # fmt: skip


def _packing(recipe: Recipe, documents: bool) -> dict[str, Any]:
    packing = recipe.packing
    if packing is None and documents:
        packing = "wrapped"
    if packing and recipe.cp_size > 1:
        raise UserError(
            "dataset.text-files-with-cp-size",
            f"text files are packed to max_length tokens, but ring attention (cp_size {recipe.cp_size}) does not "
            "support packing; use a dataset of rows, or 'packing: false' for one sequence per file",
        )
    if not packing:
        return {"packing": False}
    return {"packing": True, "packing_strategy": "bfd" if packing is True else packing}


def _sequence_split(recipe: Recipe) -> dict[str, Any]:
    """Ulysses: ``sp_size`` processes share a row, each with a part of its tokens and, in attention, of its heads.

    Ring attention: ``cp_size`` processes, each with two parts of its tokens, that receive all keys and values in turn.
    """
    if recipe.split == 1:
        return {}
    import torch
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig

    if recipe.cp_size > 1:
        ring = ParallelismConfig(
            cp_size=recipe.cp_size, dp_shard_size=(recipe.nproc or recipe.cp_size) // recipe.cp_size,
            cp_handler=TorchContextParallelConfig(cp_comm_strategy="alltoall"),
        )  # fmt: skip
        return {"parallelism_config": ring, "pad_to_multiple_of": 2 * recipe.cp_size}
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=recipe.attn_implementation
    )
    split = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=recipe.sp_size,
        dp_shard_size=(recipe.nproc or recipe.sp_size) // recipe.sp_size,
        sp_handler=handler,
    )
    # DeepSpeed 0.19 gathers the rows of a group, of whatever lengths; gloo gathers only what has one length:
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    multiple = recipe.sp_size if torch.accelerator.is_available() else recipe.max_length
    return {"parallelism_config": split, "pad_to_multiple_of": multiple}


def _checkpointing(recipe: Recipe, fields: Any) -> dict[str, Any]:
    """Non-reentrant activation checkpointing: under a reentrant one the tiles would be computed once more.

    With adapters under ZeRO-3 TRL (1.16) makes it reentrant, and warns where it reads otherwise. So nothing is said
    there, and :class:`seqtile.train.trainer.Trainer` makes it non-reentrant again where DeepSpeed takes that.
    """
    name = "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"
    keys = [key for key in CHECKPOINT_KWARGS if recipe.trainer.get(key) is not None]
    if len(keys) > 1:
        raise UserError(
            "trainer.key-given-twice", f"trainer.{keys[0]} and trainer.{keys[1]} are the same setting; keep one"
        )
    kwargs: Any = recipe.trainer[keys[0]] if keys else {}
    if not isinstance(kwargs, dict):
        raise UserError(
            "trainer.not-a-mapping", f"recipe key 'trainer.{keys[0]}': got {shown(kwargs)}, expected a mapping"
        )
    if keys and not recipe.recomputes:
        raise UserError(
            "trainer.checkpointing-off",
            f"trainer.{keys[0]} configures activation checkpointing, but checkpoint is 'none'; drop one",
        )
    kwargs = {"use_reentrant": recipe.lora is not None and adapters_need_reentrant(recipe.engine), **kwargs}
    if recipe.lora is not None and recipe.engine == "zero3" and not kwargs["use_reentrant"]:
        del kwargs["use_reentrant"]
    return {
        **dict.fromkeys(keys),
        name: recipe.recomputes,
        f"{name}_kwargs": kwargs if recipe.recomputes else None,
    }
