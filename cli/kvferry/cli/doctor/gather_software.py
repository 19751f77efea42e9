"""Facts about installed packages, ports and the secret, without imports of large packages."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Mapping
from importlib import metadata

from kvferry.cli.doctor.channel import DEFAULT_HOST, DEFAULT_PORT, HOST_VARIABLE, PORT_VARIABLE, Channel, SecretFacts
from kvferry.cli.doctor.versions import NEEDED, VLLM_PACKAGES, Versions
from kvferry.protocol.errors import InvalidSecretFile
from kvferry.protocol.side_channel.secrets import VARIABLE, secrets_from_environment

_NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")


def gather_versions() -> Versions:
    """From the packages' metadata, without importing them."""
    found = {}
    for name in (*VLLM_PACKAGES, *NEEDED, *_NIXL_BUILDS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Versions(sys.version_info[:3], found, _curve())


def _curve() -> bool | None:
    try:
        import zmq
    except ImportError:
        return None
    return bool(zmq.has("curve"))


def gather_channel(environ: Mapping[str, str], ranks: int) -> Channel:
    """The addresses on which vLLM would listen, with an attempt to bind each."""
    host = environ.get(HOST_VARIABLE, DEFAULT_HOST)
    written = environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    first = int(written) if re.fullmatch(r"[0-9]{1,5}", written) else None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = min(found, key=lambda one: one[0] != socket.AF_INET)[4][0]
    except (OSError, UnicodeError):
        return Channel(host, HOST_VARIABLE not in environ, None, loopback=False, ports={})
    return Channel(
        host=host,
        default=HOST_VARIABLE not in environ,
        address=str(address),
        loopback=ipaddress.ip_address(str(address).partition("%")[0]).is_loopback,
        ports={} if first is None else {port: try_port(str(address), port) for port in range(first, first + ranks)},
        wrong_port=written if first is None else "",
    )


def try_port(address: str, port: int) -> str:
    """Bind the port and release it; returns the errno's name, or `""`."""
    if not 0 < port < 65536:
        return "no port from 1 to 65535"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        # As ZMQ does: a port with connections in TIME_WAIT counts as free.
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((address, port))
            attempt.listen(1)
        except OSError as refused:
            return errno.errorcode.get(refused.errno or 0, str(refused))
    return ""


def gather_secret(environ: Mapping[str, str]) -> SecretFacts:
    """The file that the environment names, read as an engine reads it."""
    path = environ.get(VARIABLE)
    try:
        secrets = secrets_from_environment(environ)
    except InvalidSecretFile as wrong:
        return SecretFacts(path, wrong=str(wrong))
    return SecretFacts(path, tuple(secret.fingerprint for secret in secrets))
