"""A prewarmer that is closed without a start leaves nothing open."""

from __future__ import annotations

from pathlib import Path

from kvferry.scheduler.side_channel.prewarmer import PeerPrewarmer
from tests.scheduler.channel import HOST
from tests.scheduler.test_prewarmer import ME, TIMEOUT_S


def test_a_prewarmer_that_was_never_started_leaves_nothing_open() -> None:
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir()))
    made = [PeerPrewarmer([(HOST, 1)], ME, lambda _: None, TIMEOUT_S) for _ in range(5)]
    assert len(list(fds.iterdir())) > before, "nothing was open that could be left"
    for one in (*made, *made):
        one.close()
    assert len(list(fds.iterdir())) <= before
