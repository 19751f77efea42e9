"""Offsets that satisfy what must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.trace.clocks import offsets

CLOCKS = tuple("abcde")
PAIRS = st.tuples(st.sampled_from(CLOCKS), st.sampled_from(CLOCKS)).filter(lambda pair: pair[0] != pair[1])


def satisfied(bounds: dict[tuple[str, str], int], found: dict[str, int]) -> bool:
    return all(found[late] - found[early] <= bound for (late, early), bound in bounds.items())


def test_the_examples_of_the_module() -> None:
    ahead = offsets({("A", "B"): -6, ("B", "A"): 11}, ("A", "B"))
    assert ahead.by_clock["A"] - ahead.by_clock["B"] == -6
    assert not ahead.impossible
    set_meanwhile = offsets({("A", "B"): -6, ("B", "A"): 3}, ("A", "B"))
    assert set_meanwhile.impossible == {("A", "B"): 2, ("B", "A"): 2}


def test_the_clock_that_differs_from_most_is_the_one_that_is_shifted() -> None:
    late = {("p", name): -5 for name in CLOCKS} | {(name, "p"): 9 for name in CLOCKS}
    assert offsets(late, ("p", *CLOCKS)).by_clock == {"p": -5, **dict.fromkeys(CLOCKS, 0)}
    early = {("p", name): 9 for name in CLOCKS} | {(name, "p"): -5 for name in CLOCKS}
    assert offsets(early, ("p", *CLOCKS)).by_clock == {"p": 5, **dict.fromkeys(CLOCKS, 0)}


@given(st.dictionaries(PAIRS, st.integers(0, 1000)))
def test_clocks_that_agree_are_left_alone(bounds: dict[tuple[str, str], int]) -> None:
    found = offsets(bounds, CLOCKS)
    assert set(found.by_clock.values()) == {0}
    assert not found.impossible


@given(
    st.fixed_dictionaries({clock: st.integers(-(10**12), 10**12) for clock in CLOCKS}),
    st.dictionaries(PAIRS, st.integers(0, 10**9)),
)
def test_whatever_the_true_offsets_every_bound_is_satisfied(
    truth: dict[str, int], slack: dict[tuple[str, str], int]
) -> None:
    bounds = {(late, early): truth[late] - truth[early] + more for (late, early), more in slack.items()}
    found = offsets(bounds, CLOCKS)
    assert satisfied(bounds, found.by_clock)
    assert not found.impossible


@given(st.dictionaries(PAIRS, st.integers(-1000, 1000)))
def test_contradictions_are_loosened_as_reported_and_no_more_than_needed(
    bounds: dict[tuple[str, str], int],
) -> None:
    found = offsets(bounds, CLOCKS)
    loosened = {pair: bound + found.impossible.get(pair, 0) for pair, bound in bounds.items()}
    assert satisfied(loosened, found.by_clock)
    assert all(more > 0 for more in found.impossible.values())
    if not found.impossible:
        assert satisfied(bounds, found.by_clock)


def test_very_many_contradictions_end() -> None:
    names = tuple(range(40))
    bounds = {(one, other): -1 - one * other % 7 for one in names for other in names if one != other}
    found = offsets(bounds, names)
    assert all(
        found.by_clock[late] - found.by_clock[early] <= bound + found.impossible.get((late, early), 0)
        for (late, early), bound in bounds.items()
    )
