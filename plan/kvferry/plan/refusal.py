"""Why two engines cannot be paired: every reason at once, each with what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.errors import KvferryError


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason.

    Attributes:
        field: what differs, e.g. `tensor_parallel_size`.
        producer, consumer: its value on either side, as text.
        change: what an operator can do.
    """

    field: str
    producer: str
    consumer: str
    change: str

    def __str__(self) -> str:
        return f"{self.field}: producer {self.producer}, consumer {self.consumer}; {self.change}"


class PlanRefused(KvferryError):
    """Two engines that cannot be paired. `reasons` has all of them."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(f"({number}) {reason}" for number, reason in enumerate(self.reasons, 1)))
