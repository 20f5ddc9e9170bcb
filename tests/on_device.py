"""The tests marked `device` on one device: `make test-gpu`, or ``python tests/on_device.py --device cpu``.

The parts run side by side, each with a time limit of its own, and their output goes into one folder. For a bare
machine, where pytest and its plugins may be other versions than here: nothing but pytest itself is needed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PARTS: dict[str, list[str]] = {
    "operators, outputs and autograd": ["numerics/test_contract.py", "-k", "not precision and not autocast"],
    "operators, low precision": ["numerics/test_contract.py", "-k", "precision or autocast"],
    "loss": ["numerics/test_head.py", "numerics/test_head_kernels.py"],
    "heads": ["numerics/test_heads.py", "device/test_attention_kernels.py"],
    "chunks": ["numerics/test_chunks.py"],
    "prompts": ["numerics/test_segment_tree.py", "numerics/test_shared_prompts.py"],
    "states, offload, dropout": [
        "numerics/test_state_tiles.py", "numerics/test_offload.py", "numerics/test_dropout.py",
    ],
    "combinations": ["numerics/test_combinations.py", "-k", "not compiled"],
    "effects, weights on the host": ["numerics/test_effects.py", "numerics/test_host_weights.py"],
    "compiled layers": ["numerics/test_combinations.py", "-k", "compiled"],
    "steps, peers": ["device/test_steps.py", "device/test_peers.py"],
}  # fmt: skip
"""Arguments of pytest, in the order in which the parts start: the longest first."""

SECONDS = 200
"""Limit of a part: with the start, all of them are through in four minutes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    seconds: float
    code: int | None  # of pytest; None where its time was up
    output: Path

    @property
    def ok(self) -> bool:
        return self.code == 0

    def summary(self) -> str:
        """A line, and what pytest says of each test that failed."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        state = "its time was up" if self.code is None else last.strip("= ")
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return "\n".join([f"{self.name:34} {self.seconds:5.0f} s  {state}", *(f"    {line[:200]}" for line in failed)])


def run_part(name: str, arguments: Sequence[str], device: str, seconds: float, folder: Path) -> Outcome:
    """One part in a process of its own."""
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--device={device}", "-m", "device or gpu"]
    # pyproject.toml has options of plugins that a bare machine lacks: there they are a warning, not an error. And torch
    # may deprecate what it imports itself in torch.compile, where an error makes kernels run eagerly.
    options += ["-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::DeprecationWarning"]
    options += ["-o", "addopts=-ra --strict-markers --import-mode=importlib"]
    output = folder / f"{name.replace(', ', '-').replace(' ', '-')}.txt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), *sys.path[1:]])}
    start, code = time.monotonic(), None
    with output.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *arguments], cwd=TESTS, stdout=file,
                stderr=subprocess.STDOUT, timeout=seconds, env=environment, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            pass
    return Outcome(name, time.monotonic() - start, code, output)


def run(parts: Mapping[str, Sequence[str]], device: str, jobs: int, seconds: float, folder: Path) -> list[Outcome]:
    """All parts, ``jobs`` at a time; a line is printed when a part ends."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(item: tuple[str, Sequence[str]]) -> Outcome:
        outcome = run_part(*item, device, seconds, folder)
        print(outcome.summary(), flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, parts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, xpu, cpu, or tiledev: tests/second_device.py")
    parser.add_argument("--jobs", type=int, default=min(len(PARTS), 2 * (os.cpu_count() or 2)), help="parts at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of each part")
    parser.add_argument("--out", type=Path, default=Path("runs/device"), help="folder of the parts' output")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    parts = {name: PARTS[name] for name in options.parts}
    outcomes = run(parts, options.device, options.jobs, options.seconds, options.out.absolute())
    failed = [outcome.name for outcome in outcomes if not outcome.ok]
    took = f"{time.monotonic() - start:.0f} s on {options.device}, output in {options.out}"
    print(f"{len(failed)} of {len(outcomes)} parts failed ({'; '.join(failed)}): {took}" if failed
          else f"all {len(outcomes)} parts are right: {took}")  # fmt: skip
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
