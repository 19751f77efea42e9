"""References of leases on the engine's blocks, after the end of their requests.

A prefix of 32,000 tokens may have 2,000 blocks, and to count or to give back as many takes a good part of a millisecond
of a step. So the blocks of prefixes are counted part by part, in a `Reservation`, before their lease opens, and are
given back part by part after it is over.

A block may belong to several leases and to running requests: prompts share prefixes. Ending a lease frees only the
blocks without other references. So references of leases are counted here and compared with the block pool's count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.scheduler.block_pool import BlockPool
from kvferry.scheduler.producer.lease import LeaseUse, ProducerLease

RETURNED_AT_ONCE = 512
"""Most blocks of prefixes that are given back in one step."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks with references that will be those of a prefix's lease."""

    block_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReferencesSnapshot:
    """Attributes:
    held, ending: references by block, of leases that have not ended and of those that have.
    reserved: the blocks of each reservation, which are counted as held.
    returning: those of each prefix that is over and not given back yet, which are counted as ending.
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
    """

    def __init__(self, pool: BlockPool | None = None) -> None:
        self.pool = pool
        self.held: dict[str, ProducerLease] = {}
        self.ending: dict[str, ProducerLease] = {}
        # References of each block. A count that falls to zero is removed, so a step's cost is that of used blocks.
        self._held: Counter[int] = Counter()
        self._ending: Counter[int] = Counter()
        # Counted as held.
        self._reservations: set[Reservation] = set()
        # Counted as ending; the last block of each is given back first.
        self._returning: deque[list[int]] = deque()

    def __len__(self) -> int:
        """Blocks that held leases refer to, shared or not: an upper bound of `num_leased` that costs nothing."""
        return len(self._held)

    @property
    def num_requests(self) -> int:
        """Requests whose leases have references."""
        return len(self.held) + len(self.ending)

    @property
    def is_returning(self) -> bool:
        """True if `return_some` has blocks to give back."""
        return bool(self._returning)

    def keep(self, lease: ProducerLease) -> None:
        """Take a reference on each block of a request that has ended."""
        self.held[lease.request_id] = lease
        self._held.update(lease.block_ids)
        if self.pool is not None:
            self.pool.keep(lease.block_ids)

    def reserve(self, reservation: Reservation, blocks: Sequence[int]) -> None:
        """Add blocks to a reservation. The caller has taken a reference on each."""
        self._reservations.add(reservation)
        reservation.block_ids.extend(blocks)
        self._held.update(blocks)

    def cancel(self, reservation: Reservation) -> None:
        """No lease will have these blocks."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            _take(self._held, reservation.block_ids)
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
        _take(self._held, lease.block_ids)
        self._ending.update(lease.block_ids)

    def free(self, lease: ProducerLease) -> None:
        """Drop the references; blocks without others are back in the pool, those of prefixes soon (`return_some`)."""
        if lease.use is LeaseUse.PREFIX:
            if self.held.pop(lease.request_id, None) is not None:
                _take(self._held, lease.block_ids)
                self._return(list(lease.block_ids))
            else:
                del self.ending[lease.request_id]
                self._returning.append(list(lease.block_ids))
            return
        if self.held.pop(lease.request_id, None) is not None:
            _take(self._held, lease.block_ids)
        else:
            del self.ending[lease.request_id]
            _take(self._ending, lease.block_ids)
        if self.pool is not None:
            self.pool.give_back(lease.block_ids)

    def return_some(self) -> None:
        """Give back a part of the blocks of prefixes that are over."""
        num_left = RETURNED_AT_ONCE
        while self._returning and num_left:
            blocks = self._returning[0]
            part = blocks[-num_left:]
            del blocks[-num_left:]
            num_left -= len(part)
            _take(self._ending, part)
            if self.pool is not None:
                self.pool.give_back(part)
            if not blocks:
                self._returning.popleft()

    def num_leased(self) -> int:
        """Blocks that only leases keep, at least one of which is held. Visits every held block."""
        return sum(map(self._is_only_leased, self._held))

    def num_coming(self) -> int:
        """Blocks that only ending leases keep: they return to the pool soon."""
        num_coming = 0
        for block in self._ending:
            # A block that a held lease keeps as well stays out of the pool.
            if block not in self._held and self._is_only_leased(block):
                num_coming += 1
        return num_coming

    def can_give(self, lease: ProducerLease) -> bool:
        """True if any block of this lease is used by leases only, so that ending leases can free it."""
        return any(map(self._is_only_leased, lease.block_ids))

    def gain(self, lease: ProducerLease) -> int:
        """The number of blocks that ending this lease alone frees."""
        gain = 0
        for block in lease.block_ids:
            if self._held[block] == 1 and self._is_only_leased(block):
                gain += 1
        return gain

    def snapshot(self) -> BlockReferencesSnapshot:
        """The counts now, and the blocks that are in no lease."""
        return BlockReferencesSnapshot(
            held=dict(self._held),
            ending=dict(self._ending),
            reserved=tuple(
                tuple(reservation.block_ids) for reservation in self._reservations
            ),
            returning=tuple(map(tuple, self._returning)),
        )

    def _return(self, blocks: list[int]) -> None:
        self._ending.update(blocks)
        self._returning.append(blocks)

    def _is_only_leased(self, block: int) -> bool:
        """True if no running request has the block: the pool counts no more references than leases have."""
        if self.pool is None:
            return True
        num_leases = self._held[block] + self._ending[block]
        return self.pool.reference_count(block) == num_leases


def _take(counts: Counter[int], blocks: Sequence[int]) -> None:
    """Remove one reference from each of these distinct blocks."""
    # Popped and put back, since most are not put back: a decrement of each would be a Python loop over all blocks of a
    # prompt, in the step that ends its lease.
    before = list(map(counts.pop, blocks))
    is_any_shared = sum(before) > len(before)
    if not is_any_shared:
        return
    for block, count in zip(blocks, before, strict=True):
        if count > 1:
            counts[block] = count - 1
