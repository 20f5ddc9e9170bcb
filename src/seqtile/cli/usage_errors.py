"""What the command line's parser refuses, in one sentence like everything else: got, expected, what to do."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from seqtile._errors import UserError

# The parser is click's, or since typer 0.20 typer's own copy of it; either way this is where its errors come from.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


MEANT = {
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
    "dry-run": "plan check preview", "overwrite": "force", "help-all": "all",
    "attention": "attn flash_attn flash_attention attn_impl attention_implementation",
    "optimizer": "opt", "checkpoint": "recompute checkpointing activation_checkpoint remat ac",
    "tile": "tiles chunk chunks chunk_size tile_size num_tiles shards num_shards", "heads": "kv_heads head_groups",
    "report-to": "wandb tracker logger", "sp-size": "ulysses sp sequence_parallel sequence_parallel_size",
    "cp-size": "ring cp context_parallel context_parallel_size", "warmup-steps": "warmup warmup_ratio",
    "lr-scheduler-type": "scheduler lr_scheduler schedule", "fit-memory": "memory device gpu_memory vram",
    "device": "memory gpu accelerator vram gpu_memory", "host-memory": "ram cpu_memory host_ram",
    "dtype": "precision bf16 fp16 torch_dtype mixed_precision",
}  # fmt: skip
"""What other programs call our flags; a command that has none of a name is not asked for it."""


class OneSentence(TyperGroup):
    """The root of the commands, which raises :class:`seqtile.UserError` where the parser would print its usage."""

    arguments: Sequence[str] = ()

    def make_context(self, info_name: str | None, args: list[str], *positional: Any, **extra: Any) -> Any:
        """Parse the root's own flags."""
        self.arguments = list(args)
        with _one_sentence(self.arguments):
            return super().make_context(info_name, args, *positional, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse a command's flags, and run it."""
        with _one_sentence(self.arguments):
            return super().invoke(ctx)


@contextmanager
def _one_sentence(arguments: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which prints the help
            raise
        raise UserError(sentence(error, arguments)) from None


def sentence(error: Any, arguments: Sequence[str]) -> str:
    """A parser's error as one sentence.

    Args:
        error: a ``UsageError`` of click's.
        arguments: those of the command line.
    """
    context = getattr(error, "ctx", None)
    leading_names = itertools.takewhile(lambda argument: not argument.startswith("-"), arguments)
    path = " ".join(["seqtile", *(_path(context) if context is not None else leading_names)])
    where = f"see {path} --help"
    flag, error_class = getattr(error, "option_name", None), type(error).__name__
    parameter = getattr(error, "param", None)
    if error_class == "NoSuchOption":
        return _unknown(str(flag), path, context)
    if error_class == "MissingParameter" and parameter is not None:
        return f"{path} needs {parameter.opts[0]}; give it, {where}"
    if error_class == "BadOptionUsage" and flag is not None:
        value = _value(flag, arguments)
        return f"{flag} takes no value, got {value!r}; {where}" if value else f"{flag} needs a value; {where}"
    message = str(error.format_message()).strip().rstrip(".").replace(". Did you", ", did you")
    if error_class == "BadParameter" and parameter is not None:
        flag = parameter.opts[0]
        return f"got {flag} {_value(flag, arguments)!r}, expected {_expected(error.message)}; {where}"
    message = message[:1].lower() + message[1:]
    return message if message.endswith("?") else f"{message}; {where}"


def _path(context: Any) -> list[str]:
    """Names of the command and of those around it, without the program's."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return names


def _unknown(flag: str, path: str, context: Any) -> str:
    """Of a flag that is none: where the setting is, or what it may have been meant for."""
    from seqtile.train.recipe import NAMED_TRAINER_KEYS, recipe_keys

    name = flag.lstrip("-").replace("-", "_")
    lead = f"{path} has no flag {flag}"
    flags = [] if context is None else [flag for parameter in context.command.params for flag in parameter.opts]
    if path == "seqtile train" and name in recipe_keys():
        return f"{lead}; it is a key of the recipe: write '{name}: VALUE' into a file, and give it with --recipe FILE"
    meant = [f"--{ours}" for ours, names in MEANT.items() if name in names.split() and f"--{ours}" in flags]
    if meant:
        return f"{lead}; here it is called {' or '.join(meant)}"
    key = NAMED_TRAINER_KEYS.get(name, "").replace("_", "-")
    if path == "seqtile train" and key:
        key = key.removeprefix("--")
        return f"{lead}; here it is called --{key}" if f"--{key}" in flags else f"{lead}; it is the recipe's {key!r}"
    close = difflib.get_close_matches(flag, flags, n=2, cutoff=0.75)
    if close:
        return f"{lead}; did you mean {' or '.join(close)}?"
    if path == "seqtile train":
        line = f"trainer: {{{name}: VALUE}}"
        return f"{lead}; an argument of TRL's SFTConfig is written as '{line}' into a file, given with --recipe FILE"
    return f"{lead}; see {path} --help"


def _value(flag: str, arguments: Sequence[str]) -> str:
    """What came with ``flag``, which may be spelled with underscores; the last one counts."""
    flag_value = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            flag_value = value if equals else following
    return flag_value


def _expected(message: str) -> str:
    """What a parser's complaint about a value asks for."""
    text = message.strip().rstrip(".").lower()
    if "valid int" in text:
        return "a whole number"
    if "valid float" in text or "valid number" in text:
        return "a number"
    if "greater" in text:
        return f"a number {text.removeprefix('input should be ')}"
    return text.removeprefix("input should be ")
