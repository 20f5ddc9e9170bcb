"""How long ``seqtile plan`` takes for a model of 8B: ``python benchmarks/plan_seconds.py``.

Processor time, user and system together, in a process of its own, the least of some repeats: until the answer is there
(whether the length fits, the longest that does and what limits it), by the process's own clock, and of the whole
command, which then looks for what would buy length. Python keeps its bytecode meanwhile, as for an installed package.

Beside the questions of a list, some are drawn at random from the command's flags, once each; those that the command
refuses are drawn again.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import subprocess
import sys
from datetime import UTC, datetime

from seqtile.devices import package_version

QUESTIONS = (
    "--model llama-8b --device h100",
    "--model llama-8b --device h100 --gpus 8 --engine zero3",
    "--model llama-8b --device h100 --gpus 8 --engine zero3 --max-length 4000000",
    "--model llama-8b --device h100 --gpus 8 --engine fsdp2 --gradient-accumulation 2",
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

COMMAND = """
import sys, time
from seqtile.cli import console

class Noting:
    def __init__(self, out): self.out = out
    def __getattr__(self, name): return getattr(self.out, name)
    def write(self, text):
        if "Longest sequence" in text:
            print("answered", time.process_time(), file=sys.stderr)
        return self.out.write(text)

sys.stdout = Noting(sys.stdout)
sys.argv[0] = "seqtile"
console()
"""
"""The command as it is installed, with a note of when the answer is printed."""

FLAGS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.5, ("--lora 16", "--qlora", "--lora r=16,target_modules=q_proj+v_proj", "--lora r=16,dropout=0.05")),
    (0.5, tuple(f"--max-length {length}" for length in (8192, 32768, 131072, 400000, 1000000))),
    (0.4, ("--offload checkpoints", "--offload optimizer", "--offload checkpoints,weights --host-memory 512GiB",
           "--offload checkpoints,optimizer --host-memory 1TiB")),
    (0.2, ("--attention sdpa", "--attention eager", "--attention flash3")),
    (0.2, ("--checkpoint none", "--checkpoint layer", "--checkpoint attention-saved")),
    (0.2, ("--loss full", "--loss grpo")),
    (0.2, ("--blocks mlp", "--blocks mlp+norm", "--blocks mlp+norm+projections")),
    (0.2, ("--keep 0.5", "--keep 1", "--keep memory:4GiB")),
    (0.2, ("--tile none", "--tile 4096", "--tile shards:4", "--tile arctic")),
    (0.2, ("--heads 1",)),
    (0.15, ("--liger",)),
    (0.2, ("--batch-size 3",)),
    (0.2, ("--gradient-accumulation 4",)),
    (0.2, ("--dtype bfloat16", "--dtype float32")),
    (0.2, ("--optimizer sgd", "--optimizer adafactor", "--optimizer adamw-8bit")),
    (0.15, ("--sp-size 8", "--cp-size 8")),
    (0.15, ("--nodes 2",)),
)  # fmt: skip
"""How often a random question has a flag, and with what."""


def random_question(draw: random.Random) -> str:
    """A question that may be refused: sequence parallelism without an engine, say."""
    words = [f"--model {draw.choice(('llama-8b', 'qwen3-8b'))}"]
    words.append(f"--device {draw.choice(('h100', 'h200', 'a100-80', 'rtx4090'))}")
    engine = draw.choice(("single", "single", "zero3", "fsdp2", "zero2", "ddp"))
    words += [] if engine == "single" else [f"--gpus 8 --engine {engine}"]
    words += [draw.choice(values) for how_often, values in FLAGS if draw.random() < how_often]
    return " ".join(words)


def seconds_of(question: str) -> tuple[float, float, int]:
    """Processor seconds of one plan until its answer and in all, and its exit code."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "plan", *question.split()],
        capture_output=True, env={**kept, "HF_HUB_OFFLINE": "1"}, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    noted = [float(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("answered ")]
    return (noted or [whole])[0], whole, done.returncode


def of_random_questions(count: int, seed: int) -> list[str]:
    """A table of what ``count`` random questions took."""
    draw = random.Random(seed)
    found: list[tuple[float, float, str]] = []
    while len(found) < count:
        question = random_question(draw)
        answered, whole, code = seconds_of(question)
        if code in (0, 1):
            found.append((answered, whole, question))
            print(f"{answered:.2f} {whole:.2f} {question}", flush=True)
    lines = ["", f"{count} random questions (`--random {count} --seed {seed}`):", ""]
    lines += ["| | seconds to the answer | in all |", "|---|---|---|"]
    for name, share in (("half of them within", 0.5), ("nine in ten within", 0.9), ("all within", 1.0)):
        columns = [sorted(column)[max(0, round(share * count) - 1)] for column in list(zip(*found, strict=True))[:2]]
        lines.append(f"| {name} | {columns[0]:.1f} | {columns[1]:.1f} |")
    longest = max(found)
    return [*lines, "", f"The longest to its answer: `{longest[2]}`, {longest[0]:.1f}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random", type=int, default=100, help="how many random questions beside those of the list")
    parser.add_argument("--seed", type=int, default=1, help="of the random questions")
    given = parser.parse_args()
    lines = ["| `seqtile plan` | exit code | seconds to the answer | in all |", "|---|---|---|---|"]
    for question in QUESTIONS:
        runs = [seconds_of(question) for _ in range(given.repeats)]
        answered, whole = (min(column) for column in list(zip(*runs, strict=True))[:2])
        lines.append(f"| `{question}` | {runs[0][2]} | {answered:.1f} | {whole:.1f} |")
        print(lines[-1], flush=True)
    lines += of_random_questions(given.random, given.seed) if given.random else []
    versions = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers", "peft"))
    lines += ["", f"{datetime.now(UTC).date()}, {platform.machine()}, Python {platform.python_version()}, {versions}."]
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
