"""Pairs of techniques on a tiny model, for ``tests/numerics/test_combinations.py``."""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import seqtile
from numerics._errors import FACTOR, assert_as_exact_in_bf16
from refusals import refused
from seqtile.verification.judge import difference
from zoo import assert_same_gradients, causal_lm, tokens


@dataclass(frozen=True)
class Technique:
    """What one name stands for.

    Attributes:
        apply: arguments of :func:`seqtile.apply` that it stands for; none for what is not seqtile's.
        reentrant: None without activation checkpointing, else which.
        rest: what else is done to the model or the step.
    """

    apply: dict[str, Any] = field(default_factory=dict)
    reentrant: bool | None = None
    rest: frozenset[str] = frozenset()


TECHNIQUES: dict[str, Technique] = {
    "tiled MLP": Technique({"tile": 4}),
    "kept gate and up": Technique({"tile": 4, "keep": 0.5}),
    "tiled loss": Technique({"loss": "tiled", "loss_tile": 5}),
    "norms and projections": Technique({"tile": 4, "blocks": "mlp+norm+projections"}),
    "attention by heads": Technique({"heads": 1}),
    "checkpoints on the host": Technique({"offload": True}, reentrant=False),
    "attention saved": Technique({"checkpoint": "attention-saved"}, reentrant=False),
    "activation checkpointing": Technique(reentrant=False),
    "reentrant checkpointing": Technique(reentrant=True),
    "LoRA": Technique(rest=frozenset({"lora"})),
    "bf16 autocast": Technique(rest=frozenset({"autocast"})),
    "gradient accumulation": Technique(rest=frozenset({"accumulation"})),
    "packed documents": Technique(rest=frozenset({"packed"})),
    "compiled layers": Technique(rest=frozenset({"compiled"})),
}

EXCLUDE = frozenset({frozenset({"activation checkpointing", "reentrant checkpointing"})})
"""Two values of one setting."""

REFUSED = {frozenset({"attention saved", "reentrant checkpointing"}): "checkpoint.attention-saved-reentrant"}
"""Pairs that seqtile refuses, and the ids."""

WITH_COMPILED = frozenset({"tiled MLP", "tiled loss", "checkpoints on the host", "attention saved",
                           "activation checkpointing"})  # fmt: skip
"""What is tried with compiled layers: a pair takes seconds, so not everything."""

UNTESTED = frozenset(
    frozenset({"compiled layers", name}) for name in TECHNIQUES.keys() - WITH_COMPILED - {"compiled layers"}
)

PAIRS = [frozenset(pair) for pair in itertools.combinations(TECHNIQUES, 2)
         if frozenset(pair) not in EXCLUDE | UNTESTED]  # fmt: skip


def both(pair: frozenset[str]) -> Technique:
    """The two as one; where neither is of seqtile's, tiled MLP and tiled loss are on as well."""
    chosen = [TECHNIQUES[name] for name in TECHNIQUES if name in pair]
    settings = {key: value for one in chosen for key, value in one.apply.items()}
    kinds = [one.reentrant for one in chosen if one.reentrant is not None]
    settings = settings or {**TECHNIQUES["tiled MLP"].apply, **TECHNIQUES["tiled loss"].apply}
    return Technique(settings, any(kinds) if kinds else None, frozenset().union(*(one.rest for one in chosen)))


def build(how: Technique, ours: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model with every technique of ``how``, seqtile's own only if ``ours``."""
    layers = 1 if "compiled" in how.rest else 2  # compiling takes seconds per layer
    sizes = WIDER if dtype != torch.float32 or "autocast" in how.rest else {}
    model = causal_lm("llama", dtype, num_hidden_layers=layers, use_cache=False, attn_implementation="sdpa", **sizes)
    if "lora" in how.rest:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
        model.enable_input_require_grads()
    if how.reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how.reentrant})
    if ours:
        settings = dict(how.apply)
        report = seqtile.apply(model, **settings if "tile" in settings else {"blocks": "none", **settings})
        assert report.tiled == (layers if "tile" in settings else 0)
        assert ("blocks" in report.done) == ("blocks" in settings)
        assert ("heads" in report.done) == ("heads" in settings)
        assert ("loss" in report.done) == ("loss" in settings)
        assert ("checkpoint" in report.done) == bool({"checkpoint", "offload"} & settings.keys())
    if "compiled" in how.rest:
        model.get_submodule("model.layers.0").compile(backend="aot_eager")
    return model.train()


def step(
    model: nn.Module, how: Technique, autocast: bool, lengths: tuple[int, ...] = (13, 9)
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one optimizer step: one batch, or two of different lengths."""
    lengths = lengths if "accumulation" in how.rest else lengths[:1]
    total, loss = sum(length - 1 for length in lengths) * 2, torch.zeros(())
    for number, length in enumerate(lengths):
        ids = tokens(2, length, seed=number)
        words: dict[str, Any] = {"num_items_in_batch": torch.tensor(total)} if len(lengths) > 1 else {}
        if "packed" in how.rest:
            words["position_ids"] = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(2, -1)
        device_type = torch.get_default_device().type
        inside: AbstractContextManager[Any] = torch.autocast(device_type, torch.bfloat16) if autocast else nullcontext()
        with inside:
            part = model(input_ids=ids, labels=ids, **words).loss
        part.backward()
        loss = loss + part.detach()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def run(pair: frozenset[str]) -> None:
    """Run both sides of one pair.

    Raises:
        AssertionError: loss or gradients differ from those without seqtile, or a pair of :data:`REFUSED` is accepted.
    """
    how = both(pair)
    if pair in REFUSED:
        with refused(REFUSED[pair]):
            build(how, ours=True)
        return
    autocast = "autocast" in how.rest
    expected = step(build(how, ours=False), how, autocast)
    try:
        got = step(build(how, ours=True), how, autocast)
    finally:
        torch.compiler.reset()
    if not autocast:
        torch.testing.assert_close(got[0], expected[0])
        assert_same_gradients(got[1], expected[1])
        return
    truth = step(build(how, ours=False), how, autocast=False)
    for name, exact in truth[1].items():
        found = difference(name, expected[1][name], got[1][name], exact, torch.float32)
        assert found.score <= 1, found


WIDER = {"hidden_size": 144, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}
"""Sizes of the model in bf16 and under autocast: gradients of enough elements to be judged, heads as wide as a GPU's
kernels want them."""


def run_in_bf16(pair: frozenset[str]) -> None:
    """Run both sides of one pair with bf16 weights on the default device, where most kernels are for low precision.

    Raises:
        AssertionError: a gradient is further from the fp32 model's than the untiled model's in bf16.
    """
    how, lengths = both(pair), (66, 42)
    untiled = build(how, ours=False, dtype=torch.bfloat16)
    truth = copy.deepcopy(untiled).float()
    try:
        expected, true = (step(model, how, "autocast" in how.rest and model is untiled, lengths)
                          for model in (untiled, truth))  # fmt: skip
        got = step(build(how, ours=True, dtype=torch.bfloat16), how, "autocast" in how.rest, lengths)
    finally:
        torch.compiler.reset()
    factor = FACTOR
    if "compiled" in how.rest and "tile" in how.apply:
        # PyTorch's checkpoint per tile runs there, and adds weight gradients in bf16: 33 roundings of random sign.
        factor *= math.sqrt(2 * lengths[0] / how.apply["tile"])
    assert_as_exact_in_bf16(got[1], expected[1], true[1], factor=factor)
