"""The examples for many nodes, dry: what starts ``seqtile train`` is a stand-in, and so is ``seqtile`` itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from seqtile.train.nodes import Nodes, find_nodes
from seqtile.train.recipe import RECIPE_FILE, build_recipe, read_recipe, resolve

FOLDER = Path(__file__).parents[2] / "examples" / "many-nodes"

SEQTILE = """#!{python}
import json, os, sys
from pathlib import Path
name = os.environ.get("SLURM_NODEID", "") + "-" + str(os.getpid())
keep = {{key: value for key, value in os.environ.items() if key.startswith(("SLURM_", "MASTER_", "RANK"))}}
Path("{log}", name).write_text(json.dumps([sys.argv[1:], keep]))
"""

SRUN = """#!/bin/sh
# Started in a job of two nodes: one task on each, with the variables that srun sets.
case "$1" in --kill-on-bad-exit=1) shift ;; *) exit 9 ;; esac
for node in 0 1; do
    SLURM_JOB_ID=4711 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_NODEID=$node \\
        SLURM_STEP_NODELIST='gpu[07,09]' "$@" || exit
done
"""

SSH = """#!/bin/sh
shift
exec sh -c "$1"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each call of ``seqtile`` leaves its words and environment."""
    log, programs = tmp_path / "calls", tmp_path / "bin"
    log.mkdir()
    programs.mkdir()
    stand_ins = {"seqtile": SEQTILE.format(python=sys.executable, log=log), "srun": SRUN, "ssh": SSH}
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PET_"))]:
        monkeypatch.delenv(name)
    return log


def started(calls: Path) -> list[tuple[Nodes | None, list[str]]]:
    """The nodes that each started command would find, and its other words."""
    found = []
    for path in calls.iterdir():
        words, environment = json.loads(path.read_text())
        flags = dict(zip(words[1::2], words[2::2], strict=True))
        count, rank = (None if name not in flags else int(flags.pop(name)) for name in ("--nodes", "--node-rank"))
        nodes = find_nodes(count, rank, flags.pop("--rendezvous", None), environment)
        found.append((nodes, [words[0], *(word for pair in flags.items() for word in pair)]))
    return sorted(found, key=lambda one: one[0].rank if one[0] else -1)


def test_the_slurm_script_starts_one_command_on_each_node(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(FOLDER))
    monkeypatch.chdir(calls.parent)
    subprocess.run(["bash", str(FOLDER / "train.sbatch"), "--steps", "5"], check=True, timeout=60)
    words = ["train", "--recipe", str(FOLDER / "ring.yaml"), "--output", "runs/ring-1m", "--steps", "5"]
    assert started(calls) == [(Nodes(2, rank, "gpu07:24711"), words) for rank in range(2)]
    assert "#SBATCH --ntasks-per-node=1" in (FOLDER / "train.sbatch").read_text()
    assert read_recipe(FOLDER / "ring.yaml")["output"] == "runs/ring-1m"


def test_the_slurm_script_goes_on_where_the_run_was_begun(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after Slurm has requeued it; test_reliability.py has what --resume does before the first checkpoint."""
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(FOLDER))
    monkeypatch.setenv("OUTPUT", str(tmp_path / "a run"))
    words = ["bash", str(FOLDER / "train.sbatch")]
    for begun in (False, True):
        subprocess.run(words, check=True, timeout=60)
        for path in calls.iterdir():
            assert ("--resume" in json.loads(path.read_text())[0]) == begun
            path.unlink()
        (tmp_path / "a run").mkdir(exist_ok=True)
        (tmp_path / "a run" / RECIPE_FILE).touch()


def test_the_ssh_script_starts_the_same_command_on_each_host(calls: Path) -> None:
    subprocess.run(["sh", str(FOLDER / "ssh.sh"), "one two three", "--recipe", "r.yaml"], check=True, timeout=60)
    assert started(calls) == [(Nodes(3, rank, "one:29500"), ["train", "--recipe", "r.yaml"]) for rank in range(3)]


def test_the_ssh_script_fails_where_a_node_does(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\n[ $1 = one ]\n")
    assert subprocess.run(["sh", str(FOLDER / "ssh.sh"), "one two"], check=False, timeout=60).returncode == 1


def test_skypilots_task_starts_it_with_its_variables(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    monkeypatch.setenv("SKYPILOT_NUM_NODES", str(task["num_nodes"]))
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.5\n10.0.0.6")
    for rank in range(2):
        monkeypatch.setenv("SKYPILOT_NODE_RANK", str(rank))
        subprocess.run(["sh", "-c", task["run"]], check=True, timeout=60)
    assert started(calls) == [(Nodes(2, rank, "10.0.0.5:29500"), ["train", "--recipe", "ring.yaml"]) for rank in (0, 1)]


def test_ray_train_starts_it_once_on_each_worker(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is a stand-in: its workers run one after the other, with the variables that its Torch backend sets."""

    class Trainer:
        def __init__(self, loop: Any, train_loop_config: Any, scaling_config: Any) -> None:
            self.loop, self.config, self.scaling = loop, train_loop_config, scaling_config

        def fit(self) -> None:
            for rank in range(self.scaling.num_workers):
                self.scaling.context = types.SimpleNamespace(
                    get_world_size=lambda: self.scaling.num_workers, get_world_rank=lambda rank=rank: rank
                )
                ray.train.get_context = lambda: self.scaling.context  # type: ignore[attr-defined]
                monkeypatch.setenv("RANK", str(rank))
                self.loop(self.config)

    ray, train, torch = (types.ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    ray.train, train.ScalingConfig, torch.TorchTrainer = train, types.SimpleNamespace, Trainer  # type: ignore[attr-defined]
    for module in (ray, train, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "4000")
    spec = importlib.util.spec_from_file_location("ray_train", FOLDER / "ray_train.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["2", "--recipe", "ring.yaml"])
    assert started(calls) == [(Nodes(2, rank, "10.0.0.7:4001"), ["train", "--recipe", "ring.yaml"]) for rank in (0, 1)]
    assert all("RANK" not in json.loads(path.read_text())[1] for path in calls.iterdir())


def test_the_recipe_is_one_and_the_plan_that_it_names() -> None:
    recipe = resolve(build_recipe(read_recipe(FOLDER / "ring.yaml"), {})[0])
    assert (recipe.engine, recipe.nproc, recipe.cp_size) == ("fsdp2", 16, 16)
    planned = re.search(r"^# Planned with: seqtile plan (.*)$", (FOLDER / "ring.yaml").read_text(), re.M)
    assert planned is not None
    flags = dict(re.findall(r"--([a-z-]+) (\S+)", planned[1]))
    assert (flags["gpus"], flags["cp-size"], flags["max-length"]) == ("16", "16", str(recipe.max_length))
