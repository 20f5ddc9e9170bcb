"""What one step moves between nodes, in bytes, from the engine's collectives."""

from __future__ import annotations

from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request


def bytes_between_nodes(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """Bytes that leave one node in an optimiser step of ``tokens`` tokens a row, by what they are; none on one node.

    Ranks are numbered node by node. Weights and gradients go round a ring of all ranks, of which one link leaves each
    node: an all-gather or reduce-scatter of ``W`` bytes puts ``(P - 1) / P * W`` on it. Of sequences that ranks share:

    * ring attention (``cp_size`` C): each rank sends keys and values on C - 1 times, forward, in a checkpoint's
      recompute, and backward, and their fp32 gradients C times; a ring of neighbours leaves a node on one link;
    * Ulysses (``sp_size`` S): query, keys, values and output go all-to-all, each rank's part to S - 1 others, of which
      those on other nodes count; where heads are fewer than ranks, keys and values are repeated.

    Collectives that use more links at once (NCCL's trees, several rings) share these bytes out and move no fewer.
    """
    if request.nodes == 1:
        return {}
    size, ranks = float(request.setup().dtype.itemsize), request.gpus
    part, batches = (ranks - 1) / ranks, request.accumulation
    found: dict[str, float] = {}
    if request.engine == "ddp":
        found["gradients"] = 2 * part * 4.0 * counts.trained
    elif request.engine == "zero2":
        found["weights"] = part * size * counts.trained
        found["gradients"] = part * size * counts.trained * batches
    else:
        # Forward, and once more for the recompute and backward; FSDP2 keeps what is outside of layers, or a part of it.
        found["weights"] = 2 * part * size * counts.weights * batches
        reduced = batches if request.engine == "zero3" else 1  # FSDP2 sums the micro-batches' gradients first
        found["gradients"] = part * size * counts.trained * reduced
    rows = tokens / request.split * request.batch * batches * counts.attentions  # of one rank, in all layers
    recompute = 0 if request.options.checkpoint is None else 1
    if request.cp_size > 1 and _leaves(request.cp_size, request.per_node):
        keys, turns = 2.0 * counts.key_heads * counts.head_width, request.cp_size - 1
        found["keys and values"] = rows * keys * size * turns * (2 + recompute)
        found["gradients of keys and values"] = rows * keys * 4.0 * (turns + 1)
    elif request.sp_size > 1 and _leaves(request.sp_size, request.per_node):
        width = 2 * counts.heads + 2 * max(counts.key_heads, request.sp_size)
        elsewhere = (request.sp_size - request.per_node) / request.sp_size
        exchanged = rows * width * counts.head_width * size * (2 + recompute)
        found["attention heads"] = exchanged * request.per_node * elsewhere
    return found


def _leaves(split: int, per_node: int) -> bool:
    """Whether the ranks that share a sequence are on several nodes."""
    return split > per_node or per_node % split != 0
