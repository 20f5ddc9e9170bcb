"""One rank: runs the named cases in one process group, and writes a line per case.

Ends at the first case that fails: whatever it left behind must not colour the next.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

TIMEOUT = 300
"""Seconds that a rank waits for the other in a collective."""


def _end_with(parent: int) -> None:
    """Nobody waits for a rank whose launcher was killed, and it may hold the lock of a build."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(3)


def main(rank: int, port: int, folder: str, names: list[str]) -> int:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    import eager_kernels

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    eager_kernels.install()  # what every engine meets on an accelerator
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    started = set()
    with Path(folder, f"{rank}.jsonl").open("a", encoding="utf-8", buffering=1) as lines:
        for name in names:
            engine, _, case = name.partition(":")
            module = importlib.import_module(f"grid.{engine}")
            if engine not in started and hasattr(module, "start"):
                module.start()
            started.add(engine)
            gc.freeze()  # or each case's collection goes through all that the libraries hold
            torch.manual_seed(rank)
            dist.barrier()
            start, problem = time.time(), ""
            lines.write(json.dumps({"begins": name, "time": start}) + "\n")
            try:
                module.ENGINE.run(next(listed for listed in module.CASES if listed.name == case), rank)
            except BaseException:  # noqa: BLE001  # whatever it is, the parent shows it
                problem = traceback.format_exc()
            lines.write(json.dumps({"case": name, "problem": problem, "start": start, "time": time.time()}) + "\n")
            if problem:
                return 1
            gc.collect()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of an engine must not hold the process back
