"""Head-wise attention gives the untiled layer's numbers: every kind of attention, checkpoint, adapter and mask."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import seqtile
from numerics._blocks import random
from refusals import refused
from seqtile.headwise import install_heads as heads_of_models
from seqtile.headwise.install_heads import HeadWise
from seqtile.ops.attention import head_groups as operator
from seqtile.ops.attention.group_core import Groups
from seqtile.ops.rng import RandomState
from seqtile.tiling import head_passes
from zoo import HIDDEN, assert_same_gradients, causal_lm, exact_dtype, gradients, tokens

LENGTH = 13
CHECKPOINTS = ["none", "checkpoint", "reentrant", "attention-saved", "offload"]


def model_with(architecture: str = "llama", how: str = "none", impl: str = "sdpa", **config: Any) -> nn.Module:
    config = {"use_cache": False, "attn_implementation": impl, **config}
    dtype = config.pop("dtype", None) or exact_dtype(architecture)
    model = causal_lm(architecture, dtype, **config)
    if how != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    return model


def settings(how: str) -> dict[str, Any]:
    return {
        "attention-saved": {"checkpoint": "attention-saved"},
        "offload": {"checkpoint": "attention-saved", "offload": True},
    }.get(how, {})


def batches() -> dict[str, dict[str, Tensor]]:
    ids = tokens(2, LENGTH)
    padded = torch.ones_like(ids)
    padded[0, -5:] = 0
    left = torch.ones_like(ids)
    left[1, :4] = 0
    packed = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    plane = torch.full((LENGTH, LENGTH), -1e9, dtype=torch.float64).triu(1)
    per_head = random(2, 4, LENGTH, LENGTH, seed=3, dtype=torch.float64, grad=False)
    return {
        "causal": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": ids, "labels": ids, "attention_mask": padded},
        "padded left": {"input_ids": ids, "labels": ids, "attention_mask": left},
        "packed": {"input_ids": ids[:1], "labels": ids[:1], "position_ids": packed},
        "two tokens": {"input_ids": ids[:, :2], "labels": ids[:, :2]},
        "mask per head": {"input_ids": ids, "labels": ids, "attention_mask": per_head + plane},
    }


def assert_exact(model: nn.Module, batch: Tensor | dict[str, Tensor], **how: Any) -> str:
    """Gradients with and without head-wise attention; returns the report."""
    loss, expected = gradients(model, batch)
    report = seqtile.apply(model, **{"blocks": "none", "heads": 1, **how})
    got_loss, got = gradients(model, batch)
    torch.testing.assert_close(got_loss, loss)
    assert_same_gradients(got, expected)
    return str(report)


@pytest.mark.device
@pytest.mark.parametrize(
    ("architecture", "impl", "how"),
    [(name, "sdpa", how) for name in ("llama", "qwen3") for how in CHECKPOINTS]
    + [(name, "eager", how) for name in ("llama", "gemma2", "gpt_oss") for how in CHECKPOINTS[:3]],
)
def test_every_checkpoint(architecture: str, impl: str, how: str) -> None:
    """Rotary alone, q/k norms, soft-cap with sliding window, sinks; the MLP tiled beside it."""
    model = model_with(architecture, how, impl)
    report = assert_exact(model, tokens(2, LENGTH), blocks="auto", tile="shards:3", **settings(how))
    assert "head-wise attention in 2 of 2" in report and "1 key-value head per pass" in report


@pytest.mark.device
@pytest.mark.parametrize(
    "architecture", ["mistral", "qwen2", "qwen3_moe", "gemma3_text", "glm4", "cohere", "smollm3", "granite", "olmo"]
)
def test_more_models(architecture: str) -> None:
    config: dict[str, Any] = {"sliding_window": 4} if architecture in ("mistral", "gemma3_text") else {}
    assert "in 2 of 2" in assert_exact(model_with(architecture, "checkpoint", **config), tokens(2, LENGTH))


@pytest.mark.device
@pytest.mark.parametrize("how", ["none", "attention-saved"])
@pytest.mark.parametrize("batch", list(batches()))
def test_every_batch(batch: str, how: str) -> None:
    assert_exact(model_with("llama", how), batches()[batch], **settings(how))


@pytest.mark.device
@pytest.mark.parametrize(
    ("query", "groups", "per_pass"), [(4, 4, 1), (4, 4, 3), (4, 4, 4), (4, 1, 1), (8, 4, 1), (8, 4, 3), (8, 4, 4)]
)
def test_every_grouping(query: int, groups: int, per_pass: int) -> None:
    config = {"num_attention_heads": query, "num_key_value_heads": groups, "head_dim": 4, "attention_bias": True}
    assert_exact(model_with("llama", "checkpoint", **config), tokens(2, LENGTH), heads=per_pass)


@pytest.mark.parametrize("how", ["checkpoint", "attention-saved"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_on_every_projection(dora: bool, how: str) -> None:
    """LoRA in the operator, DoRA as modules; added after the model was changed."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    plain = model_with("llama", how)
    changed = copy.deepcopy(plain)
    seqtile.apply(changed, blocks="auto", tile="shards:3", heads=1, **settings(how))
    found = []
    for model in (plain, changed):
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(r=3, target_modules=targets, use_dora=dora)).double()
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
        found.append(gradients(adapted, tokens(2, LENGTH))[1])
    assert_same_gradients(found[1], found[0])


@pytest.mark.device
@pytest.mark.parametrize("frozen", ["all but the norms", "all but o", "all but q and k", "embeddings and attention"])
def test_frozen_weights(frozen: str) -> None:
    keep = {
        "all but the norms": ("norm",), "all but o": ("o_proj",), "all but q and k": ("q_proj", "k_proj"),
        "embeddings and attention": ("mlp", "lm_head"),
    }[frozen]  # fmt: skip
    model = model_with("qwen3")
    for name, weight in model.named_parameters():
        weight.requires_grad_(any(word in name for word in keep))
    assert_exact(model, tokens(2, LENGTH))


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTED: dict[str, list[str]] = {
    "attention": [],
    "attention and its adapters": PROJECTIONS,
    "attention, then the MLP's adapters": ["gate_proj", "up_proj", "down_proj"],
    "attention and all adapters": [*PROJECTIONS, "gate_proj", "up_proj", "down_proj"],
}
"""What draws random numbers in a layer, by the modules that have adapters with dropout."""


def check_masks(drawing: str, how: str) -> None:
    """The gradient along a direction is the slope of the loss with the same seed."""
    impl = "eager" if how != "attention-saved" else "sdpa"
    model = model_with("llama", how, impl, attention_dropout=0.25)
    if ADAPTED[drawing]:
        model = get_peft_model(model, LoraConfig(r=3, target_modules=ADAPTED[drawing], lora_dropout=0.3)).double()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.3)
    seqtile.apply(model, blocks="none", heads=1, **settings(how))

    def loss() -> Tensor:
        torch.manual_seed(5)
        return model(input_ids=tokens(2, LENGTH)).logits.square().sum()  # the model's own loss is in float32

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    torch.manual_seed(0)  # along some directions other masks err by less than the bound
    direction = [torch.randn_like(weight) for weight in trained]
    products = [g * d for g, d in zip(torch.autograd.grad(loss(), trained), direction, strict=True)]
    values = []
    for step in (1e-4, -2e-4):
        with torch.no_grad():
            for weight, one in zip(trained, direction, strict=True):
                weight.add_(one, alpha=step)
        values.append(loss().detach())
    slope, inner = (values[0] - values[1]) / 2e-4, sum(product.sum() for product in products)
    # A gradient of other masks is off by its own size, whose part along a random direction is about this root. The
    # slope is off by what the norms' float32 leaves of the loss (6e-8 of it over the step) and by its curvature.
    size = sum(product.square().sum() for product in products) ** 0.5
    assert abs(inner - slope) <= 0.02 * size, f"{inner:.6g}, slope {slope:.6g}, size {size:.6g}"


@pytest.mark.parametrize("how", ["none", "checkpoint", "attention-saved"])
@pytest.mark.parametrize("drawing", ADAPTED)
def test_dropout_draws_the_same_masks_again(drawing: str, how: str) -> None:
    check_masks(drawing, how)


@pytest.mark.parametrize("drawing", ["attention, then the MLP's adapters", "attention and all adapters"])
def test_a_layer_that_goes_on_from_another_state_is_noticed(drawing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention's output is kept, what comes after it draws from where attention's dropout left the stream."""
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    with pytest.raises(AssertionError):
        check_masks(drawing, "attention-saved")


@pytest.mark.device
@pytest.mark.parametrize("how", ["none", "attention-saved"])
def test_bf16_and_autocast_are_as_good_as_untiled(how: str) -> None:
    for autocast in (False, True):
        model = model_with("qwen3", how, dtype=torch.float32 if autocast else torch.bfloat16)
        truth = copy.deepcopy(model).double()
        seqtile.apply(changed := copy.deepcopy(model), blocks="none", heads=1, **settings(how))
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
            untiled = gradients(model, tokens(2, 64))[1]
            got = gradients(changed, tokens(2, 64))[1]
        exact = gradients(truth, tokens(2, 64))[1]
        for name, reference in exact.items():
            assert reference is not None
            error, own = ((one[name].double() - reference).norm() for one in (got, untiled))  # type: ignore[union-attr]
            assert error <= 2 * own + 1e-5 * reference.norm(), name


def test_a_second_backward_and_a_second_derivative() -> None:
    model = model_with("llama")
    expected = gradients(model, tokens(2, LENGTH))[1]
    seqtile.apply(model, blocks="none", heads=1)
    ids = tokens(2, LENGTH)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(NotImplementedError, match="does not support double backward"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_lost_group_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with("llama")
    real = Groups.backward

    def drop_last(self: Any, parts: Any, into: Any, weights: Any, done: Any, gradient_of: Any) -> None:
        real(self, parts, into, weights, done, lambda cut: gradient_of(cut) * (cut.start == 0))

    monkeypatch.setattr(Groups, "backward", drop_last)
    with pytest.raises(AssertionError):
        assert_exact(model, tokens(2, LENGTH))


def test_instances_are_changed_and_changed_back() -> None:
    model = model_with("llama")
    names, before = list(model.state_dict()), gradients(model, tokens())[1]
    printed = str(model)
    seqtile.apply(model, heads=2, tile="shards:2")
    assert "heads=2 of 2 per pass" in str(model) and list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one = other.model.layers[0].self_attn.forward
        assert isinstance(one, HeadWise) and one.module is other.model.layers[0].self_attn
        assert_same_gradients(gradients(other, tokens())[1], before)
    seqtile.undo(model)
    assert str(model) == printed and not any("forward" in m.__dict__ for m in model.modules())
    assert not any("_z3_leaf" in m.__dict__ for m in model.modules())
    seqtile.apply(model, blocks="none", heads=1)
    seqtile.apply(model, blocks="none", heads="auto")
    seqtile.undo(model)
    assert str(model) == printed


def test_auto_is_one_pass_until_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads at once, by the model's own forward, where fewer would leave a device idle."""
    model = model_with("llama")
    seqtile.apply(model, blocks="none", heads="auto")
    calls = []
    monkeypatch.setattr(heads_of_models, "head_wise", lambda *a: calls.append(a) or operator.head_wise(*a))
    gradients(model, tokens(2, LENGTH))
    assert not calls
    monkeypatch.setattr("seqtile.tiling.BUSY_QUERIES", 32)
    gradients(model, tokens(2, LENGTH))
    assert calls and all(len(call[2].cuts) == 2 for call in calls)


def test_auto_by_length() -> None:
    assert [head_passes(n, 4, 8) for n in (1, 4096, 8192, 16384, 32768, 1 << 20)] == [8, 8, 4, 2, 1, 1]


@pytest.mark.parametrize("training", [True, False])
def test_what_follows_the_output_projection_is_not_lost(training: bool) -> None:
    """Seed-OSS drops attention's output; it is left alone, whatever mode the model is in when it is looked at."""
    model = model_with("seed_oss", residual_dropout=0.25).train(training)
    with refused("heads.no-attention", "followed by dropout"):
        seqtile.apply(model, blocks="none", heads=1)


@pytest.mark.parametrize("part", ["input_layernorm", "self_attn", "self_attn.q_proj"])
@pytest.mark.parametrize("blocks", ["auto", "none"])
def test_a_hook_sees_what_it_would_untiled(part: str, blocks: str) -> None:
    """The norm, or the projections, run as modules then."""
    model = model_with("llama")
    tiles = {} if blocks == "none" else {"tile": 5}
    seen: list[list[Tensor]] = []
    for changed in (False, True):
        if changed:
            seqtile.apply(model, blocks=blocks, heads=1, **tiles)
        calls: list[Tensor] = []

        def listen(module: Any, args: Any, words: Any, output: Any, calls: list[Tensor] = calls) -> None:
            calls.append((args[0] if args else words["hidden_states"]).detach().clone())

        hook = model.model.layers[0].get_submodule(part).register_forward_hook(listen, with_kwargs=True)
        seen.append([*calls, gradients(model, tokens(2, LENGTH))[0], *calls])
        hook.remove()
    assert len(seen[0]) == len(seen[1]) > 1
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other)


def test_models_of_another_form_are_named() -> None:
    for architecture, why in (("phi3", "projections are"), ("olmo2", "some of its heads")):
        with refused("heads.no-attention", why):
            seqtile.apply(model_with(architecture), heads=1)
    with refused("option.not-a-count", "heads=0"):
        seqtile.apply(model_with("llama"), heads=0)


def test_custom_attention_is_left_alone_and_named() -> None:
    model = model_with("llama")
    custom = model.model.layers[0].self_attn
    custom.__class__ = _Scaled
    assert "head-wise attention in 1 of 2" in assert_exact(model, tokens(2, LENGTH))
    assert "forward" not in custom.__dict__
    seqtile.undo(model)
    model.model.layers[1].self_attn.__class__ = _Scaled
    with refused("heads.no-attention", "self_attn", "custom code"):
        seqtile.apply(model, blocks="none", heads=1)


class _Scaled(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **words: Any) -> Any:
        output, *others = super().forward(hidden_states, *args, **words)
        return (output * 2, *others)


def test_what_runs_all_heads_at_once_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with("llama", use_cache=True)
    expected = gradients(model, tokens(2, LENGTH))[1]
    seqtile.apply(model, blocks="none", heads=1)
    assert_same_gradients(gradients(model, tokens(2, LENGTH))[1], expected)
    assert "key-value cache; pass use_cache=False" in caplog.text
    caplog.clear()
    model.eval()
    written = model.generate(tokens(1, 4), max_new_tokens=3, do_sample=False)
    seqtile.undo(model)
    assert torch.equal(written, model.generate(tokens(1, 4), max_new_tokens=3, do_sample=False))
    assert not caplog.text


def test_ulysses_keeps_its_own_attention_after_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention is replaced between its exchanges only: its object belongs to DeepSpeed and outlives the model."""
    ulysses_sp = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    heads_seen = []

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads_seen.append(query.shape[1])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    class OneRank(ulysses_sp.UlyssesSPAttentionHF):
        """Ulysses of one rank, which has nothing to exchange."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.attn(*args, **kwargs)

    ulysses = OneRank.__new__(OneRank)
    nn.Module.__init__(ulysses)
    ulysses.attn = attention
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "ulysses", lambda *args, **kwargs: ulysses(*args, **kwargs))
    model = model_with(how="checkpoint")
    model.config._attn_implementation_internal = "ulysses"  # its setter takes no name that it does not know
    batch = batches()["two tokens"]
    expected = gradients(model, batch)
    heads_seen.clear()
    seqtile.apply(model, heads=1)
    torch.testing.assert_close(gradients(model, batch), expected)
    assert heads_seen and max(heads_seen) < model.config.num_attention_heads
    assert ulysses.attn is attention


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_found_where_the_caller_has_switched_gradients_off(off: Any) -> None:
    model = model_with("qwen3")
    with off():
        report = str(seqtile.apply(model, blocks="none", heads=1))
    assert "head-wise attention in 2 of 2" in report


def test_the_norm_is_not_lost_where_the_input_is_no_batch() -> None:
    model = model_with("llama")
    seqtile.apply(model, blocks="none", heads=1)
    layer = model.model.layers[0]
    attention, norm, rows = layer.self_attn.forward, layer.input_layernorm, torch.randn(3, HIDDEN, dtype=torch.float64)
    attention.before["forward"] = lambda given: given
    norm_of_rows = norm(rows)
    assert torch.equal(attention(rows, norm_before=norm), norm_of_rows) and not torch.equal(norm_of_rows, rows)


class CentredNorm(nn.Module):
    """Has the form of a norm, but reads other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight * 30


def test_a_norm_that_mixes_tokens_stays_whole() -> None:
    model = model_with("llama")
    for layer in model.model.layers:
        layer.input_layernorm = CentredNorm()
    assert_exact(model, tokens(2, LENGTH), heads=1)
