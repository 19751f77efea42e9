"""The assignment of reads to producer workers, made for all consumer workers at once so that replicas are used evenly.

Tensors that are sharded alike on both sides (usually all layers of a stage) are one *pattern* and are assigned once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.tokens import share_of, shares_meet
from kvferry.protocol.geometry import Interleave, Range
from kvferry.protocol.handshake import WorkerDescription

Name = tuple[str, str]
"""The layer and the kind of a tensor."""

# A description is input: it may claim that the tokens are divided among tens of thousands of ranks,
# and each rank without a worker would be a lack of every tensor; or thousands of workers whose heads
# all overlap differently.
MAX_LACKS = 1024
"""Lacks after which the search for more ends: the pair is refused anyway."""

MAX_STEPS = 1 << 23
"""Steps after which a pair is refused: some seconds. Engines of 512 ranks take a quarter of them."""


class Holding(NamedTuple):
    """The share of a tensor that one worker holds."""

    worker: int
    heads: Range
    share: Interleave

    def has(self, segment: Range) -> bool:
        """True if all heads of a segment are held."""
        return self.heads.start <= segment.start and segment.stop <= self.heads.stop


class AssignedRead(NamedTuple):
    """These heads of this tensor, to be read from one producer worker."""

    name: Name
    heads: Range


class Lack(NamedTuple):
    """A share that no producer worker holds: a tensor's heads, for one share of the tokens."""

    name: Name
    heads: Range
    share: Interleave


@dataclass(frozen=True, slots=True)
class Assignment:
    """The reads of all consumer workers.

    Attributes:
        sources: per consumer worker its reads, by producer worker.
        released: per consumer worker the producer workers that it notifies but does not read from.
        lacks: shares that no producer worker holds, at most `MAX_LACKS`; the pair cannot work unless this is empty.
    """

    sources: tuple[Mapping[int, tuple[AssignedRead, ...]], ...]
    released: tuple[tuple[int, ...], ...]
    lacks: tuple[Lack, ...]

    def expected(self, producer: int) -> int:
        """The number of consumer workers that report `done` to a producer worker."""
        count = 0
        for read, released in zip(self.sources, self.released, strict=True):
            if producer in read or producer in released:
                count += 1
        return count


@dataclass(slots=True)
class _Search:
    """The assignment so far.

    Attributes:
        load: bytes to be sent, per producer worker.
        sources: per consumer worker its reads, by producer worker.
        steps: taken so far.
    """

    load: list[int]
    sources: list[dict[int, list[AssignedRead]]]
    lacks: list[Lack] = field(default_factory=list)
    steps: int = 0

    def count(self, steps: int) -> None:
        """Count the steps of a part of the search, before it is made.

        Raises:
            PlanRefused: the search takes more than `MAX_STEPS`.
        """
        self.steps += steps
        if self.steps <= MAX_STEPS:
            return
        reason = Reason(
            field="workers",
            producer="too many overlapping head ranges",
            consumer=f"{MAX_STEPS} steps",
            change="shard the cache in fewer different ways",
        )
        raise PlanRefused([reason])

    def has_enough_lacks(self) -> bool:
        return len(self.lacks) >= MAX_LACKS


def assign(
    consumers: Sequence[WorkerDescription], producers: Sequence[WorkerDescription]
) -> Assignment:
    """Choose for every (tensor, head, share of the tokens) that a consumer needs exactly one producer that holds it.

    The rules, the earlier before the later:

    1. Of several holders each serves as many readers of this head and share as the others, or one more.
    2. As many readers as possible get a holder that they read from already, since each further one costs a route: its
       descriptors, a fence and a notification.
    3. Of equal holders the one with the fewest bytes to send so far is chosen, then the first.

    Each producer worker without a reader is notified by the consumer worker with the fewest routes.

    An example: a state divided among two producer workers, an MLA latent that both have, four consumer workers.

        state     0 ← P0, 1 ← P0, 2 ← P1, 3 ← P1     it has no choice
        latent    0 ← P0, 1 ← P0, 2 ← P1, 3 ← P1     two readers each; in turn (P0, P1, P0, P1) took 6 routes for 4

    Raises:
        PlanRefused: the search takes more than `MAX_STEPS`.
    """
    wanted = _holdings(consumers)
    held = _holdings(producers)
    search = _Search([0] * len(producers), [{} for _ in consumers])
    for pattern in _patterns(consumers, wanted, held):
        _assign_pattern(pattern, search)
    # One part of a pattern adds many lacks at once.
    del search.lacks[MAX_LACKS:]
    sources = tuple(
        {producer: tuple(reads) for producer, reads in sorted(by_producer.items())}
        for by_producer in search.sources
    )
    return Assignment(
        sources, _release_rest(sources, len(producers)), tuple(search.lacks)
    )


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Tensors that are sharded alike on both sides.

    Attributes:
        wants: what the consumer workers need.
        holds: what the producer workers hold.
        head_bytes: the size of a head of all these tensors.
    """

    names: Sequence[Name]
    wants: Sequence[Holding]
    holds: Sequence[Holding]
    head_bytes: int


def _patterns(
    consumers: Sequence[WorkerDescription],
    wanted: Mapping[Name, Sequence[Holding]],
    held: Mapping[Name, Sequence[Holding]],
) -> list[_Pattern]:
    """The patterns, in the order in which they are assigned."""
    cell_bytes = {
        tensor.name: tensor.cell_bytes
        for worker in consumers
        for tensor in worker.tensors
    }
    # By identity, which is fast: equal holdings are one object.
    names_by_shards: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Name]] = {}
    for name, wants in wanted.items():
        holds = held.get(name, ())
        shards = (tuple(map(id, wants)), tuple(map(id, holds)))
        names_by_shards.setdefault(shards, []).append(name)
    patterns = [
        _Pattern(
            names=names,
            wants=wanted[names[0]],
            holds=held.get(names[0], ()),
            head_bytes=sum(cell_bytes[name] for name in names),
        )
        for names in names_by_shards.values()
    ]
    # What has the fewest holders is assigned first, and the rest follows it: replicas that were given out in turn,
    # whatever else a worker read, took up to 1.9 times the routes.
    patterns.sort(key=_mean_holders)
    return patterns


def _mean_holders(pattern: _Pattern) -> float:
    """By how many workers each part is held, on average. What has one holder leaves no choice."""
    parts = {(holding.heads, holding.share) for holding in pattern.holds}
    return len(pattern.holds) / max(1, len(parts))


def _holdings(workers: Iterable[WorkerDescription]) -> dict[Name, list[Holding]]:
    """The holdings of each tensor; equal holdings are one object."""
    holdings: dict[Name, list[Holding]] = {}
    for index, worker in enumerate(workers):
        # By value too, because different interleaves may be the same share.
        by_fields: dict[tuple[Range, Interleave], Holding] = {}
        by_value: dict[Holding, Holding] = {}
        for tensor in worker.tensors:
            heads = tensor.heads
            if heads.stop <= heads.start:
                continue
            key = (heads, tensor.interleave)
            holding = by_fields.get(key)
            if holding is None:
                holding = Holding(index, heads, share_of(tensor))
                holding = by_value.setdefault(holding, holding)
                by_fields[key] = holding
            holdings.setdefault((tensor.layer, tensor.kind), []).append(holding)
    return holdings


def _assign_pattern(pattern: _Pattern, search: _Search) -> None:
    """Assign the sources of one pattern."""
    if search.has_enough_lacks():
        return
    shares = _complete_shares(pattern.holds)
    # Not head by head: a convolution's heads are its channels, and there are thousands.
    for segment in _segments(pattern):
        search.count(len(pattern.wants))
        readers = [holding for holding in pattern.wants if holding.has(segment)]
        if not readers:
            continue
        search.count(len(pattern.holds))
        holders: dict[Interleave, list[int]] = {}
        for holding in pattern.holds:
            if holding.has(segment):
                holders.setdefault(holding.share, []).append(holding.worker)
        for share in shares:
            if search.has_enough_lacks():
                return
            search.count(len(readers))
            meeting = [
                reader.worker for reader in readers if shares_meet(reader.share, share)
            ]
            _assign_segment(
                pattern, segment, share, meeting, holders.get(share, ()), search
            )
        if not shares:
            search.lacks += [
                Lack(name, segment, Interleave()) for name in pattern.names
            ]


def _segments(pattern: _Pattern) -> list[Range]:
    """The head ranges between the edges of all shards: a worker has all heads of a segment, or none."""
    edges: set[int] = set()
    for holding in (*pattern.wants, *pattern.holds):
        edges.add(holding.heads.start)
        edges.add(holding.heads.stop)
    return [Range(start, stop) for start, stop in itertools.pairwise(sorted(edges))]


def _assign_segment(
    pattern: _Pattern,
    segment: Range,
    share: Interleave,
    readers: Sequence[int],
    holding_workers: Sequence[int],
    search: _Search,
) -> None:
    """Assign one share of a segment to its readers, which are consumer workers."""
    holders = list(dict.fromkeys(holding_workers))
    if not holders:
        lacks = [Lack(name, segment, share) for name in pattern.names]
        search.lacks += lacks * len(readers)
        return
    search.count(len(readers) * (len(holders) + len(pattern.names)))
    num_bytes = len(segment) * pattern.head_bytes // share.ranks
    chosen = _choose(readers, holders, num_bytes, search)
    for reader, holder in zip(readers, chosen, strict=True):
        reads = search.sources[reader].setdefault(holder, [])
        _add(reads, pattern.names, segment)


def _choose(
    readers: Sequence[int], holders: Sequence[int], num_bytes: int, search: _Search
) -> list[int]:
    """The holder of each reader; adds `num_bytes` to the holder's load for each."""
    readers_each, one_more = divmod(len(readers), len(holders))
    by_load = sorted(holders, key=lambda worker: (search.load[worker], worker))
    known = [
        [holder for holder in by_load if holder in search.sources[reader]]
        for reader in readers
    ]
    matched = _Matching(known, search).match(readers_each, one_more)
    times = dict.fromkeys(holders, 0)
    for holder in matched:
        if holder is not None:
            times[holder] += 1
            search.load[holder] += num_bytes
    chosen: list[int] = []
    for holder in matched:
        if holder is None:
            holder = min(
                times, key=lambda worker: (times[worker], search.load[worker], worker)
            )
            times[holder] += 1
            search.load[holder] += num_bytes
        chosen.append(holder)
    return chosen


class _Matching:
    """Gives as many readers as possible one of the holders that they know: a matching by augmenting paths.

    Trying the holders in turn is not enough: a reader that knows two may take the only one that another knows.

    Args:
        known: by reader the holders that it knows, the preferred ones first.
    """

    def __init__(self, known: Sequence[Sequence[int]], search: _Search) -> None:
        self._known = known
        self._search = search
        self._holder_of: list[int | None] = [None] * len(known)
        self._served: dict[int, list[int]] = {
            holder: [] for holders in known for holder in holders
        }

    def match(self, readers_each: int, one_more: int) -> list[int | None]:
        """Match the readers.

        Args:
            readers_each: readers that each holder serves.
            one_more: holders that serve one more.

        Returns:
            The holder of each reader; None for a reader without.
        """
        # In two rounds: who serves one more before all serve their number may leave another one with fewer.
        unmatched: list[int] = []
        for reader, holders in enumerate(self._known):
            if holders and not self._try_match(reader, readers_each):
                unmatched.append(reader)
        for reader in unmatched:
            if one_more and self._try_match(reader, readers_each + 1):
                one_more -= 1
        return self._holder_of

    def _try_match(self, reader: int, room: int) -> bool:
        """Give the reader a holder, if need be by giving other readers other ones.

        Args:
            room: readers that a holder may serve.
        """
        asked_by: dict[int, int] = {}
        # Breadth first and not recursive: a description may claim thousands of workers.
        asking = deque([reader])
        while asking:
            asker = asking.popleft()
            for holder in self._known[asker]:
                if holder in asked_by:
                    continue
                asked_by[holder] = asker
                served = self._served[holder]
                self._search.count(1 + len(served))
                if len(served) < room:
                    self._move_along(asked_by, holder)
                    return True
                # A full holder is free again if one of its readers finds another one.
                asking.extend(served)
        return False

    def _move_along(self, asked_by: dict[int, int], last_holder: int) -> None:
        """Go back along the path: every reader moves on to the holder that it asked."""
        holder: int | None = last_holder
        while holder is not None:
            reader = asked_by[holder]
            former = self._holder_of[reader]
            self._holder_of[reader] = holder
            self._served[holder].append(reader)
            if former is not None:
                self._served[former].remove(reader)
            holder = former


def _complete_shares(holds: Sequence[Holding]) -> list[Interleave]:
    """The shares of the producers' division of the tokens, which together are all tokens."""
    # Of one division: parts of two overlap, and tokens of both would be read twice.
    divisions = {(holding.share.ranks, holding.share.run_tokens) for holding in holds}
    ranks, run_tokens = min(divisions, default=(0, 0))
    return [
        Interleave(ranks=ranks, rank=rank, run_tokens=run_tokens)
        for rank in range(ranks)
    ]


def _add(reads: list[AssignedRead], names: Sequence[Name], segment: Range) -> None:
    """Add a segment for every name of a pattern, joined to the previous one if they are adjacent."""
    last = reads[-len(names) :]
    is_same_pattern = [read.name for read in last] == list(names)
    if is_same_pattern and last[0].heads.stop == segment.start:
        reads[-len(names) :] = [
            read._replace(heads=Range(read.heads.start, segment.stop)) for read in last
        ]
    else:
        reads += [AssignedRead(name, segment) for name in names]


def _release_rest(
    sources: Sequence[Mapping[int, object]], producers: int
) -> tuple[tuple[int, ...], ...]:
    """Per consumer worker the producer workers that it notifies but does not read from.

    Every producer worker holds its copy of the request until somebody reports it.
    """
    released: list[list[int]] = [[] for _ in sources]
    routes = [len(by_producer) for by_producer in sources]
    read: set[int] = set()
    read.update(*sources)
    for producer in range(producers):
        if producer in read:
            continue
        # It costs this one a notification for every request.
        consumer = routes.index(min(routes))
        released[consumer].append(producer)
        routes[consumer] += 1
    return tuple(tuple(producers) for producers in released)
