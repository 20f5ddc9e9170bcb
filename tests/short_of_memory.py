"""One step of training in a process that really runs short of memory: ``python short_of_memory.py RECIPE_JSON``.

A process of its own: how much of its memory is free, and in pieces of what size, depends on all that ran in it before.
It logs to standard error and prints one line of JSON: the losses, the tiles of each retry and the final ``loss_tile``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from seqtile.train.recipe import build_recipe
from seqtile.train.run import train

MORE = 400 * 2**20
"""Bytes that the first step may take above what the process holds then."""


class Limit(TrainerCallback):
    """In its first step this process may have ``more`` bytes above what it holds then, free ones given back.

    Not while it saves: every thread that hashes files reserves addresses, which count.
    """

    def __init__(self, more: int) -> None:
        self.more = more

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.more:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + self.more, resource.getrlimit(resource.RLIMIT_AS)[1]))
            self.more = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    recipe, _ = build_recipe(json.loads(sys.argv[1]), {})
    outcome = train(recipe, callbacks=[Limit(MORE)])
    tiles = [again["recipe"]["tile"] for again in outcome.retries]
    print(json.dumps({"losses": outcome.losses, "tiles": tiles, "loss_tile": outcome.recipe.loss_tile}))
