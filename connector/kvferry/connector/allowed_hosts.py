"""The hosts that a consumer may connect to, whatever params name: clients can write params.

An address is compared as an address, in any spelling, and a name as a name. No name is resolved: an allowed name may
resolve to any address, so allow only names in zones that you control.

    listed          allows                                       and not
    10.1.0.0/16     10.1.2.3, ::ffff:10.1.2.3, 0xa.0x10203       names that resolve to it
    10.1.2.3        the same address
    p0.example      p0.example, P0.Example.                      p0.example.evil, its address
    *.example       p0.example, a.b.example                      example
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_OLD_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}")
"""Other IPv4 spellings that the C library accepts: fewer parts, octal, hexadecimal."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """An allow-list.

    Attributes:
        networks: allowed networks; a single address is a network of one.
        names: allowed names, in lower case, without a trailing dot.
        suffixes: allowed suffixes, as `names`, each with a leading dot.
    """

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[str]) -> AllowedHosts:
        """Parse the entries of a configuration. Raises `ValueError` with the entry that is not valid."""
        networks: list[Network] = []
        names: list[str] = []
        suffixes: list[str] = []
        for entry in entries:
            network, name = _network_of(entry), _plain(entry.removeprefix("*."))
            if network is not None:
                networks.append(network)
            elif _is_name(name):
                (suffixes if entry.startswith("*.") else names).append(name)
            else:
                raise ValueError(entry)
        return cls(tuple(networks), frozenset(names), tuple(f".{suffix}" for suffix in suffixes))

    def allow(self, host: str) -> bool:
        """Whether this engine may connect to a host, given as params spell it."""
        address = _address_of(host)
        if address is not None:
            return any(address.version == network.version and address in network for network in self.networks)
        name = _plain(host)
        return _is_name(name) and (name in self.names or name.endswith(self.suffixes))


def _plain(name: str) -> str:
    return name.lower().removesuffix(".") if name.isascii() else ""


def _is_name(name: str) -> bool:
    """Whether it is a host name that no resolver could read as an address or as more than a name."""
    return len(name) <= 253 and _NAME.fullmatch(name) is not None and not name.rpartition(".")[2].isdigit()


def _network_of(entry: str) -> Network | None:
    """The network that an entry names; None if it names none, e.g. with bits set beyond its prefix."""
    try:
        network = ipaddress.ip_network(entry.removeprefix("[").removesuffix("]") if "/" not in entry else entry)
    except ValueError:
        return None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        mapped = network.network_address.ipv4_mapped
        return ipaddress.IPv4Network((int(mapped or 0), network.prefixlen - 96))
    return network


def _address_of(host: str) -> Address | None:
    """The address that `host` is, in any spelling that a resolver may accept; None if it is none."""
    if not host.isascii():
        return None
    plain = host.removesuffix(".").removeprefix("[").removesuffix("]").lower()
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        pass
    else:
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return mapped or address
    if _OLD_NUMBERS.fullmatch(plain):
        try:
            return ipaddress.IPv4Address(socket.inet_aton(plain))
        except OSError:
            return None
    return None
