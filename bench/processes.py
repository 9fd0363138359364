"""Other processes, as Linux lists them: which ones run, and how much memory they use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LISTED = Path("/proc/self/stat").exists()  # Linux


def children(parent: int) -> set[int]:
    """Return the running child processes of a process.

    ``/proc/PID/task/*/children`` is not read: threads end while the folder is read, and their children go to other threads.
    """
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, ppid, *_ = file.read_text().rpartition(")")[2].split()
            if int(ppid) == parent and state != "Z":
                found.add(int(file.parent.name))
    return found


def running(pid: int) -> bool:
    """Return whether a process runs. A process that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident(pid: int | str = "self") -> int:
    """Return the resident bytes of a process, by default of this one; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
