"""Run by ms-swift's own Python: what tests/swift_stand_in.py stands for, as JSON."""

import dataclasses
import inspect
import json

import swift
from swift.arguments import BaseArguments, InferArguments, SftArguments
from swift.callbacks import TrainerCallback, callbacks_map
from swift.trainers.mixin import SwiftMixin
from swift.utils import parse_args
from transformers import HfArgumentParser


def fields(kind: type) -> dict[str, str]:
    wanted = ("external_plugins", "callbacks", "use_tiled_mlp", "tiled_mlp_num_shards")
    return {field.name: str(field.default_factory) for field in dataclasses.fields(kind) if field.name in wanted}


print("FACTS " + json.dumps({
    "version": swift.__version__,
    "fields": {kind.__name__: fields(kind) for kind in (BaseArguments, SftArguments, InferArguments)},
    "imports_plugins": list(inspect.signature(BaseArguments._import_external_plugins).parameters),
    "is_first": "_import_external_plugins" in BaseArguments.__post_init__.__code__.co_names,
    "parser": HfArgumentParser.__name__ in parse_args.__code__.co_names,
    "rest": "remaining_args" in HfArgumentParser.parse_args_into_dataclasses.__code__.co_varnames,
    "callbacks": type(callbacks_map).__name__,
    "makes_callbacks": list(inspect.signature(TrainerCallback.__init__).parameters),
    "looks_them_up": "callbacks_map" in SwiftMixin._get_callbacks.__code__.co_names,
}))  # fmt: skip
