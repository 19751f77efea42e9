"""The scheduler's half of a step: apply what came over the side channel, then collect the orders of both ledgers."""

from __future__ import annotations

from kvferry.link.commands import LeaseInbox
from kvferry.link.counters import Counters
from kvferry.protocol.handshake import Release
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger


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
