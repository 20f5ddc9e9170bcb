"""How long ``seqtile plan`` takes for a model of 8B: ``python benchmarks/plan_seconds.py [--write PAGE.md]``.

Processor time, user and system together, in a process of its own, the least of some repeats: until the answer is there
(whether the length fits, the longest that does and what limits it), and of the whole command, which then looks for what
would buy length. Python keeps its bytecode meanwhile, as for an installed package.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pages import write_between
from seqtile.devices import package_version

QUESTIONS = (
    "--model llama-8b --device h100",
    "--model llama-8b --device h100 --gpus 8 --engine zero3",
    "--model llama-8b --device h100 --gpus 8 --engine zero3 --max-length 4000000",
    "--model llama-8b --device h100 --gpus 8 --engine fsdp2 --grad-accumulation 2",
    "--model llama-8b --device h100 --lora r=16 --max-length 131072",
    "--model llama-8b --device h100 --lora r=16 --max-length 1000000",
    "--model llama-8b --device h100 --lora r=16",
    "--model llama-8b --device h100 --lora r=16 --offload checkpoints",
    "--model llama-8b --device h100 --lora r=16 --offload checkpoints --max-length 400000",
    "--model llama-8b --device h100 --lora r=16 --offload checkpoints --max-length 1000000",
    "--model llama-8b --device h100 --gpus 8 --engine fsdp2 --keep 0.5",
    "--model llama-8b --device h100 --lora r=16 --attention eager",
    "--model llama-8b --device h100 --lora r=16 --checkpoint none",
    "--model llama-8b --device h100 --lora r=16 --liger",
    "--model llama-8b --device h100 --lora r=16 --loss grpo",
    "--model qwen3-8b --device a100-80 --qlora",
    "--model qwen3-8b --device h100 --gpus 8 --engine zero3 --offload checkpoints,optimizer --host-memory 1TiB",
)
"""Lengths that are asked for and those that are looked for, some of which fit."""

BEGIN, END = "<!-- plan seconds -->", "<!-- end of plan seconds -->"


def seconds_of(question: str) -> tuple[float, float, int]:
    """Processor seconds of one plan until its answer and in all, and its exit code."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answered = 0.0
    with subprocess.Popen(
        [Path(sys.executable).with_name("seqtile"), "plan", *question.split()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**kept, "HF_HUB_OFFLINE": "1"}, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Longest sequence"):
                spent = psutil.Process(process.pid).cpu_times()
                answered = spent.user + spent.system
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answered or whole, whole, process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a page with the two marks")
    given = parser.parse_args()
    lines = ["| `seqtile plan` | exit code | seconds to the answer | in all |", "|---|---|---|---|"]
    for question in QUESTIONS:
        runs = [seconds_of(question) for _ in range(given.repeats)]
        answered, whole = (min(column) for column in list(zip(*runs, strict=True))[:2])
        lines.append(f"| `{question}` | {runs[0][2]} | {answered:.1f} | {whole:.1f} |")
        print(lines[-1], flush=True)
    versions = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers", "peft"))
    lines += ["", f"{datetime.now(UTC).date()}, {platform.machine()}, Python {platform.python_version()}, {versions}."]
    print(lines[-1])
    if given.write:
        write_between(given.write, BEGIN, END, lines)


if __name__ == "__main__":
    main()
