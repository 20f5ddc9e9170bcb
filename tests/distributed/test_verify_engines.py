"""``seqtile verify --engine`` starts the processes; ``grid.verify`` has what they find under every engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from unit.test_cli_verify import CONFIG


def test_the_command_starts_the_processes(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    command = ["seqtile", "verify", "--model", str(tmp_path), "--engine", "ddp", "--nproc", "2", "--tokens", "100"]
    flags = ["--lora", "r=4,dropout=0.2", "--dtype", "bfloat16", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one object, nothing else
    assert found["verdict"] == "same" and found["engine"] == "ddp" and found["with_dropout"]["compared"] == 29
    assert found["notes"][0] == "under ddp on 2 processes; costs are per process"
