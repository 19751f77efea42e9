"""Which secret is tried when, and what is said when none will do. No sockets."""

from __future__ import annotations

import pytest

from kvferry.protocol.side_channel.key_trials import KeyTrials, NextStep
from kvferry.protocol.side_channel.secrets import VARIABLE, Secrets
from kvferry.protocol.side_channel.sockets import ConnectionEvent
from tests.protocol.secret_files import NEW, OLD

THROUGH, ONE_SIDED, DENIED, CUT = (
    ConnectionEvent.THROUGH,
    ConnectionEvent.ONE_SIDED,
    ConnectionEvent.DENIED,
    ConnectionEvent.CUT,
)
SPEAK, WAIT, AGAIN, REFUSED = NextStep.SPEAK, NextStep.WAIT, NextStep.AGAIN, NextStep.REFUSED


def tried(secrets: Secrets, *events: ConnectionEvent) -> tuple[list[NextStep], KeyTrials]:
    trials = KeyTrials(secrets)
    return [trials.on_event(event) for event in events], trials


def test_the_secret_that_gets_through_is_kept() -> None:
    next_steps, trials = tried((OLD, NEW), THROUGH)
    assert (next_steps, trials.secret) == ([SPEAK], OLD)


@pytest.mark.parametrize("no", [CUT, DENIED])
def test_every_secret_is_tried_in_its_order(no: ConnectionEvent) -> None:
    next_steps, trials = tried((OLD, NEW), no)
    assert (next_steps, trials.secret) == ([AGAIN], NEW)
    assert trials.on_event(THROUGH) is SPEAK


def test_a_listener_without_a_secret_is_known_by_its_first_event_or_by_one_in_plain() -> None:
    for events in ([ONE_SIDED], [CUT, ONE_SIDED], [CUT, CUT, THROUGH]):
        next_steps, trials = tried((OLD, NEW), *events)
        assert next_steps[-1] is REFUSED, "nothing may be sent to a listener without the secret"
        assert "it has no secret" in trials.why
        assert VARIABLE in trials.why


@pytest.mark.parametrize("last", [CUT, DENIED, ONE_SIDED])
def test_a_listener_with_another_secret_is_reported_with_the_fingerprints_listed_here(last: ConnectionEvent) -> None:
    next_steps, trials = tried((OLD, NEW), CUT, CUT, last)
    assert next_steps == [AGAIN, AGAIN, REFUSED]
    assert f"{OLD.fingerprint}, {NEW.fingerprint}" in trials.why
    assert VARIABLE in trials.why


def test_without_a_secret_one_is_missed_when_the_listener_has_one() -> None:
    next_steps, trials = tried((), ONE_SIDED)
    assert next_steps == [REFUSED]
    assert "it has a secret, and there is none here" in trials.why


def test_without_a_secret_a_connection_that_breaks_twice_is_made_again() -> None:
    next_steps, trials = tried((), CUT, CUT, THROUGH)
    assert (next_steps, trials.secret) == ([WAIT, WAIT, SPEAK], None)
    next_steps, trials = tried((), CUT, CUT, CUT)
    assert next_steps == [WAIT, WAIT, REFUSED]
    assert "most likely" in trials.why
