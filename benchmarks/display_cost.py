"""What showing and keeping a step costs: ``python benchmarks/display_cost.py``, on a terminal or into a file.

Times the callback that makes a record, writes ``metrics.jsonl`` and tells the display, for steps that take no time.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from seqtile.cli.show import Progress
from seqtile.devices import package_version
from seqtile.train.metrics import Metrics

STEPS = 2000


def main() -> None:
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=STEPS, epoch=0.0)
    logs = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-5, "entropy": 1.0, "mean_token_accuracy": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress()
        metrics = Metrics(Path(folder), progress)
        metrics.on_train_begin(None, state, None)
        started = time.perf_counter()
        for step in range(1, STEPS + 1):
            state.global_step = step
            metrics.on_log(None, state, None, logs={**logs, "num_tokens": 100.0 * step})
        seconds = (time.perf_counter() - started) / STEPS
        metrics.on_train_end(None, state, None)
    where = "on a terminal" if progress.console.is_interactive else "not on a terminal"
    print(
        f"{seconds * 1e6:.0f} us per logged step {where}: 2 % of a step of {seconds * 50e3:.0f} ms "
        f"({platform.machine()}, Python {platform.python_version()}, torch {package_version('torch')}, "
        f"{datetime.now(UTC).date()})",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
