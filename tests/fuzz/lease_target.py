"""The lease table under arbitrary notifications, beside the orders of its own engine."""

from __future__ import annotations

import sys

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import EMPTY, Epoch, epoch_to_text
from kvferry.protocol.notifications import Done, decode_notification, encode_notification
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.worker.leases import MAX_CONSUMERS, LeaseTable
from tests.fakes.device_mark import FakeMark
from tests.fuzz.source import Source

SLOTS = 3
MOST_BYTES = 4096 // 8 + 64
"""Of the notifications of one consumer: a bit for each worker."""


def leases(data: bytes) -> None:
    """A history of orders and notifications. No lease ends without its epoch, and the table's memory stays small."""
    source = Source(data)
    table = LeaseTable(SLOTS)
    live: dict[int, Epoch] = {}
    held: set[int] = set()
    drawn = 0
    while source:
        slot = source.number(SLOTS)
        what = source.number(8)
        if what == 0 and slot not in held:
            drawn += 1
            live[slot] = Epoch(drawn)
            table.open(LeaseOpen(slot=slot, epoch=epoch_to_text(live[slot])))
        elif what == 1 and slot in live and slot not in held:
            order = LeaseHold(request_id=f"r{live[slot]}", slot=slot, epoch=epoch_to_text(live[slot]))
            finished = table.hold(order, FakeMark(over=True))
            table.advance()
            held.add(slot)
            _over(finished, slot, live, held)
        elif what == 2 and slot in live:
            name = epoch_to_text(live[slot])
            was_held = slot in held
            finished = table.end(LeaseEnd(request_id="any", slot=slot, epoch=name))
            assert (finished is not None) == was_held
            live.pop(slot)
            held.discard(slot)
        else:
            _notify(source, table, slot, live, held)
        assert table.held() == len(held)
        for index in range(SLOTS):
            assert (table.words[index] != EMPTY) == (index in live), "a lease ended, or began, by itself"
            assert table.words[index] == EMPTY or int(table.words[index]) >> 4 == live[index]
        for lease in table._leases.values():
            assert len(lease.notifications) <= MAX_CONSUMERS
            assert all(sys.getsizeof(sent.workers) <= MOST_BYTES for sent in lease.notifications.values())


def _notify(source: Source, table: LeaseTable, slot: int, live: dict[int, Epoch], held: set[int]) -> None:
    """One with the right epoch, or another's, or none; of any consumer, worker and count."""
    epoch = Epoch(source.pick((live.get(slot, 1), live.get((slot + 1) % SLOTS, 2), 2**60 - 1)) or 1)
    done = Done(
        slot=slot,
        epoch=epoch_to_text(epoch),
        consumer=f"{source.number(64):032x}",
        worker=source.pick((0, 1, 2, 3, 4095)),
        expected=source.pick((1, 2, 3, 4096)),
    )
    knows = live.get(slot) == epoch
    try:
        finished = table.done(decode_notification(encode_notification(done)))
    except KeyError:
        assert not knows
        return
    except InvalidMessage:
        assert knows
        assert len(table._leases[slot].notifications) == MAX_CONSUMERS
        return
    assert knows, "a notification without the lease's epoch was taken"
    assert finished is None or slot in held, "reported before it was held"
    _over(finished, slot, live, held)


def _over(finished: str | None, slot: int, live: dict[int, Epoch], held: set[int]) -> None:
    if finished is not None:
        assert finished == f"r{live.pop(slot)}"
        held.discard(slot)
