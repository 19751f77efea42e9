"""More connections than the listener keeps: the one silent for longest is closed, the active ones are served."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from unittest import mock

import pytest
import zmq

from kvferry.link.commands import ReleaseLease, RemoteLease
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import AcceptedConnections
from kvferry.link.limits import MAX_CONNECTIONS
from kvferry.link.renewer import LeaseRenewer
from kvferry.protocol.handshake import EngineDescription, Hello, LeaseName, encode
from tests.link.channel import HOST, ask, client, listening
from tests.protocol.samples import BOOT, EPOCH, make_description
from tests.waiting import wait_until

MOST = 8
HELLO = encode(Hello(engine_id="prefill-0", client_id="test"))


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it; reads what was sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def _wait_for(counters: Counters, count: int) -> None:
    wait_until(
        lambda: counters.total("side_channel_refusals", "too_many") >= count,
        "one more gives way",
    )


def test_silent_connections_are_closed_for_new_ones_and_active_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = Counters()
    monkeypatch.setattr("kvferry.link.limits.MAX_CONNECTIONS", MOST)
    with listening(counters) as (listener, port), client(port) as engine:
        listener.publish(make_description())
        silent: list[socket.socket] = []
        for number in range(5 * MOST):
            engine.send_multipart([b"", HELLO])
            assert engine.recv_multipart()[0] == b""
            silent.append(socket.create_connection((HOST, port)))
            over = number + 2 - MOST
            if over > 0:
                _wait_for(counters, over)
        left = [one for one in silent if not has_ended(one)]
        assert len(left) <= MOST
        assert all(has_ended(one) for one in silent[:MOST])
        assert counters.total("handshakes_served") == 5 * MOST, (
            "the engine was answered every time"
        )
        assert isinstance(ask(port), EngineDescription)
        for one in silent:
            one.close()


@pytest.fixture
def known(counters: Counters) -> Iterator[AcceptedConnections]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    known = AcceptedConnections(context.socket(zmq.ROUTER), counters)
    yield known
    known.close()
    context.destroy(linger=0)


def test_a_reused_file_number_of_another_connection_is_left_alone(
    known: AcceptedConnections, counters: Counters
) -> None:
    """The event of a connection's end may come late, when its file number is in use again."""
    known.capacity = 1
    server = socket.create_server((HOST, 0))
    first = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    file = accepted.detach()
    known.accepted(file)
    other, peer = socket.socketpair()
    other_file = other.detach()
    with mock.patch(
        "kvferry.link.sockets.os.dup", side_effect=lambda _: socket.dup(other_file)
    ):
        known.accepted(1 << 20)
    assert counters.total("side_channel_refusals", "too_many") == 1
    peer.setblocking(False)
    assert not has_ended(peer)
    for one in (
        first,
        server,
        peer,
        socket.socket(fileno=file),
        socket.socket(fileno=other_file),
    ):
        one.close()


def test_a_reused_file_number_of_a_local_connection_is_never_closed_for_its_bytes(
    known: AcceptedConnections,
) -> None:
    """NIXL receives more over TCP than any message of the side channel may have."""
    server = socket.create_server((HOST, 0))
    first, second = (socket.create_connection(server.getsockname()) for _ in range(2))
    file, other = (server.accept()[0].detach() for _ in range(2))
    known.accepted(file)
    os.dup2(other, file)
    second.setblocking(False)
    with mock.patch(
        "kvferry.link.sockets.TcpConnection.unfinished_bytes", return_value=1 << 30
    ):
        assert known.end_endless() == 0
    assert not has_ended(second)
    for one in (
        first,
        second,
        server,
        socket.socket(fileno=file),
        socket.socket(fileno=other),
    ):
        one.close()


def test_unfinished_messages_of_one_host_cost_no_other_its_connection(
    known: AcceptedConnections,
) -> None:
    """A long request on its way has more bytes than each of the connections that fill the bound for all together."""
    server = socket.create_server((HOST, 0))

    def sent(source: str, num_bytes: int) -> socket.socket:
        connection = socket.create_connection(
            server.getsockname(), source_address=(source, 0)
        )
        file = server.accept()[0].detach()
        known.accepted(file)
        files.append(file)
        connection.sendall(bytes(num_bytes))
        wait_until(
            lambda: known.snapshot().unfinished_bytes[file] == num_bytes,
            "its bytes have arrived",
        )
        return connection

    files: list[int] = []
    honest = sent("127.0.0.2", 16 << 10)
    hostile = [sent(HOST, 4 << 10) for _ in range(24)]
    with mock.patch("kvferry.link.limits.MAX_UNFINISHED_IN_ALL_BYTES", 64 << 10):
        num_ended = known.end_endless()
        assert num_ended == 12, "16 KiB and 24 times 4 KiB came, of 64 KiB"
        assert known.end_endless() == 0
    assert not has_ended(honest)
    assert sum(map(has_ended, hostile)) == num_ended
    for one in (
        honest,
        *hostile,
        server,
        *(socket.socket(fileno=file) for file in files),
    ):
        one.close()


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (1024, 512),
        (1 << 20, MAX_CONNECTIONS),
        (resource.RLIM_INFINITY, MAX_CONNECTIONS),
    ],
)
def test_a_listener_takes_no_more_than_half_of_the_files_of_its_process(
    files: int, most: int
) -> None:
    with (
        mock.patch.object(resource, "getrlimit", return_value=(files, 1 << 20)),
        listening() as (listener, _),
    ):
        assert listener.snapshot().capacity == most


def connections(port: int) -> list[socket.socket]:
    """Copies of this process's own connections with this port at either end."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(int(file)))
            if copy.family is socket.AF_INET and not copy.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.append(copy)
            else:
                copy.close()
    there = [
        each for each in found if port in (each.getsockname()[1], each.getpeername()[1])
    ]
    for each in found:
        if each not in there:
            each.close()
    return there


def test_the_kernel_keeps_watch_over_idle_connections_at_both_ends(
    renewer: LeaseRenewer,
) -> None:
    with listening() as (listener, port):
        renewer.submit(
            [
                ReleaseLease(
                    RemoteLease(
                        HOST, port, BOOT, LeaseName(slot=1, epoch=EPOCH), 3600.0
                    )
                )
            ]
        )
        listener.inbox.get(timeout=30.0)
        both = connections(port)
        for end in both:
            with end:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert len(both) == 2
