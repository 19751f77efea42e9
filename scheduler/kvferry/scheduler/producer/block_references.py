"""Blocks that leases keep after their requests have ended, and how many of them only leases refer to.

A block may belong to several leases and to running requests: prompts share prefixes. Ending a lease frees only the
blocks without other references. So references of leases are counted here and compared with the block pool's count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.protocol.errors import LocalProtocolError

ReferenceCount = Callable[[int], int]
"""The number of references to a block, of leases and of running requests."""


class BlockReferences:
    """Blocks by request, while its lease is held or ending."""

    def __init__(self) -> None:
        self._reference_count: ReferenceCount = lambda block: self._held[block] + self._ending[block]
        self._of: dict[str, tuple[int, ...]] = {}
        self._is_ending: dict[str, None] = {}  # the one that ended first is first
        self._held: Counter[int] = Counter()
        self._ending: Counter[int] = Counter()

    def bind(self, reference_count: ReferenceCount) -> None:
        """Set the block pool's reference count; without it only leases are assumed to use blocks."""
        self._reference_count = reference_count

    def __len__(self) -> int:
        """Blocks that held leases refer to, shared or not: never less than `num_leased`."""
        return len(self._held)

    @property
    def num_held(self) -> int:
        """Requests whose leases have not ended."""
        return len(self._of) - len(self._is_ending)

    @property
    def num_ending(self) -> int:
        """Requests whose leases have ended and which some worker has not acknowledged."""
        return len(self._is_ending)

    def first_ending(self) -> str | None:
        """The request counted in `num_ending` whose lease ended first; None without one."""
        return next(iter(self._is_ending), None)

    @property
    def num_requests(self) -> int:
        """Requests whose leases have references."""
        return len(self._of)

    def requests(self) -> frozenset[str]:
        """Their ids."""
        return frozenset(self._of)

    def of(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request."""
        return self._of.get(request_id, ())

    def keep(self, request_id: str, blocks: tuple[int, ...]) -> None:
        """Hold the blocks of a request that has ended; `blocks` has no duplicates."""
        self._of[request_id] = blocks
        self._held.update(blocks)

    def end(self, request_id: str) -> None:
        """The lease has ended; its blocks are freed when every worker has acknowledged it."""
        if request_id not in self._of or request_id in self._is_ending:
            return
        self._is_ending[request_id] = None
        _take(self._held, self._of[request_id])
        self._ending.update(self._of[request_id])

    def free(self, request_id: str) -> None:
        """Drop the references of a request; blocks without others are back in the pool."""
        blocks = self._of.pop(request_id, ())
        is_ending = request_id in self._is_ending
        self._is_ending.pop(request_id, None)
        _take(self._ending if is_ending else self._held, blocks)

    def num_leased(self) -> int:
        """Blocks that only leases keep, at least one of which is held. Visits every held block."""
        return sum(self._is_only_leased(block) for block in self._held)

    def num_coming(self) -> int:
        """Blocks that only ending leases keep: they return to the pool soon."""
        if not self._ending:
            return 0
        return sum(self._reference_count(block) == count for block, count in self._ending.items())

    def can_give(self, request_id: str) -> bool:
        """Whether any block of this lease is used by leases only, so that ending leases can free it."""
        return any(self._is_only_leased(block) for block in self.of(request_id))

    def gain(self, request_id: str) -> int:
        """The number of blocks that ending this lease alone frees."""
        return sum(self._held[block] == 1 and self._is_only_leased(block) for block in self.of(request_id))

    def check_integrity(self) -> None:
        """Check the sums, and that every block has at least as many references as leases that keep it.

        Raises:
            LocalProtocolError: with the sums.
        """
        by_state = {True: Counter[int](), False: Counter[int]()}
        for request_id, blocks in self._of.items():
            by_state[request_id in self._is_ending].update(blocks)
        held, ending = by_state[False], by_state[True]
        # Compared as dicts: faster than `Counter.__eq__`, which also ignores zero counts.
        if not (dict.__eq__(held, self._held) and dict.__eq__(ending, self._ending)):
            raise LocalProtocolError(
                f"block references: {self._held.total()} held + {self._ending.total()} ending, "
                f"{held.total()} + {ending.total()} by request"
            )
        held.update(ending)
        for block, leases in held.items():
            referred = self._reference_count(block)
            if referred < leases:
                raise LocalProtocolError(
                    f"block {block}: {leases} leases keep it, the pool counts {referred} references"
                )

    def _is_only_leased(self, block: int) -> bool:
        return self._reference_count(block) == self._held[block] + self._ending[block]


def _take(counts: Counter[int], blocks: Sequence[int]) -> None:
    """Remove one reference from each of these distinct blocks. Most have only one, and need no Python loop."""
    found = list(map(counts.pop, blocks))
    if sum(found) > len(found):
        counts.update({block: count - 1 for block, count in zip(blocks, found, strict=True) if count > 1})
