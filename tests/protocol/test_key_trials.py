"""Which secret is tried when, and what is said when none will do. No sockets."""

from __future__ import annotations

import pytest

from kvferry.protocol.side_channel.key_trials import KeyTrials, Verdict
from kvferry.protocol.side_channel.secrets import VARIABLE, Secrets
from kvferry.protocol.side_channel.sockets import Greeting
from tests.protocol.secret_files import NEW, OLD

THROUGH, ONE_SIDED, DENIED, CUT = Greeting.THROUGH, Greeting.ONE_SIDED, Greeting.DENIED, Greeting.CUT
SPEAK, WAIT, AGAIN, REFUSED = Verdict.SPEAK, Verdict.WAIT, Verdict.AGAIN, Verdict.REFUSED


def tried(secrets: Secrets, *greetings: Greeting) -> tuple[list[Verdict], KeyTrials]:
    trials = KeyTrials(secrets)
    return [trials.heard(greeting) for greeting in greetings], trials


def test_the_secret_that_gets_through_is_kept() -> None:
    verdicts, trials = tried((OLD, NEW), THROUGH)
    assert (verdicts, trials.secret) == ([SPEAK], OLD)


@pytest.mark.parametrize("no", [CUT, DENIED])
def test_every_secret_is_tried_in_its_order(no: Greeting) -> None:
    verdicts, trials = tried((OLD, NEW), no)
    assert (verdicts, trials.secret) == ([AGAIN], NEW)
    assert trials.heard(THROUGH) is SPEAK


def test_a_listener_without_a_secret_is_known_by_its_first_greeting_or_by_a_plain_one() -> None:
    for greetings in ([ONE_SIDED], [CUT, ONE_SIDED], [CUT, CUT, THROUGH]):
        verdicts, trials = tried((OLD, NEW), *greetings)
        assert verdicts[-1] is REFUSED, "nothing may be said to whom has no secret"
        assert "it has no secret" in trials.why
        assert VARIABLE in trials.why


@pytest.mark.parametrize("last", [CUT, DENIED, ONE_SIDED])
def test_a_listener_with_another_secret_is_told_by_what_is_listed_here(last: Greeting) -> None:
    verdicts, trials = tried((OLD, NEW), CUT, CUT, last)
    assert verdicts == [AGAIN, AGAIN, REFUSED]
    assert f"{OLD.fingerprint}, {NEW.fingerprint}" in trials.why
    assert VARIABLE in trials.why


def test_without_a_secret_one_is_missed_when_the_listener_has_one() -> None:
    verdicts, trials = tried((), ONE_SIDED)
    assert verdicts == [REFUSED]
    assert "it has a secret, and there is none here" in trials.why


def test_without_a_secret_a_connection_that_breaks_twice_is_made_again() -> None:
    verdicts, trials = tried((), CUT, CUT, THROUGH)
    assert (verdicts, trials.secret) == ([WAIT, WAIT, SPEAK], None)
    verdicts, trials = tried((), CUT, CUT, CUT)
    assert verdicts == [WAIT, WAIT, REFUSED]
    assert "most likely" in trials.why
