"""Start several processes through accelerate's launcher, and stay in front of them: rank 0 reports, signals, exit code.

A signal goes to the workers, which finish their step and save a checkpoint however long that takes, and not to the
launcher, which has it blocked: torch elastic passes it on, but ends the workers 30 seconds later. torch 2.13 can be
told how long to wait (https://github.com/pytorch/pytorch/pull/172596); older versions that are supported may not.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from seqtile._errors import RunError, UserError
from seqtile.devices import cpu_cores
from seqtile.engines.build_locks import check_build_locks
from seqtile.train.nodes import LOST_SECONDS, MEETING_SECONDS, Meeting, Nodes, facts_of, saving
from seqtile.train.processes import this_process
from seqtile.train.recipe import RECIPE_FILE, Recipe, build_recipe, resolve, save_recipe
from seqtile.train.signals import (
    StoppedAtOnce,
    blocked_signals,
    exit_code,
    handle_signals,
    new_request,
    stop_signals,
)

if TYPE_CHECKING:
    from seqtile.verification import VerifyResult

CONFIGS = Path(__file__).parent / "configs"
"""accelerate's configuration of each engine."""

_OPTIMIZER = ("offload_optimizer_device: none", "offload_optimizer_device: cpu")
_PARAMETERS = ("offload_param_device: none", "offload_param_device: cpu")
_ALL_OF_FSDP = ("fsdp_offload_params: false", "fsdp_offload_params: true")
ON_THE_HOST = {
    ("zero2", "optimizer"): _OPTIMIZER, ("zero3", "optimizer"): _OPTIMIZER, ("zero3", "weights"): _PARAMETERS,
    ("fsdp2", "optimizer"): _ALL_OF_FSDP, ("fsdp2", "weights"): _ALL_OF_FSDP,
}  # fmt: skip
"""By engine and what it keeps on the host: the line of its configuration, and the line instead."""

HOW_FILE = "how.json"
"""Beside the recipe that the workers read: the other arguments of ``train``, and which process waits in front."""

RESULT_FILE = "result.pickle"
"""What the first process of a check found."""

GRACE_SECONDS = 15.0
"""How long the others may go on after one process has ended with an error, or after a request to stop at once."""


PARTNER_SECONDS = 5.0
"""How long this node's processes may go on after another node has ended or is lost."""


def launch(
    recipe: Recipe,
    *,
    resume: bool,
    resume_from: str | None,
    overwrite: bool,
    trust_checkpoint: bool,
    worker: str,
    say: Callable[[str], None],
    nodes: Nodes | None = None,
    wait_seconds: float = MEETING_SECONDS,
) -> int:
    """Check everything that can be checked without the model, start the processes, and wait for them.

    Args:
        recipe: with an engine other than ``single``.
        resume, resume_from, overwrite, trust_checkpoint: as in :func:`seqtile.train.run.train`.
        worker: the module that each process runs, with the folder of :data:`HOW_FILE` as its argument.
        say: shows one piece of text: the configuration and the command.
        nodes: the nodes of the run, each of which is started by the same command; None where this is the only one.
        wait_seconds: how long to wait for the other nodes.

    Returns:
        The exit code: 0; 130, 143 or 129 for a run that Ctrl-C, SIGTERM or SIGHUP stopped; 1 for a crash, whose
        traceback was shown.

    Raises:
        UserError: bad input, found here or by a process that was started.
        RunError: a process could not go on, or a node is missing or lost.
    """
    how = {"resume": resume, "resume_from": resume_from, "overwrite": overwrite, "trust_checkpoint": trust_checkpoint}
    if nodes is None:
        return _launch(recipe, how, worker, say, None)
    if recipe.on_oom == "retry":
        raise UserError("--on-oom retry starts the processes of one node again, got several nodes; drop it")
    say(f"node {nodes.rank} of {nodes.count}: meeting the others at {nodes.rendezvous}, for at most {wait_seconds:g} s")
    meeting = Meeting(nodes, wait_seconds)
    code, message = 1, "it was stopped"
    try:
        code, message = _launch(recipe, how, worker, say, meeting), ""
    except StoppedAtOnce as stop:
        code, message = exit_code(stop.number), ""
        raise
    except (UserError, RunError) as error:
        message = str(error).splitlines()[0]
        raise
    finally:
        meeting.end(code, message)
    return code


def _launch(
    recipe: Recipe, asked: dict[str, Any], worker: str, say: Callable[[str], None], meeting: Meeting | None
) -> int:
    """One node's part of :func:`launch`."""
    from seqtile.train.checkpoint_files import find_checkpoint, newest_whole
    from seqtile.train.run import fitted, locate, require_packages

    require_packages()
    nodes = meeting.nodes if meeting else None
    recipe = _counted(recipe, nodes.count if nodes else 1)
    from seqtile.train.load import check_split, load_config

    check_split(recipe) if recipe.split > 1 else load_config(recipe)
    overwrite = asked["overwrite"]
    recipe, start = locate(recipe, **asked)
    port = 0
    if meeting is not None:
        output = Path(str(recipe.output))
        verdict = meeting.agree(facts_of(recipe, meeting.nodes), output, start)
        port = verdict["port"]
        recipe = saving(recipe, shared=verdict["shared"])
        if start is not None and verdict["start"] not in (None, start.name):
            start = find_checkpoint(output, verdict["start"], trusted=asked["trust_checkpoint"])
        first = meeting.nodes.rank == 0
        fixed = fitted(recipe, start, say, meeting.nodes.count) if first else recipe
        chosen = meeting.share(json.dumps(fixed.model_dump(mode="json")) if first else None)
        recipe, _ = build_recipe(json.loads(chosen), {})
        say(
            f"node {meeting.nodes.rank} of {meeting.nodes.count}: output {output}, "
            + ("which all share" if verdict["shared"] else "of its own")
        )
    else:
        recipe = fitted(recipe, start, say)
    say(f"engine {recipe.engine}, {recipe.nproc} processes, by accelerate with {config_of(recipe.engine)}:")
    say(configuration(recipe).rstrip())
    say("no progress bar under an engine: the first process prints about 30 of its steps, metrics.jsonl has them all")
    retries: list[dict[str, Any]] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="seqtile-") as name:
            folder = Path(name)
            how = {"resume": asked["resume"] or start is not None, "resume_from": start.name if start else None,
                   "overwrite": overwrite, "checked": start is not None}  # fmt: skip
            command = _write_orders(recipe, folder, {**how, "retries": retries}, worker, nodes, port)
            say(shlex.join(["accelerate", "launch", *command[3:]]))
            run = Launch(recipe, command, folder, meeting)
            try:
                code = run.wait()
                if meeting is not None and code > 128:
                    number = signal.Signals(code - 128)
                    say(f"{number.name} on one of the nodes stopped the run; {_go_on(Path(str(recipe.output)))}")
                return code
            except RunError as error:
                retry, done = run.retry()
                start, _ = newest_whole(Path(str(recipe.output)))
                if retry is None or start is None or run.signalled:
                    raise
                failed = str(error)
        recipe, overwrite = recipe.changed(**retry["recipe"]), False
        retries = [*done, {**retry, "how": f"from {start.name}"}]
        say(failed)


def launch_check(recipe: Recipe, worker: str) -> VerifyResult:
    """Start the processes of ``seqtile verify --engine`` and return what they found.

    Args:
        recipe: with an engine other than ``single``.
        worker: the module that each process runs.

    Raises:
        UserError: bad input, found here or by a process that was started.
        RunError: a process ended without a result.
    """
    recipe = _counted(recipe)
    if recipe.nproc == 1:
        raise UserError(f"verify under engine {recipe.engine!r} needs at least 2 processes, got --nproc 1; give more")
    with tempfile.TemporaryDirectory(prefix="seqtile-") as name:
        folder = Path(name)
        command = _write_orders(recipe, folder, {"check": True}, worker)
        code = Launch(recipe, command, folder).wait()
        if code > 128:
            raise StoppedAtOnce(code - 128)
        if code or not (folder / RESULT_FILE).is_file():
            raise RunError(f"a process of the check ended without a result (exit code {code})")
        result: VerifyResult = pickle.loads((folder / RESULT_FILE).read_bytes())
        return result


def _counted(recipe: Recipe, nodes: int = 1) -> Recipe:
    """The recipe with the number of its processes, on all nodes together, checked against what there is."""
    if recipe.engine.startswith("zero") and find_spec("deepspeed") is None:
        raise UserError(f"engine {recipe.engine!r} needs DeepSpeed; install it with: pip install deepspeed")
    if recipe.engine.startswith("zero"):
        check_build_locks()
    recipe = resolve(recipe)
    recipe = resolve(recipe.model_copy(update={"nproc": recipe.nproc or nodes * count_accelerators(recipe)}))
    if (recipe.nproc or 1) % nodes:
        raise UserError(
            f"got nproc {recipe.nproc} on {nodes} nodes, which have equally many processes each; give --nproc a "
            f"multiple of {nodes}: it counts those of all nodes"
        )
    check_devices(recipe, nodes)
    return recipe


def _write_orders(
    recipe: Recipe, folder: Path, how: dict[str, Any], worker: str, nodes: Nodes | None = None, port: int = 0
) -> list[str]:
    """Write what the workers read; returns the command that starts them."""
    save_recipe(recipe, folder / RECIPE_FILE)
    told = {**how, "front": this_process(), "cwd": os.getcwd(), "signals": stop_signals()}
    (folder / HOW_FILE).write_text(json.dumps(told), encoding="utf-8")
    config = config_of(recipe.engine)
    if recipe.engine_offload:
        config = folder / config.name
        config.write_text(configuration(recipe), encoding="utf-8")
    return launch_command(recipe, worker, [str(folder)], config, nodes, port)


def config_of(engine: str) -> Path:
    """The shipped configuration of ``engine``."""
    return CONFIGS / f"{engine}.yaml"


def configuration(recipe: Recipe) -> str:
    """accelerate's configuration of ``recipe``: the shipped one, with what its engine keeps on the host."""
    text = config_of(recipe.engine).read_text(encoding="utf-8")
    for what in recipe.engine_offload:
        text = text.replace(*ON_THE_HOST[recipe.engine, what])
    return text


def launch_command(
    recipe: Recipe, worker: str, arguments: list[str], config: Path, nodes: Nodes | None = None, port: int = 0
) -> list[str]:
    """``accelerate launch`` of the module ``worker``, run by this interpreter; ``arguments`` are the worker's.

    ``port`` is free on node 0; the one at which the nodes met is still in use.
    """
    of_nodes = [] if nodes is None else [
        "--num_machines", str(nodes.count), "--machine_rank", str(nodes.rank), "--main_process_ip", nodes.host,
        "--main_process_port", str(port),
    ]  # fmt: skip
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--num_processes", str(recipe.nproc), *of_nodes, "--module", worker, *arguments,
    ]  # fmt: skip


def count_accelerators(recipe: Recipe) -> int:
    """One process per accelerator.

    Raises:
        UserError: there is none, so how many processes is the user's choice.
    """
    import torch

    if not torch.accelerator.is_available():
        raise UserError(
            f"engine {recipe.engine!r} starts one process per accelerator, and there is none here; "
            "give --nproc for processes on the CPU"
        )
    return torch.accelerator.device_count()


def check_devices(recipe: Recipe, nodes: int = 1) -> None:
    """Refuse more processes than there are accelerators, where there are any."""
    import torch

    if torch.accelerator.is_available() and (recipe.nproc or 1) > nodes * torch.accelerator.device_count():
        on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
        raise UserError(
            f"got nproc {recipe.nproc}{on_nodes}, but torch sees {torch.accelerator.device_count()} accelerators"
            f"{' on this one' if nodes > 1 else ''}; give --nproc {nodes * torch.accelerator.device_count()} or less"
        )


def _environment(processes: int) -> dict[str, str]:
    """The launcher would give every process one thread, with a warning."""
    threads = str(max(1, cpu_cores() // processes))
    found = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    if "PYTHONPATH" in found:  # the processes start in another folder
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, found["PYTHONPATH"].split(os.pathsep)))
    return found


def _go_on(output: Path) -> str:
    """What to do when another node is gone."""
    from seqtile.train.checkpoint_files import newest_whole

    checkpoint, _ = newest_whole(output)
    if checkpoint is None:
        return "no checkpoint was saved; start again, with --overwrite, on each node"
    return f"the last whole checkpoint is {checkpoint}: go on from it with --resume on each node"


class Launch:
    """The launcher's process and, through files in ``folder``, the workers': ``RANK.pid`` and ``RANK.end``.

    Args:
        recipe: the run.
        command: starts the launcher.
        folder: of the orders and of what the workers write.
        meeting: with the other nodes, or None.
    """

    def __init__(self, recipe: Recipe, command: list[str], folder: Path, meeting: Meeting | None = None) -> None:
        self._command, self.folder, self._meeting = command, folder, meeting
        self._count = (recipe.nproc or 1) // (meeting.nodes.count if meeting else 1)
        self._output, self._environment = recipe.output, _environment(self._count)
        self._request, self._urgent = new_request(), 0
        self._deadline = math.inf
        self._said = b""

    def wait(self) -> int:
        """Start it and return the exit code when all processes have ended."""
        with handle_signals(stop_signals(), self._handle):
            with blocked_signals():
                launcher = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd=self.folder,  # accelerate puts its current folder on the path of modules: not the user's
                    env=self._environment,
                    start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
                )
            reader = threading.Thread(target=self._pass_on, args=(launcher.stderr,), daemon=True)
            reader.start()
            try:
                while launcher.poll() is None:
                    time.sleep(0.05)
                    if self._is_over():
                        self._kill(launcher)
            finally:
                self._kill(launcher)
            reader.join(timeout=5)
        return self._result(launcher.returncode)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Tell every worker; before there are any, or at the second request to stop at once, end everything."""
        self._urgent += self._request.is_urgent(number)
        for pid in living(self.folder):
            _send(pid, number)
        if not any(self.folder.glob("*.pid")) or self._urgent > 1:
            self._end_by(0.0)
        elif self._urgent:
            self._end_by(GRACE_SECONDS)

    def _end_by(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _is_over(self) -> bool:
        """After one process has failed the others would wait for it."""
        if self._deadline == math.inf and self._failed():
            self._end_by(GRACE_SECONDS)
        elif self._deadline == math.inf and self._meeting and self._meeting.news():
            self._end_by(PARTNER_SECONDS)
        return time.monotonic() >= self._deadline

    def _failed(self) -> bool:
        return any(not end["together"] for end in _ends(self.folder).values())

    def _kill(self, launcher: subprocess.Popen[bytes]) -> None:
        """End what is left."""
        kill_workers(self.folder)
        if launcher.poll() is None:
            _send(launcher.pid, signal.SIGKILL, group=True)
            launcher.wait()

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Show what the processes say, until one has ended by itself: then its sentence, or the signal, says it all."""
        with stream:
            for line in stream:
                self._said = line
                if self._deadline == math.inf and not self._failed():
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    @property
    def signalled(self) -> bool:
        """Whether the user has asked it to stop."""
        return self._request.first is not None

    def retry(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """After an out-of-memory: what the first rank that had it would go on with, and what was before."""
        for _, end in sorted(_ends(self.folder).items()):
            if end.get("retry"):
                return end["retry"], end.get("done", [])
        return None, []

    def _result(self, launcher_code: int) -> int:
        ends = _ends(self.folder)
        for rank in sorted(ends):
            if ends[rank]["message"]:
                raise (UserError if ends[rank]["code"] == 2 else RunError)(ends[rank]["message"])
        if self._meeting and not self.signalled and (launcher_code or self._failed() or len(ends) != self._count):
            # A collective fails with a traceback when another node is gone; the missing heartbeat names it later.
            if news := self._meeting.news(seconds=LOST_SECONDS + GRACE_SECONDS):
                raise RunError(f"{news}; {_go_on(Path(str(self._output)))}")
        if launcher_code == 0 and not self._failed():
            if len(ends) != self._count:
                raise RunError(f"{self._count} processes were to train, and {len(ends)} came to their end")
            return max(int(end["code"]) for end in ends.values())
        if self._request.first is not None:
            raise StoppedAtOnce(self._request.first)
        if launcher_code < 0 or not self._said:
            by = f"by {signal.Signals(-launcher_code).name}" if launcher_code < 0 else f"with exit code {launcher_code}"
            raise RunError(
                f"the launcher of the {self._count} processes ended {by} and said nothing; the processes were ended "
                "too, and --resume goes on from the last whole checkpoint, if there is one"
            )
        return 1


def living(folder: Path) -> list[int]:
    """The workers of a launch that have not said how they ended."""
    ended = _ends(folder)
    return [
        int(text)
        for file in folder.glob("*.pid")
        if int(file.stem) not in ended and (text := file.read_text()).isdigit()
    ]


def kill_workers(folder: Path) -> None:
    """End all workers of a launch and what they started: each leads a session of its own. Also one that calls it."""
    for pid in sorted(living(folder), key=os.getpid().__eq__):
        _send(pid, signal.SIGKILL, group=True)


def _ends(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("*.end"))}


def _send(pid: int, number: int, *, group: bool = False) -> None:
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended
