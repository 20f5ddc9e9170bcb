"""Encoders and encoder-decoder models: MLPs that are two children of a layer, or calls in its forward."""

import pytest
import torch
from torch import nn

import seqtile
from refusals import refused
from seqtile.recognise.candidates import find_blocks
from watching import dropout_that_scales
from zoo import (
    ENCODERS,
    HIDDEN,
    INTERMEDIATE,
    assert_same_gradients,
    gradients,
    tokens,
    with_encoder,
)

FC = ("fc1", "activation_fn", "activation_dropout", "fc2", "dropout")
TOGETHER = {
    "bert": ("intermediate", "output"),
    "roberta": ("intermediate", "output"),
    "mpnet": ("intermediate", "output"),
    "modernbert": ("mlp_norm", "mlp"),
    "t5": ("layer_norm", "DenseReluDense"),
    "mt5": ("layer_norm", "DenseReluDense"),
    "bart": (*FC, "final_layer_norm"),
    "mbart": ("final_layer_norm", *FC),
    "pegasus": ("final_layer_norm", *FC),
}
# ModernBERT in transformers 5.0 is decorated with torch.compile, and torch's own inductor warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
GENERIC = ("bert", "roberta", "mpnet", "bart")


def _checkpointed(model: nn.Module) -> nn.Module:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("architecture", TOGETHER)
def test_tiled_model_has_the_untiled_gradients(architecture: str, checkpointing: bool, path: str) -> None:
    model, ids = with_encoder(architecture, torch.float64), tokens()
    loss, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5, path=path)
    assert report.tiled == (2 if architecture in ENCODERS else 4) and not report.left
    expected_together = TOGETHER[architecture]
    assert {block.together for block in report.blocks} == {expected_together}
    fused = path == "auto" and architecture not in GENERIC
    assert {block.path for block in report.blocks} == {"fused" if fused else "generic"}
    if checkpointing and model.supports_gradient_checkpointing:
        _checkpointed(model)
    tiled_loss, got = gradients(model, ids)
    torch.testing.assert_close(tiled_loss, loss)
    assert_same_gradients(got, expected)


DROPS = {
    "bert": {"hidden_dropout_prob": 0.5},
    "mt5": {"dropout_rate": 0.5},
    "bart": {"dropout": 0.5, "activation_dropout": 0.25},
    "mbart": {"dropout": 0.5},
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("architecture", DROPS)
def test_each_dropout_is_applied_once(architecture: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = with_encoder(architecture, torch.float64, **DROPS[architecture]), tokens()
    model.set_attn_implementation("eager")  # the fused attention draws in a kernel of its own
    with dropout_that_scales(monkeypatch):
        _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    if checkpointing:
        _checkpointed(model)
    gradients(model, ids)  # proves what apply could not
    with dropout_that_scales(monkeypatch):
        _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    assert model.eval()(input_ids=ids, labels=ids).loss == model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("architecture", DROPS)
def test_the_recompute_draws_the_masks_of_the_forward(architecture: str, checkpointing: bool) -> None:
    """The gradient is the slope of the loss that one seed gives: a mask drawn again in backward would miss it."""
    model, ids = with_encoder(architecture, torch.float64, **DROPS[architecture]), tokens()
    seqtile.apply(model, tile=5)
    if checkpointing:
        _checkpointed(model)

    def seeded() -> torch.Tensor:
        torch.manual_seed(3)
        return model(input_ids=ids, labels=ids).loss

    weights = [p for p in model.parameters() if p.dim() == 2 and INTERMEDIATE in p.shape]
    found = torch.autograd.grad(seeded(), weights)
    way = [torch.randn_like(weight) for weight in weights]
    ends = []
    with torch.no_grad():
        for step in (1e-4, -2e-4):
            for weight, part in zip(weights, way, strict=True):
                weight.add_(part, alpha=step)
            ends.append(seeded())
    slope = (ends[0] - ends[1]) / 2e-4
    expected = sum((g * part).sum() for g, part in zip(found, way, strict=True))
    torch.testing.assert_close(slope, expected, rtol=1e-2, atol=0.0)  # T5's norm rounds to float32


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_generation_is_unchanged(architecture: str) -> None:
    model, ids = with_encoder(architecture).eval(), tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with seqtile.applied(model, tile=4):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert "tile=" not in str(model)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("bert", {"hidden_dropout_prob": 0.1}), ("modernbert", {}), ("t5", {}), ("mt5", {"dropout_rate": 0.1}),
     ("mbart", {"dropout": 0.1}), ("bart", {"dropout": 0.1, "activation_dropout": 0.1})],
    ids=["bert", "modernbert", "t5", "mt5", "mbart", "bart"],
)  # fmt: skip
def test_no_product_is_added_under_a_checkpoint(architecture: str, config: dict) -> None:
    def units(model: nn.Module) -> float:
        ids = tokens(2, 24)
        with seqtile.count_products() as products:
            model(input_ids=ids, labels=ids).loss.backward()
        return products.units(48, HIDDEN, INTERMEDIATE)

    untiled = units(_checkpointed(with_encoder(architecture, **config)))
    model = with_encoder(architecture, **config)
    seqtile.apply(model, tile="shards:3")
    assert untiled > 0
    assert units(_checkpointed(model)) <= untiled


def test_a_layer_that_cuts_its_feed_forward_itself() -> None:
    model, ids = with_encoder("bert", torch.float64, chunk_size_feed_forward=4), tokens(2, 12)
    _, expected = gradients(model, ids)
    assert seqtile.apply(model, tile=5).tiled == 2
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)


def test_a_hook_on_half_of_an_mlp_takes_it_out_of_the_tile(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = with_encoder("bert", torch.float64), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    seen: list[torch.Size] = []
    model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    _, got = gradients(model, ids)
    assert seen == [torch.Size((2, 13, INTERMEDIATE))]
    assert_same_gradients(got, expected)
    assert any("runs untiled: intermediate has hooks" in record.message for record in caplog.records)


def test_a_layer_whose_last_linear_layer_stays_in_float32() -> None:
    """T5 in bfloat16 keeps ``wo`` in float32 and casts before it: the fused operator would compute it in bfloat16."""
    model, ids = with_encoder("t5", torch.bfloat16), tokens()
    for name, module in model.named_modules():
        if name.endswith("wo"):
            module.float()
    expected = model(input_ids=ids, labels=ids).logits
    report = seqtile.apply(model, tile=5)
    assert {block.not_fused for block in report.blocks} == {"its linear layers differ in dtype"}
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, expected)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.proj = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)


class _Between(_Layer):
    def forward(self, x):
        h = self.fc1(x)
        h = h.cumsum(1)
        return x + self.proj(self.fc2(h))


def test_what_resembles_an_mlp_and_is_not_read_is_named() -> None:
    found, left = find_blocks(nn.ModuleList([_Between()]))
    assert not found and left[0].name == "0" and "_Between is custom code" in left[0].why
    found, left = find_blocks(nn.ModuleList([_Between()]), trusted=lambda name, module: True)
    assert not found and "depends on other tokens" in left[0].why
    with refused("blocks.nothing-to-tile", "0 (_Between)", "custom code"):
        seqtile.apply(nn.ModuleList([_Between()]))


def test_experts_in_a_module_list_and_those_that_no_token_reaches() -> None:
    """Switch: each expert is a module of its own; a loss on the router's logits is part of the objective."""
    model, ids = with_encoder("switch_transformers"), tokens(1, 2)
    logits: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".router.classifier"):
            module.register_forward_hook(lambda m, args, out: logits.append(out))

    def step() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        logits.clear()
        loss = model(input_ids=ids, labels=ids).loss
        (loss + sum(found.logsumexp(-1).pow(2).mean() for found in logits)).backward()
        assert len(logits) == 2
        return {name: p.grad for name, p in model.named_parameters()}

    expected = step()
    idle = [name for name, grad in expected.items() if grad is None and ".expert_" in name]
    routers = [name for name in expected if "router" in name]
    assert idle and routers and all(expected[name] is not None for name in routers)
    report = seqtile.apply(model, tile=1)
    assert sum(".expert_" in block.name for block in report.blocks) == 8
    assert_same_gradients(step(), expected)
