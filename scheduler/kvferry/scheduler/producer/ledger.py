"""The producer's ledger: which request's blocks are leased under which slot, and until when.

No I/O, no clock: the caller passes the time. A slot is free or belongs to exactly one lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, EpochDraw, epoch_from_text
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.protocol.params import Blocks
from kvferry.scheduler.producer.block_references import BlockReferences
from kvferry.scheduler.producer.deadlines import Deadlines
from kvferry.scheduler.producer.eviction_order import Candidate, Rank, rank_of
from kvferry.scheduler.producer.lease import LEASE_TRANSITIONS, Lease, LeaseEvent, LeaseState, LeaseUse
from kvferry.scheduler.state.clock import HEARTBEATS_PER_LEASE, AwakeClock
from kvferry.scheduler.state.counters import Counters
from kvferry.scheduler.state.transitions import Observer

_OPENED, _REFUSED, _RELEASED = (
    {use: f"{use.value}_{what}" for use in LeaseUse} for what in ("opened", "refused", "released")
)
"""Names of counters."""


@dataclass(frozen=True, slots=True)
class LeaseOrders:
    """Lease orders of one step, for the workers."""

    ends: tuple[LeaseEnd, ...] = ()
    opens: tuple[LeaseOpen, ...] = ()
    holds: tuple[LeaseHold, ...] = ()


_NO_ORDERS = LeaseOrders()


@dataclass(slots=True)
class _Pending:
    ends: list[LeaseEnd] = field(default_factory=list)
    opens: list[LeaseOpen] = field(default_factory=list)
    finished: list[Lease] = field(default_factory=list)


class ProducerLedger:
    """All leases of one engine.

    Args:
        slots: size of every worker's lease table.
        lease_s: lifetime of a held lease without a renewal.
        turn_s: the same for a turn's lease; a renewal never shortens it.
        draw_epoch: fresh epochs; random ones when None.
        counters: counts `leases_opened`, `leases_refused` and, by how they ended, `leases_released`; for turns
            `turns_opened`, `turns_refused`, `turns_released`, and `turns_offered` when they are held.

    Attributes:
        block_references: references of leases on blocks, after the end of their requests.
        clock: seconds that this process was awake; every step winds it.
        observer: called for every lease that is opened, and for every one that is over.
    """

    def __init__(
        self,
        slots: int,
        lease_s: float,
        counters: Counters,
        draw_epoch: Callable[[], Epoch] | None = None,
        *,
        turn_s: float | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        self.slots = slots
        self.lease_s = lease_s
        self._first_s = {LeaseUse.PROMPT: lease_s, LeaseUse.TURN: lease_s if turn_s is None else turn_s}
        self._counters = counters
        self._draw_epoch = draw_epoch or EpochDraw()
        self._free = list(range(slots - 1, -1, -1))
        self._by_request: dict[str, Lease] = {}
        self._by_slot: dict[int, Lease] = {}
        self.block_references = BlockReferences()
        self.clock = AwakeClock(self.heartbeat_s) if clock is None else clock
        self._deadlines = Deadlines(self._by_slot)
        self._pending = _Pending()
        self.observer = Observer()

    def __len__(self) -> int:
        """The number of leases that are not over."""
        return len(self._by_request)

    def state(self, request_id: str) -> LeaseState | None:
        """The state of a request's lease; None without a lease."""
        lease = self._by_request.get(request_id)
        return lease.state if lease else None

    def knows(self, name: LeaseName) -> bool:
        """Whether there is such a lease. May be called from any thread."""
        return self._find(name) is not None

    @property
    def clock_s(self) -> float:
        """The current time of `clock`."""
        return self.clock.awake_s

    @property
    def has_orders(self) -> bool:
        """Whether orders for the workers are pending: blocks cannot be read before their hold is announced."""
        return bool(self._pending.ends or self._pending.opens or self._pending.finished)

    @property
    def may_have_due(self) -> bool:
        """Whether a held lease may have expired."""
        return self._deadlines.may_be_due(self.clock_s)

    @property
    def free_slots(self) -> int:
        """The number of slots without a lease."""
        return len(self._free)

    @property
    def heartbeat_s(self) -> float:
        """The interval at which consumers renew."""
        return self.lease_s / HEARTBEATS_PER_LEASE

    def requests(self, *states: LeaseState) -> list[str]:
        """Requests whose leases are in one of these states."""
        return [request_id for request_id, lease in self._by_request.items() if lease.state in states]

    def held(self) -> int:
        """The number of leases whose blocks are kept after the end of their request."""
        return sum(lease.state is not LeaseState.COMPUTING for lease in self._by_request.values())

    def open(self, request_id: str, use: LeaseUse = LeaseUse.PROMPT) -> bool:
        """Open a lease when a request is scheduled for the first time; further calls change nothing.

        Returns:
            False if no slot is free, or an earlier request with this id has ended and its lease has not: the request is
            then served without a transfer.
        """
        known = self._by_request.get(request_id)
        if known is not None and known.state is LeaseState.COMPUTING:
            return True
        if known is not None or not self._free:
            self._counters.add(_REFUSED[use])
            return False
        lease = Lease(request_id, self._free.pop(), self._draw_epoch(), use)
        self._by_request[request_id] = self._by_slot[lease.slot] = lease
        self._pending.opens.append(LeaseOpen(slot=lease.slot, epoch=lease.name.epoch))
        self._counters.add(_OPENED[use])
        self.observer.lease_opened(lease)
        return True

    def finish(self, request_id: str, blocks: Blocks = (), held_ids: tuple[int, ...] = ()) -> Lease | None:
        """The request has succeeded: keep its blocks. None when it has no lease.

        Args:
            blocks: the blocks that are sent to the workers.
            kept: all blocks that stay out of the pool, without duplicates.
        """
        lease = self._by_request.get(request_id)
        if lease is None:
            return None
        self._advance(lease, LeaseEvent.FINISH)
        lease.blocks = blocks
        self.block_references.keep(request_id, held_ids)
        self._pending.finished.append(lease)
        if lease.use is LeaseUse.TURN:
            self._counters.add("turns_offered")
        return lease

    def abandon(self, request_id: str, how: str = "abandoned") -> None:
        """The request was aborted, has failed or must not be read: its blocks are not kept. No-op without a lease."""
        lease = self._by_request.get(request_id)
        if lease is None:
            return
        self._advance(lease, LeaseEvent.ABANDON)
        unreported = [order for order in self._pending.opens if order.slot == lease.slot]
        if unreported:
            self._pending.opens.remove(unreported[0])
        else:
            self._pending.ends.append(self._end_order(lease))
        self._counters.add(_RELEASED[lease.use], how)
        self.observer.lease_over(lease, how)

    def renew(self, name: LeaseName, received_s: float | None = None) -> bool:
        """Extend the lease to at least `lease_s` after `received_s` (the ledger's clock; now when None). False when
        there is no such lease."""
        lease = self._find(name)
        if lease is None or lease.state is LeaseState.ENDING:
            self._counters.add("renewals_unknown")
            return False
        lease.claimed_until_s = (self.clock_s if received_s is None else received_s) + self.lease_s
        lease.deadline_s = max(lease.deadline_s, lease.claimed_until_s)
        return True

    def release(self, name: LeaseName, how: str = "release") -> bool:
        """End a lease that will not be read any more. If its hold is not announced yet, it ends after that.

        The epoch of a lease that is still computing was never published, so its release counts as unknown.
        """
        lease = self._find(name)
        if lease is None or lease.state is LeaseState.COMPUTING or lease.ended_by:
            self._counters.add("releases_unknown")
            return False
        self._end(lease, how)
        return True

    def candidates(self) -> list[Candidate]:
        """The leases that may be evicted, in the order of eviction."""
        ranked = [
            (rank, lease)
            for lease in self._by_request.values()
            if lease.state is LeaseState.HELD and (rank := rank_of(lease, self.clock_s, self.heartbeat_s)) is not None
        ]
        return sorted(ranked, key=lambda candidate: (candidate[0], candidate[1].held_s))

    def end_early(self, lease: Lease, how: str) -> None:
        """End a held lease that a consumer may still want to read."""
        self._end(lease, how)

    def release_idle_turns(self, how: str) -> int:
        """End the turns that no consumer has renewed within a lease's time. Returns how many."""
        idle = [lease for rank, lease in self.candidates() if rank is Rank.IDLE_TURN]
        for lease in idle:
            self._end(lease, how)
        return len(idle)

    def release_all(self, how: str) -> int:
        """End every held lease, e.g. because the caches are about to change. Returns how many."""
        ending = [x for x in self._by_request.values() if x.state is not LeaseState.COMPUTING and not x.ended_by]
        for lease in ending:
            self._end(lease, how)
        return len(ending)

    def take_orders(self, now_s: float, *, may_expire: bool = True) -> LeaseOrders:
        """Orders since the last call, for the workers of this engine.

        Args:
            may_expire: whether leases may expire: True if all received renewals have been applied.

        Time counts only while this process is awake (`AwakeClock`), so that a pause of the producer itself does not
        expire leases. Leases that ran out while the engine was idle end here. Apply all received messages before the
        call: a renewal that arrived in time must prevent expiry.
        """
        clock_s = self.clock.wind(now_s)
        if may_expire and self.may_have_due:
            for lease in self._deadlines.due(self.clock_s):
                self._end(lease, "expired")
        if not self.has_orders:
            return _NO_ORDERS
        holds = []
        pending, self._pending = self._pending, _Pending()
        for lease in pending.finished:
            self._advance(lease, LeaseEvent.ANNOUNCE)
            lease.held_s = clock_s
            lease.deadline_s = clock_s + self._first_s[lease.use]
            self._deadlines.watch(lease)
            name = lease.name
            holds.append(LeaseHold(request_id=lease.request_id, slot=name.slot, epoch=name.epoch, blocks=lease.blocks))
            if lease.ended_by:
                # Released before its hold was announced: the hold goes out now, its end in the next step.
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
        self.block_references.free(request_id)
        how = lease.ended_by or "done"
        self._counters.add(_RELEASED[lease.use], how)
        if lease.use is LeaseUse.PROMPT and how in ("done", "release"):
            self._counters.sample("lease_left_s", max(0.0, lease.deadline_s - self.clock_s))
        self.observer.lease_over(lease, how)

    def check_integrity(self) -> None:
        """Check that every slot is free or leased once, that every held lease has a deadline, that every hold will be
        announced, and that blocks are kept for exactly those requests whose leases hold them.

        Raises:
            LocalProtocolError: with the sums.
        """
        leases = list(self._by_request.values())
        leased = sorted(lease.slot for lease in leases)
        states = Counter(lease.state.value for lease in leases)
        sums = f"{dict(states)}, {len(self._free)} free of {self.slots} slots"
        if sorted(leased + self._free) != list(range(self.slots)) or leased != sorted(self._by_slot):
            raise LocalProtocolError(f"lease table: {len(leased)} leased, {len(self._by_slot)} found by slot; {sums}")
        watched = self._deadlines.watched()
        timeless = [x.slot for x in leases if x.state is LeaseState.HELD and (x.slot, x.epoch) not in watched]
        if timeless:
            raise LocalProtocolError(f"lease table: {len(timeless)} held leases have no deadline; {sums}")
        unreported = sorted(lease.slot for lease in self._pending.finished)
        if unreported != sorted(x.slot for x in leases if x.state is LeaseState.FINISHED):
            raise LocalProtocolError(f"lease table: {len(unreported)} holds to be announced; {sums}")
        held = {lease.request_id for lease in leases if lease.state is not LeaseState.COMPUTING}
        if self.block_references.requests() != held:
            raise LocalProtocolError(
                f"lease table: {len(self.block_references.requests())} requests keep blocks; {sums}"
            )
        self.block_references.check_integrity()

    def _find(self, name: LeaseName) -> Lease | None:
        lease = self._by_slot.get(name.slot)
        return lease if lease is not None and lease.epoch == epoch_from_text(name.epoch) else None

    def _advance(self, lease: Lease, event: LeaseEvent) -> None:
        after = LEASE_TRANSITIONS.next(lease.state, event, lease)
        if after is not None:
            lease.state = after
            return
        del self._by_request[lease.request_id], self._by_slot[lease.slot]
        self._free.append(lease.slot)
        self._deadlines.trim()

    def _end(self, lease: Lease, how: str) -> None:
        if lease.state is LeaseState.HELD:
            self._advance(lease, LeaseEvent.END)
            self._pending.ends.append(self._end_order(lease))
        lease.ended_by = how
        self.block_references.end(lease.request_id)

    @staticmethod
    def _end_order(lease: Lease) -> LeaseEnd:
        return LeaseEnd(request_id=lease.request_id, slot=lease.slot, epoch=lease.name.epoch)
