"""The scheduler's half of a step: apply what came over the side channel, then collect the orders of both ledgers."""

from __future__ import annotations

from kvferry.protocol.handshake import Release, Renew
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters


def next_orders(
    leases: ProducerLedger, loads: ConsumerLedger, boot: str, now_s: float, *, may_expire: bool = True
) -> StepOrders:
    """Orders of both ledgers since the last step, for every worker of this engine.

    Call `receive_messages` before: renewals and releases are applied before leases expire.

    Args:
        boot: this engine's.
        now_s: from any monotonic clock.
        may_expire: False while workers may have ended leases that they have not reported yet.
    """
    due = leases.take_orders(now_s, may_expire=may_expire)
    return StepOrders(
        boot=boot,
        ends=tuple(due.ends),
        opens=tuple(due.opens),
        holds=tuple(due.holds),
        loads=loads.take_orders(),
        prewarms=loads.prewarms.take(),
    )


def receive_messages(listener: SideChannelListener, leases: ProducerLedger, boot: str, counters: Counters) -> None:
    """Apply the renewals and releases that have arrived over the side channel.

    Those addressed to another `boot` than this engine's are counted (`renewals_unknown`, `releases_unknown`) and
    dropped.
    """
    for received in listener.inbox.take():
        if received.boot != boot:
            counters.add("renewals_unknown" if received.kind is Renew else "releases_unknown")
        elif received.kind is Release:
            leases.release(received.name)
        else:
            leases.renew(received.name, received.received_s)
