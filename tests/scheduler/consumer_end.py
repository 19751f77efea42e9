"""The consuming end of a fake fleet: real ledger, workers that read word, blocks, word, and a heartbeat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.protocol.handshake import Release, Renew
from kvferry.protocol.ids import SlotState, epoch_from_text, slot_word
from kvferry.protocol.notifications import Done, encode_notification
from kvferry.protocol.orders import LoadOrder
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import LeaseKey, ReleaseLease, RemoteLease, RenewLease
from kvferry.scheduler.state import HEARTBEATS_PER_LEASE, Counters
from tests.protocol.samples import BOOT

if TYPE_CHECKING:
    from tests.scheduler.fleet import Fleet


@dataclass
class ConsumerWorker:
    """Reads word, blocks, word from every producer worker of its routes, each at a random time."""

    index: int
    fleet: Fleet
    loads: dict[str, Iterator[bool | None]] = field(default_factory=dict)
    reported: list[tuple[str, bool]] = field(default_factory=list)

    def step(self, draw: random.Random) -> None:
        for request_id in list(self.loads):
            if draw.random() < 0.6:
                good = next(self.loads[request_id])
                if good is not None:
                    del self.loads[request_id]
                    self.reported.append((request_id, good))

    def load(self, order: LoadOrder) -> None:
        self.loads[order.request_id] = self._steps(order)

    def _steps(self, order: LoadOrder) -> Iterator[bool | None]:
        ticket = order.source.kvferry
        epoch = epoch_from_text(ticket.lease_epoch)
        computing, ready = (slot_word(epoch, state) for state in (SlotState.COMPUTING, SlotState.READY))
        routes = self.fleet.routes(self.index)
        while True:
            before = {int(route.table.words[ticket.lease_slot]) for route in routes}
            if before == {ready} or not self.fleet.fenced_before:
                break
            if not before <= {ready, computing}:
                yield False
            yield None
        found = []
        for block in order.source.remote_block_ids[0]:
            yield None
            found.append(self.fleet.producer.blocks[block])
        yield None
        after = {int(route.table.words[ticket.lease_slot]) for route in routes}
        if after != {ready} and self.fleet.fenced_after:
            yield False
        expected = [order.source.remote_request_id] * 2
        assert found == expected, f"accepted {found}, expected {expected}"
        for route in routes:
            done = Done(
                slot=ticket.lease_slot,
                epoch=ticket.lease_epoch,
                consumer=BOOT,
                worker=self.index,
                expected=self.fleet.readers(route),
            )
            frame = encode_notification(done)
            self.fleet.network.send(lambda route=route, frame=frame: route.notified(frame))  # type: ignore[misc]
        yield True


class Consumer:
    """Requests that wait for remote blocks, and the heartbeat of those that do."""

    def __init__(self, fleet: Fleet, workers: int) -> None:
        self.fleet = fleet
        self.draw = fleet.draw
        self.counters = Counters()
        # Ended leases are not remembered: every replay is tried, so that the fence has to refuse it.
        self.ledger = ConsumerLedger(self.counters, max_ended=0)
        self.workers = [ConsumerWorker(index, fleet) for index in range(workers)]
        self.kept: dict[LeaseKey, RemoteLease] = {}
        self.next_beat_s = 0.0
        self.unscheduled: list[str] = []
        self.decoding: list[str] = []
        self.answers: dict[str, dict[int, bool]] = {}
        self.good: set[str] = set()
        self.started = 0

    def arrive(self, source: RemotePrefill) -> None:
        self.started += 1
        request_id = f"decode-{self.started}"
        shared = 300 if self.fleet.perfect else self.draw.choice((0, 256, 300, 300, 300))
        if self.ledger.offer(request_id, source, shared, 0.0) is None:
            self.unscheduled.append(request_id)

    def step(self, now_s: float) -> None:
        for request_id in list(self.unscheduled):
            fate = self.draw.choice(("wait", "load", "load", "hit", "abort"))
            if fate == "abort":
                self.ledger.finished(request_id)
            elif fate != "wait":
                local = 16 if fate == "load" else 300
                count = self.ledger.matched_tokens(request_id, local)
                self.ledger.allocated(request_id, count, ((1, 2),))
                self.decoding.append(request_id)
            if fate != "wait":
                self.unscheduled.remove(request_id)
        for order in self.ledger.take_orders():
            self.answers[order.request_id] = {}
            for worker in self.workers:
                worker.load(order)
        for worker in self.workers:
            worker.step(self.draw)
        self._collect()
        for request_id in list(self.decoding):
            if self.draw.random() < 0.2:
                self.decoding.remove(request_id)
                self.ledger.finished(request_id)
        self._speak(now_s)

    def _collect(self) -> None:
        for worker in self.workers:
            for request_id, good in worker.reported:
                self.answers[request_id][worker.index] = good
                if len(self.answers[request_id]) == len(self.workers):
                    if all(self.answers.pop(request_id).values()):
                        assert self.ledger.loaded(request_id) is not None
                        self.good.add(request_id)
                    else:
                        assert self.ledger.failed(request_id) is not None
            worker.reported.clear()

    def _speak(self, now_s: float) -> None:
        for command in self.ledger.take_commands():
            if isinstance(command, RenewLease):
                assert command.lease.key not in self.kept
                self.kept[command.lease.key] = command.lease
                continue
            self.kept.pop(command.lease.key, None)
            if isinstance(command, ReleaseLease):
                self._send(Release(boot=BOOT, leases=(command.lease.name,)))
        if now_s >= self.next_beat_s and self.kept:
            self.next_beat_s = now_s + self.fleet.lease_s / HEARTBEATS_PER_LEASE
            self._send(Renew(boot=BOOT, leases=tuple(lease.name for lease in self.kept.values())))

    def _send(self, message: Renew | Release) -> None:
        self.fleet.network.send(lambda: self.fleet.producer.inbox.append(message))
