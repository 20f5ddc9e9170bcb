"""What an engine makes of one rank's step: shards, gathered copies, buffers, and what moves to the host.

Only what no fake run can see is a formula here; every constant stands in :data:`CONSTANTS` with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seqtile.planner.accelerators import GIB
from seqtile.planner.layer_structure import Counts
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS
from seqtile.planner.names import STATE_BYTES
from seqtile.planner.phases import ATTENTION, OPTIMIZER_STEP, Phase
from seqtile.planner.request import Request

BUFFERS = "engine buffers"
CONTEXT = "context and allocator"


@dataclass(frozen=True)
class Constant:
    """A number that is not computed from the model.

    Attributes:
        low, expected, high: its bounds.
        source: where it comes from, or that it is assumed.
    """

    low: float
    expected: float
    high: float
    source: str


CONSTANTS: dict[str, Constant] = {
    "context": Constant(
        0.45 * GIB, 0.75 * GIB, 1.25 * GIB,
        "assumed: driver context, loaded kernels, product workspaces (32 MiB on Hopper); not measured here",
    ),
    "communicator": Constant(
        0.25 * GIB, 0.5 * GIB, 1.5 * GIB, "assumed: NCCL's channels with more than one GPU; not measured here"
    ),
    "fragmentation": Constant(
        0.0, 0.03, 0.10,
        "assumed: share of the activations that the caching allocator cannot use; expandable segments are near the low "
        "end; not measured here",
    ),
    "host process": Constant(
        2 * GIB, 4 * GIB, 8 * GIB, "assumed: Python, PyTorch and the driver, per process; not measured here"
    ),
    "in flight": Constant(
        1, 2, 3, "assumed: checkpointed hidden states on the device while others are copied: one going, one coming"
    ),
}  # fmt: skip

NF4_BYTES = 0.5 + 0.127 / 8
"""Bytes per element of a 4-bit weight with doubly quantised scales (QLoRA, arXiv 2305.14314, section 3)."""

ZERO3_BUCKET = 500_000_000
"""Most elements of DeepSpeed's gradient bucket when it is not set; ``"auto"`` makes it hidden * hidden."""


def on_device(request: Request, counts: Counts, terms: Mapping[str, float], phase: str) -> dict[str, float]:
    """The terms of one part of the step on one rank's device, in bytes.

    Args:
        request: engine and settings.
        counts: of the whole model.
        terms: what the fake run of one rank's tokens held, all weights on it.
        phase: the part of the step.
    """
    found = dict(terms)
    if request.sharded:
        _shard(request, counts, found, phase)
    elif request.engine == "ddp":
        # The reducer's buckets are a second copy of every gradient, there from the start.
        found[BUFFERS] = counts.trained * (4.0 if request.setup().dtype.itemsize == 4 or request.lora else 2.0)
    if request.qlora:
        found[WEIGHTS] = found.get(WEIGHTS, 0.0) - counts.matrices * (2 - NF4_BYTES)
        found[BUFFERS] = found.get(BUFFERS, 0.0) + 2.0 * counts.largest  # the matrix that is multiplied, in bf16
    if request.sp_size > 1 and Phase.read(phase).part == ATTENTION:
        # Heads are scattered and the sequence gathered: query, keys, values and output once more beside themselves.
        keys = max(counts.key_heads, request.sp_size)
        width = 2 * counts.heads + 2 * keys
        found[BUFFERS] = found.get(BUFFERS, 0.0) + 2.0 * width * counts.head_width * found.pop("tokens", 0.0)
    found.pop("tokens", None)
    return found


def _shard(request: Request, counts: Counts, found: dict[str, float], phase: str) -> None:
    """Weights, gradients and states in ``gpus`` parts; in bf16 what is gathered for a layer and the one after it."""
    ranks = request.gpus
    trained = counts.trained
    frozen = counts.weights - trained
    # The fake run holds every weight and gradient in the type that is gathered (adapters in fp32).
    size = float(request.setup().dtype.itemsize)
    gradient_share = found.get(GRADIENTS, 0.0) / max(1.0, trained * (4.0 if request.lora else size))
    master = 4.0 * trained / ranks
    low = size < 4  # else the weights that are gathered are the ones that are updated
    copies = size * (counts.weights if request.engine == "zero3" and low else frozen) / ranks
    gathered = size * (2 * counts.layer + counts.root)
    bucket = size * min(ZERO3_BUCKET, counts.hidden**2) if request.engine == "zero3" else size * counts.layer
    # FSDP2 reduces the outermost unit's gradients last, so that they are whole until the backward ends.
    whole = counts.layer + (counts.root if request.engine == "fsdp2" else 0)
    layer_gradients = 0.0 if request.lora else size * whole
    now = Phase.read(phase)
    update = now.part in (OPTIMIZER, OPTIMIZER_STEP)
    if "weights" in request.engine_offload:
        copies = 0.0
        master = 0.0
    if "optimizer" in request.engine_offload and request.engine == "zero3":
        master = 0.0  # DeepSpeed keeps the fp32 weights with the optimiser
    found[WEIGHTS] = master + copies
    states = STATE_BYTES[request.optimizer] * trained / ranks
    found[OPTIMIZER] = 0.0 if "optimizer" in request.engine_offload else states
    bytes_each = 4.0 if request.engine == "fsdp2" else size
    shards = bytes_each * gradient_share * trained / ranks
    found[GRADIENTS] = 0.0 if "optimizer" in request.engine_offload and request.engine == "zero3" else shards
    found[BUFFERS] = 0.0 if update else gathered + bucket + (layer_gradients if now.direction == "backward" else 0.0)


def offload_checkpoints(terms: dict[str, float], layers: int, in_flight: float, share: float = 1.0) -> float:
    """Take ``share`` of what checkpoints keep off the device but for what is in flight; returns the moved bytes."""
    moved = 0.0
    for name in {CHECKPOINTS, KEPT} & terms.keys():
        held = terms[name]
        terms[name] = min(held, (1 - share) * held + (in_flight if share else 0.0) * held / max(1, layers))
        moved += held - terms[name]
    return moved


def on_host(request: Request, counts: Counts, checkpoints: Mapping[str, float]) -> dict[str, float]:
    """Bytes on the host of one node, all its ranks together, without the processes themselves.

    Args:
        request: engine and settings.
        counts: of the whole model.
        checkpoints: bytes that one rank's checkpoints keep, by what they are for.
    """
    found: dict[str, float] = {}
    if request.options.offload:
        found.update((name, held * request.gpus) for name, held in checkpoints.items() if held)
    if "optimizer" in request.engine_offload:
        states = STATE_BYTES[request.optimizer] + (4.0 if request.engine == "zero3" else 0.0)
        found[OPTIMIZER] = states * counts.trained
        found[GRADIENTS] = 4.0 * counts.trained
    if "weights" in request.engine_offload:
        found[WEIGHTS] = 2.0 * counts.weights if request.engine == "zero3" else 4.0 * counts.weights
    return found
