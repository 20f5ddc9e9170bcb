"""A process of a launch that trains nothing and imports no torch: it ends as ``ends`` of its orders says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    end = json.loads((folder / "how.json").read_text())["ends"][rank]
    if end == "hang":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        (folder / f"{rank}.hangs").touch()
        time.sleep(600)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    details = {"py_callstack": f"Traceback of rank {rank}", "timestamp": "1"}
    error = {"message": {"message": end, "extraInfo": details}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))
    sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
