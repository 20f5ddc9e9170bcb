"""Runs that are killed, damaged or broken: what continues, what is refused, and what is never lost."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import killed_run
import tiny_run
from killed_run import Kill
from seqtile import UserError
from seqtile.cli import main
from seqtile.train.checkpoints import MARK, Mark, find_checkpoint, numbered, why_not_whole, write_mark

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
    # Two whole ones are kept; the torsos were renamed and not deleted.
    assert [path.name for _, path in numbered(tmp_path / "killed")] == ["checkpoint-6", "checkpoint-7"]
    torsos = [kill.step for kill, _ in kills if kill.step and kill.writing]
    for step in {*torsos}:
        assert len(list((tmp_path / "killed").glob(f"set-aside-checkpoint-{step}*"))) == torsos.count(step)


def test_killed_before_the_first_checkpoint(model: Path, dataset: Path, tmp_path: Path, server: Any, capsys):
    values = recipe(model, dataset, tmp_path / "out")
    ended = killed_run.train(server, values, tmp_path / "log", kill=Kill(2))
    assert ended.code == -signal.SIGKILL, ended.said
    assert main(["train", "--resume", "--output", str(tmp_path / "out")]) == 2
    assert "holds no checkpoint to resume from; start the run anew: --overwrite" in capsys.readouterr().err


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
    assert "skipped checkpoint-4: optimizer.pt holds 100 of " in ended.said
    assert "resuming from checkpoint-2" in ended.said
    assert (run / "set-aside-checkpoint-4" / "optimizer.pt").stat().st_size == 100
    for name, tensor in weights(finished).items():
        assert torch.equal(tensor, weights(run)[name])


def test_none_whole_is_one_sentence(run: Path, capsys):
    for step in (2, 4):
        (run / f"checkpoint-{step}" / MARK).unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["train", "--resume", "--output", str(run), "--steps", "6"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for words in ("checkpoint-4: it carries no completeness mark", "checkpoint-2: it", "--checkpoint checkpoint-4"):
        assert words in error
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_an_unmarked_checkpoint_can_be_named(run: Path, model: Path, dataset: Path, tmp_path: Path, server: Any):
    values = recipe(model, dataset, run, steps=4)
    (run / "checkpoint-2" / MARK).unlink()
    ended = killed_run.train(server, values, tmp_path / "log", resume=True, checkpoint="checkpoint-2")
    assert ended.code == 0, ended.said
    assert "checkpoint-2 carries no completeness mark; every file of it can be read" in ended.said
    assert why_not_whole(run / "checkpoint-4") == ""
    assert (run / "set-aside-checkpoint-4").is_dir()  # whole, but of steps that were done again


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_named_checkpoint_must_be_readable(run: Path, name: str):
    (run / "checkpoint-2" / MARK).unlink()
    path = run / "checkpoint-2" / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=f"cannot resume from 'checkpoint-2': {name} is cut off or damaged"):
        find_checkpoint(run, "checkpoint-2")


@pytest.mark.parametrize(
    "name", ["checkpoint-3", "../out/checkpoint-2", "checkpoint-2/../checkpoint-4", "..", "report", ""]
)
def test_only_a_checkpoint_of_this_run_can_be_named(run: Path, name: str):
    with pytest.raises(UserError, match="expected one of those in .*: checkpoint-2, checkpoint-4"):
        find_checkpoint(run, name)


def test_a_checkpoint_is_named_only_for_a_resume(capsys):
    assert main(["train", "--checkpoint", "checkpoint-2"]) == 2
    assert "give --resume too" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 4, "files": {"a": 3}}', '{"step": 4, "extra": 1}', "\0"])
def test_a_mark_that_is_none(tmp_path: Path, text: str):
    (tmp_path / MARK).write_text(text)
    assert why_not_whole(tmp_path) == "its completeness mark cannot be read"


def test_a_mark_lists_every_file_of_every_rank(tmp_path: Path):
    for name in ("rng_state_0.pth", "rng_state_1.pth", "global_step4/rank_1_optim_states.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 300_000)
    write_mark(tmp_path, Mark(step=4, processes=2))
    assert why_not_whole(tmp_path) == ""
    (tmp_path / "global_step4" / "rank_1_optim_states.pt").unlink()
    assert why_not_whole(tmp_path) == "global_step4/rank_1_optim_states.pt is missing"
