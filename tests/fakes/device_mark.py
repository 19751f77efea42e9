"""A device, and marks in its work, that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvferry.worker.device import Device


@dataclass
class FakeMark:
    """Reached once `over` is set.

    Attributes:
        asked: how often it was asked.
    """

    over: bool = False
    asked: int = 0

    def reached(self) -> bool:
        self.asked += 1
        return self.over


@dataclass
class FakeClock:
    """A device's clock, which remembers its marks.

    Attributes:
        over: whether a mark that is made is reached already.
    """

    over: bool = False
    marks: list[FakeMark] = field(default_factory=list)

    def mark(self) -> FakeMark:
        self.marks.append(FakeMark(self.over))
        return self.marks[-1]

    def reach(self) -> None:
        """The device finishes what was launched; what is launched from now on is finished at once."""
        self.over = True
        for mark in self.marks:
            mark.over = True


class ClockedDevice(Device):
    """Host memory, and marks of a clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(torch.device("cpu"))
        self._clock = clock

    def mark(self) -> FakeMark:
        return self._clock.mark()
