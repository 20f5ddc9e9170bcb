"""The time of a step: what it computes, the kernels that it starts, and the copies that no computation hides.

Settings are compared by it. The rates are an H100's (:mod:`seqtile.planner.flops`), which scale with a device's TFLOPS;
a kernel's own time does not.
"""

from __future__ import annotations

from seqtile.options import layer_policies
from seqtile.planner.flops import PEAK_TFLOPS, count_work, forward_of_layers, is_in_chunks
from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import frozen_bytes
from seqtile.tiling import chunk_sizes

KERNEL_SECONDS, CPU_KERNEL_SECONDS = 5.2e-6, 30e-6
"""Time of one small kernel beside large ones: head-wise attention and tiles of norms and projections start 21,200 more
and take 110 ms longer (4 layers of Llama-8B, 32,768 tokens, one H100). On a CPU it is the interpreter's time."""

LAYER_KERNELS, RECOMPUTE_KERNELS, TILE_KERNELS, PASS_KERNELS, CHUNK_KERNELS = 300, 110, 115, 580, 800
"""Operators of a fake step of Llama-8B with adapters: of a layer, of its recompute, of an MLP tile, of a group of
heads, and of a chunk of a layer."""

HOST_LINK = 25e9
"""Bytes a second from pinned host memory where the device does not say: PCIe 4.0 with 16 lanes."""

OFFLOAD_COST, STREAMING_COST = 0.005, 0.02
"""Shares of a step that copies of checkpoints and of frozen weights take though they are hidden: measured on one H100,
and assumed."""

CPU_TFLOPS = 0.1
"""A host's, in round figures."""


def step_seconds(request: Request, counts: Counts, tokens: int, keep: float | None, moved: float = 1.0) -> float:
    """Seconds of a step of ``tokens`` tokens per row; communication and the optimizer are not in it.

    Args:
        request: what is planned, with tiles as numbers where they are known.
        counts: counts of the request's model.
        tokens: tokens of a row, over all ranks that share it.
        keep: share of the tiles that keep gate and up; None where the MLPs run untiled.
        moved: share of what checkpoints keep that waits on the host, where it does.
    """
    device, options = request.device, request.options
    tflops = CPU_TFLOPS if request.device_type == "cpu" else device.tflops or PEAK_TFLOPS
    computed = count_work(request, counts, tokens, keep).seconds(tflops, request.split)
    each = CPU_KERNEL_SECONDS if request.device_type == "cpu" else KERNEL_SECONDS
    seconds = computed + _kernels(request, counts, tokens) * each
    if not (options.offload_room or options.weights_on_host):
        return seconds
    link = device.host_link or HOST_LINK
    forward = forward_of_layers(request, counts, tokens).seconds(tflops, request.split)
    checkpoints = moved * checkpoint_bytes(request, counts, tokens) if options.offload_room else 0.0
    weights = frozen_bytes(request, counts) if options.weights_on_host else 0.0
    # Out and in share no direction of the bus: forward, checkpoints go out and weights come in.
    exposed = max(0.0, max(checkpoints, weights) / link - forward)
    exposed += max(0.0, (checkpoints + weights) / link - (computed - forward))
    share = OFFLOAD_COST * bool(options.offload_room) + STREAMING_COST * options.weights_on_host
    return seconds * (1 + share) + exposed


def checkpoint_bytes(request: Request, counts: Counts, tokens: int) -> float:
    """Bytes that one rank's checkpoints keep: inputs of layers, and attention's output of the layers that save it.

    With chunks: inputs of segments, and keys and values of attending layers except each segment's first layer. States
    at the chunks' starts are left out: 3 % of Qwen3.5-9B's layer inputs with chunks of 8,192 tokens.
    """
    itemsize, rows = request.setup().dtype.itemsize, _tokens_of_a_rank(request, tokens)
    if is_in_chunks(request.options, request.row_tokens(tokens), request.batch):
        segment = request.options.segment
        inputs = -(-counts.layers // segment) * counts.hidden * itemsize
        attentions = sum(attends and number % segment > 0 for number, attends in enumerate(counts.attends))
        keys = 2 * counts.key_heads * counts.head_width * (2 if request.setup().autocast else itemsize)
        return rows * (inputs + attentions * keys)
    policies = layer_policies(request.options.checkpoint, counts.layers)
    inputs = sum(policy is not None for policy in policies) * counts.hidden * itemsize
    saved = counts.attentions_with("attention-saved", request.options.checkpoint)
    return rows * (inputs + saved * attention_bytes(request, counts))


def attention_bytes(request: Request, counts: Counts) -> int:
    """Bytes for each token of an attention's output and its log-sum-exp."""
    setup = request.setup()
    return counts.heads * (counts.head_width * (2 if setup.autocast else setup.dtype.itemsize) + 4)


def _tokens_of_a_rank(request: Request, tokens: int) -> int:
    """Tokens of one rank's batch."""
    return -(-request.row_tokens(tokens) // request.split) * request.batch


def _kernels(request: Request, counts: Counts, tokens: int) -> float:
    """Kernels of a step's decoder layers; those of their attention and products are few, and not told apart."""
    options, rows = request.options, _tokens_of_a_rank(request, tokens)
    row = request.row_tokens(tokens)
    if options.chunk is not None and is_in_chunks(options, row, request.batch):
        return CHUNK_KERNELS * counts.layers * len(chunk_sizes(row, request.batch, options.chunk).sizes)
    tiles = -(-rows // options.tile) if options.tiled and isinstance(options.tile, int) else 1
    policies = layer_policies(options.checkpoint, counts.layers)
    recomputed = sum(policy is not None for policy in policies) * RECOMPUTE_KERNELS
    each = LAYER_KERNELS + TILE_KERNELS * tiles
    passes = counts.attentions * counts.key_heads if options.heads else 0
    return counts.layers * each + recomputed + passes * PASS_KERNELS


def spoken(seconds: float) -> str:
    """``"8.3 s"``, ``"47 s"``, ``"13 min"``, ``"3.1 h"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
