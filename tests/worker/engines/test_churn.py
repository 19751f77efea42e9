"""Producers that come and go, on the real fabric: a consumer that outlives them keeps nothing of them."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.worker.fabric.port import OpenHandles
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.inside import thread_of
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.ports import free_port
from tests.promises import promise
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PRODUCERS = 150
WARM_UP = 30
MAX_PEERS = 8
SMALL = CacheShape(blocks=24)
ROOMY = replace(
    SETTINGS,
    max_peers=MAX_PEERS,
    staging_pool_bytes=1 << 16,
    handshake_timeout_s=10.0,
    max_loads=8,
)
MIB = 1 << 20


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _at_rest(consumer: Engine) -> OpenHandles:
    consumer.wait_until_idle()
    consumer.set_timeouts()
    return consumer.fabric.open_handles()


@promise(4)
def test_producers_that_come_and_go_leave_nothing_with_their_consumer() -> None:
    """Every third one restarts at its address; the others never come again, and are forgotten for those after them."""
    rig = Rig("nixl")
    try:
        consumer = rig.engine("C", shape=SMALL, settings=ROOMY)
        port = free_port()
        before: tuple[int, int, int, int] | None = None
        for number in range(PRODUCERS):
            name, where = (f"P{number}", None) if number % 3 else ("P", port)
            producer = rig.engine(name, shape=SMALL, settings=ROOMY, port=where)
            rig.transfer(producer, consumer, seed=number)
            rig.retire(producer)
            if number == WARM_UP:
                _at_rest(consumer)
                gc.collect()
                before = (
                    _fds(),
                    threading.active_count(),
                    _rss_bytes(),
                    len(gc.get_objects()),
                )
        registry = thread_of(consumer.worker).registry
        wait_until(
            lambda: not len(registry.snapshot().handshakes),
            "no handshake is left",
            60.0,
        )
        handles = _at_rest(consumer)
        assert handles.peers <= MAX_PEERS
        assert handles.prepared == 2 + handles.peers * _lists_of_a_peer(consumer)
        assert (handles.transfers, handles.leaving) == (0, 0)
        assert consumer.all_entries_are_free()
        assert consumer.pool.free_bytes == consumer.pool.capacity
        check_worker(consumer.worker)
        gc.collect()
        assert before is not None
        fds, threads, rss, objects = before
        found = (_fds(), threading.active_count(), _rss_bytes(), len(gc.get_objects()))
        print(f"fds, threads, RSS, objects: {before} → {found}")
        assert found[0] <= fds + 8
        assert found[1] <= threads + 2
        assert found[2] - rss < (PRODUCERS - WARM_UP) * MIB
        assert found[3] - objects < (PRODUCERS - WARM_UP) * 100
    finally:
        rig.close()


def _lists_of_a_peer(consumer: Engine) -> int:
    (lists,) = {
        len(peer.made) - len(peer.routes)
        for peer in thread_of(consumer.worker).registry.peers()
    }
    return lists
