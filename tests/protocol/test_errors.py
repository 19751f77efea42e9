"""Errors: they name what was found and never let it flood a log."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import (
    ForeignParams,
    InputError,
    InvalidConfig,
    InvalidMessage,
    InvalidParams,
    shorten,
)
from tests.protocol.frames import deep

MAX_SHOWN = 120


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Endless:
    def __repr__(self) -> str:
        return "x" * 1_000_000


class NoLength(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("no")


LONG = "a" * 5_000_000
HUGE: dict[str, object] = {
    "text": LONG,
    "text in a list": [LONG],
    "text as a key": {LONG: 1},
    "many lists of many": [[LONG] * 120] * 120,
    "a dict in a list": [
        dict.fromkeys(str(key * 7919 % 1_000_003) for key in range(1_000_000))
    ],
    "more digits than Python prints": 10**100_000,
    "many digits": [10**4000] * 120,
    "depth": deep(),
    "a repr that raises": Hostile(),
    "a repr that raises, inside": [{"key": Hostile()}],
    "a length that raises": NoLength(),
    "a repr without end": [Endless()],
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_or_hostile_value_is_shown_short_and_soon(name: str) -> None:
    times = []
    for _ in range(3):
        start = time.thread_time()
        shown = shorten(HUGE[name])
        times.append(time.thread_time() - start)
        assert 0 < len(shown) <= MAX_SHOWN
    assert min(times) < 0.05, times


@given(
    st.recursive(
        st.none() | st.integers() | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.tuples(inner),
    )
)
def test_any_value_is_shown_in_one_bounded_line_that_can_be_encoded(
    value: object,
) -> None:
    shown = shorten(value)
    assert len(shown) <= MAX_SHOWN
    assert shown.isprintable()
    shown.encode()


@pytest.mark.parametrize(
    "error", [InvalidParams, ForeignParams, InvalidMessage, InvalidConfig]
)
def test_an_input_error_names_field_value_and_expectation(
    error: type[InputError],
) -> None:
    refused = error("kvferry.lease_slot", -1, "a slot")
    assert (refused.field, refused.shown_value, refused.expected) == (
        "kvferry.lease_slot",
        "-1",
        "a slot",
    )
    assert str(refused) == f"{error.what}: kvferry.lease_slot is -1; expected a slot"
