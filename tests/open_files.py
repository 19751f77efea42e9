"""Which files this process has open."""

from __future__ import annotations

import contextlib
import os


def open_files() -> frozenset[tuple[str, str]]:
    """The number and target of each open file.

    Tests compare sets, not numbers: what an earlier test of the process has left may be closed at any moment, when
    Python collects it, and must not count.
    """
    files = set()
    for number in os.listdir("/proc/self/fd"):
        # Closed since: the file of this very listing, for one.
        with contextlib.suppress(FileNotFoundError):
            files.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(files)
