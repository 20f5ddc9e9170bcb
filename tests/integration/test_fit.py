"""``seqtile.fit``: what it chooses is what runs, and a step holds what was planned."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqtile
import tiny_run
import trainers
from refusals import refused
from seqtile._errors import RunError
from seqtile.fitting import Choice, apply_choice, choose_for, describe, find_adapters
from seqtile.install.apply import carries
from seqtile.options import TilingOptions, layer_policies
from seqtile.planner.sharding_terms import CONTEXT
from seqtile.planner.step_config import Lora
from zoo import causal_lm, with_encoder

LAYERS, TOKENS, HIDDEN, INTERMEDIATE, VOCABULARY = 3, 4096, 128, 1024, 2048
MIB, GIB = 2**20, 2**30

pytestmark = pytest.mark.backward_here  # live bytes are counted on the thread that calls


def llama(**config: Any) -> Any:
    sizes = dict(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return causal_lm("llama", **{**sizes, **config})


def lora_config(**config: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with seqtile[train]")
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **config)


def adapted(model: nn.Module, **config: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with seqtile[train]")
    wrapped = peft.get_peft_model(model, lora_config(**config))
    wrapped.enable_input_require_grads()
    return wrapped


@dataclass
class Step:
    """What one training step did.

    Attributes:
        attention: forward calls of attention's kernel.
        mlp_rows, logits_rows: the longest product with a matrix of the MLP, and with the head's.
        held: bytes of weights, optimizer states and whatever was live, at the peak.
    """

    attention: int = 0
    mlp_rows: int = 0
    logits_rows: int = 0
    held: int = 0


class _Watch(TorchDispatchMode):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        self.step.attention += "_scaled_dot_product" in name and "backward" not in name
        if name in ("aten::mm", "aten::addmm", "aten::mm.out", "aten::addmm.out"):
            rows, columns = result.shape
            if columns == INTERMEDIATE:
                self.step.mlp_rows = max(self.step.mlp_rows, rows if rows != HIDDEN else 0)
            if columns == VOCABULARY:
                self.step.logits_rows = max(self.step.logits_rows, rows if rows != HIDDEN else 0)
        return result


def run_step(model: nn.Module, tokens: int = TOKENS) -> Step:
    """The second step of a run, whose optimizer has its states."""
    step, ids = Step(), torch.randint(0, VOCABULARY, (1, tokens))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    standing = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *states])
    with seqtile.count_live_bytes() as live, _Watch(step):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    step.held = standing + live.peak
    return step


def assert_runs_as_chosen(model: nn.Module, settings: Any, choice: Choice) -> None:
    step, planned = run_step(model), sum(value for name, value in choice.estimate.terms.items() if name != CONTEXT)
    recomputes = settings.get("checkpoint") == "layer"
    assert step.attention == LAYERS * (2 if recomputes else 1) * (2 if settings.get("heads") else 1)
    assert step.mlp_rows == settings["tile"] < TOKENS
    assert step.logits_rows == settings["loss_tile"] < TOKENS
    assert 0.8 * planned < step.held <= 1.01 * planned


Ladder = list[tuple[int, Choice]]


@pytest.fixture(scope="module")
def ladder() -> Ladder:
    """Three devices and what is chosen on them: each but the first has too little memory for the choice before."""
    rungs, memory = [], 16 * GIB
    for _ in range(3):
        choice = choose_for(llama(), TilingOptions(), max_length=TOKENS, device=f"{memory // MIB}MiB")
        rungs.append((memory, choice))
        memory = int(choice.estimate.device.high) - MIB
    return rungs


@pytest.mark.parametrize("number", range(3))
def test_what_is_chosen_runs_and_holds_what_was_planned(number: int, ladder: Ladder) -> None:
    memory, choice = ladder[number]
    assert choice.estimate.device.high <= memory
    model = llama()
    report = apply_choice(model, choice)
    assert report.why == choice.why == tuple(str(report).splitlines()[1:])
    assert_runs_as_chosen(model, report.settings, choice)
    seqtile.apply(again := llama(), **report.settings)
    assert run_step(again) == run_step(model)


def test_less_memory_is_other_settings(ladder: Ladder) -> None:
    options = [choice.options for _, choice in ladder]
    assert len({*options}) == len(ladder) and options[0].checkpoint is None and options[0].keep == 1.0


@pytest.mark.slow
def test_a_choice_by_layer_runs_and_holds_what_was_planned() -> None:
    """Between what all layers hold with one policy and with the next, on real tensors: counted, not read off."""
    rest = dict(max_length=TOKENS, keep=0.0, blocks="auto", heads=None, chunk=None, tile=512)
    sizes = dict(num_hidden_layers=6, head_dim=64)

    def high(checkpoint: str) -> float:
        options, given = TilingOptions(tile=512, checkpoint=checkpoint), {*rest, "checkpoint"} - {"max_length"}
        choice = choose_for(llama(**sizes), options, given=given, max_length=TOKENS, device="16GiB")
        return choice.estimate.device.high

    model, memory = llama(**sizes), int(high("layer") + high("none")) // 2
    report = seqtile.fit(model, device=f"{memory // MIB}MiB", **rest)
    policies = layer_policies(report.settings["checkpoint"], 6)
    assert len({*policies}) > 1, report.settings
    step = run_step(model)
    assert step.attention == 6 + policies.count("layer")
    assert step.held <= memory


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_adapters_are_seen_in_either_order(before: bool) -> None:
    if before:
        model = llama()
        report = seqtile.fit(model, max_length=TOKENS, device="1400MiB", lora=lora_config())
        model = adapted(model)
    else:
        model = adapted(llama())
        report = seqtile.fit(model, max_length=TOKENS, device="1400MiB")
    assert_runs_as_chosen(model, report.settings, chosen_with_adapters(report))


def chosen_with_adapters(report: seqtile.Report, _cache: list[Choice] = []) -> Choice:  # noqa: B006
    """The choice for a model that has its adapters, which ``report`` has to be of too."""
    if not _cache:
        _cache.append(choose_for(adapted(llama()), TilingOptions(), max_length=TOKENS, device="1400MiB"))
    assert report.why == _cache[0].why
    return _cache[0]


def test_a_plan_is_asked_what_the_model_is() -> None:
    asked, notes = describe(adapted(llama()), TilingOptions(), device="80GiB", optimizer="adamw_bnb_8bit", batch=3)
    targets = ("down_proj", "gate_proj", "q_proj", "up_proj", "v_proj")
    assert asked.lora == Lora(4, targets) and not notes
    assert (asked.optimizer, asked.batch, asked.attention, asked.engine) == ("adamw-8bit", 3, "sdpa", "single")
    assert (asked.device.memory, asked.precision, asked.device_type) == (80 * GIB, "float32", "cpu")
    assert find_adapters(llama()) is None
    off = adapted(llama())
    for weight in off.parameters():
        weight.requires_grad_(False)
    assert find_adapters(off) is None
    named = describe(llama().bfloat16(), TilingOptions(), device="h100", lora=8)[0]
    assert (named.lora, named.precision, named.device_type) == (Lora(8), "mixed", "cuda")
    assert describe(llama(), TilingOptions(), device="h100")[0].precision == "mixed"
    assert describe(llama(), TilingOptions(), device="h100", autocast=False)[0].precision == "float32"
    assert describe(llama().bfloat16(), TilingOptions(), device="h100")[0].precision == "bfloat16"
    on_host = describe(llama(), TilingOptions())[0].device.memory
    assert on_host > sum(weight.nbytes for weight in llama().parameters())


def test_weights_that_train_beside_adapters_are_left_room() -> None:
    plain, _ = describe(adapted(llama()), TilingOptions(), device="80GiB")
    saving, notes = describe(adapted(llama(), modules_to_save=["lm_head"]), TilingOptions(), device="80GiB")
    # A copy in fp32, its gradient and two states of AdamW.
    assert plain.device.memory - saving.device.memory == 4 * 4 * HIDDEN * VOCABULARY and len(notes) == 1
    config = lora_config(rank_pattern={"q_proj": 16}, modules_to_save=["lm_head"])
    coming, _ = describe(llama(), TilingOptions(), device="80GiB", lora=config)
    assert saving.lora is not None
    assert (coming.device.memory, coming.lora) == (saving.device.memory, Lora(16, saving.lora.target_modules))


def test_what_is_given_stays() -> None:
    report = seqtile.fit(llama(), max_length=TOKENS, device="16GiB", checkpoint="layer", tile=640, only="*.layers.0.*")
    assert {name: report.settings[name] for name in ("checkpoint", "tile", "only")} == {
        "checkpoint": "layer", "tile": 640, "only": "*.layers.0.*",
    } and report.tiled == 1  # fmt: skip


def test_a_default_that_is_given_stays() -> None:
    assert choose_for(llama(), TilingOptions(), max_length=TOKENS, device="1200MiB").options.checkpoint == "layer"
    report = seqtile.fit(model := llama(), max_length=TOKENS, device="1200MiB", checkpoint="none")
    assert "checkpoint" not in report.settings and "checkpoint none: as given" in report.why
    assert run_step(model).attention == LAYERS * (2 if report.settings.get("heads") else 1)
    callback = seqtile.TilingCallback(max_length=TOKENS, device="16GiB", keep=0.0)
    callback.on_init_end(None, None, None, model=llama())
    assert callback.report is not None and "keep 0.0: as given" in callback.report.why


def test_checkpointing_of_an_earlier_fit_is_switched_off() -> None:
    model = llama()
    seqtile.apply(model, checkpoint="layer")
    report = seqtile.fit(model, max_length=256, device="16GiB")
    assert run_step(model, 256).attention == LAYERS
    assert not any("checkpointing was on already" in sentence for sentence in report.why)


def test_none_as_checkpoint_with_offload_means_layer() -> None:
    report = seqtile.fit(llama(), max_length=256, device="16GiB", checkpoint="none", offload=True)
    assert report.settings["offload"] is True and report.settings["checkpoint"] is not None


def test_checkpointing_that_is_on_stays_on() -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = seqtile.fit(model, max_length=256, device="16GiB")
    assert "checkpoint" not in report.settings and run_step(model, 256).attention == 2 * LAYERS
    assert any("checkpointing was on already" in sentence for sentence in report.why)


def test_what_does_not_fit_names_the_longest_that_does_and_what_helps() -> None:
    model = llama(attn_implementation="eager")
    with pytest.raises(RunError, match=r"longest that fits is ([\d,]+) .*attention: flash") as caught:
        seqtile.fit(model, max_length=TOKENS, device="900MiB")
    longest = int(re.findall(r"max_length: (\d+)", str(caught.value))[0])
    assert 0 < longest < TOKENS and not carries(model)
    seqtile.fit(model, max_length=longest, device="900MiB")
    with pytest.raises(RunError, match="no length fits"):
        seqtile.fit(llama(), max_length=64, device="300MiB")


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"max_length": 1}, ("max-length.too-small", "max_length=1")),
        ({"max_length": 64, "device": "h1000"}, ("device.unknown", "'h1000'", "'h100'?")),
        ({"max_length": 64, "device": "cuda:7"}, ("device.absent", "cuda:7")),
        ({"max_length": 64, "optimizer": "lomo"}, ("optimizer.unknown", "'lomo'")),
        ({"max_length": 64, "optimizer": nn.Identity()}, ("optimizer.unknown", "Identity")),
        ({"max_length": 64, "qlora": True}, ("option.unknown", "qlora is read from the model")),
        ({"max_length": 64, "engine": "horovod"}, ("option.unknown-choice", "engine 'horovod'")),
        ({"max_length": 64, "lora": "much"}, ("fit.lora-wrong-type", "lora='much'")),
        ({"max_length": 64, "tiles": 8}, ("option.unknown", "'tiles'", "tile?")),
        ({"max_length": 2 * TOKENS}, ("max-length.beyond-positions", "4,096 positions")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value[0],
)
def test_refused(arguments: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        seqtile.fit(llama(), **{"device": "16GiB", **arguments})


def test_models_that_no_plan_knows() -> None:
    frozen = llama().requires_grad_(False)
    for model, code in ((nn.Linear(4, 4), "fit.model-unsupported"), (frozen, "fit.nothing-trains")):
        with refused(code):
            seqtile.fit(model, max_length=64, device="16GiB")


def test_the_callback_asks_for_what_its_trainer_does(tmp_path: Path) -> None:
    directory = tiny_run.save_model(tmp_path / "model")
    callback = seqtile.TilingCallback(max_length=64, device="16GiB")
    trainer = trainers.plain(directory, tmp_path / "out", callback, max_steps=1, gradient_checkpointing=True)
    report = callback.report
    assert (
        report is not None and report.settings["loss"] == "tiled" and "64 tokens per sequence on 16GiB" in report.why[0]
    )
    assert any("checkpointing was on already" in sentence for sentence in report.why)
    trainer.train()
    assert report.why[0] in trainer.state.log_history[0]["seqtile"] and carries(trainer.model)
    with refused("callback.without-max-length"):
        seqtile.TilingCallback(device="16GiB")


def test_an_encoder_is_refused() -> None:
    with refused("model.encoder", "(bert)"):
        seqtile.fit(with_encoder("bert"), max_length=64)
