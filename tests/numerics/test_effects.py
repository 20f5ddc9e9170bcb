"""What an option does is counted, in every order of wrapping: attention's forwards, bytes on the host, tiles, logits.

A report may say whatever was installed; here only what ran counts.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    LoraModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, Trainer, TrainingArguments

import seqtile
import tiny_run
from refusals import refused
from seqtile.checkpointing.policies import installed_checkpointing
from zoo import (
    HIDDEN,
    INTERMEDIATE,
    VOCABULARY,
    assert_same_gradients,
    causal_lm,
    picture_and_text,
    tokens,
    vision_language_model,
)

BATCH, LENGTH, LAYERS, TILE = 2, 24, 2, 4
INPUT = BATCH * LENGTH * HIDDEN * 4
ALL: dict[str, Any] = dict(
    only="*mlp", tile=TILE, path="generic", loss="tiled", loss_tile=TILE, checkpoint="attention-saved", offload=True
)
Batch = dict[str, Tensor]


class Effects(TorchDispatchMode):
    """Counts what ran.

    Attributes:
        attention: forwards of attention kernels, recomputed ones too.
        widest: rows of the largest product, by the width of its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0
        self.widest: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        self.attention += "_scaled_dot_product" in name and "backward" not in name
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            width = result.shape[-1]
            self.widest[width] = max(self.widest.get(width, 0), result.numel() // width)
        return result


@contextmanager
def layer_inputs(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Inside, counts the decoder layers' inputs that are still on the device."""
    storages: list[StorageWeakRef] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not hidden.is_leaf:  # autograd refers to an embedding's output that transformers makes need a gradient
            storages.append(StorageWeakRef(hidden.untyped_storage()))

    layers = [part for part in model.modules() if type(part).__name__.endswith("DecoderLayer")]
    assert layers
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in layers]
    try:
        yield lambda: sum(not storage.expired() for storage in storages)
    finally:
        for handle in handles:
            handle.remove()


def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """seqtile's warnings from here on."""
    caplog.clear()
    return lambda: [
        one.getMessage() for one in caplog.records if one.name.startswith("seqtile") and one.levelno >= logging.WARNING
    ]


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    targets = settings.pop("target_modules", ["q_proj", "down_proj"])
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **settings))


def lora_alone(model: nn.Module) -> nn.Module:
    return LoraModel(model, {"default": LoraConfig(r=2, target_modules=["q_proj"])}, "default")


def prompt_tuning(model: nn.Module) -> nn.Module:
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


class Forwarding(nn.Module):
    """Hands every attribute on to the model inside, as many wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Holding(nn.Module):
    """As sentence-transformers: a module beside others in a container."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(inner, nn.Identity())

    def forward(self, **batch: Any) -> Any:
        return self.parts[0](**batch)


class Distilled(nn.Module):
    """A frozen teacher before the policy that trains."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.teacher = small().requires_grad_(False)
        self.policy = policy

    def forward(self, **batch: Any) -> Any:
        with torch.no_grad():
            self.teacher.eval()(input_ids=batch["input_ids"], logits_to_keep=1)
        return self.policy(**batch)


def called_by_name(model: nn.Module) -> nn.Module:
    """As remote code and mllama's vision tower call their layers."""
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: ((), {"hidden_states": args[0], **kwargs}), with_kwargs=True
        )
    return model


def tied(model: nn.Module) -> nn.Module:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return lora(model, modules_to_save=["embed_tokens"], ensure_weight_tying=True)


def small(**config: Any) -> nn.Module:
    """As many key-value heads as queries: in fp32, CUDA has no fused kernel for grouped heads."""
    heads = {"num_key_value_heads": causal_lm("llama").config.num_attention_heads}
    return causal_lm("llama", use_cache=False, attn_implementation="sdpa", **{**heads, **config})


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "PEFT": lora,
    "k-bit": lambda model: lora(prepare_model_for_kbit_training(model)),
    "LoraModel": lora_alone,
    "prompt tuning": prompt_tuning,
    "tied and saved embeddings": tied,
    "a wrapper that forwards attributes": Forwarding,
    "a wrapper around PEFT": lambda model: Forwarding(lora(model)),
    "a container": Holding,
    "a teacher beside it": Distilled,
    "layers called by name": called_by_name,
}


def end_copies(model: nn.Module) -> None:
    """On an accelerator, the last layers' inputs are on the device until their copies have ended."""
    for policy in installed_checkpointing(model):
        for lane in policy.host._lanes.values() if policy.host is not None else ():
            lane.stream.synchronize()
            lane.release(policy.host.layer)


def step(model: nn.Module, batch: Batch) -> tuple[Effects, int]:
    """(what ran, layer inputs on the device between forward and backward)."""
    with Effects() as ran, layer_inputs(model) as on_device:
        loss = model.train()(**batch).loss
        end_copies(model)
        alive = on_device()
        loss.backward()
    return ran, alive


def text() -> Batch:
    ids = tokens(BATCH, LENGTH)
    return dict(input_ids=ids, labels=ids)


@pytest.mark.device
@pytest.mark.parametrize("order", ["apply first", "apply last"])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_every_option_acts_in_every_order(wrapping: str, order: str, caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    if order == "apply first":
        report = seqtile.apply(model, **ALL)
        model = WRAPPED[wrapping](model)
    else:
        model = WRAPPED[wrapping](model)
        report = seqtile.apply(model, **ALL)
    warned = said(caplog)
    ran, alive = step(model, text())
    beside = LAYERS if wrapping == "a teacher beside it" else 0
    assert ran.attention == LAYERS + beside
    assert alive == 0
    assert ran.widest[VOCABULARY] == TILE
    if not beside:
        assert ran.widest[INTERMEDIATE] <= HIDDEN < BATCH * LENGTH  # the gradient of a weight has as many rows
    [policy] = installed_checkpointing(model)
    assert policy.host is not None and policy.host.ever_parked >= LAYERS * 2 * INPUT
    assert not warned() and not any("had no effect" in note or "not used" in note for note in report.notes)


@pytest.mark.device
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_a_vision_language_model_with_adapters(order: str, caplog: pytest.LogCaptureFixture) -> None:
    model = vision_language_model(torch.bfloat16)  # in fp32, CUDA has no fused kernel for grouped heads
    settings = {**ALL, "blocks": "none"}
    del settings["tile"], settings["path"], settings["only"]
    if order == "apply first":
        seqtile.apply(model, **settings)
    model = lora(model, target_modules=["q_proj"])
    if order == "apply last":
        seqtile.apply(model, **settings)
    warned = said(caplog)
    ran, alive = step(model, picture_and_text(torch.bfloat16))
    assert ran.attention == LAYERS + 1 and alive == 0  # and the tower's one layer
    assert not warned()


@pytest.mark.parametrize("compiled", ["model", "layers", "layers in place"])
@pytest.mark.parametrize("settings", [dict(offload=True), dict(checkpoint="attention-saved", offload=True)], ids=str)
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_compiled(compiled: str, settings: dict[str, Any], order: str) -> None:
    torch._dynamo.reset()
    whole = model = small()

    def compile_it() -> nn.Module:
        if compiled == "model":
            return torch.compile(model, backend="eager")  # type: ignore[no-any-return]
        for number, layer in enumerate(model.model.layers):
            if compiled == "layers":
                model.model.layers[number] = torch.compile(layer, backend="eager")
            else:
                layer.compile(backend="eager")
        return model

    if order == "apply first":
        seqtile.apply(model, blocks="none", **settings)
    whole = compile_it()
    if order == "apply last":
        seqtile.apply(whole, blocks="none", **settings)
    loss = whole.train()(**text()).loss
    [policy] = installed_checkpointing(whole)
    assert policy.host is not None and policy.host.parked_bytes >= LAYERS * INPUT
    with Effects() as ran:
        loss.backward()
    assert ran.attention == (0 if "checkpoint" in settings else LAYERS)
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("order", ["apply first", "apply on PEFT", "apply last"])
def test_engines_around_adapters(engine: str, order: str, one_process: None) -> None:
    model = small()
    settings = {name: ALL[name] for name in ("loss", "loss_tile", "checkpoint", "offload")}
    if order == "apply first":
        seqtile.apply(model, blocks="none", **settings)
    model = lora(model)
    if order == "apply on PEFT":
        seqtile.apply(model, blocks="none", **settings)
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.base_model.model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    if order == "apply last":
        seqtile.apply(model, blocks="none", **settings)
    ran, alive = step(model, text())
    assert ran.attention == LAYERS and ran.widest[VOCABULARY] == TILE
    assert alive <= (engine == "fsdp2")  # which hands the first layer another tensor of the embedding's output


# ---- trainers ----


COMMON: dict[str, Any] = dict(
    max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("tiled", ["before the trainer", "by the callback", "after the trainer"])
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_trl(tiled: str, adapters: bool, bf16: bool, directory: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL's trainer needs TRL")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    vocabulary = model.config.vocab_size
    if tiled == "before the trainer":
        report = seqtile.apply(model, **ALL)
    callback = seqtile.TilingCallback(**ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.SFTTrainer(
            model,
            args=trl.SFTConfig(str(tmp_path), max_length=64, bf16=bf16, **COMMON),
            train_dataset=Dataset.from_list(tiny_run.text_rows(8)),
            processing_class=AutoTokenizer.from_pretrained(directory),
            peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None,
            callbacks=[callback] if tiled == "by the callback" else [],
        )
        if tiled == "after the trainer":
            report = seqtile.apply(trainer.model, **ALL)
        with Effects() as ran:
            trainer.train()
    report = callback.report if tiled == "by the callback" else report
    assert ran.attention == 2 * LAYERS
    assert ran.widest[vocabulary] == TILE and ran.widest[96] <= HIDDEN
    [policy] = installed_checkpointing(trainer.model)
    assert policy.host is not None and policy.host.ever_parked > 0
    assert not any("not used" in note or "had no effect" in note for note in report.notes)
    if tiled == "by the callback":
        [news] = [log["seqtile"] for log in trainer.state.log_history if "seqtile" in log]
        assert "MiB kept per layer" in news, "the first log comes after a step, and knows what it did"


# ---- an option that does nothing says so ----


def trained(model: nn.Module, out: Path, **settings: Any) -> None:
    from datasets import Dataset

    rows = tokens(8, LENGTH).tolist()
    arguments = {"compute_loss_func": settings.pop("compute_loss_func", None)}
    Trainer(
        model, TrainingArguments(str(out), **COMMON, **settings),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}), **arguments,
    ).train()  # fmt: skip


def own_loss(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    return outputs["logits"].float().logsumexp(-1).mean()


@pytest.mark.parametrize(
    "settings",
    [dict(label_smoothing_factor=0.1), dict(compute_loss_func=own_loss)],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_a_trainer_that_takes_the_labels_away(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("datasets", reason="the trainer's rows need datasets")
    model = small()
    report = seqtile.apply(model, blocks="none", loss="tiled", loss_tile=TILE)
    before, warned = report.notes, said(caplog)
    trained(model, tmp_path, **settings)
    [note] = set(report.notes) - set(before)
    assert "loss='tiled' had no effect" in note and "without labels" in note
    assert warned() == [note]


def test_a_loss_that_is_used_later_is_reported_as_it_is() -> None:
    model = small()
    report = seqtile.apply(model, blocks="none", loss="tiled")
    model(input_ids=tokens(1, 8)).logits.sum().backward()
    with torch.no_grad():  # as TRL does for its metrics where label_smoothing_factor computes the loss
        model(**text())
        model.eval()(**text())
    assert any("had no effect" in note and "without labels" in note for note in report.notes)
    step(model, text())
    assert not any("had no effect" in note for note in report.notes)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "after a step"])
def test_a_copy_of_the_backbone(later: bool) -> None:
    def gradients(tiled: bool) -> dict[str, Tensor | None]:
        model = small()
        if tiled:
            seqtile.apply(model, **ALL)
        if later:
            model(**text()).loss.backward()
        backbone = copy.deepcopy(model.model)
        backbone.zero_grad()
        backbone(text()["input_ids"]).last_hidden_state.pow(2).mean().backward()
        return {name: p.grad for name, p in backbone.named_parameters()}

    assert_same_gradients(gradients(True), gradients(False))


def test_a_copied_layer_joins_its_model() -> None:
    model = small()
    seqtile.apply(model, **ALL)
    layers = model.model.layers
    layers.append(copy.deepcopy(layers[-1]))
    model.config.num_hidden_layers += 1
    layers[-1].self_attn.layer_idx = LAYERS
    ran, on_device = step(model, text())
    assert ran.attention == LAYERS + 1 and ran.widest[VOCABULARY] == TILE and on_device == 0


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # PEFT's
@pytest.mark.parametrize("settings", [dict(checkpoint="layer"), dict(offload=True)], ids=str)
def test_a_prompt_that_checkpointed_layers_drop_is_refused(settings: dict[str, Any]) -> None:
    model = get_peft_model(small(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with refused("checkpoint.with-prompt-tuning", "PREFIX_TUNING"):
        seqtile.apply(model, **settings)
    seqtile.apply(model, tile=TILE, loss="tiled", loss_tile=TILE)
    step(model, text())
    assert model.prompt_encoder.default.embedding.weight.grad.norm() > 0


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda model: model.gradient_checkpointing_disable(), "had no effect"),
        (lambda model: [setattr(one, "gradient_checkpointing", False) for one in model.model.layers], "had no effect"),
        (lambda model: setattr(installed_checkpointing(model)[0].host, "budget", 8), "moved nothing"),
    ],
    ids=["switched off", "by layer", "no room"],
)
def test_checkpoints_that_do_nothing(
    break_it: Callable[[Any], Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    report = seqtile.apply(model, blocks="none", offload=True)
    break_it(model)
    assert not any(words in note for note in report.notes), "nothing has run"
    warned = said(caplog)
    with torch.no_grad():
        model(**text())
    model.eval()(**text())
    assert not warned()
    for _ in range(2):
        step(model, text())
    assert [words in one for one in warned()] == [True]
    assert [words in note for note in report.notes].count(True) == 1 and words in str(report)


@pytest.mark.parametrize("leave", [seqtile.undo, None], ids=["undone", "looked at"])
def test_no_hook_is_left(leave: Callable[[nn.Module], Any] | None) -> None:
    model = small()
    before = {name: list(part._forward_hooks) for name, part in model.named_modules()}
    seqtile.apply(model, blocks="none", loss="tiled", offload=True)
    assert list(model.model._forward_hooks)
    if leave is None:
        step(model, text())
        assert not model.model._forward_hooks
    else:
        leave(model)
        assert {name: list(part._forward_hooks) for name, part in model.named_modules()} == before
        assert not model._forward_pre_hooks


def test_several_models() -> None:
    """Those that train; all where none does, since adapters may come later; the report names the rest."""
    both = Distilled(small())
    settings: dict[str, Any] = dict(blocks="none", loss="tiled", offload=True)
    report = seqtile.apply(both, **settings)
    assert "teacher not changed" in report.done["loss"] and "teacher not changed" in report.done["checkpoint"]
    assert not both.teacher.is_gradient_checkpointing and both.policy.is_gradient_checkpointing
    seqtile.undo(both)
    both.policy.requires_grad_(False)
    report = seqtile.apply(both, **settings)
    assert "not changed" not in str(report)
    assert both.teacher.is_gradient_checkpointing and both.policy.is_gradient_checkpointing
    seqtile.undo(both)
    assert not both.teacher.is_gradient_checkpointing and not both.policy.is_gradient_checkpointing


def test_verify_leaves_every_option_as_it_was() -> None:
    model = small()
    seqtile.apply(model, **ALL)
    assert seqtile.verify(model, text()).ok and model.is_gradient_checkpointing
    assert len(installed_checkpointing(model)) == 1
    ran, alive = step(model, text())
    assert (ran.attention, alive, ran.widest[VOCABULARY]) == (LAYERS, 0, TILE)
    seqtile.undo(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_state_that_cannot_be_tiled(caplog: pytest.LogCaptureFixture) -> None:
    with refused("state.no-layers", "LlamaForCausalLM"):
        seqtile.apply(small(), state=8)
    seqtile.apply(small(), state="auto")
    if "qwen3_5_text" not in CONFIG_MAPPING:
        pytest.skip("of the installed transformers does not support activation")
    model = causal_lm("qwen3_5_text", use_cache=False)
    mixer = model.model.layers[0].linear_attn
    kind = type(mixer)

    class Renamed(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, memory: Any = None, attention_mask: Any = None, **_: Any) -> Any:
            return super().forward(hidden_states, memory, attention_mask)

    Renamed.__name__ = kind.__name__
    layer = type(model.model.layers[0])

    class Layer(layer):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, *args: Any, **words: Any) -> Any:
            return super().forward(hidden_states, *args, **words)

    Layer.__name__ = layer.__name__
    mixer.__class__, model.model.layers[0].__class__ = Renamed, Layer
    warned = said(caplog)
    report = seqtile.apply(model, blocks="none", state=8)
    assert ": 0 of 1" in report.done["state"] and "accepts no cache" in str(report)
    assert [one for one in warned() if "0 of 1" in one]


def test_a_configuration_without_a_width() -> None:
    """BLT's names its sizes in four parts."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "BltConfig"):
        pytest.skip("transformers has no BLT")
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=128,
    )  # fmt: skip
    part = {**sizes, "cross_attn_k": 2, "hidden_size_global": 64}
    config = transformers.BltConfig(
        vocab_size=VOCABULARY, patcher_config=sizes, encoder_config=part, decoder_config=part,
        global_config={**sizes, "hidden_size": 64}, encoder_hash_byte_group_size=[3], encoder_hash_byte_group_vocab=50,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BltForCausalLM(config).train()
    seqtile.apply(model, blocks="none", checkpoint="attention-saved", offload=True)
    model(**text(), use_cache=False).loss.backward()
    [policy] = installed_checkpointing(model)
    assert policy.host is not None and policy.host.ever_parked > 0
