"""Which process a peer is, and whether it has ended; for processes of this machine."""

from __future__ import annotations

import os
import pathlib


def _start_time(process: int) -> str | None:
    try:
        # The process's name, in parentheses, may hold spaces; state is the 3rd field, the start time the 22nd.
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def describe() -> dict:
    """This process, as another one of the same machine can look it up."""
    return {"machine": _machine(), "id": os.getpid(), "start": _start_time(os.getpid())}


def has_ended(process: dict) -> bool:
    """True only for a process of this machine that is gone; of another machine nothing is known."""
    return process.get("machine") == _machine() and _start_time(int(process["id"])) != process["start"]
