"""The techniques for longer sequences: what each sets, and what it saves.

Everything that goes through them in an order takes them from here: ``--fit`` combines them by what they cost in time
(:mod:`seqtile.planner.chooser`), ``seqtile plan`` proposes the next one (:mod:`seqtile.planner.explain`), and
``benchmarks/technique_ladder.py`` adds one to those before (:data:`ABLATION`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqtile.options import WHOLE_LAYER, changed, offload_of
from seqtile.planner.names import CHECKPOINT_OFFLOAD
from seqtile.planner.request import Request


@dataclass(frozen=True, eq=False)
class Dial:
    """One thing that can be turned on.

    Attributes:
        name: name in a table.
        changes: the options and fields of a request that it sets; ``offload`` and ``engine_offload`` are added to what
            is on the host.
        why: what it saves, in a few words.
        flags: what sets it on the command line; ``--offload`` is made of the request.
    """

    name: str
    changes: Mapping[str, Any]
    why: str
    flags: str = ""

    def on(self, request: Request) -> Request:
        """``request`` with this turned on."""
        changes = dict(self.changes)
        if "engine_offload" in changes:
            changes["engine_offload"] = tuple(dict.fromkeys([*request.engine_offload, *changes["engine_offload"]]))
        if "offload" in changes:
            checkpoints = request.options.checkpoints_on_host or changes["offload"] is True
            weights = changes["offload"] == "weights" or request.options.weights_on_host
            changes["offload"] = offload_of(checkpoints, weights)
        return changed(request, **changes)

    def flags_for(self, request: Request) -> str:
        """The command-line flags that turn it on for ``request``."""
        if not {"offload", "engine_offload"} & self.changes.keys():
            return self.flags
        return offload_flag(self.on(request))


def offload_flag(request: Request) -> str:
    """The flag of ``seqtile plan`` for all that is on the host."""
    checkpoints = request.options.checkpoints_on_host
    words = [CHECKPOINT_OFFLOAD if checkpoints is True else checkpoints] if checkpoints else []
    words += ["weights"] * request.options.weights_on_host
    return f"--offload {shlex.quote(','.join([*words, *request.engine_offload]))}"


TILED_LOSS = Dial("tiled loss", {"loss": "tiled"}, "no [tokens, vocabulary] logits", "--loss tiled")
TILED_MLP = Dial("tiled MLP", {"blocks": "auto"}, "no [tokens, intermediate] tensors", "--tile auto")
LAYER_CHECKPOINTS = Dial(
    "checkpoints of layer inputs", {"checkpoint": "layer"}, "each layer saves its input only", "--checkpoint layer"
)
ATTENTION_SAVED = Dial("attention saved", {"checkpoint": "attention-saved"}, "the recompute skips attention's kernel")
CHECKPOINTS_ON_HOST = Dial("checkpoints on the host", {"offload": True}, "layer inputs in host memory")
REST_OF_LAYER = Dial("rest of the layer in tiles", {"blocks": WHOLE_LAYER}, "norms and projections in tiles")
HEADWISE_ATTENTION = Dial("head-wise attention", {"heads": 1}, "attention one group of heads at a time")
MINIMAL_MEMORY = Dial(
    "minimal memory",
    {**REST_OF_LAYER.changes, **HEADWISE_ATTENTION.changes},
    "norms and projections in tiles, attention by head groups",
    f"--blocks {WHOLE_LAYER} --heads 1",
)

CHUNKS = Dial(
    "chunks of layers",
    {"chunk": "auto", "segment": 1, "blocks": "auto", "heads": None, "state": None},
    "each layer runs on one chunk of the sequence at a time",
    "--chunk auto",
)
CHUNKS_OF_SEGMENTS = Dial(
    "chunks of four layers",
    {**CHUNKS.changes, "segment": 4},
    "four layers run on one chunk of the sequence at a time",
    "--chunk auto --segment 4",
)


def can_stream(request: Request) -> bool:
    """Whether the frozen weights of its layers can wait on the host."""
    return request.engine == "single" and request.lora is not None and request.device_type == "cuda"


BASELINE = Dial(
    "baseline",
    {"blocks": "none", "loss": None, "checkpoint": "layer", "heads": None},
    "activation checkpointing alone",
)
"""Where the ablation starts."""

ABLATION = (
    TILED_LOSS, TILED_MLP, CHECKPOINTS_ON_HOST, ATTENTION_SAVED, REST_OF_LAYER, HEADWISE_ATTENTION,
)  # fmt: skip
"""One on top of the other, as the ablation of ALST does (arXiv 2506.13996, Table 1), and what came after it."""
