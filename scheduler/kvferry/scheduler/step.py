"""The scheduler's half of a step: what came over the side channel is brought in, then both ledgers give orders."""

from __future__ import annotations

import queue

from kvferry.protocol.handshake import Release, Renew
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.listener import LeaseMessage, SideChannelListener
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.tally import Tally


def next_orders(
    listener: SideChannelListener | None,
    leases: ProducerLedger,
    loads: ConsumerLedger,
    boot: str,
    tally: Tally,
    now_s: float,
) -> StepOrders:
    """Everything that changed since the last step, for every worker of this engine.

    Renewals and releases are heard before the ledger judges whose time is over.

    Args:
        listener: None where nobody listens.
        boot: this engine's; what was said to an earlier life of it is counted (`renewals_unknown`,
            `releases_unknown`) and dropped.
        now_s: any clock that only goes forward.
    """
    if listener is not None:
        hear(listener, leases, boot, tally)
    due = leases.take_orders(now_s)
    return StepOrders(boot=boot, ends=due.ends, opens=due.opens, holds=due.holds, loads=loads.take_orders())


def hear(listener: SideChannelListener, leases: ProducerLedger, boot: str, tally: Tally) -> None:
    """Bring in the renewals and releases that came over the side channel so far."""
    while True:
        try:
            message: LeaseMessage = listener.inbox.get_nowait()
        except queue.Empty:
            return
        if message.boot != boot:
            tally.add("renewals_unknown" if isinstance(message, Renew) else "releases_unknown")
            continue
        for name in message.leases:
            if isinstance(message, Release):
                leases.release(name)
            else:
                leases.renew(name)
