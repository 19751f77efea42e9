"""The model of a fleet: what adds up, which limit comes first, and how a fleet that meets all at once gets through."""

from __future__ import annotations

import pytest
from bench.scale_model import Fleet, Share, Slopes, play, walls

SLOPES = Slopes(reader=Share(0.5, 2.0, 0.0), owner=Share(0.1, 4.0, 0.0), socket=Share(0.02, 1.0, 0.0), hello_s=0.001)


def test_a_worker_has_one_connection_for_each_engine_on_the_other_side() -> None:
    found = Fleet(producers=300, consumers=700, workers=8).per_process(SLOPES)
    assert found["reader"] == Share(150.0, 600.0, 0.0)
    assert found["owner"].files == 2800.0
    assert found["scheduler of a consumer"].files == 256.0, "it keeps no more sockets"


def test_the_nearest_wall_is_first_and_what_does_not_grow_is_none() -> None:
    found = walls(SLOPES, Share(rss_mb=1000.0, files=1024.0, threads=100.0))
    assert next(iter(found)) == "owner, files"
    assert found["owner, files"] == 256.0
    assert found["reader, files"] == 512.0
    assert not any("threads" in name for name in found)


def test_a_slope_is_what_one_more_costs_and_never_negative() -> None:
    before = {"rss_mb": 100.0, "files": 10.0, "threads": 3.0}
    after = {"rss_mb": 99.0, "files": 30.0, "threads": 3.0}
    assert Share.between(before, after, 10) == Share(0.0, 2.0, 0.0)


def test_a_listener_serves_askers_one_after_the_other() -> None:
    played = play(Fleet(1, 10, 2), hello_s=0.1, timeout_s=5.0)
    assert played.last_s == pytest.approx(2.0)
    assert played.half_s == pytest.approx(1.1)
    assert played.timeouts == 0


def test_askers_that_give_up_come_back_until_all_are_connected() -> None:
    played = play(Fleet(1, 100, 1), hello_s=0.1, timeout_s=5.0)
    assert played.timeouts >= 50
    assert played.last_s > 10.0
    assert played == play(Fleet(1, 100, 1), hello_s=0.1, timeout_s=5.0), "the same seed, the same fleet"


def test_renewals_grow_with_consumers_and_not_with_leases() -> None:
    assert Fleet(1, 500, 8).renewals_per_s(30.0) == pytest.approx(100.0)
