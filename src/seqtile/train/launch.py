"""Start several processes through accelerate's launcher, and stay in front of them: rank 0 reports, signals, exit code.

A signal goes to the workers, which finish their step and save a checkpoint however long that takes, and not to the
launcher: torch elastic passes it on, but ends them 30 seconds later. torch 2.13 can be told how long to wait
(https://github.com/pytorch/pytorch/pull/172596); older versions that are supported may not.
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
from seqtile.train.recipe import RECIPE_FILE, Recipe, resolve, save_recipe
from seqtile.train.signals import handle_signals

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GRACE_SECONDS = 15.0
"""How long the others may go on after one process has ended with an error, or after a second signal."""


def launch(
    recipe: Recipe, *, resume: bool, resume_from: str | None, overwrite: bool, worker: str, say: Callable[[str], None]
) -> int:
    """Check everything that can be checked without the model, start the processes, and wait for them.

    Args:
        recipe: with an engine other than ``single``.
        resume, resume_from, overwrite: as in :func:`seqtile.train.run.train`.
        worker: the module that each process runs, with the folder of :data:`HOW_FILE` as its argument.
        say: shows one piece of text: the configuration and the command.

    Returns:
        The exit code: 0, 130 or 143 for a run that a signal stopped, 1 for a crash, whose traceback was shown.

    Raises:
        UserError: bad input, found here or by a process that was started.
        RunError: a process could not go on.
    """
    from seqtile.train.checkpoint_files import newest_whole
    from seqtile.train.run import fitted, locate, require_packages

    require_packages()
    recipe = _counted(recipe)
    if recipe.sp_size > 1:
        from seqtile.train.load import check_split

        check_split(recipe)
    recipe, start = locate(recipe, resume=resume, resume_from=resume_from, overwrite=overwrite)
    recipe = fitted(recipe, start, say)
    say(f"engine {recipe.engine}, {recipe.nproc} processes, by accelerate with {config_of(recipe.engine)}:")
    say(configuration(recipe).rstrip())
    retries: list[dict[str, Any]] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="seqtile-") as name:
            folder = Path(name)
            how = {"resume": start is not None, "resume_from": start.name if start else None, "overwrite": overwrite}
            command = _write_orders(recipe, folder, {**how, "retries": retries}, worker)
            say(shlex.join(["accelerate", "launch", *command[3:]]))
            run = _Launch(recipe, command, folder)
            try:
                return run.wait()
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
        code = _Launch(recipe, command, folder).wait()
        if code > 128:
            raise KeyboardInterrupt
        if code or not (folder / RESULT_FILE).is_file():
            raise RunError(f"a process of the check ended without a result (exit code {code})")
        result: VerifyResult = pickle.loads((folder / RESULT_FILE).read_bytes())
        return result


def _counted(recipe: Recipe) -> Recipe:
    """The recipe with the number of its processes, checked against what there is."""
    if recipe.engine.startswith("zero") and find_spec("deepspeed") is None:
        raise UserError(f"engine {recipe.engine!r} needs DeepSpeed; install it with: pip install 'seqtile[deepspeed]'")
    recipe = resolve(recipe)
    recipe = resolve(recipe.model_copy(update={"nproc": recipe.nproc or count_accelerators(recipe)}))
    check_devices(recipe)
    return recipe


def _write_orders(recipe: Recipe, folder: Path, how: dict[str, Any], worker: str) -> list[str]:
    """Write what the workers read; returns the command that starts them."""
    save_recipe(recipe, folder / RECIPE_FILE)
    (folder / HOW_FILE).write_text(json.dumps({**how, "front": os.getpid(), "cwd": os.getcwd()}), encoding="utf-8")
    config = config_of(recipe.engine)
    if recipe.engine_offload:
        config = folder / config.name
        config.write_text(configuration(recipe), encoding="utf-8")
    return launch_command(recipe, worker, [str(folder)], config)


def config_of(engine: str) -> Path:
    """The shipped configuration of ``engine``."""
    return CONFIGS / f"{engine}.yaml"


def configuration(recipe: Recipe) -> str:
    """accelerate's configuration of ``recipe``: the shipped one, with what its engine keeps on the host."""
    text = config_of(recipe.engine).read_text(encoding="utf-8")
    for what in recipe.engine_offload:
        text = text.replace(*ON_THE_HOST[recipe.engine, what])
    return text


def launch_command(recipe: Recipe, worker: str, arguments: list[str], config: Path) -> list[str]:
    """``accelerate launch`` of the module ``worker``, run by this interpreter; ``arguments`` are the worker's."""
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--num_processes", str(recipe.nproc), "--module", worker, *arguments,
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


def check_devices(recipe: Recipe) -> None:
    """Refuse more processes than there are accelerators, where there are any."""
    import torch

    if torch.accelerator.is_available() and (recipe.nproc or 1) > torch.accelerator.device_count():
        raise UserError(
            f"got nproc {recipe.nproc}, but torch sees {torch.accelerator.device_count()} accelerators; "
            "give --nproc that number or less"
        )


def _environment(recipe: Recipe) -> dict[str, str]:
    """The launcher would give every process one thread, with a warning."""
    threads = str(max(1, cpu_cores() // (recipe.nproc or 1)))
    found = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    if "PYTHONPATH" in found:  # the processes start in another folder
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, found["PYTHONPATH"].split(os.pathsep)))
    return found


class _Launch:
    """The launcher's process and, through files in ``folder``, the workers': ``RANK.pid`` and ``RANK.end``."""

    def __init__(self, recipe: Recipe, command: list[str], folder: Path) -> None:
        self._command, self._folder, self._count = command, folder, recipe.nproc
        self._environment = _environment(recipe)
        self._signals: list[signal.Signals] = []
        self._deadline = math.inf

    def wait(self) -> int:
        """Start it and return the exit code when all processes have ended."""
        with handle_signals(SIGNALS, self._handle):
            launcher = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=self._folder,  # accelerate puts its current folder on the path of modules: not the user's
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
        """Tell every worker; before there are any, or at the third signal, end everything."""
        self._signals.append(signal.Signals(number))
        pids = self._pids()
        for pid in pids:
            _send(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        if not pids or len(self._signals) > 2:
            self._end_by(0.0)
        elif len(self._signals) > 1:
            self._end_by(GRACE_SECONDS)

    def _end_by(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _is_over(self) -> bool:
        """After one process has failed the others would wait for it."""
        if self._deadline == math.inf and self._failed():
            self._end_by(GRACE_SECONDS)
        return time.monotonic() >= self._deadline

    def _failed(self) -> bool:
        return any(not end["together"] for end in self._ends().values())

    def _kill(self, launcher: subprocess.Popen[bytes]) -> None:
        """End what is left: workers lead sessions of their own."""
        for pid in self._pids():
            _send(pid, signal.SIGKILL, group=True)
        if launcher.poll() is None:
            _send(launcher.pid, signal.SIGKILL, group=True)
            launcher.wait()

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Show what the processes say, until one has ended by itself: then its sentence, or the signal, says it all."""
        with stream:
            for line in stream:
                if self._deadline == math.inf and not self._failed():
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    @property
    def signalled(self) -> bool:
        """Whether the user has asked it to stop."""
        return bool(self._signals)

    def retry(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """After an out-of-memory: what the first rank that had it would go on with, and what was before."""
        for _, end in sorted(self._ends().items()):
            if end.get("retry"):
                return end["retry"], end.get("done", [])
        return None, []

    def _pids(self) -> list[int]:
        ended = self._ends()
        return [
            int(text)
            for file in self._folder.glob("*.pid")
            if int(file.stem) not in ended and (text := file.read_text()).isdigit()
        ]

    def _ends(self) -> dict[int, dict[str, Any]]:
        return {int(file.stem): json.loads(file.read_text()) for file in sorted(self._folder.glob("*.end"))}

    def _result(self, launcher_code: int) -> int:
        ends = self._ends()
        for rank in sorted(ends):
            if ends[rank]["message"]:
                raise (UserError if ends[rank]["code"] == 2 else RunError)(ends[rank]["message"])
        if launcher_code == 0 and not self._failed():
            if len(ends) != self._count:
                raise RunError(f"{self._count} processes were to train, and {len(ends)} came to their end")
            return max(int(end["code"]) for end in ends.values())
        if not self._signals:
            return 1
        if self._signals[0] == signal.SIGINT:
            raise KeyboardInterrupt
        return 128 + self._signals[0]


def _send(pid: int, number: int, *, group: bool = False) -> None:
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended
