"""The hosts that an engine may connect to, whatever params name: clients can write params.

Whoever answers at such a host is taken for a producer: its caches are read, and its description has metadata that NIXL
parses in native code. So without a secret, which only engines have, and without a list, only this host is allowed.

    listed          allows                                       and not
    10.1.0.0/16     10.1.2.3, ::ffff:10.1.2.3, 0xa.0x10203       names that resolve to it
    10.1.2.3        the same address
    p0.example      p0.example, P0.Example.                      p0.example.evil, its address
    *.example       p0.example, a.b.example                      example
    *               every address and every name                 169.254.169.254
    (no list, but a secret: as with *, since who has not the secret cannot answer)
    (no list and no secret)   127.0.0.1, addresses of this host's interfaces; localhost, this host's name

An address is compared as an address, in any spelling, and a name as a name. That takes no look-up, so the engine's
thread can decide. When a name has been looked up, on another thread, its address is judged too (`why_not_found`), and
that very address is connected. A listed name may resolve to any address, so list only names in zones that you control.
`TrustedHosts` judges the hosts that requests name, and says in the log what to do about the others.

Which addresses and names are this host's is found out here, too, without asking a name server.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.protocol.errors import shorten
from kvferry.protocol.hosts import (
    HOST_VARIABLE,
    IpAddress,
    host_is_loopback,
    name_or_none,
    read_address,
    read_host,
    why_unusable,
)

logger = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY = "*"
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_MAX_ADVISED = 256
"""Hosts that the log gives advice about; clients choose them."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """An allow-list.

    Attributes:
        networks: allowed networks; a single address is a network of one.
        names: allowed names, in lower case, without a trailing dot.
        suffixes: allowed suffixes, as `names`, each with a leading dot.
        any_host: whether all other hosts are allowed too, except link-local addresses: these must be listed.
        this_host: whether this host's addresses are allowed, and `names` as far as they mean such an address.
    """

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    any_host: bool = False
    this_host: bool = False

    @classmethod
    def from_entries(cls, entries: Iterable[str]) -> AllowedHosts:
        """Parse the entries of a configuration.

        Raises:
            ValueError: an entry is not valid; the error's text is that entry.
        """
        networks: list[Network] = []
        names: list[str] = []
        suffixes: list[str] = []
        any_host = False
        for entry in entries:
            if entry == ANY:
                any_host = True
                continue
            network = _read_network(entry)
            if network is not None:
                networks.append(network)
                continue
            name = name_or_none(entry.removeprefix("*."))
            if name is None:
                raise ValueError(entry)
            if entry.startswith("*."):
                suffixes.append(f".{name}")
            else:
                names.append(name)
        return cls(
            networks=tuple(networks),
            names=frozenset(names),
            suffixes=tuple(suffixes),
            any_host=any_host,
        )

    @classmethod
    def without_list(
        cls, secrets: Secrets, own_host: str = "localhost"
    ) -> AllowedHosts:
        """What is allowed where nothing is listed.

        Args:
            secrets: of the side channel.
            own_host: as this engine announces its own side channel; engines beside it may announce it, too.
        """
        # With a secret any host may be connected to: only an engine that has the secret can answer.
        if secrets:
            return cls(any_host=True)
        names = set(names_of_this_host())
        own_name = name_or_none(own_host)
        if own_name is not None:
            names.add(own_name)
        return cls(names=frozenset(names), this_host=True)

    def allow(self, host: str) -> bool:
        """Whether this engine may connect to a host, given as params spell it. Looks no name up, and does not wait."""
        return self.why_not(host) is None

    def why_not(self, host: str) -> str | None:
        """None if this engine may connect to a host; otherwise why not, as the end of a sentence about the host."""
        try:
            name_or_address = read_host(host)
        except ValueError as invalid:
            return f"is {invalid}"
        if isinstance(name_or_address, str):
            is_allowed = self.any_host or self._lists_name(name_or_address)
        else:
            is_allowed = self._allow_address(name_or_address)
        return None if is_allowed else self._not_allowed()

    def why_not_found(self, host: str, address: IpAddress) -> str | None:
        """Why this engine may not connect to the address that was looked up for an allowed host; None if it may."""
        unusable = why_unusable(address)
        if unusable is not None:
            return f"is {address}: {unusable}"
        if self._trusts_name_server(host) or self._allow_address(address):
            return None
        return f"is {address}, which {self._not_allowed()}"

    def _lists_name(self, name: str) -> bool:
        return name in self.names or name.endswith(self.suffixes)

    def _trusts_name_server(self, host: str) -> bool:
        """True for a name of the configured list: it may lead to any address."""
        # Without a list, names only say which hosts are probably this one: their addresses decide.
        if self.this_host:
            return False
        name = name_or_none(host)
        return name is not None and self._lists_name(name)

    def _not_allowed(self) -> str:
        if self.this_host:
            return (
                "is not this host, and there is neither a secret nor allowed_hosts here"
            )
        if self.any_host:
            return "is link-local: allowed_hosts must list it"
        return "is not in allowed_hosts"

    def _allow_address(self, address: IpAddress) -> bool:
        for network in self.networks:
            if address.version == network.version and address in network:
                return True
        if self.any_host:
            # Among link-local addresses clouds have the services that give a machine its credentials.
            return not address.is_link_local
        return self.this_host and is_this_host(address)


# The network lists link-local addresses too, which `any_host` alone leaves out.
ANY_HOST = AllowedHosts(networks=(ipaddress.IPv4Network("0.0.0.0/0"),), any_host=True)
"""For commands: whoever runs one names the host."""


def _read_network(entry: str) -> Network | None:
    """The network that an entry names; None if it names none: it has bits beyond its prefix, or a zone."""
    if "%" in entry:
        return None
    if "/" not in entry:
        entry = entry.removeprefix("[").removesuffix("]")
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        return None
    # Hosts that are written as mapped addresses are read as IPv4, so the network must be IPv4 as well to hold them.
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        mapped = network.network_address.ipv4_mapped
        network = ipaddress.IPv4Network(
            (int(mapped or 0), network.prefixlen - _MAPPED.prefixlen)
        )
    # Whoever lists 0.0.0.0 alone means something else.
    if network.num_addresses == 1 and why_unusable(network.network_address) is not None:
        return None
    return network


def allowed_hosts_of(
    listed: Sequence[str] | None, secrets: Secrets, own_host: str = "localhost"
) -> AllowedHosts:
    """The hosts that this engine may connect to.

    Args:
        listed: the key `allowed_hosts`; None if it is not set.
        own_host: this engine's `VLLM_NIXL_SIDE_CHANNEL_HOST`.
    """
    if listed is None:
        return AllowedHosts.without_list(secrets, own_host)
    return AllowedHosts.from_entries(listed)


def warn_of_trust(allowed: AllowedHosts, secrets: Secrets) -> None:
    """At the start of an engine that reads from others: say whom it trusts."""
    # With a secret, engines without it are refused, so the secret decides.
    if secrets:
        return
    if allowed.this_host:
        logger.warning(
            "without a secret and without allowed_hosts this engine reads only from producers on this host, and "
            "computes all other prompts itself; give all engines one %s, or list the producers' hosts in allowed_hosts",
            VARIABLE,
        )
    elif allowed.any_host:
        logger.warning(
            'allowed_hosts is ["*"] and there is no secret: anyone who can write params can make this engine read from '
            "any host, and answer others with text that this host chose; set %s on all engines",
            VARIABLE,
        )


class TrustedHosts:
    """Judges the hosts that params name.

    Used on the engine's thread: it looks no name up, and does not wait.

    Args:
        has_list: whether `allowed_hosts` is set.
        has_secret: whether the side channel has a secret.
    """

    def __init__(
        self, allowed: AllowedHosts, *, has_list: bool, has_secret: bool = False
    ) -> None:
        self._allowed = allowed
        self._has_list = has_list
        self._has_secret = has_secret
        self._advised: set[str] = set()

    def allow(self, host: str) -> bool:
        """Whether this engine may connect to a host."""
        return self._allowed.allow(host)

    def why_not(self, host: str) -> str | None:
        """Why this engine may not connect to a host; None if it may. What to do about it is logged once for a host."""
        why = self._allowed.why_not(host)
        if why is None:
            return None
        if host not in self._advised and len(self._advised) < _MAX_ADVISED:
            self._advised.add(host)
            logger.warning(
                "prompts of host %s are computed here: it %s. %s",
                shorten(host),
                why,
                self._advice(host),
            )
        return f"host {shorten(host)} {why}"

    def why_not_unannounced(self, host: str) -> str | None:
        """As `why_not`, for a host that a request names without an announcement of kvferry's.

        This host is not enough: other programs listen here too, and such a request is written by any client.
        """
        if not self._has_list and not self._has_secret:
            return f"host {shorten(host)} is not in allowed_hosts, and there is no secret here"
        return self.why_not(host)

    def _advice(self, host: str) -> str:
        """What to do so that prompts of this host are read, if it is a producer's."""
        try:
            entry = json.dumps(str(read_host(host)))
        except ValueError:
            return f"Set {HOST_VARIABLE} on its producer to an address or a name that decoders reach"
        change = f'set "allowed_hosts": [{entry}] in kv_connector_extra_config here'
        if self._has_list:
            change = f"add {entry} to allowed_hosts here"
        if host_is_loopback(host):
            # A producer's default host is a loopback address, which names this host for every engine.
            return (
                f"If its producer is on this host, {change}; if it is on another host, "
                f"set {HOST_VARIABLE} there to an address that decoders reach"
            )
        if self._has_list:
            return f"If that is a producer, {change}"
        return (
            f"If that is a producer, give both engines one {VARIABLE}, or {change} "
            f'(every program on that host is trusted then; ["{ANY}"]: every client)'
        )


# This host.


HOSTS_FILE = "/etc/hosts"
_MAX_HOSTS_BYTES = 1 << 20
"""Of the file of hosts; what follows is not read."""


def is_this_host(address: IpAddress) -> bool:
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


def _family(address: IpAddress) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _is_own_source(address: IpAddress) -> bool:
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


def _is_routed_to_itself(address: IpAddress) -> bool:
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


def _hosts_file() -> Iterator[tuple[IpAddress, list[str]]]:
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
