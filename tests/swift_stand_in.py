"""The parts of ms-swift that the plugin relies on; tests/frameworks/test_ms_swift.py compares them with the real ones.

The command line is split by transformers' own parser, as ms-swift does it.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from transformers import HfArgumentParser

callbacks_map: dict[str, Any] = {}


def install(monkeypatch: Any) -> None:
    """``from swift.callbacks import callbacks_map`` finds the one above, empty."""
    callbacks_map.clear()
    package, callbacks = ModuleType("swift"), ModuleType("swift.callbacks")
    callbacks.callbacks_map = callbacks_map  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift", package)
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)


@dataclass
class BaseArguments:
    external_plugins: list[str] = field(default_factory=list)

    def _import_external_plugins(self) -> None:
        for path in self.external_plugins:
            spec = importlib.util.spec_from_file_location("_swift_external", path)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def __post_init__(self) -> None:
        self._import_external_plugins()


@dataclass
class SftArguments(BaseArguments):
    callbacks: list[str] = field(default_factory=list)
    seed: int = 0


@dataclass
class TiledArguments(SftArguments):
    """A version that has the flags, as ms-swift's pull request 7090 adds them."""

    use_tiled_mlp: bool = False
    tiled_mlp_num_shards: int | None = None


@dataclass
class InferArguments(BaseArguments):
    """No callbacks: the plugin's path came from a checkpoint."""


def parse(kind: type[Any], argv: list[str]) -> Any:
    """ms-swift's ``_parse_args``: what is left over is an error."""
    arguments, remaining = HfArgumentParser([kind]).parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if remaining:
        raise ValueError(f"remaining_argv: {remaining}")
    return arguments
