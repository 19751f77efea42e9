"""The cost model: its formulas by hand, and that the choice is the cheapest way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.cost import Costs, ReadOption, choose

SIMPLE = Costs(direct_min_bytes=1000, link_gb_s=1.0, relayout_gb_s=10.0)
"""A descriptor takes a microsecond, and a thousand bytes do; putting them in place a fifth of one."""


def test_runs_from_the_knee_on_are_never_staged() -> None:
    choice = choose(SIMPLE, 8000, 8, [ReadOption(8000, 1)])
    assert (choice.option, choice.reason) == (
        None,
        "runs of 1000 B, and from 1000 B on descriptors are cheap",
    )
    assert choose(SIMPLE, 7992, 8, [ReadOption(7992, 1)]).option == 0


def test_short_runs_are_staged_where_the_producers_are_longer() -> None:
    choice = choose(SIMPLE, 8000, 80, [ReadOption(8000, 8)])
    assert (choice.option, choice.reason) == (
        0,
        "runs of 100 B, but of 1000 B on the producer",
    )


def test_short_runs_that_are_as_short_on_the_producer_are_read_in_place() -> None:
    choice = choose(SIMPLE, 8000, 80, [ReadOption(8000, 80)])
    assert (choice.option, choice.reason) == (
        None,
        "runs of 100 B, and no better ones on the producer",
    )
    assert choose(SIMPLE, 8000, 80, []).option is None


def test_more_may_be_read_than_is_needed_and_the_reason_says_how_much() -> None:
    choice = choose(SIMPLE, 8000, 80, [ReadOption(8000, 80), ReadOption(20000, 1)])
    assert choice.option == 1
    assert (
        choice.reason
        == "runs of 100 B, but of 20000 B on the producer, where 2.5 times the bytes are read"
    )
    assert choose(SIMPLE, 8000, 80, [ReadOption(90_000, 1)]).option is None, (
        "reading ten times as much takes longer"
    )


def seconds(costs: Costs, num_bytes: float, descriptors: float) -> float:
    return (num_bytes + descriptors * costs.direct_min_bytes) / (costs.link_gb_s * 1e9)


@given(
    costs=st.builds(
        Costs,
        direct_min_bytes=st.integers(1, 1 << 16),
        link_gb_s=st.floats(0.1, 400),
        relayout_gb_s=st.floats(0.1, 4000),
    ),
    num_bytes=st.integers(1, 1 << 20),
    descriptors=st.integers(1, 1000),
    read_options=st.lists(
        st.builds(ReadOption, st.floats(1, 1 << 21), st.floats(0.01, 1000)), max_size=3
    ),
)
def test_the_choice_is_never_slower_than_any_other_way(
    costs: Costs, num_bytes: int, descriptors: int, read_options: list[ReadOption]
) -> None:
    choice = choose(costs, num_bytes, descriptors, read_options)
    direct = seconds(costs, num_bytes, descriptors)
    place = 2 * num_bytes / (costs.relayout_gb_s * 1e9)
    staged = [
        seconds(costs, option.read_bytes, option.descriptors) + place
        for option in read_options
    ]
    if choice.option is not None:
        assert num_bytes / descriptors < costs.direct_min_bytes
        assert staged[choice.option] <= min([direct, *staged]) * (1 + 1e-9)
    elif num_bytes / descriptors < costs.direct_min_bytes:
        assert direct <= min([direct, *staged]) * (1 + 1e-9)
