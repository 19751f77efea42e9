"""Every connection to a side channel is to an address that was judged; ZMQ gets nothing else to read or look up."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvferry.link import allowed_hosts, host_names
from kvferry.link.allowed_hosts import ANY_HOST, AllowedHosts
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.secrets import Secrets
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.hosts import HOST_VARIABLE
from tests.link.channel import HOST, listening
from tests.link.secret_files import NEW, OTHER
from tests.link.test_hosts import BYPASS, NO_HOST, NOT_ONE_HOST
from tests.protocol.samples import make_description
from tests.waiting import wait_until

TIMEOUT_S = 20.0
FOREIGN = "127.0.0.2"
"""An address of this machine that stands for another host's."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ZMQ was given to connect to."""
    given: list[str] = []
    connect = zmq.Socket.connect

    def record(self: Any, address: str) -> Any:
        if address.startswith("tcp:"):
            given.append(address)
        return connect(self, address)

    monkeypatch.setattr(zmq.Socket, "connect", record)
    return given


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were looked up; all of them are at `FOREIGN`, which is not this host."""
    names: list[str] = []

    def look_up(host: str) -> str:
        names.append(host)
        return FOREIGN

    monkeypatch.setattr(host_names, "look_up", look_up)
    monkeypatch.setattr(
        allowed_hosts,
        "is_this_host",
        lambda address: str(address) != FOREIGN and address.is_loopback,
    )
    return names


@contextlib.contextmanager
def client(
    allowed: AllowedHosts | None = None, secrets: Secrets = ()
) -> Iterator[SideChannelClient]:
    with SideChannelClient(secrets, allowed) as made:
        yield made


def fetch(
    client: SideChannelClient, host: str, port: int = 9, timeout_s: float = TIMEOUT_S
) -> object:
    return client.fetch_description(host, port, "prefill-0", "decode-0", timeout_s)


@pytest.mark.parametrize("host", [*NO_HOST, *NOT_ONE_HOST], ids=ascii)
def test_what_is_no_host_leads_nowhere_even_where_any_host_is_allowed(
    host: str, connected: list[str], looked_up: list[str]
) -> None:
    for allowed in (
        AllowedHosts.from_entries(["*"]),
        AllowedHosts.from_entries(["fd00::/64", "0.0.0.0/0", "::/0", "*.example"]),
        ANY_HOST,
    ):
        with (
            client(allowed) as client_id,
            pytest.raises(HandshakeFailed, match=r"address|host"),
        ):
            fetch(client_id, host)
    assert connected == looked_up == []


@pytest.mark.parametrize(
    ("host", "given"),
    [
        ("0x7f.1", HOST),
        ("2130706433", HOST),
        ("::ffff:127.0.0.1", HOST),
        ("[127.0.0.1]", HOST),
        ("localhost", HOST),
    ],
)
def test_zmq_gets_an_address_in_its_usual_spelling(
    host: str, given: str, connected: list[str]
) -> None:
    with listening(description=make_description()) as (_, port), client() as client_id:
        assert fetch(client_id, host, port) == make_description()
    assert connected == [f"tcp://{given}:{port}"]


@pytest.mark.parametrize(
    "host", [FOREIGN, "p0.example", "10.1.2.3", "169.254.169.254", "2001:db8::1"]
)
def test_without_a_secret_and_a_list_only_this_host_is_connected(
    host: str, connected: list[str], looked_up: list[str]
) -> None:
    with (
        client() as client_id,
        pytest.raises(HandshakeFailed, match="neither a secret nor allowed_hosts"),
    ):
        fetch(client_id, host)
    assert connected == looked_up == []


def test_a_name_of_this_host_must_lead_to_this_host(
    connected: list[str], looked_up: list[str]
) -> None:
    """Whoever decides what `localhost` means does not decide whom to trust."""
    with (
        client() as client_id,
        pytest.raises(HandshakeFailed, match=rf"is {FOREIGN}, which is not this host"),
    ):
        fetch(client_id, "localhost", timeout_s=2.0)
    assert looked_up == ["localhost"]
    assert connected == []


@pytest.mark.parametrize(
    "found",
    ["0.0.0.0", "::", "255.255.255.255", "224.0.0.1", "ff02::1", "fe80::1%eth0"],
)
def test_a_listed_name_leads_to_no_address_of_many_hosts(
    found: str, connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_names, "look_up", lambda _: found)
    with (
        client(AllowedHosts.from_entries(["p0.example"])) as client_id,
        pytest.raises(HandshakeFailed, match=r"p0\.example"),
    ):
        fetch(client_id, "p0.example")
    assert connected == []


def test_a_name_is_looked_up_once_for_a_connection_and_its_answer_is_what_is_connected(
    connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that gives an allowed address first and another one to the next question wins nothing."""
    answers = iter([HOST, FOREIGN, FOREIGN])
    monkeypatch.setattr(host_names, "look_up", lambda _: next(answers))
    monkeypatch.setattr(
        allowed_hosts, "is_this_host", lambda address: str(address) == HOST
    )
    with listening(description=make_description()) as (_, port), client() as client_id:
        assert fetch(client_id, "localhost", port) == make_description()
        with pytest.raises(HandshakeFailed, match="not this host"):
            fetch(client_id, "localhost", port)
    assert connected == [f"tcp://{HOST}:{port}"]


def test_any_host_is_not_the_service_that_gives_a_machine_its_credentials(
    connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = "169.254.169.254"
    monkeypatch.setattr(host_names, "look_up", lambda _: metadata)
    for allowed, secrets in ((AllowedHosts.from_entries(["*"]), ()), (None, (NEW,))):
        with client(allowed, secrets) as client_id:
            for host in (metadata, "metadata.example"):
                with pytest.raises(HandshakeFailed, match="link-local"):
                    fetch(client_id, host)
    assert connected == []
    assert AllowedHosts.from_entries(["*", "169.254.0.0/16"]).allow(metadata)


def test_with_a_secret_any_host_is_asked_and_only_one_with_it_is_read(
    looked_up: list[str],
) -> None:
    """A false producer has no answer to CURVE: not a byte of its description is decoded."""
    with client(secrets=(NEW,)) as client_id:
        with listening(secrets=(NEW,), description=make_description()) as (_, port):
            assert fetch(client_id, HOST, port) == make_description()
        for theirs in ((), (OTHER,)):
            counters = Counters()
            with listening(counters, theirs, description=make_description()) as (
                _,
                port,
            ):
                with pytest.raises(PeerRefused, match="secret"):
                    fetch(client_id, HOST, port)
                assert counters.total("handshakes_served") == 0
    assert not AllowedHosts.from_entries(["10.0.0.0/8"]).allow(HOST), (
        "a list restricts engines with a secret too"
    )


def test_zones_and_dead_names_keep_no_honest_exchange_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZMQ looked such a zone up on its only I/O thread, before every other message of the process."""
    over = threading.Event()

    def look_up(host: str) -> str:
        assert over.wait(60)
        raise OSError("no such host")

    monkeypatch.setattr(host_names, "look_up", look_up)
    try:
        with (
            listening(description=make_description()) as (_, port),
            client(AllowedHosts.from_entries(["*"])) as client_id,
        ):
            zones = [f"fd00::{n}%dead-{n}.example" for n in range(3)]
            names = [f"dead-{n}.example" for n in range(3)]
            failed: list[str] = []
            threads = [
                threading.Thread(
                    target=lambda host=host: failed.append(_failure(client_id, host))
                )
                for host in zones + names
            ]
            for thread in threads:
                thread.start()
            assert fetch(client_id, HOST, port) == make_description()
            wait_until(lambda: len(failed) >= len(zones), "zones are refused at once")
            assert len(failed) == len(zones)
            over.set()
            for thread in threads:
                thread.join()
    finally:
        over.set()


def _failure(client_id: SideChannelClient, host: str) -> str:
    with pytest.raises(HandshakeFailed) as failed:
        fetch(client_id, host, timeout_s=60.0)
    return str(failed.value)


def test_a_decoder_that_finds_nothing_on_its_own_host_names_the_variable() -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
        with client() as client_id:
            for host in ("localhost", HOST):
                with pytest.raises(HandshakeFailed, match=HOST_VARIABLE):
                    fetch(client_id, host, port, timeout_s=0.2)


def test_a_decoder_that_finds_another_engine_on_its_own_host_names_the_variable() -> (
    None
):
    with (
        listening(description=make_description()) as (_, port),
        client() as client_id,
        pytest.raises(PeerRefused, match=HOST_VARIABLE),
    ):
        client_id.fetch_description(HOST, port, "another", "decode-0", TIMEOUT_S)


def test_the_errors_of_an_ipv6_address_tell_its_port() -> None:
    with (
        client(ANY_HOST) as client_id,
        pytest.raises(HandshakeFailed, match=r"^\[::1\]:1 did not answer"),
    ):
        fetch(client_id, "::1", 1, timeout_s=0.2)


def test_the_bypass_is_in_the_network_only_to_those_who_read_zones() -> None:
    assert ipaddress.ip_address(BYPASS) in ipaddress.IPv6Network("fd00::/64")
    assert not AllowedHosts.from_entries(["fd00::/64"]).allow(BYPASS)
