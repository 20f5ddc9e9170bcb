"""The two loops in ``examples``: under 60 lines, and to the untiled losses."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, PartialState
from transformers import AutoModelForCausalLM

import tiny_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("loops")
    text = folder / "text.txt"
    text.write_text("\n".join(tiny_run.SENTENCES), encoding="utf-8")
    return tiny_run.save_model(folder / "model"), text


@pytest.mark.parametrize(
    ("name", "more"),
    [("pytorch_loop.py", ["--steps", "8"]), ("accelerate_loop.py", ["--accumulate", "2"])],
    ids=["pytorch", "accelerate"],
)
def test_a_loop_trains_to_the_untiled_losses(
    name: str, more: list[str], files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60
    model, text = files
    losses, keys = [], AutoModelForCausalLM.from_pretrained(model).state_dict().keys()
    for untiled in ([], ["--untiled"]):
        output = tmp_path / f"{len(untiled)}"
        command = ["--model", str(model), "--text", str(text), "--length", "100", "--lr", "0.001"]
        monkeypatch.setattr(sys, "argv", [name, *command, "--output", str(output), *more, *untiled])
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        said = capsys.readouterr().out
        assert ("tiled 2 of 2 MLPs (LlamaMLP)" in said) == (not untiled)
        losses.append([float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)])
        assert AutoModelForCausalLM.from_pretrained(output).state_dict().keys() == keys
    assert len(losses[0]) >= 8 and losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)  # five digits are printed


@pytest.mark.parametrize("path", sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("scripts/*.py")]), ids=lambda p: p.stem)
def test_the_command_that_a_script_shows_has_its_flags(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    command = (ast.get_docstring(ast.parse(text)) or "").partition(f"examples/{path.relative_to(EXAMPLES)} ")[2]
    assert command, "no command that runs it"
    assert set(re.findall(r"--[\w-]+", command)) <= set(re.findall(r'add_argument\("(--[\w-]+)"', text))


def test_accelerates_configurations_leave_the_number_of_processes_to_the_command() -> None:
    """accelerate refuses them without it."""
    assert not [path for path in (EXAMPLES / "accelerate").glob("*.yaml") if "num_processes" in path.read_text()]
    for path in EXAMPLES.rglob("*"):
        if path.suffix in (".py", ".md"):
            for command in re.findall(r"accelerate launch(?:.*\\\n)*.*", path.read_text(encoding="utf-8")):
                assert "--config_file" not in command or "--num_processes" in command, f"{path.name}: {command}"
