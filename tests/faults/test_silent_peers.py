"""Neighbours on one host that take no messages, or are killed in the middle of one, hang no engine."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from bench.agent_process import AgentProcess, Peer

from tests.waiting import wait_until

INTERVAL_S = 0.02
SIGNS = 600
"""A queue in shared memory has room for 256; through it the agent is never closed."""
TIMEOUT_S = 60.0
KILLS, AT_ONCE = 12, 4


def test_an_agent_closes_although_its_peer_takes_no_signs_of_life() -> None:
    ucx = {"UCX_KEEPALIVE_INTERVAL": f"{INTERVAL_S * 1e3:g}ms"}
    stopped, agent = AgentProcess(ucx), AgentProcess(ucx)
    with ThreadPoolExecutor(1) as pool:
        try:
            stopped.send("make", count=1, num_bytes=4096)
            agent.tell("make", count=1, num_bytes=4096)
            agent.tell("connect", agent=0, peer=stopped.answer()[0])
            assert stopped.process.pid is not None
            os.kill(stopped.process.pid, signal.SIGSTOP)
            time.sleep(0.9 * SIGNS * INTERVAL_S)
            before, began_s = agent.tell("usage")["cpu_s"], time.perf_counter()
            time.sleep(0.1 * SIGNS * INTERVAL_S)
            cores = (agent.tell("usage")["cpu_s"] - before) / (
                time.perf_counter() - began_s
            )
            assert cores < 0.5, "the progress thread spins"
            closed = pool.submit(agent.tell, "close", agent=0)
            closed.result(TIMEOUT_S)  # or closing the agent hangs
        finally:
            stopped.close()
            agent.close()


def test_neighbours_that_are_killed_while_they_send_leave_an_agent_that_receives_and_closes() -> (
    None
):
    survivor = AgentProcess({})
    try:
        survivor.send("make", count=1, num_bytes=4096)
        (peer,) = survivor.answer()

        def receives() -> bool:
            return bool(survivor.tell("receive", agent=0))

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


def _sender(peer: Peer) -> AgentProcess:
    """A process that sends to `peer` without end."""
    sender = AgentProcess({})
    sender.send("make", count=1, num_bytes=4096)
    sender.answer()
    sender.tell("connect", agent=0, peer=peer)
    sender.send("send", agent=0)
    return sender
