"""The producing end of a fake fleet: real ledger, real lease tables, blocks that are names."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.ids import SlotState, epoch_from_text, slot_word
from kvferry.protocol.notifications import decode_notification
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.producer.lease import LeaseOrders, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.state import Counters
from kvferry.worker.leases import LeaseTable
from tests.fakes.device_mark import FakeMark
from tests.protocol.samples import make_ticket, params_of_length

FREE = "free"
ROUNDING_S = 1e-6


@dataclass
class ProducerWorker:
    """Executes its orders at random times; the scheduler sees its reports a step later.

    Attributes:
        wrote: called when the device has finished with a request's blocks, just before the slot says so.
    """

    table: LeaseTable
    wrote: Callable[[str], None]
    orders: list[LeaseOrders] = field(default_factory=list)
    not_ready: list[tuple[str, FakeMark]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)

    def step(self, draw: random.Random) -> None:
        while self.not_ready and draw.random() < 0.6:
            request_id, mark = self.not_ready.pop(0)
            self.wrote(request_id)
            mark.over = True
            self.table.advance()
        while self.orders and draw.random() < 0.7:
            orders = self.orders.pop(0)
            for end in orders.ends:
                self._report(self.table.end(end))
            for opened in orders.opens:
                self.table.open(opened)
            for hold in orders.holds:
                mark = FakeMark()
                self._report(self.table.hold(hold, mark))
                self.not_ready.append((hold.request_id, mark))

    def notified(self, frame: bytes) -> None:
        with contextlib.suppress(KeyError):
            self._report(self.table.done(decode_notification(frame)))

    def _report(self, request_id: str | None) -> None:
        if request_id is not None:
            self.reported.append(request_id)


class Producer:
    """Blocks, requests and their leases, some of them of turns. Two blocks a request."""

    def __init__(self, draw: random.Random, *, workers: int, slots: int, lease_s: float) -> None:
        self.draw = draw
        self.counters = Counters()
        self.first_s = {LeaseUse.PROMPT: lease_s, LeaseUse.TURN: 2 * lease_s}
        self.ledger = ProducerLedger(slots, lease_s, self.counters, turn_s=2 * lease_s)
        self.workers = [ProducerWorker(LeaseTable(slots), self._wrote) for _ in range(workers)]
        self.blocks = [FREE] * (slots * 3)
        self.owned: dict[str, tuple[int, int]] = {}
        self.running: list[str] = []
        self.inbox: list[Renew | Release] = []
        self.waiting_for: dict[str, Counter[int]] = {}
        self.overdue_after: dict[str, float] = {}
        self.sent: Counter[str] = Counter()
        self.started = 0

    def start(self) -> None:
        free = [index for index, owner in enumerate(self.blocks) if owner == FREE]
        if len(free) < 2:
            return
        self.started += 1
        request_id = f"req-{self.started}"
        self.owned[request_id] = (free[0], free[1])
        for block in free[:2]:
            self.blocks[block] = f"unfinished {request_id}"
        if self.ledger.open(request_id, self.draw.choice(list(LeaseUse))):
            self.running.append(request_id)
        else:
            self._free(request_id)

    def finish_one(self) -> RemotePrefill | None:
        finishable = [request_id for request_id in self.running if self._computes(request_id)]
        if not finishable:
            return None
        request_id = self.draw.choice(finishable)
        self.running.remove(request_id)
        if self.draw.random() < 0.15:
            self.ledger.abandon(request_id)
            self._free(request_id)
            return None
        lease = self.ledger.finish(request_id)
        assert lease is not None
        ticket = make_ticket(
            lease_slot=lease.slot,
            lease_epoch=lease.name.epoch,
            lease_s=self.ledger.lease_s,
        )
        blocks = (self.owned[request_id],)
        return params_of_length(300, remote_request_id=request_id, remote_block_ids=blocks, kvferry=ticket)

    def _computes(self, request_id: str) -> bool:
        """A request's first token is out only after every worker had the step's orders."""
        lease = self.ledger._by_request[request_id]
        word = slot_word(epoch_from_text(lease.name.epoch), SlotState.COMPUTING)
        return all(worker.table.words[lease.slot] == word for worker in self.workers)

    def step(self, now_s: float) -> None:
        for worker in self.workers:
            worker.step(self.draw)
        self._collect()
        for message in self.inbox:
            for name in message.leases:
                if isinstance(message, Release):
                    self.ledger.release(name)
                else:
                    self._renewed(name, now_s)
        self.inbox.clear()
        orders = self.ledger.take_orders(now_s)
        for end in orders.ends:
            self.overdue_after.pop(end.request_id, None)
        for hold in orders.holds:
            use = self.ledger._by_request[hold.request_id].use
            self.overdue_after[hold.request_id] = now_s + self.first_s[use]
        for worker in self.workers:
            worker.orders.append(orders)
        for request_id, overdue_s in self.overdue_after.items():
            assert now_s < overdue_s + ROUNDING_S, f"{request_id} is held although its lease ended at {overdue_s}"

    def _renewed(self, name: LeaseName, now_s: float) -> None:
        if self.ledger.renew(name):
            holder = [x for x in self.ledger._by_request.values() if x.slot == name.slot]
            before_s = self.overdue_after.get(holder[0].request_id, 0.0)
            self.overdue_after[holder[0].request_id] = max(before_s, now_s + self.ledger.lease_s)

    def _collect(self) -> None:
        """As vLLM's aggregator: a request is over when every worker has reported it, each once."""
        for index, worker in enumerate(self.workers):
            for request_id in worker.reported:
                reports = self.waiting_for.setdefault(request_id, Counter())
                reports[index] += 1
                assert reports[index] == 1, f"{request_id} reported twice by worker {index}"
                if len(reports) == len(self.workers):
                    self.ledger.sent(request_id)
                    self.sent[request_id] += 1
                    self.overdue_after.pop(request_id, None)
                    self._free(request_id)
            worker.reported.clear()

    def _wrote(self, request_id: str) -> None:
        for block in self.owned.get(request_id, ()):
            self.blocks[block] = request_id

    def _free(self, request_id: str) -> None:
        for block in self.owned.pop(request_id):
            self.blocks[block] = FREE
