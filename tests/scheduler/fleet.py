"""Two engines without sockets, GPUs or NIXL: real ledgers, real lease tables, blocks that are names, a bad network.

A block's content is the name of the request that owns it, so a decoder that accepts a reused block is seen at once.
Everything happens at random times drawn from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.state import HEARTBEATS_PER_LEASE
from tests.scheduler.consumer_end import Consumer
from tests.scheduler.producer_end import Producer, ProducerWorker


class Network:
    """Delivers late, twice, out of order, or never."""

    def __init__(self, draw: random.Random, *, loss: float, perfect: bool) -> None:
        self.draw = draw
        self.loss = loss
        self.perfect = perfect
        self._flying: list[tuple[int, Callable[[], None]]] = []

    def is_quiet(self) -> bool:
        return not self._flying

    def send(self, deliver: Callable[[], None]) -> None:
        if self.perfect:
            self._flying.append((0, deliver))
            return
        while self.draw.random() >= self.loss:
            self._flying.append((self.draw.choice((0, 0, 1, 5, 30)), deliver))
            if self.draw.random() < 0.9:
                return

    def tick(self) -> None:
        if not self.perfect:
            self.draw.shuffle(self._flying)
        due = [deliver for ticks, deliver in self._flying if ticks <= 0]
        self._flying = [(ticks - 1, deliver) for ticks, deliver in self._flying if ticks > 0]
        for deliver in due:
            deliver()


class Fleet:
    """One producer, one consumer, and the network between them.

    Args:
        perfect: no message is lost, late or sent twice, and no wait is as long as a lease.
        fenced_before, fenced_after: False removes one of the two reads of the slot, to show that both are needed.
    """

    def __init__(
        self,
        seed: int,
        *,
        workers: tuple[int, int] = (1, 1),
        loss: float = 0.1,
        slots: int = 4,
        perfect: bool = False,
        fenced_before: bool = True,
        fenced_after: bool = True,
    ) -> None:
        self.draw = random.Random(seed)
        self.fenced_before, self.fenced_after = fenced_before, fenced_after
        self.perfect = perfect
        self.lease_s = 300.0 if perfect else 3.0
        self.now_s = 500.0
        self.network = Network(self.draw, loss=loss, perfect=perfect)
        self.producer = Producer(self.draw, workers=workers[0], slots=slots, lease_s=self.lease_s)
        self.consumer = Consumer(self, workers[1])
        self.consumer_lives = True
        self.answers: list[RemotePrefill] = []

    def routes(self, consumer_worker: int) -> list[ProducerWorker]:
        """The producer workers that one consumer worker reads from; together they read from all of them."""
        ours, theirs = len(self.consumer.workers), len(self.producer.workers)
        pairs = {(index % ours, index % theirs) for index in range(max(ours, theirs))}
        return [self.producer.workers[remote] for local, remote in sorted(pairs) if local == consumer_worker]

    def readers(self, route: ProducerWorker) -> int:
        """How many consumer workers read from this producer worker."""
        return sum(any(route is one for one in self.routes(x.index)) for x in self.consumer.workers)

    def tick(self, *, busy: bool = True) -> None:
        self.now_s += self.draw.choice((0.001, 0.05, 0.1, 3.0 / HEARTBEATS_PER_LEASE))
        if busy and self.draw.random() < 0.5:
            self.producer.start()
        answer = self.producer.finish_one() if self.draw.random() < 0.4 or not busy else None
        if answer is not None and self.consumer_lives:
            copies = 1 if self.perfect else self.draw.choice((0, 1, 1, 1, 2))
            self.answers += [answer] * copies
        if self.answers and self.draw.random() < 0.5:
            again = not self.perfect and self.draw.random() < 0.1
            self.consumer.arrive(self.draw.choice(self.answers) if again else self.answers.pop(0))
        self.network.tick()
        if self.consumer_lives:
            self.consumer.step(self.now_s)
        self.producer.step(self.now_s)
        self.producer.ledger.check_integrity()
        self.consumer.ledger.check_integrity()

    def is_quiet(self) -> bool:
        """Whether nothing is under way any more."""
        loads = len(self.consumer.ledger) if self.consumer_lives else 0
        producing = len(self.producer.ledger) or any(worker.orders for worker in self.producer.workers)
        return self.network.is_quiet() and not (self.answers or loads or producing)

    def kill_consumer(self) -> None:
        """Stop the consumer in the middle of its work, without a message."""
        self.consumer_lives = False
        self.answers.clear()
