"""The cost of one more peer: one producer and up to 64 consumers' agents that connect to it at once.

    python -m bench.scale            # writes results/scale.json; 3 minutes on an idle machine
    python -m bench.scale --quick    # up to 16 agents; under a minute

Every consumer agent asks the producer's side channel, plans, and reads 8 bytes: all of one run at once, each on a
thread of its own, in one process or in a process each. Also, one agent contacts as many producers, and a consumer's
scheduler renews leases of many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from bench.agent_process import AgentProcess, usage
from bench.command import quick_or_whole
from bench.figures import Chart, Results, Series, Table
from kvferry.link.client import SideChannelClient
from kvferry.link.commands import RemoteLease, RenewLease
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.renewer import LeaseRenewer
from kvferry.protocol.handshake import LeaseName
from tests.link.channel import many_hosts

_MEMORY = 1 << 16
_LEASE_S = 30.0
_SHORT_LEASE_S = 1.2
_SETTLE_S = 1.0
_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
_TRANSPORTS: dict[str, dict[str, str]] = {
    "one host": _SEGMENTS,
    "TCP": {"UCX_TLS": "tcp", **_SEGMENTS},
}
"""As kvferry sets them."""
_SHARES = ("MB", "files")


@dataclass(frozen=True)
class Share:
    """Growth of a process per peer."""

    rss_mb: float
    files: float

    @classmethod
    def between(
        cls, before: Mapping[str, float], after: Mapping[str, float], count: int
    ) -> Share:
        """The slope between two looks at a process, `count` peers apart; noise of memory is no gain."""
        return cls(
            *(
                max(0.0, (after[name] - before[name]) / count)
                for name in ("rss_mb", "files")
            )
        )


@dataclass(frozen=True)
class Connected:
    """One run: seconds of every handshake, and what each of them cost the producer and one consumer process.

    The consumer's part is of agents with one peer each, and so of the first connection of an agent.
    """

    transports: str
    how: str
    agents: int
    seconds: list[float]
    owner: Share
    reader: Share

    @property
    def ms(self) -> tuple[float, float]:
        """The median, and the most."""
        return statistics.median(self.seconds) * 1e3, max(self.seconds) * 1e3


def listening(ucx: Mapping[str, str]) -> tuple[AgentProcess, int]:
    """A producer's process and its port."""
    producer = AgentProcess(ucx)
    producer.tell("make", count=1, num_bytes=_MEMORY)
    return producer, producer.tell("listen")


def make_contact(transports: str, agents: int, processes: int) -> Connected:
    """`agents` in so many processes connect to a new producer at once."""
    producer, port = listening(_TRANSPORTS[transports])
    consumers = [AgentProcess(_TRANSPORTS[transports]) for _ in range(processes)]
    each = agents // processes
    try:
        for consumer in consumers:
            consumer.send("make", count=each, num_bytes=_MEMORY)
        for consumer in consumers:
            consumer.answer()
        before = producer.tell("usage"), consumers[0].tell("usage")
        for consumer in consumers:
            consumer.send("contact", agents=list(range(each)), port=port)
        seconds = [one for consumer in consumers for one in consumer.answer()]
        time.sleep(_SETTLE_S)
        after = producer.tell("usage"), consumers[0].tell("usage")
    finally:
        for process in (*consumers, producer):
            process.close()
    how = "threads of one process" if processes == 1 else "a process each"
    owner, reader = (
        Share.between(before[0], after[0], agents),
        Share.between(before[1], after[1], each),
    )
    return Connected(transports, how, agents, seconds, owner, reader)


def make_contact_many(transports: str, producers: int) -> Share:
    """Cost of each producer for the one agent that reads from all of them."""
    owners, reader = (
        AgentProcess(_TRANSPORTS[transports]),
        AgentProcess(_TRANSPORTS[transports]),
    )
    try:
        first, *others = owners.tell("make", count=producers + 1, num_bytes=_MEMORY)
        reader.tell("make", count=1, num_bytes=_MEMORY)
        reader.tell("connect", agent=0, peer=first)
        before = reader.tell("usage")
        for peer in others:
            reader.tell("connect", agent=0, peer=peer)
        return Share.between(before, reader.tell("usage"), producers)
    finally:
        owners.close()
        reader.close()


def renew(producers: int, seconds: float) -> tuple[Share, Share, float]:
    """A consumer's scheduler that waits for so many producers: they are addresses of one listener.

    Returns:
        What each costs the consumer and the listener, and renewals a second from each at a lease of 30 s.
    """
    producer, port = listening({})
    counters = Counters()
    renewer = LeaseRenewer(PeerLinks(SideChannelClient(), counters))
    try:
        time.sleep(_SETTLE_S)
        before = usage(), producer.tell("usage")
        start_s = time.monotonic()
        name = LeaseName(slot=0, epoch=f"{1:015x}")
        renewer.submit(
            RenewLease(RemoteLease(host, port, "0" * 32, name, _SHORT_LEASE_S))
            for host in many_hosts(producers)
        )
        time.sleep(seconds)
        rate = counters.total("heartbeats") / (time.monotonic() - start_s) / producers
        after = usage(), producer.tell("usage")
    finally:
        renewer.close()
        producer.close()
    consumer, listener = (
        Share.between(first, last, producers)
        for first, last in zip(before, after, strict=True)
    )
    return consumer, listener, rate * _SHORT_LEASE_S / _LEASE_S


def results_of(
    found: Sequence[Connected],
    readers: Mapping[str, Share],
    renewals: tuple[Share, Share, float],
    *,
    quick: bool,
) -> Results:
    """Tables and a chart."""
    consumer, producer, rate = renewals
    lines: dict[str, list[Connected]] = {}
    for one in found:
        lines.setdefault(f"{one.transports}, {one.how}", []).append(one)
    columns = ["transports", "consumers", "agents", "p50, ms", "most, ms"]
    columns += [f"{side}: {what}" for side in ("owner", "reader") for what in _SHARES]
    return Results(
        command="python -m bench.scale" + " --quick" * quick,
        what="Consumers' agents meet one producer all at once: handshake, plan and a first read of 8 bytes. What one "
        "more peer costs a worker on either side, and one more producer a consumer's scheduler.",
        tables=[
            Table(
                "Handshakes at once, and what each peer costs",
                columns,
                [
                    [
                        x.transports,
                        x.how,
                        x.agents,
                        *x.ms,
                        *astuple(x.owner),
                        *astuple(x.reader),
                    ]
                    for x in found
                ],
            ),
            Table(
                "One agent, for each producer that it reads from",
                ("transports", *_SHARES),
                [
                    [transports, *astuple(share)]
                    for transports, share in readers.items()
                ],
            ),
            Table(
                "A consumer's scheduler, for each producer that it waits for",
                ("side", *_SHARES, "renewals a second at a lease of 30 s"),
                [
                    ["consumer", *astuple(consumer), rate],
                    ["producer", *astuple(producer), None],
                ],
            ),
        ],
        charts=[
            Chart(
                "Handshakes at once with one producer",
                "agents",
                "ms",
                [
                    Series.of_samples(
                        name,
                        [
                            (one.agents, [1e3 * second for second in one.seconds])
                            for one in runs
                        ],
                    )
                    for name, runs in lines.items()
                ],
                x_log=True,
                y_log=True,
            )
        ],
        notes=[
            "A connection is one worker that reads from one other; ranks read rank by rank, so that engines with more "
            "workers have no more connections in each. InfiniBand has other slopes.",
            "Renewals: one message for each producer and sixth of a lease, however many leases. A consumer keeps at "
            "most 512 connections, closes those that are idle for a minute, and opens the others anew.",
        ],
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    return quick_or_whole("scale", __doc__, "fewer agents", _run)


def _run(quick: bool) -> Results:
    runs = [
        ("one host", count, 1)
        for count in ((1, 16) if quick else (1, 2, 4, 8, 16, 32, 64))
    ]
    runs += [("one host", count, count) for count in ((4,) if quick else (4, 16, 64))]
    runs += [("TCP", count, 1) for count in ((8,) if quick else (1, 8, 64))]
    found = []
    for transports, count, processes in runs:
        print(f"{transports}, {count} agents in {processes} processes", flush=True)
        found.append(make_contact(transports, count, processes))
    readers = {
        transports: make_contact_many(transports, 8 if quick else 64)
        for transports in _TRANSPORTS
    }
    renewals = renew(64 if quick else 256, 2.0 if quick else 6.0)
    return results_of(found, readers, renewals, quick=quick)


if __name__ == "__main__":
    raise SystemExit(main())
