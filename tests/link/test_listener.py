"""The side channel's listener over real sockets: its answers, and the inputs that it survives."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import zmq

from kvferry.link import limits
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.server import SideChannelListener
from kvferry.protocol import handshake
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.errors import InvalidConfig, InvalidSecretFile
from kvferry.protocol.handshake import (
    EngineDescription,
    Hello,
    LeaseName,
    Refused,
    Release,
    Renew,
    decode_reply,
    encode,
)
from kvferry.protocol.queries import (
    MAX_ANSWERS_BYTES,
    MAX_QUERIES,
    Answer,
    FindPrefixes,
    PrefixQuery,
    PromptProgress,
    PromptQuery,
    Subscribe,
    decode_answers,
)
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from tests.link.channel import (
    HOST,
    RecordingListener,
    ask,
    client,
    free_port,
    listening,
    threads_named,
)
from tests.open_files import open_files
from tests.protocol.samples import BOOT, EPOCH, make_description, make_worker
from tests.waiting import LONGEST_JOIN_S, wait_until

LEASES = (LeaseName(slot=1, epoch=EPOCH),)
HELLO = encode(Hello(engine_id="prefill-0", client_id="test"))
CONNECTS = encode(Hello(engine_id="prefill-0", client_id="test", connects=True))
THREAD = "kvferry-listener"


@pytest.fixture
def served(counters: Counters) -> Iterator[tuple[RecordingListener, int]]:
    with listening(counters) as (listener, port):
        listener.publish(make_description())
        yield listener, port


def test_a_hello_is_answered_with_the_whole_description(
    served: tuple[RecordingListener, int], counters: Counters
) -> None:
    assert ask(served[1]) == make_description()
    assert counters.total("handshakes_served") == 1


def test_a_listener_that_withdraws_waits_for_peers_that_connect_to_the_agents(
    served: tuple[RecordingListener, int],
) -> None:
    listener, port = served
    withdrawing = threading.Thread(target=listener.withdraw)
    with client(port) as peer:
        peer.send_multipart([b"", CONNECTS])
        assert len(peer.recv_multipart()[1]) > 0
        withdrawing.start()
        wait_until(lambda: isinstance(ask(port), Refused), "nobody hears of it")
        assert withdrawing.is_alive()
    withdrawing.join(limits.CONTACTS_S / 2)
    assert not withdrawing.is_alive()


def test_neither_a_peer_that_stands_still_nor_one_that_only_asks_keeps_it_waiting(
    served: tuple[RecordingListener, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, port = served
    with client(port) as peer:
        peer.send_multipart([b"", HELLO])
        peer.recv_multipart()
        started_s = time.monotonic()
        listener.withdraw()
        assert time.monotonic() < started_s + limits.CONTACTS_S
    listener.publish(make_description())
    monkeypatch.setattr(limits, "CONTACTS_S", 0.05)
    with client(port) as peer:
        peer.send_multipart([b"", CONNECTS])
        peer.recv_multipart()
        listener.withdraw()


def test_a_long_description_is_fetched_in_parts_as_one_handshake(
    served: tuple[RecordingListener, int],
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "MAX_PART_BYTES", 100)
    with SideChannelClient() as client_id:
        assert (
            client_id.fetch_description(HOST, served[1], "prefill-0", "test", 30.0)
            == make_description()
        )
    assert counters.total("handshakes_served") == 1
    with client(served[1]) as sock:
        sock.send_multipart(
            [b"", encode(Hello(engine_id="prefill-0", client_id="test", at=1 << 20))]
        )
        assert decode_reply(sock.recv_multipart()[1]) == Refused(
            field="at",
            value=str(1 << 20),
            expected=f"less than {len(encode(make_description()))}",
        )


def test_before_the_workers_are_ready_a_hello_is_refused_as_starting(
    counters: Counters,
) -> None:
    with listening(counters) as (listener, port):
        answer = ask(port)
        assert isinstance(answer, Refused)
        assert (answer.field, answer.value) == ("engine", "starting")
        listener.publish(make_description())
        assert isinstance(ask(port), EngineDescription)


@pytest.mark.parametrize(
    ("engine_id", "version", "field", "value", "expected"),
    [
        ("prefill-9", 3, "engine_id", "prefill-9", "prefill-0"),
        ("prefill-0", 1, "version", "1", "3"),
    ],
)
def test_an_unworkable_hello_is_refused_by_the_name_of_its_field(
    served: tuple[RecordingListener, int],
    engine_id: str,
    version: int,
    field: str,
    value: str,
    expected: str,
) -> None:
    assert ask(served[1], engine_id, version) == Refused(
        field=field, value=value, expected=expected
    )


def test_messages_about_unknown_leases_are_dropped_before_the_inbox(
    counters: Counters,
) -> None:
    """So a flood of invented names keeps no renewal out, and costs the next step nothing."""
    mine, port = LeaseName(slot=2, epoch=EPOCH), free_port()
    listener = SideChannelListener(
        HOST, port, counters, knows=lambda boot, name: (boot, name) == (BOOT, mine)
    )
    try:
        with client(port) as sock:
            guesses = tuple(
                LeaseName(slot=2, epoch=f"{guess:015x}") for guess in range(1, 1001)
            )
            sock.send_multipart([b"", encode(Renew(boot=BOOT, leases=guesses))])
            sock.send_multipart([b"", encode(Release(boot="f" * 32, leases=(mine,)))])
            sock.send_multipart(
                [b"", encode(Renew(boot=BOOT, leases=(*guesses, mine)))]
            )
            wait_until(
                lambda: counters.total("renewals_unknown") == 2000,
                "everything has arrived",
            )
            wait_until(lambda: bool(listener.inbox.received), "what is known waits")
        assert [
            (received.boot, received.name) for received in listener.inbox.take()
        ] == [(BOOT, mine)]
        assert counters.total("releases_unknown") == 1
    finally:
        listener.close()


def test_tickets_that_do_not_fit_into_one_frame_come_in_several(
    counters: Counters,
) -> None:
    """As the prompts of many requests with one long prefix. Its peer closes a connection that brings a longer one."""
    directory, port, prompt = PromptDirectory(), free_port(), Prompt(tokens=[1, 2, 3])
    params = {"remote_block_ids": [[1 << 30] * (MAX_ANSWERS_BYTES // 20)]}
    queries = tuple(
        PromptQuery(number=n, key=str(n), num_tokens=3, digest=digest_chain(prompt)[-1])
        for n in range(6)
    )
    for query in queries:
        directory.arrived(query.key, query.key, prompt, 3)
        directory.ticket(query.key, params)
    listener = SideChannelListener(HOST, port, counters, directory=directory)
    with contextlib.closing(listener), client(port) as sock:
        sock.send_multipart([b"", encode(Subscribe(client_id="d", queries=queries))])
        found: list[int] = []
        while len(found) < len(queries):
            found += [
                answer.number
                for answer in decode_answers(sock.recv_multipart()[1]).answers
            ]
        assert found == list(range(6))


def test_more_changes_than_fit_into_one_message_come_in_several(
    counters: Counters,
) -> None:
    directory, port, count = PromptDirectory(), free_port(), MAX_QUERIES + 10
    (digest,) = digest_chain(Prompt(tokens=[1, 2, 3]))
    queries = [
        PromptQuery(number=n, key=str(n), num_tokens=3, digest=digest)
        for n in range(count)
    ]
    with (
        contextlib.closing(
            SideChannelListener(HOST, port, counters, directory=directory)
        ),
        client(port) as sock,
    ):
        for part in (queries[:MAX_QUERIES], queries[MAX_QUERIES:]):
            sock.send_multipart(
                [b"", encode(Subscribe(client_id="d", queries=tuple(part)))]
            )
            decode_answers(sock.recv_multipart()[1])
        wake, directory.wake = directory.wake, lambda: None
        for query in queries:
            directory.arrived(query.key, query.key, Prompt(tokens=[1, 2, 3]), 3)
        wake()
        found: set[int] = set()
        while len(found) < count:
            found |= {
                answer.number
                for answer in decode_answers(sock.recv_multipart()[1]).answers
            }


def test_an_engine_of_which_no_prefix_is_read_says_so(
    served: tuple[RecordingListener, int],
) -> None:
    queries = tuple(PrefixQuery(number=n, chain=bytes(16)) for n in (3, 4))
    with client(served[1]) as sock:
        sock.send_multipart([b"", encode(FindPrefixes(client_id="d", queries=queries))])
        answers = decode_answers(sock.recv_multipart()[1]).answers
    assert answers == tuple(
        Answer(number=n, progress=PromptProgress.OVER, reason="prefix_off")
        for n in (3, 4)
    )


def test_renewals_and_releases_reach_the_inbox_in_order_and_get_no_answer(
    served: tuple[RecordingListener, int],
) -> None:
    listener, port = served
    messages: list[Renew | Release] = [
        Renew(boot=BOOT, leases=LEASES),
        Release(boot=BOOT, leases=LEASES),
        Renew(boot=BOOT, leases=LEASES * 9),
    ]
    with client(port) as sock:
        for message in messages:
            sock.send_multipart([b"", encode(message)])
        assert [listener.inbox.get(timeout=10) for _ in messages] == messages
        sock.send_multipart([b"", HELLO])
        assert sock.recv_multipart() == [b"", encode(make_description())], (
            "something else was answered before"
        )


def test_unexpected_exceptions_are_counted_and_the_next_asker_is_answered(
    served: tuple[RecordingListener, int],
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Anyone who finds a frame that raises can send any number: their tracebacks must not fill the log."""
    listener, port = served
    with monkeypatch.context() as patch:
        patch.setattr(listener, "_answer_hello", lambda hello: 1 / 0)
        with client(port) as sock:
            for _ in range(50):
                sock.send_multipart([b"", HELLO])
            wait_until(
                lambda: counters.total("bad_frames") == 50, "the errors are counted"
            )
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(tracebacks) < 10
    assert isinstance(ask(port), EngineDescription)


def test_an_asker_that_never_takes_its_answers_costs_little_memory(
    counters: Counters,
) -> None:
    """Some answers are queued, the others are dropped: they have up to a megabyte each."""
    with listening(counters) as (listener, port):
        metadata = bytes(1 << 20)
        listener.publish(
            make_description(workers=(make_worker(agent_metadata=metadata),))
        )
        with client(port, receive_queue=1) as sock:
            for _ in range(200):
                sock.send_multipart([b"", HELLO])
            wait_until(
                lambda: counters.total("handshakes_served") == 200,
                "all hellos are seen",
            )
            sock.setsockopt(zmq.RCVTIMEO, 300)
            answers = 0
            try:
                while sock.recv_multipart():
                    answers += 1
            except zmq.Again:
                pass
        assert 0 < answers < 60


def test_a_taken_port_is_a_configuration_error_that_says_what_to_change(
    served: tuple[RecordingListener, int], counters: Counters
) -> None:
    with pytest.raises(InvalidConfig, match="VLLM_NIXL_SIDE_CHANNEL_PORT") as refused:
        RecordingListener(HOST, served[1], counters)
    assert str(served[1]) in str(refused.value)
    assert "free port" in str(refused.value)
    assert len(threads_named(THREAD)) == 1


@pytest.mark.parametrize("port", [0, -1, 65536, 65538])
def test_a_port_that_is_none_is_refused_before_zmq_listens_on_another_one(
    counters: Counters, port: int
) -> None:
    with pytest.raises(InvalidConfig, match="a port from 1 to 65535") as refused:
        RecordingListener(HOST, port, counters)
    assert f"{HOST}:{port}" in str(refused.value)
    assert not threads_named(THREAD)


@pytest.mark.parametrize(
    ("part", "failed", "raised"),
    [
        ("guarded_socket.listening_socket", zmq.ZMQError(errno.EMFILE), InvalidConfig),
        (
            "guarded_socket.AcceptedConnections",
            zmq.ZMQError(errno.EMFILE),
            InvalidConfig,
        ),
        (
            "guarded_socket.derive_keys",
            InvalidSecretFile("libzmq", "4.3", "one with CURVE"),
            InvalidSecretFile,
        ),
        ("server.threading.Thread.start", RuntimeError("no thread"), RuntimeError),
    ],
)
def test_a_start_that_fails_closes_what_it_opened(
    part: str,
    failed: Exception,
    raised: type[Exception],
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening():  # what ZMQ opens once a process
        before = open_files()
        monkeypatch.setattr(f"kvferry.link.{part}", mock.Mock(side_effect=failed))
        with pytest.raises(raised):
            RecordingListener(HOST, free_port(), counters)
        assert open_files() <= before


def test_programs_that_the_engine_starts_get_none_of_its_files() -> None:
    with listening():  # what ZMQ opens once a process
        before = open_files()
        with listening():
            opened = open_files() - before
            assert opened
            inherited = [
                target for number, target in opened if os.get_inheritable(int(number))
            ]
    assert not inherited


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "", "256.0.0.1"])
def test_an_address_of_another_machine_is_a_configuration_error(
    host: str, counters: Counters
) -> None:
    with pytest.raises(InvalidConfig, match="VLLM_NIXL_SIDE_CHANNEL_HOST"):
        RecordingListener(host, free_port(), counters)
    assert not threads_named(THREAD)


@pytest.mark.parametrize("host", ["localhost", "::1", "0.0.0.0"])
def test_it_listens_on_names_ipv6_and_all_interfaces(
    host: str, counters: Counters
) -> None:
    port = free_port()
    try:
        listener = RecordingListener(host, port, counters)
    except InvalidConfig:
        if host != "::1":
            raise
        pytest.skip("this machine has no IPv6")
    try:
        listener.publish(make_description())
        assert isinstance(
            ask(port, host=host if host == "::1" else HOST), EngineDescription
        )
    finally:
        listener.close()


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_a_name_is_listened_on_where_its_consumers_look_for_it(
    family: str, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ looks names up for IPv4 alone: a name with an IPv6 address was no name to it, or another one's address."""
    if family == "IPv6" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    address = {"IPv4": "127.0.0.3", "IPv6": "::1"}[family]
    found = [
        (
            socket.AF_INET6 if ":" in address else socket.AF_INET,
            socket.SOCK_STREAM,
            6,
            "",
            (address, 0),
        )
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    port = free_port()
    listener = RecordingListener("node-6.example", port, counters)
    try:
        listener.publish(make_description())
        assert listener.address == address
        with SideChannelClient(
            (), AllowedHosts.from_entries(["node-6.example"])
        ) as client_id:
            assert (
                client_id.fetch_description(
                    "node-6.example", port, "prefill-0", "d", 10.0
                )
                == make_description()
            )
    finally:
        listener.close()


def test_a_name_without_an_address_is_said_to_be_none(counters: Counters) -> None:
    with pytest.raises(
        InvalidConfig, match=r"VLLM_NIXL_SIDE_CHANNEL_HOST.*cannot be looked up: "
    ):
        RecordingListener("no-such-host.invalid", free_port(), counters)


def test_closing_joins_at_once_frees_the_port_and_may_be_repeated(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOIN_S", LONGEST_JOIN_S)
    port = free_port()
    for _ in range(3):
        listener = RecordingListener(HOST, port, counters)
        assert len(threads_named(THREAD)) == 1
        start_s = time.monotonic()
        listener.close()
        listener.close()
        assert time.monotonic() - start_s < LONGEST_JOIN_S / 2, "the thread ends itself"
        assert not threads_named(THREAD)


def test_a_process_that_never_closes_it_still_ends() -> None:
    script = (
        "from kvferry.link.server import SideChannelListener\n"
        "from kvferry.link.counters import Counters\n"
        f"kept = SideChannelListener('{HOST}', {free_port()}, Counters())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
