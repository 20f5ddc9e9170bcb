"""The command line: light, clear about bad input, and careful with what is there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import seqtile
import tiny_run
from refusals import command_refused, refused
from seqtile.cli import COMMANDS, build_app, main
from seqtile.cli.train_command import offload_keys, recipe_options
from seqtile.planner import explain, techniques


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows())


def snapshot(directory: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["train", "--help"], ["verify", "--help"], ["doctor", "--help"], ["train", "--tile"]],
)
def test_answers_without_importing_torch(arguments: list[str]):
    heavy = "torch transformers trl datasets peft numpy"
    code = (
        "import sys\nfrom seqtile.cli import main\n"
        f"code = main({arguments!r})\n"
        f"loaded = [name for name in {heavy.split()!r} if name in sys.modules]\n"
        "assert not loaded, loaded\nsys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert "AssertionError" not in result.stderr, result.stderr
    assert result.returncode == (2 if arguments[-1] == "--tile" else 0)


@pytest.mark.parametrize(
    ("command", "flag"), [("train", "--output"), ("plan", "--model"), ("verify", "--lora"), ("train", "--nodes")]
)
def test_a_flag_without_its_value_is_named_with_its_command(command: str, flag: str) -> None:
    command_refused([command, flag], "flag.malformed", f"{flag}' requires", f"seqtile {command} --help")


def test_refusing_a_recipe_needs_no_torch(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("stepz: 3\n")
    code = (
        "import sys\nfrom seqtile.cli import main\n"
        f"code = main(['train', '--recipe', {str(tmp_path / 'recipe.yaml')!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert result.returncode == 2
    assert result.stderr == "seqtile: unknown recipe key 'stepz'; did you mean 'steps'?\n"


EARLY: dict[str, tuple[list[str], str]] = {
    "no such dataset": (["--dataset", "missing.jsonl"], "does not exist"),
    "no such model": (["--model", "./missing"], "does not exist"),
    "a model on the Hub": (["--model", "nobody/such-model"], "HF_HUB_OFFLINE is set"),
    "a dataset on the Hub": (["--dataset", "nobody/such-dataset"], "HF_HUB_OFFLINE is set"),
    "an output that cannot be written": (["--output", "{model}/config.json/out"], "cannot write to output"),
    "an output that is in use": (["--output", "{model}"], "which this run reads"),
    "no such tracker": (["--recipe", "{recipe}"], "expected none, all, or some of"),
    "a schedule without its arguments": (["--lr-scheduler-type", "cosine_with_min_lr"], "needs min_lr or min_lr_rate"),
    "a count": (["--engine", "ddp", "--nproc", "1"], "at least 2 processes"),
    "both of two": (["--steps", "3", "--recipe", "{epochs}"], "use one"),
}


NAMES = {
    "plan --model llama-8b --max-length 0": "got --max-length 0, expected at least 2",
    "plan --model llama-8b --optimizer foo": "got optimizer 'foo'",
    "plan --model llama-8b --batch-size 0": "got batch size 0, expected at least 1",
    "verify --model {model} --dtype foo": "'dtype': got 'foo'",
    "verify --model {model} --tile foo": "is not a tile rule",
}
"""Commands, with what each says."""


def test_what_is_wrong_by_itself_is_refused_before_the_heavy_imports(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "r.yaml").write_text("trainer: {report_to: [wandbb]}\n")
    (tmp_path / "e.yaml").write_text("epochs: 2\n")
    names = {"model": model, "recipe": tmp_path / "r.yaml", "epochs": tmp_path / "e.yaml"}
    given = {"--model": str(model), "--dataset": str(dataset), "--output": str(tmp_path / "out")}
    commands = [
        [
            "train",
            *(word for pair in (given | dict(zip(flags[::2], flags[1::2], strict=True))).items() for word in pair),
        ]
        for flags, _ in EARLY.values()
    ]
    commands += [words.format(**names).split() for words in NAMES]
    commands.append(["verify", "--model", "nobody/such-model"])
    code = (
        "import sys\nfrom seqtile.cli import main\n"
        f"for words in {[[word.format(**names) for word in one] for one in commands]!r}:\n"
        "    assert main(words) == 2, words\n"
        "    assert not {'torch', 'transformers', 'datasets'} & {*sys.modules}, words\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    expected = [*(words for _, words in EARLY.values()), *NAMES.values(), "HF_HUB_OFFLINE is set"]
    lines = result.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected, strict=True):
        assert line.startswith("seqtile: ") and words in line
    assert not (tmp_path / "out").exists()


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from huggingface_hub import constants

    from seqtile.train import check_early

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with refused("hub.unreachable"):  # the tests' proxy, at which nothing listens
        check_early.check_hub_name("nobody/model", "model")
    (tmp_path / "models--nobody--model").mkdir()
    check_early.check_hub_name("nobody/model", "model")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": address})
        assert check_early.can_connect("https://hub.example")
    assert not check_early.can_connect("https://hub.example")


def test_trackers_are_those_of_transformers_and_need_their_package(monkeypatch: pytest.MonkeyPatch):
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from seqtile.train import check_early

    assert check_early.TRACKERS.keys() == INTEGRATION_TO_CALLBACK.keys()
    monkeypatch.setattr(check_early, "find_spec", lambda name: None if name == "wandb" else name)
    check_early.check_trackers("none")
    check_early.check_trackers(["tensorboard", "mlflow"])
    with refused("report-to.package-missing", "pip install wandb"):
        check_early.check_trackers(["mlflow", "wandb"])


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("train --nproc x", "flag.malformed", "'--nproc'"),
        ("train --max_length=a", "flag.malformed", "'--max-length'"),
        ("train --nodes 0", "flag.malformed", "'--nodes'"),
        ("train --tile", "flag.malformed", "'--tile' requires"),
        ("train --overwrite=3", "flag.malformed", "'--overwrite' does not take"),
        ("train --max-lenght 3", "flag.unknown", "--max-lenght; did you mean --max-length?"),
        ("train --output_dir x", "flag.unknown", "--output-dir; use --output"),
        ("train --rope-scaling 4", "flag.unknown", "'rope_scaling: VALUE'"),
        ("train --lr 1e-4", "flag.unknown", "--lr; use --learning-rate"),
        ("train --seq_len 9", "flag.unknown", "--seq-len; use --max-length"),
        ("train --load-in-4bit", "flag.unknown", "--load-in-4bit; use --qlora"),
        ("train --gpus 8", "flag.unknown", "--gpus; use --nproc"),
        ("plan --nproc 8", "flag.unknown", "--nproc; use --gpus"),
        ("train --memory 80GiB", "flag.unknown", "--memory; use --fit-memory"),
        ("plan --memory 80GiB", "flag.unknown", "--memory; use --device"),
        ("plan --precision bfloat16", "flag.unknown", "--precision; use --dtype"),
        ("train --weight-decay 0.1", "flag.unknown", "'trainer: {weight_decay: VALUE}'"),
        ("plan", "flag.malformed", "missing option '--model'"),
        ("--foo", "flag.unknown", "seqtile has no flag --foo"),
        ("trai", "flag.malformed", "no such command 'trai'"),
        ("train extra", "flag.malformed", "unexpected extra arg"),
    ],
)
def test_what_the_parser_refuses_is_one_sentence(words: str, code: str, expected: str):
    command_refused(words.split(), code, expected)


def test_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"seqtile {seqtile.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_the_help_of_train_fits_on_a_screen_and_help_all_has_every_flag(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 24 and "--qlora" in short and "--packing" not in short
    assert main(["train", "--help-all"]) == 0
    full = capsys.readouterr().out
    assert "--packing" in full and all(flag in full for flag in re.findall("--[a-z-]+", short))


def test_train_takes_every_flag_that_a_plan_proposes() -> None:
    proposed = [technique for module in (techniques, explain) for technique in vars(module).values()
                if isinstance(technique, techniques.Dial)]  # fmt: skip
    words = " ".join(technique.flags for technique in proposed).split()
    assert len(words) > 12 and "--heads" in words
    command: Any = typer.main.get_command(build_app()).commands["train"]  # type: ignore[attr-defined]
    command.make_parser(command.context_class(command)).parse_args([*words, "--offload", "checkpoints,optimizer"])


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("true", {"offload": True}), ("checkpoints", {"offload": True}), ("64GB", {"offload": "64GB"}),
        ("checkpoints,optimizer", {"offload": True, "engine_offload": ["optimizer"]}), ("false", {"offload": False}),
        ("weights", {"offload": "weights"}), ("checkpoints+weights", {"offload": "checkpoints+weights"}),
        ("64GB,weights", {"offload": "64GB+weights"}),
    ],
)  # fmt: skip
def test_what_offload_names(text: str, keys: dict[str, Any]) -> None:
    assert offload_keys(text) == keys


def test_an_engine_with_shards_offloads_its_weights() -> None:
    assert offload_keys("optimizer,weights", "zero3") == {"engine_offload": ["optimizer", "weights"]}
    assert offload_keys("64GB,weights", "fsdp2") == {"offload": "64GB", "engine_offload": ["weights"]}


def test_options_that_are_flags_are_keys_of_the_recipe() -> None:
    flags = {"tile": "none", "keep": "0.5", "checkpoint": "none", "loss": "tiled", "heads": 2, "blocks": "mlp"}
    keys = {"tiled_mlp": False, "keep": 0.5, "checkpoint": "none", "loss": "tiled", "heads": 2, "blocks": "mlp"}
    assert recipe_options(flags) == keys
    with refused("loss.full-in-train"):
        recipe_options({"loss": "full"})


@pytest.mark.parametrize("text", ["all", "64GB,32GB", "true,64GB", "gradients"])
def test_what_offload_does_not_name(text: str) -> None:
    with refused("plan.offload-malformed"):
        offload_keys(text)


def test_lists_of_commands_are_not_cut_off(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert len(listed) > 3 and not [line for line in listed if line.endswith("...")]


def test_a_model_that_the_hub_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr("seqtile.train.check_early.can_connect", lambda endpoint: False)
    command_refused(["plan", "--device", "h200", "--model", "nobody/nothing"], "hub.offline")


def test_doctor_shows_versions_devices_and_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch):
    import torch

    from seqtile.cli import doctor_command

    version = doctor_command.package_version
    monkeypatch.setattr(doctor_command, "package_version", lambda name: None if name == "trl" else version(name))

    monkeypatch.setattr("seqtile.cli.doctor_checks.FEATURES", {})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert seqtile.__version__ in shown and torch.__version__ in shown and "device" in shown
    assert "not installed, for train: pip install trl" in shown
    assert len(shown.splitlines()) < 40


@pytest.mark.slow  # the compiler
def test_doctor_runs_every_feature_here_and_names_the_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    from seqtile._compat import TESTED
    from seqtile.cli.doctor_checks import FEATURES

    assert main(["doctor", "--compat"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ok: ") == len(FEATURES), shown
    lines = {line.split()[0].strip(";"): line for line in shown.splitlines() if "; tested " in line}
    assert lines.keys() == TESTED.keys()
    assert lines["torch"].endswith("ok here: tiled MLP, offload, compiled block")


def test_doctor_says_what_is_wrong_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numerics._fused import last_tile_without_gradient
    from seqtile.cli import doctor_checks

    features = {name: doctor_checks.FEATURES[name] for name in ("tiled MLP", "head-wise attention")}
    features["offload"] = doctor_checks.Feature("torch", {"blocks": "none", "loss": "tiled"})
    features["compiled block"] = doctor_checks.Feature("torch", {"offload": "nonsense"})
    monkeypatch.setattr(doctor_checks, "FEATURES", features)
    last_tile_without_gradient(monkeypatch)
    assert main(["doctor"]) == 1
    tiled, heads, offload, refusal = capsys.readouterr().out.splitlines()[-4:]
    assert "FAILED: the gradient of model." in tiled and "ok: " in heads
    assert "FAILED: had no effect" in offload and "failed: " in refusal


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--tile", "0"], ("option.malformed", "tile=0")),
        (["--tile", "shards:0"], ("option.malformed", "shards:0")),
        (["--max-length", "257"], ("max-length.beyond-positions", "256 positions")),
        (["--max_length", "257"], ("max-length.beyond-positions", "256 positions")),
        (["--max-length", "1"], ("recipe.invalid-value", "max_length")),
        (["--steps", "0"], ("recipe.invalid-value", "steps")),
        (["--engine", "fsdp3"], ("recipe.invalid-value", "'fsdp3'")),
        (["--lora", "r=0"], ("recipe.invalid-value", "lora.r")),
        (["--lora", "9999999"], ("recipe.invalid-value", "lora.r")),
        (["--lora", "rank=4"], ("recipe.unknown-key", "lora.rank")),
        (["--use_tiled_mlp", "false", "--tile", "64"], ("blocks.none-with-options", "so tile would")),
        (["--tile", "64", "--tiled-mlp-num-shards", "4"], ("tile.given-twice",)),
        (["--resume"], ("resume.no-earlier-run",)),
        (["--resume", "--overwrite"], ("resume.with-overwrite",)),
        (["--recipe", "missing.yaml"], ("recipe.unreadable",)),
    ],
)
def test_bad_flags(model: Path, dataset: Path, tmp_path: Path, flags: list[str], refusal: tuple[str, ...]):
    output = tmp_path / "out"
    length = ["--max-length", "64"] if "length" not in flags[0] else []
    given = ["train", "--model", str(model), "--dataset", str(dataset), "--output", str(output), *length, *flags]
    command_refused(given, *refusal)
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("stepz: 3", ("recipe.unknown-key", "'steps'")),
        ("trainer: {warmup_stepz: 3}", ("trainer.unknown-key", "'warmup_steps'")),
        ("optimizer: sgdd", ("trainer.refused", "sgdd is not a valid OptimizerNames")),
        ("trainer: {weight_decay: much}", ("trainer.invalid-value", "trainer.weight_decay")),
        ("trainer: {lr_scheduler_type: greedy}", ("trainer.refused", "requires an eval strategy")),
        ("trainer: {warmup_steps: -3}", ("trainer.refused", "warmup_steps")),
        ("trainer: {fp16: true, bf16: true}", ("trainer.needs-accelerator", "fp16")),
        ("only: ['*.nothing']", ("only.no-match",)),
        ("rope_scaling: {rope_type: yarn}", ("rope-scaling.incomplete",)),
    ],
)
def test_bad_recipes(model: Path, dataset: Path, tmp_path: Path, text: str, refusal: tuple[str, ...]):
    (tmp_path / "r.yaml").write_text(f"model: {model}\ndataset: {dataset}\nmax_length: 64\n{text}\n")
    command_refused(["train", "--recipe", str(tmp_path / "r.yaml"), "--output", str(tmp_path / "out")], *refusal)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "refusal"),
    [
        ("missing.jsonl", None, ("dataset.not-found",)),
        ("nobody/such-dataset", None, ("hub.offline",)),
        ("empty.jsonl", "", ("dataset.empty",)),
        ("empty.txt", "", ("dataset.empty",)),
        ("broken.jsonl", '{"text": "a"\n', ("dataset.unreadable", "line 1: Expecting")),
        ("columns.jsonl", '{"question": "a", "answer": "b"}\n', ("dataset.column-missing", "answer, question")),
        ("numbers.jsonl", '{"text": 3}\n', ("dataset.no-valid-row", "row 1")),
        ("binary.txt", b"\xff\xfe\x00\x81", ("dataset.unreadable", "'utf-8' codec")),
        ("no.parquet", "not parquet", ("dataset.unreadable",)),
        ("folder/", None, ("dataset.empty",)),
    ],
)
def test_bad_datasets(model: Path, tmp_path: Path, name: str, content: str | bytes | None, refusal: tuple[str, ...]):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif name.endswith("/"):
        path.mkdir()
    given = name if name.startswith("nobody") else str(path)
    arguments = ["--model", str(model), "--dataset", given, "--max-length", "64", "--output", str(tmp_path / "out")]
    command_refused(["train", *arguments], *refusal)
    assert not (tmp_path / "out").exists()


def test_arguments_that_only_the_schedule_knows(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "trainer: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1, x: 2}}\n"
    )
    arguments = ["--model", str(model), "--dataset", str(dataset), "--output", str(tmp_path / "out")]
    command = ["train", *arguments, "--max-length", "64", "--recipe", str(tmp_path / "r.yaml")]
    command_refused(command, "train.first-step-fails", "cosine_with_min_lr", "argument 'x'")


def test_packages_that_are_missing_are_named_together(monkeypatch: pytest.MonkeyPatch):
    from seqtile.train import run

    find = run.find_spec
    monkeypatch.setattr(run, "find_spec", lambda name: None if name in ("trl", "peft") else find(name))
    command_refused(["train"], "train.package-missing", "pip install trl peft")


def test_bad_models(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for given, code in [
        (str(tmp_path / "missing"), "model.not-found"),
        (str(tmp_path / "empty"), "model.config-missing"),
        (str(tmp_path / "file"), "model.config-missing"),
        ("nobody/such-model", "hub.offline"),
    ]:
        arguments = ["--model", given, "--dataset", str(dataset), "--output", str(tmp_path / "out")]
        command_refused(["train", *arguments], code)


def test_a_model_with_code_of_its_own_is_refused(dataset: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.MineConfig"}}'
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass MineConfig: pass\n")
    arguments = ["--model", str(tmp_path), "--dataset", str(dataset), "--output", str(tmp_path / "out")]
    command_refused(["train", *arguments], "model.custom-code", "trust_remote_code")
    assert not (tmp_path / "ran").exists()


def test_a_model_without_a_position_wise_block(dataset: Path, tmp_path: Path):
    from transformers import MambaConfig, MambaForCausalLM

    vocab = tiny_run.save_tokenizer(tmp_path / "mamba")
    config = MambaConfig(vocab_size=vocab, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    arguments = ["--model", str(tmp_path / "mamba"), "--dataset", str(dataset), "--max-length", "64"]
    command_refused(["train", *arguments, "--output", str(tmp_path / "out")], "blocks.nothing-to-tile")
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    arguments = ["--model", str(model), "--dataset", str(dataset), "--max-length", "64"]
    command_refused(["train", *arguments, "--output", str(tmp_path / "file" / "out")], "output.not-writable")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_an_output_directory_without_permission(model: Path, dataset: Path, tmp_path: Path):
    (tmp_path / "closed").mkdir(mode=0o500)
    arguments = ["--model", str(model), "--dataset", str(dataset), "--max-length", "64"]
    command_refused(["train", *arguments, "--output", str(tmp_path / "closed" / "out")], "output.not-writable")


@pytest.mark.parametrize(("flags", "code"), [([], "output.not-empty"), (["--overwrite"], "output.holds-other-files")])
def test_files_that_no_run_wrote_are_never_touched(
    model: Path, dataset: Path, tmp_path: Path, flags: list[str], code: str
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    before = snapshot(tmp_path / "out")
    arguments = ["--model", str(model), "--dataset", str(dataset), "--max-length", "64"]
    command_refused(["train", *arguments, "--output", str(tmp_path / "out"), *flags], code)
    assert snapshot(tmp_path / "out") == before


def test_the_model_read_is_never_the_output(model: Path, dataset: Path):
    before = snapshot(model)
    arguments = ["--model", str(model), "--dataset", str(dataset), "--max-length", "64"]
    command_refused(["train", *arguments, "--output", str(model), "--overwrite"], "output.contains-input")
    assert snapshot(model) == before


def test_ctrl_c_is_answered(monkeypatch, capsys):
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seqtile.cli.train_command.read_recipe", pressed)
    assert main(["train", "--recipe", "any.yaml"]) == 130
    assert capsys.readouterr().err == "seqtile: interrupted; nothing else was saved\n"


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_failure(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # what head does when it has its line
    command = [sys.executable, "-m", "seqtile.cli", *arguments]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=500)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")
