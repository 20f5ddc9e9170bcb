"""Effects of an engine on one rank's memory: shards, gathered copies, buffers and offload.

Only what no fake run can see is a formula here; every constant is in :data:`CONSTANTS` with its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from seqtile.checkpointing.host_offload import pool_bytes
from seqtile.devices import GIB
from seqtile.host_weights import PINNED_AT_ONCE
from seqtile.planner.layer_structure import Counts
from seqtile.planner.live_at_peaks import GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.names import DEEPSPEED, STATE_BYTES
from seqtile.planner.phases import ATTENTION, BLOCK, BLOCK_AND_NORMS, HEAD, OPTIMIZER_STEP, Phase
from seqtile.planner.request import Request

BUFFERS = "engine buffers"
POOL = "rest of the pinned pool"
CONTEXT = "context and allocator"

UPDATE = (OPTIMIZER, OPTIMIZER_STEP)
"""The parts of a step after its backward."""


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
    "all-to-all": Constant(
        0.25 * GIB, 1.0 * GIB, 3.25 * GIB,
        "NVIDIA/nccl issue 1685: 1.06 GB before and 4.34 GB after the first all-to-all on eight H100 is the high end; "
        "what is expected is assumed; on top of the communicator with --sp-size",
    ),
    "fragmentation": Constant(
        0.0, 0.03, 0.10,
        "assumed: fraction of the activations that the caching allocator cannot use; expandable segments are near the "
        "low end; not measured here",
    ),
    "host process": Constant(
        2 * GIB, 4 * GIB, 8 * GIB, "assumed: Python, PyTorch and the driver, per process; not measured here"
    ),
    "sleeping generator": Constant(
        0.5 * GIB, 1.0 * GIB, 2.0 * GIB, "assumed: what vLLM's sleep mode leaves on the device; not measured here"
    ),
    "in flight": Constant(
        1, 2, 3, "assumed: checkpointed hidden states on the device while others are copied: one going, one coming"
    ),
}  # fmt: skip

NF4_BYTES = 0.5 + 0.127 / 8
"""Bytes per element of a 4-bit weight with doubly quantised scales (QLoRA, arXiv 2305.14314, section 3)."""

ZERO_BUCKET = 500_000_000
"""Elements of DeepSpeed's gradient bucket, its own default and that of ``seqtile train`` (``reduce_bucket_size``)."""

ZERO3_SUB_GROUP = 1_000_000_000
"""Elements that DeepSpeed updates at a time (``sub_group_size``)."""

ZERO3_LIVE = 1_000_000_000
"""Gathered elements that DeepSpeed keeps for their next use (``max_live_parameters``, ``max_reuse_distance``)."""

ZERO3_PREFETCH = 50_000_000
"""Elements that DeepSpeed gathers ahead, in one flat buffer that each weight is then copied from."""


RING_FORWARD, RING_BACKWARD = (16.0, 8.0), (6.0, 36.0)
"""Bytes that ring attention holds beside attention's own tensors, per token of a rank and element of its query heads,
and of its key-value heads.

Forward: fp32 outputs (the block's, what it is merged into, their difference and the sum: 4 x 4); keys and values
joined to be sent and as they arrive (2 x 2 x 2). Backward: the query's fp32 gradient and the block's (4 + 2); of keys
and values the same (2 x 6), themselves to be sent and arriving (8) and their fp32 gradients too (16).
Read in torch 2.13:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/experimental/_context_parallel/_attention.py
"""


def on_device(request: Request, counts: Counts, terms: Mapping[str, float], phase: Phase) -> dict[str, float]:
    """The terms of one part of the step on one rank's device, in bytes.

    Args:
        request: engine and settings.
        counts: counts of the whole model.
        terms: what the fake run of one rank's tokens held, all weights on it.
        phase: the part of the step.
    """
    device_terms = dict(terms)
    if request.sharded:
        _shard(request, counts, device_terms, phase)
    elif request.engine == "ddp":
        # The reducer's buckets are a second copy of every gradient, there from the start.
        device_terms[BUFFERS] = counts.trained * (4.0 if request.setup().dtype.itemsize == 4 or request.lora else 2.0)
    if request.qlora:
        size = request.setup().dtype.itemsize
        device_terms[WEIGHTS] = device_terms.get(WEIGHTS, 0.0) - packed_weights(request, counts) * (size - NF4_BYTES)
        # What is multiplied is dense: a linear layer, or all experts of a layer.
        dense = max(counts.largest_linear, counts.layer_experts if request.packs_experts else 0)
        device_terms[BUFFERS] = device_terms.get(BUFFERS, 0.0) + size * dense
    if request.options.weights_on_host:
        frozen = frozen_bytes(request, counts)
        device_terms[WEIGHTS] = device_terms.get(WEIGHTS, 0.0) - frozen
        if phase.part not in UPDATE:  # the layer that runs, and the one on its way
            device_terms[BUFFERS] = device_terms.get(BUFFERS, 0.0) + 2 * _largest_layer(request, counts)
    if request.sp_size > 1:
        device_terms[BUFFERS] = device_terms.get(BUFFERS, 0.0) + _ulysses(
            request, counts, device_terms.get("tokens", 0.0), phase
        )
    if request.cp_size > 1 and phase.part == ATTENTION:
        of_queries, of_keys = RING_BACKWARD if phase.direction == "backward" else RING_FORWARD
        of_token = (of_queries * counts.heads + of_keys * counts.key_heads) * counts.head_width
        device_terms[BUFFERS] = device_terms.get(BUFFERS, 0.0) + of_token * device_terms.pop("tokens", 0.0)
    device_terms.pop("tokens", None)
    return device_terms


def frozen_bytes(request: Request, counts: Counts) -> float:
    """Bytes of the decoder layers' frozen matrices, those of ``offload="weights"``: 4-bit ones without their scales."""
    packed = packed_weights(request, counts)
    return 0.5 * packed + float(request.setup().dtype.itemsize) * (counts.matrices - counts.trained - packed)


def packed_weights(request: Request, counts: Counts) -> int:
    """Frozen weights in 4 bits, in elements."""
    return (counts.linears + counts.experts * request.packs_experts) if request.qlora else 0


def _largest_layer(request: Request, counts: Counts) -> float:
    """The same of the largest decoder layer."""
    average_size = frozen_bytes(request, counts) / (counts.matrices - counts.trained)
    return average_size * (counts.layer - counts.trained / counts.layers)


def _ulysses(request: Request, counts: Counts, tokens: float, phase: Phase) -> float:
    """Bytes of scattered heads and gathered sequences beside a rank's own ``tokens``.

    Source: deepspeed/runtime/sequence_parallel/ulysses_sp.py, DeepSpeed 0.19.8.
    """
    of_head = 2.0 * counts.head_width * tokens  # one head of a rank's tokens, in bf16
    keys = max(counts.key_heads, request.sp_size)
    if phase.part == ATTENTION:
        # Query, keys, values and output once more beside themselves; in the forward the output a third time, as it
        # arrives and then in the order of its heads (_partition_global_sequence).
        outputs = 1 if phase.direction == "backward" else 2
        return ((1 + outputs) * counts.heads + 2 * keys) * of_head
    if phase.part in UPDATE:
        return 0.0
    # The backward has the output as attention saved it and as the product behind it did, with other heads and tokens.
    output = counts.heads * of_head
    plain = counts.attentions_with(None, request.options.checkpoint) * output
    if request.options.checkpoint is None:
        return plain
    return plain + (output if phase.part != HEAD and phase.direction in ("recompute", "backward") else 0.0)


def _shard(request: Request, counts: Counts, device_terms: dict[str, float], phase: Phase) -> None:
    """Replace whole weights, gradients and states by a rank's shards; add what the engine gathers and stages."""
    trained = counts.trained
    # The fake run holds every weight and gradient in the type that is gathered (adapters in fp32).
    itemsize = float(request.setup().dtype.itemsize)
    gradient_share = device_terms.get(GRADIENTS, 0.0) / max(1.0, trained * (4.0 if request.lora else itemsize))
    states = 0.0 if "optimizer" in request.engine_offload else STATE_BYTES[request.optimizer] * trained
    device_terms[OPTIMIZER] = states / request.gpus
    backward = phase.direction in ("backward", "recompute") and phase.part not in UPDATE
    head = min(counts.root, counts.vocabulary * counts.hidden)
    sharded = _ShardedPhase(request, counts, phase, itemsize, gradient_share, backward, head)
    device_terms |= _fsdp2_terms(sharded) if request.engine == "fsdp2" else _zero_terms(sharded)


class _ShardedPhase(NamedTuple):
    """One part of a step under an engine that shards weights.

    Attributes:
        request: engine and settings.
        counts: counts of the whole model.
        phase: the part of the step.
        itemsize: bytes of an element of a gathered weight.
        gradient_share: share of the gradients that exist in this part.
        backward: whether a backward or a recompute runs.
        head: elements of the head.
    """

    request: Request
    counts: Counts
    phase: Phase
    itemsize: float
    gradient_share: float
    backward: bool
    head: int


def _fsdp2_terms(sharded: _ShardedPhase) -> dict[str, float]:
    request, counts, phase, itemsize, gradient_share, backward, head = sharded
    ranks, trained, moved = request.gpus, counts.trained, request.engine_offload
    update = phase.part in UPDATE
    terms = {}
    # bf16 copies of fp32 shards are gathered; a frozen model is in bf16 itself.
    shards = (4.0 * trained + itemsize * (counts.weights - trained)) / ranks
    terms[WEIGHTS] = 0.0 if "weights" in moved else shards
    full_backward = backward and request.lora is None
    # The outermost unit's gradients are reduced last, so that they are whole until the backward ends: the head's
    # from its beginning, the embedding's at its end.
    of_root = (head if phase.layer is not None or phase.part == HEAD else counts.root) if full_backward else 0
    # Offloaded, each shard of a gradient goes to the host as soon as it is reduced.
    reduced = max(0.0, gradient_share * trained - of_root)
    terms[GRADIENTS] = 0.0 if "weights" in moved else 4.0 * reduced / ranks
    # A layer's gradients are whole until its backward ends; those of a tiled MLP are among the tile's tensors.
    in_tile = request.options.tiled and phase.part in (BLOCK, BLOCK_AND_NORMS)
    unreduced = of_root + (counts.layer if full_backward and phase.layer is not None and not in_tile else 0)
    if request.accumulation > 1 and not update:
        # Between updates nothing is reduced: every rank keeps every gradient whole, in the type that is gathered
        # (accelerate's no_sync; torch/distributed/fsdp/_fully_shard/_fsdp_param.py, unsharded_accumulated_grad).
        terms[GRADIENTS] = itemsize * trained
        unreduced = counts.largest if full_backward and not in_tile else 0  # added to what is there, one at a time
    # A layer, the next one on its way, and the outermost unit. Behind the layers' forward it is the buffer that
    # the last one was gathered into (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard).
    at_once = 1 if phase.part == HEAD and phase.direction == "forward" else 2
    gathered = 0.0 if update else itemsize * (at_once * counts.layer + counts.root)
    # Only what trains is reduced: of adapters a layer's part, in fp32. The input stands until the next reduction.
    reduction = itemsize * counts.layer if request.lora is None else 4.0 * trained / max(1, counts.layers)
    terms[BUFFERS] = gathered + (reduction if backward and phase.part != HEAD else 0.0) + itemsize * unreduced
    return terms


def _zero_terms(sharded: _ShardedPhase) -> dict[str, float]:
    request, counts, phase, itemsize, gradient_share, backward, head = sharded
    ranks, trained, moved = request.gpus, counts.trained, request.engine_offload
    update = phase.part in UPDATE
    terms = {}
    # DeepSpeed's fp32 weights are copies, of whatever type the others are, and go to the host with the optimizer.
    master = 0.0 if "optimizer" in moved else 4.0 * trained / ranks
    whole = request.engine == "zero2"
    copies = itemsize * counts.weights / (1 if whole else ranks)
    terms[WEIGHTS] = master + (0.0 if "weights" in moved else copies)
    # ZeRO-3 has one buffer of all gradients from set-up on (stage3.py, grad_partitions_flat_buffer), ZeRO-2 one from
    # the first reduction into this rank's part on: at the backward's beginning on the rank that has the last weights
    # (stage_1_and_2.py, copy_grads_in_partition). What one bucket holds is reduced when the backward ends.
    # With accumulation the gradient of earlier batches is there too (independent_gradient_partition_epilogue).
    buckets = trained > ZERO_BUCKET
    buffers = 1.0
    if whole:
        is_reduced = gradient_share > 0 and (update or backward and buckets)
        buffers = 2.0 if request.accumulation > 1 else float(is_reduced)
    terms[GRADIENTS] = 0.0 if "optimizer" in moved else itemsize * buffers * trained / ranks
    # ZeRO-2 has its bucket during the backward (stage_1_and_2.py, setup_buckets), ZeRO-3 from set-up on.
    bucket = itemsize * ZERO_BUCKET if backward or not whole else 0.0
    terms[BUFFERS] = bucket
    if backward and request.lora is None:  # one gradient on its way into the bucket
        terms[BUFFERS] += itemsize * (counts.largest if phase.layer is not None else head)
    is_shared = not whole or trained / ranks < head + counts.layer + ZERO_BUCKET
    if backward and buckets and phase.part != HEAD and is_shared:
        # A bucket is reduced from a copy of it in the order of the ranks (coalesced_collectives.py,
        # reduce_scatter_coalesced); ZeRO-2's only where it belongs to several (stage_1_and_2.py, average_tensor),
        # which is not so at the backward's beginning on a rank whose part is larger.
        terms[BUFFERS] += itemsize * ZERO_BUCKET
    if whole and "optimizer" in moved and request.lora is None:
        # stage_1_and_2.py, temp_grad_buffer_for_gpu_offload: the largest weight's gradient on its way to the host.
        terms[BUFFERS] += itemsize * max(counts.largest, counts.vocabulary * counts.hidden)
    if not whole and not update:
        terms[BUFFERS] += itemsize * _gathered(counts, phase)
    if update and "optimizer" not in moved:
        # A flat copy of the gradients and its fp32 copy (stage3.py, _prepare_fp32_grad_for_sub_group).
        group = trained / ranks if whole else min(ZERO3_SUB_GROUP, trained / ranks)
        terms[BUFFERS] += (itemsize + (4.0 if itemsize < 4 else 0.0)) * group
    return terms


def _gathered(counts: Counts, phase: Phase) -> float:
    """Elements that ZeRO-3 holds gathered, for now or ahead of it, flat buffers and all."""
    kept, ahead = min(ZERO3_LIVE, counts.weights), min(ZERO3_PREFETCH + counts.layer, counts.weights)
    # Measured (benchmarks/plan_engines.py): a layer beside the head is all that is needed at once.
    needed = counts.layer + (counts.vocabulary * counts.hidden if phase.part == HEAD else 0)
    # No prefetch beyond the limit of gathered elements (partitioned_param_coordinator.py, fetch_sub_module):
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/partitioned_param_coordinator.py
    return max(needed, kept) + (ahead if needed < ZERO3_LIVE else 0)


def offload_checkpoints(
    terms: dict[str, float], each: Mapping[str, float], in_flight: float, moved: float, stays: Mapping[str, float]
) -> None:
    """Subtract the share ``moved`` of what checkpoints keep, except what is in flight.

    ``each`` gives the bytes of one checkpoint by their purpose, ``stays`` those that a segment of chunked layers
    computes again, which never move.
    """
    for name in each.keys() & terms.keys():
        size, never_moved = terms[name], stays.get(name, 0.0)
        here = (1 - moved) * max(0.0, size - never_moved) + (in_flight * each[name] if moved else 0.0)
        terms[name] = min(size, here + never_moved)


def on_host(request: Request, counts: Counts, checkpoints: Mapping[str, float], budget: int = 0) -> dict[str, float]:
    """Bytes on the host of one node, all its ranks together, without the processes themselves.

    Args:
        request: engine and settings.
        counts: counts of the whole model.
        checkpoints: bytes that one rank's checkpoints keep, by what they are for.
        budget: most bytes of the pool that they are copied into, 0 for no bound.
    """
    host_terms: dict[str, float] = {}
    if request.options.offload_room:
        host_terms.update((name, size * request.per_node) for name, size in checkpoints.items() if size)
        total = sum(checkpoints.values())
        if total and request.device_type != "cpu":
            host_terms[POOL] = max(0.0, pool_bytes(math.ceil(total), budget) - total) * request.per_node
    if request.options.weights_on_host:  # in whole chunks
        host_terms[WEIGHTS] = math.ceil(frozen_bytes(request, counts) / PINNED_AT_ONCE) * float(PINNED_AT_ONCE)
    if "optimizer" in request.engine_offload:
        states = STATE_BYTES[request.optimizer] + (4.0 if request.engine in DEEPSPEED else 0.0)
        host_terms[OPTIMIZER] = states * counts.trained / request.nodes
        # DeepSpeed's gradients come in the type of the device, and the update reads fp32 ones.
        size = request.setup().dtype.itemsize if request.engine in DEEPSPEED else 0
        host_terms[GRADIENTS] = (4.0 + size) * counts.trained / request.nodes
        if request.engine == "zero2" and request.accumulation > 1:  # stage_1_and_2.py, accumulated_grads_in_cpu
            host_terms[GRADIENTS] += size * counts.trained / request.nodes
        if request.engine == "zero2" and request.lora is None:  # temp_grad_buffer_for_cpu_offload, on every rank
            host_terms[GRADIENTS] += size * max(counts.largest, counts.vocabulary * counts.hidden) * request.per_node
    if "weights" in request.engine_offload:
        host_terms[WEIGHTS] = (2.0 if request.engine == "zero3" else 4.0) * counts.weights / request.nodes
    return host_terms
