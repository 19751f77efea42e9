"""Prompts whose leases run out while they are read, and whose blocks other prompts get meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.staging import staged_reads
from kvferry.worker.staging.pool import WAVES_PER_LOAD
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import Bytes, CacheShape
from tests.harness.engine import Engine, Offer, OrderedLoad
from tests.harness.gates import GateFabric, Hold
from tests.waiting import wait_until

LEASE_S = 0.05
SHAPE = CacheShape(blocks=24)
PROMPTS = 7
TIMEOUT_S = 120.0
"""For whatever is over in milliseconds on a quiet machine. No load or handshake may end by its deadline: the fence is
to decide, however slow the machine is."""
TOKENS = 11
"""Three blocks, the last one not full: seven prompts have 21 of the 23 blocks, so the next seven get blocks of each."""

LONG_TIMEOUTS = replace(SETTINGS, load_timeout_s=TIMEOUT_S, handshake_timeout_s=TIMEOUT_S)
DIRECT = (SHAPE, replace(LONG_TIMEOUTS, staging_pool_bytes=0))
STAGED = (replace(SHAPE, axes="bth"), replace(LONG_TIMEOUTS, staging_pool_bytes=1 << 20, direct_min_bytes=1 << 20))
"""The consumer's layouts: the producer's, and another one."""
PLACINGS = {"direct": DIRECT, "staged": STAGED}


@dataclass
class Counts:
    """The results of the loads.

    Attributes:
        changed: loads whose blocks received other bytes than promised.
        detected: those of them that were reported failed, by the fence.
        believed: those of them that were reported loaded.
        good: loads that were reported loaded, with the bytes that were promised.
        cautious: loads that failed although the right bytes had arrived, or none.
    """

    loads: int = 0
    changed: int = 0
    detected: int = 0
    believed: int = 0
    good: int = 0
    cautious: int = 0

    def add(self, consumer: Engine, load: OrderedLoad, seed: int) -> None:
        """One load that is over; its blocks are as it left them."""
        reason = consumer.seen.failed.get(load.request_id)
        landed, promised = checksum(consumer, load), promised_checksum(consumer, load, seed)
        untouched = landed == checksum(consumer, load, load.before)
        self.loads += 1
        changed = landed != promised and not (untouched and reason)
        self.changed += changed
        self.believed += changed and reason is None
        self.detected += changed and reason is FailureReason.FENCE
        self.good += not changed and reason is None
        self.cautious += not changed and reason is FailureReason.FENCE


def checksum(engine: Engine, load: OrderedLoad, memory: list[Bytes] | None = None) -> str:
    """Of what the load's blocks hold of its tokens; in these caches, or in a copy of their memory."""
    own = engine.caches.kernel_blocks(load.blocks)
    digest = hashlib.blake2b()
    for layer in range(engine.shape.layers):
        cells = engine.caches.cells(layer, memory)[own]
        for head in range(engine.shape.heads):
            digest.update(cells[:, head].reshape(-1, engine.shape.cell_bytes)[load.first : load.stop].tobytes())
    return digest.hexdigest()


def promised_checksum(engine: Engine, load: OrderedLoad, seed: int) -> str:
    """Of what the producer's blocks held when it offered them."""
    memory = [part.copy() for part in load.before]
    engine.caches.write_into(memory, load.blocks, load.first, load.stop, seed, tail=0)
    return checksum(engine, load, memory)


def gated(agent_name: str) -> Fabric:
    """NIXL behind a gate."""
    return GateFabric(NixlFabric(agent_name))


def gate_of(engine: Engine) -> GateFabric:
    """The gate of an engine that was made with `gated`."""
    gate = engine.fabric
    assert isinstance(gate, GateFabric)
    return gate


def producer_of() -> Engine:
    """Its leases end after 50 ms, and it has 24 blocks."""
    return Engine("P", NixlFabric, shape=SHAPE, settings=replace(SETTINGS, lease_slots=64), lease_s=LEASE_S)


@contextlib.contextmanager
def consumer_of(placing: str) -> Iterator[Engine]:
    """A consumer behind a gate, whose renewals are all lost; staged loads take many small waves."""
    shape, settings = PLACINGS[placing]
    with contextlib.ExitStack() as stack:
        largest = staged_reads.MAX_WAVE_BYTES
        stack.callback(setattr, staged_reads, "MAX_WAVE_BYTES", largest)
        staged_reads.MAX_WAVE_BYTES = 1
        consumer = Engine("C", gated, shape=shape, settings=settings)
        stack.callback(consumer.close)
        consumer.renewer.submit = lambda commands: None  # type: ignore[method-assign]
        yield consumer


class Attack:
    """Rounds of seven loads: all are held up, all their leases run out, all their blocks get new owners, all go on."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.producer, self.consumer = producer, consumer
        self.counts = Counts()
        self._seeds = itertools.count(1)
        self._running = self._prefill()

    def round(self, at_once: float, waves_first: bool = False) -> None:
        """
        Args:
            at_once: see `Hold`.
            waves_first: every load gets its first waves, and those after them are held up.
        """
        opened, begun = threading.Event(), threading.Event()
        gate, first, last = gate_of(self.consumer), Hold(begun.is_set), Hold(opened.is_set, at_once)
        gate.hold = lambda: first if waves_first else last
        offers = [self.producer.finish_prefill(request_id) for request_id in self._running]
        self.producer.step()  # they are held from now on; their clock goes on with the producer's next step
        loads = [self.consumer.load(offer.params) for offer in offers]
        reads = PROMPTS * (1 if self.consumer.worker._memory.staging is None else WAVES_PER_LOAD)
        if waves_first:
            # No load goes on before all have begun: one that was much earlier would be over before the others begin.
            wait_until(lambda: gate.held_by(first) == reads, "every load has begun", TIMEOUT_S)
            gate.hold = lambda: last
            begun.set()
        wait_until(lambda: gate.held_by(last) == reads, "every load is held up", TIMEOUT_S)
        self._expire(offers)
        self._running = self._prefill()
        gate.hold = lambda: None
        opened.set()
        self._until(lambda: all(self.consumer.seen.is_over(load.request_id) for load in loads), self.consumer)
        self._until(lambda: not self.consumer.seen.alive, self.consumer)
        for offer, load in zip(offers, loads, strict=True):
            self.counts.add(self.consumer, load, offer.seed)
            self.consumer.free(load)

    def _prefill(self) -> list[str]:
        """Prompts that get all blocks that are free, and write them; they have not finished."""
        return [self.producer.start_prefill(TOKENS, next(self._seeds)) for _ in range(PROMPTS)]

    def _expire(self, offers: list[Offer]) -> None:
        expired = self.producer.counters.total("leases_released", "expired")
        sent = self.producer.seen.sent
        self._until(lambda: all(offer.request_id in sent for offer in offers), self.producer)
        assert self.producer.counters.total("leases_released", "expired") == expired + len(offers)

    @staticmethod
    def _until(happened: Callable[[], bool], engine: Engine) -> None:
        def stepped() -> bool:
            engine.step()
            return happened()

        wait_until(stepped, "the loads or the leases are over", TIMEOUT_S)
