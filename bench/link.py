"""The side channel between one consumer and 1, 64 and 256 producers: first contacts, renewals and queries.

    python -m bench.link
    python -m bench.link --quick    # a few seconds

All producers' listeners live in a child process, each at an address of 127.0.0.0/8 of its own; what is measured is in
this one. It writes `results/link.json`.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from bench.command import quick_or_whole
from bench.figures import Cell, Results, Table
from kvferry.link.client import SideChannelClient
from kvferry.link.commands import (
    LeaseInbox,
    LeaseMessage,
    Producer,
    RemoteLease,
    RenewLease,
    StartQuery,
    StopQuery,
)
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.query_client import QueryClient
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.server import SideChannelListener
from kvferry.plan.cost import Costs
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.queries import Answer, PromptQuery
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.worker.peers.first_contact import FirstContact
from kvferry.worker.peers.handshakes import Handshakes
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.settings import WorkerSettings
from tests.link.channel import many_hosts
from tests.plan import samples

PEERS = (1, 64, 256)
ENGINE_ID, BOOT = "prefill", "0" * 32
LEASE_S = 3600.0
"""So long that nothing is renewed but what the benchmark asks for."""
TIMEOUT_S = 60.0
_ROUNDS = 20
_QUICK_ROUNDS = 3
WHAT = (
    "One consumer and many producers over the loopback interface, all of them spoken to at the same moment: what each "
    "waits for its first contact (description and plan), for a renewal to arrive, and for the answer to a query. "
    "Connections for renewals and queries exist already; a first contact makes its own."
)


@dataclass(slots=True)
class Exchanges:
    """Exchanges of one kind with so many peers.

    Attributes:
        took_s: each, from its request to its end.
        processor_s: of this process meanwhile: the link's thread, ZMQ's and the caller's.
    """

    kind: str
    peers: int
    took_s: list[float] = field(default_factory=list)
    processor_s: float = 0.0

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Add the processor time of what is done meanwhile."""
        before_s = time.process_time()
        yield
        self.processor_s += time.process_time() - before_s

    def row(self) -> Sequence[Cell]:
        took_s = sorted(self.took_s)
        p99_s = took_s[math.ceil(0.99 * len(took_s)) - 1]
        each_us = 1e6 * self.processor_s / len(took_s)
        return (
            self.peers,
            len(took_s),
            1e3 * statistics.median(took_s),
            1e3 * p99_s,
            each_us,
        )


class _Arrivals(LeaseInbox):
    """Says when a renewal has arrived."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        super().__init__()
        self._tell = tell

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        self._tell(time.monotonic())
        return True


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _serve_producers(count: int, pipe: Connection) -> None:
    """Listen for so many producers until this process is ended. Sends their addresses, then times of renewals."""
    _allow_files()
    description = samples.engine(
        workers=[samples.worker([samples.tensor()])], engine_id=ENGINE_ID, boot=BOOT
    )
    arrivals_s: queue.SimpleQueue[float] = queue.SimpleQueue()
    addresses = []
    listeners = []
    for host in many_hosts(count):
        port = _free_port(host)
        listener = SideChannelListener(
            host,
            port,
            Counters(),
            directory=PromptDirectory(),
            inbox=_Arrivals(arrivals_s.put),
        )
        listener.publish(description)
        listeners.append(listener)
        addresses.append((host, port))
    pipe.send(addresses)
    while True:
        pipe.send(arrivals_s.get())


@contextlib.contextmanager
def producers(count: int) -> Iterator[tuple[list[Producer], Callable[[], float]]]:
    """The addresses of so many producers, and what returns the time at which the next renewal arrived."""
    _allow_files()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_serve_producers, args=(count, there), daemon=True
    )
    child.start()

    def received() -> object:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError(f"the producers said nothing for {TIMEOUT_S:g} s")
        return here.recv()

    def arrival_s() -> float:
        arrived_s = received()
        assert isinstance(arrived_s, float)
        return arrived_s

    try:
        addresses = received()
        assert isinstance(addresses, list)
        yield addresses, arrival_s
    finally:
        child.kill()
        child.join()


def first_contacts(addresses: Sequence[Producer], rounds: int) -> Exchanges:
    """All at once, as a worker's loads request them: its limits on handshakes hold."""
    measured = Exchanges("First contact", len(addresses))
    engine = samples.engine(workers=[samples.worker([samples.tensor()])])
    keys = [PeerKey(host, port, ENGINE_ID, BOOT) for host, port in addresses]
    for _ in range(rounds):
        contact = FirstContact(
            engine, Costs(), WorkerSettings(handshake_timeout_s=TIMEOUT_S)
        )
        wake = threading.Event()
        handshakes = Handshakes(contact.begin, wake.set)
        with contextlib.closing(contact), measured.round():
            started_s = time.monotonic()
            for key in keys:
                refused = handshakes.request(key)
                if refused is not None:
                    raise RuntimeError(f"a handshake was refused: {refused}")
            while handshakes.wanted:
                if not wake.wait(TIMEOUT_S):
                    raise TimeoutError(f"no handshake has ended for {TIMEOUT_S:g} s")
                wake.clear()
                for _, result in handshakes.arrivals():
                    if isinstance(result, Exception):
                        raise result
                    measured.took_s.append(time.monotonic() - started_s)
    return measured


def _renewer() -> LeaseRenewer:
    return LeaseRenewer(PeerLinks(SideChannelClient(), Counters()))


def renewals(
    addresses: Sequence[Producer], arrival_s: Callable[[], float], rounds: int
) -> Exchanges:
    """One lease of each producer, all due at the same moment."""
    measured = Exchanges("Renewal", len(addresses))
    with contextlib.closing(_renewer()) as renewer:
        # The first round connects, and is not counted.
        for number in range(rounds + 1):
            name = LeaseName(slot=number + 1, epoch=f"{number + 1:015x}")
            commands = [
                RenewLease(RemoteLease(host, port, BOOT, name, LEASE_S), at_once=True)
                for host, port in addresses
            ]
            counted = measured if number else Exchanges("", 0)
            with counted.round():
                sent_s = time.monotonic()
                renewer.submit(commands)
                for _ in addresses:
                    counted.took_s.append(arrival_s() - sent_s)
    return measured


def queries(addresses: Sequence[Producer], rounds: int) -> Exchanges:
    """One prompt that no producer knows is queried of each at the same moment."""
    measured = Exchanges("Query", len(addresses))
    answered: queue.SimpleQueue[float] = queue.SimpleQueue()

    def on_answer(producer: Producer, answer: Answer) -> None:
        answered.put(time.monotonic())

    with contextlib.closing(_renewer()) as renewer:
        client = QueryClient(renewer.links, "bench", on_answer)
        # The first round connects, and is not counted.
        for number in range(rounds + 1):
            numbers = range(number * len(addresses), (number + 1) * len(addresses))
            commands = [
                StartQuery(
                    address,
                    PromptQuery(number=of, key=f"{of}", num_tokens=5, digest=BOOT),
                )
                for address, of in zip(addresses, numbers, strict=True)
            ]
            counted = measured if number else Exchanges("", 0)
            with counted.round():
                sent_s = time.monotonic()
                client.submit(commands)
                for _ in addresses:
                    counted.took_s.append(answered.get(timeout=TIMEOUT_S) - sent_s)
                client.submit([StopQuery(of) for of in numbers])
    return measured


def run(peers: Sequence[int], rounds: int, *, quick: bool) -> Results:
    """Measure everything."""
    measured = []
    with producers(max(peers)) as (addresses, arrival_s):
        for count in peers:
            chosen = addresses[:count]
            measured += [
                first_contacts(chosen, rounds),
                renewals(chosen, arrival_s, rounds),
                queries(chosen, rounds),
            ]
    columns = ("peers", "n", "p50, ms", "p99, ms", "processor each, µs")
    kinds = dict.fromkeys(one.kind for one in measured)
    tables = [
        Table(kind, columns, [one.row() for one in measured if one.kind == kind])
        for kind in kinds
    ]
    return Results(
        command="python -m bench.link" + " --quick" * quick,
        what=WHAT,
        tables=tables,
        notes=(
            "Processor time is that of the consumer's whole process: the link's thread, ZMQ's and the caller's. It is "
            "what to compare on a machine with other work, where times by the wall say little.",
            f"All producers share one process and {os.cpu_count()} cores with the consumer.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    rounds = {False: _ROUNDS, True: _QUICK_ROUNDS}
    return quick_or_whole(
        "link",
        __doc__,
        f"{_QUICK_ROUNDS} rounds of each",
        lambda quick: run(PEERS, rounds[quick], quick=quick),
    )


if __name__ == "__main__":
    raise SystemExit(main())
