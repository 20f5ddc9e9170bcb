"""Records what ``seqtile train`` shows on a terminal, as pictures for ``docs/running.md``: ``python docs/record.py``.

Real runs on a pseudo-terminal, of the tiny model that the tests train; about a minute.
"""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "recordings"
COLUMNS, ROWS = 108, 40

PREPARE = """
import sys, pathlib, tiny_run
folder = pathlib.Path(sys.argv[1])
tiny_run.save_model(folder / "llama-tiny")
ask = {"role": "user", "content": "Who sees the house?"}
rows = [{"messages": [ask, {"role": "assistant", "content": row["text"]}]} for row in tiny_run.text_rows(400)]
tiny_run.write_jsonl(folder / "chat.jsonl", rows)
rows[17] = {"messages": [ask, {"role": "assistant", "content": None}]}
tiny_run.write_jsonl(folder / "broken.jsonl", rows)
"""


class Screen:
    """The lines of a terminal, with their colours: what rich's displays need of one."""

    def __init__(self) -> None:
        self.lines, self.row, self.fresh = [""], 0, False
        self._rest = ""

    def write(self, text: str) -> None:
        """Take what a program sent."""
        text = self._rest + text
        cut = re.search(r"\x1b(\[\??[0-9;]*)?$", text)  # in the middle of a sequence
        self._rest = cut[0] if cut else ""
        text = text.removesuffix(self._rest)
        for part in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+|\x1b", text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.fresh = True
            elif part.endswith("A") and part.startswith("\x1b"):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part.endswith("K") and part.startswith("\x1b"):
                self.lines[self.row] = ""
            elif not part.startswith("\x1b[") or part.endswith("m"):
                if self.fresh:  # rich draws whole lines
                    self.lines[self.row] = ""
                self.lines[self.row] += part
                self.fresh = False

    def save(self, name: str, command: str) -> None:
        """Write the picture."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi("\n".join(self.lines).rstrip()))
        svg = console.export_svg(title="seqtile train", unique_id=name)
        # No font from elsewhere: the reader's own.
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S), encoding="utf-8")


def record(command: str, folder: Path, watch: Callable[[Screen, int], None] | None = None) -> Screen:
    """Run ``seqtile COMMAND`` on a terminal of its own; ``watch`` sees the screen after each piece, and the process."""
    screen = Screen()
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "COLUMNS": str(COLUMNS),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "seqtile.cli", *command.split()[1:]],
        stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        while chunk := os.read(master, 65536):
            screen.write(chunk.decode(errors="replace"))
            if watch is not None:
                watch(screen, process.pid)
    except OSError:
        pass  # the other side is closed
    os.close(master)
    process.wait()
    return screen


def main() -> None:
    """Make every picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
        os.environ["PYTHONPATH"] = paths
        subprocess.run([sys.executable, "-c", PREPARE, name], check=True, capture_output=True)
        command = "seqtile train --model llama-tiny --dataset chat.jsonl --max-length 128 --tile 32 --steps 300"
        interrupted = False

        def interrupt(screen: Screen, pid: int) -> None:
            nonlocal interrupted
            if not interrupted and any("step 150/300" in line for line in screen.lines):
                bar = [line for line in screen.lines if "training" in line and "/300" in line]
                if bar:
                    screen.save("run", command)
                    os.kill(pid, signal.SIGINT)
                    interrupted = True

        record(command, folder, interrupt)
        again = "seqtile train --resume --output runs/llama-tiny"
        record(again, folder).save("resumed", again)
        failed = "seqtile train --model llama-tiny --dataset broken.jsonl --max-length 128"
        record(failed, folder).save("failed", failed)


if __name__ == "__main__":
    main()
