"""Real ``axolotl train`` runs with the plugin, in axolotl's own environment (``make test-frameworks``)."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import axolotl_standin as standin
import tiny_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLUGIN = "seqtile.integrations.axolotl.SeqtilePlugin"
STEPS = 4
TOKENS = 384  # of a step in one process: two rows, padded to 192 tokens

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(1800),  # DeepSpeed compiles on first use
    pytest.mark.skipif(
        "SEQTILE_AXOLOTL" not in os.environ,
        reason="SEQTILE_AXOLOTL is not set: the path of an environment with axolotl (make test-frameworks sets it)",
    ),
]

# Micro batch 2, and rows of different lengths in it.
BASE = {
    "val_set_size": 0, "sequence_len": 256, "micro_batch_size": 2, "gradient_accumulation_steps": 1,
    "max_steps": STEPS, "num_epochs": 1, "learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "constant",
    "bf16": False, "fp16": False, "tf32": False, "attn_implementation": "sdpa", "gradient_checkpointing": True,
    "logging_steps": 1, "save_steps": STEPS, "seed": 0, "plugins": ["on_cpu.OnCpu"],
    "max_memory": {"cpu": "20GiB"},  # for two processes: else axolotl asks for an accelerator
}  # fmt: skip
OURS = {"plugins": ["on_cpu.OnCpu", PLUGIN], "tiled_mlp": True, "tiled_mlp_num_shards": 4}
OWN = {"tiled_mlp": True, "tiled_mlp_num_shards": 4}
REST = {"seqtile": {"loss": "tiled", "loss_tile": 32, "offload": True}}  # as in the examples
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_mlp_kernel": False,
        "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False}  # fmt: skip
KERNELS = {**LORA, "lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}  # as with LoRA on a GPU
LIGER = {"plugins": ["on_cpu.OnCpu", "axolotl.integrations.liger.LigerPlugin", PLUGIN], "liger_glu_activation": True}
TRUSTED = {"seqtile": {"trust": "*.mlp"}}
PACKED = {"sample_packing": True, "micro_batch_size": 1}  # as in the examples


def example(name: str, **of_fsdp: Any) -> dict[str, Any]:
    """The file of ``examples/axolotl``, with what a CPU and a tiny model cannot do left out."""
    keys = yaml.safe_load((ROOT / "examples" / "axolotl" / f"llama3-8b-{name}.yaml").read_text(encoding="utf-8"))
    for key in ("special_tokens", "warmup_steps", "saves_per_epoch", "min_sample_len"):  # no such token; for long runs
        keys.pop(key, None)
    if "deepspeed" in keys:
        keys["deepspeed"] = str(ROOT / keys["deepspeed"])
    if of_fsdp:
        keys["fsdp_config"] |= of_fsdp
    settings = {**keys["seqtile"], "tile": "shards:4", "loss_tile": 32}  # auto would leave such rows whole
    return {**keys, **BASE, **PACKED, "plugins": ["on_cpu.OnCpu", *keys["plugins"]], "seqtile": settings,
            "context_parallel_size": 1}  # fmt: skip


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "one process, seqtile": (1, {**OURS, **REST}),
    "one process, axolotl's own": (1, OWN),
    "LoRA": (1, LORA),
    "LoRA, seqtile": (1, {**LORA, **OURS}),
    "LoRA in Triton's kernels, seqtile": (1, {**KERNELS, **OURS}),
    "LoRA in Triton's kernels, seqtile, trusted": (1, {**KERNELS, **OURS, **TRUSTED}),
    "Liger's GLU, seqtile, trusted": (1, {**OURS, **LIGER, **TRUSTED}),
    "DDP": (2, PACKED),
    "DDP, seqtile": (2, {**PACKED, **OURS, **REST}),
    "DDP, axolotl's own": (2, {**PACKED, **OWN}),
    "ZeRO-3, seqtile": (2, example("zero3")),
    "FSDP2, seqtile": (2, example("fsdp2")),
    "FSDP2, seqtile, one process loads": (2, example("fsdp2", cpu_ram_efficient_loading=True)),
}
"""What is run: processes and keys."""


@dataclass
class Run:
    code: int
    log: str
    record: list[dict[str, Any]]
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each step, from the trainer's state."""
    history: list[dict[str, Any]]

    def kernel_tokens(self) -> set[int]:
        """How many tokens axolotl's kernel of the MLP had in a call, by ``on_cpu.py``."""
        said = [line for line in self.log.splitlines() if line.startswith("swiglu kernel on the CPU: ")]
        return {int(line.split()[-1]) for line in said}

    def said(self) -> str:
        """The plugin's line in axolotl's log."""
        return next((line.split("] ")[-1] for line in self.log.splitlines() if "[axolotl.seqtile]" in line), "")


class Axolotl:
    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Path(os.environ["SEQTILE_AXOLOTL"])
        self.model = tiny_run.save_model(folder / "model", max_position_embeddings=1024)
        rows = [{"text": " ".join(tiny_run.SENTENCES[(7 * row + k) % 27] for k in range(3 + row % 5))}
                for row in range(60)]  # fmt: skip
        self.data = tiny_run.write_jsonl(folder / "data.jsonl", rows)
        self.done: dict[str, Run] = {}
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(self.home / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)]),
            "ACCELERATE_USE_CPU": "true",
            "TRITON_INTERPRET": "1",  # axolotl's and Liger's kernels themselves, on a CPU
            "AXOLOTL_DO_NOT_TRACK": "1",
            "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions_axolotl"),
        }

    @cached_property
    def finds_plugins(self) -> bool:
        """Whether it finds seqtile's plugin by its entry point, as from 0.21 on: its own tiled MLP never runs there."""
        code = "import axolotl; print(axolotl.__version__)"
        version = subprocess.check_output([str(self.home / "bin" / "python"), "-c", code], text=True).split()[-1]
        return tuple(map(int, version.split(".")[:2])) >= (0, 21)

    def write(self, name: str, keys: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.yaml".replace(" ", "-")
        common = {"base_model": str(self.model), "dataset_prepared_path": str(self.folder / "prepared"),
                  "datasets": [{"path": str(self.data), "ds_type": "json", "type": "completion"}],
                  "output_dir": str(path.with_suffix(""))}  # fmt: skip
        path.write_text(yaml.safe_dump({**BASE, **keys, **common}), encoding="utf-8")
        return path

    def run(self, name: str) -> Run:
        if name not in self.done:
            self.done[name] = self.train(name, *RUNS[name])
        return self.done[name]

    def train(self, name: str, processes: int, keys: dict[str, Any]) -> Run:
        path = self.write(name, keys)
        launcher = ["python"] if processes == 1 else ["torchrun", "--", "--nproc_per_node", str(processes)]
        done = subprocess.run(
            [str(self.home / "bin" / "axolotl"), "train", str(path), "--launcher", *launcher],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        output = path.with_suffix("")
        states = list(output.glob("checkpoint-*/trainer_state.json"))
        history = json.loads(states[0].read_text())["log_history"] if states else []
        record = output / "record.jsonl"
        return Run(
            done.returncode,
            done.stdout + done.stderr,
            [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else [],
            [(row["loss"], row["grad_norm"]) for row in history if "loss" in row],
            history,
        )

    def facts(self, *files: Path) -> dict[str, Any]:
        done = subprocess.run(
            [str(self.home / "bin" / "python"), str(HERE / "axolotl_facts.py"), str(self.model),
             str(self.folder / "facts"), *map(str, files)],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        assert lines, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(lines[0].removeprefix("FACTS "))


@pytest.fixture(scope="module")
def axolotl(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Axolotl]:
    """Runs once each; prints their losses at the end."""
    one = Axolotl(tmp_path_factory.mktemp("axolotl"))
    yield one
    rows = []
    for name, run in one.done.items():
        columns = [" ".join(f"{value:.6f}" for value in column) for column in zip(*run.steps, strict=True)]
        rows.append(f"| {name} | {' | '.join(columns or [f'failed ({run.code})', ''])} |")
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("", *rows, sep="\n")


def same(ours: Run, untiled: Run) -> None:
    """Loss and gradient norm of every step. In fp32 four steps of Adam carry a last-bit difference to about 1e-6."""
    for run in (ours, untiled):
        assert run.code == 0, run.log[-6000:]
    assert len(ours.steps) == len(untiled.steps) == STEPS
    torch.testing.assert_close(torch.tensor(ours.steps), torch.tensor(untiled.steps), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "untiled", "engine", "processes"),
    [
        ("one process, seqtile", "one process", "NO", 1),
        ("LoRA, seqtile", "LoRA", "NO", 1),
        ("DDP, seqtile", "DDP", "MULTI_CPU", 2),
        ("ZeRO-3, seqtile", "DDP", "DEEPSPEED", 2),
        ("FSDP2, seqtile", "DDP", "FSDP", 2),
        ("FSDP2, seqtile, one process loads", "DDP", "FSDP", 2),
    ],
)
def test_same_losses(axolotl: Axolotl, name: str, untiled: str, engine: str, processes: int) -> None:
    run = axolotl.run(name)
    same(run, axolotl.run(untiled))
    assert "tiled 2 of 2 MLPs (LlamaMLP), 4 tiles, fused" in run.said()
    assert run.history[0]["seqtile"].startswith("tiled 2 of 2 MLPs")
    assert run.history[0]["seqtile/peak_resident_gib"] > 0
    assert (run.record[-1]["engine"], run.record[-1]["processes"]) == (engine, processes)
    assert not any(row["patched"] for row in run.record), "axolotl's own tiled MLP ran too"


def test_lora_in_tritons_kernels_is_left_untiled(axolotl: Axolotl) -> None:
    """The kernels run, in Triton's interpreter; the log says that nothing is tiled, why, and what to do."""
    run = axolotl.run("LoRA in Triton's kernels, seqtile")
    same(run, axolotl.run("LoRA"))
    assert run.kernel_tokens() == {TOKENS}
    assert "seqtile left base_model.model.model.layers.1.mlp (LlamaMLP) untiled: cannot be traced:" in run.log
    assert "which axolotl enables by default with LoRA" in run.log


@pytest.mark.parametrize(
    ("name", "untiled", "block"),
    [
        ("LoRA in Triton's kernels, seqtile, trusted", "LoRA", "LlamaMLP"),
        ("Liger's GLU, seqtile, trusted", "one process", "LigerSwiGLUMLP"),
    ],
)
def test_trusted_kernels_are_tiled(axolotl: Axolotl, name: str, untiled: str, block: str) -> None:
    """Nothing can be proven of a kernel; with ``trust`` the block's own forward, kernel included, runs in tiles."""
    run = axolotl.run(name)
    same(run, axolotl.run(untiled))
    assert f"tiled 2 of 2 MLPs ({block}), 4 tiles" in run.said()
    if "LoRA" in name:
        assert run.kernel_tokens() == {TOKENS // 4}


def test_axolotls_own_is_wrong_where_these_runs_are_right(axolotl: Axolotl) -> None:
    """So the runs above would show a tiled MLP that is wrong at micro batch 2, or breaks DDP."""
    own = axolotl.run("one process, axolotl's own")
    if axolotl.finds_plugins:
        same(own, axolotl.run("one process"))
        assert "tiled 2 of 2 MLPs (LlamaMLP), 4 tiles, fused" in own.said() and not own.record[-1]["patched"]
        return
    assert own.code == 0 and own.record[-1]["patched"]
    with pytest.raises(AssertionError):
        same(own, axolotl.run("one process"))
    crashed = axolotl.run("DDP, axolotl's own")
    assert crashed.code != 0 and "Expected to mark a variable ready only once" in crashed.log


def test_hooks_come_in_the_stand_ins_order(axolotl: Axolotl) -> None:
    ours, own = axolotl.run("LoRA, seqtile"), axolotl.run("one process, axolotl's own")
    assert [row["hook"] for row in ours.record] == [
        *(hook for hook in standin.LOADING if hook != "patch_tiled_mlp"),
        "post_trainer_create",
    ]
    # Between pre_model_load and post_model_build.
    assert [row["patched"] for row in own.record][:2] == [False, not axolotl.finds_plugins]
    # The recorder comes before the plugin: it sees the key before it is taken out, and not before it is put back.
    assert [row["tiled_mlp"] for row in ours.record] == [True, None, None, None, None, True]
    assert not any(row["wrapped"] for row in ours.record)  # tiled before the engine wraps the model


def test_a_conflict_stops_the_run_before_the_model(axolotl: Axolotl) -> None:
    run = axolotl.train("refused", 1, {**OURS, **REST, "chunked_cross_entropy": True})
    assert run.code != 0 and not run.record
    assert "chunked_cross_entropy both compute the loss" in run.log


@pytest.fixture(scope="module")
def facts(axolotl: Axolotl) -> dict[str, Any]:
    liger = {**OURS, "plugins": ["axolotl.integrations.liger.LigerPlugin", PLUGIN], "liger_glu_activation": True}
    degree = {**OURS, "attn_implementation": "flash_attention_2", "sequence_parallel_degree": 4}
    replaced = {"tiled_mlp_use_original_mlp": False}
    return axolotl.facts(
        ROOT / "examples" / "axolotl" / "llama3-8b-zero3.yaml",
        ROOT / "examples" / "axolotl" / "llama3-8b-fsdp2.yaml",
        axolotl.write("liger", liger),
        axolotl.write("degree", degree),
        axolotl.write("liger-replaced", {**liger, **replaced}),
        axolotl.write("kernel-replaced", {**LORA, **OURS, **replaced, "lora_mlp_kernel": True}),
    )


def test_examples_pass_axolotls_validation(facts: dict[str, Any]) -> None:
    verdicts = {Path(path).stem: verdict for path, verdict in facts["verdicts"].items()}
    assert verdicts["llama3-8b-zero3"] == verdicts["llama3-8b-fsdp2"] == ""
    assert verdicts["liger"] == verdicts["degree"] == ""
    assert "tiled_mlp_use_original_mlp: true" in verdicts["liger-replaced"]  # Liger's plugin refuses it itself
    assert "and lora_mlp_kernel both replace the MLP" in verdicts["kernel-replaced"]


def test_stand_ins_are_like_axolotl(facts: dict[str, Any]) -> None:
    hooks = {name: list(inspect.signature(value).parameters) for name, value in vars(standin.BasePlugin).items()
             if inspect.isfunction(value) and not name.startswith("_")}  # fmt: skip
    assert facts["hooks"].items() >= hooks.items()  # axolotl 0.21 has more
    fields = {name: repr(field.default) for name, field in standin.AxolotlInputConfig.model_fields.items()}
    assert {name: facts["fields"].get(name) for name in fields} == fields
    assert set(standin.OtherPluginsArgs.model_fields) <= set(facts["other_fields"])
