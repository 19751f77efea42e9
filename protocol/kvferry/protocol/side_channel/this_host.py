"""Which addresses and names are this host's. No name server is asked."""

from __future__ import annotations

import socket
import struct

from kvferry.protocol.side_channel.hosts import Address, name_or_none, read_address, why_unusable

HOSTS_FILE = "/etc/hosts"
_MOST_HOSTS_BYTES = 1 << 20
"""Of the file of hosts; what follows is not read."""


def is_this_host(address: Address) -> bool:
    """Whether a connection to this address stays on this host: a loopback address, or one of its interfaces' now.

    The kernel is asked each time, because a container's addresses change. That takes some 30 µs, sends nothing, and
    looks no name up. Two questions, neither of which can be answered with yes for another host's address:

    - With which source would you send there? An address that is its own source is this host's.
    - How would you route it (`RTM_GETROUTE`)? To itself, also where an interface has several addresses of one network,
      whose source is the first of them. Some sandboxes know no routes.

    Binding a socket is no third one: with `ip_nonlocal_bind` any address can be bound.
    """
    if address.is_loopback:
        return True
    try:
        return _source_towards(address) == address or _is_routed_to_itself(address)
    except OSError:  # no route, no IPv6, no more files
        return False


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _source_towards(address: Address) -> Address | None:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sender:
        try:
            sender.connect((str(address), 9))  # UDP: sends nothing
        except OSError:  # nothing can be sent there
            return None
        return read_address(sender.getsockname()[0])


_RTM_NEWROUTE = 24
_RTM_GETROUTE = 26
_RTN_LOCAL = 2
_RTA_DST = 1
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # `struct nlmsghdr`: length, type, flags, sequence, port
_ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # `struct rtmsg`: family, length of the destination in bits, …, type, flags
_ROUTE_TYPE_AT = _HEADER.size + 7
_ATTRIBUTE = struct.Struct("=HH")


def _is_routed_to_itself(address: Address) -> bool:
    destination = address.packed
    route = _ROUTE.pack(_family(address), 8 * len(destination), 0, 0, 0, 0, 0, 0, 0)
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(destination), _RTA_DST) + destination
    length = _HEADER.size + len(route) + len(attribute)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0) as kernel:
        kernel.send(_HEADER.pack(length, _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + route + attribute)
        answer = kernel.recv(1 << 14)  # the kernel has answered before `send` returns
    if len(answer) <= _ROUTE_TYPE_AT or _HEADER.unpack_from(answer)[1] != _RTM_NEWROUTE:
        return False
    return answer[_ROUTE_TYPE_AT] == _RTN_LOCAL


def names_of_this_host() -> frozenset[str]:
    """Names that probably mean this host: `localhost`, its own, and those that its file of hosts gives its addresses.

    No name server is asked. What a name means is only known when it is looked up, see `AllowedHosts.why_not_found`.
    """
    names = {"localhost", socket.gethostname()}
    try:
        with open(HOSTS_FILE, encoding="ascii", errors="replace") as file:
            lines = file.read(_MOST_HOSTS_BYTES).splitlines()
    except OSError:
        lines = []
    for line in lines:
        words = line.partition("#")[0].split()
        address = read_address(words[0]) if words else None
        if address is not None and why_unusable(address) is None and is_this_host(address):
            names.update(words[1:])
    return frozenset(found for found in map(name_or_none, names) if found is not None)
