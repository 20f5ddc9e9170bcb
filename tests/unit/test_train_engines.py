"""What ``seqtile train --engine`` refuses before it starts anything, and what it refuses to believe afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny_run
from refusals import command_refused, refused
from seqtile.planner.names import ENGINES
from seqtile.train import callbacks, launch, ranks
from seqtile.train.recipe import build_recipe, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"


def recipe_of(**values: Any) -> Any:
    return build_recipe({"model": "m", "dataset": "d", "max_length": 64, "nproc": 2, **values}, {})[0]


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"engine": "tpu"}, ("recipe.invalid-value", "'engine'", "'tpu'", "'zero3'")),
        ({"engine": "ddp", "nproc": 0}, ("recipe.invalid-value", "'nproc'", "got 0")),
        ({"engine": "zero3", "trainer": {"parallelism_config": {}}}, ("recipe.key-of-its-own", "use 'sp_size'")),
        ({"engine": "zero3", "trainer": {"deepspeed": "x.json"}}, ("recipe.key-of-its-own", "use 'engine'")),
    ],
)
def test_refused_before_anything_is_loaded(values: dict[str, Any], refusal: tuple[str, ...]):
    with refused(*refusal):
        resolve(recipe_of(**values))


def test_the_demo_under_an_engine_leaves_out_what_the_engine_cannot_do():
    for engine in ENGINES[1:]:
        demo = resolve(build_recipe({"engine": engine, "nproc": 2}, {})[0])
        assert not demo.compares
        assert demo.loss_tile == 512


@pytest.mark.parametrize(
    ("config", "flags", "value"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, ["--sp-size", "4", "--nproc", "4"], "2 attention heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, ["--sp-size", "2"], "3 key-value heads"),
    ],
)
def test_heads_that_do_not_divide(
    config: dict[str, int], flags: list[str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_run.save_model(tmp_path / "model", hidden_size=48, head_dim=8, **config)
    monkeypatch.setattr(launch, "run_ranks", None)  # nothing is started
    given = ["--model", str(model), "--dataset", __file__, "--max-length", "64", "--output", str(tmp_path / "out")]
    command = ["train", *given, "--engine", "zero3", "--nproc", "2", *flags]
    command_refused(command, "sp-size.heads-do-not-divide", value)
    assert not (tmp_path / "out").exists()


def test_a_sliding_window_that_ulysses_would_lose(tmp_path: Path):
    from transformers import MistralConfig

    from seqtile.train.load import check_split

    MistralConfig(num_attention_heads=4, num_key_value_heads=2, sliding_window=32).save_pretrained(tmp_path)
    values = {"model": str(tmp_path), "engine": "zero3", "sp_size": 2}
    with refused("sp-size.drops-window", "32 tokens", "--max-length 32"):
        check_split(recipe_of(**values))
    check_split(recipe_of(**values, attention="flash"))
    check_split(recipe_of(**{**values, "max_length": 32}))


def test_layers_that_ring_attention_cannot_compute(tmp_path: Path):
    from transformers import BloomConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen3_5TextConfig

    from seqtile.train.load import check_split

    values = {"model": str(tmp_path), "engine": "fsdp2", "cp_size": 2, "max_length": 64}
    small = dict(hidden_size=32, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    MistralConfig(**small, sliding_window=32).save_pretrained(tmp_path)
    for length in (64, 32):  # accelerate refuses a window that no row reaches, too
        with refused("cp-size.model-unsupported", "cp_size 2", "window of 32 tokens"):
            check_split(recipe_of(**{**values, "max_length": length}))
    Gemma3TextConfig(**small, sliding_window=32, num_hidden_layers=6).save_pretrained(tmp_path)
    with refused("cp-size.model-unsupported", "window of 32 tokens"):
        check_split(recipe_of(**values))
    Qwen3_5TextConfig(**small, num_hidden_layers=4).save_pretrained(tmp_path)
    with refused("sp-size.model-with-state", "cp_size 2", "Gated DeltaNet"):
        check_split(recipe_of(**values))
    GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=64).save_pretrained(tmp_path)
    with refused("cp-size.model-unsupported", "cp_size 2", "self_attn"):
        check_split(recipe_of(**values))
    BloomConfig(hidden_size=32, n_head=4, n_layer=1, vocab_size=64).save_pretrained(tmp_path)
    with refused("cp-size.model-unsupported", "cp_size 2", "(sdpa)"):
        check_split(recipe_of(**values))
    LlamaConfig(**small).save_pretrained(tmp_path)
    check_split(recipe_of(**values))


def test_each_process_of_a_users_own_launcher_looks_at_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No command in front of them has: the mask of the window would be dropped, and they would train."""
    from transformers import MistralConfig

    from seqtile.train.run import train

    MistralConfig(num_attention_heads=4, num_key_value_heads=2, sliding_window=32).save_pretrained(tmp_path / "model")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    split = {"engine": "zero3", "sp_size": 2, "nproc": 2, "fit": False}
    with refused("sp-size.drops-window", "sp_size 2", "32 tokens"):
        train(recipe_of(model=str(tmp_path / "model"), dataset=__file__, output=str(tmp_path / "out"), **split))


@pytest.mark.parametrize(
    ("accelerators", "flags", "refusal"),
    [
        (0, ["--engine", "ddp"], ("engine.no-accelerator",)),
        (1, ["--engine", "ddp"], ("engine.ddp-alone",)),
        (2, ["--engine", "zero3", "--nproc", "3"], ("nproc.too-few-accelerators", "2 accelerators")),
        (
            2,
            ["--engine", "zero3", "--sp-size", "4"],
            ("nproc.not-multiple-of-split", "2 processes"),
        ),  # one process per accelerator
    ],
)
def test_processes_and_accelerators(
    accelerators: int, flags: list[str], refusal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerators > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr(launch, "run_ranks", None)
    command_refused(["train", *flags], *refusal)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    command_refused(["train", "--engine", "zero3", "--nproc", "2"], "engine.deepspeed-missing", "pip install deepspeed")


@pytest.mark.parametrize(
    ("values", "world", "refusal"),
    [
        ({"engine": "single", "nproc": None}, 2, ("launcher.with-engine-single", "2 processes")),
        ({"engine": "ddp", "output": "x"}, 4, ("launcher.process-count", "2 processes", "started 4")),
        ({"engine": "ddp", "nproc": None}, 2, ("launcher.without-output",)),
        ({"engine": "ddp", "output": "x"}, None, ("launcher.process-count", "2 processes", "started 1")),
    ],
)
def test_processes_that_are_not_those_of_the_recipe(
    values: dict[str, Any], world: int | None, refusal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    if world is not None:
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with refused(*refusal):
        ranks.join_launch(recipe_of(**values))


def test_processes_that_a_launcher_of_the_users_own_started_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.join_launch(recipe_of(engine="ddp", nproc=None, output="x")).nproc == 4


def trainer(processes: int, *, stage: int | None = None, sp_size: int = 1) -> Any:
    """One whose model DeepSpeed has taken over in ``stage``, or nobody."""
    model = torch.nn.Linear(1, 1) if stage is None else SimpleNamespace(zero_optimization_stage=lambda: stage)
    split = SimpleNamespace(sp_size=sp_size, cp_size=1)
    return SimpleNamespace(
        model_wrapped=model, accelerator=SimpleNamespace(num_processes=processes, parallelism_config=split)
    )


@pytest.mark.parametrize(
    ("engine", "got", "refusal"),
    [
        ("ddp", trainer(2), ("launcher.other-engine", "'single' (a Linear) in 2")),
        ("fsdp2", trainer(2), ("launcher.other-engine", "'single'")),
        ("zero2", trainer(2), ("launcher.other-engine", "'single'")),
        ("zero3", trainer(2, stage=2), ("launcher.other-engine", "'zero2'")),
        ("zero3", trainer(1, stage=3), ("launcher.other-engine", "in 2 processes", "in 1,")),
        ("single", trainer(1, stage=2), ("launcher.other-engine", "'single' in 1 processes")),
        ("zero3", trainer(2, stage=3, sp_size=2), ("launcher.other-split", "over 2")),
    ],
)
def test_another_engine_than_the_one_asked_for(engine: str, got: Any, refusal: tuple[str, ...]):
    check = callbacks.CheckModel(got, recipe_of(engine=engine, nproc=None if engine == "single" else 2))
    with refused(*refusal):
        check.on_train_begin(None, None, None)


@pytest.mark.parametrize(("engine", "got"), [("single", trainer(1)), ("zero2", trainer(2, stage=2))])
def test_the_engine_asked_for(engine: str, got: Any):
    ranks.check_engine(got, recipe_of(engine=engine, nproc=None if engine == "single" else 2))


@pytest.mark.parametrize(
    ("engine", "kept", "changes"),
    [
        ("ddp", [], {}),
        ("fsdp2", [], {}),
        ("fsdp2", ["optimizer", "weights"], {"fsdp_offload_params: false": "fsdp_offload_params: true"}),
        ("zero2", ["optimizer"], {"offload_optimizer_device: none": "offload_optimizer_device: cpu"}),
        ("zero3", [], {}),
        ("zero3", ["weights"], {"offload_param_device: none": "offload_param_device: cpu"}),
    ],
)
def test_the_examples_make_accelerate_launch_set_the_same_environment(
    engine: str, kept: list[str], changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from accelerate.commands import launch as theirs

    text = (EXAMPLES / "accelerate" / f"{engine}.yaml").read_text(encoding="utf-8")
    for before, after in changes.items():
        text = text.replace(before, after)
    (tmp_path / "engine.yaml").write_text(text, encoding="utf-8")
    words = ["--config_file", str(tmp_path / "engine.yaml"), "--num_processes", "2", "--module", "seqtile.cli"]
    started: list[dict[str, str]] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda _: started.append(dict(os.environ)))
    theirs.launch_command(theirs.launch_command_parser().parse_args(words))
    expected = launch.engine_environment(recipe_of(engine=engine, engine_offload=kept))
    assert expected.items() <= started[0].items()
    assert {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & started[0].keys() <= expected.keys()


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_examples_of_llama_hold_what_they_promise(name: str):
    from seqtile.train.arguments import trainer_arguments
    from seqtile.train.recipe import read_recipe

    recipe = resolve(build_recipe({**read_recipe(EXAMPLES / "llama3-8b" / f"{name}.yaml"), "dataset": "d"}, {})[0])
    assert (recipe.engine, recipe.tiled_mlp, recipe.sp_size) == (name, True, 8 if name == "zero3" else 1)
    arguments = trainer_arguments(recipe, Path("out"), documents=False)
    assert recipe.loss_tile == 4096
    assert arguments.loss_type == "nll"  # TRL computes this one in tiles
    assert arguments.gradient_checkpointing_kwargs["offload"] is True
    assert (EXAMPLES / "llama3-8b" / f"{name}.sh").stat().st_mode & 0o100
