"""Connections to other engines for messages without an answer: made when needed, bounded, closed when idle."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from typing import Any

import pytest
import zmq

from kvferry.link import limits
from kvferry.link.connection import Connection
from kvferry.link.lease_commands import ReleaseLease, RenewLease
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.secrets import Secret
from kvferry.link.server import SideChannelListener
from kvferry.protocol.handshake import Renew
from kvferry.protocol.hosts import Address
from kvferry.scheduler.counters import Counters
from tests.link.channel import HOST, RecordingListener, free_port, listening
from tests.link.raw_listener import end_after_the_request
from tests.link.test_renewer import LONG_S, _release, lease
from tests.protocol.samples import BOOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_messages_that_wait_for_a_connection_are_bounded_and_sent_in_order_once_it_is_there(
    renewer: LeaseRenewer, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the listener may start after messages are dropped by default.
    monkeypatch.setattr(limits, "CONNECT_S", 60.0)
    port, more = free_port(), 10
    renewer.submit(
        ReleaseLease(lease(port, slot)) for slot in range(limits.QUEUED_MESSAGES + 1 + more)
    )
    wait_until(lambda: counters.total("side_channel_errors") >= more, "the others are dropped")
    listener = RecordingListener(HOST, port, Counters())
    try:
        slots = [
            listener.inbox.get(timeout=10).leases[0].slot for _ in range(limits.QUEUED_MESSAGES)
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
        assert listener.inbox.get(timeout=10) == Renew(boot=BOOT, leases=(lease(port, 2).name,))
    finally:
        listener.close()


def test_a_producer_takes_four_files_as_docs_operations_says(renewer: LeaseRenewer) -> None:
    producers, of_the_listener = 20, 1
    with listening() as (listener, port):
        before = len(os.listdir("/proc/self/fd"))
        boots = [f"{number:032x}" for number in range(producers)]
        renewer.submit(
            RenewLease(lease(port, lease_s=LONG_S, boot=boot), at_once=True) for boot in boots
        )
        assert {listener.inbox.get(timeout=10).boot for _ in boots} == set(boots)
        assert len(os.listdir("/proc/self/fd")) - before <= producers * (4 + of_the_listener) + 2


def test_a_connection_that_the_producer_has_ended_is_made_again_for_the_next_message_only(
    renewer: LeaseRenewer,
) -> None:
    """ZMQ by itself would connect again to a host that was cut off for an endless answer."""
    port = free_port()
    with socket.create_server((HOST, port)) as server:
        server.settimeout(30)
        renewer.client.wait_for(asyncio.sleep(0))  # its ZMQ has started
        before = len(os.listdir("/proc/self/fd"))
        for slot in range(1, 3):
            renewer.submit([ReleaseLease(lease(port, slot))])
            end_after_the_request(server, b"", f"{slot + 1:015x}".encode())
            wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "its files are closed")


def test_the_peer_that_was_unused_for_longest_is_closed_first(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 2)
    renewer = LeaseRenewer(counters)
    boots = [f"{number:032x}" for number in range(3)]
    try:
        with listening() as (listener, port):
            for number in (0, 1, 0, 2):
                renewer.submit([ReleaseLease(lease(port, boot=boots[number]))])
                assert listener.inbox.get(timeout=10).boot == boots[number]
            wait_until(
                lambda: boots_of(renewer) == [boots[0], boots[2]],
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
    renewer = LeaseRenewer(counters)
    boots = [f"{number:032x}" for number in range(30)]
    try:
        with listening() as (listener, port):
            renewer.submit(RenewLease(lease(port, lease_s=6.0, boot=boot)) for boot in boots)
            renewed: Counter[str] = Counter()
            for _ in range(4):
                renewer.client.call_soon(lambda: time.sleep(1.2))  # longer than an interval
                renewed.update(listener.inbox.get(timeout=10).boot for _ in boots)
            assert min(renewed[boot] for boot in boots) >= 2
            assert counters.total("side_channel_errors") == 0
            slots = renewer.snapshot().sender.slots
            assert sum(slots.in_use.values()) + sum(slots.idle.values()) <= 8
    finally:
        renewer.close()


def test_closed_ports_of_a_host_neither_delay_its_new_producers_nor_close_the_connections_of_others(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOTS", 4)
    renewer = LeaseRenewer(counters)
    dead = free_port()
    try:
        with listening() as (listener, port), listening() as (new_listener, new_port):
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            wait_until(lambda: renewer.snapshot().sender.slots.idle, "the connection is idle")
            kept = renewer.snapshot().sender.endpoints
            renewer.submit(
                ReleaseLease(lease(dead, boot=f"{number:032x}")) for number in range(100)
            )
            renewer.submit([ReleaseLease(lease(new_port))])
            assert new_listener.inbox.get(timeout=5) == _release(new_port, 1)
            assert set(kept) <= set(renewer.snapshot().sender.endpoints)
            wait_until(
                lambda: counters.total("leases_given_back") == 2,
                "what was sent is counted, and no more",
            )
    finally:
        renewer.close()


def test_a_producer_with_another_secret_is_left_alone_for_a_while_and_messages_for_it_are_counted(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    open_connection = Connection.open

    async def counted(context: Any, address: Address, port: int, **others: Any) -> Connection:
        tried.append(port)
        return await open_connection(context, address, port, **others)

    monkeypatch.setattr(Connection, "open", counted)
    monkeypatch.setattr(limits, "REFUSED_S", 60.0)
    renewer = LeaseRenewer(counters)
    with listening() as (listener, port):
        refusing = free_port()
        other = SideChannelListener(HOST, refusing, Counters(), (Secret(bytes(range(32))),))
        try:
            renewer.submit([ReleaseLease(lease(refusing))])
            wait_until(lambda: counters.total("side_channel_errors") == 1, "it is refused")
            renewer.submit(ReleaseLease(lease(refusing, slot)) for slot in range(2, 12))
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            assert tried == [refusing, port]
            assert counters.total("side_channel_errors") == 11
        finally:
            renewer.close()
            other.close()


def test_an_idle_socket_is_closed(counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_S", 0.1)
    with listening() as (listener, port):
        renewer = LeaseRenewer(counters)
        try:
            renewer.submit([ReleaseLease(lease(port))])
            assert listener.inbox.get(timeout=10) == _release(port, 1)
            wait_until(lambda: not renewer.snapshot().sender.endpoints, "the socket is closed")
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
        renewer.submit([ReleaseLease(lease(producer.bind_to_random_port(f"tcp://{HOST}")))])
        client_id, *_ = producer.recv_multipart()
        producer.send_multipart([client_id, b"", bytes(1 << 20)])
        assert ended.poll(30_000)
    finally:
        context.destroy(linger=0)


def boots_of(renewer: LeaseRenewer) -> list[str]:
    """Of its peers, in the order in which they were added."""
    return [boot for _, _, boot in renewer.snapshot().sender.endpoints]
