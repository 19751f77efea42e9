"""Growth of a fleet's resources and the first limit that it meets; simulation of a fleet that connects all at once.

    slopes = Slopes(Share(0.5, 2.0, 0.0), Share(0.1, 2.0, 0.0), Share(0.02, 1.0, 0.0), hello_s=0.001)
    Fleet(producers=500, consumers=500, workers=8).per_process(slopes)["owner"].files  # 1,000: 500 readers, 2 each
    walls(slopes, Share(rss_mb=1e3, files=1024, threads=1e3))["owner, files"]          # 512 peers
    play(Fleet(2, 2, 1), hello_s=0.5, timeout_s=5.0).last_s                            # 1.0: one after the other

A *connection* is one worker that reads from one other worker.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
"""As `kvferry.worker.peers.retry`."""


@dataclass(frozen=True)
class Share:
    """Resources of a process, or their growth per peer."""

    rss_mb: float
    files: float
    threads: float

    def times(self, count: float) -> Share:
        return Share(self.rss_mb * count, self.files * count, self.threads * count)

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float], count: int) -> Share:
        """The slope between two looks at a process, `count` more of it apart; noise of memory is no gain."""
        grown = {name: max(0.0, (after[name] - before[name]) / count) for name in ("rss_mb", "files", "threads")}
        return cls(**grown)


@dataclass(frozen=True)
class Slopes:
    """Measured.

    Attributes:
        reader, owner: of a connection, in the worker that reads and in the one that is read from.
        socket: of a producer whose leases a consumer's scheduler renews.
        hello_s: of a listener's thread for one handshake.
    """

    reader: Share
    owner: Share
    socket: Share
    hello_s: float


@dataclass(frozen=True)
class Fleet:
    """Engines of the same size, every consumer reading from every producer, rank by rank.

    Attributes:
        workers: ranks of each engine. With as many on both sides each rank reads from one rank of each producer.
    """

    producers: int
    consumers: int
    workers: int

    def per_process(self, slopes: Slopes) -> dict[str, Share]:
        """Resources that the connections add to each kind of process."""
        return {
            "reader": slopes.reader.times(self.producers),
            "owner": slopes.owner.times(self.consumers),
            "scheduler of a consumer": slopes.socket.times(min(self.producers, 256)),
        }

    def renewals_per_s(self, lease_s: float) -> float:
        """Messages that one listener gets, if every consumer waits for something of it all the time."""
        return self.consumers * 6 / lease_s

    @property
    def handshakes(self) -> int:
        """Handshakes that one producer answers until all consumers know it."""
        return self.consumers * self.workers


def walls(slopes: Slopes, limits: Share) -> dict[str, float]:
    """Peers of one process at which a limit is met, by kind of process and resource, the nearest first."""
    found = {}
    for kind, share in (("reader", slopes.reader), ("owner", slopes.owner)):
        for resource in ("rss_mb", "files", "threads"):
            slope = getattr(share, resource)
            if slope > 0:
                found[f"{kind}, {resource}"] = getattr(limits, resource) / slope
    return dict(sorted(found.items(), key=lambda item: item[1]))


@dataclass(frozen=True)
class Played:
    """How a fleet connected all at once: seconds until half of the handshakes and the last were over; and timeouts."""

    half_s: float
    last_s: float
    timeouts: int


def play(fleet: Fleet, *, hello_s: float, timeout_s: float, seed: int = 1) -> Played:
    """All workers of all consumers ask one producer in the same moment; its listener serves one after the other.

    An asker gives up after `timeout_s`, and asks again with a doubling backoff, as a worker does. A request
    whose asker has given up is served all the same: the listener cannot know.
    """
    draw = random.Random(seed)
    asked: list[tuple[float, int, int]] = [(0.0, asker, 0) for asker in range(fleet.handshakes)]
    heapq.heapify(asked)
    free_s, timeouts = 0.0, 0
    connected: list[float] = []
    while asked:
        at_s, asker, failures = heapq.heappop(asked)
        free_s = max(free_s, at_s) + hello_s
        if free_s - at_s <= timeout_s:
            connected.append(free_s)
            continue
        timeouts += 1
        backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16)) * draw.uniform(0.5, 1.5)
        heapq.heappush(asked, (at_s + timeout_s + backoff_s, asker, failures + 1))
    connected.sort()
    return Played(connected[len(connected) // 2], connected[-1], timeouts)
