"""Pairs of engines that are put to sleep under load, by a seed: whole prompts and streamed ones, held and read.

Both ends are in one process, each with NIXL agents of its own. While one sleeps, an access to its pages from any thread
of the process ends it with SIGSEGV (`tests.harness.sleeping_memory`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvferry.protocol.params import RemotePrefill
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from tests.geometry.effects import number_names
from tests.geometry.pairs import Pair
from tests.harness import handover
from tests.harness.cache_engine import SETTINGS as ENGINE_SETTINGS
from tests.harness.cache_engine import CacheEngine
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.fault_fabric import FaultFabric
from tests.harness.integrity import check_worker
from tests.harness.ledgers import check_ledgers
from tests.harness.prefills import Prefill
from tests.harness.sleeping_memory import SleepingMemory
from tests.rig.engine import SETTINGS as RIG_SETTINGS
from tests.rig.engine import RigEngine
from tests.waiting import step_until

SHAPE = CacheShape(layers=4, heads=4, blocks=384, block_tokens=8, cell_bytes=256)
"""A block has 32 KiB, the longest prompt 1 MiB."""
LONGEST = 256
SETTINGS = replace(
    ENGINE_SETTINGS,
    lease_slots=64,
    row_blocks=(LONGEST // SHAPE.block_tokens,),
    failed_read_grace_s=0.5,
)
IN_FLIGHT = 12
SETTLE_S = 60.0


@dataclass
class Seen:
    """What became of the sleeps of one scene.

    Attributes:
        wrong: loads that were reported good, and have a wrong byte.
        left: what was left after a sleep and must not be, in words.
        withdraw_ms, restore_ms: one for each sleep.
    """

    sleeps: int = 0
    good: int = 0
    streamed: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    withdraw_ms: list[float] = field(default_factory=list)
    restore_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Load:
    blocks: tuple[int, ...]
    tokens: int
    seed: int


class ToyPair:
    """A producer and a consumer of one worker, with as many handovers at once as fit."""

    def __init__(self, seed: int, *, mapped: bool) -> None:
        self.seen = Seen()
        self._draw = random.Random(seed)
        self._seeds = itertools.count(1)
        self.producer = self._engine("P", seed, shared=mapped)
        self.consumer = self._engine("C", seed + 1)
        self._loads: dict[str, _Load] = {}
        self._prefills: list[Prefill] = []
        self._stale: list[tuple[RemotePrefill, int]] = []

    def sleep(self) -> None:
        """Begin handovers, put one engine or both to sleep amid them, wake it, and let everything end.

        The first handover after that must be good.
        """
        draw = self._draw
        for _ in range(draw.randint(2, IN_FLIGHT)):
            self._begin_one()
            for _ in range(draw.choice((0, 0, 1, 3))):
                self._step()
        # Anywhere between the order and the last byte.
        end_s = time.monotonic() + draw.choice((0.0, 0.0, 0.0005, 0.002, 0.006))
        while time.monotonic() < end_s:
            self._step()
        sleepers = draw.choice(
            ((self.producer,), (self.consumer,), (self.producer, self.consumer))
        )
        for engine in sleepers:
            self._fall_asleep(engine)
        for engine in (self.producer, self.consumer):
            # Who is awake goes on, and asks the sleeper.
            for _ in range(draw.randint(0, 5) if engine not in sleepers else 0):
                engine.step()
                time.sleep(0.0005)
        self._check_reported()
        for engine in reversed(sleepers):
            self._wake_up(engine)
        # Tickets of before are no good now.
        for params, seed in self._stale[:2]:
            self._order(params, seed)
        self._stale.clear()
        self._settle()
        good = self.seen.good
        self._order(
            self.producer.prefill(LONGEST, seed := next(self._seeds)).params, seed
        )
        self._settle()
        self.seen.left["first handovers that were not good"] += self.seen.good == good

    def close(self) -> None:
        for engine in (self.consumer, self.producer):
            engine.wait_until_idle()
            engine.close()

    def _engine(self, name: str, seed: int, *, shared: bool = False) -> Engine:
        return Engine(
            name,
            NixlFabric,
            shape=SHAPE,
            settings=SETTINGS,
            seed=seed,
            sleeps=True,
            shared=shared,
        )

    def _begin_one(self) -> None:
        tokens, seed = self._draw.randint(1, LONGEST), next(self._seeds)
        need = -(-tokens // SHAPE.block_tokens)
        if min(len(self.producer.unused), len(self.consumer.unused)) < need:
            return
        kind = self._draw.random()
        if kind < 0.4:
            prefill = self.producer.begin_prefill(tokens, seed)
            self.producer.step()
            prefill.offer()
            self._prefills.append(prefill)
            assert prefill.params is not None
            self._order(prefill.params, seed)
            self.seen.streamed += 1
            return
        offer = self.producer.prefill(tokens, seed)
        if kind < 0.85:
            self._order(offer.params, seed)
        else:
            self._stale.append((offer.params, seed))

    def _order(self, params: RemotePrefill, seed: int) -> None:
        name = f"load-{seed}-{len(self._loads)}"
        tokens = params.remote_num_tokens
        blocks: tuple[int, ...] = ()

        def allocate(loaded: int) -> tuple[tuple[int, ...], ...]:
            nonlocal blocks
            blocks = self.consumer.take_blocks(loaded)
            return (blocks,)

        if len(self.consumer.unused) < -(-tokens // SHAPE.block_tokens):
            return
        self.consumer.order_load(name, params, 0, tokens, allocate)
        self._loads[name] = _Load(blocks, tokens, seed)

    def _step(self) -> None:
        for prefill in self._prefills:
            if not prefill.is_complete and self._draw.random() < 0.6:
                left = prefill.tokens - prefill.done
                self.producer.compute(prefill, self._draw.randint(1, left))
        self.producer.step()
        for prefill in [one for one in self._prefills if one.is_complete]:
            prefill.end()
            self._prefills.remove(prefill)
        self.consumer.step()
        self._check_reported()

    def _check_reported(self) -> None:
        """Compare what was reported good at once, before anything else may write there."""
        seen = self.consumer.seen
        for name in seen.loaded:
            load = self._loads.pop(name)
            self.seen.good += 1
            wrong = self.consumer.caches.wrong_bytes(
                load.blocks, load.tokens, load.seed
            )
            self.seen.wrong += bool(wrong)
        for name, reason in seen.failed.items():
            self._loads.pop(name)
            self.seen.failed[reason.value] += 1
        seen.loaded.clear()
        seen.failed.clear()
        seen.load_records.clear()
        seen.reports.clear()

    def _fall_asleep(self, engine: Engine) -> None:
        if engine is self.producer:
            # Their requests are not computed any further.
            self._prefills.clear()
        begun_s = time.perf_counter()
        engine.withdraw()
        self.seen.withdraw_ms.append((time.perf_counter() - begun_s) * 1e3)
        self.seen.sleeps += 1
        assert engine.pages is not None
        engine.pages.sleep()
        if engine is self.consumer:
            engine.step()
            self.seen.left["loads under way in a sleep"] += len(engine.loads)
        left_in(engine.fabrics, self.seen)

    def _wake_up(self, engine: Engine) -> None:
        begun_s = time.perf_counter()
        engine.wake_up()
        self.seen.restore_ms.append((time.perf_counter() - begun_s) * 1e3)
        engine.caches.fill(range(SHAPE.blocks), 0x33)

    def _settle(self) -> None:
        end_s = time.monotonic() + SETTLE_S
        while self._prefills or self._loads or self.consumer.seen.alive:
            self._step()
            if time.monotonic() > end_s:
                self.seen.left["loads that do not end"] += 1
                break
            time.sleep(0.0002)
        self.producer.leases.release_all("reset")
        while len(self.producer.leases) and time.monotonic() < end_s:
            self._step()
            time.sleep(0.0002)
        self.seen.left["leases"] += len(self.producer.leases)
        for engine in (self.producer, self.consumer):
            check_ledgers(engine.leases, engine.loads)
            check_worker(engine.worker)
            engine.unused = list(range(1, SHAPE.blocks))
            engine.seen.sent.clear()
            engine.seen.sent_by.clear()
        self.producer.offers.clear()


class HybridPair:
    """Engines of several workers with states and windows, one handover at a time, every byte of both compared."""

    def __init__(self, pair: Pair, seed: int, settings: WorkerSettings) -> None:
        self.seen = Seen()
        self._pair = pair
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self.producer, self.consumer = (
            RigEngine(name, pair.model, side, NixlFabric, settings, seed=number)
            for number, (name, side) in enumerate(
                (("P", pair.producer), ("C", pair.consumer)), start=seed
            )
        )
        self._pages = {
            engine: pages_of(engine) for engine in (self.producer, self.consumer)
        }

    def sleep(self) -> None:
        """A good handover, one that a sleep overlaps, and what it leaves."""
        draw = self._draw
        self._load(lambda: None)
        sleeper = draw.choice((self.producer, self.consumer))
        steps = draw.randint(0, 4)

        def nap() -> None:
            for _ in range(steps):
                self.producer.step()
                self.consumer.step()
            begun_s = time.perf_counter()
            sleeper.withdraw()
            self.seen.withdraw_ms.append((time.perf_counter() - begun_s) * 1e3)
            self.seen.sleeps += 1
            self._pages[sleeper].sleep()
            left_in(sleeper.fabrics, self.seen)
            for engine in (self.producer, self.consumer):
                if engine is not sleeper:
                    engine.step()
            self._pages[sleeper].wake_up()
            begun_s = time.perf_counter()
            sleeper.restore()
            self.seen.restore_ms.append((time.perf_counter() - begun_s) * 1e3)

        self._load(nap)

    def close(self) -> None:
        for engine in (self.consumer, self.producer):
            engine.wait_until_idle()
            engine.close()

    def _load(self, amid: Callable[[], None]) -> None:
        """One handover; what is reported good after a nap must be of after it, so its bytes are compared before."""
        name = f"r{next(self._numbers)}"
        request = self._pair.request
        groups = self.consumer.description.groups
        numbers = number_names(self.consumer.description)
        params = self.producer.prefill(name, request, numbers)
        before = self.consumer.snapshots()
        reported = len(self.consumer.seen.loaded)
        handover.load(self.consumer, name, request, params)
        is_good_before = name in self.consumer.seen.loaded
        amid()
        engines = (self.producer, self.consumer)
        step_until(
            lambda: self.consumer.seen.is_over(name), "the load is over", *engines
        )
        if name in self.consumer.seen.failed:
            self.seen.failed[self.consumer.seen.failed[name].value] += 1
        else:
            self.seen.good += 1
            if not is_good_before and len(self.consumer.seen.loaded) > reported:
                self._compare(before, groups, numbers)
        self.producer.leases.release_all("reset")
        step_until(lambda: not len(self.producer.leases), "no lease is left", *engines)

    def _compare(self, before, groups, numbers) -> None:  # type: ignore[no-untyped-def]
        for memory, snapshot in zip(self.consumer.memories, before, strict=True):
            try:
                memory.check_loaded(snapshot, groups, self._pair.request, numbers)
            except AssertionError:
                self.seen.wrong += 1
                return


def pages_of(engine: CacheEngine) -> SleepingMemory:
    """The pages of an engine whose caches lie in files."""
    pages = SleepingMemory()
    for _, caches in engine.shards:
        for file in caches.shared:
            pages.share(file)
    return pages


def left_in(fabrics: list[FaultFabric], seen: Seen) -> None:
    """What agents have left that were closed; they are forgotten."""
    for fabric in fabrics:
        seen.left["transfers"] += fabric.transfers()
        # The two lists of this worker's own entries go with the agent.
        handles = max(0, len(fabric.live) - 2)
        seen.left["handles and peers"] += handles + len(fabric.peers)
        seen.left["registrations"] += len(getattr(fabric.inner, "_registered", ()))
    fabrics.clear()


HYBRID = replace(RIG_SETTINGS, failed_read_grace_s=0.5)
HYBRID_MAPPED = replace(
    HYBRID, mapped_reads=MappedReadsOption.AUTO, staging_pool_bytes=0
)


def soak(
    make: Callable[[], ToyPair | HybridPair],
    sleeps: int,
    report: Callable[[Seen], None] = lambda _: None,
) -> Seen:
    """So many sleeps of a pair, which is closed afterwards."""
    with ExitStack() as stack:
        pair = make()
        stack.callback(pair.close)
        reported_s = time.monotonic()
        while pair.seen.sleeps < sleeps:
            pair.sleep()
            if time.monotonic() > reported_s + 10.0:
                reported_s = time.monotonic()
                report(pair.seen)
    return pair.seen
