"""Disks that take no more, while a run saves and while it goes on; and checkpoints from elsewhere."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension
from transformers import TrainerCallback

import disk_faults
import killed_run
import tiny_run
from refusals import command_refused, refused
from seqtile._errors import RunError
from seqtile.cli import main
from seqtile.engines.build_locks import stale_locks
from seqtile.train.recipe import build_recipe
from seqtile.train.result_report import Outcome
from seqtile.train.resume import resumed_recipe
from seqtile.train.run import train
from seqtile.train.run_directory import check_pickles, find_checkpoint, read_mark, why_not_whole, write_mark

STEPS = 3
OWN_MOUNTS = pytest.mark.skipif(not disk_faults.can_mount(), reason="a process may have no mounts of its own here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows(4))


@pytest.fixture(scope="module")
def server() -> Any:
    return killed_run.server()


def recipe(model: Path, dataset: Path, output: Path, **values: Any) -> dict[str, Any]:
    defaults = dict(max_length=tiny_run.LENGTH, tile=32, steps=STEPS, save_steps=1, report=False)
    return {**defaults, "model": str(model), "dataset": str(dataset), "output": str(output), **values}


def run(values: dict[str, Any], *callbacks: TrainerCallback, **how: Any) -> Outcome:
    return train(build_recipe(values, {})[0], callbacks=callbacks, **how)


@pytest.fixture(scope="module")
def finished(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "out"
    run(recipe(model, dataset, output))
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """A finished run with the whole checkpoints 2 and 3."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


# ---- disks ----


class _Limit(TrainerCallback):
    """``ulimit -f`` from the end of a step on."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            _limit(self.size)


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def unwritten(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Standard output and error go nowhere: the limit counts for the files that they may be sent to as well."""
    with capfd.disabled(), open(os.devnull, "wb") as nowhere:
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, before in kept.items():
                os.dup2(before, number)
                os.close(before)


# Limits below which the optimizer (the first of these sizes), and the weights (both), cannot be written.
@pytest.mark.parametrize("size", [200_000, 50_000])
def test_a_limit_of_file_sizes_while_saving(
    model: Path, dataset: Path, tmp_path: Path, limited: None, size: int, capfd: pytest.CaptureFixture[str]
):
    values, limit = recipe(model, dataset, tmp_path / "out"), resource.getrlimit(resource.RLIMIT_FSIZE)
    with unwritten(capfd), pytest.raises(RunError) as told:
        run(values, _Limit(2, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    sentence = str(told.value)
    assert sentence.startswith("the disk ") and "does not allow files of this size (ulimit -f); " in sentence
    assert (
        f"the last complete checkpoint is {tmp_path / 'out' / 'checkpoint-1'}; checkpoint-2 is incomplete" in sentence
    )
    assert sentence.endswith(f"run with --resume --output {tmp_path / 'out'}") and "\n" not in sentence
    assert find_checkpoint(tmp_path / "out").name == "checkpoint-1"
    run(values, resume=True)
    assert (tmp_path / "out" / "set-aside-checkpoint-2").is_dir()
    assert why_not_whole(tmp_path / "out" / "checkpoint-3") == ""


def test_a_limit_of_file_sizes_while_resuming(
    model: Path, dataset: Path, output: Path, limited: None, capfd: pytest.CaptureFixture[str]
):
    shutil.rmtree(output / "checkpoint-3")
    before = (output / "recipe.yaml").read_bytes()
    _limit(100)
    with (
        unwritten(capfd),
        pytest.raises(RunError, match=r"ulimit -f\); the last complete checkpoint is .*checkpoint-2;"),
    ):
        run(recipe(model, dataset, output), resume=True)
    assert (output / "recipe.yaml").read_bytes() == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_limit_of_file_sizes_while_saving_shards(
    model: Path, dataset: Path, tmp_path: Path, limited: None, capfd: pytest.CaptureFixture[str], monkeypatch: Any
):
    from torch.distributed import checkpoint

    def attempt(*_: Any) -> None:
        _limit(1000)
        checkpoint.save({"weight": torch.zeros(1000)}, checkpoint_id=tmp_path / "shards", no_dist=True)

    monkeypatch.setattr("seqtile.train.run._attempt", attempt)
    with unwritten(capfd), pytest.raises(RunError, match=r"\(ulimit -f\); no checkpoint is complete yet"):
        run(recipe(model, dataset, tmp_path / "out"))


@OWN_MOUNTS
@pytest.mark.parametrize(
    ("size", "words"),
    [(800_000, "checkpoint-1; checkpoint-2 is incomplete"), (40_000, "no checkpoint is complete yet: fix that")],
)
def test_a_full_disk_while_saving(model: Path, dataset: Path, tmp_path: Path, server: Any, size: int, words: str):
    disk = tmp_path / "disk"
    disk.mkdir()
    values = recipe(model, dataset, disk / "out")
    ended = killed_run.train(server, values, tmp_path / "log", before=partial(disk_faults.small, disk, size))
    assert ended.code == 1, ended.said
    assert f"the disk of {disk}" in ended.said and words in ended.said
    assert " (0.0 of 0.0 GB free) is full; " in ended.said
    assert "Traceback" not in ended.said


@OWN_MOUNTS
@pytest.mark.parametrize("room", [0, 20_000])
def test_a_full_disk_while_resuming(model: Path, dataset: Path, output: Path, server: Any, room: int):
    """Nothing, or too little for a checkpoint, is free beside the run that goes on."""
    shutil.rmtree(output / "checkpoint-3")
    log, before = output.parents[1] / f"{output.parent.name}.log", partial(disk_faults.full_with, output, room)
    ended = killed_run.train(server, recipe(model, dataset, output), log, resume=True, before=before)
    assert ended.code == 1, ended.said
    assert f"the disk of {output}" in ended.said and " (0.0 of 0.0 GB free) is full; " in ended.said
    assert f"the last complete checkpoint is {output / 'checkpoint-2'}; " in ended.said
    assert "Traceback" not in ended.said


@OWN_MOUNTS
def test_a_disk_that_becomes_read_only(model: Path, dataset: Path, tmp_path: Path, server: Any):
    values = recipe(model, dataset, tmp_path / "out")
    before = partial(disk_faults.read_only_at, tmp_path, 2)
    ended = killed_run.train(server, values, tmp_path.with_suffix(".log"), before=before)
    assert ended.code == 1, ended.said
    assert (
        f"the disk of {tmp_path}" in ended.said
        and ") is mounted read-only; the last complete checkpoint is " in ended.said
    )
    assert f"{tmp_path / 'out' / 'checkpoint-1'}; fix that" in ended.said


@OWN_MOUNTS
def test_a_read_only_disk_while_resuming(model: Path, dataset: Path, output: Path, server: Any):
    log, before = output.parents[1] / f"{output.parent.name}.log", partial(disk_faults.read_only, output)
    ended = killed_run.train(server, recipe(model, dataset, output), log, resume=True, before=before)
    assert ended.code == 2, ended.said
    assert f"cannot write to output '{output}' (Read-only file system, the disk " in ended.said
    assert f"; fix that, then resume from {output / 'checkpoint-3'}" in ended.said


# ---- digests ----


def test_one_flipped_bit_anywhere_is_seen(output: Path):
    for name in ("optimizer.pt", "model.safetensors"):
        path = output / "checkpoint-3" / name
        content = path.read_bytes()
        for place in (0, len(content) // 3, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert why_not_whole(output / "checkpoint-3") == f"{name} is not what was written"
            assert find_checkpoint(output).name == "checkpoint-2"
        path.write_bytes(content)
    assert find_checkpoint(output).name == "checkpoint-3"


def test_a_resume_reads_the_digests_once(
    model: Path, dataset: Path, output: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from seqtile.train import run_directory

    read: list[Path] = []
    digest = run_directory.digest_of_file
    monkeypatch.setattr(run_directory, "digest_of_file", lambda path: [read.append(path), digest(path)][1])
    run(recipe(model, dataset, output, steps=STEPS + 1), resume=True)
    assert sorted(path.name for path in read if path.parent == output / "checkpoint-3") == sorted(
        path.name for path in (output / "checkpoint-3").iterdir() if path.name != "complete.json"
    )


# ---- files from elsewhere ----


class _Calls:
    """A pickle that calls something when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _poison(checkpoint: Path, name: str, content: Any) -> None:
    """Write a pickle into a checkpoint, and a mark that agrees with it."""
    (checkpoint / name).parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        (checkpoint / name).write_bytes(content)
    else:
        torch.save(content, checkpoint / name)
    mark = read_mark(checkpoint)
    assert mark is not None
    write_mark(checkpoint, mark)


def _other_archive() -> bytes:
    """A zip file of two pickles of the same name: readers differ in which of them they take."""
    path = Path("two.zip")
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning):
        for content in (pickle.dumps({}), pickle.dumps(_Calls(os.system, "true"))):
            archive.writestr("archive/data.pkl", content)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt", _Calls(os.system, "touch made"), "posix.system"),
        ("optimizer.pt", {"a": [_Calls(eval, "open('made', 'w')")]}, "builtin"),
        ("scheduler.pt", _Calls(getattr, "", "join"), "getattr"),
        ("rng_state.pth", b"\x80\x04c", "has a pickle that cannot be checked"),
        ("rng_state.pth", b"PK\x03\x04" + b"x" * 99, "has a pickle that cannot be checked"),
        ("pytorch_model_fsdp_0/.metadata", pickle.dumps(_Calls(os.system, "touch made")), "posix.system"),
    ],
)
def test_a_pickle_that_asks_for_more_is_refused(output: Path, name: str, content: Any, words: str, monkeypatch: Any):
    monkeypatch.chdir(output.parent)
    _poison(output / "checkpoint-3", name, content)
    values = (f"checkpoint-3/{name} ", words, "--trust-checkpoint")
    command_refused(["train", "--resume", "--output", str(output)], "resume.unsafe-checkpoint", *values)
    assert not (output.parent / "made").exists()
    assert find_checkpoint(output, trusted=True).name == "checkpoint-3"
    assert find_checkpoint(output, "checkpoint-2").name == "checkpoint-2"


@pytest.mark.parametrize("way", ["tag", "folder", "file"])
def test_what_leads_out_of_a_checkpoint_is_refused(output: Path, way: str, monkeypatch: Any):
    """DeepSpeed joins its tag to the path as it stands, and a linked directory is not walked into."""
    monkeypatch.chdir(output.parent)
    checkpoint = output / "checkpoint-3"
    elsewhere = output.parent / f"elsewhere-{way}"
    elsewhere.mkdir()
    torch.save(_Calls(os.system, "touch made"), elsewhere / "mp_rank_00_model_states.pt")
    names = {"tag": "latest", "folder": "global_step3", "file": "model_states.pt"}
    if way == "tag":
        (checkpoint / "latest").write_text(f"../../{elsewhere.name}")
    else:
        aim = elsewhere if way == "folder" else elsewhere / "mp_rank_00_model_states.pt"
        (checkpoint / names[way]).symlink_to(aim)
    write_mark(checkpoint, read_mark(checkpoint))
    values = (f"checkpoint-3/{names[way]} ", "--trust-checkpoint")
    command_refused(["train", "--resume", "--output", str(output)], "resume.unsafe-checkpoint", *values)
    assert not (output.parent / "made").exists()
    if way == "tag":
        (checkpoint / "global_step3").mkdir(exist_ok=True)
        (checkpoint / "latest").write_text("global_step3")
        check_pickles(checkpoint)


def test_an_archive_that_two_readers_read_in_two_ways(output: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    path = output / "checkpoint-3" / "optimizer.pt"
    path.write_bytes(_other_archive())
    with refused("resume.unsafe-checkpoint", "optimizer.pt"):
        check_pickles(output / "checkpoint-3")


def test_what_trainers_write_is_let_through(output: Path, tmp_path: Path):
    check_pickles(output / "checkpoint-3")
    numbers = {dtype: torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float16)}
    torch.save({"dtypes": numbers, "device": torch.device("cpu"), "size": torch.Size([2])}, tmp_path / "one.pt")
    torch.save({"weight": torch.nn.Parameter(torch.ones(2)), "set": {1, 2}}, tmp_path / "two.bin")
    check_pickles(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_shards_are_looked_into(tmp_path: Path, monkeypatch: Any):
    from torch.distributed import checkpoint

    monkeypatch.chdir(tmp_path)
    settings = {"step": torch.zeros(2), "lr": 0.1, "betas": (0.9, 0.99)}
    checkpoint.save(settings, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    check_pickles(tmp_path)
    settings["lr"] = _Calls(os.system, "touch made")
    checkpoint.save(settings, checkpoint_id=tmp_path / "optimizer_1", no_dist=True)
    with refused("resume.unsafe-checkpoint", "optimizer_1/.metadata", "posix.system"):
        check_pickles(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_list_of_shards_changes_nothing_of_the_check(tmp_path: Path):
    """A pickle can set attributes of a class: here those by which files are told from links and directories."""
    from torch.distributed.checkpoint.metadata import Metadata

    def text(word: str) -> bytes:
        return pickle.BINUNICODE + len(word).to_bytes(4, "little") + word.encode()

    size = pickle.GLOBAL + b"torch\nSize\n"
    attributes = text("is_file") + size + text("is_symlink") + size
    change = pickle.GLOBAL + b"pathlib\nPosixPath\n" + pickle.NONE + pickle.EMPTY_DICT + pickle.MARK + attributes
    change += pickle.SETITEMS + pickle.TUPLE2 + pickle.BUILD + pickle.POP
    metadata = pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}), protocol=2)
    shards = tmp_path / "optimizer_0"
    shards.mkdir()
    (shards / ".metadata").write_bytes(metadata[:2] + change + metadata[2:])
    torch.save({"a": _Calls(os.system, "true")}, shards / "z.pt")
    for _ in range(2):
        with refused("resume.unsafe-checkpoint", "z.pt", "posix.system"):
            check_pickles(tmp_path)
    assert (shards / "z.pt").is_file() and not shards.is_symlink()


def test_code_of_the_model_is_asked_for_again(output: Path):
    path = output / "recipe.yaml"
    path.write_text(path.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    with refused("resume.untrusted-code", "--trust-remote-code"):
        resumed_recipe({}, {"output": str(output)})
    assert resumed_recipe({}, {"output": str(output), "trust_remote_code": True})[0].trust_remote_code


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"hub_token": "secret"}},
        {"trainer": {"push_to_hub_token": "secret"}},
        {"model_kwargs": {"token": "secret"}},
        {"model": "m", "dataset": "https://user:hf_" + "a" * 34 + "@huggingface.co/some/rows"},
    ],
)
def test_secrets_are_taken_from_the_environment_alone(values: dict[str, Any]):
    with refused("recipe.secret", "HF_TOKEN") as told:
        build_recipe(values, {})
    assert "secret'" not in str(told.value) and "aaa" not in str(told.value)


def test_no_file_of_a_run_holds_the_token(model: Path, dataset: Path, tmp_path: Path, monkeypatch: Any):
    token = "hf_" + "b" * 34
    monkeypatch.setenv("HF_TOKEN", token)
    run(recipe(model, dataset, tmp_path / "out", steps=1, report=True))
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"recipe.yaml", "training_args.bin", "report.json"} <= {path.name for path in written}
    assert not [path for path in written if token.encode() in path.read_bytes()]


@pytest.fixture
def hostile(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hostile"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_hostile_weights_file(hostile: Path, dataset: Path, whole: bool):
    (hostile / "model.safetensors").unlink()
    torch.save({"a": _Calls(os.system, f"touch {hostile / 'made'}")}, hostile / "pytorch_model.bin")
    if not whole:
        os.truncate(hostile / "pytorch_model.bin", 200)
    values = ["--model", str(hostile), "--dataset", str(dataset), "--output", str(hostile.parent / "out")]
    code = "model.unsafe-file" if whole else "model.corrupt-file"
    command_refused(["train", *values, "--max-length", "64"], code)
    assert not (hostile / "made").exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ cycler.__init__.__globals__.os.system('touch made') }}", "SecurityError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
    ],
)
def test_a_hostile_chat_template(hostile: Path, tmp_path: Path, template: str, words: str, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    (hostile / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    command = ["train", "--model", str(hostile), "--dataset", "chat.jsonl", "--max-length", "64"]
    command_refused(command, "dataset.not-rendered", words)
    assert not Path("made").exists() and not Path("runs").exists()


# ---- DeepSpeed's builds ----


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # as in PyTorch up to 2.13
    lock = tmp_path / "builds" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_the_lock_of_a_dead_build_is_named(
    lock: Path, model: Path, dataset: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    engine = ["--engine", "zero2", "--nproc", "2", "--model", str(model)]
    data = ["--dataset", str(dataset), "--output", str(lock.parents[2] / "out"), "--max-length", "64"]
    words = {"train": [*engine, *data], "doctor": []}[command]
    assert main([command, *words]) == (0 if command == "doctor" else 2)
    captured = capsys.readouterr()
    assert f"run: rm {lock}\n" in captured.out + captured.err


def test_a_file_that_locks_nothing_is_left(lock: Path, monkeypatch: pytest.MonkeyPatch):
    """PyTorch 2.14 and later hold another lock, and leave its file after every build."""
    assert stale_locks() == [lock]
    monkeypatch.delattr(cpp_extension, "FileBaton")
    assert stale_locks() == []


def test_the_lock_of_a_living_build_is_left(lock: Path):
    assert stale_locks() == [lock]
    with lock.open():
        assert stale_locks() == []
