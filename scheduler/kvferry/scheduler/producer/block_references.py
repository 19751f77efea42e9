"""References of leases on the engine's blocks, after the end of their requests.

A prompt of 32,000 tokens may have 2,000 blocks, and to count or to give back as many takes a good part of a millisecond
of a step. So the blocks of prefixes are counted part by part, in a `Reservation`, before their lease opens, and the
blocks of every lease are given back part by part after it is over: at once only while requests wait for blocks.

A block may belong to several leases and to running requests: prompts share prefixes. Ending a lease frees only the
blocks without other references. So references of leases are counted here and compared with the block pool's count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.scheduler.block_pool import BlockPool
from kvferry.scheduler.requests import ProducerLease

RETURNED_AT_ONCE = 128
"""Most blocks that are given back in one step, some 0.1 ms, while no request waits for them."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks with references that will be those of a prefix's lease."""

    block_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReferencesSnapshot:
    """The references at one moment.

    Attributes:
        held, ending: references by block, of leases that have not ended and of those that have.
        reserved: the blocks of each reservation, which are counted as held.
        returning: those of each lease that is over and not given back yet, which are counted as ending.
    """

    held: Mapping[int, int]
    ending: Mapping[int, int]
    reserved: tuple[tuple[int, ...], ...]
    returning: tuple[tuple[int, ...], ...]


class BlockReferences:
    """The references that leases have on blocks; each block is in `ProducerLease.block_ids`.

    Args:
        pool: the engine's; without it only leases are assumed to use blocks.

    Attributes:
        pool: as given.
        held: leases with references that have not ended, by request; the one that was held first is first.
        ending: leases that have ended and that some worker has not acknowledged, by request; the first ended is first.
        are_blocks_short: whether a request waits for blocks: then all of a lease that is over is given back at once.
        counts: references of each block. As many blocks as it has are an upper bound of `num_leased` that costs
            nothing.
        returning: the blocks that steps have to give back, of each lease that is over; the last one of each is first.
    """

    def __init__(self, pool: BlockPool | None = None) -> None:
        self.pool = pool
        self.held: dict[str, ProducerLease] = {}
        self.ending: dict[str, ProducerLease] = {}
        self.are_blocks_short = False
        # A count that falls to zero is removed, so a step's cost is that of used blocks.
        self.counts: Counter[int] = Counter()
        # Those of leases that have ended. Counted when they are asked for, until the next step: only steps in which
        # blocks are short do, and to count them when a lease ends would cost each of its blocks two look-ups.
        self._ending: Counter[int] | None = None
        self._reservations: set[Reservation] = set()
        self.returning: deque[list[int]] = deque()
        # In this step.
        self._num_returned = 0

    @property
    def num_requests(self) -> int:
        """Requests whose leases have references."""
        return len(self.held) + len(self.ending)

    def keep(self, lease: ProducerLease) -> None:
        """Take a reference on each block of a request that has ended."""
        self.held[lease.request_id] = lease
        self.counts.update(lease.block_ids)
        if self.pool is not None:
            self.pool.keep(lease.block_ids)

    def reserve(self, reservation: Reservation, blocks: Sequence[int]) -> None:
        """Add blocks to a reservation. The caller has taken a reference on each."""
        self._reservations.add(reservation)
        reservation.block_ids.extend(blocks)
        self.counts.update(blocks)

    def cancel(self, reservation: Reservation) -> None:
        """No lease will have these blocks."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._return(reservation.block_ids)

    def take_over(self, lease: ProducerLease, reservation: Reservation) -> None:
        """The blocks of a reservation are those of a lease from now on."""
        self._reservations.discard(reservation)
        lease.block_ids = tuple(reservation.block_ids)
        self.held[lease.request_id] = lease

    def end(self, lease: ProducerLease) -> None:
        """The lease has ended; its blocks are freed when every worker has acknowledged it."""
        del self.held[lease.request_id]
        self.ending[lease.request_id] = lease
        if self._ending is not None:
            self._ending.update(lease.block_ids)

    def free(self, lease: ProducerLease) -> None:
        """The lease is over: blocks without other references are back in the pool, or will be in a few steps."""
        if self.held.pop(lease.request_id, None) is None:
            del self.ending[lease.request_id]
        self._return(list(lease.block_ids))

    def begin_step(self) -> None:
        """Give back a part of the blocks whose leases are over."""
        self._num_returned = 0
        self._return_some()

    def return_all(self) -> None:
        """Give back all blocks whose leases are over."""
        for blocks in self.returning:
            self._give_back(blocks)
        self.returning.clear()

    def num_leased(self) -> int:
        """Blocks that only leases keep, at least one of which is held. Visits every block of a lease."""
        ending = self._count_ending()
        num_leased = 0
        for block, count in self.counts.items():
            if count > ending.get(block, 0) and self._is_only_leased(block):
                num_leased += 1
        return num_leased

    def num_coming(self) -> int:
        """Blocks that only ending leases keep: they return to the pool soon."""
        num_coming = 0
        for block, count in self._count_ending().items():
            # A block that a held lease keeps as well stays out of the pool.
            if count == self.counts[block] and self._is_only_leased(block):
                num_coming += 1
        return num_coming

    def can_give(self, lease: ProducerLease) -> bool:
        """True if any block of this lease is used by leases only, so that ending leases can free it."""
        return any(map(self._is_only_leased, lease.block_ids))

    def gain(self, lease: ProducerLease) -> int:
        """The number of blocks that ending this lease alone frees."""
        ending = self._count_ending()
        gain = 0
        for block in lease.block_ids:
            is_last = self.counts[block] - ending.get(block, 0) == 1
            if is_last and self._is_only_leased(block):
                gain += 1
        return gain

    def snapshot(self) -> BlockReferencesSnapshot:
        """The counts now, and the blocks that are in no lease."""
        ending = self._count_ending()
        held = Counter(self.counts)
        held.subtract(ending)
        return BlockReferencesSnapshot(
            held={block: count for block, count in held.items() if count},
            ending=dict(ending),
            reserved=tuple(
                tuple(reservation.block_ids) for reservation in self._reservations
            ),
            returning=tuple(map(tuple, self.returning)),
        )

    def _return(self, blocks: list[int]) -> None:
        if blocks:
            self._ending = None
            self.returning.append(blocks)
            self._return_some()

    def _return_some(self) -> None:
        while self.returning:
            blocks = self.returning[0]
            first = 0
            if not self.are_blocks_short:
                num_left = RETURNED_AT_ONCE - self._num_returned
                if num_left <= 0:
                    return
                first = max(0, len(blocks) - num_left)
            part = blocks[first:]
            del blocks[first:]
            if not blocks:
                self.returning.popleft()
            self._num_returned += len(part)
            self._give_back(part)

    def _give_back(self, blocks: list[int]) -> None:
        """Remove one reference from each of these distinct blocks."""
        self._ending = None
        # Popped and put back, since most are not put back: a decrement of each would be a Python loop over all blocks.
        before = list(map(self.counts.pop, blocks))
        is_any_shared = sum(before) > len(before)
        if is_any_shared:
            for block, count in zip(blocks, before, strict=True):
                if count > 1:
                    self.counts[block] = count - 1
        if self.pool is not None:
            self.pool.give_back(blocks)

    def _count_ending(self) -> Counter[int]:
        if self._ending is None:
            self._ending = Counter()
            for lease in self.ending.values():
                self._ending.update(lease.block_ids)
            for blocks in self.returning:
                self._ending.update(blocks)
        return self._ending

    def _is_only_leased(self, block: int) -> bool:
        """True if no running request has the block: the pool counts no more references than leases have."""
        if self.pool is None:
            return True
        return self.pool.reference_count(block) == self.counts[block]
