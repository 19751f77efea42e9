"""Checks after a drill: nothing is left behind, and the survivor works as before."""

from __future__ import annotations

import time
from typing import Any

from tests.harness.child import State
from tests.harness.process import SLACK_S, EngineProcess
from tests.waiting import wait_until

UCX_KEEPS_FILES = 2
"""Seen over TCP: one socket to a peer that never answered, however many follow."""
RETURN_S = 30.0
"""How long a drill may leave something in use: an attempt to reach a dead engine takes its whole deadline."""
THREADS = ["kvferry-listener", "kvferry-side-channel", "kvferry-transfer"]


def transfer(
    producer: EngineProcess, consumer: EngineProcess, *, tokens: int = 13, seed: int = 7
) -> None:
    """One good handover, its bytes compared and its lease gone."""
    answer = consumer.answer(consumer.load(producer.prefill(tokens, seed), seed))
    assert answer["reason"] is None, answer
    assert answer["good"], "reported good without its bytes"
    until_idle(producer, SLACK_S)


def until_over(consumer: EngineProcess, load: int, within_s: float) -> str | None:
    """The load's end; returns why it failed, or None when it is good, and then it has its bytes."""
    answer = consumer.answer(load, within_s)
    assert answer["good"] or answer["reason"] is not None, (
        "reported good without its bytes"
    )
    reason: str | None = answer["reason"]
    return reason


def until_idle(engine: EngineProcess, within_s: float) -> State:
    """Wait until the engine has nothing in hand; its sums add up and its threads live."""
    found: list[State] = []

    def idle() -> bool:
        found[:] = [engine.state()]
        return not found[0].in_hand

    began_s = time.monotonic()
    try:
        wait_until(idle, "nothing is under way", within_s)
    except AssertionError:
        raise AssertionError(
            f"{engine.start.name}: after {within_s:g} s still {found[0].in_hand}"
        ) from None
    state = found[0]
    assert not state.broken, state.broken
    assert (
        set(THREADS)
        >= set(state.threads)
        >= {"kvferry-listener", "kvferry-side-channel"}
    ), state.threads
    assert time.monotonic() - began_s <= within_s + SLACK_S
    return state


def check_survivor(
    survivor: EngineProcess, before: State, within_s: float = SLACK_S
) -> None:
    """Nothing more is in use than before the drill."""
    after = until_idle(survivor, within_s)
    assert after.threads == before.threads
    assert after.peers <= before.peers, "agents of the dead are kept"
    assert after.prepared <= before.prepared, "descriptors of the dead are kept"
    _until_no_more(survivor, "tasks", before.tasks)
    _until_no_more(survivor, "files", before.files + UCX_KEEPS_FILES)


def _until_no_more(survivor: EngineProcess, name: str, most: int) -> None:
    """Wait until the survivor has no more of something than it may have."""
    found: list[int] = []

    def enough() -> bool:
        found.append(getattr(survivor.state(), name))
        return found[-1] <= most

    try:
        wait_until(enough, f"at most {most} {name}", RETURN_S)
    except AssertionError:
        raise AssertionError(
            f"{survivor.start.name} has {found[-1]} {name}, and may have {most}"
        ) from None


def warmed_up(producer: EngineProcess, consumer: EngineProcess) -> State:
    """The consumer when it has done everything once: a good load, a failed one, a lease given back."""
    until_good(producer, consumer)
    params = producer.prefill(3, 1)
    producer.ask("give_away", request_id=params["remote_request_id"])
    assert until_over(consumer, consumer.load(params, 1), SLACK_S) == "fence"
    until_idle(producer, SLACK_S)
    return until_idle(consumer, SLACK_S)


def until_good(
    producer: EngineProcess, consumer: EngineProcess, within_s: float = 2 * SLACK_S
) -> None:
    """Handovers are good (again) within the time that a peer is left alone after a failure.

    With short leases the first handover may fail as well: on a busy machine the handshake takes longer than they live.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        answer: dict[str, Any] = consumer.answer(
            consumer.load(producer.prefill(5, 3), 3)
        )
        if answer["reason"] is None:
            assert answer["good"], "reported good without its bytes"
            until_idle(producer, SLACK_S)
            return
        assert time.monotonic() < deadline_s, f"loads still fail: {answer['reason']}"
