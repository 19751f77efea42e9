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

MAX_LACKS = 1024
"""Lacks after which the search for more ends: the pair is refused anyway. A description may claim that the tokens are
divided among tens of thousands of ranks, and each rank without a worker would be a lack of every tensor.
"""

MAX_STEPS = 1 << 23
"""Steps after which a pair is refused: some seconds. Engines of 512 ranks take a quarter of them; a description may
claim thousands of workers whose heads all overlap differently.
"""


class Holding(NamedTuple):
    """The share of a tensor that one worker holds."""

    worker: int
    heads: Range
    share: Interleave


class ReadSource(NamedTuple):
    """One read: these heads of this tensor."""

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

    sources: tuple[Mapping[int, tuple[ReadSource, ...]], ...]
    released: tuple[tuple[int, ...], ...]
    lacks: tuple[Lack, ...]

    def expected(self, producer: int) -> int:
        """The number of consumer workers that report `done` to a producer worker."""
        return sum(
            producer in read or producer in reported
            for read, reported in zip(self.sources, self.released, strict=True)
        )


@dataclass(slots=True)
class _Ledger:
    """The assignment so far: bytes per producer worker, each consumer worker's sources, and steps taken."""

    load: list[int]
    sources: list[dict[int, list[ReadSource]]]
    lacks: list[Lack] = field(default_factory=list)
    steps: int = 0

    def take(self, steps: int) -> None:
        """Count the steps of a part of the search.

        Raises:
            PlanRefused: the search has taken more than `MAX_STEPS`.
        """
        self.steps += steps
        if self.steps > MAX_STEPS:
            change = "shard the cache in fewer different ways"
            raise PlanRefused(
                [
                    Reason(
                        "workers", "too many overlapping head ranges", f"{MAX_STEPS} steps", change
                    )
                ]
            )


def assign(
    consumers: Sequence[WorkerDescription], producers: Sequence[WorkerDescription]
) -> Assignment:
    """Choose for every (tensor, head, share of the tokens) that a consumer needs exactly one producer that holds it.

    Of several holders each serves as many readers of this head and share as the others, or one more. Within that, as
    many readers as possible get a holder that they read from already, since each further one costs a route: its
    descriptors, a fence and a notification. What has the fewest holders is shared out first, and the rest follows it.
    Of equal holders the one with the fewest bytes to send so far is chosen, then the first. Each producer worker
    without a reader is notified by the consumer worker with the fewest routes.

    An example: a state divided among two producer workers, an MLA latent that both have, four consumer workers.

        state     0 ← P0, 1 ← P0, 2 ← P1, 3 ← P1     it has no choice
        latent    0 ← P0, 1 ← P0, 2 ← P1, 3 ← P1     two readers each; in turn (P0, P1, P0, P1) took 6 routes for 4

    Raises:
        PlanRefused: the search takes more than `MAX_STEPS`.
    """
    wanted, held = _holdings(consumers), _holdings(producers)
    patterns: dict[
        tuple[tuple[int, ...], tuple[int, ...]], list[Name]
    ] = {}  # equal holdings are one object
    for name, wants in wanted.items():
        patterns.setdefault((tuple(map(id, wants)), tuple(map(id, held.get(name, ())))), []).append(
            name
        )
    cells = {tensor.name: tensor.cell_bytes for worker in consumers for tensor in worker.tensors}
    ledger = _Ledger([0] * len(producers), [{} for _ in consumers])
    for names in sorted(patterns.values(), key=lambda names: _copies(held.get(names[0], ()))):
        readers, holders = wanted[names[0]], held.get(names[0], ())
        _share_out(readers, holders, names, sum(cells[name] for name in names), ledger)
    del ledger.lacks[MAX_LACKS:]
    sources = tuple(
        {worker: tuple(given) for worker, given in sorted(of.items())} for of in ledger.sources
    )
    return Assignment(sources, _release_rest(sources, len(producers)), tuple(ledger.lacks))


def _holdings(workers: Iterable[WorkerDescription]) -> dict[Name, list[Holding]]:
    """The holdings of each tensor; equal holdings are one object."""
    found: dict[Name, list[Holding]] = {}
    for index, worker in enumerate(workers):
        known: dict[tuple[Range, Interleave], Holding] = {}
        equal: dict[Holding, Holding] = {}
        for tensor in worker.tensors:
            heads = tensor.heads
            if heads.stop <= heads.start:
                continue
            held = known.get((heads, tensor.interleave))
            if held is None:
                made = Holding(index, heads, share_of(tensor))
                held = known[heads, tensor.interleave] = equal.setdefault(made, made)
            found.setdefault((tensor.layer, tensor.kind), []).append(held)
    return found


def _share_out(
    wants: Sequence[Holding],
    holds: Sequence[Holding],
    names: Sequence[Name],
    head_bytes: int,
    ledger: _Ledger,
) -> None:
    """Assign the sources of one pattern; `head_bytes` is the size of a head of all its tensors."""
    if len(ledger.lacks) >= MAX_LACKS:
        return
    edges = sorted({edge for one in (*wants, *holds) for edge in (one.heads.start, one.heads.stop)})
    segments = [Range(start, stop) for start, stop in itertools.pairwise(edges)]
    shares = _complete_shares(holds)
    for segment in segments:
        ledger.take(len(wants))
        readers = [
            one
            for one in wants
            if one.heads.start <= segment.start and segment.stop <= one.heads.stop
        ]
        if not readers:
            continue
        ledger.take(len(holds))
        owners: dict[Interleave, list[int]] = {}
        for one in holds:
            if one.heads.start <= segment.start and segment.stop <= one.heads.stop:
                owners.setdefault(one.share, []).append(one.worker)
        for share in shares:
            if len(ledger.lacks) >= MAX_LACKS:
                return
            ledger.take(len(readers))
            meeting = [reader.worker for reader in readers if shares_meet(reader.share, share)]
            holders = list(dict.fromkeys(owners.get(share, ())))
            if not holders:
                ledger.lacks += [Lack(name, segment, share) for name in names] * len(meeting)
                continue
            ledger.take(len(meeting) * (len(holders) + len(names)))
            num_bytes = len(segment) * head_bytes // share.ranks
            for reader, chosen in zip(
                meeting, _choose(meeting, holders, num_bytes, ledger), strict=True
            ):
                _add(ledger.sources[reader].setdefault(chosen, []), names, segment)
        if not shares:
            ledger.lacks += [Lack(name, segment, Interleave()) for name in names]


def _copies(holds: Sequence[Holding]) -> float:
    """By how many workers each part is held, on average. What has one holder leaves no choice."""
    return len(holds) / max(1, len({(one.heads, one.share) for one in holds}))


def _choose(
    readers: Sequence[int], holders: Sequence[int], num_bytes: int, ledger: _Ledger
) -> list[int]:
    """The holder of each reader; adds `num_bytes` to the holder's load for each."""
    least, more = divmod(len(readers), len(holders))
    by_load = sorted(holders, key=lambda worker: (ledger.load[worker], worker))
    known = [
        [holder for holder in by_load if holder in ledger.sources[reader]] for reader in readers
    ]
    given = _matched(known, least, more, ledger)
    times = dict.fromkeys(holders, 0)
    for matched in given:
        if matched is not None:
            times[matched] += 1
            ledger.load[matched] += num_bytes
    chosen = []
    for matched in given:
        holder = matched
        if holder is None:
            holder = min(times, key=lambda worker: (times[worker], ledger.load[worker], worker))
            times[holder] += 1
            ledger.load[holder] += num_bytes
        chosen.append(holder)
    return chosen


def _matched(
    known: Sequence[Sequence[int]], least: int, more: int, ledger: _Ledger
) -> list[int | None]:
    """Give as many readers as possible one of the holders that they know: a matching by augmenting paths.

    Args:
        known: by reader.
        least, more: each holder serves `least` readers, and `more` of the holders one more.

    Returns:
        The holder of each reader; None for a reader without.
    """
    given: list[int | None] = [None] * len(known)
    served: dict[int, list[int]] = {holder: [] for holders in known for holder in holders}

    def give(first: int, room: int) -> bool:
        """Give the reader a holder, if need be by giving other readers other ones. Not recursive: a description may
        claim thousands of workers."""
        asked_by: dict[int, int] = {}
        asking = deque([first])
        while asking:
            reader = asking.popleft()
            for holder in known[reader]:
                if holder in asked_by:
                    continue
                asked_by[holder] = reader
                ledger.take(1 + len(served[holder]))
                if len(served[holder]) >= room:
                    asking.extend(served[holder])
                    continue
                at: int | None = holder
                while (
                    at is not None
                ):  # back along the path, every reader moves on to the holder that it asked
                    moved = asked_by[at]
                    before = given[moved]
                    given[moved] = at
                    served[at].append(moved)
                    if before is not None:
                        served[before].remove(moved)
                    at = before
                return True
        return False

    waiting = [reader for reader in range(len(known)) if known[reader] and not give(reader, least)]
    for reader in waiting:
        if more and give(reader, least + 1):
            more -= 1
    return given


def _complete_shares(holds: Sequence[Holding]) -> list[Interleave]:
    """The shares of the producers' division of the tokens, which together are all tokens."""
    kinds = {(one.share.ranks, one.share.run_tokens) for one in holds}
    ranks, run = min(kinds, default=(0, 0))
    return [Interleave(ranks=ranks, rank=rank, run_tokens=run) for rank in range(ranks)]


def _add(sources: list[ReadSource], names: Sequence[Name], segment: Range) -> None:
    """Add a segment for every name of a pattern, joined to the previous one if they are adjacent."""
    last = sources[-len(names) :]
    if [one.name for one in last] == list(names) and last[0].heads.stop == segment.start:
        sources[-len(names) :] = [
            one._replace(heads=Range(one.heads.start, segment.stop)) for one in last
        ]
    else:
        sources += [ReadSource(name, segment) for name in names]


def _release_rest(
    sources: Sequence[Mapping[int, object]], producers: int
) -> tuple[tuple[int, ...], ...]:
    reported: list[list[int]] = [[] for _ in sources]
    read = {worker for of in sources for worker in of}
    for worker in range(producers):
        if worker not in read:
            fewest = min(
                range(len(sources)),
                key=lambda index: (len(sources[index]) + len(reported[index]), index),
            )
            reported[fewest].append(worker)
    return tuple(tuple(of) for of in reported)
