"""A random life of one decoder: loads end well, badly and late, blocks stay pinned, requests are preempted and aborted.

The workers are a model: it decides when each load ends and whether its blocks may still be written. vLLM's scheduler
and kvferry's scheduler side are real.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvferry.connector.messages import FerryWorkerMetadata
from tests.engine_core.offers import offer
from tests.harness.core.scheduler import Scheduled, SchedulerEngine, tokens

SHORT = 16
"""Tokens of a short prompt: a block of each group."""
_ROOM = 10
"""Blocks beside pinned ones in which a short prompt certainly fits."""
_LENGTHS = (SHORT, 40, 100, 130, 200, 250, 300)


@dataclass
class Workers:
    """The loads of one engine, as its workers have them.

    Attributes:
        reading: loads that have not ended, in order.
        alive: failed loads whose blocks may still be written.
        read: leases that are over: other engines have read their blocks.
    """

    reading: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    _reported_alive: frozenset[str] = frozenset()

    def take(self, step: Scheduled) -> None:
        """The orders of a step."""
        orders = step.orders
        if orders is not None:
            self.reading += [load.request_id for load in orders.loads]
        self.read |= step.ended

    def report(
        self, step: Scheduled, loaded: set[str], failed: set[str]
    ) -> KVConnectorOutput:
        """The report of a step in which these loads end."""
        self.reading = [name for name in self.reading if name not in loaded | failed]
        alive = frozenset(self.alive)
        over = frozenset(self.read)
        self.read = set()
        news = FerryWorkerMetadata(
            still_written={} if alive == self._reported_alive else {0: alive},
            sent={0: over} if over or step.metadata.wants_report else {},
        )
        self._reported_alive = alive
        return KVConnectorOutput(
            finished_recving={*loaded, *failed} or None,
            failed_recving=failed,
            kv_connector_worker_meta=news if news.still_written or news.sent else None,
        )


class Life:
    """One life of one engine.

    Args:
        draw: all that happens is drawn with it.
        port: of a side channel that takes what it is sent.
        failing: how many of the loads fail, from 0 to 1.
        frozen: whether blocks of failed loads stay pinned until `end`.
    """

    def __init__(
        self,
        engine: SchedulerEngine,
        draw: random.Random,
        port: int,
        *,
        failing: float,
        frozen: bool,
        is_producer: bool,
    ) -> None:
        self.engine = engine
        self.random = draw
        self.workers = Workers()
        self._port = port
        self._failing = failing
        self._pinning = 0.5
        self._frozen = frozen
        self._is_producer = is_producer
        self._names = iter(f"r{number}" for number in range(10**6))

    def live(self, turns: int) -> None:
        for _ in range(turns):
            event = self.random.choices(
                (self._arrive, self._abort, self._unpin, self._wait), (5, 1, 1, 3), k=1
            )[0]
            event()
            for _ in range(self.random.choice((0, 1, 1, 2, 6))):
                self.step()

    def end(self) -> None:
        """No more requests come, and all loads end. First pins last, and only what cannot fit beside them may wait."""
        self._settle(lambda: False, 150)
        quarantine = self.engine.connector.scheduler_side.loads.quarantine
        if self.engine.blocks_at_start - quarantine.num_blocks >= _ROOM:
            short = self.add(SHORT, loads=False, max_tokens=1)
            self._settle(
                lambda: self.engine.answers[short].finish_reason is not None, 150
            )
            assert self.engine.answers[short].finish_reason is not None, (
                f"a short prompt waits: {self.states()}"
            )
        self._pinning = 0.0
        self.workers.alive.clear()
        self._settle(
            self.engine.is_idle, 60 * (1 + len(self.engine.scheduler.requests))
        )
        assert self.engine.is_idle(), f"requests stand still: {self.states()}"

    def _settle(self, over: Callable[[], bool], limit: int) -> None:
        for _ in range(limit):
            if over():
                return
            self.step(ending=1.0)

    def step(self, ending: float | None = None) -> None:
        """One step, in which each load that was ordered before it ends with this probability."""
        engine = self.engine
        step = engine.schedule()
        odds = self.random.choice((0.0, 0.1, 0.7)) if ending is None else ending
        over = {name for name in self.workers.reading if self.random.random() < odds}
        failed = {name for name in sorted(over) if self.random.random() < self._failing}
        pinned = {
            name for name in sorted(failed) if self.random.random() < self._pinning
        }
        self.workers.alive |= pinned
        self.workers.take(step)
        held = engine.connector.scheduler_side.leases.block_references.held
        self.workers.read |= {name for name in held if self.random.random() < odds}
        engine.finish(step, worker=self.workers.report(step, over - failed, failed))

    def add(self, length: int, *, loads: bool, max_tokens: int = 0) -> str:
        name = next(self._names)
        prompt = tokens(length, seed=self.random.randrange(1, 40))
        params: dict[str, Any] | None = None
        if loads:
            params = offer(prompt, port=self._port)
        elif self._is_producer and self.random.random() < 0.3:
            params = {"do_remote_decode": True}
        max_tokens = max_tokens or self.random.choice((1, 3, 20))
        self.engine.add(
            name,
            prompt,
            params,
            max_tokens=max_tokens,
            priority=self.random.randrange(3),
        )
        return name

    def states(self) -> dict[str, Any]:
        """What a failure shows."""
        requests = self.engine.scheduler.requests.values()
        return {
            "requests": {
                f"{x.request_id} of {x.num_tokens}": str(RequestStatus(x.status))
                for x in requests
            },
            "first queue": [
                x.request_id for x in self.engine.scheduler.kv_holding_waiting
            ],
            "free": self.engine.free_blocks,
            "reading": self.workers.reading,
            "pinned": sorted(self.workers.alive),
        }

    def _arrive(self) -> None:
        if len(self.engine.scheduler.requests) < 10:
            for _ in range(self.random.choice((1, 1, 4))):
                self.add(self.random.choice(_LENGTHS), loads=self.random.random() < 0.7)

    def _abort(self) -> None:
        running = [
            name
            for name, answer in self.engine.answers.items()
            if answer.finish_reason is None
        ]
        alive = [name for name in running if name in self.engine.scheduler.requests]
        if alive:
            self.engine.abort(self.random.choice(alive))

    def _unpin(self) -> None:
        if not self._frozen and self.workers.alive:
            self.workers.alive.discard(self.random.choice(sorted(self.workers.alive)))

    def _wait(self) -> None:
        for _ in range(self.random.randrange(5)):
            self.step()
