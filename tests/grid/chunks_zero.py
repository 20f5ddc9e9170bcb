"""Chunks through decoder layers under DeepSpeed."""

from __future__ import annotations

import torch

from grid import zero12
from grid.chunks import ENGINE, cases_of
from grid.zero3 import STINGY

__all__ = ["CASES", "ENGINE", "start"]

CASES = [
    *cases_of("zero12-1", {**zero12.ONE, "overlap_comm": True}, dtype=torch.float32),
    *cases_of("zero12-2", zero12.TWO, dtype=torch.float32),
    *cases_of("zero3", STINGY, dtype=torch.float32),
]

start = zero12.start
