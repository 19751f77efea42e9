"""Knowing when the device has finished what was launched so far.

The step thread marks, the transfer thread asks. Neither waits.
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
