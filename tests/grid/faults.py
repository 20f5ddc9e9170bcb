"""No engine: cases that fail in every way a rank can, to test the launcher with; they need nothing but torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Fault:
    name: str


CASES = [Fault(name) for name in ("passes", "raises", "dies", "hangs", "passes-again")]


class Faulty:
    """Rank 1 does what the case's name says; rank 0 waits for it in a collective."""

    @staticmethod
    def run(case: Fault, rank: int) -> None:
        if rank == 1 and case.name == "raises":
            raise RuntimeError("planted")
        if rank == 1 and case.name == "dies":
            os._exit(9)
        if rank == 1 and case.name == "hangs":
            time.sleep(1000)
        dist.barrier()


ENGINE = Faulty
