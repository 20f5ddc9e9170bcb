"""Bytes that one step moves between and inside nodes, from the engine's collectives."""

from __future__ import annotations

from collections.abc import Callable

from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request


def bytes_between_nodes(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """Bytes that leave one node in an optimizer step of ``tokens`` tokens a row, by what they are; none on one node.

    Ranks are numbered node by node. Weights and gradients go round a ring of all ranks, of which one link leaves each
    node: an all-gather or reduce-scatter of ``W`` bytes puts ``(P - 1) / P * W`` on it. Of sequences that ranks share:

    * ring attention (``cp_size`` C): each rank sends keys and values on C - 1 times, forward, in a checkpoint's
      recompute, and backward, and their fp32 gradients C times; a ring of neighbours leaves a node on one link, and
      where rings and nodes do not end at the same ranks, two rings leave some node;
    * Ulysses (``sp_size`` S): query, keys, values and output go all-to-all, each rank's part to S - 1 others, of which
      those on other nodes count; where heads are fewer than ranks, keys and values are repeated.

    Nodes may differ then, and the bytes are those of the node that sends the most.

    Collectives that use more links at once (NCCL's trees, several rings) share these bytes out and move no fewer.
    """
    if request.nodes == 1:
        return {}
    sent = _weights_and_gradients(request, counts)
    if request.cp_size > 1 and (links := _most(request, _links)):
        sent |= {what: links * value for what, value in _of_a_ring(request, counts, tokens).items()}
    elif request.sp_size > 1 and (pairs := _most(request, _pairs)):
        sent["attention heads"] = _exchanged(request, counts, tokens) * pairs / request.sp_size
    return sent


def bytes_inside_a_node(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """Bytes that one device sends to others of its node in such a step; none where it is alone there.

    The same rings as :func:`bytes_between_nodes`: each of their links carries as much, inside of a node as out of it.
    """
    if request.per_node == 1:
        return {}
    sent = _weights_and_gradients(request, counts)
    if request.cp_size > 1:
        sent |= _of_a_ring(request, counts, tokens)
    elif request.sp_size > 1:
        beside = (min(request.sp_size, request.per_node) - 1) / request.sp_size
        sent["attention heads"] = _exchanged(request, counts, tokens) * beside
    return sent


def _weights_and_gradients(request: Request, counts: Counts) -> dict[str, float]:
    """Bytes of a step on each link of the ring of all ranks."""
    size, ranks = float(request.setup().dtype.itemsize), request.gpus
    sent_fraction, batches = (ranks - 1) / ranks, request.accumulation
    if request.engine == "ddp":
        return {"gradients": 2 * sent_fraction * 4.0 * counts.trained}
    if request.engine == "zero2":
        return {
            "weights": sent_fraction * size * counts.trained,
            "gradients": sent_fraction * size * counts.trained * batches,
        }
    reduced = batches if request.engine == "zero3" else 1  # FSDP2 sums the micro-batches' gradients first
    return {
        # Forward, and once more for the recompute and backward; FSDP2 keeps what is outside of layers, or a part of it.
        "weights": 2 * sent_fraction * size * counts.weights * batches,
        "gradients": sent_fraction * size * counts.trained * reduced,
    }


def _of_a_ring(request: Request, counts: Counts, tokens: int) -> dict[str, float]:
    """Bytes of ring attention on each link between neighbours."""
    keys, turns = 2.0 * counts.key_heads * counts.head_width, request.cp_size - 1
    rows, size = _rows(request, counts, tokens), float(request.setup().dtype.itemsize)
    return {
        "keys and values": rows * keys * size * turns * _passes(request, counts),
        "gradients of keys and values": rows * keys * 4.0 * (turns + 1),
    }


def _exchanged(request: Request, counts: Counts, tokens: int) -> float:
    """Bytes of each rank's queries, keys, values and outputs in Ulysses' exchanges, its own part included."""
    width = (2 * counts.heads + 2 * max(counts.key_heads, request.sp_size)) * counts.head_width
    return _rows(request, counts, tokens) * width * request.setup().dtype.itemsize * _passes(request, counts)


def _rows(request: Request, counts: Counts, tokens: int) -> float:
    """Tokens of one rank in all attention layers of a step."""
    return tokens / request.split * request.batch * request.accumulation * counts.attentions


def _passes(request: Request, counts: Counts) -> float:
    """Forward and backward, and a checkpoint's recompute; on average where checkpoints differ by layer."""
    plain = counts.attentions_with(None, request.options.checkpoint)
    return 3 - plain / max(1, counts.attentions)


def _most(request: Request, sends: Callable[[int, range, range], int]) -> int:
    """The largest sum of any node, of what ``sends`` counts for a rank, its node's ranks and those of its sequence."""
    per_node, split = request.per_node, request.split
    nodes = [range(first, first + per_node) for first in range(0, request.gpus, per_node)]
    starts = {rank: rank - rank % split for rank in range(request.gpus)}
    return max(sum(sends(rank, node, range(starts[rank], starts[rank] + split)) for rank in node) for node in nodes)


def _links(rank: int, node: range, sequence: range) -> int:
    """Whether a rank's next one in the ring of its sequence is on another node."""
    return sequence[(rank - sequence.start + 1) % len(sequence)] not in node


def _pairs(rank: int, node: range, sequence: range) -> int:
    """How many of the ranks that share a rank's sequence are on other nodes."""
    return len(sequence) - len(range(max(node.start, sequence.start), min(node.stop, sequence.stop)))
