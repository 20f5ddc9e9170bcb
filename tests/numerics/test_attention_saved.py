"""Attention runs forward once per step: its output is kept, the rest is computed again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import seqtile
from refusals import refused
from seqtile.checkpointing import keep_attention
from seqtile.checkpointing.keep_attention import kept_per_token
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.ops.rng import RandomState
from zoo import HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY, causal_lm, tokens

BATCH, LENGTH, LAYERS, HEADS = 2, 24, 2, 4


class AttentionCalls(TorchDispatchMode):
    """Forward and backward calls of attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_scaled_dot_product" in func.name():
            self.backward += "backward" in func.name()
            self.forward += "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@contextmanager
def attention_calls() -> Iterator[AttentionCalls]:
    with AttentionCalls() as calls:
        yield calls


def model_with(architecture: str = "llama", reentrant: bool = False, **settings: Any) -> nn.Module:
    model = causal_lm(architecture, use_cache=False, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if settings:
        seqtile.apply(model, **{"blocks": "none", **settings})
    return model


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    ids = tokens(BATCH, LENGTH)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: copy.copy(p.grad) for name, p in model.named_parameters()}


def assert_equal(got: Any, expected: Any) -> None:
    assert torch.equal(got[0], expected[0])
    for name, value in expected[1].items():
        assert torch.equal(got[1][name], value), name


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "mistral", "gemma3_text", "olmo2", "opt"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_attention_runs_forward_once(architecture: str, offload: bool) -> None:
    with attention_calls() as calls:
        expected = step(model_with(architecture))
    assert (calls.forward, calls.backward) == (2 * LAYERS, LAYERS)
    with attention_calls() as calls:
        got = step(model_with(architecture, checkpoint="attention-saved", offload=offload))
    assert (calls.forward, calls.backward) == (LAYERS, LAYERS)
    assert_equal(got, expected)


@pytest.mark.parametrize("path", ["fused", "generic"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_with_tiled_blocks_at_eleven_units(path: str, offload: bool) -> None:
    model = model_with(
        checkpoint="attention-saved", offload=offload, blocks="auto", tile="shards:3", path=path, loss="tiled",
    )  # fmt: skip
    with attention_calls() as calls, seqtile.count_products() as products:
        step(model)
    assert calls.forward == LAYERS
    assert products.units(BATCH * LENGTH, HIDDEN, INTERMEDIATE) == 11 * LAYERS


def test_layers_whose_heads_differ_count_as_the_widest() -> None:
    """What the host must have room for, where a configuration says it layer by layer and refuses to say it for all."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("transformers has no gemma4_text")
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "head_dim": 16, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma4_text", global_head_dim=32, sliding_window=8, **settings)
    assert kept_per_token(config, 4) == 4 * (32 * 4 + 4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.config.use_cache = False
    expected = step(model)
    with seqtile.applied(model, tile=8, checkpoint="attention-saved", offload=True):
        torch.testing.assert_close(step(model), expected)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_what_is_kept_is_reported(offload: bool) -> None:
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    report = seqtile.apply(model, blocks="none", checkpoint="attention-saved", offload=offload)
    assert "attention's output saved, not recomputed" in str(report) and model.is_gradient_checkpointing
    assert ("on the host" in str(report)) == offload
    ids = tokens(BATCH, LENGTH)
    loss = model(input_ids=ids, labels=ids).loss
    one = installed_checkpointing(model)[0]
    hidden_states, output, lse = (BATCH * LENGTH * width * 4 for width in (HIDDEN, HEADS * HEAD_DIM, HEADS))
    assert one.attention is not None and one.attention.saved_bytes == LAYERS * (output + lse)
    if one.host is not None:
        assert one.host.parked_bytes == LAYERS * (hidden_states + output + lse)
    loss.backward()
    assert one.host is None or one.host.parked_bytes == 0
    note, ran = report.notes[-2:]
    assert any("on the host" in one for one in report.notes) == offload
    assert ran.startswith("attention ran on ")
    assert "MiB kept per layer and forward" in note
    with torch.no_grad():
        model(input_ids=ids, labels=ids)  # in training mode, but nothing is to be kept
    assert report.notes[-2:] == (note, ran)


@pytest.mark.parametrize("settings", [{}, {"heads": 1}], ids=["", "heads"])
def test_what_is_kept_is_counted_where_pytorch_does_not_hand_out_results(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 calls the policy without the operator's results."""
    models = [causal_lm("llama", use_cache=False, attn_implementation="sdpa") for _ in range(2)]
    reports = []
    for model in models:
        reports.append(seqtile.apply(model, blocks="none", checkpoint="attention-saved", **settings))
        step(model)
        monkeypatch.setattr("torch.utils.checkpoint.SelectiveCheckpointContext", _ContextOfTorch211)
    assert reports[0].notes == reports[1].notes
    kept = [installed_checkpointing(model)[0].attention for model in models]
    assert kept[0] is not None and kept[1] is not None
    assert kept[0].saved_bytes == kept[1].saved_bytes > LAYERS * BATCH * LENGTH * HIDDEN * 4
    assert check_masks(1, 0.25) == 2


class _ContextOfTorch211:
    def __init__(self, *, is_recompute: bool, **_: Any) -> None:
        self.is_recompute = is_recompute


def test_trls_own_key_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("trl.models", reason="TRL's own selective checkpointing needs TRL")
    expected = step(model_with())
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    models.enable_selective_activation_checkpointing(model)
    report = seqtile.apply(model, blocks="none", checkpoint="attention-saved")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"selective": True})
    with attention_calls() as calls:
        assert_equal(step(model), expected)
    assert calls.forward == LAYERS
    one = installed_checkpointing(model)[0]
    assert one.attention is not None and one.attention.calls == 0  # TRL's did it
    assert report.tiled == 0


def test_what_cannot_keep_attention_is_refused() -> None:
    with refused("checkpoint.attention-saved-eager"):
        seqtile.apply(causal_lm("llama", attn_implementation="eager"), blocks="none", checkpoint="attention-saved")
    with refused("checkpoint.attention-saved-reentrant"):
        model_with(reentrant=True, checkpoint="attention-saved")


def test_what_is_refused_last_leaves_the_model_as_it_was() -> None:
    model = model_with(reentrant=True)
    seqtile.apply(model, tile=8, loss="tiled", loss_tile=4)
    standing = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with refused("checkpoint.attention-saved-reentrant"):
        seqtile.apply(model, tile=5, loss="tiled", loss_tile=3, checkpoint="attention-saved")
    for name, module in model.named_modules():
        assert {key: module.__dict__.get(key) for key in ("forward", "_seqtile_loss", "_seqtile_checkpointing")} == {
            key: standing[name].get(key) for key in ("forward", "_seqtile_loss", "_seqtile_checkpointing")
        }


@pytest.mark.parametrize("own", [False, True], ids=["none before", "the user's before"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "its copy"])
def test_undo_takes_off_the_hooks_that_transformers_leaves(own: bool, copied: bool) -> None:
    model = causal_lm("llama", use_cache=False)
    if own:
        model.enable_input_require_grads()
    embedding = model.get_input_embeddings()
    before, attributes = list(embedding._forward_hooks), sorted(model.__dict__)
    for _ in range(2):
        seqtile.apply(model, blocks="none", checkpoint="attention-saved")
        assert len(embedding._forward_hooks) == 1 + own
    other = copy.deepcopy(model) if copied else model
    seqtile.undo(other)
    assert list(other.get_input_embeddings()._forward_hooks) == before
    assert [name for name in sorted(other.__dict__) if "require_grads" in name] == [
        name for name in attributes if "require_grads" in name
    ]
    if own:
        other.disable_input_require_grads()
        assert not other.get_input_embeddings()._forward_hooks


def test_nothing_found_to_keep_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    report = seqtile.apply(model, blocks="none", checkpoint="attention-saved")
    monkeypatch.setattr(keep_attention, "is_attention", lambda op: False)
    with attention_calls() as calls:
        step(model)
    assert calls.forward == 2 * LAYERS
    assert any("found no attention kernel" in note for note in report.notes)


@cache
def kernel_with_dropout() -> Any:
    """An attention kernel as FlashAttention registers it, whose dropout draws from the default generator.

    The CPU's own kernel has no dropout.
    """

    @torch.library.custom_op("seqtile_flash_attn::fwd", mutates_args=())
    def forward(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
        mask = (torch.rand_like(x) >= share).to(x.dtype) / (1 - share)
        return x * mask, mask

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    forward.register_autograd(lambda ctx, dy, _: (dy * ctx.saved_tensors[0], None), setup_context=keep)
    return forward


def check_masks(calls: int, share: float) -> int:
    """Gradients of a layer that drops in attention and after it, against no checkpoint; how often the kernel ran."""
    torch.manual_seed(0)
    kernel, before, after = kernel_with_dropout(), nn.Linear(8, 8), nn.Linear(8, 8)

    def layer(x: Tensor) -> Tensor:
        x = torch.dropout(before(x), 0.3, True)
        for _ in range(calls):
            x = torch.dropout(torch.tanh(kernel(x, share)[0]), 0.3, True)
        return torch.dropout(after(x), 0.3, True).square()

    def gradients(run: Any) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.ones(5, 8, requires_grad=True)
        loss = run(run(x)).sum()
        found = torch.autograd.grad(loss, [x, *before.parameters(), *after.parameters()])
        return [*found, torch.rand(1)]  # and the stream goes on as it would

    saved = keep_attention.AttentionSaved()
    expected = gradients(layer)
    with CallsOf("seqtile_flash_attn") as seen:
        got = gradients(lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=saved))
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    return seen.count


class CallsOf(TorchDispatchMode):
    """Calls of the operators of one namespace."""

    def __init__(self, space: str) -> None:
        super().__init__()
        self.space, self.count = space, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(self.space)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_what_comes_after_attention_draws_the_same_masks(share: float, calls: int) -> None:
    """The recompute does not run the kernel, whose dropout has moved the stream."""
    assert check_masks(calls, share) == 2 * calls, "two layers, no kernel twice"


def test_a_layer_that_goes_on_from_another_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    with pytest.raises(AssertionError):
        check_masks(1, 0.25)


def test_a_layer_without_random_numbers_has_no_mode_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(model_with())
    monkeypatch.delattr(keep_attention, "_GoingOn")
    assert_equal(step(model_with(checkpoint="attention-saved")), expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::_scaled_dot_product_flash_attention", True),
        ("aten::_scaled_dot_product_flash_attention.default", True),
        ("aten::_scaled_dot_product_flash_attention_backward", False),
        ("aten::mm", False),
        ("flash_attn::_flash_attn_varlen_forward", True),
        ("flash_attn::_flash_attn_backward", False),
        ("_flash_attn2_cuda_f12afc9::varlen_fwd", True),
        ("_flash_attn2_cuda_f12afc9::varlen_bwd", False),
    ],
)
def test_kernels_by_name(name: str, expected: bool) -> None:
    class Op:
        def name(self) -> str:
            return name

    assert keep_attention.is_attention(Op()) == expected
