"""The hosts that an allow-list permits: an address is compared as an address, in any spelling."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.link import allowed_hosts
from kvferry.link.allowed_hosts import AllowedHosts, TrustedHosts
from kvferry.link.host_names import look_up, plain_address
from tests.link.secret_files import NEW

LIST = (
    "10.1.0.0/16",
    "192.0.2.7",
    "2001:db8::/32",
    "p0.example",
    "*.prefill.example",
    "LOCALHOST.",
)
ALLOWED = AllowedHosts.from_entries(LIST)

YES = [
    "10.1.0.0",
    "10.1.255.255",
    "192.0.2.7",
    "192.0.2.7.",
    "[192.0.2.7]",
    "::ffff:10.1.2.3",
    "0:0:0:0:0:ffff:10.1.2.3",
    "2001:db8::1",
    "[2001:DB8:0:0::1]",
    "p0.example",
    "P0.Example.",
    "a.prefill.example",
    "a.b.prefill.example",
    "localhost",
]
NO = [
    "10.2.0.0",
    "192.0.2.8",
    "127.0.0.1",
    "0.0.0.0",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::10.1.2.3",
    "64:ff9b::a01:203",
    "2001:db9::1",
    "prefill.example",
    ".prefill.example",
    "a..prefill.example",
    "p0.example..",
    "p0.example.evil",
    "p0.example/",
    "p0.example:80",
    "evil;p0.example",
    "10.9.9.9;10.1.2.3",
    "10.1.2.3/16",
    "2001:db8::2%2]:0;[::1",
    "2001:db8::2%eth0",
    "10.1.2.3 ",
    " 10.1.2.3",
    "10.1.2.3.4",
    "10.1.2.3\n",
    "p0.exam\N{SOFT HYPHEN}ple",
    "\N{FULLWIDTH DIGIT ONE}0.1.2.3",
    "p0\N{IDEOGRAPHIC FULL STOP}example",
    "*",
    "*.prefill.example",
    "",
    "x" * 64 + ".prefill.example",
    ".".join(["a"] * 200) + ".prefill.example",
]


@pytest.mark.parametrize("host", YES)
def test_what_is_listed_is_allowed_however_it_is_written(host: str) -> None:
    assert ALLOWED.allow(host)


@pytest.mark.parametrize("host", NO, ids=ascii)
def test_what_is_not_listed_is_not_allowed_however_it_is_written(host: str) -> None:
    assert not ALLOWED.allow(host)


def test_names_do_not_allow_their_addresses_nor_addresses_their_names() -> None:
    assert not AllowedHosts.from_entries(["localhost"]).allow("127.0.0.1")
    assert not AllowedHosts.from_entries(["127.0.0.0/8", "::1"]).allow("localhost")
    assert not AllowedHosts.from_entries(["*.example"]).allow("10.1.2.3")


@pytest.mark.parametrize(
    "entry",
    [
        "::ffff:10.1.0.0/112",
        "[2001:db8::1]",
        "fe80::/10",
        "0.0.0.0/0",
        "::/0",
        "a",
        "a-b.c_d",
    ],
)
def test_every_way_to_write_an_entry_is_taken(entry: str) -> None:
    assert AllowedHosts.from_entries([entry]) != AllowedHosts()


def test_a_mapped_network_allows_the_addresses_that_are_meant() -> None:
    allowed = AllowedHosts.from_entries(["::ffff:10.1.0.0/112"])
    assert allowed.allow("10.1.2.3")
    assert allowed.allow("::ffff:10.1.2.3")
    assert not allowed.allow("10.2.2.3")
    assert not AllowedHosts.from_entries(["::/0"]).allow("10.1.2.3"), (
        "which is no address of IPv6"
    )


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "**",
        "*.",
        "*.*.a",
        "fd00::%2/64",
        "fd00::1%eth0",
        "0.0.0.0",
        "::",
        "255.255.255.255",
        "ff02::1",
        "a.*",
        "10.1.2.3/16",
        "10.1.2.3/33",
        "10.1",
        "a b",
        "a;b",
        "a:1",
        "http://a",
        "\xe9",
    ],
)
def test_an_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is the entry
        AllowedHosts.from_entries(["p0.example", entry])
    assert str(refused.value) == entry


NETWORK = ipaddress.IPv4Network("10.1.0.0/16")
LOW, HIGH = int(NETWORK.network_address), int(NETWORK.broadcast_address)
NUMBERS = st.integers(LOW - 300, HIGH + 300) | st.integers(0, 2**32 - 1)


def part(value: int, base: str) -> str:
    return {
        "d": str(value),
        "x": hex(value),
        "X": f"0X{value:X}",
        "o": f"0{value:o}" if value else "0",
    }[base]


@given(
    NUMBERS,
    st.integers(1, 4),
    st.lists(st.sampled_from("dxXo"), min_size=4, max_size=4),
)
def test_every_spelling_that_the_c_library_accepts_is_compared_as_its_address(
    number: int, parts: int, bases: list[str]
) -> None:
    """One to four parts, each decimal, hexadecimal or octal: the address for `connect` decides, not the text."""
    heads = [(number >> shift) & 0xFF for shift in (24, 16, 8)][: parts - 1]
    last = number & ((1 << (32 - 8 * (parts - 1))) - 1)
    host = ".".join(
        part(value, base) for value, base in zip([*heads, last], bases, strict=False)
    )
    expected = ipaddress.IPv4Address(number) in NETWORK
    assert ALLOWED.allow(host) == expected
    assert ALLOWED.allow(f"::ffff:{ipaddress.IPv4Address(number)}") == expected
    assert plain_address(host) or look_up(host) == str(ipaddress.IPv4Address(number))


def test_any_host_is_every_host_that_can_be_connected_but_the_link_local_ones() -> None:
    allowed = AllowedHosts.from_entries(["*"])
    for host in ("10.1.2.3", "p0.example", "localhost", "127.0.0.1", "fd00::1"):
        assert allowed.allow(host), host
    for host in (
        "0.0.0.0",
        "::",
        "255.255.255.255",
        "224.0.0.1",
        "fd00::1%eth0",
        "a b",
        "",
        "169.254.169.254",
        "fe80::1",
    ):
        assert not allowed.allow(host), host


def test_without_a_list_a_secret_allows_any_host_and_none_allows_this_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        allowed_hosts,
        "is_this_host",
        lambda address: str(address) in ("127.0.0.1", "10.1.2.3"),
    )
    monkeypatch.setattr(
        allowed_hosts, "names_of_this_host", lambda: frozenset({"localhost", "node-1"})
    )
    protected, secret = (
        AllowedHosts.without_list((), "Node-1.Example."),
        AllowedHosts.without_list((NEW,)),
    )
    for host in (
        "127.0.0.1",
        "0x7f.1",
        "10.1.2.3",
        "localhost",
        "NODE-1",
        "node-1.example",
    ):
        assert protected.allow(host), host
        assert secret.allow(host), host
    for host in ("10.1.2.4", "p0.example", "node-2", "8.8.8.8", "fd00::1"):
        assert not protected.allow(host), host
        assert secret.allow(host), host
    assert not AllowedHosts.from_entries(["10.0.0.0/8"]).allow("127.0.0.1"), (
        "a list is all that is allowed"
    )
    assert (
        protected.why_not_found("localhost", ipaddress.ip_address("127.0.0.1")) is None
    )
    assert "not this host" in str(
        protected.why_not_found("localhost", ipaddress.ip_address("10.1.2.4"))
    )


@given(st.text(max_size=40) | st.text("0123456789abcdefx.:;[]%*/ p-_", max_size=30))
def test_nothing_that_resolves_to_a_forbidden_address_without_a_name_server_is_allowed(
    host: str,
) -> None:
    """For any text: if the system reads it as an address and the list permits it, the address is in the list."""
    if not ALLOWED.allow(host):
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError, ValueError):
        return
    for entry in found:
        address = ipaddress.ip_address(entry[4][0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        assert any(mapped in network for network in ALLOWED.networks)


def test_a_source_without_an_announcement_must_be_listed_or_share_a_secret() -> None:
    # Params of kvferry's may name this host; what any client can write may not.
    this_host = AllowedHosts.without_list(())
    unlisted = TrustedHosts(this_host, has_list=False)
    assert unlisted.why_not("127.0.0.1") is None
    assert unlisted.why_not_unannounced("127.0.0.1") is not None
    secret = TrustedHosts(
        AllowedHosts.without_list((NEW,)), has_list=False, has_secret=True
    )
    assert secret.why_not_unannounced("10.1.2.3") is None
    assert secret.why_not_unannounced("169.254.1.1") is not None
    listed = TrustedHosts(ALLOWED, has_list=True)
    assert listed.why_not_unannounced("10.1.2.3") is None
    assert listed.why_not_unannounced("127.0.0.1") is not None
