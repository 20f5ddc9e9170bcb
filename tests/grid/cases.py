"""What one case trains, and the untiled one-process reference that it must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import seqtile
from seqtile.lm_loss.tiled_loss import installed_losses
from seqtile.shared_prompts.trl_calls import share_in_calls
from zoo import causal_lm, exact_dtype, tokens

WORLD = 2
RATE = 0.5
"""Learning rate of plain SGD, large enough that a wrong gradient or a wrong clip shows in the weights."""
REST = "mlp+norm+projections"
TEMPERATURE = 0.7
"""Of scored tokens."""
FEW = 4
"""Steps whose gradients and weights are compared one by one."""


@dataclass(frozen=True)
class Case:
    """One short training under an engine.

    Attributes:
        name: shown by pytest.
        technique: row of the table in the documentation.
        architecture: of ``zoo``.
        config: overrides of the tiny configuration.
        lengths: tokens per row on each rank; every step adds ``grow``, so that tile counts change between steps.
        tiles: tile rule on each rank; "auto" leaves batches this short untiled.
        path: operator, as ``seqtile.apply`` takes it.
        blocks: as ``seqtile.apply`` takes it.
        tiled_loss: head and loss in tiles too, cut by the same rule.
        scored: the loss is made of log-probabilities and entropies that TRL's trainers ask for.
        deferred: the loss is made of logits, which the tiled model hands out before they are there.
        shared: both sequences of a batch begin alike, and the model computes that once.
        trained: fraction of the positions that have a label, the last ones, on each rank.
        more: further arguments of ``seqtile.apply``.
        checkpoint: ``""``, ``"non-reentrant"`` or ``"reentrant"``: activation checkpointing of the decoder layers.
        steps: optimizer steps.
        micro_steps: batches per step; all but the last without synchronisation where the engine has that.
        grow: tokens that each later batch has more.
        clip: bound of the gradient norm, or 0 for none.
        adapters: names of the linear layers that get LoRA; their base is frozen then.
        input_gradients: with adapters, whether the embeddings' output requires a gradient.
        dtype: of the weights; None for the most exact one.
        options: the engine's own.
        refused: id of the UserError that every rank must raise, and values in its sentence.
        low_precision: the engine reduces or computes in bf16: judged against the untiled run's own error.
        upstream: what is known to be wrong without seqtile too; such a case trains untiled and sees that it still is.
    """

    name: str
    technique: str
    architecture: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (13, 7)
    tiles: tuple[int | str, int | str] = (3, 5)
    path: str = "auto"
    blocks: str = "auto"
    tiled_loss: bool = False
    scored: bool = False
    deferred: bool = False
    shared: bool = False
    trained: tuple[float, float] = (1.0, 1.0)
    more: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    steps: int = 1
    micro_steps: int = 1
    grow: int = 4
    clip: float = 0.0
    adapters: tuple[str, ...] = ()
    input_gradients: bool = True
    dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    low_precision: bool = False
    upstream: str = ""

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The model before tiling and before the engine, the same on every rank."""
        dtype = dtype or self.dtype or exact_dtype(self.architecture)
        model = causal_lm(self.architecture, dtype, use_cache=False, **self.config)
        if self.scored:
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        if self.adapters:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(1)
            model = get_peft_model(
                model, LoraConfig(r=4, lora_alpha=8, target_modules=list(self.adapters), init_lora_weights=False)
            )
            model = model.to(dtype)
            if self.input_gradients:
                model.enable_input_require_grads()
        if self.checkpoint:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": self.checkpoint == "reentrant"}
            )
        return model

    def batch(self, rank: int, number: int) -> Tensor:
        """Token ids of the ``number``-th batch of a rank; length 0 is the one dummy token that stands for no data."""
        if self.lengths[rank] == 0:
            return tokens(1, 1)
        ids = tokens(2, self.lengths[rank] + self.grow * number, seed=100 * rank + number)
        if self.shared:
            prompt = ids.shape[1] * 3 // 4
            ids[1, :prompt] = ids[0, :prompt]
        return ids

    def loss(self, model: Callable[..., Any], rank: int, number: int) -> Tensor:
        """Loss of one batch; one token has nothing to predict, so there it is the logits."""
        ids = self.batch(rank, number)
        if self.lengths[rank] < 2:
            return model(input_ids=ids).logits.square().sum() * self.lengths[rank]
        labels = ids.clone()
        labels[:, : ids.shape[1] - int(self.trained[rank] * ids.shape[1])] = -100
        if self.deferred:
            tiled = isinstance(model, nn.Module) and bool(installed_losses(model))
            with seqtile.deferred_logits(model) if tiled else nullcontext():
                logits = model(input_ids=ids).logits
                assert isinstance(logits, Tensor) != tiled
                log_p = (logits[:, :-1] / TEMPERATURE).log_softmax(-1)
                scores = torch.gather(log_p, -1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            return -(scores * (1.0 + torch.arange(scores.shape[1]) % 3)).mean()
        if self.scored:
            scores = model(input_ids=ids, labels=labels, fused_lm_head=True)
            weight = 1.0 + torch.arange(scores.log_probs.shape[1]) % 3  # each token has an upstream gradient of its own
            return (0.1 * scores.entropy - weight * scores.log_probs).mean()
        if min(self.trained) < 1.0:  # a mean over no token is no number
            return model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(10)).loss
        return model(input_ids=ids, labels=labels).loss


SDPA = {"attn_implementation": "sdpa"}
SAVED = {"heads": 1, "checkpoint": "attention-saved"}
BY_LAYER = {"heads": 1, "checkpoint": "none:1+attention-saved", "offload": True}
GENERIC: dict[str, Any] = {"path": "generic"}
RECOMPUTED: dict[str, Any] = {"checkpoint": "non-reentrant"}

# Rows of the table.
HEADS, STATES, HYBRID = "head-wise attention", "layers with a state", "hybrid models"
CHECKPOINT, REENTRANT = "activation checkpointing", "reentrant checkpointing"
ACCUMULATION, LOW_PRECISION = "accumulation, clipping", "mixed precision"
LOSS, SCORES, DEFERRED = "tiled loss", "token scores (TRL)", "deferred logits"

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
HEAD_AND_QUERY = ("lm_head", "q_proj")
_HYBRID: dict[str, Any] = {**RECOMPUTED, "tiled_loss": True, "steps": 2}
_STATE: dict[str, Any] = {"more": {"state": 4}, "steps": 2}
SHORT_CONVOLUTION: dict[str, Any] = {
    **_STATE, "architecture": "lfm2", "config": {"layer_types": ["conv", "full_attention"]}
}  # fmt: skip
_GATED_DELTANET: dict[str, Any] = {
    **_STATE, "architecture": "qwen3_5_text", "dtype": torch.float32,  # its kernel computes in fp32
    "config": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
_MAMBA_2: dict[str, Any] = {
    **_STATE, "architecture": "bamba", "dtype": torch.float32, "config": {"mamba_chunk_size": 8}  # as its scan
}  # fmt: skip

_USUAL = [
    Case("plain", "plain", steps=3),
    Case("generic", "plain", steps=3, **GENERIC),
    Case("checkpoint", CHECKPOINT, **RECOMPUTED, steps=2),
    Case("checkpoint-generic", CHECKPOINT, **RECOMPUTED, steps=2, **GENERIC),
    Case("reentrant", REENTRANT, checkpoint="reentrant"),
    Case("reentrant-generic", REENTRANT, checkpoint="reentrant", **GENERIC),
    Case("accumulate", ACCUMULATION, micro_steps=3, clip=0.1, steps=2),
    Case("accumulate-generic", ACCUMULATION, micro_steps=3, clip=0.1, steps=2, **RECOMPUTED, **GENERIC),
    Case("one-token", "one rank with a single token", lengths=(9, 1), grow=0),
    Case("one-token-generic", "one rank with a single token", lengths=(1, 9), grow=0, **GENERIC),
    Case("no-token", "one rank without data", lengths=(9, 0), grow=0),
    Case("no-token-generic", "one rank without data", lengths=(0, 9), grow=0, **GENERIC),
    Case("untiled-rank", "one rank untiled", tiles=(3, "auto"), steps=2),
    Case("untiled-rank-generic", "one rank untiled", tiles=("auto", 3), **RECOMPUTED, **GENERIC),
    Case("lora", "LoRA", adapters=("q_proj", "gate_proj", "down_proj"), steps=2),
    Case("lora-generic", "LoRA", adapters=("gate_proj", "up_proj"), **RECOMPUTED, **GENERIC),
    Case("lora-no-input-gradient", "LoRA", adapters=("up_proj", "down_proj"), input_gradients=False, steps=2),
    Case("gemma2", "norms around the MLP", "gemma2", **RECOMPUTED),
    Case("rows", "rest of the layer", blocks=REST, **RECOMPUTED, steps=2),
    Case("rows-lora", "rest of the layer", blocks=REST, adapters=("q_proj", "o_proj"), input_gradients=False),
    Case("opt", "linear layers in the decoder layer", "opt"),
    Case("mixtral", "experts", "mixtral", steps=2),
    Case("heads", HEADS, more={"heads": 1}, micro_steps=2, steps=2),
    Case("heads-saved", HEADS, config=SDPA, **RECOMPUTED, more=BY_LAYER, steps=2),
    Case("heads-lora", HEADS, config=SDPA, **RECOMPUTED, more=SAVED, adapters=ATTENTION),
    Case("states", STATES, **SHORT_CONVOLUTION, micro_steps=2, lengths=(2, 13)),
    Case("states-checkpoint", STATES, **_GATED_DELTANET, **RECOMPUTED),
    Case("states-mamba2", STATES, **_MAMBA_2, **RECOMPUTED),
    Case("tiled-loss", LOSS, tiled_loss=True, steps=2),
    Case("tiled-loss-checkpoint", LOSS, tiled_loss=True, **RECOMPUTED, micro_steps=2),
    Case("tiled-loss-lora", "tiled loss + LoRA", tiled_loss=True, adapters=HEAD_AND_QUERY),
    Case("tiled-loss-idle", LOSS, tiled_loss=True, trained=(0.3, 0.0), steps=2),
    # The second rank's sequences are too short to share anything.
    Case(
        "shared-prompts", "shared prompts", shared=True, scored=True, tiled_loss=True, lengths=(40, 9), steps=2,
        dtype=torch.float32, **RECOMPUTED,
    ),
    Case("deferred", DEFERRED, tiled_loss=True, deferred=True, steps=2),
    # A layer that carries a state and one with attention, everything in tiles.
    Case("qwen3.5", HYBRID, "qwen3_5_text", config=SDPA, more=SAVED, **_HYBRID),
    Case("qwen3.5-lora", HYBRID, "qwen3_5_text", adapters=("in_proj_qkv", "q_proj", "gate_proj"), **_HYBRID),
    Case("bamba", HYBRID, "bamba", config=SDPA, more=SAVED, **_HYBRID),
    Case("lfm2", HYBRID, "lfm2", config=SDPA, more=SAVED, **_HYBRID),
]  # fmt: skip


def usual_cases(options: dict[str, Any], prefix: str = "", **by_name: dict[str, Any] | None) -> list[Case]:
    """The cases that every engine runs.

    Args:
        options: the engine's own, of all cases.
        prefix: of the names.
        by_name: further fields of a case (its name with underscores), or None for one that this engine does not run.
    """
    changes = {name.replace("_", "-"): fields for name, fields in by_name.items()}
    assert changes.keys() <= {case.name for case in _USUAL}
    return [
        replace(case, **{"options": options, **(changes.get(case.name) or {}), "name": prefix + case.name})
        for case in _USUAL
        if changes.get(case.name, {}) is not None
    ]


@dataclass
class Trained:
    """Gradients before each step, not yet clipped, and the weights after the last step; trainable ones only.

    The losses too, where what runs under the engine is a trainer that shares a batch out and puts its loss together.
    """

    gradients: list[dict[str, Tensor | None]]
    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _scored_from_logits(model: nn.Module) -> Callable[..., Any]:
    """Answers as TRL's head does; which itself does not look at an adapter of the head, and is refused with one."""

    def call(input_ids: Tensor, labels: Tensor, fused_lm_head: bool) -> Any:
        log_p = (model(input_ids=input_ids).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        valid = labels[:, 1:] != -100
        scores = log_p.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return SimpleNamespace(log_probs=scores * valid, entropy=-(log_p.exp() * log_p).sum(-1) * valid)

    return call


def train_alone(case: Case, dtype: torch.dtype | None = None, loss: Callable[..., Tensor] | None = None) -> Trained:
    """One process, untiled: the mean over ranks and micro steps of the same losses (or of ``loss``)."""
    model = case.model(dtype)
    call = _scored_from_logits(model) if case.scored else model
    optimizer = torch.optim.SGD(named(model).values(), lr=RATE)
    history, losses = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for micro in range(case.micro_steps):
            for rank in range(WORLD):
                number = step * case.micro_steps + micro
                mean = (loss or case.loss)(call, rank, number) / (WORLD * case.micro_steps)
                mean.backward()
                losses[-1] += mean.item()
        history.append({name: p.grad.clone() for name, p in named(model).items() if p.grad is not None})
        if case.clip:
            norm = torch.nn.utils.clip_grad_norm_(named(model).values(), case.clip)
            assert norm > case.clip, f"{case.name}: a gradient of norm {norm} is not clipped at {case.clip}"
        optimizer.step()
    return Trained(history, {name: p.detach().clone() for name, p in named(model).items()}, losses)


def tile(case: Case, model: nn.Module, rank: int) -> None:
    loss = {"loss": "tiled", "loss_tile": case.tiles[rank]} if case.tiled_loss else {}
    if case.shared:
        share_in_calls(model)
    report = seqtile.apply(model, tile=case.tiles[rank], path=case.path, blocks=case.blocks, **loss, **case.more)
    assert report.tiled and ("loss" in report.done) == case.tiled_loss, (report, report.left)


def assert_equal(case: Case, got: Trained, untiled: Callable[[], Trained]) -> None:
    """``got`` equals the one-process reference; in low precision it is no further from it than the untiled run.

    Args:
        case: what was trained.
        got: under the engine, tiled.
        untiled: trains the same under the engine without tiling; called in low precision only.
    """
    if case.low_precision:
        _assert_no_worse(got, untiled(), train_alone(case, torch.float32))
        return
    expected = train_alone(case)
    pairs = list(zip(got.gradients, expected.gradients, strict=True))
    for ours, theirs in pairs[:FEW]:
        # An engine may give zeros where one process gives None (experts that no token reached).
        _assert_close(ours, {name: theirs.get(name, torch.zeros_like(got.weights[name])) for name in got.weights})
    if case.steps > FEW:
        _assert_one_trajectory(case, got, expected)
        return
    _assert_close(got.weights, expected.weights)
    if got.losses:
        torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(expected.losses))


def _assert_one_trajectory(case: Any, got: Trained, expected: Trained) -> None:
    """Every step's loss, and the weights at the end, as close to the reference as fp32 itself.

    Steps go on from each other's weights, and roundings with them. How far they carry is what a second untiled process
    shows, which trains on the same rows one after the other: the same sums in another order. Eight times its error so
    far is allowed, for eight times as many sums that are cut elsewhere (tiles, ranks, shards), and 4 roundings of the
    loss itself, which the trainer puts together from the ranks'.
    """
    reordered = train_alone(case, loss=case.loss_in_another_order)
    ours, theirs, again = (torch.tensor(run.losses, dtype=torch.float64) for run in (got, expected, reordered))
    assert theirs[-1] < 0.7 * theirs[0], f"nothing was learnt: {theirs}"
    allowed = 8 * (again - theirs).abs().cummax(0).values + 4 * torch.finfo(torch.float32).eps * theirs
    print(
        f"trajectory: differs by {(ours - theirs).abs().max():.2g}, another order by {(again - theirs).abs().max():.2g}"
    )
    assert ((ours - theirs).abs() <= allowed).all(), f"losses differ by {ours - theirs}, allowed {allowed}"
    flat = [torch.cat([run.weights[name].flatten() for name in expected.weights]) for run in (got, expected, reordered)]
    error, bound = (flat[0] - flat[1]).norm(), 8 * (flat[2] - flat[1]).norm()
    print(f"weights: {error:.2g}, allowed {bound:.2g}")
    assert error <= bound, f"weights differ by {error:.3g}, allowed {bound:.3g}"


def _assert_close(got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]) -> None:
    """Equal within 64 roundings of fp32, in which the models' norms compute whatever their dtype, on the scale
    of each tensor. One that is zero but for rounding is judged on a thousandth of the largest one's scale.
    """
    assert got.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    assert largest > 0
    for name, true in expected.items():
        value = got[name]
        if value is None:
            assert not true.any(), f"{name}: no gradient"
            continue
        assert value.dtype == true.dtype and value.shape == true.shape, name
        bound = 64 * torch.finfo(torch.float32).eps * max(true.abs().max().item(), 1e-3 * largest)
        error = (value - true).abs().max().item()
        assert error <= bound, f"{name}: differs by {error:.3g}, allowed {bound:.3g}"


def _assert_no_worse(ours: Trained, theirs: Trained, truth: Trained) -> None:
    def errors(run: Trained) -> tuple[float, float, float]:
        pairs = [(run.gradients[-1][name], gradient) for name, gradient in truth.gradients[-1].items()]
        flat = torch.cat([(got.double() - true.double()).flatten() for got, true in pairs if got is not None])
        scale = max(true.abs().max().item() for _, true in pairs)
        return flat.abs().max().item(), flat.norm().item() / math.sqrt(flat.numel()), scale

    assert errors(theirs)[0] > 1e-5 * errors(ours)[2], "nothing was computed in low precision"
    for error, twin in zip(errors(ours)[:2], errors(theirs)[:2], strict=True):
        bound = 2 * twin + 1e-5 * errors(ours)[2]
        assert error <= bound, f"error {error:.3g} against {twin:.3g} of the untiled run in the same precision"
