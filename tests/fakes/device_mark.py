"""A device mark that the test moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeMark:
    """Reached once `over` is set."""

    over: bool = False

    def reached(self) -> bool:
        return self.over
