"""Checkpoints that differ by layer: each layer keeps and recomputes what its policy says, whoever switches them on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import seqtile
from refusals import refused
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.options import layer_policies
from zoo import HEAD_DIM, HIDDEN, causal_lm, picture_and_text, tokens, vision_language_model

BATCH, LENGTH, LAYERS, HEADS = 2, 24, 5, 4
INPUT, KEPT = (BATCH * LENGTH * width * 4 for width in (HIDDEN, HEADS * (HEAD_DIM + 1)))
MIXED = "none:1+attention-saved:2"
SETTINGS = [
    "none:2",
    "attention-saved:3",
    MIXED,
    "none:2+attention-saved",
    "layer:1+none:1+attention-saved:1",
    "none:5",
]


class Attention(TorchDispatchMode):
    """Counts forwards of attention kernels, recomputed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += "_scaled_dot_product" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@contextmanager
def layer_forwards(model: nn.Module) -> Iterator[list[int]]:
    """Inside, counts how often each decoder layer begins to run, recomputes included."""
    norms = [module for name, module in model.named_modules() if name.endswith(".input_layernorm")]
    counts = [0] * len(norms)

    def counter(number: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[number] += 1

        return count

    handles = [norm.register_forward_pre_hook(counter(number)) for number, norm in enumerate(norms)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def llama() -> nn.Module:
    return causal_lm("llama", use_cache=False, attn_implementation="sdpa", num_hidden_layers=LAYERS)


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids = tokens(BATCH, LENGTH)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (record for record in caplog.records if record.levelno >= logging.WARNING)
    return [record.getMessage() for record in records if record.name.startswith("seqtile")]


def effects(checkpoint: str, layers: int = LAYERS) -> tuple[list[int], int]:
    """How often each layer begins to run in a step, and the forwards of attention."""
    policies = layer_policies(checkpoint, layers)
    return [1 if policy is None else 2 for policy in policies], layers + policies.count("layer")


def assert_runs_as_said(model: nn.Module, checkpoint: str, run: Callable[[], Any], steps: int = 1) -> None:
    with Attention() as attention, layer_forwards(model) as forwards:
        run()
    expected_forwards, expected_attention = effects(checkpoint)
    assert forwards == [steps * count for count in expected_forwards]
    assert attention.forwards == steps * expected_attention


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("checkpoint", SETTINGS)
def test_each_layer_does_what_its_policy_says(checkpoint: str, offload: bool) -> None:
    expected = step(llama())
    model = llama()
    seqtile.apply(model, blocks="none", checkpoint=checkpoint, offload=offload)
    assert_runs_as_said(model, checkpoint, lambda: torch.testing.assert_close(step(model), expected))
    seqtile.undo(model)
    assert not model.is_gradient_checkpointing
    assert_runs_as_said(model, "none", lambda: step(model))


TECHNIQUES: list[dict[str, Any]] = [{}, {"heads": 1}, {"state": 8}, {"blocks": "mlp+norm+projections"}]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [(name, one) for name in ("llama", "qwen3_5_text") for one in TECHNIQUES if name != "llama" or "state" not in one],
    ids=str,
)
def test_beside_other_techniques(architecture: str, settings: dict[str, Any]) -> None:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {architecture}")
    config = {} if architecture == "llama" else {"layer_types": ["full_attention", "linear_attention"] * 2}

    def run(**options: Any) -> tuple[int, Any]:
        model = causal_lm(architecture, use_cache=False, attn_implementation="sdpa", num_hidden_layers=4, **config)
        seqtile.apply(model, **options)
        with Attention() as attention:
            result = step(model)
        return attention.forwards, result

    _, expected = run(blocks="none", heads=1)
    (plain, _), (saved, _), (mixed, got) = (
        run(tile=8, checkpoint=checkpoint, **settings)
        for checkpoint in ("layer", "attention-saved", "none:1+attention-saved:2")
    )
    torch.testing.assert_close(got, expected)
    attend = 4 if architecture == "llama" else 2
    assert mixed - saved == (plain - saved) / attend > 0, "the first layer's attention is recomputed"


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("order", ["apply first", "apply last", "a copy"])
def test_whoever_switches_checkpointing_on(order: str, adapters: bool) -> None:
    model = llama()
    if order != "apply last":
        seqtile.apply(model, blocks="none", checkpoint=MIXED)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if order == "apply last":
        seqtile.apply(model, blocks="none", checkpoint=MIXED)
    if order == "a copy":
        model = copy.deepcopy(model)
        assert installed_checkpointing(model)[0].module in model.modules()
    assert_runs_as_said(model, MIXED, lambda: step(model))
    seqtile.undo(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_runs_as_said(model, "layer", lambda: step(model))


@pytest.mark.parametrize("tiled", ["before the trainer", "by the callback"])
def test_under_a_trainer(tiled: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the trainer's rows need datasets")
    model, rows = llama(), tokens(8, LENGTH).tolist()
    if tiled == "before the trainer":
        seqtile.apply(model, blocks="none", checkpoint=MIXED)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    callbacks = [seqtile.TilingCallback(blocks="none", checkpoint=MIXED)] if tiled == "by the callback" else []
    trainer = Trainer(
        model, arguments, train_dataset=datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=callbacks,
    )  # fmt: skip
    assert_runs_as_said(model, MIXED, trainer.train, steps=2)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_under_an_engine(engine: str, order: str, one_process: None) -> None:
    expected = step(llama())
    model: nn.Module = llama()
    if order == "apply first":
        seqtile.apply(model, blocks="none", checkpoint=MIXED)
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    if order == "apply last":
        seqtile.apply(model, blocks="none", checkpoint=MIXED)

    def compare() -> None:
        loss, gradients = step(model)
        assert torch.equal(loss, expected[0])
        for name, gradient in gradients.items():
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(whole, expected[1][name.removeprefix("module.")])

    assert_runs_as_said(model, MIXED, compare)


def test_what_waits_on_the_host_is_what_checkpoints_keep() -> None:
    """Of a layer without a checkpoint nothing does, of a plain one its input alone."""
    for checkpoint in SETTINGS:
        model, ids = llama(), tokens(BATCH, LENGTH)
        report = seqtile.apply(model, blocks="none", checkpoint=checkpoint, offload=True)
        loss = model(input_ids=ids, labels=ids).loss
        policies = layer_policies(checkpoint, LAYERS)
        saved = policies.count("attention-saved")
        [checkpointing] = installed_checkpointing(model)
        assert checkpointing.host is not None
        assert checkpointing.host.parked_bytes == (LAYERS - policies.count(None)) * INPUT + saved * KEPT
        assert (checkpointing.attention.saved_bytes if checkpointing.attention else 0) == saved * KEPT
        loss.backward()
        assert checkpointing.host.parked_bytes == 0
        for policy in {*policies}:
            assert f"({policies.count(policy)} of {LAYERS} layers)" in report.done["checkpoint"]


@pytest.mark.parametrize(
    ("checkpoint", "bytes_of_step"), [("none:4", INPUT), ("none:1+attention-saved:2", 4 * INPUT + 2 * KEPT)]
)
def test_the_host_is_asked_for_no_more_than_it_gets(
    checkpoint: str, bytes_of_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [bytes_of_step]
    monkeypatch.setattr("seqtile.checkpointing.host_offload.available_host_bytes", lambda: free[0])
    seqtile.apply(model := llama(), blocks="none", checkpoint=checkpoint, offload=True)
    step(model)
    free[0] -= LAYERS
    seqtile.apply(model := llama(), blocks="none", checkpoint=checkpoint, offload=True)
    with refused("offload.exceeds-host-memory"):
        step(model)


def test_a_tower_is_checkpointed_plainly() -> None:
    model = vision_language_model()
    seqtile.apply(model, blocks="none", checkpoint="none:2")
    batch = picture_and_text()
    with Attention() as attention:
        model(**batch).loss.backward()
    assert attention.forwards == 2 + 2, "one layer of the tower, twice, and two of the language model"


@pytest.mark.parametrize("checkpoint", ["none:2", "none:1+layer:1"])
def test_compiled_layers_stay_compiled(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    expected = step(llama())
    model = llama()
    seqtile.apply(model, blocks="none", checkpoint=checkpoint)
    model.model.compile(backend="eager")
    torch.testing.assert_close(step(model), expected)
    assert not warnings_in(caplog)
    torch._dynamo.reset()


def test_what_cannot_be_is_refused() -> None:
    with refused("checkpoint.layer-count", "6 layers", f"LlamaForCausalLM has {LAYERS}"):
        seqtile.apply(llama(), blocks="none", checkpoint="none:4+attention-saved:2")
    eager = causal_lm("llama", attn_implementation="eager")
    with refused("checkpoint.attention-saved-eager"):
        seqtile.apply(eager, blocks="none", checkpoint="attention-saved:1")
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with refused("checkpoint.attention-saved-reentrant"):
        seqtile.apply(model, blocks="none", checkpoint="none:1+attention-saved:1")
    seqtile.apply(model, blocks="none", checkpoint="none:2")  # which saves nothing inside a checkpoint
    assert_runs_as_said(model, "none:2", lambda: step(model))


class OldConfig(PretrainedConfig):
    model_type = "seqtile_old_style"


class OldAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (proj(x)[:, None] for proj in (self.q_proj, self.k_proj, self.v_proj))
        attended: Tensor = self.o_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        return attended


class OldLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(8), OldAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x))  # type: ignore[no-any-return]


class OldModel(PreTrainedModel):
    """Checkpoints its layers itself, as code on the Hub does."""

    config_class = OldConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    gradient_checkpointing = False
    way = "layer"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OldLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                ways = {"layer": layer, "its call": layer.__call__, "a function": lambda x, layer=layer: layer(x)}
                x = self._gradient_checkpointing_func(ways[self.way], x)
            else:
                x = layer(x)
        return x


@pytest.mark.parametrize("way", ["layer", "its call", "a function"])
def test_layers_that_a_model_checkpoints_itself(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """A function that hides the layer is recomputed, and named once."""
    torch.manual_seed(0)
    model = OldModel(OldConfig()).train()
    model.way = way
    x = torch.randn(2, 6, 8, requires_grad=True)
    [expected] = torch.autograd.grad(model(x).square().sum(), x)
    seqtile.apply(model, blocks="none", checkpoint=MIXED)

    def run() -> None:
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), x)[0], expected)

    assert_runs_as_said(model, "layer" if way == "a function" else MIXED, run, steps=2)
    warned = warnings_in(caplog)
    assert len(warned) == (way == "a function") and all("recomputes every layer" in sentence for sentence in warned)
