"""The checks of the drills, on passing and failing cases; without engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.load import Kind, Outage, Outcome, Tokens, judge

PROMPT: Tokens = (3, 4, 5)
RIGHT: dict[Tokens, Tokens] = {PROMPT: (7, 8, 9)}
OUTAGES = [Outage(10.0, 20.0)]
GOOD = Outcome(PROMPT, Kind.ANSWERED, (7, 8, 9), started_s=1.0, ended_s=2.0)


def test_right_answers_and_what_an_outage_explains_are_counted() -> None:
    refused = Outcome(PROMPT, Kind.REFUSED, started_s=12.0, ended_s=13.0)
    broken = Outcome(PROMPT, Kind.BROKEN, (7,), started_s=9.0, ended_s=10.5)
    assert judge([GOOD, refused, broken], OUTAGES, RIGHT) == {"answered": 1, "HTTP 500": 1, "broken stream": 1}


@pytest.mark.parametrize(
    "outcome",
    [
        replace(GOOD, tokens=(7, 8, 1)),
        replace(GOOD, tokens=(7, 8, 1), started_s=12.0, ended_s=13.0),
        Outcome(PROMPT, Kind.BROKEN, (8,), started_s=12.0, ended_s=13.0),
        Outcome(PROMPT, Kind.REFUSED, started_s=20.5, ended_s=21.0),
        Outcome(PROMPT, Kind.BROKEN, (7,), started_s=1.0, ended_s=9.5),
        Outcome(PROMPT, Kind.OTHER, started_s=12.0, ended_s=13.0),
    ],
    ids=["wrong", "wrong in an outage", "wrong, then broken", "refused after it", "broken before it", "hangs"],
)
def test_nothing_else_passes(outcome: Outcome) -> None:
    with pytest.raises(AssertionError, match="1 of 2"):
        judge([GOOD, outcome], OUTAGES, RIGHT)
