"""Chunks through decoder layers under every engine; the second rank's first batch is one chunk.

Engines that free a layer's weights run the layers of a segment one at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from grid.cases import RECOMPUTED, Case

SHORT: dict[str, Any] = {"lengths": (13, 3), "more": {"chunk": 5}}
SEGMENTS: dict[str, Any] = {"lengths": (13, 3), "more": {"chunk": 5, "segment": 2}}
SHARED: dict[str, Any] = {
    "shared": True, "scored": True, "tiled_loss": True, "lengths": (40, 9), "more": {"chunk": 16},
}  # fmt: skip
"""The second rank's sequences are too short to share anything."""

_CASES = [
    Case("chunks", "chunks", **SHORT, micro_steps=2, steps=2),
    Case("checkpoint", "chunks", **SHORT, **RECOMPUTED, tiled_loss=True),
    Case("reentrant", "chunks", **SHORT, checkpoint="reentrant"),
    Case("lora", "chunks", **SHORT, **RECOMPUTED, adapters=("q_proj", "v_proj", "up_proj")),
    Case("lora-no-input-gradient", "chunks", **SHORT, adapters=("k_proj", "down_proj"), input_gradients=False),
    Case("offload", "chunks", lengths=(13, 3), more={"chunk": 5, "offload": True}, **RECOMPUTED, steps=2),
    Case("segments-offload", "chunks", lengths=(13, 3), more=SEGMENTS["more"] | {"offload": True}, **RECOMPUTED),
    Case("mixtral", "chunks", "mixtral", **SHORT, steps=2),
    Case(
        "mixtral-balance", "chunks", "mixtral", **SHORT, steps=2,
        config={"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    Case("gpt-oss", "chunks", "gpt_oss", **SHORT, **RECOMPUTED),
    Case("segments", "chunks", **SEGMENTS, micro_steps=2, steps=2),
    Case("segments-checkpoint", "chunks", **SEGMENTS, **RECOMPUTED),
    Case("segments-lfm2", "chunks", "lfm2", **SEGMENTS, **RECOMPUTED, micro_steps=2),
    Case("shared-prompts", "chunks", "lfm2", **SHARED, **RECOMPUTED, steps=2),
]  # fmt: skip


def cases_of(prefix: str, options: dict[str, Any], without: str = "", **changes: Any) -> Iterator[Case]:
    """The cases under one engine; its module is the first word of their names.

    Args:
        prefix: of the names.
        options: the engine's own.
        without: what is in the names of cases that this engine does not run.
        **changes: further fields of every case.
    """
    for case in _CASES:
        if not without or without not in case.name:
            yield replace(case, name=f"{prefix}-{case.name}", options=options, **changes)


CASES = [
    # DDP waits for experts that no token reached, and takes no reentrant checkpoint when it looks for them.
    *(
        replace(case, options={}) if "reentrant" in case.name else case
        for case in cases_of("ddp", {"find_unused_parameters": True})
    ),
    *cases_of("fsdp1", {"use_orig_params": True}),
    *cases_of("fsdp1-flat", {"use_orig_params": False}, "lora"),  # a flat parameter is trained as a whole or not at all
    *cases_of("fsdp2", {"unit": "layer"}),
]


class Chunked:
    """Runs each case under the engine that its name begins with."""

    @classmethod
    def run(cls, case: Case, rank: int) -> None:
        importlib.import_module(f"grid.{case.name.partition('-')[0]}").ENGINE.run(case, rank)


ENGINE = Chunked
