"""A step of GRPO in the plan: the bytes of TRL's own, and what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tiny_run
from refusals import command_refused, refused
from seqtile.cli import main
from seqtile.devices import GIB
from seqtile.models.configs import read_config
from seqtile.options import changed
from seqtile.planner.accelerators import Device
from seqtile.planner.explain import proposals
from seqtile.planner.fake_step import fake_step, real_step
from seqtile.planner.flops import count_work
from seqtile.planner.grpo import (
    GENERATION,
    GENERATOR_CACHE,
    GENERATOR_REST,
    GENERATOR_WEIGHTS,
    REFERENCE,
    ROLLOUTS,
    SCORING,
    GrpoStep,
    cache_bytes,
    row_cache,
)
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, OPTIMIZER, WEIGHTS, track
from seqtile.planner.memory_plan import Planner
from seqtile.planner.phases import OPTIMIZER_STEP, Phase
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS, NF4_BYTES
from seqtile.planner.step_config import Grpo, Lora, Rollouts, Setup
from seqtile.shared_prompts import tree_row
from unit.test_plan_step import every_token_counts

COMPLETION, GROUP, TILE = 72, 2, 32
STEP, UPDATE = Phase("step"), Phase(OPTIMIZER_STEP)
GRPO = GrpoStep()
VOCABULARY = 257
DEVICE = Device("small", 4 * GIB, 10.0, "made up")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


def measured(
    folder: Path, output: Path, lora: Lora | None, *, prompt: str = "the cat", shared: bool = False
) -> tuple[tuple[int, int], dict[Phase, int]]:
    """Tokens of prompt and completion, and bytes above all weights but adapters at the peaks of TRL's second update."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from seqtile.integrations.trl import tile_trainer

    arguments = GRPOConfig(
        str(output), num_generations=GROUP, max_completion_length=COMPLETION, beta=0.1, bf16=False, max_steps=2,
        per_device_train_batch_size=GROUP if shared else 1, gradient_accumulation_steps=1 if shared else GROUP,
        optim="adamw_torch_fused", use_cpu=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, report_to="none",
        generation_kwargs={"min_new_tokens": COMPLETION}, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    adapters = None if lora is None else LoraConfig(r=lora.r, target_modules="all-linear", task_type="CAUSAL_LM")
    lengths: list[tuple[int, int]] = []
    with track() as live:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder), args=arguments, peft_config=adapters,
            reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 4}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )  # fmt: skip
        tile_trainer(trainer, loss_tile=TILE, shared_prompts=shared)

        def named(phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with live.phase(replace(phase, layer=trainer.state.global_step)):
                    return function(*args, **kwargs)

            return call

        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            lengths.append((inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]))
            return loss(model, inputs, *args, **kwargs)

        loss = trainer._compute_loss
        trainer._compute_loss = step
        trainer._generate_single_turn = named(GENERATION, trainer._generate_single_turn)
        trainer._generate_and_score_completions = named(SCORING, trainer._generate_and_score_completions)
        trainer.training_step = named(STEP, trainer.training_step)
        live.watching = True
        trainer.train()
        live.watching = False
    adapted = sum(weight.numel() * 4 for weight in trainer.model.parameters() if weight.requires_grad)
    made = adapted if lora is not None else 0  # loaded weights are mapped from their file, adapters are made
    return lengths[-1], {phase: live.peaks[replace(phase, layer=1)].total - made for phase in (STEP, GENERATION)}


@pytest.mark.filterwarnings("ignore")  # what the trainer has to say about its own defaults
@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["every weight", "adapters"])
def test_the_plan_is_trls_own_step(folder: Path, tmp_path: Path, lora: Lora | None) -> None:
    pytest.importorskip("trl")
    lengths, found = measured(folder, tmp_path, lora)
    tokens = sum(lengths)
    rollouts = Rollouts(GROUP, 1, True)
    setup = changed(
        Setup(dtype=torch.float32, accumulation=2, lora=lora, rollouts=rollouts), blocks="none", loss_tile=TILE
    )
    run = fake_step(AutoConfig.from_pretrained(folder), setup, tokens)
    standing = run.peaks[UPDATE].terms
    assert run.peak - standing[WEIGHTS] == pytest.approx(found[STEP], rel=0.01)
    request = Request(
        str(folder), AutoConfig.from_pretrained(folder), DEVICE, lora=lora, precision="float32", accumulation=GROUP,
        grpo=Grpo(GROUP, reference=True, generator="model"),
    )  # fmt: skip
    terms = {OPTIMIZER: float(standing[OPTIMIZER])}
    GRPO.add_terms(request, Planner(request).counts, terms, GENERATION, tokens, "expected")
    assert (terms.pop(REFERENCE, 0) == 0) is (lora is not None)
    # Tokens, masks and positions, some 8-byte numbers for each, and the last token's logits, sorted and sampled from.
    planned = sum(terms.values())
    assert planned <= found[GENERATION] <= planned + GROUP * (5 * 8 * tokens + 8 * 4 * VOCABULARY)


@pytest.mark.filterwarnings("ignore")
def test_the_plan_of_shared_prompts_is_trls_own_step(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (prompt, completion), found = measured(folder, tmp_path, Lora(4), prompt="the cat " * 60, shared=True)
    assert prompt > 100
    grpo = Grpo(GROUP, prompt, reference=True, generator="model")
    row = grpo.row_tokens(prompt + completion)
    rollouts = Rollouts(GROUP, 1, True, GROUP, (prompt - 1) / row)
    setup = changed(Setup(dtype=torch.float32, lora=Lora(4), rollouts=rollouts), blocks="none", loss_tile=TILE)
    run = fake_step(AutoConfig.from_pretrained(folder), setup, row)
    assert run.peak - run.peaks[UPDATE].terms[WEIGHTS] == pytest.approx(found[STEP], rel=0.01)


SHARED = Rollouts(8, 4, True, group=4, prompt=0.75, at_once=0.5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("checkpoint", ["layer", "attention-saved"])
def test_fake_and_real_steps_of_shared_prompts_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str, batch: int
) -> None:
    from seqtile.ops.lm_loss.kept_tokens import KeptTokens

    monkeypatch.setattr(KeptTokens, "of", every_token_counts)
    setup = Setup(dtype=torch.float32, batch=batch, rollouts=SHARED)
    setup = changed(setup, tile=64, loss_tile=64, checkpoint=checkpoint)
    made_up, real = (run(AutoConfig.from_pretrained(folder), setup, 256) for run in (fake_step, real_step))
    assert made_up.operators == real.operators
    assert {name: part.total for name, part in made_up.peaks.items()} == {
        name: part.total for name, part in real.peaks.items()
    }


@pytest.mark.parametrize(
    ("prompt", "tokens", "group", "changes"),
    [
        (2000, 2600, 4, {}),
        (1000, 1100, 8, dict(lora=Lora(4), checkpoint="attention-saved")),
        pytest.param(200, 700, 3, dict(batch=2), marks=pytest.mark.slow),
        pytest.param(6000, 6300, 8, dict(tile="auto"), marks=pytest.mark.slow),
        pytest.param(2000, 2100, 8, dict(tile="auto", loss_tile=256, blocks="none", chunk=256), marks=pytest.mark.slow),
    ],
)
def test_a_step_of_shared_prompts_holds_what_is_planned(
    folder: Path, prompt: int, tokens: int, group: int, changes: dict[str, Any]
) -> None:
    """Within the bounds of other plans, less what no tensor shows: 1 %, and no more than 0.5 % too low."""
    settings: dict[str, Any] = dict(precision="float32", device_type="cpu", attention="sdpa", tile=512, loss_tile=512)
    planner = Planner(request_of(folder, group=group, prompt=prompt, accumulation=1, **settings | changes))
    planner.workspace = None
    row = planner.request.row_tokens(tokens)
    lines = planner.lines(tokens)
    planned = max(sum(terms.values()) for terms in lines.at(row).values())
    assert row not in lines.points
    resolved = planner.resolved(tokens)
    assert resolved.rollouts is not None
    exact = replace(resolved, rollouts=replace(resolved.rollouts, prompt=(prompt - 1) / row))
    assert -0.005 <= planned / real_step(planner.request.config, exact, row).peak - 1 <= 0.01
    kept = max(terms.get(KEPT, 0.0) for terms in lines.at(row).values())
    if resolved.options.checkpoint == "attention-saved":
        assert planner.attention_outputs(tokens) == pytest.approx(kept, rel=0.02)


def test_operations_of_shared_prompts(planner: Planner, folder: Path) -> None:
    """Each different token once, each pair of query and key that is seen, and completions alone in the head."""
    prompt, tokens, group = 30, 41, 3
    apart, shared = (request_of(folder, group=group, prompt=length, accumulation=3) for length in (0, prompt))
    samples = [[*range(prompt), *range(100 * answer, 100 * answer + tokens - prompt)] for answer in range(1, 4)]
    row = tree_row(samples, [prompt] * group)
    assert row.tokens == shared.row_tokens(tokens) and len(row.places) == group * (tokens - prompt)
    seen = 0.0  # of a causal square half, as elsewhere
    for number, (start, end) in enumerate(zip(row.segments.starts, row.segments.ends, strict=True)):
        seen += (end - start) * (row.segments.positions[number] + (end - start) / 2)
    works = [count_work(request, planner.counts, tokens) for request in (apart, shared)]
    assert works[1].attention / works[0].attention == pytest.approx(seen / (tokens**2 / 2))
    head = planner.counts.vocabulary * planner.counts.hidden
    of_layers = (works[0].products - tokens * head * (4 + 2 + 2 + 2)) / tokens
    of_head = len(row.places) * head * (4 + 2 + 2 + 2)
    assert works[1].products == pytest.approx(row.tokens * of_layers + of_head)


def test_a_group_is_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--model", str(folder), "--device", "4GiB", "--loss", "grpo", "--json", "--max-length", "5000"]
    found = []
    for further in ([], ["--shared-prompt", "4000"]):
        assert main([*given, "--group-size", "4", *further]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [plan["row_tokens"] for plan in found] == [5000, 3999 + 4 * 1001]
    assert found[0]["flops"] < found[1]["flops"] < 4 * found[0]["flops"]
    assert found[0]["peak_device_gib"]["expected"] < found[1]["peak_device_gib"]["expected"]
    # A shorter sample leaves room for a longer one: positions bound samples, memory bounds rows.
    assert 4001 <= found[1]["max_length"] <= found[0]["max_length"] <= 16384


def test_fake_and_real_steps_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqtile.ops.lm_loss.kept_tokens import KeptTokens

    monkeypatch.setattr(KeptTokens, "of", every_token_counts)
    setup = changed(Setup(dtype=torch.float32, rollouts=Rollouts(3, 4, True)), tile=64, loss_tile=64)
    made_up, real = (run(AutoConfig.from_pretrained(folder), setup, 256) for run in (fake_step, real_step))
    assert made_up.operators == real.operators
    assert {name: part.total for name, part in made_up.peaks.items()} == {
        name: part.total for name, part in real.peaks.items()
    }
    # Tokens and masks, four numbers each, and an advantage a row.
    assert made_up.peaks[UPDATE].terms[ROLLOUTS] == 3 * (256 * (8 + 8 + 4 * 4) + 4)


def request_of(folder: Path, **changes: Any) -> Request:
    grpo = Grpo(**{name: changes.pop(name) for name in [*changes] if name in Grpo.__dataclass_fields__})
    given = {"accumulation": grpo.group // changes.get("gpus", 1) or 1, **changes}
    return changed(Request(str(folder), read_config(str(folder)), DEVICE, grpo=grpo), **given)


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(request_of(folder))


def other(planner: Planner, folder: Path, **changes: Any) -> Planner:
    return Planner(replace(request_of(folder, **changes), config=planner.request.config), like=planner)


def beside(planner: Planner, phase: Phase, tokens: int = 4096) -> dict[str, float]:
    terms = {GRADIENTS: 1.0}
    GRPO.add_terms(planner.request, planner.counts, terms, phase, tokens, "expected")
    return terms


def test_what_stands_beside_the_step(planner: Planner, folder: Path) -> None:
    counts = planner.counts
    row = 4096 * counts.layers * 2 * counts.key_heads * counts.head_width * 2
    assert beside(planner, UPDATE) == beside(planner, GENERATION) == {GRADIENTS: 1.0}  # a server's
    own = other(planner, folder, generator="model")
    assert beside(own, UPDATE) == {GRADIENTS: 1.0}
    assert beside(own, GENERATION)[GENERATOR_CACHE] == 8 * row * (1 + 0.5 / counts.layers)
    awake, asleep = (other(planner, folder, generator=name) for name in ("colocate", "sleep"))
    both = {GENERATOR_WEIGHTS: 2 * counts.weights, GENERATOR_CACHE: row}
    assert beside(awake, UPDATE) == beside(awake, GENERATION) == {GRADIENTS: 1.0, **both}
    assert beside(asleep, UPDATE) == {GRADIENTS: 1.0, GENERATOR_REST: CONSTANTS["sleeping generator"].expected}
    assert beside(asleep, GENERATION) == {GRADIENTS: 1.0, **both}
    for memory in (0.25, 0.25 * DEVICE.memory):
        bounded = other(planner, folder, generator="colocate", memory=memory)
        terms = beside(bounded, UPDATE)
        assert terms[GENERATOR_WEIGHTS] + terms[GENERATOR_CACHE] == 0.25 * DEVICE.memory


@pytest.mark.parametrize(
    ("engine", "of_a_weight", "scoring"),
    [("single", 4.0, 0), ("ddp", 4.0, 0), ("fsdp2", 4 / 8, 2), ("zero2", 2.0, 0), ("zero3", 2 / 8, 0)],
)
def test_the_reference_of_a_model_that_trains_whole(
    engine: str, of_a_weight: float, scoring: int, planner: Planner, folder: Path
) -> None:
    gpus = 1 if engine == "single" else 8
    found = other(planner, folder, reference=True, engine=engine, gpus=gpus)
    weights = found.counts.weights
    assert beside(found, UPDATE)[REFERENCE] == of_a_weight * weights
    assert beside(found, SCORING)[REFERENCE] == (of_a_weight + scoring) * weights


def test_a_part_that_scores_holds_no_checkpoints(planner: Planner, folder: Path) -> None:
    parts = {
        Phase("attention", 0, "forward"): {WEIGHTS: 10.0, CHECKPOINTS: 50.0, ROLLOUTS: 3.0, "attention": 4.0},
        Phase("attention", 0, "backward"): {WEIGHTS: 10.0, CHECKPOINTS: 50.0, ROLLOUTS: 3.0, GRADIENTS: 9.0},
        UPDATE: {WEIGHTS: 10.0, OPTIMIZER: 20.0, GRADIENTS: 9.0, ROLLOUTS: 3.0},
    }
    assert GRPO.other_parts(planner.request, parts) == {}
    assert GRPO.other_parts(request_of(folder, reference=True, generator="model"), parts) == {
        SCORING: {WEIGHTS: 10.0, ROLLOUTS: 3.0, "attention": 4.0},
        GENERATION: {WEIGHTS: 10.0, OPTIMIZER: 20.0, ROLLOUTS: 3.0},
    }
    assert GRPO.other_parts(request_of(folder, reference=True, lora=Lora(4)), parts) == {}


def test_a_generator_in_four_bits(folder: Path) -> None:
    found = Planner(request_of(folder, generator="colocate", lora=Lora(4), qlora=True))
    whole = Planner(request_of(folder)).counts
    expected = 2 * (whole.weights - whole.matrices) + NF4_BYTES * whole.matrices
    assert beside(found, GENERATION)[GENERATOR_WEIGHTS] == pytest.approx(expected)


def test_the_cache_bounds_the_length(planner: Planner, folder: Path) -> None:
    assert GRPO.most_tokens(planner.request, planner.counts) is None
    bounded = other(planner, folder, generator="sleep", memory=2.0**20)
    row = GRPO.most_tokens(bounded.request, bounded.counts)
    assert row is not None and row_cache(bounded.request, bounded.counts, row) <= cache_bytes(
        bounded.request, bounded.counts, row
    )
    longest, limit = bounded.longest()
    assert row * 0.98 < longest <= row < planner.longest()[0]
    assert limit == "device memory: the generator's cache"
    assert not bounded.fits(bounded.estimate(row + 1)) and bounded.fits(bounded.estimate(row))


def test_a_generator_that_sleeps_is_proposed(planner: Planner, folder: Path) -> None:
    awake = other(planner, folder, generator="colocate", memory=0.9)
    (first,) = proposals(awake)[0]
    assert first.flags == "--generator sleep" and first.on(awake.request).grpo == Grpo(generator="sleep", memory=0.9)
    assert not proposals(planner)[0]


def test_operations(planner: Planner, folder: Path) -> None:
    counts, tokens = planner.counts, 4096
    supervised = count_work(replace(planner.request, grpo=None), counts, tokens)
    own, scored = (
        count_work(request_of(folder, generator="model", reference=reference), counts, tokens)
        for reference in (False, True)
    )
    head = 2 * tokens * counts.vocabulary * counts.hidden
    assert own.products - supervised.products == head and own.attention == supervised.attention
    assert scored.products - own.products == 2 * tokens * counts.active
    assert count_work(planner.request, counts, tokens).total == scored.total  # vLLM's numbers are checked


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--model", str(folder), "--device", "4GiB", "--loss", "grpo", "--max-length", "8192", "--json"]
    assert main([*given, "--reference", "--generator", "sleep", "--generator-memory", "0.5", "--group-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["terms"]["device_gib"][REFERENCE] * GIB == pytest.approx(
        4 * Planner(request_of(folder)).counts.weights
    )
    terms = found["terms"]["device_gib"]
    assert found["peak_at"] == str(GENERATION) and terms[GENERATOR_WEIGHTS] + terms[GENERATOR_CACHE] == pytest.approx(2)
    assert found["recipe"] is None
    assert any("4 completions per prompt, a separate reference" in note for note in found["notes"])


BAD = [
    (["--generator-memory", "0.3"], ("grpo.flag-without-grpo",)),
    (["--reference"], ("grpo.flag-without-grpo",)),
    (["--loss", "grpo", "--generator", "here"], ("generator.unknown", "'here'", "colocate")),
    (["--loss", "grpo", "--generator-memory", "0.3"], ("generator.memory-without-generator",)),
    (["--loss", "grpo", "--generator", "sleep", "--generator-memory", "3"], ("generator.memory-malformed",)),
    (["--loss", "grpo", "--generator", "sleep", "--generator-memory", "much"], ("generator.memory-malformed",)),
    (["--loss", "grpo", "--group-size", "1"], ("grpo.group-too-small",)),
    (
        ["--loss", "grpo", "--group-size", "6", "--gradient-accumulation", "4"],
        ("grpo.batch-not-multiple-of-group", "--gradient-accumulation 6"),
    ),
    (["--loss", "grpo", "--gpus", "2", "--engine", "zero3", "--sp-size", "2"], ("grpo.with-sp-size",)),
    (["--shared-prompt", "100"], ("grpo.flag-without-grpo",)),
    (["--loss", "grpo", "--shared-prompt", "0"], ("grpo.shared-prompt-out-of-range",)),
    (["--loss", "grpo", "--shared-prompt", "100", "--max-length", "100"], ("grpo.length-within-shared-prompt",)),
    (["--loss", "grpo", "--shared-prompt", "100", "--state", "64"], ("grpo.setting-with-shared-prompts", "state")),
    (["--loss", "grpo", "--recipe", "recipe.yaml"], ("plan.recipe-with-grpo",)),
]


@pytest.mark.parametrize(
    ("arguments", "refusal"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_sentence(arguments: list[str], refusal: tuple[str, ...], folder: Path) -> None:
    command_refused(["plan", "--model", str(folder), *arguments], *refusal)


def test_a_request_that_trl_would_not_run_is_refused(planner: Planner, folder: Path) -> None:
    with refused("grpo.batch-not-multiple-of-group", "group size 8", "--gradient-accumulation 8"):
        other(planner, folder, accumulation=3)
