"""Where a load's time goes: from its calls of the fabric, in the order in which it makes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.transfer_loads import Stamp

STAGES = (
    "order to first post",
    "first fence read",
    "index arrays",
    "post",
    "transfer after the post",
    "second fence read",
    "report",
    "done notification",
)
"""`post` holds the copy itself where the transport copies in the call, as CMA does within a host."""


def stages(stamps: Sequence[Stamp], routes: int) -> dict[str, float]:
    """One load's stages in µs; their sum is the time from the order to whichever is last, the report or the `done`.

    Args:
        routes: producer workers: so many posts are a fence, all others are data.
    """
    named = {name: [stamp for stamp in stamps if stamp[0] == name] for name in ("order", "report", "notify")}
    ordered, reported, notified = named["order"][0][1], named["report"][0][1], named["notify"][0][1]
    # Reads that are posted behind the messages flush them, and belong to no stage.
    posts = [stamp for stamp in stamps if stamp[0] == "post_read" and stamp[1] < notified]
    first, data, second = posts[:routes], posts[routes:-routes], posts[-routes:]
    polls = [stamp for stamp in stamps if stamp[0] == "poll"]
    fence_read = max(stamp[2] for stamp in (*polls, *first) if stamp[1] < data[0][1])
    arrived = max(stamp[2] for stamp in (*polls, *data) if stamp[1] < second[0][1])
    last = max((stamp[2] for stamp in (*polls, *second) if stamp[1] < reported), default=reported)
    notified_ns = sum(stamp[2] - stamp[1] for stamp in named["notify"])
    notified_before_ns = sum(stamp[2] - stamp[1] for stamp in named["notify"] if stamp[1] < reported)
    spans = (
        first[0][1] - ordered,
        fence_read - first[0][1],
        data[0][1] - fence_read,
        data[-1][2] - data[0][1],
        arrived - data[-1][2],
        last - arrived,
        reported - last - notified_before_ns,
        notified_ns,
    )
    return {stage: span / 1e3 for stage, span in zip(STAGES, spans, strict=True)}


def medians(loads: Sequence[dict[str, float]]) -> dict[str, float]:
    """Stage by stage."""
    return {stage: statistics.median(load[stage] for load in loads) for stage in STAGES}
