"""Hosts as params, tickets, configurations and name servers write them: all are read here, and nowhere else.

A host is an address or a name. ZMQ gets addresses only, in the one spelling that Python gives them: it would look a
name up on its I/O thread, reads `;` as the end of a source address, and looks up what follows the `%` of an IPv6
address. So `fd00::2%2]:0;[::1` is in fd00::/64 to Python, and the address ::1 to ZMQ.

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

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_OLD_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}")
"""Other IPv4 spellings that the C library accepts: fewer parts, octal, hexadecimal."""
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
"""Linux takes 0.0.0.0 for this host, and no other address of this network for any."""


def host_port(host: object, port: int) -> str:
    """`host:port` for logs, errors and ZMQ; an IPv6 address gets brackets, or its port could not be told from it."""
    text = str(host)
    return f"[{text}]:{port}" if ":" in text and not text.startswith("[") else f"{text}:{port}"


def read_host(text: str) -> Address | str:
    """The address or the name that a text means. Nothing is looked up.

    Returns:
        An address; or a name in lower case, without a trailing dot.

    Raises:
        ValueError: it is neither, or an address to which no connection can be meant; the text says why.
    """
    address = read_address(text)
    if address is not None:
        why = why_unusable(address)
        if why is not None:
            raise ValueError(why)
        return address
    name = text.lower().removesuffix(".") if text.isascii() else ""
    # A last label of digits alone: a resolver may read it as an address.
    if len(name) > 253 or not _NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
        raise ValueError("neither an address nor a host name")
    return name


def read_address(text: str) -> Address | None:
    """The address that a text is, in any spelling that a resolver may accept; None if it is none, or has a zone."""
    if not text.isascii() or "%" in text:
        return None
    plain = text.removesuffix(".").removeprefix("[").removesuffix("]").lower()
    try:
        return _without_mapping(ipaddress.ip_address(plain))
    except ValueError:
        pass
    if _OLD_NUMBERS.fullmatch(plain):
        try:
            return ipaddress.IPv4Address(socket.inet_aton(plain))
        except OSError:
            return None
    return None


def _without_mapping(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


@functools.lru_cache(4096)
def one_spelling(host: str) -> str:
    """The same text for all that a host may be written as, for what is shared between hosts: clients choose how they
    write one, and each letter of a name may be a capital. What is no host stays as it is."""
    try:
        return str(read_host(host))
    except ValueError:
        return host


def why_unusable(address: Address) -> str | None:
    """Why an address is none of one certain host; None for all others."""
    if isinstance(address, ipaddress.IPv4Address):
        if address in _THIS_NETWORK:
            return "an address of whichever host reads it"
        if address == ipaddress.IPv4Address("255.255.255.255"):
            return "the address of all hosts of a network"
    elif address.is_unspecified:
        return "an address of whichever host reads it"
    elif address.is_link_local:
        return "a link-local address, which only has a meaning together with an interface"
    return "the address of a group of hosts" if address.is_multicast else None


def name_or_none(text: str) -> str | None:
    """The name that a text is; None if it is none."""
    try:
        found = read_host(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def check_announced(host: str, variable: str = HOST_VARIABLE) -> None:
    """Check the host that a producer announces in params: one that every consumer would refuse stops its start.

    Raises:
        InvalidConfig: it is not one certain host; the text names the variable.
    """
    try:
        read_host(host)
    except ValueError as why:
        expected = f"an address or a name of this host that decoders reach ({why})"
        raise InvalidConfig(variable, host, expected) from None


def advice(host: str) -> str:
    """What to do if there is no producer at this host, as a text to be added to an error; empty if nothing special."""
    if host_is_loopback(host):
        there = f"if the producer is on another one, set {HOST_VARIABLE} there to an address that decoders reach"
        return f"; {host} is whichever host reads it: {there}"
    return ""


def host_is_loopback(host: str) -> bool:
    """Whether a host, as it is written, means whichever host reads it. A name is not looked up."""
    address = read_address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return name_or_none(host) == "localhost"
