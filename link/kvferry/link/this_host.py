"""Which addresses and names are this host's. No name server is asked."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from kvferry.protocol.hosts import Address, name_or_none, read_address, why_unusable

HOSTS_FILE = "/etc/hosts"
_MAX_HOSTS_BYTES = 1 << 20
"""Of the file of hosts; what follows is not read."""


def is_this_host(address: Address) -> bool:
    """Whether a connection to this address stays on this host: a loopback address, or one of its interfaces' now."""
    # The kernel is asked each time, because a container's addresses change. That takes some 30 µs, sends nothing, and
    # looks no name up. Neither test can be true for another host's address; either alone misses some of this host's.
    # Binding a socket is no test: with `ip_nonlocal_bind` any address can be bound.
    if address.is_loopback:
        return True
    try:
        return _is_own_source(address) or _is_routed_to_itself(address)
    except OSError:  # no route, no IPv6, no more files
        return False


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _is_own_source(address: Address) -> bool:
    """Whether the kernel would send to this address from this address."""
    # It misses an interface's second address of one network, whose source is the first one.
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sender:
        try:
            sender.connect((str(address), _ANY_PORT))  # UDP: sends nothing
        except OSError:  # nothing can be sent there
            return False
        source = sender.getsockname()[0]
    return read_address(source) == address


_ANY_PORT = 9

_RTM_NEWROUTE = 24
_RTM_GETROUTE = 26
_RTN_LOCAL = 2
_RTA_DST = 1
_NLM_F_REQUEST = 1
# `struct nlmsghdr`: length, type, flags, sequence, port.
_HEADER = struct.Struct("=IHHII")
# `struct rtmsg`: family, length of the destination in bits, …, type, flags.
_ROUTE = struct.Struct("=BBBBBBBBI")
_ROUTE_TYPE_AT = _HEADER.size + 7
_ATTRIBUTE = struct.Struct("=HH")
_MAX_ANSWER_BYTES = 1 << 14


def _is_routed_to_itself(address: Address) -> bool:
    """Whether the kernel's route to this address is local (`RTM_GETROUTE`)."""
    # It misses all addresses in some sandboxes, which know no routes.
    destination = address.packed
    route = _ROUTE.pack(_family(address), 8 * len(destination), 0, 0, 0, 0, 0, 0, 0)
    attribute = (
        _ATTRIBUTE.pack(_ATTRIBUTE.size + len(destination), _RTA_DST) + destination
    )
    length = _HEADER.size + len(route) + len(attribute)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0
    ) as kernel:
        header = _HEADER.pack(length, _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0)
        kernel.send(header + route + attribute)
        # The kernel has answered before `send` returns, so a socket that does not block has the answer.
        answer = kernel.recv(_MAX_ANSWER_BYTES)
    if len(answer) <= _ROUTE_TYPE_AT:
        return False
    _, kind, _, _, _ = _HEADER.unpack_from(answer)
    return kind == _RTM_NEWROUTE and answer[_ROUTE_TYPE_AT] == _RTN_LOCAL


def names_of_this_host() -> frozenset[str]:
    """Names that probably mean this host: `localhost`, its own, and those that its file of hosts gives it."""
    # Probably, since no name server is asked: what a name means is only known when it is looked up
    # (`AllowedHosts.why_not_found`).
    words = {"localhost", socket.gethostname()}
    for address, aliases in _hosts_file():
        if why_unusable(address) is None and is_this_host(address):
            words.update(aliases)
    names = map(name_or_none, words)
    return frozenset(name for name in names if name is not None)


def _hosts_file() -> Iterator[tuple[Address, list[str]]]:
    """The addresses of the file of hosts, each with its names; none if there is no such file."""
    try:
        with open(HOSTS_FILE, encoding="ascii", errors="replace") as file:
            text = file.read(_MAX_HOSTS_BYTES)
    except OSError:
        return
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        address = read_address(words[0])
        if address is not None:
            yield address, words[1:]
