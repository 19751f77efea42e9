"""The side channel's listener over real sockets: any number of frames, of any size, with anything in them."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvferry.link import limits
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import MAX_UNFINISHED_BYTES
from kvferry.link.limits import MAX_WAITING_LEASES
from kvferry.link.server import NoPrefixes, SideChannelListener
from kvferry.protocol.handshake import (
    MAX_RENEWALS,
    MAX_REQUEST_BYTES,
    EngineDescription,
    Hello,
    LeaseName,
    Renew,
    encode,
)
from kvferry.protocol.queries import (
    FindPrefixes,
    PrefixQuery,
    PromptQuery,
    Subscribe,
    Unsubscribe,
)
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from tests.draws import draws
from tests.fuzz.test_targets import hostile_bytes
from tests.link.channel import HOST, ask, client, listening
from tests.ports import free_port
from tests.promises import promise
from tests.protocol.samples import BOOT, EPOCH, make_description
from tests.waiting import wait_until

_COUNTED = ("bad_frames", "handshakes_served", "dropped_messages")
_PART_BYTES = 200 << 10
QUESTION = PromptQuery(number=1, key="cmpl-1", num_tokens=5, digest="0" * 32)
PREFIX_QUERY = PrefixQuery(number=1, chain=bytes(16))


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


FRAME = hostile_bytes("request") | st.sampled_from(
    [b"", b"\x91" * 60_000, b"x" * MAX_REQUEST_BYTES]
)
FRAMES = st.lists(FRAME, min_size=1, max_size=4).filter(
    lambda frames: sum(map(len, frames)) <= MAX_REQUEST_BYTES
)
MESSAGE = FRAMES | hostile_bytes("request").map(lambda body: [b"", body])


@promise(6)
def test_whatever_frames_come_the_listener_answers_the_next_good_one_and_every_message_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = Counters()
    with listening(counters) as (listener, port), client(port) as sock:
        listener.publish(make_description())

        kept: list[object] = []
        put = listener.inbox.put

        def keep(message: Any, received_s: float | None = None) -> bool:
            is_kept = put(message, received_s)
            kept.extend([message] * is_kept)
            return is_kept

        monkeypatch.setattr(listener.inbox, "put", keep)

        def kept_by(take: Callable[..., Any]) -> Callable[..., Any]:
            def keep(*arguments: Any) -> Any:
                answers = take(*arguments)
                kept.append(arguments)
                return answers

            return keep

        for owner, name in (
            (PromptDirectory, "subscribe"),
            (PromptDirectory, "unsubscribe"),
            (NoPrefixes, "find"),
        ):
            monkeypatch.setattr(owner, name, kept_by(getattr(owner, name)))

        def counted() -> int:
            return sum(counters.total(name) for name in _COUNTED) + len(kept)

        @settings(
            max_examples=draws(120),
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(st.lists(MESSAGE, min_size=1, max_size=5))
        @example(
            [
                [b"", encode(Subscribe(client_id="c", queries=(QUESTION,)))],
                [b"", encode(Unsubscribe(client_id="c", numbers=(1,)))],
                [b"", encode(FindPrefixes(client_id="c", queries=(PREFIX_QUERY,)))],
            ]
        )
        def fuzz(messages: list[list[bytes]]) -> None:
            before = counted()
            for frames in messages:
                sock.send_multipart(frames)
            wait_until(
                lambda: counted() == before + len(messages), "every message is counted"
            )
            listener.inbox.take()
            while sock.poll(0):
                sock.recv_multipart()

        with caplog.at_level(logging.WARNING):
            fuzz()
        assert isinstance(ask(port), EngineDescription)
    # Most of what is drawn cannot be read; how many are is drawn, too.
    assert counters.total("bad_frames") > 40
    assert not [record for record in caplog.records if record.exc_info], (
        "something was not foreseen"
    )


def test_a_frame_at_the_limit_is_read_and_one_beyond_it_costs_its_sender_the_connection() -> (
    None
):
    counters = Counters()
    with listening(counters) as (listener, port):
        listener.publish(make_description())
        with client(port) as sock:
            sock.send_multipart([b"", b"\xc1" * MAX_REQUEST_BYTES])
            assert sock.recv_multipart()[0] == b""
            assert counters.total("bad_frames") == 1
            sock.send_multipart([b"", b"\xc1" * (MAX_REQUEST_BYTES + 1)])
            assert isinstance(ask(port), EngineDescription)
            assert counters.total("bad_frames") == 1


def raw_connection(port: int) -> socket.socket:
    """A DEALER that speaks ZMTP 3 by itself: ZMQ's own would keep a message until it is whole."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while (
        b"READY" not in received
    ):  # ZMQ ends a connection that goes on before it has said this
        received += connection.recv(4096)
    return connection


def test_a_message_without_an_end_is_ended_with_its_connection_and_its_memory_comes_back() -> (
    None
):
    counters = Counters()
    part = b"\x03" + struct.pack(">Q", _PART_BYTES) + bytes(_PART_BYTES)
    parts = MAX_UNFINISHED_BYTES // _PART_BYTES + 10
    with listening(counters) as (listener, port):
        listener.publish(make_description())
        before = resident_bytes()
        attacks = 12
        for _ in range(attacks):
            with (
                raw_connection(port) as connection,
                contextlib.suppress(ConnectionError),
            ):
                for _ in range(parts):
                    connection.sendall(part)
                while connection.recv(1 << 16):
                    pass  # until it is ended
        wait_until(
            lambda: counters.total("bad_frames") > attacks / 2,
            "they are counted",
            timeout_s=60,
        )
        assert isinstance(ask(port), EngineDescription)
        assert resident_bytes() - before < attacks / 2 * parts * _PART_BYTES


EMPTY = b"\x01\x00"
"""An empty frame that is not its message's last."""
LAST = b"\x00\x00"


def wait_for_the_end(connection: socket.socket) -> None:
    """Read until the other end has closed it."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def test_a_message_of_many_empty_frames_never_holds_the_listener_up() -> None:
    """ZMQ hands all of them over at once. Received in one turn they took 1.5 s of the thread's time."""
    counters, turns_s = Counters(), [0.0]
    port = free_port()
    listener = SideChannelListener(
        HOST, port, counters, run_due=lambda: turns_s.append(time.thread_time())
    )
    with contextlib.closing(listener), raw_connection(port) as connection:
        listener.publish(make_description())
        connection.sendall(EMPTY * 400_000 + LAST)
        wait_for_the_end(connection)
        assert isinstance(ask(port), EngineDescription)
    assert counters.total("bad_frames") == 1
    assert max(after - before for before, after in pairwise(turns_s[1:])) < 0.2


def test_a_message_of_few_frames_is_dropped_and_its_connection_stays() -> None:
    counters = Counters()
    with (
        listening(counters, description=make_description()) as (_, port),
        client(port) as sock,
    ):
        for count in (1, 3, 50):
            sock.send_multipart([b""] * count)
        sock.send_multipart(
            [b"", encode(Hello(engine_id="prefill-0", client_id="the same connection"))]
        )
        assert sock.recv_multipart() == [b"", encode(make_description())]
    assert counters.total("bad_frames") == 3


def test_an_endless_message_is_ended_although_zmq_has_read_every_part_of_it_before_anyone_looks() -> (
    None
):
    part = EMPTY * 16_384
    with (
        listening(description=make_description()) as (_, port),
        raw_connection(port) as connection,
    ):
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 * MAX_UNFINISHED_BYTES:
                connection.sendall(part)
                sent += len(part)
                assert isinstance(ask(port), EngineDescription), (
                    "by now ZMQ has read it"
                )
        assert sent < 4 * MAX_UNFINISHED_BYTES


def test_of_many_messages_without_an_end_those_with_the_most_bytes_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_UNFINISHED_IN_ALL_BYTES", 1 << 18)
    counters = Counters()
    with (
        listening(counters, description=make_description()) as (_, port),
        raw_connection(port) as short,
        raw_connection(port) as long,
        raw_connection(port) as longest,
    ):
        short.sendall(EMPTY * (25 << 10))
        long.sendall(EMPTY * (50 << 10))
        longest.sendall(EMPTY * (75 << 10))
        wait_for_the_end(longest)
        wait_until(lambda: counters.total("bad_frames") == 1, "it is counted")
        for left in (short, long):
            left.sendall(LAST)
        wait_until(
            lambda: counters.total("bad_frames") == 3,
            "the others are received and dropped",
        )


def test_long_messages_that_end_are_never_taken_for_one_without_an_end() -> None:
    counters = Counters()
    count = 2 * MAX_UNFINISHED_BYTES // MAX_REQUEST_BYTES
    with listening(counters) as (listener, port), client(port, receive_queue=0) as sock:
        listener.publish(make_description())
        for _ in range(count):
            sock.send_multipart([b"", b"\xc1" * MAX_REQUEST_BYTES])
        wait_until(
            lambda: counters.total("bad_frames") == count, "all are read", timeout_s=60
        )
        sock.send_multipart(
            [b"", encode(Hello(engine_id="prefill-0", client_id="the same connection"))]
        )
        while sock.recv_multipart() != [b"", encode(make_description())]:
            pass  # refusals come before it
        assert counters.total("bad_frames") == count


def test_waiting_renewals_are_kept_up_to_a_bound_and_again_after_they_were_taken() -> (
    None
):
    counters = Counters()
    names = [
        LeaseName(slot=slot, epoch=EPOCH) for slot in range(MAX_WAITING_LEASES + 1)
    ]
    parts = [
        names[start : start + MAX_RENEWALS]
        for start in range(0, len(names), MAX_RENEWALS)
    ]
    frames = [encode(Renew(boot=BOOT, leases=tuple(part))) for part in parts]
    port = free_port()
    with (
        contextlib.closing(SideChannelListener(HOST, port, counters)) as listener,
        client(port) as sock,
    ):
        for times in range(1, 3):
            for frame in frames:
                sock.send_multipart([b"", frame])
            wait_until(
                lambda times=times: counters.total("dropped_messages") == times,  # type: ignore[misc]
                "one was too many",
            )
            assert len(listener.inbox.received) == MAX_WAITING_LEASES
            listener.inbox.take()
