"""``seqtile train --engine`` through the real launcher: two processes, and the losses and weights of one.

Every run has a constant learning rate, so that a run of two steps that is continued for one equals a run of three.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_run
from grid.launch import TESTS
from refusals import command_refused
from seqtile.cli import main, train_command
from seqtile.train import launch
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.run import train
from seqtile.train.run_directory import check_unlocked, why_not_whole

EXAMPLES = TESTS.parent / "examples"
SECONDS = 1200
"""A guard against a hang, for one launch; DeepSpeed's operator may have to be compiled, about two minutes alone."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs deepspeed, which is installed where it can compile: a C++ compiler, Python.h",
)

VALUES = {"learning_rate": 1e-2, "tile": 16, "trainer": {"lr_scheduler_type": "constant"}, "max_length": 96}
"""Rows are 72 to 96 tokens long: the two ranks have different numbers of tokens in most steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    tiny_run.save_model(folder / "model", num_attention_heads=4, num_key_value_heads=2)
    rows = [{"text": row["text"][: 72 + 5 * (index % 6)]} for index, row in enumerate(tiny_run.text_rows())]
    tiny_run.write_jsonl(folder / "rows.jsonl", rows)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**VALUES, "loss_tile": 16}))
    return folder


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the tests' own worker, one build of DeepSpeed's operator, and no other accelerator."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def arguments(folder: Path, output: Path, *more: str) -> list[str]:
    return ["train", "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--recipe",
            str(folder / "recipe.yaml"), "--output", str(output), *more]  # fmt: skip


def weights(output: Path) -> dict[str, torch.Tensor]:
    adapter = output / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else output / "model.safetensors")


@cache
def alone(folder: Path, steps: int, rows: int, key: str = "{}") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one untiled process, with TRL's own loss, that takes as many rows a step."""
    output = folder / f"alone-{steps}-{rows}-{alone.cache_info().misses}"
    values = {**VALUES, "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), **json.loads(key)}
    values |= {"output": str(output), "steps": steps, "gradient_accumulation": rows, "tiled_mlp": False, "tile": None}
    losses = train(build_recipe({**values, "report": False}, {})[0]).losses
    return [loss for _, loss in losses], weights(output)


def assert_equals_one_process(folder: Path, output: Path, steps: int, rows: int, **values: Any) -> None:
    losses, expected = alone(folder, steps, rows, json.dumps(values))
    report = json.loads((output / "report" / "report.json").read_text())
    found = [row["loss"] for row in report["losses"]]
    # Sums in another order, and Adam's first steps divide each gradient by its own size.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=0)
    assert len(set(losses)) == steps
    trained = weights(output)
    assert trained.keys() == expected.keys()
    start = weights(folder / "model")
    for name, tensor in trained.items():
        change = expected[name] - start[name] if name in start else expected[name]
        error = tensor - expected[name]
        # By norm: where a gradient is near zero, Adam makes a whole step of its rounding, in one number of thousands.
        assert error.norm() <= 1e-3 * change.norm(), (name, float(error.norm() / change.norm()))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("engine", "seen"),
    [
        ("fsdp2", {"type": "FSDP", "held": 0.5, "stage": None}),
        pytest.param(
            "zero2", {"type": "DEEPSPEED", "held": 1.0, "stage": 2}, marks=[needs_deepspeed, pytest.mark.slow]
        ),
        pytest.param("zero3", {"type": "DEEPSPEED", "held": 0.5, "stage": 3}, marks=needs_deepspeed),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trains_as_one_process_and_resumes(
    engine: str, seen: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_command, "WORKER", "engine_worker")
    (folder / "timeit.py").write_text("raise ImportError('the file of the user, not the module')")
    monkeypatch.chdir(folder)
    output = folder / engine
    code = main(arguments(folder, output, "--engine", engine, "--nproc", "2", "--steps", "2"))
    shown = capfd.readouterr()
    assert code == 0, shown.err
    assert_equals_one_process(folder, output, steps=3, rows=2)
    for rank in range(2):
        looks = json.loads((output / f"seen-{rank}.json").read_text())
        assert [look.pop("step") for look in looks] == [0, 2]
        for look in looks:
            assert look.pop("held") == pytest.approx(seen["held"], abs=0.01)  # shards are padded
            assert look == {"type": seen["type"], "world": 2, "stage": seen["stage"]}
    settings = launch.engine_environment(build_recipe(read_recipe(output / "recipe.yaml"), {})[0])
    assert " ".join(f"{name}={value}" for name, value in settings.items()) in shown.err
    assert "no progress bar under an engine" in shown.err
    # Only rank 0 reports: each thing is said once, though two processes run.
    assert shown.err.count("tiled 2 of 2 MLPs") == 2 and shown.out.count("step 1/2") == 1
    assert f"engine   {engine}, 2 processes" in shown.out
    assert build_recipe(read_recipe(output / "recipe.yaml"), {})[0].nproc == 2


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_adapters_under_zero3_on_layers_that_share_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL would make checkpoints reentrant there, which lose gradients of shared keys and values."""
    model = folder / "sharing"
    vocab = tiny_run.save_tokenizer(model)
    config = AutoConfig.for_model(
        "gemma4_text", hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, global_head_dim=8, vocab_size=vocab, vocab_size_per_layer_input=vocab, eos_token_id=0,
        hidden_size_per_layer_input=8, num_kv_shared_layers=1, layer_types=["full_attention"] * 3, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    monkeypatch.setattr(train_command, "WORKER", "engine_worker")
    more = ["--lora", "4", "--model", str(model)]
    output = folder / "zero3-sharing"
    assert main(arguments(folder, output, "--engine", "zero3", "--nproc", "2", "--steps", "2", *more)) == 0
    assert_equals_one_process(folder, output, steps=3, rows=2, model=str(model), lora={"r": 4})


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("engine", "flags", "said"),
    [
        ("single", [], ""),
        pytest.param("fsdp2", ["--gpus", "2"], "FSDP_OFFLOAD_PARAMS=false", marks=pytest.mark.slow),
        pytest.param("zero3", ["--gpus", "2", "--offload", "optimizer,weights"], "OFFLOAD_PARAM_DEVICE=cpu",
                     marks=[needs_deepspeed, pytest.mark.slow]),
    ],
)  # fmt: skip
def test_a_planned_recipe_runs_as_it_is(
    engine: str, flags: list[str], said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What ``seqtile plan --recipe`` wrote, and nothing else but the data."""
    recipe, output = folder / f"planned-{engine}.yaml", folder / f"planned-{engine}"
    asked = ["plan", "--model", str(folder / "model"), "--device", "h100", "--attention", "sdpa", "--engine", engine]
    assert main([*asked, *flags, "--recipe", str(recipe), "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    data = ["--dataset", str(folder / "rows.jsonl"), "--output", str(output), "--steps", "1"]
    code = main(["train", "--recipe", str(recipe), *data])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    assert said in shown.err
    ran = read_recipe(output / "recipe.yaml")
    assert ran["max_length"] == planned["sure_length"] and ran["engine"] == engine
    assert {key: ran[key] for key in planned["recipe"]} == planned["recipe"]


@pytest.mark.timeout(SECONDS)
def test_ctrl_c_saves_one_checkpoint_and_a_launcher_of_the_users_own_continues(folder: Path) -> None:
    output = folder / "ddp"
    command = [sys.executable, "-m", "seqtile.cli"]
    first = arguments(folder, output, "--engine", "ddp", "--nproc", "2", "--steps", "100000")
    # In a session of its own, as a terminal would have it, so that the signal goes to the command alone.
    process = subprocess.Popen(
        [*command, *first], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    checkpoint = saved_checkpoint(errors)
    assert "Error" not in errors and (checkpoint / "model.safetensors").is_file(), errors
    step = int(checkpoint.name.rpartition("-")[2])

    # What the command starts can be started by hand; the processes are the same.
    by_hand = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    by_hand += [str(EXAMPLES / "accelerate" / "ddp.yaml"), "--num_processes", "2", "--module", "seqtile.cli"]
    by_hand += ["train", "--resume", "--output", str(output), "--steps", str(step + 1)]
    done = subprocess.run(by_hand, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"step {step + 1}/{step + 1}") == 1
    assert_equals_one_process(folder, output, steps=step + 1, rows=2)


TORCHRUN = ["torch.distributed.run", "--nproc_per_node", "2", "--standalone", "-m"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("launcher", "engine", "times", "code"),
    [
        pytest.param([], "ddp", 2, 143, id="ddp"),
        pytest.param([], "fsdp2", 2, 143, id="fsdp2"),
        pytest.param([], "zero3", 2, 143, id="zero3", marks=needs_deepspeed),
        pytest.param(TORCHRUN, "ddp", 0, 0, id="the ranks of a torchrun"),
        # A torchrun that handles SIGTERM itself ends with a traceback; here it just ends, and the ranks save.
        pytest.param(
            [*TORCHRUN[:-1], "--signals-to-handle", "SIGUSR1", "-m"], "ddp", 2, -signal.SIGTERM, id="all of a torchrun"
        ),
    ],
)
def test_sigterm_saves_one_checkpoint(
    launcher: list[str], engine: str, times: int, code: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Sent ``times`` to every process of the job, as Slurm does, or once to all but the first, after the first step."""
    output = folder / f"stopped-{request.node.callspec.id.replace(' ', '-')}"
    flags = ["--engine", engine, "--steps", "100000", *([] if launcher else ["--nproc", "2"])]
    command = [sys.executable, "-m", *launcher, "seqtile.cli", *arguments(folder, output, *flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not any(line.startswith("step ") for line in process.stdout):  # DeepSpeed may speak before
                pytest.fail(process.communicate(timeout=SECONDS)[1])
            front = psutil.Process(process.pid)
            ranks = front.children(recursive=True)
            for receiver in [front, *ranks] * times or ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    receiver.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert not psutil.wait_procs([front, *ranks], timeout=30)[1]
    assert process.returncode == code, errors
    assert why_not_whole(saved_checkpoint(errors)) == ""
    assert "nothing more was saved" not in errors, errors
    check_unlocked(output)


def saved_checkpoint(errors: str) -> Path:
    """The one checkpoint that a run says it saved when it was asked to stop."""
    assert errors.count("saving a checkpoint after this step") == 1 and "Traceback" not in errors, errors
    (saved,) = re.findall(r"checkpoint saved in (\S+)", errors)
    return Path(saved)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_example_of_zero3_with_sequence_parallelism(folder: Path) -> None:
    output = run_example("zero3", folder, "--sp-size", "2")
    assert_equals_one_process(folder, output, steps=2, rows=1, **example_values(folder, "zero3"))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_sequence_parallelism_resumes_in_the_middle_of_an_epoch(folder: Path) -> None:
    output = folder / "split"
    more = ["--engine", "zero3", "--nproc", "2", "--sp-size", "2", "--steps", "2"]
    assert main(arguments(folder, output, *more)) == 0
    assert main(["train", "--resume", "--output", str(output), "--steps", "3"]) == 0
    assert_equals_one_process(folder, output, steps=3, rows=1)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_example_of_fsdp2(folder: Path) -> None:
    output = run_example("fsdp2", folder)
    assert_equals_one_process(folder, output, steps=2, rows=2, **example_values(folder, "fsdp2"))


def example_values(folder: Path, name: str) -> dict[str, Any]:
    """What the example says, for one process."""
    values = read_recipe(folder / "examples" / f"{name}.yaml")
    for key in ("engine", "nproc", "sp_size", "model", "tile", "tiled_mlp", "loss_tile", "save_steps", "max_length"):
        values.pop(key, None)
    return {**values, "max_length": 64}


def run_example(name: str, folder: Path, *more: str) -> Path:
    """The script of an example on the tiny model: flags for its sizes, and two changes that the CPU needs."""
    here = folder / "examples"
    shutil.copytree(EXAMPLES / "llama3-8b", here, dirs_exist_ok=True)
    recipe = here / f"{name}.yaml"
    # Checkpoints are offloaded into pinned memory, which only an accelerator has; and what is tiny needs small tiles,
    # and large steps to learn anything in two.
    changes = {"offload: true ": "offload: false", "learning_rate: 1e-5": "learning_rate: 1e-2"}
    changes |= {"tile: auto\n": "tile: 16\n", "loss_tile: 4096 ": "loss_tile: 16 "}
    for old, new in changes.items():
        text = recipe.read_text()
        assert text.count(old) == 1
        recipe.write_text(text.replace(old, new))
    output = folder / f"example-{name}"
    flags = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--output", str(output)]
    sizes = ["--max-length", "64", "--steps", "2", "--nproc", "2", *more]
    command = ["sh", str(here / f"{name}.sh"), *flags, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.timeout(SECONDS)
def test_what_a_process_refuses_is_said_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    unread = tiny_run.write_jsonl(folder / "unread.jsonl", [{"nothing": 1}])
    more = ["--engine", "ddp", "--nproc", "2", "--dataset", str(unread)]
    command_refused([*arguments(folder, folder / "refused"), *more], "dataset.column-missing", "nothing")
    errors = capfd.readouterr().err  # of the processes
    assert "seqtile: " not in errors and "Traceback" not in errors, errors
    assert not (folder / "refused").exists()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_the_result_has_the_dtype_of_the_checkpoint(engine: str, folder: Path, tmp_path: Path) -> None:
    """Weights that are sharded or copied train in fp32, and are saved in bf16 as one process would save them."""
    shutil.copytree(folder / "model", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    shutil.copy(folder / "rows.jsonl", tmp_path)
    shutil.copy(folder / "recipe.yaml", tmp_path)
    more = ("--engine", engine, "--nproc", "2", "--steps", "2")
    assert main(arguments(tmp_path, tmp_path / "out", *more)) == 0
    assert {weight.dtype for weight in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    _, expected = alone(tmp_path, 2, 2)
    start, trained = weights(tmp_path / "model"), weights(tmp_path / "out")
    assert trained.keys() == expected.keys() and any(not torch.equal(trained[name], start[name]) for name in start)
    for name, weight in trained.items():  # a sum in another order may round to the next number of bf16
        torch.testing.assert_close(weight, expected[name], rtol=2**-7, atol=1e-6)
