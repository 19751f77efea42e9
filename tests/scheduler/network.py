"""A network that delivers late, twice, out of order, or never."""

from __future__ import annotations

import random
from collections.abc import Callable


class Network:
    """Delivers late, twice, out of order, or never."""

    def __init__(self, draw: random.Random, *, loss: float, perfect: bool) -> None:
        self.draw = draw
        self.loss = loss
        self.perfect = perfect
        self._flying: list[tuple[int, Callable[[], None]]] = []

    def is_quiet(self) -> bool:
        return not self._flying

    def send(self, deliver: Callable[[], None]) -> None:
        if self.perfect:
            self._flying.append((0, deliver))
            return
        while self.draw.random() >= self.loss:
            self._flying.append((self.draw.choice((0, 0, 1, 5, 30)), deliver))
            if self.draw.random() < 0.9:
                return

    def tick(self) -> None:
        if not self.perfect:
            self.draw.shuffle(self._flying)
        due = [deliver for ticks, deliver in self._flying if ticks <= 0]
        self._flying = [(ticks - 1, deliver) for ticks, deliver in self._flying if ticks > 0]
        for deliver in due:
            deliver()
