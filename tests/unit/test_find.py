"""Blocks are found by structure in every architecture, and tiling them changes no gradient."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import seqtile
from refusals import refused
from seqtile.recognise.candidates import find_blocks
from seqtile.recognise.decoder_layers import decoder_layers
from watching import rows_of
from zoo import (
    ARCHITECTURES,
    EXPERTS,
    HIDDEN,
    TILED_BLOCKS,
    VOCABULARY,
    assert_same_gradients,
    causal_lm,
    exact_dtype,
    gradients,
    picture_and_text,
    tokens,
    vision_language_model,
)


@pytest.mark.parametrize(
    ("path", "checkpointing"), [("generic", False), ("auto", True)], ids=["generic", "fused under a checkpoint"]
)
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
    from seqtile.ops import tile_checkpoint

    write = tile_checkpoint.TileGradients.write_input

    def lossy(self, number, index, gradient):
        write(self, number, index, gradient if index < len(self.cuts.sizes) - 1 else torch.zeros_like(gradient))

    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    monkeypatch.setattr(tile_checkpoint.TileGradients, "write_input", lossy)
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


@pytest.mark.parametrize("by_class", [False, True], ids=["by name", "by class"])
def test_prediction_heads_are_left_alone_and_named(by_class: bool) -> None:
    """MTP: DeepSeek V3, GLM 4.5 and Qwen3-Next have them below `mtp`, Ling in the list of layers."""
    model = causal_lm("llama")
    layer = type(model.model.layers[0])
    head = type("LlamaMTPLayer" if by_class else layer.__name__, (layer,), {})(model.config, 2)
    model.model.layers.append(head) if by_class else model.model.add_module("mtp", nn.ModuleList([head]))
    name = "model.layers.2" if by_class else "model.mtp"
    report = seqtile.apply(model, tile=5, heads=1)
    assert [block.name for block in report.blocks] == [f"model.layers.{n}.mlp" for n in range(2)]
    assert [left.name for left in report.left if "multi-token-prediction head" in left.why] == [name]
    assert not any("forward" in module.__dict__ for module in head.modules()) and len(decoder_layers(model)) == 2
    only = seqtile.apply(model, tile=5, only=f"{name}*")
    assert [block.module for block in find_blocks(model, everything=True)[0]][2:] == [head.mlp] and only.tiled == 1


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("towers", [False, True], ids=["language", "towers too"])
@pytest.mark.parametrize("architecture", ["qwen2_vl", "qwen2_5_vl"])
def test_a_picture_and_positions_in_three_dimensions(architecture: str, towers: bool, checkpointing: bool) -> None:
    model, batch = vision_language_model(torch.float64, architecture), picture_and_text(torch.float64)
    loss, expected = gradients(model, batch)
    assert expected["model.visual.blocks.0.mlp.%s.weight" % ("fc1" if architecture == "qwen2_vl" else "up_proj")].any()
    report = seqtile.apply(model, tile=5, only=["*visual.blocks*", "*layers*"] if towers else None)
    assert report.tiled == (3 if towers else 2)
    assert [one.name for one in report.left] == ([] if towers else ["model.visual.blocks.0.mlp"])
    if checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tiled_loss, got = gradients(model, batch)
    torch.testing.assert_close(tiled_loss, loss)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("architecture", EXPERTS)
def test_an_expert_that_no_token_reaches_has_the_untiled_zeros(architecture: str, checkpointing: bool) -> None:
    count = {"deepseek_v3": "n_routed_experts", "qwen3_moe": "num_experts"}.get(architecture, "num_local_experts")
    model, ids = causal_lm(architecture, **{count: 16}), tokens(1, 3)
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=1)
    blocks = [block.name for block in report.blocks if block.kind == "experts"]
    if checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    for name in (name for name in got if name.rpartition(".")[0] in blocks):
        idle = ~expected[name].flatten(1).any(-1)
        assert 0 < idle.sum() < 16 and torch.equal(idle, ~got[name].flatten(1).any(-1)), name


class _Experts(nn.Module):
    """Experts in a list, each called even where no token reaches it, a shared one, and a loss on the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(_Mixer(torch.relu) for _ in range(4))
        self.shared_expert = _Mixer(torch.tanh)

    def forward(self, x):
        rows = x.reshape(-1, 8)
        share, chosen = self.router(rows).softmax(-1).max(-1)
        y = self.shared_expert(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.where(chosen == number)[0]
            y = y.index_add(0, mine, expert(rows[mine]) * share[mine, None])
        return y.reshape(x.shape), self.router(rows).logsumexp(-1).pow(2).mean()


@pytest.mark.parametrize("path", ["generic", "auto"])
def test_experts_in_a_list_that_are_called_without_a_token(path: str) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([_Experts()]).double(), torch.randn(1, 3, 8, dtype=torch.float64)

    def step() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        y, auxiliary = model[0](x)
        (y.pow(2).sum() + auxiliary).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = step()
    assert any(".experts." in name and grad is not None and not grad.any() for name, grad in expected.items())
    assert seqtile.apply(model, tile=1, path=path, trust="*").tiled == 5
    assert_same_gradients(step(), expected)


def _anyone(name: str, module: nn.Module) -> bool:
    """Whom a caller trusts who trusts every block."""
    return True


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
        lambda h: h + torch.arange(h.shape[1])[:, None],
    ],
    ids=["cumsum", "mean", "count"],
)
def test_a_module_that_mixes_tokens_is_left_alone(mix) -> None:
    found, left = find_blocks(nn.ModuleDict({"mixer": _Mixer(mix)}), trusted=_anyone)
    assert not found
    assert left[0].name == "mixer" and left[0].why.startswith("not position-wise")
    with refused("only.cannot-be-tiled", "mixer (_Mixer)"):
        seqtile.apply(nn.ModuleDict({"mixer": _Mixer(mix)}), trust="*")


def test_the_same_module_without_mixing_is_found() -> None:
    found, left = find_blocks(nn.ModuleDict({"mlp": _Mixer(torch.relu)}), trusted=_anyone)
    assert [(block.name, block.hidden, block.intermediate) for block in found] == [("mlp", 8, 16)] and not left
    assert found[0].why == "by its trace, forward and backward"


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
    assert report.tiled == 2 and {block.path for block in report.blocks} == {"fused"}
    assert report.blocks[0].why == "by its trace, forward and backward"
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():
        empty.get_buffer(name).copy_(buffer)
    _, got = gradients(empty.train(), ids)
    assert_same_gradients(got, expected)


def _same_as_untiled(model: nn.Module, call, path: str) -> seqtile.Report:
    inputs = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(call(model).pow(2).sum(), inputs, allow_unused=True)
    report = seqtile.apply(model, tile=4, path=path, trust="*")
    got = torch.autograd.grad(call(model).pow(2).sum(), inputs, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    return report


class _Scaled(nn.Module):
    """An MLP whose formula depends on an argument or on an attribute that is no plain number."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, scale=1.0, bias=None):
        factor = getattr(self, "factors", (1.0,))[0] * getattr(getattr(self, "held", None), "factor", 1.0)
        y = self.down(torch.relu(self.up(x))) * scale * factor
        return y if bias is None else y + bias


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize(
    "arguments",
    [{"scale": 3.0}, {"scale": torch.full((8,), 2.0)}, {"bias": torch.ones(1, 1, 8)}, {"bias": torch.ones(2, 13, 8)},
     {"scale": torch.arange(26.0).reshape(2, 13, 1)}],
    ids=["number", "per feature", "broadcast", "per token", "per token column"],
)  # fmt: skip
def test_other_arguments_are_passed_on(arguments: dict, path: str) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([_Scaled()]).double(), torch.randn(2, 13, 8, dtype=torch.float64)
    _same_as_untiled(model, lambda m: m[0](x, **arguments), path)


@pytest.mark.parametrize("path", ["generic", "auto"])
def test_a_tensor_per_sequence_runs_untiled_and_says_so(path: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([_Scaled()]).double(), torch.randn(2, 13, 8, dtype=torch.float64)
    bias = torch.randn(2, 1, 8, dtype=torch.float64)
    _same_as_untiled(model, lambda m: m[0](x, bias=bias), path)
    with rows_of(model[0].up.weight) as rows:
        model[0](x, bias=bias)
        assert rows == [26]
        model[0](x)  # and the next call is tiled
        assert rows[1:] == [4] * 5 + [3] * 2
    told = [record.message for record in caplog.records if "0 runs untiled" in record.message]
    assert len(told) == 1 and "expected one row per token, or one for the whole batch" in told[0]


def test_an_argument_beside_hidden_states_is_told_at_apply() -> None:
    class Conditioned(_Scaled):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + shift

    note = "Conditioned takes 'shift' beside hidden states; calls with one row per sequence, [B, 1, D]"
    assert note in str(seqtile.apply(nn.ModuleList([Conditioned()]), trust="*"))
    assert "beside hidden states" not in str(seqtile.apply(nn.ModuleList([_Scaled()]), trust="*"))


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("held", [True, False], ids=["object", "tuple"])
def test_a_formula_is_not_taken_from_another_instance(held: bool, path: str) -> None:
    from types import SimpleNamespace

    torch.manual_seed(0)
    blocks = [_Scaled(held=SimpleNamespace(factor=f)) if held else _Scaled(factors=(f,)) for f in (1.0, 2.0)]
    model, x = nn.ModuleList(blocks).double(), torch.randn(2, 13, 8, dtype=torch.float64)
    _same_as_untiled(model, lambda m: m[1](m[0](x)), path)


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm, nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x).flatten(0, -2)).reshape(*x.shape[:-1], 16))


def test_running_statistics_over_tokens_are_left_alone() -> None:
    assert not find_blocks(nn.ModuleList([_Normed(nn.BatchNorm1d(16))]), trusted=_anyone)[0]
    assert not find_blocks(nn.ModuleList([_Normed(nn.BatchNorm1d(16, affine=False))]), trusted=_anyone)[0]
    assert len(find_blocks(nn.ModuleList([_Normed(nn.LayerNorm(16))]), trusted=_anyone)[0]) == 1


def test_mixing_over_the_batch_and_in_one_instance_only_is_seen() -> None:
    found, left = find_blocks(nn.ModuleList([_Mixer(lambda h: h.softmax(0))]), trusted=_anyone)
    assert not found and "other tokens" in left[0].why
    two = nn.ModuleDict(
        {"a": nn.ModuleDict({"mlp": _Mixer(torch.relu)}), "b": nn.ModuleDict({"mlp": _Mixer(torch.cumsum)})}
    )
    two["b"]["mlp"].mix = lambda h: h.cumsum(1)
    assert [block.name for block in find_blocks(two, trusted=_anyone)[0]] == ["a.mlp"]


class _WithScalar(_Mixer):
    def forward(self, x):
        y = super().forward(x)
        return y, y.mean()


def test_a_scalar_beside_the_output_is_a_reason() -> None:
    found, left = find_blocks(nn.ModuleList([_WithScalar(torch.relu)]), trusted=_anyone)
    assert not found and "one token's output depends on other tokens: mean" in left[0].why


@pytest.mark.parametrize("path", ["generic", "auto"])
def test_the_model_itself_may_be_the_block(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    report = _same_as_untiled(model, lambda m: m(x), path)
    assert report.tiled == 1

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x):
            return self.net(x)

    assert _same_as_untiled(Root().double(), lambda m: m(x), path).tiled == 1


@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
def test_an_mlp_that_takes_the_residual_too(architecture: str) -> None:
    from transformers import AutoConfig

    torch.manual_seed(0)
    sizes = {"bloom": {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}}.get(
        architecture, {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64}
    )
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, **special, **sizes)
    model, ids = AutoModelForCausalLM.from_config(config).train(), tokens()  # MPT's mask is made for float32
    _, expected = gradients(model, ids)
    assert seqtile.apply(model, tile=5).tiled == 2
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)


def test_an_activation_with_weights_and_constants_of_its_own() -> None:
    """Apertus: xIELU trains two scalars and keeps constants in buffers, which are no statistics over tokens."""
    from transformers.models.apertus.modeling_apertus import ApertusConfig, ApertusMLP

    torch.manual_seed(0)
    model, x = nn.ModuleList([ApertusMLP(ApertusConfig(hidden_size=8, intermediate_size=24))]), torch.randn(2, 13, 8)
    weights = [*model.parameters()]
    assert len(weights) == 4
    expected = torch.autograd.grad(model[0](x).pow(2).sum(), weights)
    assert seqtile.apply(model, tile=5).tiled == 1
    torch.testing.assert_close(torch.autograd.grad(model[0](x).pow(2).sum(), weights), expected)
