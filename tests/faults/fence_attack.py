"""Prompts whose leases run out while they are read, or that are preempted or aborted while they are computed and read;
other prompts get their blocks meanwhile."""

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
from kvferry.worker.settings import MappedReadsOption
from kvferry.worker.staging import staged_reads
from kvferry.worker.staging.pool import WAVES_PER_LOAD
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import Bytes, CacheShape
from tests.harness.engine import Engine, Offer, OrderedLoad
from tests.harness.gates import GateFabric, Hold, holding_copies
from tests.harness.integrity import snapshot_of
from tests.harness.prefills import Prefill
from tests.waiting import wait_until

LEASE_S = 0.05
SHAPE = CacheShape(blocks=24)
PROMPTS = 7
TIMEOUT_S = 120.0
"""For whatever is over in milliseconds on a quiet machine. No load or handshake may end by its deadline: the fence is
to decide, however slow the machine is."""
TOKENS, FIRST_PART = 11, 8
"""Three blocks, the last one not full: seven prompts have 21 of the 23 blocks, so the next seven get blocks of each.
Two blocks are the first part of a prompt that is read while it is computed."""

LONG_TIMEOUTS = replace(
    SETTINGS,
    load_timeout_s=TIMEOUT_S,
    handshake_timeout_s=TIMEOUT_S,
    mapped_reads=MappedReadsOption.OFF,
)
DIRECT = (SHAPE, replace(LONG_TIMEOUTS, staging_pool_bytes=0))
STAGED = (
    replace(SHAPE, axes="bth"),
    replace(LONG_TIMEOUTS, staging_pool_bytes=1 << 20, direct_min_bytes=1 << 20),
)
MAPPED = (
    STAGED[0],
    replace(LONG_TIMEOUTS, staging_pool_bytes=0, mapped_reads=MappedReadsOption.AUTO),
)
"""The consumer's layouts: the producer's, and another one. Who maps the producer reads its slots there, too."""
PLACINGS = {"direct": DIRECT, "staged": STAGED, "mapped": MAPPED}


@dataclass
class Counts:
    """The results of the loads.

    Attributes:
        changed: loads whose blocks received other bytes than promised.
        detected: those of them that were reported failed, by the fence.
        believed: those of them that were reported loaded.
        good: loads that were reported loaded, with the bytes that were promised.
        cautious: loads that failed although the right bytes had arrived, or none.
        followed: of the changed ones, those that began again and were reported loaded with the promised bytes.
    """

    loads: int = 0
    changed: int = 0
    detected: int = 0
    believed: int = 0
    good: int = 0
    cautious: int = 0
    followed: int = 0

    def add(
        self,
        consumer: Engine,
        load: OrderedLoad,
        seed: int,
        *,
        was_changed: bool = False,
    ) -> None:
        """One load that is over; its blocks are as it left them.

        Args:
            was_changed: whether it received other bytes, and could still read the promised ones.
        """
        reason = consumer.seen.failed.get(load.request_id)
        is_wrong = has_other_bytes(consumer, load, seed, is_good=reason is None)
        changed = is_wrong or was_changed
        self.loads += 1
        self.changed += changed
        self.believed += is_wrong and reason is None
        self.followed += was_changed and not is_wrong and reason is None
        self.detected += changed and reason is FailureReason.FENCE
        self.good += not changed and reason is None
        self.cautious += not changed and reason is FailureReason.FENCE


def has_other_bytes(
    consumer: Engine, load: OrderedLoad, seed: int, *, is_good: bool = False
) -> bool:
    """Whether other bytes than promised are in the load's blocks; those from before it are none, unless it is good."""
    landed = checksum(consumer, load)
    is_untouched = landed == checksum(consumer, load, load.before)
    return landed != promised_checksum(consumer, load, seed) and (
        is_good or not is_untouched
    )


def checksum(
    engine: Engine, load: OrderedLoad, memory: list[Bytes] | None = None
) -> str:
    """Of what the load's blocks hold of its tokens; in these caches, or in a copy of their memory."""
    own = engine.caches.kernel_blocks(load.blocks)
    digest = hashlib.blake2b()
    for layer in range(engine.shape.layers):
        cells = engine.caches.cells(layer, memory)[own]
        for head in range(engine.shape.heads):
            digest.update(
                cells[:, head]
                .reshape(-1, engine.shape.cell_bytes)[load.first : load.stop]
                .tobytes()
            )
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
    return Engine(
        "P",
        NixlFabric,
        shape=SHAPE,
        settings=replace(SETTINGS, lease_slots=64),
        lease_s=LEASE_S,
        shared=True,
    )


def streaming_producer() -> Engine:
    """Its prompts can be read while they are computed; it has blocks for them and for those that take theirs."""
    settings = replace(SETTINGS, lease_slots=64, row_blocks=(3,))
    shape = replace(SHAPE, blocks=48)
    return Engine("P", NixlFabric, shape=shape, settings=settings, shared=True)


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
        stack.enter_context(holding_copies())
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
        gate, first, last = (
            gate_of(self.consumer),
            Hold(begun.is_set),
            Hold(opened.is_set, at_once),
        )
        gate.hold = lambda: first if waves_first else last
        offers = [
            self.producer.finish_prefill(request_id) for request_id in self._running
        ]
        self.producer.step()  # they are held from now on; their clock goes on with the producer's next step
        loads = [self.consumer.load(offer.params) for offer in offers]
        reads = PROMPTS * (
            1 if snapshot_of(self.consumer.worker).pool is None else WAVES_PER_LOAD
        )
        if waves_first:
            # No load goes on before all have begun: one that was much earlier would be over before the others begin.
            wait_until(
                lambda: gate.held_by(first) == reads, "every load has begun", TIMEOUT_S
            )
            gate.hold = lambda: last
            begun.set()
        wait_until(
            lambda: gate.held_by(last) == reads, "every load is held up", TIMEOUT_S
        )
        self._expire(offers)
        self._running = self._prefill()
        gate.hold = lambda: None
        opened.set()
        _until(
            lambda: all(self.consumer.seen.is_over(load.request_id) for load in loads),
            self.consumer,
        )
        _until(lambda: not self.consumer.seen.alive, self.consumer)
        for offer, load in zip(offers, loads, strict=True):
            self.counts.add(self.consumer, load, offer.seed)
            self.consumer.free(load)

    def _prefill(self) -> list[str]:
        """Prompts that get all blocks that are free, and write them; they have not finished."""
        return [
            self.producer.start_prefill(TOKENS, next(self._seeds))
            for _ in range(PROMPTS)
        ]

    def _expire(self, offers: list[Offer]) -> None:
        expired = self.producer.counters.total("leases_released", "expired")
        sent = self.producer.seen.sent
        _until(lambda: all(offer.request_id in sent for offer in offers), self.producer)
        assert self.producer.counters.total(
            "leases_released", "expired"
        ) == expired + len(offers)


class StreamAttack:
    """Rounds of seven loads of prompts that are being computed: all reads of the first part are held up, all prompts
    lose their blocks, other prompts write them in that very step, all go on."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.producer, self.consumer = producer, consumer
        self.counts = Counts()
        self._seeds = itertools.count(1)

    def round(self, at_once: float, *, aborted: bool) -> None:
        """
        Args:
            at_once: see `Hold`.
            aborted: the prompts are aborted; else they are preempted, and computed again in other blocks.
        """
        producer, consumer = self.producer, self.consumer
        opened, gate = threading.Event(), gate_of(consumer)
        hold = Hold(opened.is_set, at_once)
        gate.hold = lambda: hold
        prefills = [
            producer.begin_prefill(TOKENS, next(self._seeds)) for _ in range(PROMPTS)
        ]
        for prefill in prefills:
            prefill.offer()
        self._compute(prefills, FIRST_PART)
        loads = [
            consumer.load(prefill.params)
            for prefill in prefills
            if prefill.params is not None
        ]
        reads = PROMPTS * (
            1 if snapshot_of(consumer.worker).pool is None else WAVES_PER_LOAD
        )
        wait_until(
            lambda: gate.held_by(hold) == reads, "every load is held up", TIMEOUT_S
        )
        lost = [
            block
            for prefill in prefills
            for block in (prefill.abort() if aborted else prefill.preempt())
        ]
        other = next(self._seeds)
        producer.launched.append(
            lambda: producer.caches.write(lost, PROMPTS * FIRST_PART, other)
        )
        producer.step()
        gate.hold = lambda: None
        opened.set()
        changed = [False] * PROMPTS
        parts = [replace(load, stop=FIRST_PART) for load in loads]
        if not aborted:
            wait_until(
                lambda: consumer.parked_loads() == PROMPTS,
                "every load waits for the next part",
                TIMEOUT_S,
            )
            changed = [
                has_other_bytes(consumer, one, of.seed)
                for one, of in zip(parts, prefills, strict=True)
            ]
            self._compute(prefills, FIRST_PART)
            self._compute(prefills, TOKENS - FIRST_PART)
        _until(
            lambda: all(consumer.seen.is_over(load.request_id) for load in loads),
            consumer,
        )
        _until(lambda: not consumer.seen.alive, consumer)
        ended = (
            parts if aborted else loads
        )  # nothing was ever to be read of the rest of an aborted prompt
        for prefill, load, was_changed in zip(prefills, ended, changed, strict=True):
            self.counts.add(consumer, load, prefill.seed, was_changed=was_changed)
            consumer.free(load)
        _until(lambda: not len(producer.leases), producer)
        producer.give_back(lost)

    def _compute(self, prefills: list[Prefill], tokens: int) -> None:
        for prefill in prefills:
            self.producer.compute(prefill, tokens)
        self.producer.step()
        for prefill in prefills:
            if prefill.is_complete:
                prefill.end()


def _until(happened: Callable[[], bool], engine: Engine) -> None:
    def stepped() -> bool:
        engine.step()
        return happened()

    wait_until(stepped, "the loads or the leases are over", TIMEOUT_S)
