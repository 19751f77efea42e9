"""Engines of one worker without a model, in one process; see `tests.worker.engine`.

`Engine` and the types that it uses are imported from here:

    rig = Rig("memory")                          # or "nixl"
    producer, consumer = rig.engine("P"), rig.engine("C")
    offer = producer.prefill(tokens=10, seed=1)  # blocks are written; the params are as a router would carry them
    load = consumer.load(offer.params)
    rig.step_until(lambda: load.request_id in consumer.loaded, "the load is good")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.waiting import deadline_s
from tests.worker.engine import Engine, free_port
from tests.worker.engine_values import FACTS, HOST, LEASE_S, POISON, SETTINGS, SHAPE, Offer, OrderedLoad, Seen

__all__ = [
    "FACTS",
    "HOST",
    "LEASE_S",
    "POISON",
    "SETTINGS",
    "SHAPE",
    "Engine",
    "Offer",
    "OrderedLoad",
    "Rig",
    "Seen",
    "free_port",
]


class Rig:
    """Engines of one process, stepped together.

    Args:
        kind: `memory` for the fake fabric, `nixl` for the real one.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()
        self.engines: list[Engine] = []

    def make_fabric(self, agent_name: str) -> Fabric:
        return NixlFabric(agent_name) if self.kind == "nixl" else MemoryFabric(agent_name, self.network)

    def engine(self, name: str, **settings: Any) -> Engine:
        """See `Engine`."""
        made = Engine(name, self.make_fabric, **settings)
        self.engines.append(made)
        return made

    def pair(self, **settings: Any) -> tuple[Engine, Engine]:
        """A producer P and a consumer C with the same settings."""
        return self.engine("P", **settings), self.engine("C", **settings)

    def step_until(
        self, happened: Callable[[], object], what: str, timeout_s: float = 30.0, *, only: Engine | None = None
    ) -> None:
        """Step all engines, or one of them, until the condition holds."""
        end_s = deadline_s(timeout_s)
        while not happened():
            assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {what}"
            for engine in self.engines if only is None else (only,):
                engine.step()
            time.sleep(0.001)

    def transfer(self, producer: Engine, consumer: Engine, *, tokens: int = 10, seed: int = 1) -> OrderedLoad:
        """One whole handover, its bytes checked."""
        offer = producer.prefill(tokens, seed)
        load = consumer.load(offer.params)
        self.until_over(consumer, load)
        assert load.request_id in consumer.seen.loaded, consumer.seen.failed
        consumer.check_bytes(load, seed)
        self.step_until(lambda: offer.request_id in producer.seen.sent, "the producer's blocks are free")
        consumer.free(load)
        return load

    def until_over(self, consumer: Engine, load: OrderedLoad, timeout_s: float = 30.0) -> FailureReason | None:
        """Step until the load is reported; returns why it failed, or None when it is good."""
        seen = consumer.seen
        self.step_until(
            lambda: load.request_id in seen.loaded or load.request_id in seen.failed, "the load is over", timeout_s
        )
        return seen.failed.get(load.request_id)

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
