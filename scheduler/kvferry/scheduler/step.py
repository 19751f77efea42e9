"""The scheduler's half of a step: apply what came over the side channel, then collect the orders of both ledgers."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger

LeaseMessage = Renew | Release

MAX_WAITING_LEASES = 1 << 16
"""Most waiting entries, of a few hundred bytes each; one message may name 4,096 leases."""

_LEASES_AT_ONCE = 64


class ReceivedLease(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: the boot that the message was addressed to.
        received_s: time of arrival on the engine's `AwakeClock`; None without a clock.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    received_s: float | None


class LeaseInbox:
    """Renewals and releases that wait for the next step. Filled by the listener's thread, emptied by the engine's.

    An idle engine takes no steps for minutes, while consumers renew with every heartbeat. So one entry is kept for each
    lease and kind: a renewal replaces the one before it. The time of its arrival is kept, since it counts from there.
    """

    def __init__(self) -> None:
        self._received: dict[tuple[type[LeaseMessage], str, LeaseName], float | None] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Add all leases of a message. False if too many wait already; then none is added."""
        keys = [(type(message), message.boot, name) for name in dict.fromkeys(message.leases)]
        # Without the lock: the engine's thread only ever takes all of it, and then there are fewer.
        received = self._received
        num_new = sum(key not in received for key in keys)
        if len(received) + num_new > MAX_WAITING_LEASES:
            return False
        # A few at a time: a message may have 4,096, which take milliseconds, and the engine would wait as long.
        for start in range(0, len(keys), _LEASES_AT_ONCE):
            with self._lock:
                for key in keys[start : start + _LEASES_AT_ONCE]:
                    # Popped, so that the latest is last: a renewal and a release are applied in the order they came in.
                    self._received.pop(key, None)
                    self._received[key] = received_s
        return True

    def take(self) -> list[ReceivedLease]:
        """Remove and return all entries, in the order of their latest arrival."""
        if not self._received:
            return []
        with self._lock:
            received = self._received
            self._received = {}
        return [ReceivedLease(*key, received_s) for key, received_s in received.items()]

    def qsize(self) -> int:
        """The number of waiting entries; a lease that was renewed and released counts twice."""
        return len(self._received)

    def empty(self) -> bool:
        return not self._received


def next_orders(
    leases: ProducerLedger,
    loads: ConsumerLedger,
    boot: str,
    now_s: float,
    fails: tuple[str, ...] = (),
    *,
    may_expire: bool = True,
) -> StepOrders:
    """Orders of both ledgers since the last step, for every worker of this engine.

    Call `receive_messages` before: renewals and releases are applied before leases expire.

    Args:
        boot: this engine's.
        now_s: from any monotonic clock.
        fails: as in `StepOrders`.
        may_expire: False while workers may have ended leases that they have not reported yet.
    """
    due = leases.take_orders(now_s, may_expire=may_expire)
    return StepOrders(
        boot=boot,
        opens=tuple(due.opens),
        holds=tuple(due.holds),
        progress=tuple(due.progress),
        completions=tuple(due.completions),
        ends=tuple(due.ends),
        loads=loads.take_orders(),
        fails=fails,
        cancels=loads.take_cancels(),
        prewarms=loads.prewarms.take(),
    )


def receive_messages(
    inbox: LeaseInbox, leases: ProducerLedger, boot: str, counters: Counters
) -> None:
    """Apply the renewals and releases that have arrived over the side channel.

    Those addressed to another `boot` than this engine's are counted (`renewals_unknown`, `releases_unknown`) and
    dropped.
    """
    for received in inbox.take():
        is_release = received.kind is Release
        if received.boot != boot:
            counters.add("releases_unknown" if is_release else "renewals_unknown")
        elif is_release:
            leases.release(received.name)
        else:
            leases.renew(received.name, received.received_s)
