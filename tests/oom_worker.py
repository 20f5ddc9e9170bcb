"""The worker of ``seqtile train --engine`` with faults: a rank runs out of memory where ``OOM_FAULTS`` says, once each.

``OOM_FAULTS`` is ``FOLDER`` and then, separated by spaces, ``RANK:PHASE:STEP`` in the order in which they happen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from oom_faults import Fault
from seqtile._compat import end_process
from seqtile.cli import worker
from seqtile.planner import chooser
from seqtile.train import retry
from seqtile.train import run as runs

chooser.SMALLEST_TILE, retry.TILE_STEP = 1, 2


def main(folder: Path) -> int:
    place, *words = os.environ["OOM_FAULTS"].split()
    train = runs.train
    faults = []
    for word in words:
        rank, phase, step = word.split(":")
        if rank == os.environ["RANK"]:
            faults.append(Fault(phase, int(step), flag=Path(place, word.replace(":", "-"))))

    def with_faults(*args: Any, callbacks: Any = (), **named: Any) -> Any:
        return train(*args, callbacks=[*callbacks, *faults], **named)

    runs.train = with_faults
    return worker.main(folder)


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
