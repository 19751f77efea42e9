"""The engines of a soak and its loop."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from bench.soak_counts import Counts, Gauges
from bench.soak_engine import SETTINGS, STAGED, SoakEngine
from bench.soak_request import Life, life
from bench.soak_schedule import Script, script
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import Hello, Renew
from kvferry.protocol.params import RemotePrefill
from kvferry.worker.loads.state import LoadState
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from tests.geometry.caches import Side
from tests.geometry.handmade import attention, side
from tests.harness.integrity import check_worker
from tests.harness.ledgers import check_ledgers

MODEL = attention(layers=4, heads=4, size=8)
MOST_AT_ONCE = 48
_IDLE_WITHIN_S = 60.0
_POLL_S = 2.0
_GRAVE_S = 3.0
_NOT_READY_S = 0.3
_ROUNDS = (0.0, 0.5, 0.5, 0.5)
"""Parts of the soak after which every engine is restarted once. After the first round the allocators have what
restarts take, whatever the seed draws. The others follow one another, to tell what lives add from what requests add:
faults restart engines as requests go on, and a fit over both knew neither share (15 descriptors a life, and -14 for
1,000 requests)."""


@dataclass(frozen=True)
class Kind:
    """One engine of the fleet, whatever lives it has."""

    text: str
    side: Side
    settings: WorkerSettings = SETTINGS


PRODUCERS = (
    Kind("TP 1, blocks of 16", side(MODEL, blocks=160)),
    Kind(
        "TP 2, blocks of 32, tokens outermost",
        side(MODEL, tp=2, block=32, layout="NHD", blocks=120),
    ),
    Kind("TP 4 × PP 2, blocks of 16", side(MODEL, tp=4, pp=2, blocks=160)),
)
CONSUMERS = (
    Kind("TP 2, blocks of 16, in place", side(MODEL, tp=2, blocks=160)),
    Kind(
        "TP 1, blocks of 8, tokens outermost, staged",
        side(MODEL, block=8, layout="NHD", blocks=320),
        STAGED,
    ),
    Kind(
        "TP 2, blocks of 32, CPU layout, staged",
        side(MODEL, tp=2, block=32, layout="cpu", blocks=120),
        STAGED,
    ),
)


class Fleet:
    """Runs requests by their scripts until it is stopped.

    Args:
        seed, fault_rate, streamed: of the scripts.
        mapped: the fraction of the consumers' lives that map their producers' memory.
        report: called about once in ten seconds with a line.
    """

    def __init__(
        self,
        seed: int,
        fault_rate: float,
        streamed: float,
        mapped: float,
        report: Callable[[str], None],
    ) -> None:
        self.script = partial(script, seed, fault_rate=fault_rate, streamed=streamed)
        self.counts, self.gauges = Counts(), Gauges()
        self.counter_totals: Counter[tuple[str, str]] = Counter()
        self.lives = 0
        self._consumer_lives = 0
        self._mapped = mapped
        self.leases_ended_with_engines = 0
        self.last_params: RemotePrefill | None = None
        self.token_bytes = sum(
            kind.heads * kind.elements * kind.element_bytes
            for kind in MODEL.groups[0].kinds
        ) * len(MODEL.layers)
        self.stop = threading.Event()
        self._report = report
        self._reported_s = time.monotonic()
        self._polled_s = time.monotonic()
        self._deaf: dict[SoakEngine, float] = {}
        self._frozen: dict[SoakEngine, float] = {}
        self._not_ready: dict[SoakEngine, float] = {}
        self._has_buried = False
        self._graves: list[tuple[SoakEngine, threading.Thread, float]] = []
        self._due = deque(
            (part, index)
            for part in _ROUNDS
            for index in range(len(PRODUCERS + CONSUMERS))
        )
        self.moved: Counter[str] = Counter()
        self.producers = [
            self._start(f"P{index}", kind) for index, kind in enumerate(PRODUCERS)
        ]
        self.consumers = [
            self._start(f"C{index}", self._next_consumer(kind))
            for index, kind in enumerate(CONSUMERS)
        ]

    def run(self, requests: int | None, seconds: float | None) -> None:
        """So many requests, or so long, or until `stop` is set; then everything that is under way ends."""
        start_s = time.monotonic()
        end_s = None if seconds is None else start_s + seconds
        numbers: Iterator[int] = (
            itertools.count() if requests is None else iter(range(requests))
        )
        running: dict[Life, Script] = {}
        more = True
        while more or running:
            while more and len(running) < MOST_AT_ONCE:
                index = next(numbers, None)
                more = (
                    index is not None
                    and (end_s is None or time.monotonic() < end_s)
                    and not self.stop.is_set()
                )
                if more and index is not None:
                    drawn = self.script(
                        index, producers=len(PRODUCERS), consumers=len(CONSUMERS)
                    )
                    running[life(self, drawn)] = drawn
            progress = self._resume(running)
            self.step()
            over = self.counts.requests / requests if requests else 0.0
            if seconds is not None:
                over = max(over, (time.monotonic() - start_s) / seconds)
            self._poll(len(running), over)
            if not progress:
                time.sleep(0.0005)

    def step(self) -> None:
        """One step of every engine."""
        now_s = time.monotonic()
        for engine, until_s in list(self._not_ready.items()):
            if now_s > until_s:
                del self._not_ready[engine]
                engine.listener.publish(engine.description)
        for engine, until_s in list(self._deaf.items()):
            if now_s > until_s or engine.is_dead:
                del self._deaf[engine]
            else:
                _drop_renewals(engine)
        self._frozen = {
            engine: until_s
            for engine, until_s in self._frozen.items()
            if now_s < until_s
        }
        for engine in self._engines():
            if engine not in self._frozen:
                engine.step()
        for grave in [
            grave
            for grave in self._graves
            if now_s > grave[2] and not grave[1].is_alive()
        ]:
            self._graves.remove(grave)
            self._drain(grave[0])
            self._has_buried = True

    def deafen(self, producer: SoakEngine, until_s: float) -> None:
        """Renewals do not reach it for a while."""
        self._deaf[producer] = until_s

    def freeze(self, engine: SoakEngine, until_s: float) -> None:
        """It takes no step for a while; its workers' threads go on."""
        self._frozen[engine] = until_s

    def restart_producer(self, index: int, choice: int) -> None:
        """It is gone at once; its next life listens on the same port, at first not ready, slow, or well."""
        self.producers[index] = made = self._restart(
            self.producers[index], PRODUCERS[index]
        )
        if choice % 3 == 1:
            made.listener._published = None
            self._not_ready[made] = time.monotonic() + _NOT_READY_S
        elif choice % 3 == 2:
            _answer_slowly(made)

    def restart_consumer(self, index: int) -> None:
        """End it at once, with its loads, and start it again; the loads' leases are not renewed."""
        kind = self._next_consumer(CONSUMERS[index])
        self.consumers[index] = self._restart(self.consumers[index], kind)

    def close(self) -> None:
        """Everything ends; what must not be left is counted under `violations`."""
        self._wait_until_idle()
        self._sample(now=True)
        for engine in self._engines():
            self._check_idle(engine)
            engine.kill().join(60.0)
            self._drain(engine)
        for engine, thread, _ in self._graves:
            thread.join(60.0)
            self._drain(engine)
        self._check_sums()

    def _engines(self) -> list[SoakEngine]:
        return [*self.producers, *self.consumers]

    def _next_consumer(self, kind: Kind) -> Kind:
        """Whether the next life of a consumer maps: as many of them all as the fraction says."""
        life = self._consumer_lives
        self._consumer_lives += 1
        maps = int((life + 1) * self._mapped) > int(life * self._mapped)
        mapped_reads = MappedReadsOption.AUTO if maps else MappedReadsOption.OFF
        return replace(kind, settings=replace(kind.settings, mapped_reads=mapped_reads))

    def _start(self, name: str, kind: Kind, port: int | None = None) -> SoakEngine:
        self.lives += 1
        return SoakEngine(name, MODEL, kind.side, kind.settings, port)

    def _restart(self, old: SoakEngine, kind: Kind) -> SoakEngine:
        thread = old.kill()
        self.leases_ended_with_engines += len(old.leases)
        self._graves.append((old, thread, time.monotonic() + _GRAVE_S))
        return self._start(old.name, kind, old.port)

    def _resume(self, running: dict[Life, Script]) -> bool:
        progress = False
        for one, drawn in list(running.items()):
            try:
                next(one)
            except StopIteration as over:
                del running[one]
                self.counts.over(drawn.fault, over.value)
                progress = True
        return progress

    def _restart_one(self, over: float) -> None:
        """The next of the restarts that no fault asks for, if so much of the soak is over."""
        if not self._due or over < self._due[0][0]:
            return
        part, index = self._due.popleft()
        if index < len(PRODUCERS):
            self.restart_producer(index, 0)
        else:
            self.restart_consumer(index - len(PRODUCERS))
        if part == _ROUNDS[0]:
            self.gauges.warm = len(self.gauges.samples)

    def _poll(self, running: int, over: float) -> None:
        """Now and then: gauges, a restart, integrity, a line."""
        if self._has_buried:
            # An engine refers to itself: its files would be open until Python looks for such objects, which may take
            # several lives.
            self._has_buried = False
            gc.collect()
        if self._sample():
            self._restart_one(over)
        now_s = time.monotonic()
        if now_s > self._polled_s + _POLL_S:
            self._polled_s = now_s
            for engine in self._engines():
                self._check_integrity(engine)
                engine.counters.take_samples()  # as vLLM's metrics do
        if now_s > self._reported_s + 10.0:
            self._reported_s = now_s
            last = self.gauges.samples[-1]
            good = self.counts.loads["loaded"]
            self._report(
                f"{self.counts.requests} requests in {last.at_s:.0f} s ({self.counts.requests / last.at_s:.0f}/s), "
                f"{good} loaded, {self.counts.loads.total() - good} failed, {running} under way, "
                f"{self.lives} lives, {last.rss_mb:.0f} MB, {last.fds} fds, {last.threads} threads, "
                f"{self.counts.violations.total()} violations"
            )

    def _sample(self, *, now: bool = False) -> bool:
        """Take a sample of the gauges if it is time. Returns whether it was."""
        return self.gauges.poll(
            self.counts.requests,
            self.lives,
            mapping=tuple(engine.maps for engine in self.consumers),
            calm=not self._graves,
            now=now,
        )

    def _check_integrity(self, engine: SoakEngine, *, idle: bool = False) -> None:
        try:
            check_ledgers(engine.leases, engine.loads)
            for worker in engine.workers:
                check_worker(worker, idle=idle)
        except KvferryError as wrong:
            self.counts.violations[f"integrity of {engine.name}: {wrong}"] += 1
        broken = sum(memory.broken_guards() for memory in engine.memories)
        if broken:
            self.counts.violations[
                f"{engine.name}: bytes beside the blocks were written"
            ] += broken

    def _wait_until_idle(self) -> None:
        end_s = time.monotonic() + _IDLE_WITHIN_S
        while time.monotonic() < end_s and (
            self._graves or not all(_is_idle(engine) for engine in self._engines())
        ):
            self.step()
            time.sleep(0.002)

    def _check_idle(self, engine: SoakEngine) -> None:
        """Nothing is left of anything, and no block was written while it was free."""
        self._check_integrity(engine, idle=True)
        engine.take(len(engine.free))
        left = {
            "blocks": len(engine.leased),
            "leases": len(engine.leases),
            "loads": len(engine.loads),
            "quarantined loads": len(engine.seen.alive),
            "transfers": sum(fabric.transfers() for fabric in engine.fabrics),
            "free blocks that were written": engine.spoilt,
        }
        for what, count in left.items():
            if count:
                self.counts.violations[f"{engine.name} ends with {count} {what}"] += 1

    def _drain(self, engine: SoakEngine) -> None:
        """The figures of a life that is over."""
        for key, amount in engine.counters.take().items():
            self.counter_totals[key] += amount
        self.moved.update(engine.moved)
        if engine.spoilt and engine.is_dead:
            self.counts.violations[f"{engine.name}: free blocks were written"] += (
                engine.spoilt
            )

    def _check_sums(self) -> None:
        """Everything that was begun has ended in one way."""
        of = {
            name: sum(
                n for (metric, _), n in self.counter_totals.items() if metric == name
            )
            for name, _ in self.counter_totals
        }
        opened, released = of.get("leases_opened", 0), of.get("leases_released", 0)
        if opened != released + self.leases_ended_with_engines:
            text = f"{opened} leases opened, {released} released, {self.leases_ended_with_engines} ended with engines"
            self.counts.violations[text] += 1
        if of.get("loads", 0) != self.counts.loads.total():
            self.counts.violations[
                f"{of.get('loads', 0)} loads ordered, {self.counts.loads.total()} ended"
            ] += 1


def _is_idle(engine: SoakEngine) -> bool:
    flushing = any(worker.count_loads(LoadState.FLUSHING) for worker in engine.workers)
    quiet = not (
        len(engine.leases) or len(engine.loads) or engine.seen.alive or flushing
    )
    return (
        quiet
        and len(engine.free) == engine.blocks
        and not any(fabric.waiting for fabric in engine.soak_fabrics)
    )


def _drop_renewals(engine: SoakEngine) -> None:
    for received in engine.listener.inbox.take():
        if received.kind is not Renew:
            engine.listener.inbox.put(
                received.kind(boot=received.boot, leases=(received.name,))
            )


def _answer_slowly(engine: SoakEngine) -> None:
    answer = engine.listener._answer_hello

    def slowly(hello: Hello) -> bytes:
        time.sleep(_NOT_READY_S)
        return answer(hello)

    engine.listener._answer_hello = slowly  # type: ignore[method-assign]
