"""Neighbours on one host that take no messages, or are killed in the middle of one, hang no engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.agent_process import AgentProcess
from bench.ucx import DEFAULT, silent_peer

from tests.waiting import wait_until

INTERVAL_S = 0.02
SIGNS = 600
"""A queue in shared memory has room for 256; through it the agent is never closed."""
TIMEOUT_S = 60.0
KILLS, AT_ONCE = 12, 4


def test_an_agent_closes_although_its_peer_takes_no_signs_of_life() -> None:
    *_, cores, seconds_to_close = silent_peer(
        DEFAULT, "stopped", f"{INTERVAL_S * 1e3:g}ms", SIGNS * INTERVAL_S, TIMEOUT_S
    )
    assert isinstance(cores, float)
    assert cores < 0.5, "the progress thread spins"
    assert seconds_to_close is not None, "closing the agent hangs"


def test_neighbours_that_are_killed_while_they_send_leave_an_agent_that_receives_and_closes() -> None:
    survivor = AgentProcess({})
    try:
        survivor.send("make", count=1, bytes=4096)
        (peer,) = survivor.answer()["agents"]

        def receives() -> bool:
            return bool(survivor.tell("receive", agent=0)["messages"])

        for _ in range(KILLS // AT_ONCE):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                senders = list(pool.map(lambda _: _sender(peer), range(AT_ONCE)))
            for sender in senders:
                wait_until(receives, "messages come", TIMEOUT_S)
                sender.close()
        wait_until(lambda: not receives(), "what the dead had sent is taken", TIMEOUT_S)
        last = _sender(peer)
        wait_until(receives, "messages of the living come", TIMEOUT_S)
        last.close()
        with ThreadPoolExecutor(1) as pool:
            closed = pool.submit(survivor.tell, "close", agent=0)
            try:
                closed.result(TIMEOUT_S)
            finally:
                survivor.close()
    finally:
        survivor.close()


def _sender(peer: dict[str, object]) -> AgentProcess:
    """A process that sends to `peer` without end."""
    sender = AgentProcess({})
    sender.send("make", count=1, bytes=4096)
    sender.answer()
    sender.tell("connect", agent=0, peer=peer, bytes=64)
    sender.tell("send", agent=0)
    return sender
