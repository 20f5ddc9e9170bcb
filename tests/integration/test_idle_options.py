"""Each option that did nothing in the first training step is named by one warning, and none that acted is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import seqtile
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.options import DEFAULTS, WHOLE_LAYER
from zoo import assert_same_gradients, causal_lm, tokens

BATCH, LENGTH = 2, 24
Change = Callable[[Any], Any]


def build() -> nn.Module:
    return causal_lm("lfm2", use_cache=False, attn_implementation="sdpa")


def adapted() -> nn.Module:
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.get_submodule("base_model.model.model.embedding_norm").requires_grad_()
    return model


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


def no_layers(model: Any) -> None:
    model.config.num_hidden_layers = 0


def step(model: nn.Module, labels: bool = True, **settings: Any) -> None:
    ids = tokens(BATCH, LENGTH)
    output = model.train()(input_ids=ids, labels=ids if labels else None, **settings)
    (output.logits.sum() if output.loss is None else output.loss).backward()


def without_labels(model: nn.Module) -> Any:
    return lambda: step(model, labels=False)


def hook_on_attention(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)


def hooks_on_mixers(model: Any) -> None:
    model.model.layers[0].conv.in_proj.register_forward_hook(lambda *_: None)


def hooks_on_every_layer(model: Any) -> None:
    for layer in model.model.layers:
        layer.feed_forward.w1.register_forward_hook(lambda *_: None)


IDLE: dict[str, tuple[str, dict[str, Any], Change | None]] = {
    "tile": ("tile=64", dict(tile=64), None),
    "tile, other forwards": (
        "tile=5", dict(tile=5),
        lambda model: [setattr(layer, "forward", type(layer).forward.__get__(layer))
                       or setattr(layer.feed_forward, "forward", lambda x: 0 * x) for layer in model.model.layers],
    ),
    "blocks": (f"blocks={WHOLE_LAYER!r}", dict(blocks=WHOLE_LAYER, tile=64), None),
    "path": ("path='fused'", dict(tile=5, path="fused"), compile_layers),
    "keep": ("keep=0.5", dict(tile=5, keep=0.5, path="generic"), None),
    "keep, of no tile": ("keep=0.05", dict(tile=5, keep=0.05), None),
    "keep, memory": ("keep=memory", dict(tile=5, keep="memory:16B"), None),
    "keep, compiled": ("keep=0.5", dict(tile=5, keep=0.5), compile_layers),
    "loss": ("loss='tiled'", dict(blocks="none", loss="tiled"), without_labels),
    "checkpoint": (
        "checkpoint='layer'", dict(blocks="none", checkpoint="layer"),
        lambda model: model.gradient_checkpointing_disable(),
    ),
    "checkpoint, attention": (
        "checkpoint='attention-saved'", dict(blocks="none", checkpoint="attention-saved"),
        lambda model: model.set_attn_implementation("eager"),
    ),
    "offload": (
        "offload", dict(blocks="none", offload=True), lambda model: model.gradient_checkpointing_disable(),
    ),
    "offload, no room": (
        "offload", dict(blocks="none", offload=True),
        lambda model: setattr(installed_checkpointing(model)[0].host, "budget", 8),
    ),
    "offload, weights": ("offload='weights'", dict(blocks="none", offload="weights"), no_layers),
    "heads": ("heads=2", dict(blocks="none", heads=2), None),
    "heads, compiled": ("heads=1", dict(blocks="none", heads=1), compile_layers),
    "heads, compiled whole": (
        "heads=1", dict(blocks="none", heads=1), lambda model: model.compile(backend="eager")
    ),
    "state": ("state=64", dict(blocks="none", state=64), None),
    "chunk": ("chunk=64", dict(blocks="none", chunk=64), None),
    "chunk, hooks": ("chunk=8", dict(blocks="none", chunk=8), hooks_on_every_layer),
    "chunk, compiled": ("chunk=8", dict(blocks="none", chunk=8), compile_layers),
    "segment": (
        "segment=2", dict(blocks="none", chunk=8, segment=2),
        lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    ),
    "state, hooks": ("state=5", dict(blocks="none", state=5), hooks_on_mixers),
    "state, compiled": ("state=5", dict(blocks="none", state=5), compile_layers),
    "state, compiled whole": (
        "state=5", dict(blocks="none", state=5), lambda model: model.compile(backend="eager")
    ),
}  # fmt: skip
"""The option as the warning names it, the settings, and what keeps it from acting."""

ACTS: list[dict[str, Any]] = [
    dict(tile=5), dict(tile=5, path="fused", keep=0.5), dict(tile=5, blocks=WHOLE_LAYER), dict(tile=5, path="generic"),
    dict(tile=5, loss="tiled", checkpoint="attention-saved", offload=True, heads=1, state=5),
    dict(blocks="none", checkpoint="layer"), dict(blocks="none", offload="weights"), dict(heads="auto", state="auto"),
    dict(blocks="none", chunk=8, checkpoint="layer"), dict(blocks="none", chunk=8, segment=2),
]  # fmt: skip


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and "seqtile" in one.name]


def prepared(settings: dict[str, Any], change: Change | None) -> Callable[[], None]:
    model = adapted() if settings.get("offload") == "weights" else build()
    seqtile.apply(model, **settings)
    run = change(model.get_base_model() if hasattr(model, "get_base_model") else model) if change is not None else None
    return run if callable(run) else lambda: step(model)


@pytest.mark.parametrize("case", IDLE)
def test_an_option_without_effect_is_named_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    named, settings, change = IDLE[case]
    run = prepared(settings, change)
    caplog.clear()
    for _ in range(2):
        run()
    sentences = [text for text in warned(caplog) if "first training step" in text]
    assert [named in text.partition(" in the first")[0] for text in sentences].count(True) == 1, warned(caplog)
    others = {"tile": ["tile=64"], "blocks": ["tile=64"]}.get(case, [])
    assert len(sentences) <= 1 + len(others)
    torch._dynamo.reset()


def test_every_option_has_a_case() -> None:
    named = {option for _, settings, _ in IDLE.values() for option in settings}
    # Names that match nothing are refused at once; the head's tiles and kernel act where the loss does; groups of
    # pictures need a model that takes some, in test_vision.py.
    assert DEFAULTS.keys() - named <= {"only", "trust", "loss_tile", "loss_impl", "vision"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", ACTS, ids=str)
def test_an_option_that_acts_is_not_named(
    settings: dict[str, Any], compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    not_compiled = {"heads", "state", "chunk", "keep", "offload"} & settings.keys()
    if compiled and (not_compiled or settings.get("path") == "fused"):
        pytest.skip("not under torch.compile")
    run = prepared(settings, compile_layers if compiled else None)
    caplog.clear()
    run()
    assert not warned(caplog)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings",
    [dict(tile=5, path="fused"), dict(tile=5, path="generic"), dict(tile=5, blocks=WHOLE_LAYER), dict(tile=5, heads=1),
     dict(blocks="none", loss="tiled"), dict(blocks="none", state=5), dict(blocks="none", heads=1)],
    ids=str,
)  # fmt: skip
def test_a_hook_on_every_module_acts_as_untiled(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """It may change what linear layers and norms return, whose modules the operators do not call."""

    def scale(module: nn.Module, args: Any, output: Any) -> Any:
        return 1.25 * output if isinstance(output, torch.Tensor) and module.training else None

    model, untiled = build(), build()
    seqtile.apply(model, **settings)
    caplog.clear()
    with nn.modules.module.register_module_forward_hook(scale):
        step(untiled)
        step(model)
    expected, got = ({name: p.grad for name, p in one.named_parameters()} for one in (untiled, model))
    assert_same_gradients(got, expected)
    assert any("scale" in text for text in warned(caplog))


@pytest.mark.parametrize(
    "settings",
    [dict(tile=5, loss="tiled"), dict(tile=5, path="generic"), dict(blocks="none", heads=1), dict(tile=5, state=5)],
    ids=str,
)
def test_pytorchs_flop_counter_leaves_tiles_on(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Its hooks are on every module."""
    model = build()
    seqtile.apply(model, **settings)
    caplog.clear()
    with FlopCounterMode(display=False) as counter:
        step(model)
    assert counter.get_total_flops() > 0 and not warned(caplog)


def test_the_step_of_a_plan_is_not_the_first_training_step(caplog: pytest.LogCaptureFixture) -> None:
    seqtile.fit(causal_lm("llama"), max_length=64, device="8GiB", tile=4096, loss_tile=16, heads=2, keep=0.0)
    assert not warned(caplog)
