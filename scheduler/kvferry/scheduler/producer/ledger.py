"""The producer's ledger: whose blocks are leased under which slot, and until when. No I/O, no clock.

It has the lease table's slots (`LeaseSlots`), the streams of prompts that are read while they are computed
(`PublishedStreams`), and the times at which held leases run out (`Deadlines`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.link.awake_clock import AwakeClock
from kvferry.link.commands import ReceivedLease
from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName, Release
from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import LeaseHold, LeaseOpen, LeaseOrders, LeaseProgress
from kvferry.protocol.params import Blocks
from kvferry.protocol.slots import STREAM_ROWS, epoch_to_text, new_epoch
from kvferry.protocol.transitions import cannot_happen
from kvferry.scheduler.block_pool import BlockPool
from kvferry.scheduler.producer.block_references import (
    BlockReferences,
    Reservation,
)
from kvferry.scheduler.requests import (
    KEEPS_BLOCKS,
    LEASE_TRANSITIONS,
    LeaseEvent,
    LeaseState,
    LeaseUse,
    ProducerLease,
    PublishedStream,
    RequestTable,
)


class LeaseObserver:
    """What a `ProducerLedger` reports to. Its methods must neither raise nor wait."""

    def lease_opened(self, lease: ProducerLease) -> None:
        """A request has got a slot."""

    def lease_over(self, lease: ProducerLease, how: str) -> None:
        """Its blocks are freed, or were never held; `how` is the label of `leases_released` or `turns_released`."""


class ProducerLedger:
    """All leases of one engine; names, deadlines and blocks are indices of them.

    Args:
        slots, draw_epoch: see `LeaseSlots`.
        lease_s: lifetime of a held lease without a renewal.
        turn_s: the same for a turn's lease; a renewal never shortens it.
        workers: the number of workers of this engine, in all pipeline stages and replicas; ids begin at 0.
        pool: the engine's block pool, see `BlockReferences`.
        requests: this engine's; the consumer's ledger has the same.
        stream_rows: prompts that are read while they are computed, at most.
        counters: counts `leases_opened`, `leases_refused` and, by how they ended, `leases_released`; for turns
            `turns_opened`, `turns_refused`, `turns_released`, and `turns_offered` when they are held; for prefixes
            `prefixes_opened` and `prefixes_released`.

    Attributes:
        slots: slots of the lease table.
        streams: leases that are read while their prompts are computed.
        block_references: references of leases on blocks, after the end of their requests.
        num_prefixes, num_prefix_blocks: leases of prefixes, and their blocks, shared or not.
        clock: seconds that this process was awake; every step winds it.
        observer: called for every lease that is opened, and for every one that is over; None at first.
    """

    def __init__(
        self,
        slots: int,
        lease_s: float,
        counters: Counters,
        draw_epoch: Callable[[], Epoch] = new_epoch,
        *,
        turn_s: float | None = None,
        workers: int = 1,
        pool: BlockPool | None = None,
        requests: RequestTable | None = None,
        stream_rows: int = STREAM_ROWS,
    ) -> None:
        if requests is None:
            requests = RequestTable()
        if turn_s is None:
            turn_s = lease_s
        self._requests = requests
        self.slots = LeaseSlots(slots, draw_epoch)
        self.lease_s = lease_s
        self.block_references = BlockReferences(pool)
        # A pause of this process counts as one interval of the consumers' renewals.
        self.clock = AwakeClock(lease_s / HEARTBEATS_PER_LEASE)
        self.observer: LeaseObserver | None = None
        self.num_prefixes = 0
        self.num_prefix_blocks = 0
        self._deadlines = Deadlines(lease_s, turn_s)
        self._workers = range(workers)
        self._counters = counters
        self._orders = LeaseOrders()
        self.streams = PublishedStreams(self.slots, self._orders, counters, stream_rows)

    def __len__(self) -> int:
        """The number of leases that have a slot."""
        return self.slots.count - len(self.slots.free)

    def get(self, request_id: str) -> ProducerLease | None:
        """The lease of a request, also after its end; None without one."""
        record = self._requests.get(request_id)
        if record is None:
            return None
        return record.lease

    def state(self, request_id: str) -> LeaseState | None:
        """The state of a request's lease; None without a lease."""
        lease = self.get(request_id)
        if lease is None:
            return None
        return lease.state

    @property
    def needs_step(self) -> bool:
        """True if a step has something to do: orders, ended leases that the workers report, or leases that expire."""
        references = self.block_references
        has_work = bool(self._orders or references.ending or references.returning)
        return has_work or self.clock.awake_s >= self._deadlines.next_due_s

    def running(self, request_id: str) -> ProducerLease | None:
        """The lease of a request that has not ended. None without one, or if an earlier request with this id has it."""
        record = self._requests.get(request_id)
        if record is None or record.lease is None or not record.lease.is_running:
            return None
        return record.lease

    def leases(self, *states: LeaseState) -> list[ProducerLease]:
        """The leases in one of these states."""
        return [lease for lease in self._all() if lease.state in states]

    def intend(self, request_id: str, use: LeaseUse) -> bool:
        """A request has arrived whose blocks are for another engine when it ends.

        False if the lease of an earlier request with this id has not ended: this one is served without a transfer.
        """
        record = self._requests.enter(request_id)
        if record.lease is not None:
            self._counters.add(f"{use.value}_refused")
            return False
        record.lease = ProducerLease(request_id, use)
        return True

    def open(self, request_id: str, use: LeaseUse = LeaseUse.PROMPT) -> bool:
        """A request is scheduled: its lease, intended or new, gets a slot; further calls change nothing.

        False if no slot is free, or `intend` would refuse: the request is served without a transfer.
        """
        record = self._requests.enter(request_id)
        if record.lease is None:
            record.lease = ProducerLease(request_id, use)
        lease = record.lease
        if lease.state is LeaseState.INTENDED and self.slots.free:
            self._advance(lease, LeaseEvent.OPEN)
            self._orders.opens.append(self.slots.take(lease))
            self._counters.add(f"{lease.use.value}_opened")
            if self.observer is not None:
                self.observer.lease_opened(lease)
        elif lease.state is LeaseState.INTENDED:
            # It is scheduled, and waits no more: where a slot was to come free soon, it has waited for that before
            # (`RequestLife.matched_tokens`).
            self._advance(lease, LeaseEvent.ABANDON)
        if lease.state is LeaseState.COMPUTING:
            return True
        self._counters.add(f"{lease.use.value}_refused")
        return False

    def complete(
        self,
        request_id: str,
        worker_blocks: Blocks = (),
        block_ids: tuple[int, ...] = (),
    ) -> ProducerLease | None:
        """The next step completes the request's blocks: keep them from now on. None when it has no lease.

        vLLM then gives none of them away before the workers have ended the lease, whatever becomes of the request.

        Args:
            worker_blocks: the blocks that are sent to the workers.
            block_ids: all blocks that stay out of the pool, without duplicates.
        """
        return self._keep(
            request_id, worker_blocks, block_ids, self._orders.completions
        )

    def finish(
        self,
        request_id: str,
        worker_blocks: Blocks = (),
        block_ids: tuple[int, ...] = (),
    ) -> ProducerLease | None:
        """The request has succeeded, and no step completed its blocks before: keep them, as in `complete`."""
        lease = self._keep(request_id, worker_blocks, block_ids, self._orders.holds)
        if lease is not None:
            self.request_ended(lease)
            if lease.use is LeaseUse.TURN:
                self._counters.add("turns_offered")
        return lease

    def hold_prefix(
        self,
        name: str,
        worker_blocks: Blocks,
        reservation: Reservation,
        *,
        is_computed: bool,
    ) -> ProducerLease:
        """Open a lease of blocks that are in the cache, and that are reserved.

        Args:
            name: for the workers' reports, in place of a request's id; no request and no earlier lease has it.
            worker_blocks: the blocks that are sent to the workers.
            reservation: the blocks, each once. They are the lease's from now on.
            is_computed: whether no step that computes any of them is to be launched yet.

        Raises:
            LocalProtocolError: no slot is free, or the name is used.
        """
        if not self.slots.free or self._requests.get(name) is not None:
            raise LocalProtocolError(
                f"prefix {name}: of {self.slots.count} slots {len(self.slots.free)} are free, or its name is used"
            )
        record = self._requests.enter(name)
        lease = ProducerLease(name, LeaseUse.PREFIX, is_running=False)
        record.lease = lease
        self._advance(lease, LeaseEvent.OPEN)
        self._orders.opens.append(self.slots.take(lease))
        self._advance(lease, LeaseEvent.COMPLETE)
        self.block_references.take_over(lease, reservation)
        self.num_prefixes += 1
        self.num_prefix_blocks += len(lease.block_ids)
        # Cached is not computed: vLLM hashes blocks when it schedules the step that fills them. So while a step is to
        # be launched the lease is held as one that this step completes, and READY once the device has passed it.
        order = lease.hold_order(worker_blocks)
        if is_computed:
            self._orders.holds.append(order)
        else:
            self._orders.completions.append(order)
        self.start_deadline(lease)
        self._counters.add("prefixes_opened")
        if self.observer is not None:
            self.observer.lease_opened(lease)
        return lease

    def request_ended(self, lease: ProducerLease) -> None:
        """The request of a lease whose blocks are kept has ended: its deadline begins."""
        lease.is_running = False
        self.start_deadline(lease)

    def start_deadline(self, lease: ProducerLease) -> None:
        """From now on a held lease expires unless it is renewed."""
        if lease.state is LeaseState.HELD:
            self._deadlines.start(lease, self.clock.awake_s)

    def start_deadlines(self) -> None:
        """No request goes on for now: those that hold leases may end late. Leases whose deadline counts are left."""
        for lease in self.block_references.held.values():
            if math.isinf(lease.deadline_s):
                self.start_deadline(lease)

    def abandon(self, request_id: str, how: str = "abandoned") -> None:
        """The request was aborted, has failed or must not be read: its blocks are not kept. No-op without a lease."""
        lease = self.get(request_id)
        if lease is None:
            return
        self._advance(lease, LeaseEvent.ABANDON)
        if lease.state is LeaseState.INTENDED:
            return
        # Opened and abandoned within one step: the workers never hear of it.
        is_known_to_workers = self._orders.withdraw(lease.slot)
        if is_known_to_workers:
            self._orders.ends.append(lease.end_order())
        lease.ended_by = how
        self._counters.add(f"{lease.use.value}_released", how)
        if self.observer is not None:
            self.observer.lease_over(lease, how)

    def receive(self, messages: Iterable[ReceivedLease], boot: str) -> None:
        """Apply the renewals and releases that have arrived over the side channel: before leases expire.

        Those addressed to another `boot` than this engine's are counted (`renewals_unknown`, `releases_unknown`) and
        dropped.
        """
        for received in messages:
            is_release = received.kind is Release
            if received.boot != boot:
                metric = "releases_unknown" if is_release else "renewals_unknown"
                self._counters.add(metric)
            elif is_release:
                self.release(received.name)
            else:
                self.renew(received.name, received.received_s)

    def renew(self, name: LeaseName, received_s: float | None = None) -> bool:
        """Extend the lease to at least `lease_s` after `received_s`. False when there is no such lease.

        Args:
            received_s: on the ledger's clock; None for now.
        """
        lease = self.slots.find(name)
        if lease is None or lease.state is LeaseState.ENDING:
            self._counters.add("renewals_unknown")
            return False
        if received_s is None:
            received_s = self.clock.awake_s
        # From its arrival at the listener. An idle engine applies it minutes later, and from then on the lease of a
        # dead consumer would have a whole lifetime more.
        lease.claimed_until_s = received_s + self.lease_s
        lease.deadline_s = max(lease.deadline_s, lease.claimed_until_s)
        return True

    def release(self, name: LeaseName, how: str = "release") -> bool:
        """End a lease that will not be read any more, also if its prompt is still computed. False for unknown ones."""
        lease = self.slots.find(name)
        if lease is not None and lease.state is LeaseState.HELD:
            self.end(lease, how)
            return True
        # The epoch of a computing lease that is not streamed was never published: whoever names it has guessed.
        is_streamed = lease is not None and lease.stream is not None
        if lease is not None and is_streamed and lease.state is LeaseState.COMPUTING:
            self.abandon(lease.request_id, how)
            return True
        self._counters.add("releases_unknown")
        return False

    def end(self, lease: ProducerLease, how: str) -> None:
        """End a held lease, although a consumer may still want to read it."""
        self._advance(lease, LeaseEvent.END)
        self._orders.ends.append(lease.end_order())
        lease.ended_by = how
        self.block_references.end(lease)

    def release_all(
        self, how: str, uses: Collection[LeaseUse] = tuple(LeaseUse)
    ) -> int:
        """End every held lease of these uses. Returns how many."""
        ending: list[ProducerLease] = []
        for lease in self.block_references.held.values():
            if lease.use in uses:
                ending.append(lease)
        for lease in ending:
            self.end(lease, how)
        return len(ending)

    def take_orders(self, now_s: float, *, may_expire: bool = True) -> LeaseOrders:
        """Orders since the last call, for the workers of this engine. Leases that have run out end here.

        Args:
            may_expire: whether all received renewals have been applied: one that arrived in time must prevent expiry.
        """
        # Time counts only while this process is awake: a pause of the producer itself must not expire leases, since
        # their renewals could not arrive meanwhile.
        clock_s = self.clock.wind(now_s)
        self.block_references.begin_step()
        if may_expire and clock_s >= self._deadlines.next_due_s:
            for lease in self._deadlines.due(
                self.block_references.held.values(), clock_s
            ):
                self.end(lease, "expired")
        return self._orders.take()

    def acknowledge(self, worker: int, request_ids: Iterable[str]) -> list[str]:
        """A worker has cleared the slots of these requests. Returns those whose leases are over, because every worker
        has acknowledged them.

        Ignored are unknown workers, a worker's repetitions, and requests whose leases are not held.
        """
        over: list[str] = []
        if worker not in self._workers:
            return over
        for request_id in request_ids:
            lease = self.get(request_id)
            if lease is None or lease.state not in KEEPS_BLOCKS:
                continue
            # A set: a worker that reports twice must not stand for another, whose slot still says READY.
            lease.acks.add(worker)
            if len(lease.acks) == len(self._workers):
                self.sent(request_id)
                over.append(request_id)
        return over

    def sent(self, request_id: str) -> None:
        """Every worker has cleared the slot and reported the request: it is over.

        Raises:
            LocalProtocolError: the request is not held.
        """
        lease = self.get(request_id)
        if lease is None:
            raise LocalProtocolError(f"req={request_id}: reported sent without a lease")
        self._advance(lease, LeaseEvent.SENT)
        self.block_references.free(lease)
        if not lease.ended_by:
            lease.ended_by = "done"
        self._counters.add(f"{lease.use.value}_released", lease.ended_by)
        was_read = lease.ended_by in ("done", "release")
        # What was left of its time tells an operator whether `kv_lease_duration` is too short for the decoders' queues.
        # A prompt that was read before its request has ended has no deadline yet.
        has_deadline = lease.deadline_s < math.inf
        if lease.use is LeaseUse.PROMPT and was_read and has_deadline:
            self._counters.sample(
                "lease_left_s", max(0.0, lease.deadline_s - self.clock.awake_s)
            )
        if self.observer is not None:
            self.observer.lease_over(lease, lease.ended_by)

    def _all(self) -> Iterator[ProducerLease]:
        for record in self._requests.values():
            if record.lease is not None:
                yield record.lease

    def _keep(
        self,
        request_id: str,
        worker_blocks: Blocks,
        block_ids: tuple[int, ...],
        orders: list[LeaseHold],
    ) -> ProducerLease | None:
        lease = self.get(request_id)
        if lease is None:
            return None
        self._advance(lease, LeaseEvent.COMPLETE)
        lease.held_s = self.clock.awake_s
        lease.block_ids = block_ids
        self.block_references.keep(lease)
        orders.append(lease.hold_order(worker_blocks))
        return lease

    def _advance(self, lease: ProducerLease, event: LeaseEvent) -> None:
        try:
            after = LEASE_TRANSITIONS[lease.state, event]
        except KeyError:
            raise cannot_happen(lease, lease.state, event) from None
        if after is not None:
            lease.state = after
            return
        record = self._requests.enter(lease.request_id)
        record.lease = None
        self._requests.drop_if_over(record)
        if lease.state is not LeaseState.INTENDED:
            self.slots.give_back(lease)
        if lease.stream is not None:
            self.streams.end(lease, lease.stream)
        if lease.use is LeaseUse.PREFIX:
            self.num_prefixes -= 1
            self.num_prefix_blocks -= len(lease.block_ids)


# Slots.


@dataclass(frozen=True, slots=True)
class LeaseSlotsSnapshot:
    """The slots at one moment.

    Attributes:
        leases: those that have a slot.
        free: the slots without a lease.
    """

    leases: frozenset[ProducerLease]
    free: tuple[int, ...]


class LeaseSlots:
    """The slots of the lease table: each is free or belongs to exactly one lease. `in` may be used on any thread.

    Args:
        draw_epoch: fresh epochs.

    Attributes:
        count: as given.
        free: the slots of no lease; the next to be used is last.
    """

    def __init__(self, count: int, draw_epoch: Callable[[], Epoch]) -> None:
        self.count = count
        self._draw_epoch = draw_epoch
        self.free = list(range(count - 1, -1, -1))
        self._by_name: dict[LeaseName, ProducerLease] = {}

    def __contains__(self, name: LeaseName) -> bool:
        return name in self._by_name

    def find(self, name: LeaseName) -> ProducerLease | None:
        """The lease of this name, if there is one."""
        return self._by_name.get(name)

    def take(self, lease: ProducerLease) -> LeaseOpen:
        """Give a lease a free slot and a fresh epoch, and return the order to the workers."""
        lease.slot = self.free.pop()
        lease.name = self._new_name(lease.slot)
        lease.origin = lease.name
        self._by_name[lease.name] = lease
        return LeaseOpen(slot=lease.slot, epoch=lease.name.epoch)

    def replace_epoch(self, lease: ProducerLease) -> None:
        """Give a lease a fresh epoch in its slot; `find` knows it by its first name too."""
        # Not by the names in between: tickets have the first one, so consumers have never had those.
        if lease.name != lease.origin:
            del self._by_name[lease.name]
        lease.name = self._new_name(lease.slot)
        self._by_name[lease.name] = lease

    def give_back(self, lease: ProducerLease) -> None:
        """The lease is over."""
        for name in {lease.name, lease.origin}:
            del self._by_name[name]
        self.free.append(lease.slot)

    def snapshot(self) -> LeaseSlotsSnapshot:
        """The slots now."""
        return LeaseSlotsSnapshot(
            leases=frozenset(self._by_name.values()), free=tuple(self.free)
        )

    def _new_name(self, slot: int) -> LeaseName:
        return LeaseName(slot=slot, epoch=epoch_to_text(self._draw_epoch()))


# Streams.


class PublishedStreams:
    """The streams of one engine: prompts that consumers read while they are computed, listed in rows.

    A lease whose request is preempted has published blocks that vLLM gives to others. So it goes on under a new epoch,
    with its slot and its row: the epoch under which those blocks were published never becomes READY. Consumers know the
    lease by its first epoch, which stays its name until it is over.

    Args:
        orders: of the ledger, to be sent with the next step.
        counters: counts `streams`, `stream_restarts`, and `streams_refused` for lack of `rows`.
        rows: how many there are.

    Attributes:
        rows: as given.
        free_rows: the rows of no lease; the next to be used is last.
    """

    def __init__(
        self, slots: LeaseSlots, orders: LeaseOrders, counters: Counters, rows: int
    ) -> None:
        self._slots = slots
        self._orders = orders
        self._counters = counters
        self.rows = rows
        self.free_rows = list(range(rows - 1, -1, -1))

    def begin(self, lease: ProducerLease) -> PublishedStream | None:
        """A consumer reads this prompt from now on, while it is computed; None if all rows are used."""
        if not self.free_rows:
            self._counters.add("streams_refused", "rows")
            return None
        lease.stream = PublishedStream(self.free_rows.pop())
        self._counters.add("streams")
        return lease.stream

    def publish(
        self,
        lease: ProducerLease,
        stream: PublishedStream,
        tokens: int,
        blocks: tuple[Sequence[int], ...],
    ) -> None:
        """The next step completes the first `tokens` tokens of a prompt.

        Args:
            blocks: all blocks of these tokens that are listed, per cache group; they go on with those before.
        """
        # A row lists blocks in order, and workers only add to it: each order names those that the ones before did not.
        num_listed = [0] * len(blocks)
        if stream.blocks:
            num_listed = [len(ids) for ids in stream.blocks]
        new_blocks = [
            tuple(ids[first:]) for first, ids in zip(num_listed, blocks, strict=True)
        ]
        stream.tokens = tokens
        stream.blocks = blocks
        self._orders.progress.append(
            LeaseProgress(
                slot=lease.slot,
                epoch=lease.name.epoch,
                row=stream.row,
                origin=lease.origin.epoch,
                tokens=tokens,
                first_blocks=tuple(num_listed),
                blocks=tuple(new_blocks),
            )
        )

    def restart(self, lease: ProducerLease, stream: PublishedStream) -> None:
        """The published part is not valid any more: go on under another epoch.

        Must be called before the next step's orders are taken: in that step other requests may write the blocks.
        """
        if not stream.blocks:
            return
        stream.tokens = 0
        stream.blocks = ()
        # The slot and the row stay: consumers have them from the ticket. A consumer that has read under the old epoch
        # finds no READY with it, ever.
        self._slots.replace_epoch(lease)
        order = LeaseOpen(
            slot=lease.slot,
            epoch=lease.name.epoch,
            row=stream.row,
            origin=lease.origin.epoch,
        )
        self._orders.opens.append(order)
        self._counters.add("stream_restarts")

    def end(self, lease: ProducerLease, stream: PublishedStream) -> None:
        """The lease is over: its row is free."""
        self.free_rows.append(stream.row)
        lease.stream = None


# Deadlines.


PREFIX_S = 5.0
"""Lifetime of a prefix's lease without a renewal: who has asked for it waits for it, and renews it at once."""
SCAN_S = 10e-6
"""Wait per held lease until all of them are looked at again: a hundred times what it costs to compare their deadlines,
and fifteen times what it costs to rank them for eviction."""


class Deadlines:
    """Deadlines of held leases whose requests have ended.

    Args:
        lease_s: lifetime of a held lease without a renewal.
        turn_s: the same for a turn's lease.

    Attributes:
        next_due_s: no deadline passes before this time. It may be too early, after a renewal or an end; never too late.
    """

    def __init__(self, lease_s: float, turn_s: float) -> None:
        self._lifetime_s = {
            LeaseUse.PROMPT: lease_s,
            LeaseUse.TURN: turn_s,
            LeaseUse.PREFIX: min(lease_s, PREFIX_S),
        }
        self.next_due_s = math.inf

    def start(self, lease: ProducerLease, clock_s: float) -> None:
        """From now on a held lease expires unless it is renewed."""
        lease.held_s = clock_s
        # A renewal that came before counts: a consumer that reads a stream renews it while it is computed.
        lease.deadline_s = max(
            lease.claimed_until_s, clock_s + self._lifetime_s[lease.use]
        )
        self.next_due_s = min(self.next_due_s, lease.deadline_s)

    def due(self, held: Iterable[ProducerLease], clock_s: float) -> list[ProducerLease]:
        """The held leases whose deadline has passed. It reads all of them."""
        due: list[ProducerLease] = []
        num_held = 0
        earliest_s = math.inf
        for lease in held:
            num_held += 1
            if lease.deadline_s <= clock_s:
                due.append(lease)
            else:
                earliest_s = min(earliest_s, lease.deadline_s)
        # A renewal only adds time, so none of the others is due before the earliest deadline that was found.
        self.next_due_s = max(earliest_s, clock_s + num_held * SCAN_S)
        return due
