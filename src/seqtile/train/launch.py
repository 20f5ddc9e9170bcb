"""Start an engine's processes by torch's elastic agent, and handle their signals, failures and exit code.

The agent runs in a thread, so that signals stay ours: it would end the workers 30 seconds after a SIGTERM, and they
finish their step and save a checkpoint however long that takes. Several nodes meet by its static rendezvous: their
number is fixed and ``--node-rank`` numbers them. Its c10d rendezvous would number them by host name, and restart the
processes of a run at whose port another one comes by mistake.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]  # here, not in _send: a second signal may interrupt a handler's import

from seqtile._errors import RunError, UserError
from seqtile.devices import cpu_cores
from seqtile.engines.build_locks import check_build_locks
from seqtile.train.nodes import WAIT_SECONDS, Nodes
from seqtile.train.ranks import SHARED_FILE, nearest_folder
from seqtile.train.recipe import RECIPE_FILE, Recipe, resolve, save_recipe
from seqtile.train.signals import StoppedAtOnce, blocked_signals, handle_signals, new_request, stop_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

HOW_FILE = "how.json"
"""Beside the recipe that the workers read: the other arguments of ``train``, and which process waits in front."""

STOPPED_FILE, RETRY_FILE = "stopped", "retry.json"
"""What a worker leaves beside it: the exit code of a run that a signal stopped in order; what to go on with after an
out-of-memory."""

GRACE_SECONDS = 15.0
"""How long processes may go on after a request to stop at once."""


class RankRefused(Exception):
    """A process's ``UserError`` with its id in the text, which is all that torch's agent passes on of an error."""


def launch(
    recipe: Recipe, *, worker: str, say: Callable[[str], None], nodes: Nodes | None = None,
    wait_seconds: float = WAIT_SECONDS, resume: bool, overwrite: bool, **how: Any,
) -> int:  # fmt: skip
    """Check everything that can be checked without the model, start the processes, and wait for them.

    Args:
        recipe: a recipe with an engine other than ``single``.
        worker: the module that each process runs, with the folder of :data:`HOW_FILE` as its argument.
        say: shows one line.
        nodes: the nodes of the run, each started by the same command; None for a single node.
        wait_seconds: how long to wait for the other nodes.
        resume, overwrite, **how: as in :func:`seqtile.train.run.locate`.

    Returns:
        The exit code: 0; 130, 143 or 129 if Ctrl-C, SIGTERM or SIGHUP stopped the run.

    Raises:
        UserError: bad input, found here or by a process that was started.
        RunError: a process failed, or a node is missing or lost.
    """
    from seqtile.train.load import check_split, load_config
    from seqtile.train.run import fitted, locate, require_packages
    from seqtile.train.run_directory import newest_whole

    if nodes is not None and recipe.on_oom == "retry":
        raise UserError("on-oom.retry-on-several-nodes", "--on-oom retry works on a single node, got several; drop it")
    require_packages()
    count = nodes.count if nodes else 1
    recipe = _counted(recipe, count)
    check_split(recipe) if recipe.split > 1 else load_config(recipe)
    recipe, start = locate(recipe, resume=resume, overwrite=overwrite, **how)
    recipe = fitted(recipe, start, say, count)
    settings = " ".join(f"{name}={value}" for name, value in engine_environment(recipe).items())
    say(f"engine {recipe.engine}, {recipe.nproc} processes{': ' if settings else ''}{settings}")
    if nodes is not None:
        limit = f"up to {wait_seconds:g} s"
        say(f"node {nodes.rank} of {count}: waiting for the other nodes at {nodes.rendezvous} ({limit})")
    say("no progress bar under an engine: rank 0 prints about 30 steps, metrics.jsonl has all")
    retries: list[dict[str, Any]] = []
    while True:
        how = {"resume": resume or start is not None, "resume_from": start.name if start else None,
               "overwrite": overwrite, "checked": start is not None, "retries": retries}  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="seqtile-") as name:
            try:
                code = run_ranks(recipe, Path(name), how, worker, nodes, wait_seconds)
                if nodes is not None and code:
                    number = signal.Signals(code - 128)
                    say(f"{number.name} on one of the nodes stopped the run; resume with --resume on each node")
                return code
            except RunError as error:
                start, _ = newest_whole(Path(str(recipe.output)))
                retry_file = Path(name, RETRY_FILE)
                if start is None or not retry_file.is_file():
                    raise
                retry = json.loads(retry_file.read_text())
                say(str(error))
        recipe, overwrite = recipe.changed(**retry["retry"]["recipe"]), False
        retries = [*retry["done"], {**retry["retry"], "how": f"from {start.name}"}]


def engine_environment(recipe: Recipe) -> dict[str, str]:
    """Environment variables of the engine, as ``accelerate launch`` sets them from ``examples/accelerate``."""
    offloaded = recipe.engine_offload
    if recipe.engine == "fsdp2":
        return {
            "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
            "FSDP_OFFLOAD_PARAMS": str(bool(offloaded)).lower(), "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        }  # fmt: skip
    if recipe.engine.startswith("zero"):
        whole = str(recipe.engine == "zero3").lower()
        return {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": recipe.engine[-1],
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu" if "optimizer" in offloaded else "none",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu" if "weights" in offloaded else "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": whole, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": whole,
        }  # fmt: skip
    return {}


def _counted(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe with the number of its processes, on all nodes together, checked against the devices."""
    import torch

    if recipe.engine.startswith("zero"):
        if find_spec("deepspeed") is None:
            raise UserError(
                "engine.deepspeed-missing", f"engine {recipe.engine!r} needs DeepSpeed; run: pip install deepspeed"
            )
        check_build_locks()
    recipe = resolve(recipe)
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if recipe.nproc is None and devices is None:
        raise UserError(
            "engine.no-accelerator",
            f"engine {recipe.engine!r} starts one process per accelerator, and none is available; set --nproc to "
            "run on the CPU",
        )
    recipe = resolve(recipe.model_copy(update={"nproc": recipe.nproc or nodes * (devices or 1)}))
    if (recipe.nproc or 1) % nodes:
        raise UserError(
            "nproc.not-multiple-of-nodes",
            f"got nproc {recipe.nproc} on {nodes} nodes, expected a multiple of {nodes} (it counts the processes of "
            "all nodes)",
        )
    if devices is not None and (recipe.nproc or 1) > nodes * devices:
        raise UserError(
            "nproc.too-few-accelerators",
            f"got nproc {recipe.nproc} on {nodes} node{'s' * (nodes > 1)}, but this node has {devices} accelerators; "
            f"use at most --nproc {nodes * devices}",
        )
    return recipe


def run_ranks(
    recipe: Recipe,
    folder: Path,
    how: dict[str, Any],
    worker: str,
    nodes: Nodes | None = None,
    wait_seconds: float = WAIT_SECONDS,
) -> int:
    """Start this node's processes and wait for them; return the exit code of a run that ended in order.

    Raises:
        UserError, RunError: the error of the process that failed first.
        StoppedAtOnce: a signal ended the processes before they could save.
    """
    save_recipe(recipe, folder / RECIPE_FILE)
    worker_arguments = {**how, "front": os.getpid(), "signals": stop_signals()}
    (folder / HOW_FILE).write_text(json.dumps(worker_arguments), encoding="utf-8")
    processes = (recipe.nproc or 1) // (nodes.count if nodes else 1)
    config = _agent_config(processes, folder, nodes, wait_seconds)
    # "-P": no module of the user's folder hides Python's own.
    command = [*_changed_environment(recipe, processes), sys.executable, "-P", "-u", "-m", worker, str(folder)]
    results = list[BaseException | None]()
    agent = threading.Thread(target=_run_agent, args=(config, command, results), daemon=True)
    shared = nearest_folder(recipe) / SHARED_FILE
    request, deadline, urgent = new_request(), math.inf, 0

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal deadline, urgent
        urgent += request.is_urgent(number)
        if not _send(folder, number):
            raise StoppedAtOnce(number)  # no process has started
        if urgent:
            deadline = min(deadline, time.monotonic() + (0 if urgent > 1 else GRACE_SECONDS))

    with handle_signals(stop_signals(), pass_on):
        try:
            if nodes is not None and nodes.rank == 0:
                shared.write_text(secrets.token_hex())  # lets other nodes check that they share this directory
            agent.start()
            while agent.is_alive():
                agent.join(0.1)
                if time.monotonic() >= deadline:
                    _send(folder, signal.SIGKILL)
        finally:
            _send(folder, signal.SIGKILL)
            if nodes is not None and nodes.rank == 0:
                shared.unlink(missing_ok=True)
    error = results[0]
    if error is not None:
        if urgent and request.first is not None:
            raise StoppedAtOnce(request.first)
        raise _error_to_raise(error, request.first, recipe, nodes, wait_seconds)
    stopped = folder / STOPPED_FILE
    return int(stopped.read_text()) if stopped.is_file() else 0


def _agent_config(processes: int, folder: Path, nodes: Nodes | None, wait_seconds: float) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=nodes.count if nodes else 1,
        max_nodes=nodes.count if nodes else 1,
        nproc_per_node=processes,
        run_id="seqtile",
        rdzv_backend="static" if nodes else "c10d",
        rdzv_endpoint=nodes.rendezvous if nodes else "localhost:0",
        rdzv_configs={"rank": nodes.rank, "timeout": math.ceil(wait_seconds)} if nodes else {},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )


def _run_agent(config: LaunchConfig, command: Sequence[str], results: list[BaseException | None]) -> None:
    """Run the workers to their end; append None, or the agent's error, to ``results``."""
    from torch.distributed.launcher.api import elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")  # our one sentence replaces its report of a failure
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    try:
        with blocked_signals():  # signals wait until a worker handles them
            elastic_launch(config, "env")(*command)
        results.append(None)
    except BaseException as error:  # noqa: BLE001 (run_ranks raises it, or another in its place)
        results.append(error)


def _changed_environment(recipe: Recipe, processes: int) -> list[str]:
    """Assignments of the environment variables that differ between a worker and this process."""
    # PyTorch reads the number of threads when it is imported.
    threads = {"OMP_NUM_THREADS": str(max(1, cpu_cores() // processes))}
    environment = threads | dict(os.environ) | engine_environment(recipe)
    # Show errors of collectives, but not torch's stack traces of a store that does not respond.
    environment["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL").replace("FATAL", "ERROR")
    return [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]


def _error_to_raise(
    error: BaseException, asked: int | None, recipe: Recipe, nodes: Nodes | None, wait_seconds: float
) -> BaseException:
    """What the agent's error means."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        return _first_failure(error.failures, asked, Path(str(recipe.output)))
    if isinstance(error, DistError) and nodes is not None:
        if "EADDRINUSE" in str(error):
            return UserError(
                "nodes.port-in-use",
                f"node 0 cannot listen at {nodes.rendezvous}: the port is in use; choose another port, the same on "
                "each node",
            )
        return RunError(
            f"the {nodes.count} nodes did not all connect to {nodes.rendezvous} within {wait_seconds:g} s; run the "
            f"same command on each, with its own --node-rank ({str(error).splitlines()[0]})"
        )
    return error


def _first_failure(failures: Mapping[int, ProcessFailure], asked: int | None, output: Path) -> BaseException:
    """The error to raise for the process that failed first.

    Others fail when the connection to it breaks, or are ended by the agent, in the same second.
    """
    from seqtile.train.run_directory import newest_whole

    def message_of(failure: ProcessFailure) -> str:
        message: Any = failure.message
        return str(message["message"] if isinstance(message, dict) else message)

    def was_ended(failure: ProcessFailure) -> bool:
        return message_of(failure).startswith("StoppedAtOnce") or failure.exitcode == -signal.SIGTERM

    def lost_another(failure: ProcessFailure) -> bool:
        message = message_of(failure)
        return message.startswith("Dist") or "gloo" in message or "NCCL" in message

    def order(rank: int) -> tuple[bool, bool, int, int]:
        failure = failures[rank]
        return was_ended(failure), lost_another(failure), failure.timestamp, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    name, _, sentence = message_of(failure).partition(": ")
    if name == RankRefused.__name__:
        code, _, sentence = sentence.partition(": ")
        return UserError(code, sentence)
    if name in ("RunError", "OutOfMemory"):
        return RunError(sentence)
    if was_ended(failure) or (asked is not None and lost_another(failure)):
        return StoppedAtOnce(asked or signal.SIGTERM)
    if lost_another(failure):
        checkpoint, _ = newest_whole(output)
        saved = f"the last complete checkpoint is {checkpoint}" if checkpoint else "no checkpoint was saved"
        return RunError(
            f"rank {rank} lost its connection to a process on another node, which failed first ({sentence}); "
            f"{saved}; run with --resume on each node"
        )
    if isinstance(failure.message, dict):
        return RunError(f"rank {rank} failed first:\n{failure.message['extraInfo']['py_callstack']}")
    ended = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return RunError(
        f"rank {rank} was ended by {ended} without an error; --resume continues from the last complete checkpoint"
    )


def _send(folder: Path, number: int) -> bool:
    """Send a signal to every worker of ``folder`` that this process has started; SIGKILL to their own children too."""
    running = False
    for child in psutil.Process().children():
        try:
            if child.cmdline()[-1:] == [str(folder)] and child.status() != psutil.STATUS_ZOMBIE:
                running = True
                os.killpg(child.pid, number) if number == signal.SIGKILL else child.send_signal(number)
        except (psutil.Error, ProcessLookupError, PermissionError):
            pass  # it has ended
    return running
