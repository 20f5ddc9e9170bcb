"""ms-swift: ``swift sft --external_plugins .../seqtile_plugin.py --use_tiled_mlp true`` trains with tiles of ours.

ms-swift imports a plugin while it builds its arguments, after the command line has been split into what it knows and
the rest (which it refuses), and before it loads the model. The plugin looks up that call, takes its flags out of the
rest, and adds a callback to this run's arguments. No class or function of ms-swift is changed. The callback tiles
the model when the trainer has been built: adapters are in it by then, and no engine (DDP, FSDP, DeepSpeed) has
wrapped it, which happens in ``train()``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._compat import SWIFT_IMPORTS_PLUGINS, checkpoint_before_swift
from seqtile._errors import UserError
from seqtile.options import TilingOptions, unknown_keys
from seqtile.rules import Combination, check_combination

if TYPE_CHECKING:
    from seqtile.integrations.callback import TilingCallback

CALLBACK_NAME = "seqtile"
"""Its name for ``--callbacks``."""

SHARDS = 4
"""Tiles per batch where nothing else is said, as in ms-swift's pull request 7090."""

VARIABLE = "SEQTILE_TILE"
"""Environment variable with any rule of :func:`seqtile.apply`; it switches tiling on by itself."""

FLAG = "--seqtile"
"""Flag with arguments of :func:`seqtile.apply` as a JSON object, as ms-swift takes its own; on by itself too."""

PLUGIN = Path(__file__).parent / "plugins" / "seqtile_plugin.py"
"""The file for ``--external_plugins``. ms-swift puts its folder first on ``sys.path``, so it lies in one of its own."""


def register() -> None:
    """Make ``--callbacks seqtile`` known, and switch it on if this run's command line or environment requests it.

    Called by the plugin file, that is while ms-swift builds its arguments.

    Raises:
        UserError: the settings contradict each other, or a value is wrong.
    """
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found]

    arguments = _local(SWIFT_IMPORTS_PLUGINS, "self")
    remaining = _local("parse_args_into_dataclasses", "remaining_args")
    variable = os.environ.get(VARIABLE)
    kwargs: dict[str, Any] = {"tile": variable or f"shards:{SHARDS}"}
    if hasattr(arguments, "callbacks"):  # else inference, whose checkpoint names the plugin, or a dataloader's process
        requested = settings(arguments, remaining if remaining is not None else [], variable)
        if requested is None:
            logging.getLogger("swift").info(  # ms-swift's own logger, which writes on the first process only
                "the seqtile plugin is loaded but tiles nothing; add --use_tiled_mlp true"
            )
        elif type(arguments).__module__.startswith("swift.megatron"):
            raise UserError(
                "ms-swift.megatron", "megatron has its own models, which seqtile does not tile; use swift sft"
            )
        elif CALLBACK_NAME not in arguments.callbacks:
            arguments.callbacks.append(CALLBACK_NAME)
        kwargs = requested or kwargs
    callbacks_map[CALLBACK_NAME] = partial(make_callback, **kwargs)


def _local(function: str, name: str) -> Any:
    """A local variable of the nearest caller of that name, None if there is no such caller."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def settings(arguments: Any, remaining: list[str], variable: str | None) -> dict[str, Any] | None:
    """The arguments of :func:`seqtile.apply` from a run's settings; None without tiles.

    Args:
        arguments: ms-swift's arguments; where they have ``use_tiled_mlp`` themselves, it is read and switched off, so
            that only one of the two tilings runs.
        remaining: the part of the command line that ms-swift does not know; our flags are taken out of it.
        variable: the value of ``SEQTILE_TILE``.

    Raises:
        UserError: as :func:`register`.
    """
    from transformers.hf_argparser import string_to_bool  # with which ms-swift reads its own flags

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--use_tiled_mlp", nargs="?", const=True, type=string_to_bool)
    parser.add_argument("--tiled_mlp_num_shards", type=int)
    parser.add_argument(FLAG)
    flags, remaining[:] = parser.parse_known_args(remaining)
    use, shards = flags.use_tiled_mlp, flags.tiled_mlp_num_shards
    kwargs = _given(flags.seqtile)
    if hasattr(arguments, "use_tiled_mlp"):
        use = True if arguments.use_tiled_mlp else use
        shards = getattr(arguments, "tiled_mlp_num_shards", None) or shards
        arguments.use_tiled_mlp = False
    named = CALLBACK_NAME in arguments.callbacks
    if use is False:
        if named or variable or kwargs:
            switch = f"--callbacks {CALLBACK_NAME}" if named else f"{VARIABLE}={variable}" if variable else FLAG
            raise UserError(
                "ms-swift.contradicting-switches", f"--use_tiled_mlp false and {switch} contradict each other; drop one"
            )
        return None
    sizes = {
        f"--tiled_mlp_num_shards {shards}": shards is not None,
        f"{VARIABLE}={variable}": variable,
        f"{FLAG} with tile": "tile" in kwargs,
    }
    if len(both := [name for name, is_given in sizes.items() if is_given]) > 1:
        raise UserError("tile.given-twice", f"{' and '.join(both)} both set the tile size; keep one")
    if not (use or named or variable or kwargs):
        if shards is not None:
            raise UserError(
                "ms-swift.shards-without-tiled-mlp", f"--tiled_mlp_num_shards {shards} needs --use_tiled_mlp true"
            )
        return None
    kwargs.setdefault("tile", variable or f"shards:{SHARDS if shards is None else shards}")
    TilingOptions(tile=kwargs["tile"])  # refuses a wrong rule before the model is loaded
    return kwargs


def _given(text: str | None) -> dict[str, Any]:
    """The arguments of :func:`seqtile.apply` in the JSON object of :data:`FLAG`."""
    if text is None:
        return {}
    try:
        kwargs = json.loads(text)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict) or not kwargs:
        raise UserError(
            "ms-swift.not-json",
            f"got {FLAG} {text}, expected arguments of seqtile.apply as JSON, such as {FLAG} '{{\"keep\": 0.5}}'",
        )
    try:
        if sentence := unknown_keys(kwargs):
            raise UserError("option.unknown", sentence)
        options = TilingOptions(**kwargs)
        check_combination(Combination(options, framework="ms-swift"))
    except UserError as error:
        raise UserError(error.code, f"{FLAG}: {error}") from None
    if not options.tiled:
        raise UserError("ms-swift.tiles-nothing", f"{FLAG}: blocks: none tiles nothing; drop {FLAG}")
    return kwargs


def make_callback(args: Any, trainer: Any, **kwargs: Any) -> TilingCallback:
    """The callback as ms-swift makes its own, from the training arguments and the trainer that is being built.

    Args:
        args, trainer: ms-swift's arguments and trainer.
        **kwargs: arguments of :func:`seqtile.apply`.
    """
    from seqtile.integrations.callback import TilingCallback
    from seqtile.ops import tile_checkpoint

    # Its trainer replaces torch's checkpoint by one that is always reentrant, in the whole process.
    if tile_checkpoint.checkpoint is not (checkpoint_before_swift() or tile_checkpoint.checkpoint):  # type: ignore[attr-defined]
        raise UserError(
            "ms-swift.trained-before", "ms-swift has already trained in this process; start a new Python process"
        )
    return TilingCallback(**kwargs)


if __name__ == "__main__":
    sys.stdout.write(f"{PLUGIN}\n")
