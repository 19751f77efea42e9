"""Links to other engines: one connection each for all that is said, made when needed, bounded, closed when idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.link import limits, peer_link
from kvferry.link.commands import ReleaseLease, RenewLease, StartQuery
from kvferry.link.connection import Connection
from kvferry.link.counters import Counters
from kvferry.link.limits import Backoff
from kvferry.link.prewarmer import PeerPrewarmer
from kvferry.link.query_client import QueryClient
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.secrets import Secret
from kvferry.link.server import SideChannelListener
from kvferry.protocol.errors import NothingListens
from kvferry.protocol.handshake import Refused, Renew, encode
from kvferry.protocol.hosts import IpAddress
from kvferry.protocol.orders import Prewarm
from kvferry.protocol.queries import (
    MAX_ANSWERS_BYTES,
    Answer,
    Answers,
    PromptProgress,
)
from kvferry.protocol.rate_limited_log import RateLimitedLog
from tests.link.channel import (
    ANY_ADDRESS,
    HOST,
    RecordingListener,
    free_port,
    listening,
    many_hosts,
    renewing,
)
from tests.link.raw_listener import (
    ZMTP,
    answer_of,
    end_after_the_request,
    receive_until,
)
from tests.link.test_query_client import query
from tests.link.test_renewer import LONG_S, _release, lease
from tests.protocol.samples import BOOT, make_description
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

NEVER_S = 60.0


def note_attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports that are connected to from now on, attempt by attempt."""
    ports: list[int] = []
    open_connection = Connection.open

    async def noted(
        context: Any, address: IpAddress, port: int, **others: Any
    ) -> Connection:
        ports.append(port)
        return await open_connection(context, address, port, **others)

    monkeypatch.setattr(Connection, "open", noted)
    return ports


def test_messages_that_wait_for_a_connection_are_bounded_and_sent_in_order_once_it_is_there(
    renewer: LeaseRenewer, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the listener may start after messages are dropped by default.
    monkeypatch.setattr(limits, "CONNECT_S", 60.0)
    port = free_port()
    more = 10
    renewer.submit(
        ReleaseLease(lease(port, slot))
        for slot in range(limits.QUEUED_MESSAGES + 1 + more)
    )
    wait_until(
        lambda: counters.total("side_channel_errors") >= more, "the others are dropped"
    )
    listener = RecordingListener(HOST, port, Counters())
    try:
        slots = [
            listener.inbox.get(timeout=10).leases[0].slot
            for _ in range(limits.QUEUED_MESSAGES)
        ]
    finally:
        listener.close()
    assert slots == list(range(limits.QUEUED_MESSAGES))


def test_a_producer_that_does_not_listen_in_time_is_counted_and_tried_again_with_the_next_message(
    renewer: LeaseRenewer,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setattr(limits, "CONNECT_S", 0.1)
    renewer.submit([ReleaseLease(lease(port))])
    wait_until(lambda: counters.total("side_channel_errors") == 1, "it is counted")
    assert f"side channel of {HOST}:{port}" in caplog.text
    assert "did not answer within 0.1 s" in caplog.text
    listener = RecordingListener(HOST, port, Counters())
    try:
        renewer.submit([RenewLease(lease(port, 2))])
        assert listener.inbox.get(timeout=10) == Renew(
            boot=BOOT, leases=(lease(port, 2).name,)
        )
    finally:
        listener.close()


def test_a_producer_takes_four_files_as_docs_operations_says(
    renewer: LeaseRenewer,
) -> None:
    producers = 20
    of_the_listener = 1
    with listening(host=ANY_ADDRESS) as (listener, port):
        before = len(os.listdir("/proc/self/fd"))
        renewer.submit(
            RenewLease(lease(port, host=host, lease_s=LONG_S), at_once=True)
            for host in many_hosts(producers)
        )
        for _ in range(producers):
            listener.inbox.get(timeout=10)
        assert (
            len(os.listdir("/proc/self/fd")) - before
            <= producers * (4 + of_the_listener) + 2
        )


def test_a_connection_that_the_producer_has_ended_is_made_again_for_the_next_message_only(
    renewer: LeaseRenewer,
) -> None:
    """ZMQ by itself would connect again to a host that was cut off for an endless answer."""
    port = free_port()
    with socket.create_server((HOST, port)) as server:
        server.settimeout(30)
        renewer.links.client.wait_for(asyncio.sleep(0))  # its ZMQ has started
        before = len(os.listdir("/proc/self/fd"))
        for slot in range(1, 3):
            renewer.submit([ReleaseLease(lease(port, slot))])
            end_after_the_request(server, b"", f"{slot + 1:015x}".encode())
            wait_until(
                lambda: len(os.listdir("/proc/self/fd")) <= before,
                "its files are closed",
            )


def test_the_peer_that_was_unused_for_longest_is_closed_first(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 1)
    renewer = renewing(counters)
    hosts = many_hosts(3)
    try:
        with listening(host=ANY_ADDRESS) as (listener, port):
            for slot, number in enumerate((0, 1, 0, 2), start=1):
                renewer.submit([ReleaseLease(lease(port, slot, host=hosts[number]))])
                assert listener.inbox.get(timeout=10).leases[0].slot == slot
            wait_until(
                lambda: (
                    renewer.snapshot().links.addresses
                    == ((hosts[0], port), (hosts[2], port))
                ),
                "one is closed",
            )
    finally:
        renewer.close()


def test_with_more_producers_than_places_each_lease_is_renewed_when_all_are_due_in_one_turn(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause of the thread those that had not left were dropped, and in the same order each time: 44 of 300
    leases were never renewed again, and counted as renewed."""
    monkeypatch.setattr(limits, "SLOTS", 8)
    renewer = renewing(counters)
    hosts = many_hosts(30)
    slots = range(1, 31)
    try:
        with listening(host=ANY_ADDRESS) as (listener, port):
            renewer.submit(
                RenewLease(lease(port, slot, lease_s=6.0, host=host))
                for slot, host in zip(slots, hosts, strict=True)
            )
            renewed: Counter[int] = Counter()
            for _ in range(4):
                renewer.links.client.call_soon(
                    lambda: time.sleep(1.2)
                )  # longer than an interval
                renewed.update(
                    listener.inbox.get(timeout=10).leases[0].slot for _ in hosts
                )
            assert min(renewed[slot] for slot in slots) >= 2
            assert counters.total("side_channel_errors") == 0
            now = renewer.snapshot().links.slots
            assert sum(now.in_use.values()) + sum(now.idle.values()) <= 2 * 8
    finally:
        renewer.close()


def test_closed_ports_of_a_host_neither_delay_its_new_producers_nor_close_the_connections_of_others(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 4)
    renewer = renewing(counters)
    dead = free_port()
    try:
        with listening() as (listener, port), listening() as (new_listener, new_port):
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            wait_until(
                lambda: renewer.snapshot().links.slots.idle, "the connection is idle"
            )
            kept = renewer.snapshot().links.addresses
            renewer.submit(
                ReleaseLease(lease(dead, host=host)) for host in many_hosts(100)
            )
            renewer.submit([ReleaseLease(lease(new_port))])
            assert new_listener.inbox.get(timeout=5) == _release(new_port, 1)
            assert set(kept) <= set(renewer.snapshot().links.addresses)
            wait_until(
                lambda: counters.total("leases_given_back") == 2,
                "what was sent is counted, and no more",
            )
    finally:
        renewer.close()


def test_a_producer_with_another_secret_is_left_alone_for_a_while_and_messages_for_it_are_counted(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = note_attempts(monkeypatch)
    monkeypatch.setattr(limits, "REFUSED_S", 60.0)
    renewer = renewing(counters)
    with listening() as (listener, port):
        refusing = free_port()
        other = SideChannelListener(
            HOST, refusing, Counters(), (Secret(bytes(range(32))),)
        )
        try:
            renewer.submit([ReleaseLease(lease(refusing))])
            wait_until(
                lambda: counters.total("side_channel_errors") == 1, "it is refused"
            )
            renewer.submit(ReleaseLease(lease(refusing, slot)) for slot in range(2, 12))
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            assert tried == [refusing, port]
            assert counters.total("side_channel_errors") == 11
        finally:
            renewer.close()
            other.close()


def test_an_idle_socket_is_closed(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IDLE_S", 0.1)
    with listening() as (listener, port):
        renewer = renewing(counters)
        try:
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            wait_until(
                lambda: not renewer.snapshot().links.addresses, "the socket is closed"
            )
            renewer.submit([ReleaseLease(lease(port, 2))])
            assert listener.inbox.get(timeout=10) == _release(port, 2)
        finally:
            renewer.close()


def test_a_producer_that_answers_renewals_at_length_loses_the_connection_and_fills_no_memory(
    renewer: LeaseRenewer,
) -> None:
    """Such answers are never read: they would stay in memory for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    producer = context.socket(zmq.ROUTER)
    producer.setsockopt(zmq.RCVTIMEO, 30_000)
    ended = producer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        renewer.submit(
            [ReleaseLease(lease(producer.bind_to_random_port(f"tcp://{HOST}")))]
        )
        client_id, *_ = producer.recv_multipart()
        producer.send_multipart([client_id, b"", bytes(1 << 20)])
        assert ended.poll(30_000)
    finally:
        context.destroy(linger=0)


def test_renewals_queries_and_prewarming_share_one_connection(
    renewer: LeaseRenewer,
) -> None:
    found: queue.SimpleQueue[Prewarm] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    queries = QueryClient(
        renewer.links, "decode-0", lambda _, answer: answers.put(answer)
    )
    with listening(description=make_description()) as (listener, port):
        PeerPrewarmer(
            renewer.links,
            [(HOST, port)],
            "decode-0",
            lambda: "e" * 32,
            found.put,
            NEVER_S,
        ).start()
        assert found.get(timeout=NEVER_S).boot == BOOT
        queries.submit([StartQuery((HOST, port), query(1))])
        assert answers.get(timeout=NEVER_S).progress is PromptProgress.UNKNOWN
        renewer.submit([ReleaseLease(lease(port))])
        assert listener.inbox.get(timeout=10) == _release(port, 1)
        # The listener may hear of a connection after it has answered.
        wait_until(lambda: listener.snapshot().unfinished_bytes, "it has a connection")
        assert len(listener.snapshot().unfinished_bytes) == 1
        assert renewer.snapshot().links.slots.in_use == {}, (
            "a configured peer takes no slot"
        )


def test_a_renewal_and_a_query_for_a_closed_port_attempt_to_connect_together(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempted: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def closed(
        context: Any, address: IpAddress, port: int, **others: Any
    ) -> Connection:
        attempted.put(port)
        raise NothingListens("nothing listens there")

    monkeypatch.setattr(Connection, "open", closed)
    monkeypatch.setattr(limits, "RETRY", Backoff(NEVER_S, NEVER_S))
    renewer = renewing(counters)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    queries = QueryClient(
        renewer.links, "decode-0", lambda _, answer: answers.put(answer)
    )
    try:
        queries.submit([StartQuery((HOST, 5600), query(1))])
        assert answers.get(timeout=NEVER_S).progress is PromptProgress.UNKNOWN
        renewer.submit([RenewLease(lease(5600), at_once=True)])
        renewer.submit([RenewLease(lease(5601), at_once=True)])
        assert [attempted.get(timeout=NEVER_S) for _ in range(2)] == [5600, 5601]
        assert attempted.empty(), "the renewal waits for the query's next attempt"
    finally:
        renewer.close()


@pytest.mark.parametrize(("host", "connections"), [(HOST, 1), ("localhost", 2)])
def test_a_restarted_engine_that_has_a_name_is_connected_anew_since_it_may_be_elsewhere(
    counters: Counters, monkeypatch: pytest.MonkeyPatch, host: str, connections: int
) -> None:
    """The connection to a host that is gone without a word takes messages for a minute."""
    made = note_attempts(monkeypatch)
    monkeypatch.setattr(limits, "CONNECT_S", 0.0 if host != HOST else 5.0)
    monkeypatch.setattr(
        "kvferry.link.peer_link.within", lambda _, connecting: connecting
    )
    renewer = renewing(counters)
    try:
        with listening() as (listener, port):
            for boot in (BOOT, "f" * 32):
                renewer.submit([ReleaseLease(lease(port, host=host, boot=boot))])
                assert listener.inbox.get(timeout=10).boot == boot
            assert len(made) == connections
    finally:
        renewer.close()


def test_a_queried_engine_is_not_connected_anew_for_messages_that_name_two_lives_of_it_in_turn(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients make boots up. Every 5 s all queries of the engine failed, as if it did not know their prompts."""
    monkeypatch.setattr(limits, "CONNECT_S", 0.0)
    monkeypatch.setattr(
        "kvferry.link.peer_link.within", lambda _, connecting: connecting
    )
    renewer = renewing(counters)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    queries = QueryClient(
        renewer.links, "decode-0", lambda _, answer: answers.put(answer)
    )
    try:
        with listening() as (listener, port):
            queries.submit([StartQuery(("localhost", port), query(1))])
            assert answers.get(timeout=NEVER_S).progress is PromptProgress.UNKNOWN
            # The listener may hear of a connection after it has answered.
            wait_until(
                lambda: listener.snapshot().unfinished_bytes, "it has a connection"
            )
            connections = set(listener.snapshot().unfinished_bytes)
            for boot in (BOOT, "f" * 32, BOOT, "f" * 32):
                renewer.submit([ReleaseLease(lease(port, host="localhost", boot=boot))])
                assert listener.inbox.get(timeout=10).boot == boot
            assert set(listener.snapshot().unfinished_bytes) == connections
            assert counters.total("side_channel_errors") == 0
    finally:
        renewer.close()


def test_a_peer_that_becomes_static_when_it_has_a_slot_is_connected_again_when_that_is_needed(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link was closed for ever, and its prewarmer waited for it as long."""
    monkeypatch.setattr(limits, "SLOTS", 1)
    found: queue.SimpleQueue[Prewarm] = queue.SimpleQueue()
    renewer = renewing(counters)
    hosts = many_hosts(8)
    try:
        with listening(description=make_description(), host=ANY_ADDRESS) as (
            listener,
            port,
        ):
            # Two have slots, and none is in use.
            for host in hosts[:2]:
                renewer.submit([ReleaseLease(lease(port, host=host))])
                listener.inbox.get(timeout=10)
            static = [(host, port) for host in hosts[:2]]
            PeerPrewarmer(
                renewer.links, static, "decode-0", lambda: "e" * 32, found.put, NEVER_S
            ).start()
            assert {found.get(timeout=NEVER_S).host for _ in static} == set(hosts[:2])
            for host in hosts[2:]:
                renewer.submit([ReleaseLease(lease(port, host=host))])
                listener.inbox.get(timeout=10)
            assert found.get(timeout=NEVER_S).host in hosts[:2], "it is found again"
    finally:
        renewer.close()


def _answering(server: socket.socket, request: bytes, answers: bytes, most: int) -> int:
    """Answers a request again and again until the connection ends; returns how many bytes were sent."""
    connection, _ = server.accept()
    sent = 0
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(ZMTP)
        receive_until(connection, request)
        while sent < most:
            connection.sendall(answers)
            sent += len(answers)
    return sent


ENDLESS = 1 << 30


@pytest.mark.parametrize(
    "answers",
    [
        answer_of(encode(Refused(field="leases", value="x", expected="others"))) * 100,
        answer_of(encode(Answers(answers=()))) * 100,
        answer_of(b""),
    ],
    ids=["refusals", "answers to no query", "empty ones"],
)
def test_a_peer_that_answers_renewals_again_and_again_loses_the_connection(
    renewer: LeaseRenewer, answers: bytes
) -> None:
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(30)
        renewer.submit([ReleaseLease(lease(server.getsockname()[1]))])
        assert _answering(server, b"release", answers, ENDLESS) < 16 << 20


@pytest.mark.parametrize(
    "answers",
    [b"\x01\x00" * 4096, answer_of(bytes(MAX_ANSWERS_BYTES + 1)), answer_of(b"\xc1")],
    ids=["frames without end", "a frame that is too long", "no message"],
)
def test_a_peer_whose_answer_to_a_query_is_none_loses_the_connection_before_it_is_in_memory(
    renewer: LeaseRenewer, answers: bytes
) -> None:
    found: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    queries = QueryClient(
        renewer.links, "decode-0", lambda _, answer: found.put(answer)
    )
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(30)
        queries.submit([StartQuery((HOST, server.getsockname()[1]), query(1))])
        # Beside what one answer may have there is what TCP holds at both ends.
        assert (
            _answering(server, b"subscribe", answers, ENDLESS) < 4 * MAX_ANSWERS_BYTES
        )
        assert found.get(timeout=NEVER_S).progress is PromptProgress.UNKNOWN


def test_answers_that_cause_an_internal_error_again_and_again_do_not_fill_the_log(
    renewer: LeaseRenewer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RETRY", Backoff(0.01, 0.01))
    monkeypatch.setattr(peer_link, "_bugs", RateLimitedLog(peer_link.logger, 3600.0))
    taken: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def fail(_: object, answer: Answer) -> None:
        taken.put(answer)
        raise KeyError("a bug")

    queries = QueryClient(renewer.links, "decode-0", fail)
    answer = Answer(number=1, progress=PromptProgress.OVER)
    frame = answer_of(encode(Answers(answers=(answer,))))
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(30)
        queries.submit([StartQuery((HOST, server.getsockname()[1]), query(1))])
        for _ in range(3):
            end_after_the_request(server, frame, b"subscribe")
            assert taken.get(timeout=NEVER_S) == answer
        # The connection after the last answer comes when its error is over.
        connection, _ = server.accept()
        connection.close()
    assert caplog.text.count("could not be taken") == 1


def test_the_longest_answer_to_a_query_is_taken(renewer: LeaseRenewer) -> None:
    params = msgspec.Raw(msgspec.msgpack.encode(bytes(MAX_ANSWERS_BYTES - 1000)))
    answer = Answer(number=1, progress=PromptProgress.TICKET, params=params)
    found: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    queries = QueryClient(
        renewer.links, "decode-0", lambda _, answer: found.put(answer)
    )
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as threads:
        server.settimeout(30)
        frame = answer_of(encode(Answers(answers=(answer,))))
        served = threads.submit(end_after_the_request, server, frame, b"subscribe")
        queries.submit([StartQuery((HOST, server.getsockname()[1]), query(1))])
        assert found.get(timeout=NEVER_S).params == params
        served.result()
