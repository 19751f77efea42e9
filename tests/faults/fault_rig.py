"""Engines of one process whose fabrics go wrong on demand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.port import Fabric
from tests.faults.fault_fabric import FaultFabric
from tests.waiting import wait_until
from tests.worker.engine_rig import SETTINGS, Engine, Rig

BOUND_S = 10.0
"""For whatever is over in milliseconds on a quiet machine."""
HASTY = replace(SETTINGS, handshake_timeout_s=BOUND_S, failed_read_grace_s=0.02)


class FaultRig(Rig):
    """As `Rig`, with a `FaultFabric` in front of every engine's fabric: `faults_of`."""

    def make_fabric(self, agent_name: str) -> Fabric:
        return FaultFabric(super().make_fabric(agent_name))

    def engine(self, name: str, **settings: Any) -> Engine:
        """See `Engine`; with the settings of drills."""
        return super().engine(name, **{"settings": HASTY, **settings})

    def settle(self) -> None:
        """Wait until no engine has anything in use and every integrity check passes."""
        for engine in self.engines:
            faults_of(engine).mend()
        self.step_until(lambda: not any(engine.seen.alive for engine in self.engines), "no load is in quarantine")
        self.step_until(lambda: not any(len(engine.leases) for engine in self.engines), "no lease is left", BOUND_S)
        for engine in self.engines:
            until_adds_up(engine)
            assert _is_alive(engine), f"the transfer thread of {engine.name} has ended"

    def until_good(self, producer: Engine, consumer: Engine) -> None:
        """Handovers are good again within the time that a peer is left alone after a failure."""
        deadline_s = time.monotonic() + BOUND_S
        while self.try_transfer(producer, consumer) is not None:
            assert time.monotonic() < deadline_s, "loads still fail"

    def try_transfer(self, producer: Engine, consumer: Engine, seed: int = 9) -> FailureReason | None:
        """One handover: good, and then its bytes are right, or failed, and then it is said why."""
        load = consumer.load(producer.prefill(10, seed).params)
        reason = self.until_over(consumer, load, BOUND_S)
        if reason is None:
            consumer.check_bytes(load, seed)
        self.step_until(lambda: load.request_id not in consumer.seen.alive, "its blocks are safe", BOUND_S)
        consumer.free(load)
        return reason


@contextlib.contextmanager
def fault_rig(kind: str) -> Iterator[FaultRig]:
    """A rig whose engines are closed afterwards, and whose threads end.

    Args:
        kind: `memory` or `nixl`.
    """
    rig = FaultRig(kind)
    try:
        yield rig
    finally:
        for engine in rig.engines:
            faults_of(engine).mend()
        rig.close()
    wait_until(lambda: not any(_is_alive(engine) for engine in rig.engines), "the transfer threads have ended")


def faults_of(engine: Engine) -> FaultFabric:
    """The fault-injecting part of an engine's fabric."""
    found = engine.fabric.inner
    assert isinstance(found, FaultFabric)
    return found


def until_adds_up(engine: Engine) -> None:
    """Nothing is in hand and everything adds up, in the ledgers and in the worker.

    Raises:
        LocalProtocolError: it still does not when the time is over.
    """
    engine.leases.check_integrity()
    engine.loads.check_integrity()
    deadline_s = time.monotonic() + BOUND_S
    while True:
        try:
            engine.worker.check_integrity(idle=True)
            break
        except Exception:
            if time.monotonic() > deadline_s:
                raise
        engine.step()
    slot_reads, staging = engine.worker._slot_reads, engine.worker._staging
    assert slot_reads.free() == len(slot_reads.words)
    assert staging is None or not staging.pool.waves()
    assert not engine.fabric.transfers()


def _is_alive(engine: Engine) -> bool:
    thread = engine.worker._thread
    return thread is None or thread._thread.is_alive()
