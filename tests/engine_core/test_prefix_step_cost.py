"""What a question about 32,000 tokens costs the engine's thread."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.handshake import encode
from kvferry.protocol.queries import (
    FindPrefixes,
    PrefixQuery,
    PromptProgress,
    chain_bytes,
    decode_answers,
)
from kvferry.scheduler.requests import LeaseState
from tests.harness.core.node import side_channel
from tests.harness.core.scheduler import SchedulerEngine
from tests.link.channel import client
from tests.ports import free_port

pytestmark = pytest.mark.slow

TOKENS = 32768
REPEATS = 8
MOST_S = 600e-6
"""Twice what is promised: beside other tests the same work takes longer. All blocks in one part take 1 ms."""


def timed(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU seconds of each call from now on."""
    spent: list[float] = []
    call = getattr(owner, name)

    def timing(*args: Any, **options: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return call(*args, **options)
        finally:
            spent.append(time.thread_time() - begun_s)

    monkeypatch.setattr(owner, name, timing)
    return spent


def test_no_part_of_a_question_of_32k_tokens_takes_a_step_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are kept, counted and given back part by part. The quickest of a few repetitions, since others compute."""
    port = free_port()
    with side_channel(port):
        engine = SchedulerEngine(
            "NixlConnector",
            module="kvferry.connector",
            role="kv_both",
            num_blocks=12000,
            max_tokens=TOKENS + 16,
            max_step_tokens=8192,
        )
    side = engine.connector.scheduler_side
    prompt = [7 * index % 1000 + 1 for index in range(TOKENS + 1)]
    engine.add("own", prompt, max_tokens=1)
    engine.run()
    chain = chain_bytes(digest_chain(Prompt(tokens=prompt), TOKENS))
    holding = timed(side.prefix_leases, "step", monkeypatch)
    ending = timed(side.leases, "end", monkeypatch)
    orders = timed(side.leases, "take_orders", monkeypatch)
    reports = timed(side.engine_step, "_apply_report", monkeypatch)
    quickest: dict[str, list[float]] = {}
    try:
        with client(port) as socket:
            for number in range(REPEATS):
                for spent in (holding, ending, orders, reports):
                    spent.clear()
                query = PrefixQuery(number=number, chain=chain)
                question = FindPrefixes(client_id="d", queries=(query,))
                socket.send_multipart([b"", encode(question)])
                answer = decode_answers(socket.recv_multipart()[1]).answers[0]
                assert answer.progress is PromptProgress.QUEUED
                while not side.leases.leases(LeaseState.HELD):
                    engine.step()
                answer = decode_answers(socket.recv_multipart()[1]).answers[0]
                assert answer.progress is PromptProgress.TICKET
                (lease,) = side.leases.leases(LeaseState.HELD)
                assert len(lease.block_ids) == TOKENS // 16
                side.leases.release(lease.name)
                engine.step()
                engine.step(over={lease.request_id})
                while not engine.is_whole:
                    engine.step()
                for name, spent in (
                    ("hold", holding),
                    ("end", ending),
                    ("orders", orders),
                    ("report", reports),
                ):
                    quickest.setdefault(name, []).append(max(spent))
        assert {name: min(spent) for name, spent in quickest.items()} == pytest.approx(
            dict.fromkeys(quickest, 0.0), abs=MOST_S
        )
    finally:
        engine.close()
