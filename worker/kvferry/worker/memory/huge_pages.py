"""Huge pages under caches in host memory.

Reads of another process's memory go page by page, and so do the processor's when it computes attention: with pages of
2 MiB instead of 4 KiB there are fewer to look up. PyTorch's memory is in small pages unless `THP_MEM_ALLOC_ENABLE=1` is
in its environment; Linux 6.1 can still replace them by huge ones while they are in use (madvise(2), MADV_COLLAPSE).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.worker.fabric.port import MemoryKind, Region

logger = logging.getLogger(__name__)

_MADV_COLLAPSE = 25
"""Python's mmap does not name it."""

_TRIES = 3
"""A page that the kernel is busy with cannot be moved at that moment (EAGAIN), but soon after."""

_AT_ONCE_BYTES = 128 << 20
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")

Advise = Callable[[int, int, int], int]
"""madvise(2): address, length in bytes, advice. Returns 0, or the error's number where the system refuses."""


@dataclass(frozen=True, slots=True)
class Collapsed:
    """The result of `use_huge_pages`.

    Attributes:
        asked_bytes: bytes that could lie in huge pages.
        huge_bytes: of these, the bytes that do now, by the system's answer.
        seconds: time that it took.
    """

    asked_bytes: int = 0
    huge_bytes: int = 0
    seconds: float = 0.0


def use_huge_pages(
    regions: Sequence[Region],
    budget_s: float,
    *,
    advise: Advise | None = None,
    clock: Callable[[], float] = time.monotonic,
    settings: Path = _SETTINGS,
) -> Collapsed:
    """Put host memory into huge pages within a time limit; the kernel may replace the remaining pages later by itself.

    It is optional: memory that the system cannot or will not move stays as it is. Call it before the memory is
    registered, since a network card pins its pages. Memory outside the regions is not changed, and none at all where
    the administrator has switched transparent huge pages off.

    Args:
        budget_s: seconds after which no other part is begun; a gigabyte takes 1.6 to 1.9 s on two slow cores, and
            no time when it lies in huge pages already. 0 or less: nothing is done.
        advise, clock, settings: for tests.
    """
    page_bytes = _huge_page_bytes(settings)
    if budget_s <= 0 or not page_bytes:
        return Collapsed()
    whole = [part for part in (_inside(one, page_bytes) for one in regions if one.kind is MemoryKind.DRAM) if part]
    if not whole:
        return Collapsed()
    advise = advise or _madvise()
    began_s = clock()
    huge_bytes = 0
    step_bytes = max(page_bytes, _AT_ONCE_BYTES - _AT_ONCE_BYTES % page_bytes)
    for start, end in whole:
        if advise(start, end - start, mmap.MADV_HUGEPAGE):
            continue
        for address in range(start, end, step_bytes):
            if clock() - began_s >= budget_s:
                break
            length = min(step_bytes, end - address)
            huge_bytes += length * _collapse(advise, address, length)
    done = Collapsed(sum(end - start for start, end in whole), huge_bytes, clock() - began_s)
    logger.info(
        "%.0f of %.0f MB of host memory are in huge pages now; that took %.2f s",
        done.huge_bytes / 1e6,
        done.asked_bytes / 1e6,
        done.seconds,
    )
    return done


def _collapse(advise: Advise, address: int, length: int) -> bool:
    """Whether the system has put the memory into huge pages."""
    for _ in range(_TRIES):
        refused = advise(address, length, _MADV_COLLAPSE)
        if refused != errno.EAGAIN:
            return not refused
    return False


def _inside(region: Region, page_bytes: int) -> tuple[int, int] | None:
    """Start and end of the whole huge pages within a region; None if there are none."""
    start = -(-region.address // page_bytes) * page_bytes
    end = (region.address + region.length) // page_bytes * page_bytes
    return (start, end) if start < end else None


def _huge_page_bytes(settings: Path) -> int:
    """The size of a huge page; 0 where there are none, or where they are switched off."""
    try:
        if "[never]" in (settings / "enabled").read_text():
            return 0
        return int((settings / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _madvise() -> Advise:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise.restype = ctypes.c_int

    def advise(address: int, length: int, advice: int) -> int:
        return 0 if libc.madvise(address, length, advice) == 0 else ctypes.get_errno()

    return advise
