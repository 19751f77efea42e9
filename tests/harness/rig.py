"""Engines of one process, stepped together.

rig = Rig("memory")                          # or "nixl"
producer, consumer = rig.pair()
offer = producer.prefill(tokens=10, seed=1)  # blocks are written; the params are as a router would carry them
load = consumer.load(offer.params)
rig.step_until(lambda: load.request_id in consumer.seen.loaded, "the load is good")
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.settings import WorkerSettings
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.integrity import check_worker, snapshot_of
from tests.harness.ledgers import check_ledgers
from tests.waiting import step_until, wait_until

BOUND_S = 10.0
"""For whatever is over in milliseconds on a quiet machine."""
HASTY = replace(SETTINGS, handshake_timeout_s=BOUND_S, failed_read_grace_s=0.02)


class Rig:
    """The engines of one test.

    Args:
        kind: `memory` for the fake fabric, `nixl` for the real one.
        settings: of engines that are made without others.
    """

    def __init__(self, kind: str, settings: WorkerSettings = SETTINGS) -> None:
        self.kind, self.settings = kind, settings
        self.network = MemoryNetwork()
        self.engines: list[Engine] = []

    def make_fabric(self, agent_name: str) -> Fabric:
        return (
            NixlFabric(agent_name)
            if self.kind == "nixl"
            else MemoryFabric(agent_name, self.network)
        )

    def engine(self, name: str, **settings: Any) -> Engine:
        """See `Engine`."""
        made = Engine(name, self.make_fabric, **{"settings": self.settings, **settings})
        self.engines.append(made)
        return made

    def pair(self, **settings: Any) -> tuple[Engine, Engine]:
        """A producer P and a consumer C with the same settings."""
        return self.engine("P", **settings), self.engine("C", **settings)

    def step_until(
        self,
        happened: Callable[[], object],
        what: str,
        timeout_s: float = 30.0,
        *,
        only: Engine | None = None,
    ) -> None:
        """Step all engines, or one of them, until the condition holds."""
        step_until(
            happened,
            what,
            *(self.engines if only is None else (only,)),
            timeout_s=timeout_s,
        )

    def transfer(
        self, producer: Engine, consumer: Engine, *, tokens: int = 10, seed: int = 1
    ) -> OrderedLoad:
        """One whole good handover, its bytes checked."""
        offer = producer.prefill(tokens, seed)
        load = consumer.load(offer.params)
        self.until_over(consumer, load)
        assert load.request_id in consumer.seen.loaded, consumer.seen.failed
        consumer.check_bytes(load, seed)
        self.step_until(
            lambda: offer.request_id in producer.seen.sent,
            "the producer's blocks are free",
        )
        consumer.free(load)
        return load

    def try_transfer(
        self, producer: Engine, consumer: Engine, seed: int = 9
    ) -> FailureReason | None:
        """One handover: good, and then its bytes are right, or failed, and then it is said why."""
        load = consumer.load(producer.prefill(10, seed).params)
        reason = self.until_over(consumer, load, BOUND_S)
        if reason is None:
            consumer.check_bytes(load, seed)
        self.step_until(
            lambda: load.request_id not in consumer.seen.alive,
            "its blocks are safe",
            BOUND_S,
        )
        consumer.free(load)
        return reason

    def until_good(self, producer: Engine, consumer: Engine) -> None:
        """Handovers are good again within the time that a peer is left alone after a failure."""
        deadline_s = time.monotonic() + BOUND_S
        while self.try_transfer(producer, consumer) is not None:
            assert time.monotonic() < deadline_s, "loads still fail"

    def until_over(
        self, consumer: Engine, load: OrderedLoad, timeout_s: float = 30.0
    ) -> FailureReason | None:
        """Step until the load is reported; returns why it failed, or None when it is good."""
        self.step_until(
            lambda: consumer.seen.is_over(load.request_id),
            "the load is over",
            timeout_s,
        )
        return consumer.seen.failed.get(load.request_id)

    def settle(self) -> None:
        """Lift the faults; wait until no engine has anything in use and every integrity check passes."""
        for engine in self.engines:
            engine.fabric.mend()
        self.step_until(
            lambda: not any(engine.seen.alive for engine in self.engines),
            "no load is in quarantine",
        )
        self.step_until(
            lambda: not any(len(engine.leases) for engine in self.engines),
            "no lease is left",
            BOUND_S,
        )
        for engine in self.engines:
            until_adds_up(engine)
            snapshot_of(engine.worker)  # its thread runs

    def retire(self, engine: Engine) -> None:
        """Close an engine and free its port."""
        engine.close()
        self.engines.remove(engine)

    def close(self) -> None:
        """Let everything end, close the engines, and check that nothing is left."""
        try:
            self.network.thaw_all()
            for engine in self.engines:
                engine.wait_until_idle()
        finally:
            for engine in self.engines:
                engine.close()


@contextlib.contextmanager
def rig_of(kind: str, settings: WorkerSettings = SETTINGS) -> Iterator[Rig]:
    """A rig whose engines are closed afterwards, and whose threads end."""
    rig = Rig(kind, settings)
    try:
        yield rig
    finally:
        rig.close()
    until_threads_end()


def maps_of(engine: Engine) -> int:
    """How many maps this process has of an engine's files, its own included."""
    names = [file.allocation.name for file in engine.caches.kv.shared]
    maps = Path("/proc/self/maps").read_text()
    return sum(maps.count(name) for name in names)


def until_threads_end() -> None:
    """Wait until no transfer thread is left in this process."""
    wait_until(
        lambda: (
            not any(
                thread.name == "kvferry-transfer" for thread in threading.enumerate()
            )
        ),
        "the transfer threads have ended",
    )


def until_adds_up(engine: Engine) -> None:
    """Nothing is in hand and everything adds up, in the ledgers and in the worker.

    Raises:
        LocalProtocolError: it still does not when the time is over.
    """
    check_ledgers(engine.leases, engine.loads)
    deadline_s = time.monotonic() + BOUND_S
    while True:
        try:
            check_worker(engine.worker, idle=True)
            break
        except Exception:
            if time.monotonic() > deadline_s:
                raise
        engine.step()
    seen = snapshot_of(engine.worker)
    assert not seen.entries.taken
    assert seen.pool is None or not seen.pool.waves
    assert not engine.fabric.transfers()
