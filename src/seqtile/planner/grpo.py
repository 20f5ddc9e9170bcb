"""A step of GRPO: what it holds beside a supervised one of the same rows.

Its loss runs on fake tensors as the rest of the step does. What stands beside the step is a formula here: the frozen
reference of a model whose every weight trains, and a generator that shares the device. TRL 1.16.0 is what is followed
(``trl/trainer/grpo_trainer.py``, ``trl/models/utils.py``, ``trl/generation/vllm_generation.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS
from seqtile.planner.phases import OPTIMIZER_STEP, Phase

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seqtile.planner.layer_structure import Counts
    from seqtile.planner.request import Request

ROLLOUTS = "rollouts"
REFERENCE = "reference model"
GENERATOR_WEIGHTS = "generator's weights"
GENERATOR_CACHE = "generator's cache"
GENERATOR_REST = "sleeping generator"
STANDING = (REFERENCE, GENERATOR_WEIGHTS, GENERATOR_CACHE, GENERATOR_REST)
GENERATION = "generation"
SCORING = "reference's log-probabilities"

CLIP = 0.2
"""Of the ratio, which moves no byte."""


@dataclass(frozen=True)
class Grpo:
    """How completions are generated and scored.

    Attributes:
        group: completions of each prompt.
        reference: a frozen reference (``beta`` above 0): a model of its own, or the adapters off.
        generator: one of :data:`seqtile.planner.names.GENERATORS`.
        memory: of a generator that shares the device: a fraction of the device's memory, as vLLM's
            ``gpu_memory_utilization``, or bytes where it is above 1; None for as much as one completion needs.
    """

    group: int = 8
    reference: bool = False
    generator: str = "server"
    memory: float | None = None

    @property
    def on_device(self) -> bool:
        """Whether an inference engine of its own is on the device."""
        return self.generator in ("colocate", "sleep")

    @property
    def passes(self) -> int:
        """Forwards without gradient over each row: the reference's, and the policy's beside what vLLM reported."""
        return int(self.reference) + int(self.generator != "model")

    @property
    def numbers(self) -> int:
        """Fp32 numbers that are kept for each token: those of each pass, vLLM's own and the ratio to them."""
        return self.passes + (0 if self.generator == "model" else 2)


def check_grpo(request: Request) -> None:
    """Refuse a GRPO step that TRL's trainer would not run.

    Raises:
        UserError: with what to do instead.
    """
    grpo = request.grpo
    if grpo is None:
        return
    if request.sp_size > 1:
        raise UserError(f"TRL's GRPO does not split sequences, got sp-size {request.sp_size}; use --sp-size 1")
    together = request.batch * request.accumulation * request.gpus
    if together % grpo.group:
        raise UserError(
            f"an update has {together} completions (batch size {request.batch} x {request.accumulation} micro-batches "
            f"x {request.gpus} GPUs), which are no whole groups of {grpo.group}; use --grad-accumulation "
            f"{math.lcm(grpo.group, request.batch * request.gpus) // (request.batch * request.gpus)}"
        )


@dataclass(frozen=True)
class Rollouts:
    """What generation and scoring leave for the steps of an update.

    Attributes:
        rows: completions with their prompts, of all micro-batches of one rank.
        numbers: fp32 numbers for each token.
        reference: whether one of them is the reference's log-probability.
    """

    rows: int
    numbers: int
    reference: bool


def make_rollouts(rollouts: Rollouts, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Tokens and mask ``[rows, tokens]``, one advantage a row, and the numbers of each token."""
    import torch

    shape = (rollouts.rows, tokens)
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    numbers = {f"number {i}": torch.zeros(shape, device=device) for i in range(rollouts.numbers)}
    return {
        "ids": ids,
        "mask": torch.ones_like(ids),
        "advantages": torch.zeros(rollouts.rows, device=device),
        **numbers,
    }


def policy_loss(model: Any, rollouts: Rollouts, batch: Mapping[str, Tensor]) -> Tensor:
    """GRPO's loss of one micro-batch, by the tiled head; every token is taken to be trained."""
    from torch.nn import functional as F

    from seqtile.models.lm_loss.tiled_loss import deferred_logits
    from seqtile.ops.lm_loss.kept_tokens import IGNORED
    from seqtile.ops.lm_loss.policy import importance_ratios

    ids, mask = batch["ids"], batch["mask"]
    labels = ids.masked_fill(mask == 0, IGNORED)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    with deferred_logits(model):
        scores = model(input_ids=ids).logits.scores(targets, entropy=True)
    log_probs = scores.log_probs
    old = log_probs.detach() if rollouts.numbers == int(rollouts.reference) else batch["number 0"]
    ratios = importance_ratios(log_probs, old, mask)
    advantages = batch["advantages"].unsqueeze(-1)
    each = -(ratios * advantages).min(ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    if rollouts.reference:
        beyond = batch[f"number {rollouts.numbers - 1}"] - log_probs
        each = each + beyond.exp() - beyond - 1
    loss: Tensor = ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    return loss


def other_parts(request: Request, parts: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """The parts of an update that come before its steps, beside those of the step."""
    found = dict(parts)
    grpo = request.grpo
    if grpo is None:
        return found
    rows = next((terms[ROLLOUTS] for terms in parts.values() if ROLLOUTS in terms), 0.0)
    standing = {name: parts[OPTIMIZER_STEP].get(name, 0.0) for name in (WEIGHTS, OPTIMIZER)}
    if grpo.generator != "server":
        found[GENERATION] = {**standing, ROLLOUTS: rows}
    if _own_reference(request):
        scored = [
            {name: held for name, held in terms.items() if name not in (CHECKPOINTS, KEPT, GRADIENTS)}
            for phase, terms in parts.items()
            if Phase.read(phase).direction == "forward"
        ]
        found[SCORING] = max(scored, key=lambda terms: sum(terms.values()))
    return found


def add_terms(
    request: Request, counts: Counts, found: dict[str, float], phase: str, tokens: int, asleep: float
) -> None:
    """Add what stands beside one part of an update, in bytes on one rank's device.

    Args:
        request: with the engine.
        counts: of the whole model.
        found: the terms of that part.
        phase: which part.
        tokens: of each row.
        asleep: bytes that a generator keeps while it sleeps.
    """
    grpo = request.grpo
    if grpo is None:
        return
    if _own_reference(request):
        size, ranks = _reference_size(request), request.gpus if request.engine in ("fsdp2", "zero3") else 1
        found[REFERENCE] = size * counts.weights / ranks
        if phase == SCORING and request.engine == "fsdp2":
            # trl/models/utils.py, prepare_fsdp: one unit, so that all of it is gathered at once.
            found[REFERENCE] += request.setup().dtype.itemsize * counts.weights
    if phase in (GENERATION, SCORING) and request.engine == "fsdp2":
        found.pop(GRADIENTS, None)  # gone with the update before
    if grpo.generator == "sleep" and phase != GENERATION:
        found[GENERATOR_REST] = asleep
    elif grpo.on_device:
        found[GENERATOR_WEIGHTS] = generator_weights(request, counts)
        found[GENERATOR_CACHE] = cache_bytes(request, counts, tokens)
    elif grpo.generator == "model" and phase == GENERATION:
        # Every row of the update at once, and one layer's keys or values while a token is appended to them.
        rows = request.batch * request.accumulation
        found[GENERATOR_CACHE] = rows * row_cache(request, counts, tokens) * (1 + 0.5 / max(1, counts.attentions))


def _own_reference(request: Request) -> bool:
    return request.grpo is not None and request.grpo.reference and request.lora is None


def _reference_size(request: Request) -> float:
    """Bytes per weight: DeepSpeed casts it as it does the policy, the others keep the type it was loaded in."""
    if request.engine in ("zero2", "zero3") or request.precision == "bfloat16":
        return float(request.setup().dtype.itemsize)
    return 4.0


def row_cache(request: Request, counts: Counts, tokens: int) -> float:
    """Keys and values of one row of ``tokens``: each attention layer whole, no window, no compression."""
    size = 4 if request.precision == "float32" else 2
    return 2.0 * counts.attentions * counts.key_heads * counts.head_width * size * tokens


def generator_weights(request: Request, counts: Counts) -> float:
    """Of an inference engine of its own: the whole model in bf16, or in 4 bits where the policy is."""
    from seqtile.planner.sharding_terms import NF4_BYTES

    own = counts.weights - (counts.trained if request.lora is not None else 0)
    packed = counts.matrices - (counts.trained if request.lora is not None else 0) if request.qlora else 0
    return (4.0 if request.precision == "float32" else 2.0) * (own - packed) + NF4_BYTES * packed


def cache_bytes(request: Request, counts: Counts, tokens: int) -> float:
    """Cache of a generator on the device: what its memory leaves beside its weights; one row's without a memory."""
    assert request.grpo is not None
    memory = request.grpo.memory
    if memory is None:
        return row_cache(request, counts, tokens)
    whole = memory if memory > 1 else memory * request.device.memory
    return max(0.0, whole - generator_weights(request, counts))


def longest_sequence(request: Request, counts: Counts) -> int | None:
    """Tokens of the longest sequence that the generator's cache holds; None where nothing bounds it."""
    if request.grpo is None or not request.grpo.on_device or request.grpo.memory is None:
        return None
    return int(cache_bytes(request, counts, 1) / row_cache(request, counts, 1))


def notes_of(request: Request, counts: Counts) -> list[str]:
    """What is to be said of a plan of GRPO, in sentences."""
    grpo = request.grpo
    if grpo is None:
        return []
    reference = "no reference (beta 0)"
    if grpo.reference:
        reference = "a reference model of its own" if _own_reference(request) else "the reference is the adapters off"
    found = [f"GRPO, groups of {grpo.group}: {reference}; every token, prompt or completion, is taken to be trained"]
    row = longest_sequence(request, counts)
    if row is not None:
        found.append(f"the generator's cache holds {row:,} tokens at a time, less what vLLM takes to run a batch")
    elif grpo.on_device:
        found.append("the generator's cache holds one completion of that length at a time, the least it starts with")
    if grpo.on_device:
        found.append("the generator beside the trainer is a formula, not measured")
    return found
