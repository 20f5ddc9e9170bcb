"""What a run shows: on a terminal, in a pipe, without colour; and what it keeps of its steps."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tiny_run
from seqtile.cli import main, show
from seqtile.install.runs import Runs
from seqtile.train.data_summary import DataSummary
from seqtile.train.metrics import METRICS_FILE, Metrics, Silent
from seqtile.train.recipe import build_recipe
from seqtile.train.run import train

SHORT = """
from seqtile.cli.show import Progress
with Progress() as progress:
    progress.stage("loading the weights of [model]")
    progress.begin(0, 2)
    for step in (1, 2):
        progress.record({"step": step, "steps": 2, "loss": 2.5, "learning_rate": 1e-3, "seconds_left": 61.0})
    progress.end()
"""

BARS = """
from datasets.utils import tqdm
from seqtile.cli.show import Progress
from seqtile.cli.train_command import quiet
from transformers.utils.logging import tqdm as theirs
quiet()
with Progress() as progress:
    progress.stage("tokenising")
    for _ in tqdm(range(3), desc="Tokenizing", mininterval=0): pass
    for _ in theirs(range(2), desc="Loading weights", mininterval=0): pass
"""


def on_a_terminal(code: str, **environment: str) -> str:
    """What a terminal of 100 columns gets from ``code``, escape sequences included."""
    master, slave = pty.openpty()
    variables = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", **environment}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=variables)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass  # the other side is closed
    os.close(master)
    assert process.wait(timeout=500) == 0, shown.decode()
    return shown.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-9]|9[0-7])[0-9;]*m")
STEP = "step 1/2  loss 2.5000  lr 1.0e-03  0:01:01 left"


def test_a_terminal_gets_a_status_and_a_bar() -> None:
    shown = on_a_terminal(SHORT)
    assert "loading the weights of [model] ..." in shown and STEP in shown and "training" in shown
    assert COLOUR.search(shown) and "\x1b[?25l" in shown  # colours, and a cursor that is hidden while it draws
    assert shown.index("loading the weights") < shown.index("training")


def test_no_color_is_heeded() -> None:
    shown = on_a_terminal(SHORT, NO_COLOR="1")
    assert STEP in shown and not COLOUR.search(shown)


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}])
def test_elsewhere_each_thing_is_a_plain_line(environment: dict[str, str]) -> None:
    if environment:
        assert on_a_terminal(SHORT, **environment).splitlines()[0] == "loading the weights of [model] ..."
        return
    result = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=500)
    assert result.stderr == "loading the weights of [model] ...\n"
    assert result.stdout == f"{STEP}\n{STEP.replace('1/2', '2/2')}\n"


def test_bars_of_the_libraries_are_not_shown() -> None:
    shown = on_a_terminal(BARS)
    assert "tokenising ..." in shown and "it/s" not in shown and "%|" not in shown
    result = subprocess.run([sys.executable, "-c", BARS], capture_output=True, text=True, timeout=500)
    assert (result.stdout, result.stderr) == ("", "tokenising ...\n")


class Shown(Silent):
    """Remembers what a run told its display."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.records: list[dict[str, Any]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def record(self, values: dict[str, Any]) -> None:
        self.records.append(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_run.save_model(folder / "model")
    tiny_run.write_jsonl(folder / "rows.jsonl", tiny_run.text_rows())
    return folder


def values(folder: Path, output: str, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output": str(folder / output),
        "max_length": 64, "tile": 16, "steps": 4, "gradient_accumulation": 2, "report": False, **more,
    }  # fmt: skip


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_step_is_shown_and_kept_and_a_resumed_run_goes_on_in_the_same_file(folder: Path) -> None:
    shown = Shown()
    run = train(build_recipe(values(folder, "out", save_steps=2), {})[0], display=shown)
    assert shown.stages == [
        f"reading {folder / 'rows.jsonl'}", f"checking {folder / 'rows.jsonl'}",
        f"loading the weights of {folder / 'model'}", "tiling",
        "tokenizing 12 rows", "preparing the first step", "saving the model",
    ]  # fmt: skip
    found = lines(folder / "out" / METRICS_FILE)
    assert [{**one, "steps": 4} for one in found] == shown.records
    assert [(one["step"], one["loss"]) for one in found] == [*run.losses]
    assert [one["tokens"] for one in found] == [2 * 64 * step for step in (1, 2, 3, 4)]
    for one in found:
        assert one["grad_norm"] > 0 and one["tokens_per_s"] > 0 and one["learning_rate"] > 0
        assert 0.05 < one.get("peak_resident_gib", one.get("peak_allocated_gib")) < 1000
    assert found[-1]["seconds_left"] == 0 and found[0]["seconds"] <= found[-1]["seconds"]
    assert (
        isinstance(run.data["train"], DataSummary)
        and run.ran == "batches of up to 64 tokens were cut into up to 4 tiles"
    )

    with (folder / "out" / METRICS_FILE).open("a") as file:
        file.write('{"step": 5, "lo')  # a killed run's last line
    resumed = build_recipe(values(folder, "out", save_steps=2, steps=5), {})[0]
    train(resumed, resume=True, resume_from="checkpoint-2")
    again = lines(folder / "out" / METRICS_FILE)
    assert [one["step"] for one in again] == [1, 2, 3, 4, 5]
    assert (
        again[:2] == found[:2] and "tokens_per_s" not in again[2]
    )  # what was trained before is not known to the clock
    assert "tokens_per_s" in again[3]


def test_the_first_lines_say_what_is_done_and_the_last_what_was_tiled(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values(folder, "short", tile=64, steps=1)))
    assert main(["train", "--recipe", str(tmp_path / "r.yaml")]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("loading PyTorch and Transformers ...\nreading ")
    assert "%|" not in shown.err  # no bar of a library's
    assert "tiled    2 of 2 MLPs (LlamaMLP), 64 tokens per tile, fused; batches" in shown.out
    assert "\nnote     attention ran on " in shown.out
    assert "; batches of up to 64 tokens fit in one tile, uncut (tile=64)\n" in shown.out
    assert "data     12 rows, " in shown.out


def test_libraries_that_no_command_asked_for_are_silent() -> None:
    libraries = ["torch.utils.cpp_extension", *(name for name in ("torchao", "bitsandbytes") if find_spec(name))]
    code = f"from seqtile.cli import main; main(['--version']); import {', '.join(libraries)}"  # main of each command
    environment = {**os.environ, "CUDA_HOME": "/", "CUDA_VISIBLE_DEVICES": ""}  # a toolkit without a GPU
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout and done.stderr == ""


def test_each_number_of_what_ran_stands_beside_what_it_counts() -> None:
    """The tokens are a batch's: "8 tiles of 4,096 tokens" would read as 4,096 tokens a tile."""
    assert str(Runs(4, 4, 8, 4096, "tile=512")) == "batches of up to 4,096 tokens were cut into up to 8 tiles"
    assert str(Runs(4, 2, 8, 4096, "tile=512")) == "2 of 4 blocks cut batches of up to 4,096 tokens into up to 8 tiles"
    assert str(Runs(4, 0, 1, 0, "tile=512")) == "no tiled block ran (tile=512)"


def test_a_record_in_words() -> None:
    told = show.described({"eval_loss": 2.25, "peak_allocated_gib": 70.123, "seconds_left": 5})
    assert told == ["eval loss 2.2500", "peak 70.12 GiB"]
    everything = {"loss": 2, "learning_rate": 2e-5, "grad_norm": 1.234, "tokens_per_s": 12345.6, "seconds_left": 3700}
    assert show.described(everything) == [
        "loss 2.0000", "lr 2.0e-05", "grad norm 1.23", "12,346 tokens/s", "1:01:40 left"
    ]  # fmt: skip


def test_other_ranks_keep_and_show_nothing(tmp_path: Path) -> None:
    shown = Shown()
    metrics = Metrics(tmp_path, shown)
    state = SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=2, epoch=0.5)
    metrics.on_train_begin(None, state, None)
    metrics.on_log(None, state, None, logs={"loss": 1.0})
    assert shown.records == [] and not (tmp_path / METRICS_FILE).exists()
