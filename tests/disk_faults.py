"""Disks that are full or read-only, for one process: mounted where no other process sees them (Linux)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18


def can_mount() -> bool:
    """Whether a process may have mounts of its own here; tried in a child."""
    child = os.fork() if hasattr(os, "fork") and Path("/proc/self/ns/mnt").exists() else -1
    if child == 0:
        try:
            _own_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return child > 0 and os.waitpid(child, 0)[1] == 0


def small(folder: Path, size: int) -> None:
    """Put a disk of ``size`` bytes at ``folder``."""
    _own_mounts()
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size}")


def full_with(folder: Path, room: int) -> None:
    """Put ``folder`` on a disk that holds what is in it, and at most ``room`` bytes more."""
    _own_mounts()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    page = os.sysconf("SC_PAGE_SIZE")
    size = sum(-(-len(content) // page) * page for content in files.values())
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size + room // page * page}")
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_only(folder: Path) -> None:
    """Make ``folder`` read-only."""
    _own_mounts()
    _mount(str(folder), folder, "", BIND, "")
    _mount("none", folder, "", BIND | REMOUNT | READ_ONLY, "")


def read_only_at(folder: Path, step: int) -> None:
    """Make ``folder`` read-only when the checkpoint of ``step`` is begun."""
    from seqtile.train.trainer import Trainer

    _own_mounts()
    save = Trainer._save_checkpoint

    def saving(self: Any, *args: Any) -> None:
        if self.state.global_step == step:
            _mount(str(folder), folder, "", BIND, "")  # now: the mount of the open lock file is busy
            _mount("none", folder, "", BIND | REMOUNT | READ_ONLY, "")
        save(self, *args)

    Trainer._save_checkpoint = saving  # type: ignore[method-assign]


def _own_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), "", RECURSIVE | PRIVATE, "")


def _mount(source: str, target: Path, kind: str, flags: int, data: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [text.encode() or None for text in (source, str(target), kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount at {target}: {os.strerror(number)}")
