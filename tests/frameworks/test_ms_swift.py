"""Real ``swift sft`` runs with the plugin, in ms-swift's own environment (``make test-frameworks``)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swift_stand_in
import tiny_run
from seqtile.integrations.ms_swift import PLUGIN

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "ms-swift"
STEPS = 3

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(1200),  # two runs, and DeepSpeed compiles operators the first time
    pytest.mark.skipif(
        "SEQTILE_MS_SWIFT" not in os.environ,
        reason="SEQTILE_MS_SWIFT is not set: the path of an environment with ms-swift (make test-frameworks sets it)",
    ),
]

# Plain gradient descent: Adam would blow up a last-bit difference in a gradient that is nearly zero.
BASE = f"""--model_type llama --template chatml --torch_dtype float32 --fp16 false --bf16 false --attn_impl sdpa
    --max_length 1024 --max_steps {STEPS} --split_dataset_ratio 0 --report_to none --check_model false
    --save_strategy no --logging_steps 1 --per_device_train_batch_size 2 --optim sgd --learning_rate 0.1
    --lr_scheduler_type constant --dataloader_num_workers 0 --use_cpu true --add_version false --seed 1
    --callbacks keep_weights""".split()
ON = ["--use_tiled_mlp", "true", "--tiled_mlp_num_shards", "4"]
FULL, LORA = ["--tuner_type", "full"], ["--tuner_type", "lora", "--target_modules", "all-linear", "--lora_dropout", "0"]

PACKING = [*FULL, "--packing", "true", "--attn_impl", "flash_attention_2", "--per_device_train_batch_size", "1"]
IMAGES = [
    *FULL,
    "--model",
    "LLAVA",
    "--model_type",
    "llava1_5_hf",
    "--template",
    "llava1_5_hf",
    "--dataset",
    "PICTURES",
]

# Name: processes, flags (the first may be a script of examples/ms-swift), environment. Two processes with one
# micro-batch each see what one process sees with two.
RUNS: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "one process": (1, FULL, {}),
    "one process, seqtile": (1, [*FULL, *ON], {}),
    "one process, seqtile, SEQTILE_TILE=16": (1, FULL, {"SEQTILE_TILE": "16"}),
    "one process, seqtile, --seqtile": (1, [*FULL, "--seqtile", '{"tile": 16, "keep": 0.5, "only": ["*.0.mlp"]}'], {}),
    "LoRA": (1, LORA, {}),
    "LoRA, seqtile": (1, ["one-device.sh", *LORA], {}),
    "packing": (1, PACKING, {}),
    "packing, seqtile": (1, [*PACKING, *ON], {}),
    "images": (1, IMAGES, {}),
    "images, seqtile": (1, [*IMAGES, *ON], {}),
    "DDP": (2, FULL, {}),
    "DDP, seqtile": (2, [*FULL, *ON], {}),
    "FSDP1, seqtile": (2, [*FULL, *ON, "--fsdp", "FSDP1"], {}),
    "FSDP2, seqtile": (2, ["fsdp2.sh"], {}),
    "ZeRO-2, seqtile": (2, [*FULL, *ON, "--deepspeed", "zero2"], {}),
    "ZeRO-3, seqtile": (2, ["deepspeed.sh"], {}),
}


@dataclasses.dataclass
class Run:
    code: int
    log: str
    kept: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.kept["history"] if "loss" in row]


class Swift:
    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Path(os.environ["SEQTILE_MS_SWIFT"])
        self.model = tiny_run.save_model(folder / "model", max_position_embeddings=4096)
        chats = [{"messages": [{"role": "user", "content": f"say {number}"}, {"role": "assistant", **row}]}
                 for number, row in enumerate({"content": row["text"]} for row in tiny_run.text_rows(16))]  # fmt: skip
        self.data = tiny_run.write_jsonl(folder / "chat.jsonl", chats)
        fsdp1 = json.loads((EXAMPLES / "fsdp2.json").read_text())
        fsdp1["fsdp_config"].update(fsdp_version=1, reshard_after_forward="FULL_SHARD", use_orig_params=True)
        # Both send weights from the first process to the others through an accelerator.
        fsdp1["fsdp_config"].update(cpu_ram_efficient_loading=False, sync_module_states=False)
        (folder / "fsdp1.json").write_text(json.dumps(fsdp1))
        tiny_run.save_llava(folder / "llava")
        pictures = [tiny_run.save_picture(folder / f"{number}.png", number) for number in range(4)]
        looks = [{"messages": [{"role": "user", "content": f"<image>what is {number}?"}, chat["messages"][1]],
                  "images": [str(pictures[number % 4])]} for number, chat in enumerate(chats)]  # fmt: skip
        tiny_run.write_jsonl(folder / "pictures.jsonl", looks)
        self.done: dict[str, Run] = {}
        self.environment = {
            "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions_ms_swift"),
            **os.environ,
            "PATH": os.pathsep.join([str(self.home / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
            "MODELSCOPE_CACHE": str(folder / "cache"),
        }

    def run(self, name: str) -> Run:
        if name not in self.done:
            self.done[name] = self.train(name, *RUNS[name])
        return self.done[name]

    def train(self, name: str, processes: int, flags: list[str], environment: dict[str, str]) -> Run:
        output = self.folder / name.replace(" ", "-")
        places = {"FSDP1": "fsdp1.json", "LLAVA": "llava", "PICTURES": "pictures.jsonl"}
        flags = [str(self.folder / places[flag]) if flag in places else flag for flag in flags]
        if flags[0].endswith(".sh"):
            command = [str(EXAMPLES / flags.pop(0))]
        else:
            command = [str(self.home / "bin" / "swift"), "sft", "--model", str(self.model), "--dataset", str(self.data)]
            command += ["--external_plugins", str(PLUGIN)] if "seqtile" in name else []
        mine = ["--custom_register_path", str(HERE / "swift_on_cpu.py"), "--output_dir", str(output),
                "--gradient_accumulation_steps", str(2 // processes)]  # fmt: skip
        given = {"MODEL": str(self.model), "DATASET": str(self.data), **environment}
        if processes > 1:
            given["NPROC_PER_NODE"] = str(processes)
        done = subprocess.run(
            [*command, *mine, *BASE, *flags], cwd=self.folder, capture_output=True, text=True, timeout=500,
            env={**self.environment, **given},
        )  # fmt: skip
        kept = output / "kept.pt"
        return Run(done.returncode, done.stdout + done.stderr, torch.load(kept) if kept.exists() else {})

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        done = subprocess.run(
            [str(self.home / "bin" / "python"), str(HERE / "swift_facts.py")], cwd=self.folder, capture_output=True,
            text=True, timeout=200, env=self.environment,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        assert lines, done.stderr[-3000:]
        return json.loads(lines[0].removeprefix("FACTS "))


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Swift]:
    """Runs once each; prints their losses at the end."""
    one = Swift(tmp_path_factory.mktemp("swift"))
    yield one
    rows = [
        f"| {name} | " + (" ".join(f"{loss:.6f}" for loss in run.losses) if run.kept else f"failed ({run.code})") + " |"
        for name, run in one.done.items()
    ]
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\nms-swift {one.facts['version']}", *rows, sep="\n")


def same(ours: Run, untiled: Run) -> None:
    """The same losses and, after the last step, the same weights, to fp32's default tolerances."""
    for run in (ours, untiled):
        assert run.code == 0 and len(run.losses) == STEPS, run.log[-6000:]
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(untiled.losses))
    assert ours.kept["weights"].keys() == untiled.kept["weights"].keys()
    for name, weight in untiled.kept["weights"].items():
        torch.testing.assert_close(ours.kept["weights"][name], weight, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "untiled", "engine", "processes"),
    [
        ("one process, seqtile", "one process", "NO", 1),
        ("LoRA, seqtile", "LoRA", "NO", 1),
        ("packing, seqtile", "packing", "NO", 1),
        ("images, seqtile", "images", "NO", 1),
        ("DDP, seqtile", "DDP", "MULTI_CPU", 2),
        ("FSDP1, seqtile", "one process", "FSDP1", 2),
        ("FSDP2, seqtile", "one process", "FSDP2", 2),
        ("ZeRO-2, seqtile", "one process", "DEEPSPEED2", 2),
        ("ZeRO-3, seqtile", "one process", "DEEPSPEED3", 2),
    ],
)
def test_same_losses_and_weights(swift: Swift, name: str, untiled: str, engine: str, processes: int) -> None:
    run = swift.run(name)
    same(run, swift.run(untiled))
    assert (run.kept["engine"], run.kept["processes"]) == (engine, processes)
    # ms-swift puts a forward of its own on every adapter, which the fused operator does not look through.
    path = "generic" if "LoRA" in name else "fused"
    assert run.kept["history"][0]["seqtile"].startswith(f"tiled 2 of 2 MLPs (LlamaMLP), 4 tiles, {path}")


def test_the_variable_switches_on_without_the_flags(swift: Swift) -> None:
    run = swift.run("one process, seqtile, SEQTILE_TILE=16")
    same(run, swift.run("one process"))
    assert "16 tokens per tile" in run.kept["history"][0]["seqtile"]


def test_arguments_of_apply_as_json(swift: Swift) -> None:
    run = swift.run("one process, seqtile, --seqtile")
    same(run, swift.run("one process"))
    assert run.kept["history"][0]["seqtile"].startswith(
        "tiled 1 of 2 MLPs (LlamaMLP), 16 tokens per tile, fused; gate and up kept: 0.5"
    )


def test_training_moves_the_weights(swift: Swift) -> None:
    """So the comparisons above would show a gradient that is missing."""
    start = tiny_run.load_weights(swift.model)
    for name, weight in swift.run("one process").kept["weights"].items():
        if ".mlp." in name:
            assert (weight - start[name]).abs().max() > 1e-4, name


def test_without_the_plugin_the_flags_are_unknown(swift: Swift) -> None:
    """Where this fails, ms-swift has flags of its own: read them in the release, and test that only ours run."""
    run = swift.train("own flags", 1, [*FULL, *ON], {})
    assert run.code != 0 and "remaining_argv: ['--use_tiled_mlp', 'true'" in run.log


def test_the_stand_in_is_like_the_real_one(swift: Swift) -> None:
    facts = swift.facts
    stand_ins = (swift_stand_in.BaseArguments, swift_stand_in.SftArguments, swift_stand_in.InferArguments)
    for kind in stand_ins:
        own = {f.name: str(f.default_factory) for f in dataclasses.fields(kind) if f.name != "seed"}
        assert facts["fields"][kind.__name__] == own
    importer = inspect.signature(swift_stand_in.BaseArguments._import_external_plugins)
    assert facts["imports_plugins"] == list(importer.parameters)
    assert facts["is_first"] and facts["parser"] and facts["rest"] and facts["looks_them_up"]
    assert (facts["callbacks"], facts["makes_callbacks"]) == ("dict", ["self", "args", "trainer"])
