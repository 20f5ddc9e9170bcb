"""Recipes: everything one training run depends on, read from YAML and flags, checked, frozen.

A recipe is complete in itself: the resolved one is saved as ``recipe.yaml`` beside the result and
``seqtile train --recipe that/recipe.yaml`` runs it again. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from seqtile._errors import UserError
from seqtile.options import DEFAULTS, OF_BLOCKS, WRITTEN, TilingOptions, file_type
from seqtile.rules import Combination, check_combination
from seqtile.tiling import parse_bytes
from seqtile.train.atomic_files import write_whole

DEMO = "demo"
"""Model and dataset of the embedded default."""

DEMO_STEPS = 30

RECIPE_FILE = "recipe.yaml"

TRL_LOSS_TILE = 4096
"""Tokens per tile of the trainer's own head."""

NAMED_TRAINER_KEYS = {
    "output_dir": "output",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "learning_rate": "learning_rate",
    "seed": "seed",
    "data_seed": "seed",
    "max_length": "max_length",
    "packing": "packing",
    "packing_strategy": "packing",
    "gradient_checkpointing": "checkpoint",
    "activation_checkpointing": "checkpoint",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "trust_remote_code": "trust_remote_code",
    "save_steps": "save_steps",
    "eval_steps": "eval_steps",
    "eval_strategy": "eval_dataset",
    "do_eval": "eval_dataset",
    "resume_from_checkpoint": "--resume",
    "overwrite_output_dir": "--overwrite",
    "model_init_kwargs": "model_kwargs",
    "optim": "optimizer",
    "deepspeed": "engine",
    "fsdp": "engine",
    "fsdp_config": "engine",
    "accelerator_config": "engine",
    "parallelism_config": "sp_size",
}
"""Trainer arguments that have a name of their own in the recipe; giving both would let one be ignored."""

OTHER_NAMES = {
    "model": "model_name_or_path model_name model_id base_model pretrained_model",
    "dataset": "data data_path data_file train_file train_data dataset_name dataset_path datasets",
    "eval-dataset": "eval_data eval_file val_data validation_file test_file",
    "max-length": "seq_len seq_length sequence_len sequence_length max_seq_length max_seq_len context_length "
    "cutoff_len block_size model_max_length tokens",
    "lora": "rank r lora_r lora_rank adapters peft use_lora use_peft",
    "qlora": "load_in_4bit quantization bits 4bit nf4 bnb_4bit",
    "offload": "cpu_offload activation_offloading host_offload offload_checkpoints",
    "engine": "fsdp deepspeed zero strategy distributed",
    "nproc": "gpus num_gpus n_gpus devices nproc_per_node num_processes world_size ranks",
    "gpus": "nproc num_gpus n_gpus devices nproc_per_node num_processes world_size ranks",
    "steps": "iters num_steps max_iters train_steps", "epochs": "num_epochs train_epochs",
    "learning-rate": "lr peak_lr", "batch-size": "bs micro_batch_size batch train_batch_size",
    "gradient-accumulation": "grad_accum grad_accumulation accumulate accumulation_steps gas",
    "output": "out out_dir save_dir result", "recipe": "config yaml cfg", "resume": "continue restart resume_from",
    "dry-run": "plan check preview", "packing": "sample_packing pack", "overwrite": "force", "help-all": "all",
    "attention": "attn flash_attn flash_attention attn_impl attention_implementation",
    "optimizer": "opt", "checkpoint": "recompute checkpointing activation_checkpoint remat ac",
    "tile": "tiles chunks chunk_size tile_size num_tiles shards num_shards", "heads": "kv_heads head_groups",
    "report-to": "wandb tracker logger", "sp-size": "ulysses sp sequence_parallel sequence_parallel_size",
    "cp-size": "ring cp context_parallel context_parallel_size", "warmup-steps": "warmup warmup_ratio",
    "lr-scheduler-type": "scheduler lr_scheduler schedule", "fit-memory": "memory device gpu_memory vram",
    "device": "memory gpu accelerator vram gpu_memory", "host-memory": "ram cpu_memory host_ram",
    "dtype": "precision bf16 fp16 torch_dtype mixed_precision",
}  # fmt: skip
"""Other programs' names of flags and keys; some belong to one command only."""

NAMED_MODEL_KEYS = {
    "trust_remote_code": "trust_remote_code",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "config": "model",
    "rope_scaling": "rope_scaling",
    "attn_implementation": "attention",
}
"""Arguments of ``from_pretrained`` that have a name of their own in the recipe."""

IMPLEMENTATIONS = {"flash": "flash_attention_2", "flash3": "flash_attention_3"}
"""Transformers' names of what a plan calls otherwise."""

OPTIMIZER_ARGUMENTS: dict[str, dict[str, str]] = {
    "adamw": {"optim": "adamw_torch_fused"}, "adamw-8bit": {"optim": "adamw_bnb_8bit"}, "lion": {"optim": "lion_32bit"},
    "sgd-momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
}  # fmt: skip
"""The trainer's arguments for optimizers that a plan calls otherwise."""

FOUR_BIT = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip
"""The weights of ``qlora``, as planned: doubly quantised NF4, multiplied in bf16."""

SECRETS = ("hub_token", "push_to_hub_token", "token", "use_auth_token")
"""Arguments of the trainer and of ``from_pretrained`` that would be saved with the run, for everybody to read."""

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def key(default: Any, help: str, metavar: str | None = None, *, listed: bool = False, **bounds: Any) -> Any:
    """A key of a recipe that is also a flag of ``seqtile train``, in ``--help`` if ``listed``, else ``--help-all``."""
    flag: dict[str, Any] = {"metavar": metavar, "hidden": not listed}
    return Field(default, description=help, json_schema_extra={"flag": flag}, **bounds)


class CheckedModel(BaseModel):
    """A part of a recipe; refuses true and false where a number is meant, and access tokens, which would be saved."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _sane(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, bool) and bool not in alternatives(cls.model_fields[name].annotation):
            raise UserError("recipe.invalid-value", f"recipe key {name!r} cannot be {str(value).lower()}")
        if isinstance(value, str) and _TOKEN.search(value):
            raise UserError(
                "recipe.secret",
                f"recipe key {name!r} contains an access token, which would be saved with the run; set HF_TOKEN "
                "instead",
            )
        if isinstance(value, str) and not value.strip():
            raise UserError("recipe.invalid-value", f"recipe key {name!r} is empty")
        return value


class LoraRecipe(CheckedModel):
    """Low-rank adapters (PEFT): rank, scale, dropout and which linear layers get one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    r: int = Field(16, ge=1, le=65536, description="rank")
    alpha: float | None = Field(None, gt=0, description="scale; default twice the rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    target_modules: str | tuple[str, ...] = Field("all-linear", description="linear layers with an adapter")
    start: str | None = Field(None, description="directory of adapters to go on from, with their settings")

    @model_validator(mode="before")
    @classmethod
    def _of_start(cls, values: dict[str, Any]) -> dict[str, Any]:
        directory = values.get("start") if isinstance(values, dict) else None
        if not isinstance(directory, str):
            return values
        try:
            saved = json.loads((Path(directory).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
            saved_lora = {"r": saved["r"], "alpha": saved["lora_alpha"], "dropout": saved["lora_dropout"],
                          "target_modules": saved["target_modules"]}  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                "lora.start-without-adapters", f"lora.start {directory!r} has no LoRA adapters (adapter_config.json)"
            ) from None
        return {**saved_lora, **values}


def _key_of(name: str) -> tuple[Any, Any]:
    """Type and default of an option's key."""
    if name == "checkpoint":
        return str, "layer"
    if name == "loss":  # the trainer's head runs in tiles in any case
        return Literal["tiled"], "tiled"
    if name == "loss_tile":  # TRL's head has a default number of tokens
        return int | None, Field(None, ge=WRITTEN[name].least)
    return file_type(name, choices=True), DEFAULTS[name]


OptionKeys: type[CheckedModel] = create_model(
    "OptionKeys",
    __base__=CheckedModel,
    tiled_mlp=(bool, Field(True, description="run modules in tiles")),
    **{name: _key_of(name) for name, how in WRITTEN.items() if how.recipe},  # type: ignore[call-overload]
)
"""The keys that are options of tiling, each with its type."""


def options_of_keys(keys: Any) -> TilingOptions:
    """The :class:`TilingOptions` of an ``OptionKeys``.

    Raises:
        UserError: an invalid value.
    """
    values = {name: getattr(keys, name) for name in type(keys).model_fields}
    if not values.pop("tiled_mlp"):
        values["blocks"] = "none"
    if values["loss_tile"] is None:  # TRL's own tiled head
        del values["loss"], values["loss_tile"]
    return TilingOptions(**values)


def keys_of(options: TilingOptions) -> dict[str, Any]:
    """The keys and values that :func:`options_of_keys` gives ``options`` for."""
    values: dict[str, Any] = {"tiled_mlp": options.tiled}
    for name, how in WRITTEN.items():
        value = getattr(options, name)
        if how.recipe:
            values[name] = list(value) if isinstance(value, tuple) else value
    if not options.tiled:
        values["blocks"] = DEFAULTS["blocks"]
    if options.loss is None:
        values["loss_tile"] = None
    values["loss"], values["checkpoint"] = "tiled", options.checkpoint or "none"
    return values


def recipe_keys() -> list[str]:
    """Every key of a recipe."""
    return [key for key in [*Recipe.model_fields, *OptionKeys.model_fields] if key != "options"]


class Recipe(CheckedModel):
    """One training run.

    Fields left at None are filled by :func:`resolve` with a value that depends on the others. ``trainer`` and
    ``model_kwargs`` pass anything else through to TRL's ``SFTConfig`` and to ``from_pretrained``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = key(DEMO, "Model directory or Hub id (default: a demo)", "PATH", listed=True)
    dataset: str = key(DEMO, "JSONL, CSV, Parquet or text; directory, Hub id", "PATH", listed=True)
    dataset_split: str = Field("train", description="split of a directory or a Hub dataset")
    dataset_config: str | None = Field(None, description="configuration of a directory or a Hub dataset with several")
    eval_dataset: str | None = key(None, "Dataset to evaluate on; keeps the best checkpoint", "PATH")
    eval_split: str = Field("test", description="split of eval_dataset")
    eval_config: str | None = Field(None, description="configuration of eval_dataset")
    skip_bad_rows: bool = key(False, "Skip and count dataset rows without trainable tokens")
    streaming: bool = key(False, "Read the dataset while training; needs steps")
    output: str | None = key(None, "Output directory (default runs/NAME)", "DIR", listed=True)

    max_length: int = key(8192, "Tokens per sequence", "TOKENS", listed=True, ge=2)
    packing: bool | Literal["bfd", "bfd_split", "wrapped"] | None = key(
        None, "Pack documents: true (bfd), bfd_split, wrapped or false", "HOW"
    )
    options: InstanceOf[TilingOptions]
    attention: str | None = key(None, "flash, flash3, sdpa, eager or a kernel on the Hub", "NAME")
    lora: LoraRecipe | None = key(None, "LoRA rank, or r=16,alpha=32,dropout=0.05", "R", listed=True)
    qlora: bool = key(False, "LoRA on 4-bit weights (default rank 16)", listed=True)
    engine: Literal["single", "ddp", "fsdp2", "zero2", "zero3"] = key(
        "single", "single, ddp, fsdp2, zero2 or zero3", "NAME", listed=True
    )
    nproc: int | None = key(None, "Processes over all nodes (default: all devices)", "N", listed=True, ge=1)
    sp_size: int = key(1, "Processes per sequence with Ulysses, under zero3", "N", ge=1)
    cp_size: int = key(1, "Processes per sequence with ring attention, under fsdp2", "N", ge=1)
    engine_offload: tuple[Literal["optimizer", "weights"], ...] = Field(
        (), description="what the engine keeps in host memory"
    )

    steps: int | None = key(None, "Optimizer steps (default: one epoch)", "N", ge=1)
    epochs: float | None = key(None, "Passes over the dataset (default 1)", "N", gt=0)
    batch_size: int = key(1, "Sequences per process and micro-batch", "N", ge=1)
    gradient_accumulation: int = key(1, "Micro-batches per optimizer step", "N", ge=1)
    optimizer: str = key(
        "adamw", "adamw, adamw-8bit, lion, sgd, adafactor, sgd-momentum, or one of Transformers'", "NAME"
    )
    learning_rate: float | None = key(None, "Peak rate (default 2e-5; LoRA 2e-4)", "RATE", listed=True, gt=0)
    seed: int = key(0, "Seed of weights, data order and dropout", "N", ge=0, lt=2**32)
    save_steps: int | None = key(None, "Steps between checkpoints (default 500)", "N", ge=1)
    eval_steps: int | None = key(None, "Steps between evaluations (default save_steps, or 500)", "N", ge=1)

    dtype: Literal["mixed", "auto", "float32", "bfloat16", "float16"] | None = key(
        "mixed", "mixed (fp32 weights, or bf16 of a frozen base; bf16 products), float32, bfloat16, float16, or "
        "auto: the checkpoint's", "NAME",
    )  # fmt: skip
    rope_scaling: dict[str, Any] | None = Field(None, description="such as {rope_type: yarn, factor: 4}")
    trust_remote_code: bool = key(False, "Run code from the model's repository")
    model_kwargs: dict[str, Any] = Field(default_factory=dict, description="other arguments of from_pretrained")
    trainer: dict[str, Any] = Field(default_factory=dict, description="other arguments of TRL's SFTConfig")

    fit: bool | str | None = Field(
        None, description="choose memory settings by the plan; '16GiB' sets the device memory; None: on accelerators"
    )
    on_oom: Literal["stop", "retry"] = key("stop", "Out of memory: stop, or retry with smaller tiles", "WHAT")

    report: bool = Field(True, description="write report.json to OUTPUT/report")

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "options" in values:
            return values
        keys = {key: values[key] for key in values if key in OptionKeys.model_fields}
        others = {key: value for key, value in values.items() if key not in keys}
        try:
            return {**others, "options": options_of_keys(OptionKeys(**keys))}
        except ValidationError as error:
            raise first_problem(error) from None

    @model_serializer(mode="wrap")
    def _spread(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        options = self.options
        bare = write(self.model_copy(update={"options": None}))
        flat: dict[str, Any] = {}
        for key, value in bare.items():
            flat |= keys_of(options) if key == "options" else {key: value}
        return flat

    @field_validator("packing", mode="before")
    @classmethod
    def _known_packing(cls, packing: Any) -> Any:
        packing = packing.lower() if isinstance(packing, str) else packing
        if isinstance(packing, str) and packing not in ("bfd", "bfd_split", "wrapped", "true", "false"):
            raise UserError(
                "option.unknown-choice",
                f"got packing {shown(packing)}, expected true, false, bfd, bfd_split or wrapped",
            )
        return packing

    @field_validator("fit")
    @classmethod
    def _known_fit(cls, fit: bool | str | None) -> bool | str | None:
        if isinstance(fit, str) and not parse_bytes(fit):
            raise UserError(
                "fit.malformed",
                f"got fit {shown(fit)}, expected true, false or each device's memory, such as '16GiB'",
            )
        return fit

    @field_validator("trainer", "model_kwargs")
    @classmethod
    def _no_second_name_and_no_secret(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        named = NAMED_TRAINER_KEYS if info.field_name == "trainer" else NAMED_MODEL_KEYS
        for key, value in values.items():
            if key in named:
                raise UserError(
                    "recipe.key-of-its-own",
                    f"{info.field_name}.{key} has its own recipe key; use {named[key]!r} instead",
                )
            if key in SECRETS and isinstance(value, str):
                raise UserError(
                    "recipe.secret",
                    f"{info.field_name}.{key} is a secret, which would be saved with the run; set HF_TOKEN instead, "
                    "or run: hf auth login",
                )
        return values

    def changed(self, **keys: Any) -> Recipe:
        """The same recipe with other values of some keys, which are not checked against each other again."""
        inside = {key: keys.pop(key) for key in [*keys] if key in OptionKeys.model_fields}
        options = options_of_keys(OptionKeys(**{**keys_of(self.options), **inside}))
        return self.model_copy(update={**keys, "options": options})

    @property
    def tiled_mlp(self) -> bool:
        """Whether any block runs in tiles."""
        return self.options.tiled

    @property
    def loss_tile(self) -> int | None:
        """Tokens per tile of the head; None leaves them to TRL."""
        size = self.options.loss_tile
        return size if isinstance(size, int) else None

    @property
    def tiling(self) -> TilingOptions:
        """The options for :func:`seqtile.apply`: all but the head and plain checkpoints, which are the trainer's."""
        checkpoint = None if self.options.checkpoint == "layer" else self.options.checkpoint
        options = replace(self.options, loss=None, loss_tile="auto", checkpoint=checkpoint)
        return options if options.tiled else options.without_blocks()

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        return self.options.checkpoint is not None

    @property
    def split(self) -> int:
        """Processes that share one sequence, by whichever way."""
        return max(self.sp_size, self.cp_size)

    @property
    def rows_of_a_step(self) -> int:
        """Rows that one optimizer step takes, of all processes and micro-batches."""
        return (self.nproc or 1) // self.split * self.batch_size * self.gradient_accumulation

    @property
    def attn_implementation(self) -> str:
        """Transformers' name of the attention; the model's own default is sdpa where it has it."""
        if self.attention == "flash" and self.cp_size > 1:
            return "sdpa"  # a ring computes PyTorch's attention, which runs the flash kernel
        return IMPLEMENTATIONS.get(self.attention or "sdpa", self.attention or "sdpa")

    @property
    def weights_kwargs(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained``: ``model_kwargs``, and what has a name of its own here."""
        attention = {} if self.attention is None else {"attn_implementation": self.attn_implementation}
        return {**self.model_kwargs, **attention, **({"quantization_config": dict(FOUR_BIT)} if self.qlora else {})}

    @property
    def optimizer_arguments(self) -> dict[str, str]:
        """The trainer's arguments for the optimizer."""
        return OPTIMIZER_ARGUMENTS.get(self.optimizer, {"optim": self.optimizer})

    @property
    def combination(self) -> Combination:
        """The input of :data:`seqtile.rules.RULES`."""
        offloads = bool(self.trainer.get("activation_offloading"))
        return Combination(
            options=self.options, engine=self.engine, processes=self.nproc, sp_size=self.sp_size, cp_size=self.cp_size,
            engine_offload=self.engine_offload, adapters=self.lora is not None,
            attention=self.attn_implementation,
            recomputes=self.recomputes, max_length=self.max_length, packing=self.packing,
            trainer=self.trainer, offloaders=("trainer.activation_offloading",) if offloads else (),
        )  # fmt: skip

    @property
    def is_demo(self) -> bool:
        """Whether this run trains the embedded model on the embedded text."""
        return self.model == DEMO and self.dataset == DEMO

    @property
    def compares(self) -> bool:
        """Whether the run ends with one step tiled and untiled, as the demo does."""
        return self.is_demo and self.tiled_mlp and self.engine == "single" and not self.options.weights_on_host


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML recipe, unchecked: plain values, each given once.

    Raises:
        UserError: no such file, not YAML, a key given twice, or not a mapping.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_OnceLoader)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            "recipe.unreadable", f"cannot read recipe {str(path)!r} ({reason}); expected a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # the second: an invalid date
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(
            "recipe.not-yaml", f"recipe {str(path)!r}{line} is not valid YAML: {problem}; expected 'key: value' lines"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            "recipe.not-a-mapping",
            f"recipe {str(path)!r} contains a {type(values).__name__}, expected 'key: value' lines",
        )
    return values


def build_recipe(file_values: Mapping[str, Any], flag_values: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """One checked recipe from a recipe file's values and the flags given, which win.

    Peers' spellings are folded in each source by itself first, so that ``--tile 4096`` overrides a recipe's
    ``tiled_mlp_num_shards: 8`` while the two in one place contradict each other.

    Returns:
        The recipe, and sentences on settings that change nothing.

    Raises:
        UserError: an unknown key (with the closest known one), a value out of range, a contradiction.
    """
    notes: list[str] = []
    merged: dict[str, Any] = {}
    for values, source in ((file_values, "the recipe"), (flag_values, "the flags")):
        folded = _fold_peer_keys(dict(values), source, notes)
        if folded.get("tiled_mlp") is False:  # a flag that turns off the recipe's tiling
            merged = {key: value for key, value in merged.items() if key not in OF_BLOCKS}
        if isinstance(folded.get("trainer"), Mapping) and isinstance(merged.get("trainer"), Mapping):
            folded["trainer"] = {**merged["trainer"], **folded["trainer"]}
        merged.update(folded)
    if merged.get("qlora") and merged.get("lora") is None:
        merged["lora"] = {}
    _refuse_unknown(merged, recipe_keys(), "")
    if isinstance(merged.get("lora"), Mapping):
        _refuse_unknown(merged["lora"], list(LoraRecipe.model_fields), "lora.")
    if ("model" in merged) != ("dataset" in merged):
        present, missing = ("model", "dataset") if "model" in merged else ("dataset", "model")
        raise UserError(
            "recipe.model-without-dataset",
            f"got {present} {merged[present]!r} without a {missing}; set --{missing}, or --{missing} {DEMO} for the "
            "demo's",
        )
    try:
        return Recipe(**merged), notes
    except ValidationError as error:
        raise first_problem(error) from None


RECIPE_RULES: tuple[tuple[str, Callable[[Recipe], object], str], ...] = (
    ("steps.with-epochs", lambda r: r.steps is not None and r.epochs is not None,
     "got both steps {r.steps} and epochs {r.epochs:g}; use one"),
    ("qlora.with-quantization-config", lambda r: r.qlora and "quantization_config" in r.model_kwargs,
     "got both qlora and model_kwargs.quantization_config; use one"),
    ("eval-steps.without-eval-dataset", lambda r: r.eval_steps is not None and r.eval_dataset is None,
     "got eval_steps {r.eval_steps} without eval_dataset; add --eval-dataset"),
    ("eval-steps.not-multiple-of-save-steps", lambda r: r.eval_steps and r.save_steps and r.eval_steps % r.save_steps,
     "eval_steps {r.eval_steps} is not a multiple of save_steps {r.save_steps}, so the best step may have no "
     "checkpoint; use a multiple, or drop save_steps"),
    ("streaming.demo", lambda r: r.streaming and r.dataset == DEMO,
     "streaming needs a dataset, and the demo's is in memory; drop it"),
    ("streaming.without-steps", lambda r: r.streaming and r.steps is None,
     "streaming needs a number of steps; add --steps"),
    ("streaming.with-packing", lambda r: r.streaming and r.packing not in (None, False, "wrapped"),
     "packing {r.packing!r} needs the length of every row, which a stream does not provide; use --packing wrapped "
     "or false"),
    ("streaming.with-sp-size", lambda r: r.streaming and r.sp_size > 1,
     "streaming does not support sp_size {r.sp_size}; drop one"),
    ("on-oom.retry-untiled", lambda r: r.on_oom == "retry" and not r.tiled_mlp,
     "on_oom 'retry' lowers the tile size, which needs tiled_mlp true; drop one"),
    # The first handles an out-of-memory too; the second leaves no complete checkpoint.
    ("on-oom.retry-with-trainer-key",
     lambda r: r.on_oom == "retry" and (r.trainer.get("auto_find_batch_size") or r.trainer.get("save_only_model")),
     "on_oom 'retry' does not support trainer.auto_find_batch_size and save_only_model; drop one"),
)  # fmt: skip
"""Recipe keys that exclude each other; :data:`seqtile.rules.RULES` has the other rules."""


def resolve(recipe: Recipe) -> Recipe:
    """The same recipe with every value that is decided here and not by the machine filled in.

    Raises:
        UserError: two settings of which one would be ignored, or that cannot run together.
    """
    for code, matches, sentence in RECIPE_RULES:
        if matches(recipe):
            raise UserError(code, sentence.format(r=recipe))
    check_combination(recipe.combination)
    rate = 3e-3 if recipe.is_demo else 2e-4 if recipe.lora else 2e-5
    filled: dict[str, Any] = {"learning_rate": recipe.learning_rate or rate}
    if recipe.is_demo or recipe.on_oom == "retry":  # our head, whose tile can be reduced
        filled["loss_tile"] = recipe.loss_tile or (512 if recipe.is_demo else TRL_LOSS_TILE)
    if recipe.steps is None and recipe.epochs is None:
        filled |= {"steps": DEMO_STEPS} if recipe.is_demo else {"epochs": 1.0}
    return recipe.changed(**filled)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write ``recipe`` so that :func:`read_recipe` gives it back."""
    header = "# All settings of this run; run it again with: seqtile train --recipe THIS_FILE --output DIR\n"
    write_whole(path, header + yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))


def parse_lora(text: str) -> dict[str, Any]:
    """``"16"``, ``"r=16,alpha=32,dropout=0.05"`` or ``"r=16,target_modules=q_proj+v_proj"`` as the recipe's ``lora``.

    Names of layers are joined by ``+``; any other text is PEFT's, a regular expression of whole names.
    """
    settings = [setting.strip() for setting in text.split(",") if setting.strip()]
    if len(settings) == 1 and "=" not in settings[0]:
        settings = [f"r={settings[0]}"]
    pairs = [setting.partition("=") for setting in settings]
    if not pairs or not all(key.strip() and value.strip() for key, _, value in pairs):
        raise UserError(
            "lora.malformed", f"got --lora {text!r}, expected a rank such as 16 or 'r=16,alpha=32,dropout=0.05'"
        )
    values: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    targets = values.get("target_modules", "")
    if re.fullmatch(r"\w+(\+\w+)*", targets):
        values["target_modules"] = targets.split("+")
    return values


def _fold_peer_keys(values: dict[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Replace other trainers' spellings by ours; ``values`` come from one source (a file or the flags)."""
    switches = {
        f"{key}: {values[key]}": parse_bool(values.pop(key), key)
        for key in ("tiled_mlp", "use_tiled_mlp")
        if values.get(key) is not None
    }
    if values.get("blocks") == "none":
        switches[f"blocks: {values.pop('blocks')}"] = False
    if len(set(switches.values())) > 1:
        raise UserError(
            "tile.contradicting-switches", f"{source}: got both {' and '.join(map(repr, switches))}; keep one"
        )
    if switches:
        values["tiled_mlp"] = next(iter(switches.values()))
    shards = values.pop("tiled_mlp_num_shards", None)
    if shards is not None:
        if values.get("tile") is not None:
            raise UserError(
                "tile.given-twice",
                f"{source}: got both tile {values['tile']!r} and tiled_mlp_num_shards {shards!r}; keep one",
            )
        values["tile"] = f"shards:{shards}"
    if values.get("tile") is None:
        values.pop("tile", None)
    if (original := values.pop("tiled_mlp_use_original_mlp", None)) is not None:
        parse_bool(original, "tiled_mlp_use_original_mlp")
        notes.append(f"tiled_mlp_use_original_mlp: {original} has no effect: tiles always run the model's own MLP")
    return values


def _refuse_unknown(values: Mapping[str, Any], known: list[str], prefix: str) -> None:
    """One sentence for the first key that is not known."""
    for key in map(str, values):
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        by_meaning = [ours.replace("-", "_") for ours, names in OTHER_NAMES.items() if key in names.split()]
        by_meaning = [ours for ours in by_meaning if ours in known]
        if not prefix and (key in NAMED_TRAINER_KEYS or by_meaning):
            hint = f"use {NAMED_TRAINER_KEYS.get(key) or by_meaning[0]!r}"
        elif close:
            hint = f"did you mean {prefix + close[0]!r}?"
        else:
            hint = f"known keys: {', '.join(sorted(known))}"
        raise UserError("recipe.unknown-key", f"unknown recipe key {prefix + key!r}; {hint}")


def first_problem(error: ValidationError) -> UserError:
    """The first of pydantic's complaints as one sentence: key, what was given, what was expected."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "value_error":
        return cast(UserError, problem["ctx"]["error"])  # the validators raise no other
    key = ".".join(str(field) for field in problem["loc"])
    expected = problem["msg"][0].lower() + problem["msg"][1:]
    return UserError("recipe.invalid-value", f"recipe key {key!r}: got {shown(problem['input'])}; {expected}")


class _OnceLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses a key given twice, of which YAML would silently drop one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                problem = f"key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def alternatives(annotation: Any) -> set[Any]:
    """The types of which a value may be one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(alternatives(member) for member in typing.get_args(annotation)))
    return {annotation}


def parse_bool(value: Any, name: str) -> bool:
    """True or false in the spellings that YAML and other trainers' flags use."""
    if isinstance(value, bool):
        return value
    spelling = str(value).strip().lower()
    if spelling not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise UserError("option.not-a-bool", f"got {name} {value!r}, expected true or false")
    return spelling in ("true", "yes", "on", "1")


def shown(value: Any) -> str:
    """A value in a message, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
