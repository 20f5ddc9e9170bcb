"""``verify`` under ZeRO-2 and 3."""

from grid import zero12
from grid.verify import ENGINE, verified

CASES = [*verified("zero2"), *verified("zero3")]
start = zero12.start
__all__ = ["CASES", "ENGINE", "start"]
