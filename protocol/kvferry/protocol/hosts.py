"""Hosts as params, tickets, configurations and name servers write them: all are read here, and nowhere else.

A host is an address or a name. ZMQ gets addresses only, in the one spelling that Python gives them. It would look a
name up on its I/O thread; and it reads text in its own way, `;` as the end of a source address, and what follows the
`%` of an IPv6 address as a name. So `fd00::2%2]:0;[::1` is in fd00::/64 to Python, and the address ::1 to ZMQ.

    written                                    read as
    10.1.2.3  [10.1.2.3]  10.1.2.3.            the address 10.1.2.3
    0xa.0x10203  167838211  ::ffff:10.1.2.3    the same: the C library, or Linux, connects to it
    P0.Example.                                the name p0.example
    0.0.0.0  ::  224.0.0.1  255.255.255.255    refused: an address of many hosts, or of whichever host reads it
    fe80::1%eth0  fe80::1                      refused: such an address only has a meaning together with an interface
    a b  a;b  a/b  u@a  a:1  é.example         refused: no host
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket

from kvferry.protocol.errors import InvalidConfig

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

ChannelAddress = tuple[str, int]
"""Host and port of an engine's side channel. The boots of one engine share it, and with it what one peer may take."""

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_MAX_NAME = 253
_OLD_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}")
"""Other IPv4 spellings that the C library accepts: fewer parts, octal, hexadecimal."""
_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/\[\]]{1,253})):(?P<port>[0-9]{1,5})"
)
# Linux takes 0.0.0.0 for this host, and no other address of this network for any.
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def host_port(host: object, port: int) -> str:
    """`host:port` for logs, errors and ZMQ; an IPv6 address gets brackets, or its port could not be told from it."""
    text = str(host)
    is_bare_ipv6 = ":" in text and not text.startswith("[")
    if is_bare_ipv6:
        text = f"[{text}]"
    return f"{text}:{port}"


def address_of(text: str) -> ChannelAddress:
    """Host and port of `host:port` or `[address]:port`.

    Raises:
        ValueError: with the text, if it is neither.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(text)
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(text)
    host = match["six"] or match["name"]
    try:
        read_host(host)
    except ValueError:
        raise ValueError(text) from None
    return host, port


@functools.lru_cache(4096)
def read_host(text: str) -> IpAddress | str:
    """The address or the name that a text means. Nothing is looked up.

    Returns:
        An address; or a name in lower case, without a trailing dot.

    Raises:
        ValueError: it is neither, or an address to which no connection can be meant; the text says why.
    """
    # Remembered: params name the same few hosts again and again, and an engine's thread reads them.
    address = read_address(text)
    if address is not None:
        why = why_unusable(address)
        if why is not None:
            raise ValueError(why)
        return address
    name = text.lower().removesuffix(".") if text.isascii() else ""
    is_name = len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None
    # A resolver may read a name whose last label has only digits as an address.
    last_label = name.rpartition(".")[2]
    if not is_name or last_label.isdigit():
        raise ValueError("neither an address nor a host name")
    return name


def read_address(text: str) -> IpAddress | None:
    """The address that a text is, in any spelling that a resolver may accept; None if it is none, or has a zone."""
    if not text.isascii() or "%" in text:
        return None
    plain = text.removesuffix(".").removeprefix("[").removesuffix("]").lower()
    try:
        return _without_mapping(ipaddress.ip_address(plain))
    except ValueError:
        pass
    if not _OLD_NUMBERS.fullmatch(plain):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(plain))
    except OSError:
        return None


def _without_mapping(address: IpAddress) -> IpAddress:
    """The IPv4 address that an IPv6 address stands for: Linux connects to it, so rules for it must apply."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


@functools.lru_cache(4096)
def one_spelling(host: str) -> str:
    """The same text for all ways to write a host; text that is no host stays as it is."""
    # For shares of a host: clients choose how they write one, and each letter of a name may be a capital. By its texts
    # one host would have many shares.
    try:
        return str(read_host(host))
    except ValueError:
        return host


def why_unusable(address: IpAddress) -> str | None:
    """Why an address does not stand for one certain host; None if it does."""
    if address in _THIS_NETWORK or address.is_unspecified:
        return "an address of whichever host reads it"
    if address == _BROADCAST:
        return "the address of all hosts of a network"
    # IPv4 link-local addresses have a meaning without an interface; `AllowedHosts` decides about them.
    if address.version == 6 and address.is_link_local:
        return (
            "a link-local address, which only has a meaning together with an interface"
        )
    if address.is_multicast:
        return "the address of a group of hosts"
    return None


def name_or_none(text: str) -> str | None:
    """The name that a text is; None if it is none."""
    try:
        host = read_host(text)
    except ValueError:
        return None
    if isinstance(host, str):
        return host
    return None


def check_announced(host: str, variable: str = HOST_VARIABLE) -> None:
    """Check the host that a producer announces in params.

    Raises:
        InvalidConfig: every consumer would refuse it, since it is not one certain host; the text names the variable.
    """
    try:
        read_host(host)
    except ValueError as why:
        expected = f"an address or a name of this host that decoders reach ({why})"
        raise InvalidConfig(variable, host, expected) from None


def advice(host: str) -> str:
    """What to do if there is no producer at this host, as a text to be added to an error; often empty."""
    if not host_is_loopback(host):
        return ""
    remedy = f"set {HOST_VARIABLE} there to an address that decoders reach"
    return f"; {host} is whichever host reads it: if the producer is on another one, {remedy}"


def host_is_loopback(host: str) -> bool:
    """Whether a host, as it is written, means whichever host reads it. A name is not looked up."""
    address = read_address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return name_or_none(host) == "localhost"
