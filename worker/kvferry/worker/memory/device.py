"""The device that the caches are on: which threads use it, and when it has finished what was launched so far.

The step thread marks, the transfer thread asks. Neither waits. A thread of kvferry that uses the device calls
`use_device` first; the step thread is the engine's, which has set it.
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
    """The CPU: what was launched has finished."""

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
    """The clock of a device; every device that is not CUDA is taken to be synchronous."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def use_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; to be called before the thread uses it in any way.

    A thread begins with GPU 0: its first call, an event's query as well, would make a context there, of hundreds of
    megabytes for each worker of the node.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for what the calling thread has launched on its current stream; only while the caches are registered."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
