"""The memory of a GRPO step beyond that of a supervised step of the same sequences.

Its loss runs on fake tensors as the rest of the step does. Two terms are formulas here: the frozen reference of a model
whose every weight trains, and a generator that shares the device. They follow TRL 1.16.0
(``trl/trainer/grpo_trainer.py``, ``trl/models/utils.py``, ``trl/generation/vllm_generation.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile._errors import UserError
from seqtile.lm_loss.tiled_loss import deferred_logits
from seqtile.ops.attention.segment_tree import SegmentTable
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.ops.lm_loss.policy import importance_ratios
from seqtile.planner.layer_structure import Counts
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS
from seqtile.planner.phases import OPTIMIZER_STEP, Phase
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS, NF4_BYTES, packed_weights
from seqtile.planner.step_config import Rollouts, Setup
from seqtile.planner.step_kind import StepKind, Terms
from seqtile.shared_prompts.model import share_prompts
from seqtile.shared_prompts.rows import TreeRow
from seqtile.shared_prompts.trl_calls import Fold

ROLLOUTS = "rollouts"
REFERENCE = "reference model"
GENERATOR_WEIGHTS = "generator's weights"
GENERATOR_CACHE = "generator's cache"
GENERATOR_REST = "sleeping generator"
STANDING = (REFERENCE, GENERATOR_WEIGHTS, GENERATOR_CACHE, GENERATOR_REST)
GENERATION = Phase("generation")
SCORING = Phase("reference's log-probabilities")

CLIP = 0.2
"""Clip range of the ratio, which does not affect memory."""


def make_rollouts(rollouts: Rollouts, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """The samples of rows of ``tokens``: tokens and masks, one advantage for each sample, and numbers of each token.

    With shared prompts the mask of trained tokens and the numbers are of completions alone.
    """
    rows, beside, trained = rollouts.rows, {}, tokens
    if rollouts.group > 1:
        shared, branch = branch_lengths(rollouts, tokens)
        tokens, trained = shared + branch, branch - 1
        beside["prompt mask"] = torch.ones(rows, shared + 1, dtype=torch.long, device=device)
    return {
        "ids": torch.zeros(rows, tokens, dtype=torch.long, device=device),
        "mask": torch.ones(rows, trained, dtype=torch.long, device=device),
        "advantages": torch.zeros(rows, device=device),
        **{f"number {i}": torch.zeros(rows, trained, device=device) for i in range(rollouts.numbers)},
        **beside,
    }


def branch_lengths(rollouts: Rollouts, tokens: int) -> tuple[int, int]:
    """(shared tokens, tokens of each branch) in a row of ``tokens``; a branch repeats the prompt's last token."""
    group = rollouts.group
    branch = max(1, min(round(tokens * (1 - rollouts.prompt) / group), (tokens - 1) // group))
    return max(1, tokens - branch * group), branch


def fold_groups(rollouts: Rollouts, ids: Tensor, branch: int) -> Fold:
    """Samples ``[groups * completions, T]``, the last ``branch`` tokens apart, folded as TRL's calls are."""
    group, (samples, tokens) = rollouts.group, ids.shape
    groups, shared = samples // group, tokens - branch
    row, device = shared + group * branch, ids.device
    starts = [begin + start for begin in range(0, groups * row, row) for start in (0, *range(shared, row, branch))]
    parents = [parent for first in range(0, groups * (group + 1), group + 1) for parent in (-1, *[first] * group)]
    segments = SegmentTable(tuple(starts), tuple(parents), groups * row, samples * tokens)
    segments.at_once = math.ceil(shared * rollouts.at_once)
    shape, trained = (1, groups * row), branch - 1
    ids, positions, labels = (torch.zeros(shape, dtype=torch.long, device=device) for _ in range(3))
    places = torch.arange(samples * trained, device=device)
    tree = TreeRow(ids, positions, labels, segments, places, (trained,) * samples)
    columns = torch.arange(shared + 1, tokens, device=device).repeat(samples)
    return Fold(tree, (samples, tokens), torch.arange(samples, device=device).repeat_interleave(trained), columns)


def shared_log_probs(model: Any, rollouts: Rollouts, ids: Tensor, trained: int) -> Tensor:
    """Log-probabilities ``[rows, trained]`` of completions whose prompts are computed once."""
    fold = fold_groups(rollouts, ids, trained + 1)
    with deferred_logits(model):
        scores = model(**fold.row.inputs).logits.scores(fold.row.labels, entropy=True)
    log_probs, _ = fold.spread(scores.log_probs), fold.spread(scores.entropy)
    return log_probs[:, -trained:] if trained else log_probs[:, :0]


def policy_loss(model: Any, rollouts: Rollouts, batch: Mapping[str, Tensor]) -> Tensor:
    """GRPO's loss of one micro-batch, by the tiled head; every token is taken to be trained."""
    ids, mask = batch["ids"], batch["mask"]
    if rollouts.group > 1:
        log_probs = shared_log_probs(model, rollouts, ids, mask.shape[1])
    else:
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


def _own_reference(request: Request) -> bool:
    return request.grpo is not None and request.grpo.reference and request.lora is None


def reference_bytes(request: Request, counts: Counts) -> float:
    """Bytes on one device of a frozen reference as large as the policy."""
    # DeepSpeed casts it as it does the policy, the others keep the type it was loaded in.
    cast = request.engine in ("zero2", "zero3") or request.precision == "bfloat16"
    size = float(request.setup().dtype.itemsize) if cast else 4.0
    return size * counts.weights / (request.gpus if request.engine in ("fsdp2", "zero3") else 1)


def gathered_reference(request: Request, counts: Counts) -> float:
    """Bytes of it that are gathered while it runs."""
    # trl/models/utils.py, prepare_fsdp: one unit, so that all of it is gathered at once.
    return float(request.setup().dtype.itemsize * counts.weights) if request.engine == "fsdp2" else 0.0


def row_cache(request: Request, counts: Counts, tokens: int) -> float:
    """Keys and values of one row of ``tokens``: each attention layer whole, no window, no compression."""
    size = 4 if request.precision == "float32" else 2
    return 2.0 * counts.attentions * counts.key_heads * counts.head_width * size * tokens


def generator_weights(request: Request, counts: Counts) -> float:
    """Weights of a separate inference engine: the whole model in bf16, or in 4 bits where the policy is."""
    adapters = counts.trained if request.lora is not None else 0
    packed = packed_weights(request, counts)
    size = 4.0 if request.precision == "float32" else 2.0
    return size * (counts.weights - adapters - packed) + NF4_BYTES * packed


def cache_bytes(request: Request, counts: Counts, tokens: int) -> float:
    """Cache of a generator on the device: what its memory leaves beside its weights; one row's without a memory."""
    assert request.grpo is not None
    memory = request.grpo.memory
    if memory is None:
        return row_cache(request, counts, tokens)
    whole = memory if memory > 1 else memory * request.device.memory
    return max(0.0, whole - generator_weights(request, counts))


def check_shared(request: Request, max_length: int | None) -> None:
    """Refuse what shared prompts do not run with."""
    assert request.grpo is not None
    prompt, options = request.grpo.prompt, request.options
    if max_length is not None and max_length <= prompt:
        raise UserError(
            "grpo.length-within-shared-prompt",
            f"got max length {max_length:,} with shared prompts of {prompt:,} tokens; the length includes the prompt",
        )
    if setting := "cp_size" * (request.cp_size > 1) or "state" * (options.state is not None):
        raise UserError("grpo.setting-with-shared-prompts", f"shared prompts do not run with {setting}; drop {setting}")


class GrpoStep(StepKind):
    """A step of GRPO, and what comes before it in an update."""

    batch_purpose = ROLLOUTS
    standing = STANDING

    def applies(self, config: Any, setup: Setup) -> bool:
        return setup.rollouts is not None

    def change_batch(self, model: Any, setup: Setup, batch: dict[str, Tensor]) -> None:
        assert setup.rollouts is not None
        ids = batch["input_ids"]
        batch.clear()
        rollouts = make_rollouts(setup.rollouts, ids.shape[1], ids.device)
        batch |= {name: values[: setup.batch * setup.rollouts.group] for name, values in rollouts.items()}
        if setup.rollouts.group > 1:
            share_prompts(model)

    def loss(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
        assert setup.rollouts is not None
        return policy_loss(model, setup.rollouts, batch)

    def check(self, request: Request, max_length: int | None) -> None:
        assert request.grpo is not None
        if request.sp_size > 1:
            raise UserError(
                "grpo.with-sp-size", f"TRL's GRPO does not support sp-size {request.sp_size}; use --sp-size 1"
            )
        together, group = request.batch * request.accumulation * request.gpus, request.grpo.group
        if request.grpo.prompt:
            check_shared(request, max_length)
        elif together % group:
            needed = math.lcm(group, request.batch * request.gpus) // (request.batch * request.gpus)
            raise UserError(
                "grpo.batch-not-multiple-of-group",
                f"{together} completions per update (batch size {request.batch} x {request.accumulation} "
                f"micro-batches x {request.gpus} GPUs) are not a multiple of the group size {group}; use "
                f"--gradient-accumulation {needed}",
            )

    def least_tokens(self, request: Request) -> int:
        assert request.grpo is not None
        return request.grpo.prompt + 1

    def most_tokens(self, request: Request, counts: Counts) -> int | None:
        assert request.grpo is not None
        if not request.grpo.on_device or request.grpo.memory is None:
            return None
        return int(cache_bytes(request, counts, 1) / row_cache(request, counts, 1))

    def other_parts(self, request: Request, parts: Mapping[Phase, Terms]) -> dict[Phase, Terms]:
        assert request.grpo is not None
        result: dict[Phase, Terms] = {}
        update = parts[Phase(OPTIMIZER_STEP)]
        if request.grpo.generator != "server":
            result[GENERATION] = {name: update.get(name, 0.0) for name in (WEIGHTS, OPTIMIZER, ROLLOUTS)}
        if _own_reference(request):
            scored = [
                {name: size for name, size in terms.items() if name not in (CHECKPOINTS, KEPT, GRADIENTS)}
                for phase, terms in parts.items()
                if phase.direction == "forward"
            ]
            result[SCORING] = max(scored, key=lambda terms: sum(terms.values()))
        return result

    def add_terms(
        self, request: Request, counts: Counts, terms: dict[str, float], phase: Phase, tokens: int, bound: str
    ) -> None:
        grpo = request.grpo
        assert grpo is not None
        if _own_reference(request):
            terms[REFERENCE] = reference_bytes(request, counts)
            if phase == SCORING:
                terms[REFERENCE] += gathered_reference(request, counts)
        if phase in (GENERATION, SCORING) and request.engine == "fsdp2":
            terms.pop(GRADIENTS, None)  # gone with the update before
        if grpo.generator == "sleep" and phase != GENERATION:
            terms[GENERATOR_REST] = getattr(CONSTANTS["sleeping generator"], bound)
        elif grpo.on_device:
            terms[GENERATOR_WEIGHTS] = generator_weights(request, counts)
            terms[GENERATOR_CACHE] = cache_bytes(request, counts, tokens)
        elif grpo.generator == "model" and phase == GENERATION:
            # Every completion of the update at once, and one layer's keys or values while a token is appended to them.
            rows = request.batch * request.accumulation * grpo.branches
            terms[GENERATOR_CACHE] = rows * row_cache(request, counts, tokens) * (1 + 0.5 / max(1, counts.attentions))

    def notes(self, request: Request, counts: Counts, states: Mapping[str, Sequence[str]]) -> list[str]:
        grpo = request.grpo
        assert grpo is not None
        reference = "no reference (beta 0)"
        if grpo.reference:
            reference = (
                "a separate reference model"
                if _own_reference(request)
                else "the reference is the model without adapters"
            )
        prompts = "prompt tokens are counted as trained"
        if grpo.prompt:
            prompts = (
                f"the {grpo.prompt:,} tokens of a prompt are computed once (shared_prompts=True, "
                f"per_device_train_batch_size={request.batch * grpo.group}, steps_per_generation=1)"
            )
        notes = [f"GRPO with {grpo.group} completions per prompt, {reference}; {prompts}"]
        longest = self.most_tokens(request, counts)
        if longest is not None:
            notes.append(f"the generator's KV cache has room for {longest:,} tokens, less vLLM's own working memory")
        elif grpo.on_device:
            notes.append("the generator's KV cache has room for one completion, the minimum that vLLM starts with")
        if grpo.on_device:
            notes.append("the generator's memory is computed by a formula, not measured")
        return notes

    def not_modelled(self, request: Request) -> list[str]:
        lacks = ["reward models, prompt prefill and weight transfer to the generator"]
        if request.attention == "sdpa":
            lacks.append("the [tokens, tokens] mask that sdpa builds for padded completions")
        return lacks
