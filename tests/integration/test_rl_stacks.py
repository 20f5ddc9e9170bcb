"""The functions that RL stacks call, in their places: the stand-ins' signatures, results and gradients."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from numerics._births import births
from rl_stand_ins import OpenRLHF, PrimeRL, SkyRL, Slime, Verl
from seqtile.integrations.rl import openrlhf, prime_rl, skyrl, slime, verl
from seqtile.integrations.rl.logits import logits_of
from seqtile.lm_loss.deferred_logits import DeferredLogits
from seqtile.ops.lm_loss.token_logprobs import HeadInput
from zoo import causal_lm, tokens

VOCABULARY = 61
Run = Callable[[Any, Any, Tensor], tuple[Tensor, Tensor]]


def _slime(part: Any, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    row = ids[:1]
    hidden = model.model(row).last_hidden_state
    logits = logits_of(HeadInput(hidden, model.lm_head.weight), tile=8) if part is slime else model.lm_head(hidden)
    return Slime.get_log_probs_and_entropy(part.calculate_log_probs_and_entropy, logits.float(), row)


RUNS: dict[str, tuple[Any, Any, Run]] = {
    "verl, triton": (
        verl, Verl, lambda part, model, ids: Verl.forward_with_triton_backend(part.linear_cross_entropy, model, ids)
    ),
    "verl, torch": (
        verl, Verl, lambda part, model, ids: Verl.forward_with_torch_backend(part.FusedLinearForPPO, model, ids)
    ),
    "slime": (slime, Slime, _slime),
    "SkyRL": (
        skyrl, SkyRL,
        lambda part, model, ids: SkyRL.forward(part.logprobs_from_logits, part.chunked_entropy_from_logits, model, ids),
    ),
    "OpenRLHF": (
        openrlhf, OpenRLHF,
        lambda part, model, ids: OpenRLHF.forward(part.log_probs_from_logits, part.compute_entropy, model, ids),
    ),
    "prime-rl": (prime_rl, PrimeRL, lambda part, model, ids: PrimeRL.inject(part.FusedOutputLinear, model, ids)),
}  # fmt: skip


def gradients(model: nn.Module, found: tuple[Tensor, Tensor], entropies: bool) -> dict[str, Tensor]:
    log_probs, entropy = found
    factor = torch.linspace(0.5, 1.5, log_probs.numel()).view(log_probs.shape)
    loss = (factor * log_probs).sum() + (0.3 * entropy.sum() if entropies else 0)
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@contextmanager
def tiled(model: nn.Module) -> Iterator[None]:
    seqtile.apply(model, blocks="none", loss="tiled", loss_tile=8)
    with seqtile.deferred_logits(model):
        yield
    seqtile.undo(model)


@pytest.mark.parametrize("stack", RUNS)
def test_in_the_place_of_the_stacks_own(stack: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs, run = RUNS[stack]
    model, ids = causal_lm("llama", vocab_size=VOCABULARY).train(), tokens(2, 11) % VOCABULARY
    expected = run(theirs, model, ids)
    their_gradients = gradients(model, expected, entropies=True)
    with (
        caplog.at_level(logging.WARNING),
        births() as born,
        tiled(model) if ours in (skyrl, openrlhf) else nullcontext(),
    ):
        found = run(ours, model, ids)
    assert "runs untiled" not in caplog.text
    if ours is not verl:  # whose functions know no tile shorter than these sequences
        assert not [shape for shape in born.shapes if VOCABULARY in shape and (11 in shape or 22 in shape)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other)
    our_gradients = gradients(model, found, entropies=True)
    assert our_gradients.keys() == their_gradients.keys()
    for name, value in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (verl.linear_cross_entropy, Verl.linear_cross_entropy),
        (verl.FusedLinearForPPO, Verl.FusedLinearForPPO),
        (verl.FusedLinearForPPO.forward, Verl.FusedLinearForPPO.forward),
        (slime.calculate_log_probs_and_entropy, Slime.calculate_log_probs_and_entropy),
        (skyrl.logprobs_from_logits, SkyRL.logprobs_from_logits),
        (skyrl.chunked_entropy_from_logits, SkyRL.chunked_entropy_from_logits),
        (openrlhf.log_probs_from_logits, OpenRLHF.log_probs_from_logits),
        (openrlhf.compute_entropy, OpenRLHF.compute_entropy),
        (prime_rl.FusedOutputLinear, PrimeRL.FusedOutputLinear),
        (prime_rl.FusedOutputLinear.forward, PrimeRL.FusedOutputLinear.forward),
    ],
)
def test_the_signature_is_the_stacks(ours: Any, theirs: Any) -> None:
    def parts(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert parts(ours) == parts(theirs)


@pytest.mark.parametrize("stack", ["SkyRL", "OpenRLHF"])
def test_real_logits_are_answered_too(stack: str) -> None:
    """As in evaluation, which runs outside of deferred_logits."""
    ours, theirs, run = RUNS[stack]
    model, ids = causal_lm("llama", vocab_size=VOCABULARY).eval(), tokens(2, 11) % VOCABULARY
    with torch.no_grad():
        for one, other in zip(run(ours, model, ids), run(theirs, model, ids), strict=True):
            torch.testing.assert_close(one, other)


def test_the_scaling_of_deferred_logits() -> None:
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    for scaling in (seqtile.LogitScaling(0.5), seqtile.LogitScaling(0.7, softcap=1.5, temperature=1.3)):
        made = logits_of(HeadInput(hidden, weight, scaling=scaling))
        assert isinstance(made, DeferredLogits)
        expected = scaling.on(hidden @ weight.t()).log_softmax(-1)
        index = torch.randint(0, 7, (5, 3))
        torch.testing.assert_close(made.log_softmax(-1).gather(-1, index), expected.gather(-1, index))
        torch.testing.assert_close(made[1:3].log_softmax(dim=-1).exp().sum(-1), torch.ones(2))
        torch.testing.assert_close(made.real("a test").log_softmax(-1), expected)


def test_several_tokens_of_each_position_under_an_adapter_on_the_head() -> None:
    """Such a head runs as a module and scores the targets alone; a distillation gathers several tokens."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = get_peft_model(causal_lm("llama", vocab_size=VOCABULARY), adapters).eval()
    ids = tokens(2, 11) % VOCABULARY
    index = torch.stack([ids, ids.roll(1, -1)], -1)
    expected = model(ids).logits.log_softmax(-1).gather(-1, index)
    seqtile.apply(model, loss="tiled")
    with seqtile.deferred_logits(model):
        torch.testing.assert_close(model(ids).logits.log_softmax(-1).gather(-1, index), expected)


def test_what_would_be_computed_wrongly_is_refused() -> None:
    hidden, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match="rollout_top_p"):
        deferred = logits_of(HeadInput(hidden, weight))
        slime.calculate_log_probs_and_entropy(deferred, labels, None, log_prob_keep_mask=torch.ones(5, 7))
    for logits in (hidden @ weight.t(), logits_of(HeadInput(hidden, weight))):
        with pytest.raises(ValueError, match="expected one per token"):
            openrlhf.log_probs_from_logits(logits, labels[:3])
        with pytest.raises(ValueError, match="labels range from 7 to 7, expected 0 to 6"):
            openrlhf.log_probs_from_logits(logits, labels + 7)
        assert not openrlhf.log_probs_from_logits(logits, labels - 100).any()  # none of them counts
    deferred = logits_of(HeadInput(hidden, weight))
    deferred[0] = 0.0
    with pytest.raises(RuntimeError, match="were modified"):
        deferred.scores(labels)
