"""Puts intervals that overlap on different lanes, as a trace viewer needs them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each `[begin, end)`, no two of one lane overlapping; the lowest one that is free.

    >>> lanes([(0, 5), (2, 4), (4, 9), (5, 6)])
    [0, 1, 1, 0]
    """
    chosen = [0] * len(intervals)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for index in sorted(range(len(intervals)), key=lambda at: intervals[at]):
        begun, ended = intervals[index]
        while busy and busy[0][0] <= begun:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        chosen[index] = lane
        heapq.heappush(busy, (max(ended, begun + 1), lane))
    return chosen
