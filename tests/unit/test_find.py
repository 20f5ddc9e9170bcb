"""Blocks are found by structure in every architecture, and tiling them changes no gradient."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import seqtile
from seqtile.models.find import find_blocks
from zoo import (
    ARCHITECTURES,
    EXPERTS,
    TILED_BLOCKS,
    assert_same_gradients,
    causal_lm,
    exact_dtype,
    gradients,
    tokens,
    vision_language_model,
)


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiled_model_has_the_untiled_gradients(architecture: str, checkpointing: bool, path: str) -> None:
    model, ids = causal_lm(architecture, exact_dtype(architecture)), tokens()
    loss, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5, path=path)
    assert report.tiled == TILED_BLOCKS[architecture]
    fused = {block.path == "fused" for block in report.blocks if block.kind != "experts"}
    assert fused <= {path == "auto"}, [block.not_fused for block in report.blocks]
    if checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tiled_loss, got = gradients(model, ids)
    torch.testing.assert_close(tiled_loss, loss)
    assert_same_gradients(got, expected)


def test_a_lost_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails for an operator that drops the last tile's input gradient."""
    from seqtile.ops import generic

    write = generic._Gradients.write_input

    def lossy(self, number, index, gradient):
        write(self, number, index, gradient if index < len(self.cuts) - 1 else torch.zeros_like(gradient))

    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    monkeypatch.setattr(generic._Gradients, "write_input", lossy)
    with seqtile.applied(model, tile=5, path="generic"):
        _, got = gradients(model, ids)
    with pytest.raises(AssertionError):
        assert_same_gradients(got, expected)


@pytest.mark.parametrize("architecture", EXPERTS)
def test_router_stays_whole_and_keeps_its_auxiliary_gradient(architecture: str) -> None:
    """Experts are tiled after routing: router logits keep one row per token and the auxiliary loss its gradient."""
    config = {} if architecture == "deepseek_v3" else {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    model, ids = causal_lm(architecture, **config), tokens()
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5)
    assert any(block.kind == "experts" for block in report.blocks)
    assert not any("router" in block.name or block.name.endswith("gate") for block in report.blocks)
    _, got = gradients(model, ids)
    routers = [name for name in got if "router" in name or name.endswith("gate.weight")]
    assert routers and all(got[name].abs().max() > 0 for name in routers if got[name] is not None)
    assert_same_gradients(got, expected)
    if config:
        output = model(input_ids=ids, labels=ids)
        assert output.aux_loss is not None and output.router_logits[0].shape[0] == ids.numel()


def test_only_the_language_part_of_a_vision_language_model() -> None:
    model, ids = vision_language_model(torch.float64), tokens()
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5)
    assert [block.name for block in report.blocks] == [f"model.language_model.layers.{n}.mlp" for n in range(2)]
    assert any("visual" in left.name and "vision" in left.why for left in report.left)
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    named = seqtile.apply(model, tile=5, only="*visual.blocks.0.mlp")
    assert [block.name for block in named.blocks] == ["model.visual.blocks.0.mlp"]


class _Mixer(nn.Module):
    """Linear layers shaped like an MLP's around something that looks at other tokens."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(8, 16), nn.Linear(16, 8), mix

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h.cumsum(1),
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: h.flip(1),
        lambda h: h.softmax(1),
        lambda h: h + torch.arange(h.shape[1])[:, None],
    ],
    ids=["cumsum", "mean", "flip", "softmax", "position"],
)
def test_a_module_that_mixes_tokens_is_left_alone(mix) -> None:
    found, left = find_blocks(nn.ModuleDict({"mixer": _Mixer(mix)}))
    assert not found
    assert left[0].name == "mixer" and "other tokens" in left[0].why
    with pytest.raises(seqtile.UserError, match=r"looked for .* found mixer \(_Mixer\): not position-wise"):
        seqtile.apply(nn.ModuleDict({"mixer": _Mixer(mix)}))


def test_the_same_module_without_mixing_is_found() -> None:
    found, left = find_blocks(nn.ModuleDict({"mlp": _Mixer(torch.relu)}))
    assert [(block.name, block.hidden, block.intermediate) for block in found] == [("mlp", 8, 16)] and not left
    assert "permuted tokens" in found[0].why


def test_attention_is_never_taken_for_an_mlp() -> None:
    for architecture in ARCHITECTURES:
        found, _ = find_blocks(causal_lm(architecture))
        assert not any("attn" in block.name or "attention" in block.name for block in found)


def test_the_probe_leaves_no_trace() -> None:
    model = causal_lm("gpt2", resid_pdrop=0.5)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    find_blocks(model)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]


def test_meta_device_then_real_weights() -> None:
    model, ids = causal_lm("llama"), tokens()
    _, expected = gradients(model, ids)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    report = seqtile.apply(empty, tile=5)
    assert report.tiled == 2 and "meta" in report.blocks[0].why
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():
        empty.get_buffer(name).copy_(buffer)
    _, got = gradients(empty.train(), ids)
    assert_same_gradients(got, expected)
