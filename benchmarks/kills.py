"""Kill runs with SIGKILL at random moments and continue them; at its end each has to be the run that nobody killed.

    python benchmarks/kills.py                      # goes on where the results file ends
    python benchmarks/kills.py --engines zero3 --kills 5 --results /tmp/kills.jsonl

A run of eight steps with a checkpoint every second one is killed again and again: in a step, while a checkpoint is
written, while the model is saved at the end. The moment is a random part of the time that the phase takes in the run
that is not killed; with several processes a random one of them dies, and then the others. After each kill every
checkpoint that had its mark must still be whole, and the next process resumes. A run that came to its end must have,
bit for bit, the losses and weights of the one that was not killed. Ranks are forked from a server that has imported
the trainer, as a start costs more than the run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from seqtile.devices import package_version

STEPS, SAVE_STEPS = 8, 2
PHASES = ("step", "checkpoint", "final save")
KILLS = {"single": 110, "ddp": 50, "zero3": 45}
"""How many of each engine; 205 together."""

IN_TRAINING, IN_FINAL = 6, 3
"""Kills of one run: before its last step is saved, and after."""

HANG_SECONDS = 300.0

Plan = tuple[int, str, int, float]
"""Rank, phase, step (0: the final save) and moment, in seconds from the beginning of the phase."""


def main(arguments: list[str] | None = None) -> int:
    """Kill until there are as many as asked for; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=KILLS, default=list(KILLS))
    parser.add_argument("--kills", type=int, help="of each engine (default: 205 in all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "kills.jsonl")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="seqtile-kills-") as name:
        for engine in chosen.engines:
            if engine == "zero3" and importlib.util.find_spec("deepspeed") is None:
                print("zero3: DeepSpeed is not installed")
                continue
            _kill_engine(engine, chosen.kills or KILLS[engine], chosen.seed, Path(name, engine), chosen.results)
    rows = _read(chosen.results)
    print(table(rows))
    return int(any(row["lost"] for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Kills by engine and phase in Markdown, and what was lost."""
    counts = Counter((row["engine"], row["phase"]) for row in rows)
    lines = ["| engine | " + " | ".join(PHASES) + " | all | lost |", "|---" * (len(PHASES) + 3) + "|"]
    for engine in KILLS:
        mine = [counts[engine, phase] for phase in PHASES]
        lost = sum(bool(row["lost"]) for row in rows if row["engine"] == engine)
        lines.append(f"| {engine} | " + " | ".join(map(str, mine)) + f" | {sum(mine)} | {lost} |")
    return "\n".join(lines)


def _read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def _kill_engine(engine: str, kills: int, seed: int, folder: Path, results: Path) -> None:
    """Runs, one after the other, each killed several times; a whole run is written to ``results`` at once."""
    done = [row for row in _read(results) if row["engine"] == engine]
    if len(done) >= kills:
        return
    server = _server()
    folder.mkdir(parents=True)
    recipe = {**_inputs(folder), "engine": engine}
    whole = _start(server, recipe, folder / "whole", resume=False)
    if whole.code:
        raise RuntimeError(f"the run that nobody kills failed:\n{whole.said}")
    run = 1 + max((row["run"] for row in done), default=0)
    left = kills - len(done)
    while left > 0:
        rng = random.Random(f"{seed} {engine} {run}")
        rows = _kill_run(server, recipe, folder / f"run-{run}", whole, rng, left)
        shared = {
            "date": time.strftime("%Y-%m-%d"), "engine": engine, "run": run, "command": "python benchmarks/kills.py",
            "device": f"CPU, {os.cpu_count()} cores",
            "versions": {name: package_version(name) for name in ("torch", "transformers", "trl", "deepspeed")},
        }  # fmt: skip
        with results.open("a") as file:
            file.writelines(json.dumps({**shared, **row}) + "\n" for row in rows)
        print(f"{engine} run {run}: {len(rows)} kills, {sum(bool(row['lost']) for row in rows)} lost", flush=True)
        left -= len(rows)
        run += 1


class Ended:
    """How a start ended.

    Attributes:
        code: 0, 1 for one that failed, -9 for one that was killed.
        said: what its processes wrote.
        phase: where the killed process was.
        marked: checkpoints that had got their mark before.
        took: seconds of each phase, the median of this start, by phase.
        result: losses and weights, of the first process, as bytes; empty if it did not come to its end.
    """

    def __init__(self, code: int, said: str, log: list[tuple[float, str, int]], rank: int, result: bytes) -> None:
        self.code, self.said, self.result = code, said, result
        self.phase = next((what for _, what, _ in reversed(log) if what in PHASES), "step")
        self.marked = [step for _, what, step in log if what == "marked"]
        self.took: dict[str, float] = {}
        for phase in PHASES:
            spans = [
                log[at + 1][0] - begin for at, (begin, what, _) in enumerate(log[:-1]) if what == phase
            ]  # fmt: skip
            self.took[phase] = sorted(spans)[len(spans) // 2] if spans else 0.0


def _kill_run(
    server: ForkServerContext, recipe: dict[str, Any], output: Path, whole: Ended, rng: random.Random, left: int
) -> list[dict[str, Any]]:
    """Kill one run until it has had enough, let it end, and compare."""
    from seqtile.train.run_directory import newest_whole, why_not_whole

    ranks = 1 if recipe["engine"] == "single" else 2
    rows: list[dict[str, Any]] = []
    marked: set[int] = set()
    while True:
        newest, _ = newest_whole(output) if output.is_dir() else (None, [])
        step = int(newest.name.rpartition("-")[2]) if newest else 0
        trained = step == STEPS
        enough = len(rows) >= left or sum(row["phase"] == "final save" for row in rows) >= IN_FINAL
        plan: Plan | None = None
        if not (trained and enough):
            in_training = not trained and len(rows) < IN_TRAINING and len(rows) < left
            phase = rng.choice(PHASES[:2]) if in_training else "final save"
            place = min(STEPS, step + rng.randint(1, 3)) if in_training else 0
            place += place % SAVE_STEPS if phase == "checkpoint" else 0
            plan = (rng.randrange(ranks), phase, place, rng.random() * whole.took[phase])
        ended = _start(server, recipe, output, resume=newest is not None, plan=plan, overwrite=output.is_dir())
        marked |= {*ended.marked}
        lost = ""
        if ended.code > 0:
            lost = f"it did not go on: {ended.said[-2000:]}"
        for old in sorted(marked)[-2:] if output.is_dir() else []:
            if (output / f"checkpoint-{old}").is_dir() and why_not_whole(output / f"checkpoint-{old}"):
                lost = lost or f"checkpoint-{old} had its mark, and {why_not_whole(output / f'checkpoint-{old}')}"
        now, _ = newest_whole(output)
        if marked and (now is None or int(now.name.rpartition("-")[2]) < max(marked)):
            lost = lost or f"checkpoint-{max(marked)} had its mark, and {now} is the newest"
        if ended.code == -signal.SIGKILL:
            rows.append({"phase": ended.phase, "rank": plan[0] if plan else None, "resumed": step, "lost": lost})
        if ended.code == 0 and ended.result != whole.result:
            lost = "losses or weights differ from those of the run that nobody killed"
        if lost and rows:
            rows[-1]["lost"] = lost
        if lost or ended.code == 0 or not why_not_whole(output):  # the last: killed when all had been written
            shutil.rmtree(output, ignore_errors=True)
            return rows


def _server() -> ForkServerContext:
    """Not DeepSpeed: a process that is forked from one that has imported it hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["seqtile.train.trainer", "transformers.models.llama.modeling_llama"])
    return context


def _inputs(folder: Path) -> dict[str, Any]:
    """A Llama of two layers, its tokenizer and twelve rows."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(
        folder / "model"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices("abcdefgh ", k=60 + row))} for row in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "max_length": 64, "tile": 16,
        "steps": STEPS, "save_steps": SAVE_STEPS, "learning_rate": 1e-2, "report": False,
    }  # fmt: skip


def _start(
    server: ForkServerContext, recipe: dict[str, Any], output: Path, *, resume: bool, plan: Plan | None = None,
    overwrite: bool = False,
) -> Ended:  # fmt: skip
    """Start all processes of a run, wait until one has died or all have ended, and end the others."""
    ranks = 1 if recipe["engine"] == "single" else 2
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="log-") as name:
        folder, port = Path(name), _free_port()
        how = {"resume": resume, "overwrite": overwrite and not resume}
        given = ({**recipe, "output": str(output)}, how, folder, port, plan)
        processes = [server.Process(target=_rank, args=(rank, ranks, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + HANG_SECONDS
        while all(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.002)
        # One that has ended well leaves the others time: the one to be killed may still be saving.
        patience = 0.0 if any(process.exitcode for process in processes) else HANG_SECONDS
        killed = []
        for process in processes:
            process.join(patience)
            killed.append(process.exitcode == -signal.SIGKILL)
        for process in processes:
            process.kill()
            process.join()
        codes = [process.exitcode or 0 for process in processes]
        code = -signal.SIGKILL if any(killed) else int(any(codes))
        rank = killed.index(True) if any(killed) else 0
        logs = [(folder / f"{rank}.log").read_text().splitlines() for rank in range(ranks)]
        log = [(float(at), what.replace("_", " "), int(step)) for at, what, step in map(str.split, logs[rank])]
        first = [(float(at), what, int(step)) for at, what, step in map(str.split, logs[0]) if what == "marked"]
        said = "\n".join((folder / f"{rank}.said").read_text() for rank in range(ranks))
        result = folder / "result"
        ended = Ended(code, said, log, rank, result.read_bytes() if result.is_file() else b"")
        ended.marked = [step for _, _, step in first]
        return ended


def _free_port() -> int:
    """Below those that the system gives to whoever asks for any: nobody takes it between now and its use."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            port = random.randrange(20_000, 30_000)
            free.bind(("127.0.0.1", port))
            return port


def _rank(
    rank: int, ranks: int, values: dict[str, Any], how: dict[str, Any], folder: Path, port: int, plan: Plan | None
) -> None:
    """One process of a run: train, note its phases, and die where it is told to."""
    with (folder / f"{rank}.said").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    import hashlib

    from safetensors.torch import load_file

    from seqtile.train.launch import engine_environment
    from seqtile.train.ranks import leave
    from seqtile.train.recipe import build_recipe
    from seqtile.train.run import train

    recipe, _ = build_recipe(values, {})
    os.environ |= engine_environment(recipe)

    _watch(folder / f"{rank}.log", plan if plan is not None and plan[0] == rank else None)
    outcome = train(recipe, **how)
    if rank == 0:
        digest = hashlib.sha256(json.dumps(outcome.losses).encode())
        for name, weight in sorted(load_file(outcome.output / "model.safetensors").items()):
            digest.update(name.encode() + weight.contiguous().numpy().tobytes())
        (folder / "result").write_bytes(digest.digest())
    leave()
    sys.stdout.flush()
    os._exit(0)


def _watch(log: Path, plan: Plan | None) -> None:
    """Note when each phase begins, and start the clock of the kill where it belongs."""
    from seqtile.train import trainer

    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, step: int) -> None:
        os.write(handle, f"{time.monotonic()} {what.replace(' ', '_')} {step}\n".encode())
        if plan is not None and plan[1:3] == (what, step):
            threading.Thread(target=die, args=(plan[3],), daemon=True).start()

    ended = threading.Event()

    def die(seconds: float) -> None:
        if not ended.wait(seconds):
            os.kill(os.getpid(), signal.SIGKILL)

    own: Any = trainer.Trainer
    save, mark, result = own._save_checkpoint, own._mark, own.save_result

    def save_checkpoint(self: Any, *args: Any) -> None:
        note("checkpoint", self.state.global_step)
        save(self, *args)
        note("step", self.state.global_step)

    def write_mark(self: Any, checkpoint: Path, step: int) -> None:
        mark(self, checkpoint, step)
        note("marked", step)

    def save_result(self: Any, output: Path) -> None:
        note("final save", 0)
        result(self, output)
        ended.set()
        note("end", 0)

    begin = trainer._Checks.on_step_begin

    def on_step_begin(self: Any, args: Any, state: Any, control: Any, **words: Any) -> Any:
        note("step", state.global_step + 1)
        return begin(self, args, state, control, **words)

    own._save_checkpoint, own._mark, own.save_result = save_checkpoint, write_mark, save_result
    trainer._Checks.on_step_begin = on_step_begin  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
