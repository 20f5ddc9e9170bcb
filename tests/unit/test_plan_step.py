"""The step on fake tensors is the real one: the same operators in the same order, the same bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoConfig

import zoo
from seqtile.models.layer_fields import first_layers
from seqtile.ops.lm_loss.kept_tokens import KeptTokens
from seqtile.options import changed
from seqtile.planner import fake_step as fake_steps
from seqtile.planner.extrapolate import fit_lines
from seqtile.planner.fake_step import build, build_bare, fake_step, real_step
from seqtile.planner.layer_structure import find_depths
from seqtile.planner.live_at_peaks import CHECKPOINTS, track
from seqtile.planner.phases import HEAD, REST, Phase
from seqtile.planner.scans import TURNS
from seqtile.planner.step_config import Lora, Setup
from seqtile.recognise import proof

LENGTH = 256


def config_of(architecture: str, **changes: Any) -> Any:
    settings = {
        **zoo._BASE,
        **{**zoo.ARCHITECTURES, **zoo.HYBRIDS}[architecture],
        "max_position_embeddings": 4096,
        **changes,
    }
    return AutoConfig.for_model(architecture, **settings)


def setup(**changes: Any) -> Setup:
    return changed(Setup(dtype=torch.float32), **{"tile": 64, "loss_tile": 64, **changes})


UNTILED: dict[str, Any] = {"tile": "auto", "blocks": "none"}
CASES = {
    "llama": setup(),
    "llama, untiled, full loss": setup(**UNTILED, loss=None, checkpoint=None),
    "qwen3, adapters": setup(lora=Lora(4), optimizer="sgd-momentum"),
    "qwen3, attention saved": setup(checkpoint="attention-saved"),
    "qwen3, by layer": setup(checkpoint="none:1+attention-saved:1"),
    "gpt2": setup(optimizer="sgd"),
    "opt": setup(optimizer="adamw-8bit"),
    "phi3, accumulation": setup(accumulation=2),
    "gemma3_text": setup(),
    "mixtral, adapters": setup(lora=Lora(4, ("q_proj", "v_proj")), checkpoint=None),
}


def every_token_counts(labels: Tensor, *_: Any) -> KeptTokens:
    """As for fake labels, which have no values to look at."""
    return KeptTokens(labels.numel(), labels.clamp(min=0), None)


@pytest.mark.parametrize("case", CASES)
def test_fake_and_real_run_the_same_operators_and_hold_the_same_bytes(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptTokens, "of", every_token_counts)
    config = config_of(case.partition(",")[0])
    made_up, real = fake_step(config, CASES[case], LENGTH), real_step(config, CASES[case], LENGTH)
    assert made_up.operators == real.operators
    assert len(real.operators) > 300
    assert {name: part.total for name, part in made_up.peaks.items()} == {
        name: part.total for name, part in real.peaks.items()
    }


def test_peaks_are_read_before_the_first_of_them_goes() -> None:
    """Of phases, and of what runs in none; a peak that is still growing is read when it is asked for."""
    with track() as live:
        live.watching = True
        first = torch.empty(1000)
        with live.phase(Phase("later")):
            second = torch.empty(500)
            del first
            third = torch.empty(100)
        del second
        fourth = torch.empty(2000)
        later = Phase("later")
        assert {phase: part.total for phase, part in live.peaks.items()} == {Phase(REST): 4 * 2100, later: 4 * 1500}
        assert [dict(part.terms) for part in live.peaks.values()] == [
            {REST: 4 * 2000, "later": 4 * 100}, {REST: 4 * 1000, "later": 4 * 500},
        ]  # fmt: skip
        del third, fourth


@pytest.mark.parametrize(("attention", "square"), [("sdpa", False), ("eager", True)])
def test_hidden_states_as_wide_as_the_step_is_long_are_no_mask(attention: str, square: bool) -> None:
    config = config_of("llama")
    how, width = setup(**UNTILED, attention=attention), config.hidden_size
    assert fake_step(config, how, width).square  # which cannot tell
    depths = find_depths(config, build_bare(config, how, "meta"))
    assert fit_lines(config, how, depths, (width, width + 8, width + 16), None).square == square


def test_a_step_whose_last_token_is_not_trained_holds_no_more_than_planned() -> None:
    """But for which tokens are trained, some 8-byte numbers for each, and a copy of one tile's hidden states."""
    config = config_of("llama")
    made_up, real = fake_step(config, CASES["llama"], LENGTH), real_step(config, CASES["llama"], LENGTH)
    for name, part in made_up.peaks.items():
        assert real.peaks[name].total <= part.total + 5 * 8 * LENGTH + 64 * config.hidden_size * 4, name


def test_without_the_fix_transformers_takes_another_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, this fix can go."""
    config, how = config_of("llama"), setup(**UNTILED)
    monkeypatch.setattr("seqtile.counting.fake._no_tensor_is_fake", nullcontext)
    assert fake_step(config, how, LENGTH).operators != real_step(config, how, LENGTH).operators


@pytest.mark.parametrize(
    ("architecture", "layers", "samples"),
    [
        ("llama", 9, [(0, 8), (0, 0, 8)]),
        ("llama", 2, [(0, 1)]),
        ("gemma2", 15, [(0, 1, 13, 14), (0, 1, 0, 13, 14)]),  # windows of two sizes, layers of the same shapes
        ("gemma2", 8, [tuple(range(8))]),  # as many layers in both runs together
    ],
)
def test_the_layers_of_fake_runs(architecture: str, layers: int, samples: list[tuple[int, ...]]) -> None:
    config = config_of(architecture, num_hidden_layers=layers)
    depths = find_depths(config, build(config, setup(**UNTILED, attention="eager"), "meta").model)
    assert depths.layers == layers and [sample.layers for sample in depths.samples] == samples


HYBRID: dict[str, dict[str, Any]] = {
    "lfm2": {
        "layer_types": ["conv"] * 2 + ["full_attention"] + (["conv"] * 3 + ["full_attention"]) * 3 + ["conv"],
        "num_hidden_layers": 16, "block_auto_adjust_ff_dim": False,
    },
    "bamba": {  # the kinds of its layers are worked out from other fields
        "attn_layer_indices": [2, 4, 9], "num_hidden_layers": 16, "mamba_n_heads": 8, "mamba_d_head": "auto",
        "mamba_d_state": 16, "mamba_n_groups": 1,
    },
    "nemotron_h": {  # one attention, with MLPs before it and behind it
        "layers_block_type": [*["mamba", "mlp"] * 7, "attention", "mlp", *["mamba", "mlp"] * 8],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "num_hidden_layers": 32,
    },
    "qwen3_next": {  # the layer before the last one of a kind is of another kind in the sample
        "num_hidden_layers": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 24, "linear_value_head_dim": 20,
    },
}  # fmt: skip
"""Models whose layers of several kinds follow no pattern."""


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("llama", {"tile": 32}),
        ("lfm2", {}),
        ("bamba", {"checkpoint": None, "lora": Lora(4)}),
        ("nemotron_h", {}),
        ("qwen3_next", UNTILED),
    ],
    ids=["llama", "lfm2", "bamba, adapters", "nemotron_h", "qwen3_next"],
)
def test_one_layer_of_each_kind_stands_for_all_of_them(architecture: str, how: dict[str, Any]) -> None:
    """Each followed part of the step against a fake run of the whole model, and so the peak."""
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {architecture}")
    if architecture == "lfm2" and transformers.__version__.startswith("5.0."):
        pytest.skip("transformers 5.0 moves a part's peak with the depth: the plan is 1.3 % under the whole fake run")
    config = AutoConfig.for_model(architecture, **{**zoo._BASE, "num_hidden_layers": 9, **HYBRID.get(architecture, {})})
    changes = setup(attention="flash", device_type="cuda", scans="kernels", **how)
    depths = find_depths(config, build_bare(config, changes, "meta"))
    assert len(depths.samples) > 1 and sum(len(sample.layers) for sample in depths.samples) <= depths.layers
    whole = fake_step(config, changes, LENGTH)
    planned = fit_lines(config, changes, depths, [LENGTH], None).at(LENGTH)
    if transformers.__version__.startswith("5.0."):  # there a part is in the short model alone, and not at the peak
        planned = {phase: terms for phase, terms in planned.items() if phase in whole.peaks}
    for phase, terms in planned.items():
        assert sum(terms.values()) == pytest.approx(whole.peaks[phase].total, rel=1e-2), phase
        assert min(terms.values()) >= 0, phase
    assert max(sum(terms.values()) for terms in planned.values()) == pytest.approx(whole.peak, rel=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "gemma2"])
def test_layers_with_policies_of_their_own_need_no_fake_runs_of_their_own(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each followed part of the step against a fake run of the whole model, and so the peak."""
    moves_parts = transformers.__version__.startswith("5.0.")  # a part's peak to another layer, with the depth
    if architecture == "lfm2" and moves_parts:
        pytest.skip("transformers 5.0 moves a part's peak with the depth")
    sizes = {**zoo._BASE, "num_hidden_layers": 14, **HYBRID.get(architecture, {})}
    config = AutoConfig.for_model(architecture, **sizes)
    how = setup(**UNTILED, attention="flash", device_type="cuda", scans="kernels")
    depths, steps = find_depths(config, build_bare(config, how, "meta")), {}
    for policy in (None, "layer", "attention-saved"):
        fit_lines(config, changed(how, checkpoint=policy), depths, [LENGTH], None, steps)
    peaks = []
    for checkpoint in ("attention-saved:6", "none:3+attention-saved:6", "layer:1+none:3+attention-saved"):
        mixed = changed(how, checkpoint=checkpoint)
        whole = fake_step(config, mixed, LENGTH)
        with monkeypatch.context() as patch:
            patch.setattr("seqtile.planner.extrapolate.fake_step", None)
            lines = fit_lines(config, mixed, depths.with_checkpoint(checkpoint), [LENGTH], None, steps)
        planned = lines.at(LENGTH)
        for phase, terms in planned.items():
            assert moves_parts or sum(terms.values()) == pytest.approx(whole.peaks[phase].total, rel=2e-2), phase
            assert min(terms.values()) >= 0, phase
        peaks.append(max(sum(terms.values()) for terms in planned.values()))
        assert peaks[-1] == pytest.approx(whole.peak, rel=5e-3 if moves_parts else 1e-3)
    assert len({*peaks}) == 3


def test_a_cut_model_keeps_the_first_layers() -> None:
    config = config_of("gemma3_text", num_hidden_layers=12)
    short = first_layers(config, 7)
    assert short.num_hidden_layers == 7
    assert short.layer_types == config.layer_types[:7]
    assert config.num_hidden_layers == 12


def test_the_same_layers_are_traced_for_the_first_fake_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config, how = config_of("llama", num_hidden_layers=5), setup()
    sample = find_depths(config, build_bare(config, how, "meta")).samples[0]
    fake_step(config, how, LENGTH, sample=sample)
    monkeypatch.setattr(proof, "in_a_thread", lambda _: pytest.fail("a block is traced again"))
    fake_step(config, how, 2 * LENGTH, sample=sample)


@pytest.mark.parametrize(
    "how",
    [setup(tile=512), setup(**UNTILED, checkpoint=None), setup(**UNTILED, attention="eager")],
    ids=["tiled", "untiled", "a parabola"],
)
def test_lines_from_other_lengths_and_depths_give_the_fake_run_itself(how: Setup) -> None:
    config = config_of("llama", num_hidden_layers=5)
    how = changed(how, loss_tile=512)
    depths = find_depths(config, build(config, how, "meta").model)
    lines = fit_lines(config, how, depths, (1024, 1536, 2048), None)
    assert lines.square == (how.attention == "eager") and len(lines.points) == 2 + lines.square
    planned = max(sum(terms.values()) for terms in lines.at(4096).values())
    assert planned == pytest.approx(fake_step(config, how, 4096).peak, rel=1e-3)


class LargestTensors(TorchDispatchMode):
    """Elements of the largest tensor that operators return, by the type of its device."""

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                kind = tensor.device.type
                self.largest[kind] = max(self.largest.get(kind, 0), tensor.numel())
        return result


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_weights_are_drawn_on_the_device_and_nowhere_else(family: str, lora: Lora | None) -> None:
    """A plan needs no weights, and an 8B model drawn by one core of the host takes a minute."""
    config = zoo.causal_lm(family).config
    with LargestTensors() as made:
        model = build(config, Setup(lora=lora), "meta").model
    assert made.largest["meta"] >= max(weight.numel() for weight in model.parameters())
    assert made.largest.get("cpu", 0) < zoo.HIDDEN, "only numbers of a configuration"


def test_a_thread_that_trains_during_a_plan_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, softmax, masks, and the loop of a layer with a state, which a step on fake tensors has others of."""
    settings = {**zoo._BASE, **HYBRID["qwen3_next"], "num_hidden_layers": 4, "attention_dropout": 0.2}
    config = AutoConfig.for_model("qwen3_next", **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ids = torch.randint(2, config.vocab_size, (1, TURNS[-1] * 64 + 64))
    run, losses = fake_steps.tracked_step, list[float]()

    def train() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            losses.append(model(input_ids=ids, labels=ids).loss.item())

    def beside(*args: Any) -> Any:
        assert functional.dropout is dropout and functional.softmax is softmax
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(120)
        return run(*args)

    train()
    dropout, softmax = functional.dropout, functional.softmax
    monkeypatch.setattr(fake_steps, "tracked_step", beside)
    fake_step(config, setup(device_type="cuda", attention="flash"), LENGTH)
    assert len(losses) > 1 and len(set(losses)) == 1


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


CALLERS = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_plan_is_the_same_whatever_its_caller_has_on_and_leaves_it_so(caller: str) -> None:
    config, how = config_of("llama"), setup(device_type="cuda", autocast=True, chunk=64)
    expected, device = fake_step(config, how, LENGTH), torch.get_default_device()
    with CALLERS[caller]():
        inside = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_device()
        assert fake_step(config, how, LENGTH) == expected
        assert inside == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_device())
    assert torch.get_default_device() == device


def test_threads_plan_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step replaces functions of Transformers, and two that overlapped would put back each other's."""
    config, how = config_of("llama"), setup(device_type="cuda", attention="flash")
    expected = fake_step(config, how, LENGTH)
    seen, results, run = list[Any](), list[Any](), fake_steps.tracked_step

    def slow(*args: Any) -> Any:
        seen.append("begin")
        time.sleep(0.2)  # long enough for the other thread to get here
        result = run(*args)
        seen.append("end")
        return result

    monkeypatch.setattr(fake_steps, "tracked_step", slow)
    threads = [
        threading.Thread(target=lambda: results.append(fake_step(config, how, LENGTH)), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == ["begin", "end"] * 2 and results == [expected] * 2


@pytest.mark.parametrize(("dropout", "more"), [("resid_pdrop", 4), ("embd_pdrop", 1), ("attn_pdrop", 0)])
def test_dropout_on_an_accelerator_keeps_a_byte_an_element(dropout: str, more: int) -> None:
    """In fp32 the CPU keeps four, and an attention kernel keeps none."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    how = setup(**UNTILED, loss=None, checkpoint=None, attention="flash", device_type="cuda", batch=2)
    steps = [fake_step(config_of("gpt2", **{**off, **on}), how, 160) for on in ({}, {dropout: 0.1})]
    assert not any(step.square for step in steps)
    # Embeddings, and after attention and MLP of both layers; a dropout's result takes the place of its input.
    head = Phase(HEAD, direction="forward")
    grown = steps[1].peaks[head].total - steps[0].peaks[head].total
    assert grown == more * 2 * 160 * zoo.HIDDEN


def test_autocast_on_an_accelerator_norms_in_fp32() -> None:
    """Adapters on a frozen model in bf16: its LayerNorms return fp32 there, bf16 on a CPU."""
    how = replace(setup(lora=Lora(4), attention="flash", batch=2), dtype=torch.bfloat16, autocast=True)
    config = config_of("opt", do_layer_norm_before=False)  # so that the second layer's checkpoint is a norm's result
    here, there = (
        fake_step(config, replace(how, device_type=kind), 160).peaks[Phase(HEAD, direction="backward")].terms
        for kind in ("cpu", "cuda")
    )
    of_a_layer = 2 * 160 * zoo.HIDDEN
    assert here[CHECKPOINTS] == (2 + 2) * of_a_layer and there[CHECKPOINTS] == (2 + 4) * of_a_layer
