"""Frozen weights on the host: the same bits, two layers on the device at a time, and one copy that counts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import seqtile
from numerics.test_adapter_kinds import replace_linears
from numerics.test_offload import assert_equal, step
from refusals import refused
from seqtile import host_weights
from seqtile.host_weights import HostWeights, LayerWeights, WeightStream, chunks_for, installed_host_weights
from zoo import causal_lm, tokens

LAYERS = 4
CHECKPOINTED = {"checkpoint": "layer", "loss": "tiled", "tile": 8}


TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "qwen3": ["k_proj", "gate_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"],
}


def adapted(architecture: str = "llama", **config: Any) -> nn.Module:
    layers = {"n_layer": LAYERS} if architecture == "gpt2" else {"num_hidden_layers": LAYERS}
    config_of_model = {"attn_implementation": "sdpa", "tie_word_embeddings": False, **layers}
    model = causal_lm(architecture, use_cache=False, **config_of_model)
    settings = {"target_modules": TARGETS[architecture], "fan_in_fan_out": architecture == "gpt2", **config}
    return with_adapters(model, **settings)


def with_adapters(model: nn.Module, **config: Any) -> nn.Module:
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**{"r": 4, **config}))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return model.train()


def stream_of(model: nn.Module) -> WeightStream:
    (standing,) = installed_host_weights(model)
    assert standing.stream is not None
    return standing.stream


def streamed(stream: WeightStream) -> list[Tensor]:
    return [weight.weight for layer in stream.layers for weight in layer.weights]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is released holds NaN in place of no memory: whoever still reads it is found out, and nothing crashes."""
    freed: list[LayerWeights] = []

    def free(self: LayerWeights) -> None:
        freed.append(self)
        with torch.no_grad():
            for values in self.values:
                values.fill_(float("nan") if values.is_floating_point() else 0)

    def allocate(self: LayerWeights, device: torch.device) -> None:
        assert not self.values or self in freed, "the memory of a layer is allocated twice"
        if self in freed:
            freed.remove(self)
        if self.buffer is None:
            allocate_first(self, device)

    allocate_first = LayerWeights.allocate
    monkeypatch.setattr(LayerWeights, "free", free)
    monkeypatch.setattr(LayerWeights, "allocate", allocate)
    yield


@pytest.mark.device
def test_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory itself, without the stand-in: at most two layers' at once, none between steps."""
    monkeypatch.undo()
    expected_model, model = adapted(), adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    stream = stream_of(model)
    use, most = WeightStream.use, []

    def buffers() -> list[int]:
        return [layer.buffer.untyped_storage().nbytes() for layer in stream.layers if layer.buffer is not None]

    def noting(self: WeightStream, number: int, **kwargs: Any) -> None:
        use(self, number, **kwargs)
        most.append(sum(buffers()))

    monkeypatch.setattr(WeightStream, "use", noting)
    for _ in range(2):
        assert_equal(step(model), step(expected_model))
    assert max(most) == 2 * stream.layers[0].nbytes
    assert buffers() == [0] * LAYERS


@pytest.mark.device
@pytest.mark.parametrize("architecture", [*TARGETS])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload": "checkpoints"},
        {"checkpoint": "attention-saved", "offload": "checkpoints"},
        {"blocks": "mlp+norm+projections", "heads": 1},
        {"path": "generic"},
        {"keep": 0.5},
        {"chunk": 5},
        {"chunk": 5, "offload": "checkpoints"},
    ],
    ids=[
        "layer",
        "checkpoints too",
        "attention saved",
        "heads",
        "generic",
        "keep",
        "chunks",
        "chunks, checkpoints too",
    ],
)
def test_exact(architecture: str, settings: dict[str, Any]) -> None:
    if architecture == "gpt2" and settings.get("heads"):
        pytest.skip("GPT-2's attention has one product for queries, keys and values, which heads leaves alone")
    settings = CHECKPOINTED | settings
    expected_model = adapted(architecture)
    seqtile.apply(expected_model, **settings)
    model = adapted(architecture)
    seqtile.apply(model, **settings | {"offload": f"{settings.get('offload', '')}+weights".lstrip("+")})
    for _ in range(2):  # the second forward begins where a backward has ended
        assert_equal(step(model), step(expected_model))
    stream = stream_of(model)
    assert stream.fetched_bytes > 0
    assert not stream.on_device  # between steps nothing is there


@pytest.mark.device
@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"use_rslora": True}, {"lora_dropout": 0.3}, {"modules_to_save": ["norm"]}],
    ids=lambda config: next(iter(config)),
)
def test_kinds_of_adapters(config: dict[str, Any]) -> None:
    expected_model, model = adapted(**config), adapted(**config)
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    torch.manual_seed(2)
    expected = step(expected_model)
    torch.manual_seed(2)
    assert_equal(step(model), expected)


@pytest.mark.parametrize("kind", ["4-bit", "8-bit"])
def test_bitsandbytes_layers(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def quantised(layer: nn.Linear) -> nn.Module:
        if kind == "4-bit":
            made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32)
            made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=made)
        else:
            made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        return made.to("cpu")

    def build() -> nn.Module:
        base = replace_linears(
            causal_lm(
                "llama", use_cache=False, hidden_size=64, intermediate_size=128, head_dim=24, num_hidden_layers=LAYERS
            ),
            quantised,
        )
        base.is_loaded_in_4bit, base.is_loaded_in_8bit = kind == "4-bit", kind == "8-bit"
        return with_adapters(base, target_modules=["q_proj", "down_proj"])

    expected_model, model = build(), build()
    seqtile.apply(expected_model, **CHECKPOINTED)
    if kind == "8-bit":  # the layer's state refers to the same bytes, and would go on to read them
        with refused("offload.weights-no-layers"):
            seqtile.apply(model, **CHECKPOINTED, offload="weights")
        return
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    assert len(streamed(stream_of(model))) == 7 * LAYERS
    for _ in range(2):
        assert_equal(step(model), step(expected_model))


@pytest.mark.device
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_that_others_switch_on(reentrant: bool) -> None:
    def run(offload: bool | str) -> Any:
        model = adapted()
        seqtile.apply(model, blocks="none", checkpoint="layer", offload=offload)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return step(model)

    assert_equal(run("weights"), run(offload=False))


@pytest.mark.device
def test_without_checkpoints_what_autograd_saved_stays_right() -> None:
    """A trainer switches them off again: every layer's buffer lives until its backward, and nothing writes to it."""
    expected_model, model = adapted(), adapted()
    seqtile.apply(model, blocks="none", offload="weights")
    model.gradient_checkpointing_disable()
    assert_equal(step(model), step(expected_model))


@pytest.mark.device
def test_adapters_that_come_later() -> None:
    """As under TRL's trainer: tiled first, wrapped by PEFT and moved to the device then."""
    model = causal_lm("llama", use_cache=False, num_hidden_layers=LAYERS)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    model = with_adapters(model, target_modules=["q_proj", "v_proj", "down_proj"])
    model.to(next(model.parameters()).device)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    expected_model = adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    assert_equal(step(model), step(expected_model))
    assert len(streamed(stream_of(model))) == 7 * LAYERS


@pytest.mark.device
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_layers_at_most_are_on_the_device(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward 0 to 3, then back to 0; none stays between them, when adapters may be merged into the host's values."""
    most: list[int] = []
    order: list[int] = []
    use, fetch = WeightStream.use, WeightStream._fetch

    def noting_use(self: WeightStream, number: int, **kwargs: Any) -> None:
        use(self, number, **kwargs)
        most.append(len(self.on_device))

    def noting_fetch(self: WeightStream, number: int) -> Any:
        if number not in self.on_device:
            order.append(number)
        return fetch(self, number)

    monkeypatch.setattr(WeightStream, "use", noting_use)
    monkeypatch.setattr(WeightStream, "_fetch", noting_fetch)
    model = adapted()
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    step(model)
    assert max(most) == 2
    assert order == [0, 1, 2, 3, 3, 2, 1, 0]
    stream = stream_of(model)
    assert stream.fetched_bytes == sum(stream.layers[n].nbytes for n in order)
    order.clear()
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens(1, 8))
    assert order == [0, 1, 2, 3]
    assert not stream.on_device


@pytest.mark.device
def test_accumulation_evaluation_and_generation() -> None:
    expected_model, model = adapted(), adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    ids = tokens(1, 12)
    results = []
    for each in (expected_model, model):
        for _ in range(2):
            each(input_ids=ids, labels=ids).loss.backward()
        gradients = [weight.grad for weight in each.parameters() if weight.grad is not None]
        each.eval()
        with torch.no_grad():
            logits = each(input_ids=ids).logits
        generated = each.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        results.append((gradients, logits, generated))
    exact = {} if results[0][1].is_cuda else {"rtol": 0, "atol": 0}  # an attention backward there may add in any order
    torch.testing.assert_close(results[1], results[0], **exact)


@pytest.mark.device
@pytest.mark.parametrize("checkpoints", [False, True])
def test_several_forwards_before_one_backward(checkpoints: bool) -> None:
    """As for DPO and GRPO: a loss of two forwards, with the reference's between them and their backward."""

    def forward(model: nn.Module, length: int) -> Tensor:
        return model(input_ids=tokens(1, length), labels=tokens(1, length)).loss

    def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
        chosen, rejected = forward(model, 12), forward(model, 9)
        with torch.no_grad(), model.disable_adapter():
            reference = forward(model, 12) - forward(model, 9)
        loss = (chosen - rejected - reference).exp()
        loss.backward(retain_graph=True)
        forward(model, 5).backward()
        loss.backward()
        return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}

    expected_model, model = adapted(), adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    if not checkpoints:
        expected_model.gradient_checkpointing_disable()
        model.gradient_checkpointing_disable()
    hosts = [weight.host for layer in stream_of(model).layers for weight in layer.weights]
    versions = [host._version for host in hosts]
    assert_equal(run(model), run(expected_model))
    assert [host._version for host in hosts] == versions, "values that are on the host were copied there again"


@pytest.mark.device
def test_inference_mode_before_training() -> None:
    expected_model, model = adapted(), adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    with torch.inference_mode():
        _train_forward(model)
    assert_equal(step(model), step(expected_model))


@pytest.mark.device
def test_adapters_merged_between_a_forward_and_its_backward() -> None:
    """The merged weights are there afterwards, those of the layers that the backward begins with too."""
    plain, model = adapted(), adapted()
    seqtile.apply(model, blocks="none", offload="weights")
    model.gradient_checkpointing_disable()
    for each in (plain, model):
        loss = each(input_ids=tokens(1, 12), labels=tokens(1, 12)).loss
        each.base_model.merge_adapter()
        loss.backward()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # PEFT with transformers 5.0
@pytest.mark.device
def test_what_others_read_and_write_is_the_hosts(tmp_path: Path) -> None:
    """``state_dict``, saving and merged adapters, between steps and with a layer's weights in use."""
    plain, model = adapted(), adapted()
    names = [name for name, _ in plain.named_parameters()]
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    assert [name for name, _ in model.named_parameters()] == names
    ids = tokens(1, 12)
    model(input_ids=ids, labels=ids)  # the last layers are on the device now
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    model(input_ids=ids, labels=ids).loss.backward()
    model.base_model.merge_adapter()
    plain.base_model.merge_adapter()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    model.base_model.unmerge_adapter()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.device
def test_what_is_written_to_a_layer_in_use_reaches_the_host() -> None:
    model = adapted()
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    _interrupt_forward(model)
    stream = stream_of(model)
    assert stream.layers[2].in_use
    weight = stream.layers[2].weights[0]
    with torch.no_grad():
        weight.weight.add_(1)
    values = weight.weight.detach().clone()
    stream.release_all()
    assert torch.equal(weight.host.to(values.device), values)
    assert torch.equal(weight.weight, values)


def _interrupted(*_: Any) -> Tensor:
    raise KeyboardInterrupt


def _train_forward(model: nn.Module) -> None:
    model(input_ids=tokens(1, 12), labels=tokens(1, 12))


def _evaluate_with_gradients(model: nn.Module) -> None:
    model.eval()
    _train_forward(model)


def _interrupt_forward(model: nn.Module) -> None:
    hook = model.get_base_model().model.layers[2].mlp.register_forward_hook(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        _train_forward(model)
    hook.remove()


def _interrupt_backward(model: nn.Module) -> None:
    def interrupt_gradient(_: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(_interrupted)

    hook = model.get_base_model().model.layers[2].register_forward_hook(interrupt_gradient)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    hook.remove()


@pytest.mark.device
@pytest.mark.parametrize("then", ["forward", "undo"])
@pytest.mark.parametrize("before", [_train_forward, _evaluate_with_gradients, _interrupt_forward, _interrupt_backward])
@pytest.mark.parametrize("layers", [2, LAYERS])
def test_adapters_merged_while_layers_are_in_use(before: Callable[[nn.Module], None], then: str, layers: int) -> None:
    """PEFT merges through ``weight.data``, which leaves no trace in the weight's version."""
    if layers == 2 and before in (_interrupt_forward, _interrupt_backward):
        pytest.skip("the interrupted layer is the third")
    plain = causal_lm("llama", use_cache=False, num_hidden_layers=layers)
    plain = with_adapters(plain, target_modules=TARGETS["llama"])
    model = copy.deepcopy(plain)
    seqtile.apply(plain, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    before(model)
    interrupted = before in (_interrupt_forward, _interrupt_backward)
    assert any(layer.in_use for layer in stream_of(model).layers) == interrupted
    for each in (model, plain):
        each.base_model.merge_adapter()
        if then == "undo":
            seqtile.undo(each)
    with torch.no_grad():
        logits = [each.eval()(input_ids=tokens(1, 12)).logits for each in (model, plain)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.device
@pytest.mark.parametrize("checkpoint", ["none", "layer"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_adapters_merged_until_after_a_backward_that_raises(layer: int, checkpoint: str) -> None:
    """The backward may end before a layer, or with it; the frozen weights are what they are without offload."""

    def interrupt_gradient(_: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(_interrupted)

    plain, model = adapted(), adapted()
    options: Any = {"blocks": "none", "loss": "tiled", "checkpoint": checkpoint}
    seqtile.apply(plain, **options)
    seqtile.apply(model, **options, offload="weights")
    states = []
    for each in (model, plain):
        hook = each.get_base_model().model.layers[layer].register_forward_hook(interrupt_gradient)
        loss = each(input_ids=tokens(1, 12), labels=tokens(1, 12)).loss
        each.base_model.merge_adapter()
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            loss.backward()
        hook.remove()
        each.base_model.unmerge_adapter()
        states.append({name: weight.detach().clone() for name, weight in each.state_dict().items()})
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for each in (model, plain):
        each.zero_grad()
    assert_equal(step(model), step(plain))


def test_a_copy_says_that_its_weights_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    step(copy.deepcopy(model))
    assert "copy" in caplog.text and "did not run" not in caplog.text


@pytest.mark.device
def test_a_copy_can_wait_on_the_host_too() -> None:
    plain, model = adapted(), adapted()
    seqtile.apply(plain, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    copied = copy.deepcopy(model)
    seqtile.apply(copied, **CHECKPOINTED, offload="weights")
    for each in (copied, model):
        assert_equal(step(each), step(plain))
        assert stream_of(each).fetched_bytes
    hosts = [{weight.data_ptr() for weight in streamed(stream_of(each))} for each in (copied, model)]
    assert hosts[0].isdisjoint(hosts[1])


@pytest.mark.device
def test_a_copied_backbone_fetches_nothing() -> None:
    plain, model = adapted(), adapted()
    seqtile.apply(plain, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    expected = step(plain)
    assert_equal(step(model), expected)
    fetched = stream_of(model).fetched_bytes
    ids = tokens(1, 12)
    hidden_states = [
        copy.deepcopy(each.get_base_model().model)(input_ids=ids).last_hidden_state for each in (model, plain)
    ]
    torch.testing.assert_close(*hidden_states, rtol=0, atol=0)
    assert stream_of(model).fetched_bytes == fetched
    assert_equal(step(model), expected)


@pytest.mark.device
def test_undo_copies_and_pickles() -> None:
    plain, model = adapted(), adapted()
    expected = step(plain)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    step(model)
    copied = copy.deepcopy(model)
    assert_equal(step(copied), step(model))
    assert not {w.data_ptr() for w in copied.parameters()} & {w.data_ptr() for w in model.parameters()}
    hosts = {weight.host.data_ptr() for layer in stream_of(model).layers for weight in layer.weights}
    for each in (model, copied):
        seqtile.undo(each)
        assert not installed_host_weights(each)
        assert not any(layer._forward_pre_hooks for layer in each.get_base_model().model.layers)
        assert_equal(step(each), expected)
    assert not hosts & {weight.data_ptr() for weight in model.parameters()}


def test_experts_under_a_parametrization() -> None:
    """PEFT's ``target_parameters`` writes the merged weight of each forward, and gives the old one back."""

    def build() -> nn.Module:
        model = causal_lm("mixtral", use_cache=False, num_hidden_layers=2)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        return with_adapters(model, target_modules=["q_proj"], target_parameters=names)

    expected_model, model = build(), build()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    assert_equal(step(model), step(expected_model))


@pytest.mark.device
def test_a_conversion_afterwards_keeps_its_weights() -> None:
    """``model.to(dtype)`` gives the parameters other data: these are computed with, and a warning says so."""
    model = adapted()
    report = seqtile.apply(model, **CHECKPOINTED, offload="weights")
    model.to(torch.float64)
    expected_model = adapted().to(torch.float64)
    seqtile.apply(expected_model, **CHECKPOINTED)
    assert_equal(step(model), step(expected_model))
    assert "replaced weights" in "\n".join(report.notes)


def test_what_stays_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = causal_lm("llama", use_cache=False, num_hidden_layers=LAYERS)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    report = seqtile.apply(with_adapters(model, target_modules=["q_proj"]), blocks="none", offload="weights")
    assert f"weights of {LAYERS} layers on the host" in str(report)
    assert "shared" in str(report)


def test_a_model_of_another_library_is_refused() -> None:
    with refused("offload.weights-model-unsupported"):
        seqtile.apply(nn.Linear(4, 4), blocks="none", offload="weights")


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("offload.weights-several-processes"):
        seqtile.apply(adapted(), offload="weights")


def test_weights_that_train_are_refused_at_the_first_step() -> None:
    """Adapters may be added after apply, whose report says that they must be."""
    model = causal_lm("llama", use_cache=False)
    report = seqtile.apply(model, offload="weights")
    assert "all of them train" in report.done["weights"]
    with refused("offload.weights-trained"):
        step(model)
    assert "train" not in seqtile.apply(adapted(), offload="weights").done["weights"]


def test_the_host_is_asked_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    needed, _ = chunks_for(w.nbytes for w in model.parameters() if not w.requires_grad)
    monkeypatch.setattr(host_weights, "available_host_bytes", lambda: 1)
    monkeypatch.setattr(host_weights, "PINNED_AT_ONCE", 2**30)
    monkeypatch.setattr(host_weights, "_power_of_two", lambda nbytes: 2 * nbytes)
    with refused("offload.weights-exceed-host-memory"):
        seqtile.apply(model, offload="weights")
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before


def test_a_host_that_pins_no_more_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = adapted(), adapted()
    monkeypatch.setattr(host_weights, "PINNED_AT_ONCE", 2**14)
    calls = []

    def pinned(nbytes: int, device: torch.device) -> Tensor:
        calls.append(nbytes)
        if len(calls) == 3:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_weights, "_pinned", pinned)
    with refused("offload.pinned-memory-exhausted"):
        seqtile.apply(model, offload="weights")
    assert not installed_host_weights(model)
    assert_equal(step(model), step(plain))


def test_weights_are_freed_while_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the host is never there twice: beside its own size there is one chunk."""
    model = adapted()
    monkeypatch.setattr(host_weights, "PINNED_AT_ONCE", 2**14)
    storages = [weight.untyped_storage() for weight in model.parameters() if not weight.requires_grad]
    alive = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
    total = sum(nbytes for _, nbytes in alive)
    del storages
    pinned, most, chunks = host_weights._pinned, [0], []

    def noting(nbytes: int, device: torch.device) -> Tensor:
        chunks.append(nbytes)
        most.append(sum(chunks) + sum(nbytes for ref, nbytes in alive if ref() is not None))
        return pinned(nbytes, device)

    monkeypatch.setattr(host_weights, "_pinned", noting)
    seqtile.apply(model, offload="weights")
    assert len(chunks) > 2
    assert max(most) < total + 2 * max(chunks) < 2 * total  # no more than the chunk that is filled and one to fill


class LateStream:
    """A stream of copies that are made only once something has waited for them."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.waited_for_compute = False

    def __enter__(self) -> LateStream:
        assert self.waited_for_compute, "the memory of the copy may still be read"
        return self

    def __exit__(self, *_: object) -> None:
        self.waited_for_compute = False

    def wait_stream(self, _: object) -> None:
        self.waited_for_compute = True

    def record_event(self) -> list[Callable[[], None]]:
        event, self.pending = self.pending, []
        return event


class ComputeStream:
    """The stream that computes: waiting for an event makes its copies."""

    @staticmethod
    def wait_event(event: list[Callable[[], None]]) -> None:
        while event:
            event.pop()()


LEAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    "used before the copy has ended": lambda patch: patch.setattr(ComputeStream, "wait_event", lambda *_: None),
    "copied before the memory is free": lambda patch: patch.setattr(LateStream, "wait_stream", lambda *_: None),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_copies_and_computation_wait_for_each_other(leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy_now, events = LateStream(), host_weights._copy, []

    def late_copy(layer: LayerWeights) -> None:
        for values in layer.values:
            values.fill_(float("nan"))
        copies.pending.append(lambda: copy_now(layer))

    def recorded() -> Any:
        events.append(LateStream.record_event(copies))
        return events[-1]

    monkeypatch.setattr(host_weights, "_copy", late_copy)
    monkeypatch.setattr(copies, "record_event", recorded)
    monkeypatch.setattr(WeightStream, "_compute_stream", lambda _: ComputeStream)
    expected_model, model = adapted(), adapted()
    seqtile.apply(expected_model, **CHECKPOINTED)
    seqtile.apply(model, **CHECKPOINTED, offload="weights")
    stream = stream_of(model)
    stream.copies = copies
    LEAKS[leak](monkeypatch)

    def run() -> None:
        assert_equal(step(model), step(expected_model))
        _interrupt_forward(model)  # which has fetched the last layer for nothing
        assert_equal(step(model), step(expected_model))
        assert not any(events), "memory was given back while a copy may write to it"

    if leak == "none":
        run()
        return
    with pytest.raises(AssertionError):
        run()


def test_chunks() -> None:
    sizes = [300, 5000, 256, 4096, 1, 70000]
    chunks, places = chunks_for(sizes)
    assert all(size & (size - 1) == 0 for size in chunks)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (chunk, start) in zip(sizes, places, strict=True):
        assert start % 256 == 0
        assert start + size <= chunks[chunk]
        taken.setdefault(chunk, []).append((start, start + size))
    for ranges in taken.values():
        ranges.sort()
        assert all(first[1] <= second[0] for first, second in zip(ranges, ranges[1:], strict=False))


def test_the_hook_is_what_moves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for and without effect: a warning at the first step."""
    model = adapted()
    report = seqtile.apply(model, **CHECKPOINTED, offload="weights")
    monkeypatch.setattr(HostWeights, "before_layer", lambda *_: None)
    step(model)
    assert "fetched nothing" in "\n".join(report.notes)
