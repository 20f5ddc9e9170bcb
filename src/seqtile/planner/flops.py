"""FLOPs and copies of a step, and its estimated time, from rates measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass

from seqtile.options import TilingOptions, layer_policies
from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request
from seqtile.tiling import chunk_sizes

PEAK_TFLOPS = 989.0
"""Nominal TFLOPS of the H100 that the rates below were measured on (one NVIDIA H100 80GB HBM3, torch 2.11, bf16)."""

PRODUCTS_TFLOPS, ATTENTION_TFLOPS, COPIED_PER_SECOND = 764.0, 565.0, 2.993e12
"""Large products; cuDNN's causal attention (606 to 625 forward, 515 to 573 backward); bytes read and written."""

LAYER_BYTES, LOGIT_BYTES = {"kernels": 580, "pytorch": 915}, {"kernels": 8, "pytorch": 73}
"""Bytes that other kernels move for each token and feature of a layer, and for each logit: norms, rotary embedding and
loss by kernels of their own, or operator by operator in PyTorch.

From steps of 32,768 tokens with 2 and with 4 layers, less their products and attention."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one step of one sequence (a product and a sum are two).

    Attributes:
        products: FLOPs of products with weights.
        attention: FLOPs of products of queries with keys, and of scores with values.
        copied: bytes that every other kernel reads and writes.
    """

    products: float
    attention: float
    copied: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention

    def seconds(self, tflops: float, ranks: int) -> float:
        """Time of the step on ``ranks`` devices that share the sequence, each as much slower as ``tflops`` are fewer.

        Within 10 % of the steps that were measured on an H100, of 4 layers at 32,768 tokens and of 32 at 131,072.
        Communication, copies to the host and the optimizer are not in it.
        """
        computed = self.products / PRODUCTS_TFLOPS + self.attention / ATTENTION_TFLOPS
        return (computed / 1e12 + self.copied / COPIED_PER_SECOND) * PEAK_TFLOPS / tflops / ranks


def count_work(request: Request, counts: Counts, tokens: int, keep: float | None = 0.0) -> Work:
    """Operations of a step of ``tokens`` tokens per row.

    Each weight costs 2 a token forward, 2 for the input's gradient, 2 for its own where it trains; a checkpoint
    computes decoder layers once more but for their last product, and attention's kernel once more unless its output
    is kept. A tiled MLP computes gate and up once more, in a checkpoint's recompute or without one, but for the share
    ``keep`` of its tiles (None: it runs untiled). A causal attention costs ``2 * tokens**2 * heads * width`` forward,
    and 2.5 times that backward (FlashAttention recomputes its scores). The scan of a layer with a state is not counted:
    it is linear in the tokens, and small beside the layer's products. A step of GRPO computes the logits again in the
    backward, and every row once more for each forward that scores it; generation is not counted. Where checkpoints
    differ by layer, each layer is taken for the same share of what is computed again. Segments of chunked layers
    project queries, keys and values of their first layer once more where it has attention, and compute the last product
    of every layer but their last one again.
    """
    rows, trained_rows, attended = _of_rows(request, tokens)
    inside = counts.active - counts.vocabulary * counts.hidden
    trained = 2 if request.lora is None else 0
    options = request.options
    in_chunks = is_in_chunks(options, request.row_tokens(tokens), request.batch)
    policies = ("layer",) * counts.layers if in_chunks else layer_policies(options.checkpoint, counts.layers)
    checkpointed = counts.layers - policies.count(None)
    again = 2 * checkpointed / counts.layers
    # Early stop: the last product of each layer is not computed again, unless an adapter on it saves its input.
    spared = 2 * counts.largest_product if request.lora is None else 0
    head = counts.vocabulary * counts.hidden
    scored, logits = (0, 0) if request.grpo is None else (request.grpo.passes, 2)
    segments = -(-counts.layers // options.segment) if in_chunks else 0
    spared *= segments or checkpointed
    products: float = rows * (inside * (4 + trained + again) - spared) + trained_rows * head * (4 + trained + logits)
    if options.tiled and keep is not None and not in_chunks:
        # Gate and up are computed again, in a layer's recompute or without one, except in tiles that keep them.
        computed_again = counts.layers - checkpointed - counts.layers * keep
        products += rows * 4 * counts.largest_product * computed_again
    # Of the segments' first layers as many attend as of all: right but for hybrid models, by a thousandth of a step.
    projections = counts.hidden * counts.head_width * (counts.heads + 2 * counts.key_heads)
    products += rows * 2 * projections * segments * counts.attentions / counts.layers
    products += scored * 2 * (rows * inside + trained_rows * head)
    attention = 4.0 * attended * counts.head_width * counts.heads * counts.attentions
    layer_bytes = LAYER_BYTES["kernels" if options.tiled or request.liger else "pytorch"]
    logit_bytes = LOGIT_BYTES["pytorch" if options.loss is None else "kernels"]
    # What is not computed again is not copied again: a third of a layer's step.
    layers = counts.layers - (counts.layers - checkpointed) / 3
    copied = rows * layers * counts.hidden * layer_bytes + trained_rows * counts.vocabulary * logit_bytes
    recomputed = counts.attentions_with("layer", "layer" if in_chunks else options.checkpoint)
    attention *= 1 + 2.5 + scored + recomputed / max(1, counts.attentions)
    return Work(products, attention, copied)


def _of_rows(request: Request, tokens: int) -> tuple[int, int, float]:
    """(tokens of the rows, of these in the head, pairs of query and key) of a step on samples of ``tokens`` tokens.

    With shared prompts a row has its prompt once, the head computes completions, and each query reads its own sample.
    """
    prompt = 0 if request.grpo is None else request.grpo.prompt
    if not 0 < prompt < tokens:
        return request.batch * tokens, request.batch * tokens, request.batch * tokens**2 / 2
    assert request.grpo is not None
    group, completion, shared = request.grpo.group, tokens - prompt, prompt - 1
    pairs = shared**2 / 2 + group * (completion + 1) * (shared + (completion + 1) / 2)
    return request.batch * request.row_tokens(tokens), request.batch * group * completion, request.batch * pairs


def is_in_chunks(options: TilingOptions, tokens: int, batch: int) -> bool:
    """Whether ``options`` cut sequences of ``tokens`` tokens into more than one chunk."""
    return options.chunk is not None and len(chunk_sizes(tokens, batch, options.chunk).sizes) > 1


def forward_of_layers(request: Request, counts: Counts, tokens: int) -> Work:
    """Operations of the decoder layers' forward alone; a third of what they copy in a step."""
    rows, _, attended = _of_rows(request, tokens)
    products = rows * 2.0 * (counts.active - counts.vocabulary * counts.hidden)
    attention = 4.0 * attended * counts.head_width * counts.heads * counts.attentions
    return Work(products, attention, rows * counts.layers * counts.hidden * LAYER_BYTES["kernels"] / 3)


def streaming_note(request: Request, counts: Counts, frozen: float) -> str:
    """What copying ``frozen`` bytes of weights to the device in each pass costs, in a sentence; "" without rates."""
    tflops, link = request.device.tflops, request.device.host_link
    if tflops is None or link is None:
        return ""
    seconds, tokens = frozen / link, 128
    while forward_of_layers(request, counts, tokens).seconds(tflops, 1) < seconds:
        tokens += max(128, tokens // 16 // 128 * 128)
    return (
        f"frozen weights are copied to the device in each forward and each backward, {frozen / 2**30:,.1f} GiB in "
        f"{seconds:.2g} s at {link / 1e9:g} GB/s; by estimate that is hidden from {tokens:,} tokens a row on"
    )
