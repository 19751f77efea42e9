"""One producer and up to 64 consumers' agents; and what follows for 1,000 engines.

    python -m bench.scale            # writes results/scale.json; 3 minutes on an idle machine
    python -m bench.scale --quick    # up to 16 agents; under a minute

Every consumer agent asks the producer's side channel, plans, and reads 8 bytes: all of one run at once, each on a
thread of its own, in one process or in a process each. Also, one agent contacts as many producers. What one more peer
costs goes into the model of `bench.scale_model`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.agent_process import AgentProcess, usage
from bench.figures import Chart, Results, Series, Table, publish
from bench.first_contact_producer import ENGINE, HOST, ProducerProcess
from bench.provenance import begin
from bench.scale_model import Fleet, Share, Slopes, play, walls
from kvferry.protocol.handshake import Hello, LeaseName
from kvferry.scheduler.consumer.ledger import RemoteLease, RenewLease
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state.counters import Counters
from kvferry.worker.peers.handshake_client import ask

_BLOCKS = 1000
_MEMORY = 1 << 16
_LEASE_S = 30.0
_SHORT_LEASE_S = 1.2
_SETTLE_S = 1.0
_TIMEOUT_S = 5.0
"""Of a handshake, by default."""
_LIMITS = Share(rss_mb=8000.0, files=1024.0, threads=4096.0)
"""Of a process: memory that is a nuisance, the usual soft limit of files, a container's limit of tasks."""

_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
_TRANSPORTS: dict[str, dict[str, str]] = {
    "one host": _SEGMENTS,
    "TCP": {"UCX_TLS": "tcp", **_SEGMENTS},
}
"""As kvferry sets them."""

Looked = Mapping[str, float]


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

    def row(self) -> list[Any]:
        ordered = sorted(self.seconds)
        shares = [value for share in (self.owner, self.reader) for value in (share.rss_mb, share.files, share.threads)]
        last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return [self.transports, self.how, self.agents, statistics.median(ordered) * 1e3, last * 1e3, *shares]


def make_contact(transports: str, agents: int, processes: int) -> Connected:
    """`agents` in so many processes connect to a new producer at once."""
    producer = ProducerProcess(1, _BLOCKS, _TRANSPORTS[transports])
    consumers = [AgentProcess(_TRANSPORTS[transports]) for _ in range(processes)]
    each = agents // processes
    try:
        for consumer in consumers:
            consumer.send("make", count=each, bytes=_MEMORY)
        for consumer in consumers:
            consumer.answer()
        before: tuple[Looked, Looked] = (usage(producer.pid), consumers[0].tell("usage"))
        for consumer in consumers:
            consumer.send("contact", agents=list(range(each)), port=producer.port)
        seconds = [one for consumer in consumers for one in consumer.answer()["seconds"]]
        time.sleep(_SETTLE_S)
        after = (usage(producer.pid), consumers[0].tell("usage"))
    finally:
        for consumer in consumers:
            consumer.close()
        producer.close()
    how = "threads of one process" if processes == 1 else "a process each"
    owner, reader = Share.between(before[0], after[0], agents), Share.between(before[1], after[1], each)
    return Connected(transports, how, agents, seconds, owner, reader)


def make_contact_many(transports: str, producers: int) -> Share:
    """Cost of each producer for the one agent that reads from all of them."""
    owners, reader = AgentProcess(_TRANSPORTS[transports]), AgentProcess(_TRANSPORTS[transports])
    try:
        peers = owners.tell("make", count=producers + 1, bytes=_MEMORY)["agents"]
        reader.tell("make", count=1, bytes=_MEMORY)
        reader.tell("connect", agent=0, peer=peers[0], bytes=_MEMORY)
        before = reader.tell("usage")
        for peer in peers[1:]:
            reader.tell("connect", agent=0, peer=peer, bytes=_MEMORY)
        return Share.between(before, reader.tell("usage"), producers)
    finally:
        owners.close()
        reader.close()


def hello_seconds(count: int) -> float:
    """Processor seconds of a producer for one handshake: of its listener only, since there are no reads."""
    producer = ProducerProcess(1, _BLOCKS)
    try:
        hello = Hello(engine_id=ENGINE, asker="C")
        ask(HOST, producer.port, hello, _TIMEOUT_S)
        before = usage(producer.pid)["cpu_s"]
        for _ in range(count):
            ask(HOST, producer.port, hello, _TIMEOUT_S)
        return (usage(producer.pid)["cpu_s"] - before) / count
    finally:
        producer.close()


def renew(producers: int, seconds: float) -> tuple[Share, Share, float]:
    """A consumer's scheduler that waits for so many producers: they are boots of one listener.

    Returns:
        What each costs the consumer and the listener, and renewals a second from each.
    """
    producer = ProducerProcess(1, _BLOCKS)
    counters = Counters()
    renewer = LeaseRenewer(counters)
    try:
        time.sleep(_SETTLE_S)
        before = usage(), usage(producer.pid)
        start_s = time.monotonic()
        renewer.submit(
            RenewLease(
                RemoteLease(HOST, producer.port, f"{boot:032x}", LeaseName(slot=0, epoch=f"{1:015x}"), _SHORT_LEASE_S)
            )
            for boot in range(producers)
        )
        time.sleep(seconds)
        rate = counters.total("heartbeats") / (time.monotonic() - start_s) / producers
        after = usage(), usage(producer.pid)
    finally:
        renewer.close()
        producer.close()
    return Share.between(before[0], after[0], producers), Share.between(before[1], after[1], producers), rate


def slopes_of(
    found: Sequence[Connected], readers: Mapping[str, Share], sockets: tuple[Share, Share, float], hello_s: float
) -> dict[str, Slopes]:
    """By transports; the owner's share is of the largest run."""
    by_transports = {}
    for transports, reader in readers.items():
        largest = max((one for one in found if one.transports == transports), key=lambda one: one.agents)
        by_transports[transports] = Slopes(reader, largest.owner, sockets[0], hello_s)
    return by_transports


def results_of(
    found: Sequence[Connected],
    readers: Mapping[str, Share],
    sockets: tuple[Share, Share, float],
    hello_s: float,
    *,
    quick: bool,
) -> Results:
    """Tables, charts and the model of 1,000 engines."""
    slopes = slopes_of(found, readers, sockets, hello_s)
    limits = {transports: walls(of, _LIMITS) for transports, of in slopes.items()}
    fleets = [Fleet(half, half, workers) for half in (50, 500) for workers in (1, 8)]
    played = [(fleet, play(fleet, hello_s=hello_s, timeout_s=_TIMEOUT_S)) for fleet in fleets]
    shares = ("MB", "files", "threads")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Results(
        command="python -m bench.scale" + (" --quick" if quick else ""),
        what="Consumers' agents meet one producer all at once: handshake, plan and a first read of 8 bytes. What one "
        "more peer costs a worker on either side, one more producer a consumer's scheduler, and one more handshake a "
        "listener; and what that comes to with 1,000 engines.",
        tables=[
            Table(
                "Handshakes at once, and what each peer costs",
                (
                    "transports",
                    "consumers",
                    "agents",
                    "p50, ms",
                    "p99, ms",
                    *(f"{side}: {what}" for side in ("owner", "reader") for what in shares),
                ),
                [one.row() for one in found],
            ),
            Table(
                "One agent, for each producer that it reads from",
                ("transports", *shares),
                [[transports, *asdict(share).values()] for transports, share in readers.items()],
            ),
            Table(
                "A consumer's scheduler, for each producer that it waits for",
                ("side", *shares, "renewals a second at a lease of 30 s"),
                [
                    ["consumer", *asdict(sockets[0]).values(), sockets[2] * _SHORT_LEASE_S / _LEASE_S],
                    ["producer", *asdict(sockets[1]).values(), None],
                ],
            ),
            Table(
                "Modelled: what connections add to each process",
                ("transports", "producers + consumers", "process", *shares, "renewals a second to one producer"),
                [
                    [transports, f"{fleet.producers} + {fleet.consumers}", kind, *asdict(share).values(), rate]
                    for transports, of in slopes.items()
                    for fleet in fleets
                    if fleet.workers == 1  # a worker's connections are those of its rank
                    for kind, share in fleet.per_process(of).items()
                    for rate in [fleet.renewals_per_s(_LEASE_S) if kind == "owner" else None]
                ],
            ),
            Table(
                "Modelled: peers at which a process meets a limit",
                ("transports", "process and resource", "limit", "peers"),
                [
                    [transports, name, getattr(_LIMITS, name.split(", ")[1]), peers]
                    for transports, of in limits.items()
                    for name, peers in of.items()
                ],
            ),
            Table(
                "Played: every worker of every consumer asks one producer in the same moment",
                ("consumers", "workers each", "handshakes", "half met, s", "last met, s", "timeouts"),
                [[x.consumers, x.workers, x.handshakes, p.half_s, p.last_s, p.timeouts] for x, p in played],
            ),
        ],
        charts=[
            Chart(
                "Handshakes at once with one producer",
                "agents",
                "ms",
                [
                    Series(
                        f"{transports}, {how}",
                        [one.agents for one in of],
                        [statistics.median(one.seconds) * 1e3 for one in of],
                        [min(one.seconds) * 1e3 for one in of],
                        [max(one.seconds) * 1e3 for one in of],
                    )
                    for transports, how in dict.fromkeys((one.transports, one.how) for one in found)
                    for of in [[one for one in found if (one.transports, one.how) == (transports, how)]]
                ],
                x_log=True,
                y_log=True,
            )
        ],
        notes=[
            f"A listener takes {hello_s * 1e3:.2f} ms of a processor for one handshake.",
            f"The model's limits are {_LIMITS.files:.0f} files (here: {soft} soft, {hard} hard), {_LIMITS.threads:.0f} "
            f"threads, and {_LIMITS.rss_mb:.0f} MB for connections alone. The first wall: "
            + "; ".join(f"{transports}: {next(iter(of), 'none')}" for transports, of in limits.items())
            + ".",
            "A connection is one worker that reads from one other; ranks read rank by rank, so that engines with more "
            "workers have no more connections in each. InfiniBand has other slopes.",
            "Renewals: one message for each producer and sixth of a lease, however many leases. A consumer keeps at "
            "most 256 sockets, closes those that are idle for a minute, and opens the others anew.",
            "Handshakes of 64 agents share this machine's cores with the producer.",
        ],
        raw={
            "met": [asdict(one) for one in found],
            "slopes": {transports: asdict(of) for transports, of in slopes.items()},
        },
        quick=quick,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer agents")
    quick = parser.parse_args(arguments).quick
    started = begin()
    in_threads = (1, 16) if quick else (1, 2, 4, 8, 16, 32, 64)
    in_processes = (4,) if quick else (4, 16, 64)
    over_tcp = (8,) if quick else (1, 8, 64)
    runs = [("one host", count, 1) for count in in_threads]
    runs += [("one host", count, count) for count in in_processes]
    runs += [("TCP", count, 1) for count in over_tcp]
    found = []
    for transports, count, processes in runs:
        started_s = time.monotonic()
        found.append(make_contact(transports, count, processes))
        took_s = time.monotonic() - started_s
        print(f"{transports}, {count} agents in {processes} processes: {took_s:.0f} s", flush=True)
    readers = {transports: make_contact_many(transports, 8 if quick else 64) for transports in _TRANSPORTS}
    sockets = renew(64 if quick else 256, 2.0 if quick else 6.0)
    hello_s = hello_seconds(50 if quick else 400)
    publish("scale", results_of(found, readers, sockets, hello_s, quick=quick), started)


if __name__ == "__main__":
    main()
