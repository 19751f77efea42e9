"""References of leases on blocks after the end of their requests, and how many blocks nothing but leases refers to.

A block may belong to several leases, and to requests that run: prompts share prefixes. Ending a lease gives back only
those of its blocks that nobody else refers to. So references are counted, and the pool is asked for its own count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.protocol.errors import LocalProtocolError

ReferenceCount = Callable[[int], int]
"""How many requests, all in all, refer to a block."""


class BlockReferences:
    """References on blocks by request, while its lease is held or ending."""

    def __init__(self) -> None:
        self._reference_count: ReferenceCount = lambda block: self._held[block] + self._ending[block]
        self._of: dict[str, tuple[int, ...]] = {}
        self._is_ending: dict[str, None] = {}  # the one that ended first is first
        self._held: Counter[int] = Counter()
        self._ending: Counter[int] = Counter()

    def bind(self, reference_count: ReferenceCount) -> None:
        """The pool's own count of references; until then nobody but leases is taken to use any block."""
        self._reference_count = reference_count

    def __len__(self) -> int:
        """Blocks that leases which have not ended refer to, shared or not: never less than `num_leased`."""
        return len(self._held)

    @property
    def num_held(self) -> int:
        """Requests whose leases have not ended."""
        return len(self._of) - len(self._is_ending)

    @property
    def num_ending(self) -> int:
        """Requests whose leases have ended, until every worker has said so."""
        return len(self._is_ending)

    def first_ending(self) -> str | None:
        """Of these requests the one whose lease ended first; None when there is none."""
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
        """A request has ended, its blocks are held: each is named once."""
        self._of[request_id] = blocks
        self._held.update(blocks)

    def end(self, request_id: str) -> None:
        """Nobody reads them any more; they come back when every worker has said so."""
        if request_id not in self._of or request_id in self._is_ending:
            return
        self._is_ending[request_id] = None
        _take(self._held, self._of[request_id])
        self._ending.update(self._of[request_id])

    def free(self, request_id: str) -> None:
        """They are back in the pool, as far as nobody else uses them."""
        blocks = self._of.pop(request_id, ())
        is_ending = request_id in self._is_ending
        self._is_ending.pop(request_id, None)
        _take(self._ending if is_ending else self._held, blocks)

    def num_leased(self) -> int:
        """Blocks that only leases keep, one of them at least not ended. Costs a look at every held block."""
        return sum(self._is_only_leased(block) for block in self._held)

    def num_coming(self) -> int:
        """Blocks that are on their way back into the pool."""
        if not self._ending:
            return 0
        return sum(self._reference_count(block) == count for block, count in self._ending.items())

    def can_give(self, request_id: str) -> bool:
        """Whether the end of this lease, and perhaps of others, gives any block back."""
        return any(self._is_only_leased(block) for block in self.of(request_id))

    def gain(self, request_id: str) -> int:
        """How many blocks the end of this lease alone gives back."""
        return sum(self._held[block] == 1 and self._is_only_leased(block) for block in self.of(request_id))

    def check_integrity(self) -> None:
        """Check the sums, and that every block has as many references as leases that keep it.

        Raises:
            LocalProtocolError: with the sums.
        """
        by_state = {True: Counter[int](), False: Counter[int]()}
        for request_id, blocks in self._of.items():
            by_state[request_id in self._is_ending].update(blocks)
        held, ending = by_state[False], by_state[True]
        # As dicts, whose comparison is not written in Python, and which do not take a zero for nothing.
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
    """One reference less on each of these blocks, which are all different. Most have one only, and go without a line of
    Python for each."""
    found = list(map(counts.pop, blocks))
    if sum(found) > len(found):
        counts.update({block: count - 1 for block, count in zip(blocks, found, strict=True) if count > 1})
