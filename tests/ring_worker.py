"""The worker of ``seqtile train --cp-size`` on the CPU, whose attention PyTorch's ring does not take by itself."""

import sys
from pathlib import Path

from grid.context import open_ring_to_the_cpu
from seqtile.cli import worker

if __name__ == "__main__":
    open_ring_to_the_cpu()
    worker._end(worker.main(Path(sys.argv[1])))
