"""What marking a checkpoint whole, and checking it on a resume, costs: ``python benchmarks/checkpoint_digests.py``.

Writes a checkpoint of several files into a folder (an argument, or the system's for temporary files), marks it as a run
does, and reads it as a resume does, from memory where that holds it.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from seqtile.devices import cpu_cores, package_version
from seqtile.train.run_directory import CheckpointMark, why_not_whole, write_mark

FILES, PIECE, PIECES = 4, 1 << 26, 4
GB = 10**9


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        piece = os.urandom(PIECE)
        started = time.perf_counter()
        for number in range(FILES):
            with (folder / f"{number}.bin").open("wb") as file:
                for _ in range(PIECES):
                    file.write(piece)
                os.fsync(file.fileno())
        written = time.perf_counter()
        write_mark(folder, CheckpointMark(step=1))
        marked = time.perf_counter()
        assert why_not_whole(folder) == ""
        checked = time.perf_counter()
        assert why_not_whole(folder, digests=False) == ""
    size = FILES * PIECES * PIECE / GB
    print(
        f"{size:.2f} GB in {FILES} files: written and flushed {(written - started) / size:.2f} s/GB, marked "
        f"{(marked - written) / size:.2f} s/GB, checked {(checked - marked) / size:.2f} s/GB ({platform.machine()}, "
        f"{cpu_cores()} cores, Python {platform.python_version()}, xxhash {package_version('xxhash')}, "
        f"{datetime.now(UTC).date()})"
    )


if __name__ == "__main__":
    main()
