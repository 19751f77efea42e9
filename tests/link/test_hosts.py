"""Hosts are read in one way, and an address is told from a name, a zone and an address of many hosts."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.link import allowed_hosts
from kvferry.link.allowed_hosts import is_this_host, names_of_this_host
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.handshake import zmq_address
from kvferry.protocol.hosts import (
    HOST_VARIABLE,
    advice,
    check_announced,
    host_port,
    one_spelling,
    read_address,
    read_host,
)

ROOT = Path(__file__).parents[2]

BYPASS = "fd00::2%2]:0;[::1"
"""An address of fd00::/64 to Python, whose ZMQ address means ::1."""

NO_HOST = [
    BYPASS,
    "fd00::2%2",
    "fe80::1%eth0",
    "fd00::2%evil.example",
    "[fd00::2%25eth0]",
    "10.1.2.3%eth0",
    "10.1.2.3;10.1.2.4",
    "10.1.2.3/8",
    "10.1.2.3:5600",
    "[::1]:5600",
    "user@p0.example",
    "tcp://p0.example",
    "p0.example/",
    "p0 example",
    " 10.1.2.3",
    "10.1.2.3\n",
    "10.1.2.3\0",
    "10.1.2.3\0.example",
    "10.1.2.3.4",
    "b\xfccher.example",
    "\N{FULLWIDTH DIGIT ONE}0.1.2.3",
    "",
    ".",
    "*",
]
NOT_ONE_HOST = [
    "0.0.0.0",
    "0",
    "0x0",
    "0.0.0.0.",
    "[0.0.0.0]",
    "0.1.2.3",
    "::",
    "[::]",
    "0:0:0:0:0:0:0:0",
    "::ffff:0.0.0.0",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "4294967295",
    "ff02::1",
    "fe80::1",
]


@pytest.mark.parametrize("host", [*NO_HOST, *NOT_ONE_HOST], ids=ascii)
def test_what_no_connection_can_be_meant_to_is_no_host(host: str) -> None:
    with pytest.raises(ValueError, match=r"address|host"):
        read_host(host)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("[10.1.2.3]", "10.1.2.3"),
        ("10.1.2.3.", "10.1.2.3"),
        ("0xa.0x10203", "10.1.2.3"),
        ("167838211", "10.1.2.3"),
        ("012.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("::FFFF:a01:203", "10.1.2.3"),
        ("[2001:DB8::0:1]", "2001:db8::1"),
    ],
)
def test_an_address_has_one_spelling(host: str, address: str) -> None:
    assert read_host(host) == read_address(host) == ipaddress.ip_address(address)
    assert one_spelling(host) == address


@pytest.mark.parametrize(
    ("host", "name"),
    [("P0.Example.", "p0.example"), ("node_1", "node_1"), ("xn--p1ai", "xn--p1ai")],
)
def test_a_name_is_read_without_a_look_up(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "getaddrinfo")
    assert read_host(host) == one_spelling(host) == name


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("10.1.2.3", "10.1.2.3:5600"),
        ("p0.example", "p0.example:5600"),
        ("fd00::1", "[fd00::1]:5600"),
        ("[::1]", "[::1]:5600"),
    ],
)
def test_the_port_of_an_ipv6_address_can_be_told_from_it(
    host: str, written: str
) -> None:
    assert host_port(host, 5600) == written
    assert zmq_address(host, 5600) == f"tcp://{written}"


def test_no_other_code_writes_a_host_and_its_port() -> None:
    written = re.compile(r"%s:%d|%s:%s\"|\{[\w.]*host\}:\{|\{[\w.]*address\}:\{")
    sources = (
        path
        for package in ("protocol", "scheduler", "worker", "connector", "cli")
        for path in (ROOT / package).rglob("*.py")
    )
    found = {
        str(path.relative_to(ROOT))
        for path in sources
        if written.search(path.read_text())
    }
    # A label of metrics has neither brackets nor other characters that a query would have to escape.
    assert found == {"connector/kvferry/connector/metrics/stats.py"}


def addresses_of_interfaces() -> Iterator[str]:
    """As the kernel lists them."""
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        yield str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))
    tree = Path("/proc/net/fib_trie").read_text()
    yield from re.findall(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL", tree)


def test_this_hosts_addresses_are_those_of_its_interfaces_and_loopback() -> None:
    own = [
        address
        for address in addresses_of_interfaces()
        if not address.startswith("fe80")
    ]
    assert "127.0.0.1" in own
    for address in (*own, "127.9.9.9"):
        assert is_this_host(ipaddress.ip_address(address)), address
    for address in (
        "203.0.113.7",
        "10.255.255.254",
        "2001:db8::7",
        "8.8.8.8",
        "169.254.169.254",
    ):
        assert address in own or not is_this_host(ipaddress.ip_address(address)), (
            address
        )


@pytest.mark.parametrize("kept", ["_is_own_source", "_is_routed_to_itself"])
def test_either_test_by_the_kernel_is_enough_and_neither_knows_another_host(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {
        "_is_own_source": "_is_routed_to_itself",
        "_is_routed_to_itself": "_is_own_source",
    }[kept]
    monkeypatch.setattr(allowed_hosts, other, lambda address: None)
    own = [
        text
        for text in addresses_of_interfaces()
        if ":" not in text and not text.startswith("127.")
    ]
    for text in own[:1]:
        assert is_this_host(ipaddress.ip_address(text))
    assert not is_this_host(ipaddress.ip_address("203.0.113.7"))


def test_a_host_without_sockets_left_knows_loopback_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    assert is_this_host(ipaddress.ip_address("127.0.0.1"))
    assert not is_this_host(ipaddress.ip_address("10.1.2.3"))


def test_names_of_this_host_are_its_own_and_those_its_file_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "127.0.1.1 node-1.example Node-1  # this host\n::1 ip6-localhost\n203.0.113.7 p0.example\n"
        "0.0.0.0 blocked.example\nnonsense\n127.0.0.1\n127.0.0.1 bad;name \xe9\n"
    )
    monkeypatch.setattr(allowed_hosts, "HOSTS_FILE", str(file))
    monkeypatch.setattr(socket, "gethostname", lambda: "Worker_7")
    assert names_of_this_host() == {
        "localhost",
        "worker_7",
        "node-1.example",
        "node-1",
        "ip6-localhost",
    }
    monkeypatch.setattr(allowed_hosts, "HOSTS_FILE", str(tmp_path / "missing"))
    assert names_of_this_host() == {"localhost", "worker_7"}


@pytest.mark.parametrize("host", [*NOT_ONE_HOST, BYPASS, "*", "", "a b"], ids=ascii)
def test_a_producer_that_would_announce_no_host_does_not_start_and_names_the_variable(
    host: str,
) -> None:
    with pytest.raises(
        InvalidConfig, match=f"{HOST_VARIABLE} is .*that decoders reach"
    ):
        check_announced(host)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        "::1",
        "[fd00::1]",
        "10.1.2.3",
        "169.254.1.2",
        "node_1.example.",
    ],
)
def test_a_producer_may_announce_any_other_host(host: str) -> None:
    check_announced(host)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("10.1.2.3", False),
        ("p0", False),
    ],
)
def test_who_finds_no_producer_on_its_own_host_is_told_of_the_variable(
    host: str, is_own: bool
) -> None:
    assert (HOST_VARIABLE in advice(host)) == is_own
