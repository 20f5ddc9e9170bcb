"""What one step moves between nodes and inside of them, in bytes, from the engine's collectives."""

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
    found = _weights_and_gradients(request, counts)
    if request.cp_size > 1 and _leaves(request.cp_size, request.per_node):
        found |= _of_a_ring(request, counts, tokens)
    elif request.sp_size > 1 and _leaves(request.sp_size, request.per_node):
        elsewhere = (request.sp_size - request.per_node) / request.sp_size
        found["attention heads"] = _exchanged(request, counts, tokens) * request.per_node * elsewhere
    return found


def bytes_inside_a_node(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """Bytes that one device sends to others of its node in such a step; none where it is alone there.

    The same rings as :func:`bytes_between_nodes`: each of their links carries as much, inside of a node as out of it.
    """
    if request.per_node == 1:
        return {}
    found = _weights_and_gradients(request, counts)
    if request.cp_size > 1:
        found |= _of_a_ring(request, counts, tokens)
    elif request.sp_size > 1:
        beside = (min(request.sp_size, request.per_node) - 1) / request.sp_size
        found["attention heads"] = _exchanged(request, counts, tokens) * beside
    return found


def _weights_and_gradients(request: Request, counts: Counts) -> dict[str, float]:
    """What a step puts on each link of the ring of all ranks."""
    size, ranks = float(request.setup().dtype.itemsize), request.gpus
    part, batches = (ranks - 1) / ranks, request.accumulation
    if request.engine == "ddp":
        return {"gradients": 2 * part * 4.0 * counts.trained}
    if request.engine == "zero2":
        return {
            "weights": part * size * counts.trained,
            "gradients": part * size * counts.trained * batches,
        }
    reduced = batches if request.engine == "zero3" else 1  # FSDP2 sums the micro-batches' gradients first
    return {
        # Forward, and once more for the recompute and backward; FSDP2 keeps what is outside of layers, or a part of it.
        "weights": 2 * part * size * counts.weights * batches,
        "gradients": part * size * counts.trained * reduced,
    }


def _of_a_ring(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """What ring attention puts on each link between neighbours."""
    keys, turns = 2.0 * counts.key_heads * counts.head_width, request.cp_size - 1
    rows, size = _rows(request, counts, tokens), float(request.setup().dtype.itemsize)
    return {
        "keys and values": rows * keys * size * turns * _passes(request),
        "gradients of keys and values": rows * keys * 4.0 * (turns + 1),
    }


def _exchanged(request: Request, counts: Counts, tokens: int) -> float:
    """What each rank has of queries, keys, values and outputs in Ulysses' exchanges, its own part included."""
    width = (2 * counts.heads + 2 * max(counts.key_heads, request.sp_size)) * counts.head_width
    return _rows(request, counts, tokens) * width * request.setup().dtype.itemsize * _passes(request)


def _rows(request: Request, counts: Counts, tokens: int) -> float:
    """Tokens of one rank in all attention layers of a step."""
    return tokens / request.split * request.batch * request.accumulation * counts.attentions


def _passes(request: Request) -> int:
    """Forward and backward, and a checkpoint's recompute."""
    return 2 if request.options.checkpoint is None else 3


def _leaves(split: int, per_node: int) -> bool:
    """Whether the ranks that share a sequence are on several nodes."""
    return split > per_node or per_node % split != 0
