"""One rank of several fails where the others succeed: the request has failed, and every rank gets its blocks back."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import PeerLost, TransferFailed
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.worker import MakeFabric
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.geometry.effects import number_names
from tests.geometry.handmade import attention, pair, side
from tests.geometry.pairs import Pair
from tests.harness.cache_engine import wait_until_idle
from tests.harness.fault_fabric import Point
from tests.harness.handover import load
from tests.harness.inside import thread_of
from tests.harness.ledgers import check_ledgers
from tests.promises import promise
from tests.rig.engine import SETTINGS, RigEngine
from tests.waiting import step_until

pytestmark = pytest.mark.usefixtures("short_backoff")

LEASE_S = 1.5
SLACK_S = 10.0
HASTY = replace(
    SETTINGS,
    handshake_timeout_s=SLACK_S,
    load_timeout_s=SLACK_S,
    failed_read_grace_s=0.02,
)
REQUEST = "the failing request"


class RankEngine(RigEngine):
    """An engine of a pair whose ranks can be made to fail."""

    def __init__(
        self, name: str, pair: Pair, which: str, make_fabric: MakeFabric
    ) -> None:
        mine = pair.producer if which == "producer" else pair.consumer
        super().__init__(
            name, pair.model, mine, make_fabric, HASTY, seed=len(name), lease_s=LEASE_S
        )

    def end_read_never(self, rank: int) -> None:
        """The rank's next data read does not end, and its deadline is over as soon as it is under way."""
        worker, fabric = self.workers[rank], self.fabrics[rank]

        def is_late(_: Point) -> None:
            thread_of(worker).runner.timeout_s = 0.0
            fabric.stops.go()

        fabric.stuck = True
        fabric.stops.stop_at(Point.IN_READ, is_late)

    def mend(self) -> None:
        for fabric in self.fabrics:
            fabric.mend()
        self.set_timeouts(load_s=SLACK_S, handshake_s=SLACK_S)

    def check_idle(self) -> None:
        """Nothing is in hand and everything adds up, on every rank."""
        check_ledgers(self.leases, self.loads)
        for worker in self.workers:
            wait_until_idle(worker)


Break = Callable[[RankEngine, int], None]
"""Makes one rank of an engine fail."""


@dataclass
class Ranks:
    """A producer and a consumer of several ranks each."""

    pair: Pair
    producer: RankEngine
    consumer: RankEngine
    make_fabric: MakeFabric

    def step_until(
        self, happened: Callable[[], bool], what: str, timeout_s: float = SLACK_S
    ) -> None:
        step_until(happened, what, self.producer, self.consumer, timeout_s=timeout_s)

    def load(self, request_id: str = REQUEST) -> dict[int, FailureReason | None]:
        """A request is prefilled and loaded; what every rank of the consumer reports. Where it is good, it is right."""
        request, numbers = self.pair.request, number_names(self.consumer.description)
        params = self.producer.prefill(request_id, request, numbers)
        before = self.consumer.snapshots()
        load(self.consumer, request_id, request, params)
        reports = self.consumer.seen.reports.setdefault(request_id, {})
        self.step_until(
            lambda: len(reports) == len(self.consumer.workers),
            "every rank has reported",
            2 * SLACK_S,
        )
        for index, reason in reports.items():
            if reason is None:
                memory = self.consumer.memories[index]
                memory.check_loaded(
                    before[index], self.consumer.description.groups, request, numbers
                )
        return reports

    def check_recovery(self) -> None:
        """Everything is as it should be again: nothing is left of the failed request, and the next ones are good."""
        self.producer.mend()
        self.consumer.mend()
        self.step_until(
            lambda: not self.consumer.seen.alive, "nothing may be written any more"
        )
        self.consumer.loads.finished(REQUEST)
        for engine in (self.producer, self.consumer):
            engine.check_idle()
        names = (f"next {number}" for number in itertools.count())
        until_s = time.monotonic() + SLACK_S
        while set(self.try_load(next(names)).values()) != {
            None
        }:  # a rank leaves its peer alone for a while
            assert time.monotonic() < until_s, "loads still fail"
        for engine in (self.producer, self.consumer):
            engine.check_idle()

    def try_load(self, request_id: str) -> dict[int, FailureReason | None]:
        """As `load`, and both engines are done with it."""
        reports = self.load(request_id)
        self.step_until(
            lambda: request_id in self.producer.seen.sent,
            "all ranks' blocks are free",
            LEASE_S + SLACK_S,
        )
        self.step_until(
            lambda: not self.consumer.seen.alive, "nothing may be written any more"
        )
        self.consumer.loads.finished(request_id)
        return reports


@contextlib.contextmanager
def ranks(kind: str, producer_tp: int, consumer_tp: int) -> Iterator[Ranks]:
    """Engines of so many ranks, each rank with an agent of its own."""
    network = MemoryNetwork()
    model = attention(heads=4)
    made = pair(
        model, side(model, tp=producer_tp), side(model, tp=consumer_tp), tokens=45
    )

    def make_fabric(name: str) -> Fabric:
        return NixlFabric(name) if kind == "nixl" else MemoryFabric(name, network)

    with contextlib.ExitStack() as stack:
        engines = []
        for name in ("producer", "consumer"):
            engines.append(RankEngine(name, made, name, make_fabric))
            stack.callback(engines[-1].close)
            stack.callback(engines[-1].wait_until_idle)
        yield Ranks(made, engines[0], engines[1], make_fabric)


def _unheard_of() -> Exception:
    return RuntimeError("unheard of")


def fail_read(error: Callable[[], Exception]) -> Break:
    return lambda engine, rank: engine.fabrics[rank].fail("post_data_read", error)


def kill_fabric(engine: RankEngine, rank: int) -> None:
    engine.fabrics[rank].dead = _unheard_of


FAULTS: dict[str, tuple[Break, FailureReason]] = {
    "its read raises": (
        fail_read(lambda: TransferFailed("test", "wanted")),
        FailureReason.TRANSFER,
    ),
    "its read raises an unknown error": (
        fail_read(_unheard_of),
        FailureReason.TRANSFER,
    ),
    "its peer is lost": (
        fail_read(lambda: PeerLost("test", "wanted")),
        FailureReason.TRANSFER,
    ),
    "its read never ends": (RankEngine.end_read_never, FailureReason.DEADLINE),
    "its fabric is dead": (kill_fabric, FailureReason.HANDSHAKE),
}
SIZES = pytest.mark.parametrize(
    "sizes", [(2, 2), (2, 4), (4, 2)], ids=lambda sizes: f"tp {sizes[0]} to {sizes[1]}"
)
KINDS = pytest.mark.parametrize("kind", ["memory", "nixl"])


@KINDS
@SIZES
@pytest.mark.parametrize("fault", FAULTS)
def test_one_consumer_rank_that_fails_fails_the_request_and_releases_all_producer_ranks(
    kind: str, sizes: tuple[int, int], fault: str
) -> None:
    break_it, expected = FAULTS[fault]
    with ranks(kind, *sizes) as rig:
        victim = sizes[1] - 1
        break_it(rig.consumer, victim)
        reports = rig.load()
        assert reports.pop(victim) is expected
        # The scheduler gives the lease back at the first failure, so ranks that are still reading find that it is over.
        assert set(reports.values()) <= {None, FailureReason.FENCE}
        rig.step_until(
            lambda: REQUEST in rig.producer.seen.sent,
            "all ranks' blocks are free",
            LEASE_S + SLACK_S,
        )
        if fault == "its read never ends":
            assert rig.consumer.seen.alive_at[victim] == {REQUEST}, (
                "its blocks may still be written"
            )
        rig.check_recovery()


@promise(3)
@KINDS
@SIZES
def test_one_consumer_rank_that_cannot_tell_costs_all_producer_ranks_a_lease_and_no_more(
    kind: str, sizes: tuple[int, int]
) -> None:
    with ranks(kind, *sizes) as rig:
        rig.consumer.fabrics[0].loses_notifications = True
        reports = rig.load()
        assert set(reports.values()) == {None}
        assert REQUEST not in rig.producer.seen.sent, "one rank has not been notified"
        rig.step_until(
            lambda: REQUEST in rig.producer.seen.sent,
            "all ranks' blocks are free",
            LEASE_S + SLACK_S,
        )
        rig.check_recovery()


@KINDS
@SIZES
def test_a_producer_rank_whose_agent_is_gone_fails_the_ranks_that_read_it_and_frees_all(
    kind: str, sizes: tuple[int, int]
) -> None:
    """Its slots tell the truth until the end: where its memory can be read without its agent, what is read is good."""
    with ranks(kind, *sizes) as rig:
        assert set(rig.try_load("good").values()) == {None}
        gone = sizes[0] - 1
        readers = {
            index
            for index, worker in enumerate(rig.consumer.workers)
            for peer in thread_of(worker).registry.peers()
            if any(route.route.worker == gone for route in peer.routes)
        }
        assert readers
        rig.producer.fabrics[gone].close()
        reports = rig.load()
        lost = {
            index
            for index, reason in reports.items()
            if reason is FailureReason.TRANSFER
        }
        assert lost == readers or (kind == "nixl" and lost <= readers)
        assert set(reports.values()) <= {
            None,
            FailureReason.TRANSFER,
            FailureReason.FENCE,
        }
        rig.step_until(
            lambda: REQUEST in rig.producer.seen.sent,
            "all ranks' blocks are free",
            LEASE_S + SLACK_S,
        )
        rig.consumer.loads.finished(REQUEST)
        rig.consumer.check_idle()
        rig.producer.workers.pop(
            gone
        ).close()  # its agent was closed behind its back: its sums cannot add up
        rig.producer.close()
        rig.producer = RankEngine(
            "another producer", rig.pair, "producer", rig.make_fabric
        )
        try:
            rig.check_recovery()
        finally:
            rig.producer.close()
