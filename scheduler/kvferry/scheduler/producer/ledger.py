"""The producer's ledger: which request's blocks are leased under which slot, and until when.

No I/O, no clock: the caller brings the time. A slot is free, or belongs to exactly one lease.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_from_text, epoch_to_text, new_epoch
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.params import Blocks
from kvferry.scheduler.producer.states import LEASE_TRANSITIONS, LeaseEvent, LeaseState
from kvferry.scheduler.tally import Tally

HEARTBEATS_PER_LEASE = 6


class LeaseUse(enum.Enum):
    """What a lease is for; the value begins the names of its counters."""

    PROMPT = "leases"
    """A prompt that was prefilled here, for the engine that decodes it: soon, or never."""
    TURN = "turns"
    """A prompt and the answer that was decoded here, for the prefill of the conversation's next turn: some time."""


@dataclass(slots=True)
class Lease:
    """One request's claim on a slot.

    Attributes:
        deadline_s: on the ledger's own clock; meaningful while HELD.
        claimed_until_s: on the same clock; until then a consumer certainly waits, since it has renewed the lease.
        blocks: for the workers, if they want to know them.
        ended_by: why nobody reads any more (`release`, `expired`, …), set when that is decided.
    """

    request_id: str
    slot: int
    epoch: Epoch
    use: LeaseUse = LeaseUse.PROMPT
    state: LeaseState = LeaseState.COMPUTING
    deadline_s: float = 0.0
    claimed_until_s: float = 0.0
    blocks: Blocks = ()
    ended_by: str = ""

    @property
    def name(self) -> LeaseName:
        return LeaseName(slot=self.slot, epoch=epoch_to_text(self.epoch))


@dataclass(slots=True)
class LeaseOrders:
    """What the workers must be told in this step."""

    ends: tuple[LeaseEnd, ...] = ()
    opens: tuple[LeaseOpen, ...] = ()
    holds: tuple[LeaseHold, ...] = ()


@dataclass(slots=True)
class _Pending:
    ends: list[LeaseEnd] = field(default_factory=list)
    opens: list[LeaseOpen] = field(default_factory=list)
    finished: list[Lease] = field(default_factory=list)


class ProducerLedger:
    """All leases of one engine.

    Args:
        slots: size of every worker's lease table.
        lease_s: how long a held lease lives without a renewal.
        turn_s: how long a turn's lives without one; a renewal never shortens it.
        tally: counts `leases_opened`, `leases_refused` and, by how they ended, `leases_released`; for turns
            `turns_opened`, `turns_refused`, `turns_released`, and `turns_offered` when they are held.
    """

    def __init__(
        self,
        slots: int,
        lease_s: float,
        tally: Tally,
        draw_epoch: Callable[[], Epoch] = new_epoch,
        *,
        turn_s: float | None = None,
    ) -> None:
        self.slots = slots
        self.lease_s = lease_s
        self._first_s = {LeaseUse.PROMPT: lease_s, LeaseUse.TURN: lease_s if turn_s is None else turn_s}
        self._tally = tally
        self._draw_epoch = draw_epoch
        self._free = list(range(slots - 1, -1, -1))
        self._by_request: dict[str, Lease] = {}
        self._by_slot: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int, Epoch]] = []
        self._pending = _Pending()
        self._clock_s = 0.0
        self._last_now_s: float | None = None

    def __len__(self) -> int:
        """Leases that are not over."""
        return len(self._by_request)

    def state(self, request_id: str) -> LeaseState | None:
        """Where a request's lease is; None when it has none."""
        lease = self._by_request.get(request_id)
        return lease.state if lease else None

    @property
    def free_slots(self) -> int:
        """Slots that no lease has."""
        return len(self._free)

    def held(self) -> int:
        """Leases whose blocks are kept after the end of their request."""
        return sum(lease.state is not LeaseState.COMPUTING for lease in self._by_request.values())

    def open(self, request_id: str, use: LeaseUse = LeaseUse.PROMPT) -> bool:
        """Open a lease when a request is scheduled for the first time; again is no change.

        Returns:
            False when no slot is free: the request is then served without a transfer.
        """
        if request_id in self._by_request:
            return True
        if not self._free:
            self._tally.add(f"{use.value}_refused")
            return False
        lease = Lease(request_id, self._free.pop(), self._draw_epoch(), use)
        self._by_request[request_id] = self._by_slot[lease.slot] = lease
        self._pending.opens.append(LeaseOpen(slot=lease.slot, epoch=epoch_to_text(lease.epoch)))
        self._tally.add(f"{use.value}_opened")
        return True

    def finish(self, request_id: str, blocks: Blocks = ()) -> Lease | None:
        """The request has ended well: keep its blocks. None when it has no lease.

        Args:
            blocks: what the workers are told of them.
        """
        lease = self._by_request.get(request_id)
        if lease is None:
            return None
        self._advance(lease, LeaseEvent.FINISH)
        lease.blocks = blocks
        self._pending.finished.append(lease)
        if lease.use is LeaseUse.TURN:
            self._tally.add("turns_offered")
        return lease

    def abandon(self, request_id: str) -> None:
        """The request has ended otherwise (aborted, failed): its blocks are not kept. No lease, no change."""
        lease = self._by_request.get(request_id)
        if lease is None:
            return
        self._advance(lease, LeaseEvent.ABANDON)
        untold = [order for order in self._pending.opens if order.slot == lease.slot]
        if untold:
            self._pending.opens.remove(untold[0])
        else:
            self._pending.ends.append(self._end_order(lease))
        self._tally.add(f"{lease.use.value}_released", "abandoned")

    def renew(self, name: LeaseName) -> bool:
        """A consumer still waits: the lease lives `lease_s` from now at least. False when there is no such lease."""
        lease = self._find(name)
        if lease is None or lease.state is LeaseState.ENDING:
            self._tally.add("renewals_unknown")
            return False
        lease.claimed_until_s = self._clock_s + self.lease_s
        lease.deadline_s = max(lease.deadline_s, lease.claimed_until_s)
        return True

    def release(self, name: LeaseName, how: str = "release") -> bool:
        """Nobody reads any more. Remembered when the workers do not know of the hold yet.

        A lease that is still computing has told nobody its epoch, so such a release is unknown like any other.
        """
        lease = self._find(name)
        if lease is None or lease.state is LeaseState.COMPUTING or lease.ended_by:
            self._tally.add("releases_unknown")
            return False
        self._end(lease, how)
        return True

    def release_first_turn(self, how: str, *, claimed: bool = False) -> str | None:
        """End the held turn that would run out first, of those that nobody waits with.

        Args:
            claimed: when there is no other, end one that a consumer waits with: renewed in the last `lease_s`.

        Returns:
            Its request; None when there is no such turn.
        """
        held = [
            x
            for x in self._by_request.values()
            if x.use is LeaseUse.TURN and x.state is LeaseState.HELD and not x.ended_by
        ]
        first = min(held, key=lambda lease: (self._is_claimed(lease), lease.deadline_s), default=None)
        if first is None or (self._is_claimed(first) and not claimed):
            return None
        self._end(first, how)
        return first.request_id

    def release_all(self, how: str) -> int:
        """End every held lease, e.g. because the caches are about to change. Returns how many."""
        ending = [x for x in self._by_request.values() if x.state is not LeaseState.COMPUTING and not x.ended_by]
        for lease in ending:
            self._end(lease, how)
        return len(ending)

    def take_orders(self, now_s: float) -> LeaseOrders:
        """What changed since the last call, for the workers of this engine.

        Time counts only while this process is awake: a pause of the producer itself is not the consumer's silence,
        so a step adds at most one heartbeat to the clock. Call it after everything that arrived has been brought
        in: renewals come before expiry is judged.
        """
        self._wind(now_s)
        for lease in self._due():
            self._end(lease, "expired")
        holds = []
        pending, self._pending = self._pending, _Pending()
        for lease in pending.finished:
            self._advance(lease, LeaseEvent.ANNOUNCE)
            lease.deadline_s = self._clock_s + self._first_s[lease.use]
            self._watch(lease)
            name = lease.name
            holds.append(LeaseHold(request_id=lease.request_id, slot=name.slot, epoch=name.epoch, blocks=lease.blocks))
            if lease.ended_by:
                # Released before the workers knew of the hold: the hold goes out now, its end in the next step.
                self._advance(lease, LeaseEvent.END)
                self._pending.ends.append(self._end_order(lease))
        return LeaseOrders(tuple(pending.ends), tuple(pending.opens), tuple(holds))

    def sent(self, request_id: str) -> None:
        """Every worker has cleared the slot and reported the request: it is over.

        Raises:
            LocalProtocolError: the request is not held.
        """
        lease = self._by_request.get(request_id)
        if lease is None:
            raise LocalProtocolError(f"req={request_id}: reported sent without a lease")
        self._advance(lease, LeaseEvent.SENT)
        self._tally.add(f"{lease.use.value}_released", lease.ended_by or "done")

    def check_integrity(self) -> None:
        """Check that every slot is free or leased, once.

        Raises:
            LocalProtocolError: with the sums.
        """
        leased = sorted(lease.slot for lease in self._by_request.values())
        if sorted(leased + self._free) != list(range(self.slots)) or leased != sorted(self._by_slot):
            raise LocalProtocolError(
                f"lease table: {len(leased)} leased + {len(self._free)} free of {self.slots}, "
                f"{len(self._by_slot)} found by slot"
            )

    def _find(self, name: LeaseName) -> Lease | None:
        lease = self._by_slot.get(name.slot)
        return lease if lease is not None and lease.epoch == epoch_from_text(name.epoch) else None

    def _advance(self, lease: Lease, event: LeaseEvent) -> None:
        after = LEASE_TRANSITIONS.next(lease.state, event, f"req={lease.request_id} slot={lease.slot}")
        if after is not None:
            lease.state = after
            return
        del self._by_request[lease.request_id], self._by_slot[lease.slot]
        self._free.append(lease.slot)

    def _is_claimed(self, lease: Lease) -> bool:
        return lease.claimed_until_s > self._clock_s

    def _end(self, lease: Lease, how: str) -> None:
        if lease.state is LeaseState.HELD:
            self._advance(lease, LeaseEvent.END)
            self._pending.ends.append(self._end_order(lease))
        lease.ended_by = how

    @staticmethod
    def _end_order(lease: Lease) -> LeaseEnd:
        return LeaseEnd(request_id=lease.request_id, slot=lease.slot, epoch=epoch_to_text(lease.epoch))

    def _wind(self, now_s: float) -> None:
        if self._last_now_s is not None:
            self._clock_s += min(max(0.0, now_s - self._last_now_s), self.lease_s / HEARTBEATS_PER_LEASE)
        self._last_now_s = now_s

    def _watch(self, lease: Lease) -> None:
        heapq.heappush(self._deadlines, (lease.deadline_s, lease.slot, lease.epoch))

    def _due(self) -> list[Lease]:
        """Held leases whose time is over. A renewed one is watched again under its new deadline."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= self._clock_s:
            _, slot, epoch = heapq.heappop(self._deadlines)
            lease = self._by_slot.get(slot)
            if lease is None or lease.epoch != epoch or lease.state is not LeaseState.HELD:
                continue
            if lease.deadline_s > self._clock_s:
                self._watch(lease)
            else:
                due.append(lease)
        return due
