"""Nothing that the scheduler says to other engines goes to a host that is not allowed."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from kvferry.link import allowed_hosts
from kvferry.link.commands import Producer, ReleaseLease, RenewLease, StartQuery
from kvferry.link.counters import Counters
from kvferry.link.prewarmer import PeerPrewarmer
from kvferry.link.query_client import QueryClient
from kvferry.link.renewer import LeaseRenewer
from kvferry.protocol.orders import Prewarm
from kvferry.protocol.queries import Answer, PromptProgress
from tests.link.test_query_client import query
from tests.link.test_renewer import lease
from tests.waiting import wait_until

FOREIGN = "127.0.0.2"
"""An address of this machine that stands for another host's."""


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server of the other host."""
    monkeypatch.setattr(
        allowed_hosts, "is_this_host", lambda address: str(address) != FOREIGN
    )
    with socket.create_server((FOREIGN, 0)) as server:
        server.setblocking(False)
        yield server
        with pytest.raises(BlockingIOError):
            server.accept()


def test_renewals_and_releases_are_counted_and_not_sent(
    renewer: LeaseRenewer, counters: Counters, foreign: socket.socket
) -> None:
    port = foreign.getsockname()[1]
    renewer.submit(
        [
            RenewLease(lease(port, host=FOREIGN)),
            ReleaseLease(lease(port, 2, host=FOREIGN)),
        ]
    )
    wait_until(
        lambda: counters.total("side_channel_errors") >= 1,
        "the message that is not sent is counted",
    )


def test_a_question_is_answered_as_if_nobody_knew_the_prompt(
    renewer: LeaseRenewer, foreign: socket.socket
) -> None:
    answers: queue.SimpleQueue[tuple[Producer, Answer]] = queue.SimpleQueue()
    producer = (FOREIGN, foreign.getsockname()[1])
    queries = QueryClient(
        renewer.links, "decode-0", lambda *answer: answers.put(answer)
    )
    queries.submit([StartQuery(producer, query(7))])
    assert answers.get(timeout=30) == (
        producer,
        Answer(number=7, progress=PromptProgress.UNKNOWN),
    )


def test_a_producer_to_prewarm_is_not_asked_and_the_log_says_which_key_is_missing(
    renewer: LeaseRenewer, foreign: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Prewarm] = []
    PeerPrewarmer(
        renewer.links,
        [(FOREIGN, foreign.getsockname()[1])],
        "decode-0",
        lambda: "e" * 32,
        found.append,
        5.0,
    ).start()
    wait_until(
        lambda: "neither a secret nor allowed_hosts" in caplog.text,
        "the reason is logged",
    )
    assert found == []
