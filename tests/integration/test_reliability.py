"""Runs that are killed, damaged or broken: what continues, what is refused, and what is never lost."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

import killed_run
import tiny_run
from killed_run import Kill
from refusals import command_refused, refused
from seqtile._errors import RunError
from seqtile.cli import main
from seqtile.train.recipe import RECIPE_FILE, build_recipe, recipe_keys
from seqtile.train.result_report import Outcome
from seqtile.train.resume import MAY_CHANGE, check_same_run, resumed_recipe
from seqtile.train.run import train
from seqtile.train.run_directory import (
    FSDP_SHARDS,
    MARK,
    CheckpointMark,
    find_checkpoint,
    newest_whole,
    nothing_saved,
    numbered,
    why_not_whole,
    write_mark,
)

FULL = {"gradient_accumulation": 2, "keep": 0.5, "trainer": {"weight_decay": 0.1}}
PACKED_LORA = {"lora": {"r": 2, "dropout": 0.3}, "packing": "bfd", "batch_size": 2}
STEPS = 7
STATE_FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows())


@pytest.fixture(scope="module")
def server() -> Any:
    return killed_run.server()


def recipe(model: Path, dataset: Path, output: Path, **values: Any) -> dict[str, Any]:
    defaults = dict(max_length=tiny_run.LENGTH, tile=16, steps=STEPS, save_steps=2, learning_rate=1e-2, report=False)
    return {**defaults, "model": str(model), "dataset": str(dataset), "output": str(output), **values}


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(next(output.glob("*model.safetensors")))


# Where a run dies, and the step of the checkpoint that it then resumes from. Six steps are an epoch.
EVERYWHERE = [
    (Kill(3), 2), (Kill(4, "model.safetensors"), 2), (Kill(4, "optimizer.pt"), 2), (Kill(4, "scheduler.pt"), 2),
    (Kill(4, "rng_state.pth"), 2), (Kill(4, "trainer_state.json"), 2), (Kill(4, MARK), 2), (Kill(4), 2), (Kill(5), 4),
    (Kill(6), 4), (Kill(6, MARK), 4), (Kill(7), 6), (Kill(0, "model.safetensors"), 7),
]  # fmt: skip
SOMEWHERE = [
    (Kill(3), 2), (Kill(4, "adapter_model.safetensors"), 2), (Kill(6), 4), (Kill(0, "adapter_model.safetensors"), 7),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "kills"), [(FULL, EVERYWHERE), (PACKED_LORA, SOMEWHERE)], ids=["full", "packed lora with dropout"]
)
def test_killed_again_and_again_is_the_same_run(
    model: Path, dataset: Path, tmp_path: Path, server: Any, values: dict[str, Any], kills: list[tuple[Kill, int]]
):
    whole = killed_run.train(server, recipe(model, dataset, tmp_path / "whole", **values), tmp_path / "whole.log")
    assert whole.code == 0, whole.said
    assert len({loss for _, loss in whole.losses}) == STEPS
    again = recipe(model, dataset, tmp_path / "killed", **values)
    log = tmp_path / "killed.log"
    for number, (kill, last) in enumerate(kills):
        ended = killed_run.train(server, again, log, kill=kill, resume=number > 0)
        assert ended.code == -signal.SIGKILL, (kill, ended.said)
        assert find_checkpoint(tmp_path / "killed").name == f"checkpoint-{last}", kill
    ended = killed_run.train(server, again, log, resume=True)
    assert ended.code == 0, ended.said
    assert "all 7 steps are done; saving the model" in ended.said
    assert ended.losses == whole.losses
    assert weights(tmp_path / "killed").keys() == weights(tmp_path / "whole").keys()
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "killed")[name]), name
    # Two whole ones are kept; the partial checkpoints were renamed and not deleted.
    assert [path.name for _, path in numbered(tmp_path / "killed")] == ["checkpoint-6", "checkpoint-7"]
    partial = [kill.step for kill, _ in kills if kill.step and kill.writing]
    for step in {*partial}:
        assert len(list((tmp_path / "killed").glob(f"set-aside-checkpoint-{step}*"))) == partial.count(step)


def test_killed_and_resumed_with_weights_on_the_host(model: Path, dataset: Path, tmp_path: Path, server: Any) -> None:
    """The same losses and adapters, bit for bit, as with the weights on the device."""
    adapters = {"lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]}, "save_steps": 1, "steps": 3}
    here = killed_run.train(server, recipe(model, dataset, tmp_path / "here", **adapters), tmp_path / "here.log")
    values = recipe(model, dataset, tmp_path / "there", offload="checkpoints+weights", **adapters)
    ended = killed_run.train(server, values, tmp_path / "there.log", kill=Kill(2))
    assert ended.code == -signal.SIGKILL and "layers on the host" in ended.said, ended.said
    ended = killed_run.train(server, values, tmp_path / "again.log", resume=True)
    assert ended.losses == here.losses, ended.said
    assert "fetched nothing" not in ended.said
    assert weights(tmp_path / "there").keys() == weights(tmp_path / "here").keys()
    for name, tensor in weights(tmp_path / "here").items():
        assert torch.equal(tensor, weights(tmp_path / "there")[name]), name


@pytest.mark.parametrize("writing", [False, True])
def test_killed_before_the_first_checkpoint_was_whole(
    writing: bool, model: Path, dataset: Path, tmp_path: Path, server: Any, caplog
):
    """It starts again, and what was cut off stays beside it; what it did not write is not touched."""
    output = tmp_path / "out"
    values = recipe(model, dataset, output, save_steps=2)
    kill = Kill(2, "optimizer.pt") if writing else Kill(1)
    ended = killed_run.train(server, values, tmp_path / "log", kill=kill)
    assert ended.code == -signal.SIGKILL, ended.said
    assert [step for step, _ in numbered(output)] == ([2] if writing else [])
    (output / "notes.txt").write_text("mine")
    again = train(resumed_recipe({}, {"output": str(output)})[0], resume=True)
    assert "no checkpoint was saved" in caplog.text and "starting from the first step" in caplog.text
    whole = train(build_recipe(recipe(model, dataset, tmp_path / "whole", save_steps=2), {})[0])
    assert again.losses == whole.losses and (output / "notes.txt").read_text() == "mine"
    assert len(list(output.glob("set-aside-checkpoint-2"))) == writing


def test_what_was_saved_is_never_begun_again(half: Path):
    """A damaged checkpoint, one without its mark, one set aside, or the model alone is more than nothing."""
    assert not nothing_saved(half)
    newest, _ = newest_whole(half)
    assert newest is not None
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    for _, path in numbered(half):
        if path != newest:
            shutil.rmtree(path)
    (half / MARK).unlink(missing_ok=True)
    for path in (*half.glob("*.safetensors"), *half.glob("*.bin")):
        path.unlink()
    assert not nothing_saved(half)  # marked, and damaged since
    (newest / MARK).unlink()
    assert nothing_saved(half)  # cut off
    (half / "set-aside-checkpoint-1").mkdir()
    assert not nothing_saved(half)
    (half / "set-aside-checkpoint-1").rmdir()
    (half / "model.safetensors").write_bytes(b"")
    assert not nothing_saved(half)
    (half / "model.safetensors").unlink()
    (half / RECIPE_FILE).unlink()
    assert not nothing_saved(half)


@pytest.fixture(scope="module")
def finished(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory, server: Any) -> Path:
    """A run of four steps with two whole checkpoints, 2 and 4."""
    output = tmp_path_factory.mktemp("finished") / "out"
    values = recipe(model, dataset, output, steps=4)
    ended = killed_run.train(server, values, output.with_suffix(".log"))
    assert ended.code == 0, ended.said
    return output


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def test_damage_to_any_file_is_seen(finished: Path, tmp_path: Path):
    newest = finished / "checkpoint-4"
    files = sorted(path.name for path in newest.iterdir())
    assert {*STATE_FILES, MARK} <= {*files}
    assert why_not_whole(newest) == ""
    for number, name in enumerate(files):
        for damage in ("deleted", "truncated", "emptied", "zeroed"):
            copy = tmp_path / f"{number}-{damage}"
            shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("*.log", "report"))
            path = copy / "checkpoint-4" / name
            content = path.read_bytes()
            path.unlink()
            if damage != "deleted":
                path.write_bytes({"truncated": content[:-1], "emptied": b"", "zeroed": bytes(len(content))}[damage])
            problem = why_not_whole(copy / "checkpoint-4")
            assert name in problem or "completeness mark" in problem, (name, damage)
            assert find_checkpoint(copy).name == "checkpoint-2", (name, damage)
            shutil.rmtree(copy)


def test_a_damaged_checkpoint_is_named_skipped_and_kept(
    run: Path, model: Path, dataset: Path, tmp_path: Path, server: Any, finished: Path
):
    with (run / "checkpoint-4" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    (run / MARK).unlink()
    ended = killed_run.train(server, recipe(model, dataset, run, steps=4), tmp_path / "log", resume=True)
    assert ended.code == 0, ended.said
    assert "skipped checkpoint-4: optimizer.pt has 100 of " in ended.said
    assert f"resuming from {run / 'checkpoint-2'}" in ended.said
    assert (run / "set-aside-checkpoint-4" / "optimizer.pt").stat().st_size == 100
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(run)[name])


def test_none_whole_is_one_sentence(run: Path):
    for step in (2, 4):
        (run / f"checkpoint-{step}" / MARK).unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = ["train", "--resume", "--output", str(run), "--steps", "6"]
    values = ("checkpoint-4: it has no completeness mark", "checkpoint-2: it", "--from-checkpoint check")
    command_refused(command, "resume.no-complete-checkpoint", *values)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_an_unmarked_checkpoint_can_be_named(run: Path, model: Path, dataset: Path, tmp_path: Path, server: Any):
    values = recipe(model, dataset, run, steps=4)
    (run / "checkpoint-2" / MARK).unlink()
    ended = killed_run.train(server, values, tmp_path / "log", resume=True, checkpoint="checkpoint-2")
    assert ended.code == 0, ended.said
    assert "checkpoint-2 has no completeness mark; its files are readable" in ended.said
    assert why_not_whole(run / "checkpoint-4") == ""
    assert (run / "set-aside-checkpoint-4").is_dir()  # whole, but of steps that were done again


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_named_checkpoint_must_be_readable(run: Path, name: str):
    (run / "checkpoint-2" / MARK).unlink()
    path = run / "checkpoint-2" / name
    path.write_bytes(path.read_bytes()[:-20])
    with refused("resume.checkpoint-broken", "'checkpoint-2'", name):
        find_checkpoint(run, "checkpoint-2")


@pytest.mark.parametrize(
    "name", ["checkpoint-3", "../out/checkpoint-2", "checkpoint-2/../checkpoint-4", "..", "report", ""]
)
def test_only_a_checkpoint_of_this_run_can_be_named(run: Path, name: str):
    with refused("resume.checkpoint-unknown", "checkpoint-2, checkpoint-4"):
        find_checkpoint(run, name)


def test_a_checkpoint_is_named_only_for_a_resume():
    command_refused(["train", "--from-checkpoint", "checkpoint-2"], "resume.from-checkpoint-without-resume")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 4, "files": {"a": 3}}', '{"step": 4, "extra": 1}', "\0"])
def test_a_mark_that_is_none(tmp_path: Path, text: str):
    (tmp_path / MARK).write_text(text)
    assert why_not_whole(tmp_path) == "its completeness mark is unreadable"


def test_a_mark_lists_every_file_of_every_rank(tmp_path: Path):
    for name in ("rng_state_0.pth", "rng_state_1.pth", "global_step4/rank_1_optim_states.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 300_000)
    write_mark(tmp_path, CheckpointMark(step=4, processes=2))
    assert why_not_whole(tmp_path) == ""
    (tmp_path / "global_step4" / "rank_1_optim_states.pt").unlink()
    assert why_not_whole(tmp_path) == "global_step4/rank_1_optim_states.pt is missing"


def resume(model: Path, dataset: Path, run: Path, *, callbacks: Any = (), **values: Any) -> Outcome:
    """Continue ``run`` in this process, as the command would."""
    chosen, _ = resumed_recipe({}, recipe(model, dataset, run, **{"steps": 4, **values}))
    return train(chosen, resume=True, callbacks=callbacks)


@pytest.fixture
def half(run: Path) -> Path:
    """The run of four steps, stopped after two."""
    shutil.rmtree(run / "checkpoint-4")
    (run / MARK).unlink()
    return run


@pytest.mark.parametrize(
    "values",
    [{"tile": "shards:3"}, {"keep": 1.0}, {"blocks": "mlp"}, {"tile": None, "tiled_mlp": False}, {"loss_tile": 7}],
    ids=str,
)
def test_other_tiles_change_nothing_but_rounding(
    half: Path, finished: Path, model: Path, dataset: Path, values: dict[str, Any], caplog
):
    outcome = resume(model, dataset, half, **values)
    whole = json.loads((finished / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in whole if "loss" in row]
    torch.testing.assert_close([loss for _, loss in outcome.losses], losses)
    for name, tensor in weights(finished).items():
        # Adam divides by the root of a mean of squares, which enlarges the rounding of gradients near zero.
        torch.testing.assert_close(weights(half)[name], tensor, rtol=1e-4, atol=1e-4)
    assert "dropout" not in caplog.text and "schedule" not in caplog.text


def test_other_tiles_with_dropout_are_said_to_draw_other_masks(model: Path, dataset: Path, tmp_path: Path, caplog):
    values = recipe(model, dataset, tmp_path / "out", steps=1, lora={"r": 2, "dropout": 0.1})
    train(build_recipe(values, {})[0])
    resume(model, dataset, tmp_path / "out", lora=values["lora"], steps=2, tile=32, save_steps=1)
    assert "other tiles draw other dropout masks" in caplog.text
    assert "now ends at step 2 instead of 1" in caplog.text


def test_save_steps_of_the_resumed_run_count(half: Path, model: Path, dataset: Path):
    resume(model, dataset, half, save_steps=1)
    assert [step for step, _ in numbered(half)] == [3, 4]


def snapshot(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_other_rows_under_the_same_name_are_refused(half: Path, model: Path, dataset: Path, tmp_path: Path):
    own = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    values = recipe(model, own, tmp_path / "own", steps=2)
    train(build_recipe(values, {})[0])
    rows = tiny_run.text_rows()
    for wrong in ([*rows[:-1], {"text": rows[-1]["text"][:-4] + "cat."}], rows[:-1], [*rows, rows[0]], rows[::-1]):
        tiny_run.write_jsonl(own, wrong)
        before = snapshot(tmp_path / "own")
        with refused("resume.other-rows", "checkpoint-2"):
            resume(model, own, tmp_path / "own")
        assert snapshot(tmp_path / "own") == before


def test_another_base_under_the_same_adapters_is_refused(dataset: Path, tmp_path: Path):
    base = tiny_run.save_model(tmp_path / "base")
    train(build_recipe(recipe(base, dataset, tmp_path / "out", steps=1, lora={"r": 2}), {})[0])
    moved = {name: value + 1e-3 for name, value in weights(base).items()}
    save_file(moved, base / "model.safetensors", {"format": "pt"})
    with refused("resume.other-weights", "checkpoint-1"):
        resume(base, dataset, tmp_path / "out", lora={"r": 2})


def test_another_number_of_processes_is_refused_and_other_versions_are_said(
    half: Path, model: Path, dataset: Path, caplog
):
    path = half / "checkpoint-2" / MARK
    mark = json.loads(path.read_text())
    path.write_text(json.dumps(mark | {"processes": 2}))
    with refused("resume.other-processes", "2 processes", "has 1"):
        resume(model, dataset, half)
    mark["run"]["versions"]["torch"] = "2.0.0"
    path.write_text(json.dumps(mark))
    resume(model, dataset, half)
    assert "torch 2.0.0 is now" in caplog.text


@pytest.mark.parametrize(
    ("engine", "shards", "rows", "refusal"),
    [
        ("ddp", False, 8, ()),
        ("fsdp2", True, 8, ()),
        ("ddp", False, 4, ("resume.other-batch", "8 rows instead of 4")),
        ("fsdp2", True, None, ("resume.other-batch", "8 rows instead of an unknown number")),
        ("fsdp2", False, 8, ("resume.other-processes", "2 processes", "has 4")),
        ("zero3", True, 8, ("resume.other-processes", "2 processes", "has 4")),
    ],
)
def test_other_processes_go_on_where_the_checkpoint_and_the_rows_allow(
    engine: str, shards: bool, rows: int | None, refusal: tuple[str, ...], tmp_path: Path
):
    """Whatever the recipe says: a program may call ``train`` with any."""
    chosen = build_recipe({"engine": engine, "nproc": 4, "gradient_accumulation": 2, "lora": {"r": 2}}, {})[0]
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / FSDP_SHARDS if shards else checkpoint).mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"max_steps": 5}')
    before = {} if rows is None else {"rows_of_a_step": rows}
    write_mark(checkpoint, CheckpointMark(step=2, processes=2, run=before))
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=4, max_steps=5))
    run = {"data": "x", "frozen": None, "tiling": {}, "versions": {}, "rows_of_a_step": chosen.rows_of_a_step}
    if refusal:
        with refused(*refusal):
            check_same_run(run, checkpoint, chosen, trainer, None)
    else:
        [note] = check_same_run(run, checkpoint, chosen, trainer, None)
        assert "by 2 processes, this run has 4: a step still has 8 rows, but random numbers" in note


def test_the_directory_of_shards_is_the_one_that_accelerate_writes():
    from accelerate.utils.constants import FSDP_MODEL_NAME

    assert f"{FSDP_MODEL_NAME}_0" == FSDP_SHARDS


OTHERWISE = {
    "model": "other", "dataset": "other.jsonl", "dataset_split": "test", "dataset_config": "x", "max_length": 32,
    "packing": True, "skip_bad_rows": True, "streaming": True, "lora": {"r": 2}, "epochs": 2,
    "batch_size": 2, "gradient_accumulation": 2, "learning_rate": 1.0, "seed": 5, "dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 2},
    "attention": "eager", "optimizer": "sgd", "trust_remote_code": True, "model_kwargs": {"revision": "x"},
    "trainer": {"weight_decay": 0.1},
}  # fmt: skip
"""Another value for every key of a recipe that may not change."""


def test_every_key_that_would_change_the_run_is_refused(run: Path):
    # A new key has to be decided on: here, or in MAY_CHANGE. Engines are launched, not set in a test.
    undecided = (
        {*recipe_keys()}
        - {*OTHERWISE, "qlora"}
        - {*MAY_CHANGE}
        - {"engine", "nproc", "sp_size", "cp_size", "engine_offload"}
    )
    assert not undecided
    for key, value in OTHERWISE.items():
        if key == "epochs":
            continue  # next to the saved steps
        with refused("resume.key-changed", f"change {key} from"):
            resumed_recipe({}, {"output": str(run), key: value})
    with refused("steps.with-epochs"):
        resumed_recipe({}, {"output": str(run), "epochs": 2})
    with refused("resume.key-changed", "change lora from"):
        resumed_recipe({}, {"output": str(run), "qlora": True})


class Poison(TrainerCallback):
    """Make the gradient of one weight infinite in step ``step``; the loss stays what it is."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step - 1:
            model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_an_infinite_gradient_stops_before_anything_is_saved(model: Path, dataset: Path, tmp_path: Path, clip: float):
    values = recipe(model, dataset, tmp_path / "out", save_steps=1, trainer={"max_grad_norm": clip, "logging_steps": 5})
    with pytest.raises(RunError, match=r"step 3: the gradient norm is (inf|nan)\n  micro-batch 1 of 1, 1 x \d+ tok"):
        train(build_recipe(values, {})[0], callbacks=[Poison(3)])
    assert [step for step, _ in numbered(tmp_path / "out")] == [1, 2]
    assert why_not_whole(tmp_path / "out" / "checkpoint-2") == ""
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_loss_that_is_no_number_names_step_and_text(model: Path, dataset: Path, tmp_path: Path, capsys):
    values = recipe(model, dataset, tmp_path / "out", save_steps=1, learning_rate=1e30, gradient_accumulation=2)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", "--recipe", str(tmp_path / "recipe.yaml")]) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"stopped at step 2: the loss is (nan|inf)\n  micro-batch 1 of 2, 1 x \d+ tokens, starting with:", error
    )
    shown = re.search(r"^    '(.+)'\.\.\.$", error, re.MULTILINE)
    assert shown and any(row["text"].startswith(shown[1]) for row in tiny_run.text_rows())
    assert f"the last complete checkpoint is {tmp_path / 'out' / 'checkpoint-1'}" in error
    assert [step for step, _ in numbered(tmp_path / "out")] == [1]
    assert find_checkpoint(tmp_path / "out").name == "checkpoint-1"
