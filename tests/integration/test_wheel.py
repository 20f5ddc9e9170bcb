"""The wheel, installed into an empty environment, answers, tiles and trains."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import seqtile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "seqtile"

Run = Callable[..., subprocess.CompletedProcess[str]]


def checked(command: Sequence[str], environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=cwd)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, installer_environment: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    checked(command, installer_environment, folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory, installer_environment: dict[str, str]) -> Run:
    """Runs a program of an environment that holds nothing but the wheel and what it asks for.

    pip installs the dependencies, at the pinned versions, from wherever the tests' own environment was installed
    from. Everything after that runs like any test: without a network, in an empty folder.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = shlex.split(os.environ.get("TORCH", "-r constraints/torch.txt"))  # which build: as in the Makefile
    checked([*pip, *torch], installer_environment, ROOT)
    pinned = ["--constraint", str(ROOT / "constraints" / "highest.txt")]
    checked([*pip, *pinned, f"{wheel}[train]"], installer_environment, folder)
    here = tmp_path_factory.mktemp("elsewhere")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return checked([str(programs / name), *arguments], environment, here)

    return program


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if not name.startswith(f"seqtile-{seqtile.__version__}.dist-info/")}
    files = (file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert package == {f"seqtile/{file.relative_to(SOURCE).as_posix()}" for file in files}
    assert {"seqtile/py.typed"} <= package
    assert "seqtile/integrations/plugins/seqtile_plugin.py" in package
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_package_is_the_wheels(run: Run) -> None:
    code = "import seqtile; print(seqtile.__version__, seqtile.__file__)"
    version, file = run("python", "-c", code).stdout.split()
    assert version == seqtile.__version__
    assert "site-packages" in Path(file).parts


def test_the_command_answers(run: Run) -> None:
    assert "train" in run("seqtile", "--help").stdout


APPLY = """
import torch, seqtile
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, vocab_size=64))
ids = torch.randint(64, (2, 13))

def gradients():
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]

untiled = gradients()
report = seqtile.apply(model, tile=4)
torch.testing.assert_close(gradients(), untiled)
print(report)
"""


def test_apply_tiles_a_model(run: Run) -> None:
    assert run("python", "-c", APPLY).stdout.startswith("tiled 2 of 2 MLPs (LlamaMLP), 4 tokens per tile")


def test_the_readmes_commands_answer(run: Run) -> None:
    assert "Longest sequence" in run("seqtile", "plan", "--model", "llama-8b", "--device", "h100", "--qlora").stdout
    config = str(ROOT / "benchmarks" / "data" / "tiny-llama" / "config.json")
    assert "same gradients" in run("seqtile", "verify", "--model", config).stdout


def test_train_trains_and_saves_a_model(run: Run, tmp_path: Path) -> None:
    """The embedded default, made short."""
    output = tmp_path / "run"
    run("seqtile", "train", "--steps", "2", "--max-length", "256", "--output", str(output))
    load = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print('loaded')"
    assert run("python", "-c", load, str(output)).stdout.endswith("loaded\n")
