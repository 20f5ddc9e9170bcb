"""How much a step computes, and how long that takes at a stated efficiency."""

from __future__ import annotations

from dataclasses import dataclass

from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request

EFFICIENCY = 0.4
"""Share of a device's speed on paper that long-sequence training reaches; assumed, not measured here."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one step of one sequence (a product and a sum are two).

    Attributes:
        products: of matrices with weights.
        attention: of queries with keys, and of scores with values.
    """

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention

    def seconds(self, tflops: float, ranks: int, efficiency: float = EFFICIENCY) -> float:
        """Time of the step on ``ranks`` devices that share the sequence."""
        return self.total / (1e12 * tflops * efficiency * ranks)


def count_work(request: Request, counts: Counts, tokens: int) -> Work:
    """Operations of a step of ``tokens`` tokens per row.

    Each weight costs 2 a token forward, 2 for the input's gradient, 2 for its own where it trains; a checkpoint
    computes decoder layers once more but for their last product, and attention's kernel once more unless its output
    is kept. A causal attention costs ``2 * tokens**2 * heads * width`` forward and 2.5 times that backward
    (FlashAttention recomputes its scores); that of an encoder, which reads the whole row, twice as much. The scan of a
    layer with a state is not counted: it is linear in the tokens, and small beside the layer's products. A step of GRPO
    computes the logits again in the backward, and every row once more for each forward that scores it; generation is
    not counted.
    """
    rows = request.batch * tokens
    inside = counts.active - counts.vocabulary * counts.hidden
    trained = 2 if request.lora is None else 0
    again = 0 if request.options.checkpoint is None else 2
    # Early stop: the last product of each layer is not computed again, unless an adapter on it saves its input.
    spared = again * counts.largest_product if request.lora is None else 0
    head = counts.vocabulary * counts.hidden
    scored, logits = (0, 0) if request.grpo is None else (request.grpo.passes, 2)
    products = rows * (inside * (4 + trained + again) - spared * counts.layers + head * (4 + trained + logits))
    products += scored * rows * 2 * counts.active
    of_a_head = (2.0 if counts.causal else 4.0) * tokens**2 * counts.head_width
    attention = request.batch * of_a_head * counts.heads * counts.attentions
    return Work(products, attention * (1 + 2.5 + scored + (1 if request.options.checkpoint == "layer" else 0)))
