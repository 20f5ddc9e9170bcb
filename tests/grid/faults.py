"""No engine: cases that fail in every way a rank can, to test the launcher with."""

from __future__ import annotations

import os
import time

from grid.cases import Case
from grid.ddp import Ddp

CASES = [Case(name, "fault") for name in ("passes", "raises", "dies", "hangs", "passes-again")]


class Faulty(Ddp):
    """DDP whose rank 1 does what the case's name says."""

    def wrap(self, rank: int) -> None:
        super().wrap(rank)
        if rank == 1 and self.case.name == "raises":
            raise RuntimeError("planted")
        if rank == 1 and self.case.name == "dies":
            os._exit(9)
        if rank == 1 and self.case.name == "hangs":
            time.sleep(1000)


ENGINE = Faulty
