"""The prewarmer finds the producers that a configuration names when they start and restart, and blocks nothing."""

from __future__ import annotations

import errno
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.limits import Backoff
from kvferry.link.peer_link import PeerLinks
from kvferry.link.prewarmer import PeerPrewarmer
from kvferry.link.secrets import Secrets
from kvferry.link.sockets import watch
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.orders import Prewarm
from tests.link.channel import HOST, RecordingListener, free_port, threads_named
from tests.link.secret_files import NEW, OLD, OTHER
from tests.protocol.samples import make_description
from tests.waiting import wait_until

TIMEOUT_S = 5.0
SOON_S = 20.0
ME = "decode-0"
MY_BOOT = "e" * 32


class Found:
    """The producers found, in order."""

    def __init__(self) -> None:
        self.producers: queue.SimpleQueue[Prewarm] = queue.SimpleQueue()

    def next(self) -> Prewarm:
        return self.producers.get(timeout=SOON_S)


@pytest.fixture
def found() -> Found:
    return Found()


@pytest.fixture
def look_for(found: Found) -> Iterator[Callable[..., None]]:
    made: list[PeerLinks] = []

    def build(
        addresses: Sequence[tuple[str, int]],
        timeout_s: float = TIMEOUT_S,
        secrets: Secrets = (),
    ) -> None:
        made.append(PeerLinks(SideChannelClient(secrets), Counters()))
        PeerPrewarmer(
            made[-1], addresses, ME, lambda: MY_BOOT, found.producers.put, timeout_s
        ).start()

    yield build
    for one in made:
        one.close()
    assert not threads_named("kvferry-side-channel")


@pytest.fixture
def listen() -> Iterator[Callable[..., RecordingListener]]:
    made: list[RecordingListener] = []

    def build(
        port: int, description: EngineDescription | None = None, secrets: Secrets = ()
    ) -> RecordingListener:
        made.append(RecordingListener(HOST, port, Counters(), secrets))
        if description is not None:
            made[-1].publish(description)
        return made[-1]

    yield build
    for one in made:
        one.close()


def life(number: int, engine_id: str = "prefill-0") -> EngineDescription:
    return msgspec.structs.replace(
        make_description(), engine_id=engine_id, boot=f"{number:032x}"
    )


def prewarm(port: int, description: EngineDescription, host: str = HOST) -> Prewarm:
    return Prewarm(
        host=host,
        port=port,
        engine_id=description.engine_id,
        boot=description.boot,
        is_static=True,
    )


@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_an_engine_that_answers_is_reported_although_its_id_was_unknown(
    host: str, listen: Any, look_for: Any, found: Found
) -> None:
    port = free_port()
    listen(port, life(1))
    look_for([(host, port), (host, port)])
    assert found.next() == prewarm(port, life(1), host)
    assert found.producers.empty()


def test_a_producer_that_comes_later_and_is_not_ready_at_first_is_found_when_it_is(
    listen: Any, look_for: Any, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    look_for([(HOST, port)], timeout_s=0.2)
    with pytest.raises(queue.Empty):
        found.producers.get(timeout=0.5)
    listener = listen(port)
    with pytest.raises(queue.Empty):
        found.producers.get(timeout=0.5)
    listener.publish(life(1))
    assert found.next() == prewarm(port, life(1))
    assert (
        f"prewarming {HOST}:{port}: cannot be connected: nothing listens there"
        in caplog.text
    )


def test_a_producer_that_restarts_is_found_again_with_its_new_life(
    listen: Any, look_for: Any, found: Found
) -> None:
    port = free_port()
    first = listen(port, life(1))
    look_for([(HOST, port)])
    assert found.next() == prewarm(port, life(1))
    first.close()
    listen(port, life(2, "another"))
    assert found.next() == prewarm(port, life(2, "another"))


def test_hosts_that_never_answer_and_names_that_are_never_found_delay_no_other(
    listen: Any, look_for: Any, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(host: str, *_: object, **__: object) -> None:
        assert host == "slow.example"
        gone.get(timeout=60.0)
        raise OSError("no such host")

    gone: queue.SimpleQueue[None] = queue.SimpleQueue()
    monkeypatch.setattr("kvferry.link.host_names.socket.getaddrinfo", stuck)
    silent = socket.create_server((HOST, 0))
    port = free_port()
    listen(port, life(1))
    dark = [(HOST, silent.getsockname()[1]), ("slow.example", 1), (HOST, free_port())]
    look_for([*dark, (HOST, port)], timeout_s=60.0)
    assert found.next() == prewarm(port, life(1))
    gone.put(None)
    silent.close()


@pytest.mark.parametrize("name", ["prefill-0", ME], ids=["another id", "the same id"])
def test_this_very_engine_is_left_out_and_no_other(
    listen: Any, look_for: Any, found: Found, name: str
) -> None:
    mine, other = free_port(), free_port()
    listen(mine, msgspec.structs.replace(life(1, ME), boot=MY_BOOT))
    look_for([(HOST, mine), (HOST, other)])
    listen(other, life(2, name))
    assert found.next() == prewarm(other, life(2, name))
    assert found.producers.empty()


def test_with_secrets_each_is_tried_and_without_the_right_one_nothing_is_reported(
    listen: Any, look_for: Any, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    port, locked, plain = free_port(), free_port(), free_port()
    listen(port, life(1), (OLD,))
    listen(locked, life(2), (OTHER,))
    listen(plain, life(3))
    look_for([(HOST, locked), (HOST, plain), (HOST, port)], secrets=(NEW, OLD))
    assert found.next() == prewarm(port, life(1))
    wait_until(
        lambda: (
            f"prewarming {HOST}:{locked}: it has none of the secrets" in caplog.text
        ),
        "it is logged",
    )
    wait_until(
        lambda: f"prewarming {HOST}:{plain}: it has no secret" in caplog.text,
        "it is logged",
    )
    assert found.producers.empty()


def test_for_want_of_sockets_a_producer_is_looked_for_again_later(
    listen: Any,
    look_for: Any,
    found: Found,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = iter(range(2))

    def none_left(socket: zmq.Socket[bytes]) -> Any:
        if next(failing, None) is not None:
            raise zmq.ZMQError(errno.EMFILE)
        return watch(socket)

    monkeypatch.setattr("kvferry.link.connection.watch", none_left)
    monkeypatch.setattr(limits, "RETRY", Backoff(0.01, 10.0))
    port = free_port()
    listen(port, life(1))
    look_for([(HOST, port)])
    assert found.next() == prewarm(port, life(1))
    assert "Too many open files" in caplog.text


def test_a_producer_that_ends_every_connection_is_asked_at_intervals(
    listen: Any, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is a line of the log, and a step of an idle engine."""
    monkeypatch.setattr(limits, "RETRY", Backoff(0.01, 0.3))
    port = free_port()
    listen(port, life(1))
    links = PeerLinks(SideChannelClient(), Counters())

    def end_connection(producer: Prewarm) -> None:
        found.producers.put(producer)
        peer = links.to((HOST, port)).peer
        assert peer is not None
        peer.end("it ends them all")

    begun_s = time.monotonic()
    PeerPrewarmer(
        links, [(HOST, port)], ME, lambda: MY_BOOT, end_connection, TIMEOUT_S
    ).start()
    for _ in range(4):
        found.next()
    # Three whole intervals, but for what a timer may be early.
    assert time.monotonic() - begun_s > 3 * 0.29
    links.close()


def test_a_late_answer_is_not_taken_for_that_to_the_next_request(look_for: Any) -> None:
    """Nothing in an answer says to which request it belongs, so the next request has another connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    producer = context.socket(zmq.ROUTER)
    producer.setsockopt(zmq.RCVTIMEO, int(SOON_S * 1000))
    try:
        look_for([(HOST, producer.bind_to_random_port(f"tcp://{HOST}"))], timeout_s=0.1)
        first, *_ = producer.recv_multipart()
        second, *_ = producer.recv_multipart()
        assert first != second
    finally:
        context.destroy(linger=0)
