"""The estimate that decides whether a prefix is read from another engine or computed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.scheduler.consumer import pull_estimate as module
from kvferry.scheduler.consumer.pull_estimate import (
    ASSUMED_BYTES_S,
    ASSUMED_TOKENS_S,
    FRESH_S,
    MAX_WAIT_S,
    OVERHEAD_S,
    UNMEASURED_WAIT_S,
    PullEstimate,
    StepPace,
    whole_chunks,
)

PEER = ("p0", 5600)
TOKEN_BYTES = 100_000.0
ROUNDED = 1e-9


def measured(*, tokens_s: float, bytes_s: float) -> PullEstimate:
    """An estimate after a step and a load of a second each."""
    estimate = PullEstimate(TOKEN_BYTES)
    estimate.computed(int(tokens_s), 1.0)
    estimate.loaded(PEER, round(bytes_s / TOKEN_BYTES), 1.0, 0.0)
    return estimate


def test_before_any_measurement_a_load_is_favoured_and_a_wait_is_short() -> None:
    estimate = PullEstimate(TOKEN_BYTES * 0.5)
    assert estimate.tokens_s() == ASSUMED_TOKENS_S
    assert estimate.bytes_s(PEER, 0.0) == ASSUMED_BYTES_S
    least = estimate.least_tokens(PEER, 0.0)
    assert least is not None
    assert least <= 256
    assert estimate.wait_s(1 << 20) == UNMEASURED_WAIT_S


@given(
    tokens_s=st.integers(1_000, 200_000),
    bytes_s=st.sampled_from([1e8, 1e9, 1e10, 1e11]),
)
def test_the_fewest_tokens_are_where_loading_becomes_sooner_than_computing(
    tokens_s: int, bytes_s: float
) -> None:
    estimate = measured(tokens_s=tokens_s, bytes_s=bytes_s)
    least = estimate.least_tokens(PEER, 1.0)
    if least is None:
        for num_tokens in (1, 10_000, 1 << 22):
            computing_s = estimate.compute_s(num_tokens) * (1 - ROUNDED)
            assert estimate.load_s(PEER, num_tokens, 1.0) > computing_s
        return
    loading_s = estimate.load_s(PEER, least, 1.0)
    assert loading_s <= estimate.compute_s(least) * (1 + ROUNDED)
    if least > 1:
        computing_s = estimate.compute_s(least - 1) * (1 - ROUNDED)
        assert estimate.load_s(PEER, least - 1, 1.0) > computing_s


def test_a_slow_producer_is_tried_again_after_a_while() -> None:
    estimate = measured(tokens_s=100_000, bytes_s=1e8)
    assert estimate.least_tokens(PEER, FRESH_S - 1) is None
    assert estimate.bytes_s(PEER, FRESH_S + 1) == ASSUMED_BYTES_S
    estimate.loaded(PEER, 100_000, 1.0, FRESH_S + 1)
    assert estimate.bytes_s(PEER, FRESH_S + 2) == pytest.approx(1e10), (
        "the old speed is forgotten"
    )


def test_large_loads_and_long_steps_weigh_most() -> None:
    estimate = PullEstimate(TOKEN_BYTES)
    estimate.loaded(PEER, 100_000, 1.0, 0.0)
    for _ in range(3):
        estimate.loaded(PEER, 10, 0.005, 0.0)  # its latency, not its bandwidth
    assert estimate.bytes_s(PEER, 0.0) > 0.9e10
    estimate.computed(8_000, 1.0)
    estimate.computed(module.SHORTEST_STEP_TOKENS - 1, 1.0)
    estimate.computed(4096, 0.0)
    assert estimate.tokens_s() == 8_000


def test_a_changed_speed_is_found_within_a_few_measurements() -> None:
    estimate = PullEstimate(TOKEN_BYTES)
    for _ in range(50):
        estimate.computed(1_000, 1.0)
    for _ in range(10):
        estimate.computed(10_000, 1.0)
    assert estimate.tokens_s() > 8_000


def test_the_operators_number_replaces_the_estimate() -> None:
    estimate = PullEstimate(TOKEN_BYTES, min_tokens=7)
    estimate.computed(1_000_000, 1.0)
    estimate.loaded(PEER, 1, 100.0, 0.0)
    assert estimate.least_tokens(PEER, 0.0) == 7


def test_a_request_waits_no_longer_than_computing_takes_and_never_long() -> None:
    estimate = PullEstimate(TOKEN_BYTES)
    estimate.computed(10_000, 1.0)
    assert estimate.wait_s(512) == pytest.approx(0.0512)
    assert estimate.wait_s(1 << 22) == MAX_WAIT_S


def test_producers_are_bounded_since_clients_name_them() -> None:
    estimate = PullEstimate(TOKEN_BYTES)
    for port in range(module.MAX_PRODUCERS + 5):
        estimate.loaded(("p", port), 1, 1.0, 0.0)
    assert estimate.bytes_s(("p", 0), 0.0) == ASSUMED_BYTES_S
    assert estimate.bytes_s(("p", module.MAX_PRODUCERS), 0.0) == TOKEN_BYTES


@given(st.integers(1, 3), st.lists(st.integers(1, 500), min_size=4, max_size=12))
def test_steps_that_overlap_are_measured_one_by_one(
    depth: int, durations: list[int]
) -> None:
    # A step begins when the one `depth` before it has ended; steps run one after the other.
    ends: list[float] = []
    pace = StepPace(depth)
    found: list[tuple[int, float]] = []
    for index, duration in enumerate(durations):
        begin_s = ends[index - depth] if index >= depth else 0.0
        ends.append((ends[-1] if ends else 0.0) + duration)
        ended = pace.begin({"r": 1}, 1000 + index, begin_s)
        if ended is not None:
            found.append(ended)
    # The first ones begin together: only the first that is measured may be wrong, where steps overlap.
    measured_durations = [
        (1000 + index, float(duration))
        for index, duration in enumerate(durations[: len(durations) - depth])
    ]
    assert found == measured_durations


def test_a_pause_between_steps_is_not_measured() -> None:
    pace = StepPace(1)
    assert pace.begin({"a": 100}, 100, 0.0) is None
    assert pace.begin({"b": 200}, 200, 50.0) is None, "a had ended, who knows when"
    assert pace.begin({"b": 1, "c": 9}, 10, 50.5) == (200, 0.5)
    assert pace.begin({}, 0, 60.0) is None
    assert pace.begin({"c": 1}, 1, 60.1) is None


def test_a_query_covers_whole_chunks() -> None:
    assert [whole_chunks(n) for n in (0, 255, 256, 700)] == [0, 0, 256, 512]
    assert math.isclose(OVERHEAD_S, 0.005)
