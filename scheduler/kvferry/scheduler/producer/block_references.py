"""References of leases on the engine's blocks, after the end of their requests.

A block may belong to several leases and to running requests: prompts share prefixes. Ending a lease frees only the
blocks without other references. So references of leases are counted here and compared with the block pool's count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.block_pool import BlockPool
from kvferry.scheduler.producer.lease import ProducerLease


class BlockReferences:
    """The references that leases have on blocks; each block is in `ProducerLease.block_ids`.

    Args:
        pool: the engine's; without it only leases are assumed to use blocks.

    Attributes:
        held: leases with references that have not ended, by request; the one whose request ended first is first.
        ending: leases that have ended and that some worker has not acknowledged, by request; the first ended is first.
    """

    def __init__(self, pool: BlockPool | None = None) -> None:
        self._pool = pool
        self.held: dict[str, ProducerLease] = {}
        self.ending: dict[str, ProducerLease] = {}
        self._held: Counter[int] = Counter()
        self._ending: Counter[int] = Counter()

    def __len__(self) -> int:
        """Blocks that held leases refer to, shared or not: never less than `num_leased`."""
        return len(self._held)

    @property
    def num_requests(self) -> int:
        """Requests whose leases have references."""
        return len(self.held) + len(self.ending)

    def keep(self, lease: ProducerLease) -> None:
        """Take a reference on each block of a request that has ended."""
        self.held[lease.request_id] = lease
        self._held.update(lease.block_ids)
        if self._pool is not None:
            self._pool.keep(lease.block_ids)

    def end(self, lease: ProducerLease) -> None:
        """The lease has ended; its blocks are freed when every worker has acknowledged it."""
        del self.held[lease.request_id]
        self.ending[lease.request_id] = lease
        _take(self._held, lease.block_ids)
        self._ending.update(lease.block_ids)

    def free(self, lease: ProducerLease) -> None:
        """Drop the references; blocks without others are back in the pool."""
        if self.held.pop(lease.request_id, None) is not None:
            _take(self._held, lease.block_ids)
        else:
            del self.ending[lease.request_id]
            _take(self._ending, lease.block_ids)
        if self._pool is not None:
            self._pool.give_back(lease.block_ids)

    def num_leased(self) -> int:
        """Blocks that only leases keep, at least one of which is held. Visits every held block."""
        return sum(map(self._is_only_leased, self._held))

    def num_coming(self) -> int:
        """Blocks that only ending leases keep: they return to the pool soon."""
        return sum(
            block not in self._held and self._is_only_leased(block) for block in self._ending
        )

    def can_give(self, lease: ProducerLease) -> bool:
        """Whether any block of this lease is used by leases only, so that ending leases can free it."""
        return any(map(self._is_only_leased, lease.block_ids))

    def gain(self, lease: ProducerLease) -> int:
        """The number of blocks that ending this lease alone frees."""
        return sum(
            self._held[block] == 1 and self._is_only_leased(block) for block in lease.block_ids
        )

    def check_integrity(self) -> None:
        """Check the sums, and that every block has at least as many references as leases that keep it.

        Raises:
            LocalProtocolError: with the sums.
        """
        held = Counter(block for lease in self.held.values() for block in lease.block_ids)
        ending = Counter(block for lease in self.ending.values() for block in lease.block_ids)
        # Compared as dicts: faster than `Counter.__eq__`, which also ignores zero counts.
        if not (dict.__eq__(held, self._held) and dict.__eq__(ending, self._ending)):
            raise LocalProtocolError(
                f"block references: {self._held.total()} held + {self._ending.total()} ending, "
                f"{held.total()} + {ending.total()} by lease"
            )
        if self._pool is None:
            return
        held.update(ending)
        for block, count in held.items():
            referred = self._pool.reference_count(block)
            if referred < count:
                raise LocalProtocolError(
                    f"block {block}: {count} leases keep it, the pool counts {referred} references"
                )

    def _is_only_leased(self, block: int) -> bool:
        return (
            self._pool is None
            or self._pool.reference_count(block) == self._held[block] + self._ending[block]
        )


def _take(counts: Counter[int], blocks: Sequence[int]) -> None:
    """Remove one reference from each of these distinct blocks. Most have only one, and need no Python loop."""
    found = list(map(counts.pop, blocks))
    if sum(found) > len(found):
        counts.update(
            {block: count - 1 for block, count in zip(blocks, found, strict=True) if count > 1}
        )
