"""Limits of what a soak adds with every request and with every life of an engine: a leak of either fails it and is
named, and what goes up and down does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.soak_counts import Gauges, Sample
from bench.soak_report import (
    FEWEST_FOR_A_SLOPE,
    GAUGES,
    MOST_ADDED,
    MOST_PER_LIFE,
    grown,
)

_EVERY, _REQUESTS = 130, 5000
_KINDS = {"per_1000_requests": MOST_ADDED, "per_life": MOST_PER_LIFE}


def samples(
    mb_per_1000: float = 0.0,
    mb_per_life: float = 0.0,
    first_round_at: int = 200,
    kills: tuple[int, ...] = (2200,),
) -> list[Sample]:
    """Of a soak of three minutes: every engine is restarted once from request `first_round_at` on and once from 3,000
    on, and one at each of `kills`. The first six restarts take 20 MB."""
    made = []
    for at in range(0, _REQUESTS, _EVERY):
        planned = sum(
            min(6, max(0, (at - begin) // 150)) for begin in (first_round_at, 3000)
        )
        lives = 6 + planned + sum(at >= kill for kill in kills)
        swing = 2.0 * (at // _EVERY % 2)
        mb = 420 + 20 * min(lives - 6, 6) / 6 + swing
        mb += mb_per_1000 * at / 1000 + mb_per_life * lives
        objects = 800_000 + 500 * at // 1000 + 3000 * (at // _EVERY % 2)
        made.append(Sample(at / 28, at, lives, mb, mb - 170, objects, 680, 134))
    return made


def figures(made: list[Sample], warm: int | None = None) -> dict[str, Any]:
    if warm is None:
        warm = next(index for index, one in enumerate(made) if one.lives >= 12)
    gauges = Gauges(made, warm)
    added = {name: gauges.added(name) for name in GAUGES}
    return {
        "requests": _REQUESTS,
        "gauges": {
            name: dict(zip(_KINDS, both, strict=True)) for name, both in added.items()
        },
    }


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", GAUGES)
def test_each_gauge_that_grows_by_more_than_its_limit_is_named(
    name: str, kind: str
) -> None:
    most = _KINDS[kind][name]

    def said(added: float, requests: int = FEWEST_FOR_A_SLOPE) -> list[str]:
        gauges = {one: dict.fromkeys(_KINDS, 0.0) for one in GAUGES}
        gauges[name][kind] = added
        return grown({"requests": requests, "gauges": gauges})

    assert said(most) == []
    (text,) = said(1.1 * most)
    assert GAUGES[name] in text
    assert f"at most {most:g}" in text
    assert said(1.1 * most, FEWEST_FOR_A_SLOPE - 1) == []


@pytest.mark.parametrize("kills", [(), (2200,), (1700, 4600), (4700, 4800, 4900)])
def test_what_first_restarts_take_and_what_goes_up_and_down_is_no_growth(
    kills: tuple[int, ...],
) -> None:
    assert grown(figures(samples(kills=kills))) == []


def test_a_first_round_that_ends_late_does_not_count() -> None:
    made = samples(first_round_at=1700, kills=())
    assert grown(figures(made)) == []
    assert grown(figures(made, warm=0))  # else it proves nothing


@pytest.mark.parametrize("kills", [(), (1700, 4600), (4700, 4800, 4900)])
def test_a_leak_of_some_kb_by_every_request_is_named_as_that(
    kills: tuple[int, ...],
) -> None:
    said = grown(figures(samples(mb_per_1000=6.0, kills=kills)))
    assert len(said) == 2
    assert all("MB" in one and "per 1,000 requests" in one for one in said)


@pytest.mark.parametrize("kills", [(), (1700, 4600), (4700, 4800, 4900)])
def test_a_leak_of_some_mb_by_every_life_is_named_as_that(
    kills: tuple[int, ...],
) -> None:
    said = grown(figures(samples(mb_per_life=2.5, kills=kills)))
    assert len(said) == 2
    assert all("MB" in one and "per life of an engine" in one for one in said)


def test_what_ended_engines_hold_on_a_busy_machine_is_no_growth() -> None:
    made = samples(kills=())
    ends = [
        replace(one, objects=one.objects + 300_000, is_calm=False)
        if one.requests > 4500
        else one
        for one in made
    ]
    assert grown(figures(ends)) == []
    assert grown(figures([replace(one, is_calm=True) for one in ends]))


def test_a_soak_without_restarts_is_judged_by_its_requests() -> None:
    made = [
        Sample(at / 28, at, 6, 6.0 * at / 1000, 0.0, 0, 0, 0)
        for at in range(0, 5000, 100)
    ]
    assert Gauges(made).added("rss_mb") == pytest.approx((6.0, 0.0))


def test_what_consumers_map_is_not_taken_for_growth() -> None:
    # Each life of a consumer maps or does not, which takes 60 descriptors: one more that maps at the end is no growth.
    made = [
        replace(one, fds=800 + 60 * sum(maps), mapping=maps)
        for one in samples()
        for maps in [_mapping(one.lives)]
    ]
    added = Gauges(made, 0).added("fds")
    assert added == pytest.approx((0.0, 0.0), abs=1e-6)
    assert Gauges([replace(one, mapping=()) for one in made], 0).added("fds") != (
        pytest.approx((0.0, 0.0), abs=1e-6)
    )


def _mapping(lives: int) -> tuple[bool, ...]:
    return lives % 2 == 0, lives % 3 == 0, lives % 4 < 2
