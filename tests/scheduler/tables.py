"""A fake producer worker: executes its orders on the words of its lease table."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.protocol.ids import EMPTY, SlotState, epoch_from_text, slot_word
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.scheduler.producer.lease import LeaseOrders


@dataclass
class WorkerTable:
    """Slots as consumers read them, and the requests that this worker must report.

    Attributes:
        held: requests that were announced and not yet reported, with slot and epoch.
        reported: requests whose slot is clear, in order; each once.
    """

    slots: int
    words: list[int] = field(default_factory=list)
    held: dict[str, tuple[int, str]] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words = [EMPTY] * self.slots

    def carry_out(self, orders: LeaseOrders) -> None:
        """In the order that `kvferry.protocol.orders` prescribes."""
        for end in orders.ends:
            self._end(end)
        for opened in orders.opens:
            assert self.words[opened.slot] == EMPTY, "a slot was reused without being cleared"
            self.words[opened.slot] = _word(opened, SlotState.COMPUTING)
        for hold in orders.holds:
            assert self.words[hold.slot] == _word(hold, SlotState.COMPUTING)
            self.words[hold.slot] = _word(hold, SlotState.READY)
            self.held[hold.request_id] = (hold.slot, hold.epoch)

    def done(self, request_id: str) -> None:
        """Every worker of the consumer has read its blocks."""
        slot, _ = self.held.pop(request_id)
        self.words[slot] = EMPTY
        self.reported.append(request_id)

    def _end(self, end: LeaseEnd) -> None:
        if self.words[end.slot] >> 4 == epoch_from_text(end.epoch):
            self.words[end.slot] = EMPTY
        if self.held.get(end.request_id) == (end.slot, end.epoch):
            del self.held[end.request_id]
            self.reported.append(end.request_id)


def _word(order: LeaseOpen | LeaseHold, state: SlotState) -> int:
    return slot_word(epoch_from_text(order.epoch), state)
