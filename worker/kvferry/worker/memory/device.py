"""The device of the caches: selecting it for a thread, and marks that are reached when launched work has finished.

The step thread sets marks, the transfer thread polls them. Neither waits. A thread of kvferry that uses the device
calls `use_device` first; the step thread is the engine's, which has set it.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMark(Protocol):
    """A point in the device's work."""

    def reached(self) -> bool:
        """Whether everything launched before the mark has finished. Never waits."""
        ...


class DeviceClock(Protocol):
    """Marks points in one device's work."""

    def mark(self) -> DeviceMark:
        """Mark everything launched so far on the calling thread's current stream."""
        ...


class _Reached:
    def reached(self) -> bool:
        return True


class HostClock:
    """The CPU, which is synchronous: every mark is reached."""

    _reached = _Reached()

    def mark(self) -> DeviceMark:
        return self._reached


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaClock:
    """A CUDA device: an event on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> DeviceMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)


def clock_for(device: torch.device) -> DeviceClock:
    """The clock of a device; a device that is not CUDA is assumed to be synchronous."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def use_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; to be called before the thread uses it in any way.

    A thread begins with GPU 0: its first call, even an event's query, would create a context there, of hundreds of
    megabytes for each worker of the node.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the calling thread's current stream; it blocks, so call it only while the caches are registered."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
