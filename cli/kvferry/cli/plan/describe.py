"""`kvferry describe`: a running engine's description over its side channel."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

from kvferry.cli.arguments import number_option, read_address
from kvferry.cli.formatting import digits
from kvferry.cli.plan.summary import side_of
from kvferry.cli.plan.tables import print_engine
from kvferry.link.allowed_hosts import ANY_HOST
from kvferry.link.client import SideChannelClient
from kvferry.link.secrets import Secrets, secrets_from_environment
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import encode_engine_json, to_engine_json
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import UNKNOWN_ENGINE, EngineDescription
from kvferry.protocol.hosts import host_port
from kvferry.protocol.visible import visible_json

CLIENT_ID = "kvferry describe"
_PROBE_S = 0.5
"""Time that the side channel's own client has before it is found out what listens there."""
_SIGNATURE_S = 0.5
"""Time for the bytes that ZMQ sends to every client at once; after that another server is asked for its own."""


def run_describe(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        KvferryError: an argument is invalid, or the engine has not answered.
    """
    host, port = read_address("HOST:PORT", options.address)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    engine = fetch(host, port, timeout_s, secrets_from_environment())
    engine_json = to_engine_json(engine)
    if options.json:
        sys.stdout.write(visible_json(encode_engine_json(engine_json).decode()))
        return 0
    print_engine(engine_json, side_of(engine))
    return 0


def fetch(host: str, port: int, timeout_s: float, secrets: Secrets = ()) -> EngineDescription:
    """The description of the engine at this address.

    Raises:
        HandshakeFailed: the name does not resolve, the port is closed, something else listens there, or no answer came
            in time; the text says which.
        PeerRefused: the engine has no description yet, speaks another version, or has none of the secrets.
    """
    end_s = time.monotonic() + timeout_s
    try:
        with ThreadPoolExecutor(1) as pool, SideChannelClient(secrets, ANY_HOST) as client:
            fetching = pool.submit(
                client.fetch_description, host, port, UNKNOWN_ENGINE, CLIENT_ID, timeout_s
            )
            try:
                # The port is looked at only if the client has not succeeded by then: an engine logs a connection
                # without a handshake.
                wait([fetching], timeout=_PROBE_S)
                if not fetching.done():
                    _check_listener(host, port, end_s)
                description = fetching.result()
            except (HandshakeFailed, PeerRefused):
                # What listens there says more than the client's error.
                _check_listener(host, port, max(end_s, time.monotonic() + _PROBE_S))
                raise
        check_description(description)
    except InvalidMessage as wrong:
        where = host_port(host, port)
        raise HandshakeFailed(
            f"{where} is no side channel of kvferry, or of another version: {wrong}"
        ) from None
    return description


def _check_listener(host: str, port: int, end_s: float) -> None:
    """Connect with a socket of its own, and read the signature that ZMQ sends first.

    ZMQ itself would try again until the deadline, and not say why.

    Raises:
        HandshakeFailed: as `fetch`.
    """
    where = host_port(host, port)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as refused:
        raise HandshakeFailed(
            f"{host} does not resolve to an address: {refused.strerror}"
        ) from None
    except UnicodeError as refused:
        raise HandshakeFailed(f"{host} does not resolve to an address: {refused}") from None
    # IPv4 before IPv6, as the client does.
    addresses.sort(key=lambda resolved: resolved[0] != socket.AF_INET)
    family, kind, protocol, _, address = addresses[0]
    started_s = time.monotonic()
    with socket.socket(family, kind, protocol) as connection:
        try:
            connection.settimeout(max(0.05, end_s - started_s))
            connection.connect(address)
        except ConnectionRefusedError:
            raise HandshakeFailed(
                f"{where} is closed: nothing listens there. Only producers do, when ready"
            ) from None
        except TimeoutError:
            waited_s = digits(end_s - started_s)
            raise HandshakeFailed(
                f"{where} did not accept a connection within {waited_s} s: host down, or a firewall"
            ) from None
        except OSError as refused:
            raise HandshakeFailed(f"{where} cannot be reached: {refused.strerror}") from None
        _check_signature(connection, where, end_s)


def _check_signature(connection: socket.socket, where: str, end_s: float) -> None:
    """Check that a server begins as ZMQ does.

    Raises:
        HandshakeFailed: it does not; the text has what it sent.
    """
    try:
        connection.settimeout(max(0.05, min(_SIGNATURE_S, (end_s - time.monotonic()) / 2)))
        try:
            greeting = connection.recv(64)
        except TimeoutError:
            # It waits for its client to begin, as servers of HTTP do: what it answers shows what it is.
            connection.settimeout(max(0.05, end_s - time.monotonic()))
            connection.sendall(b"kvferry describe\r\n\r\n")
            greeting = connection.recv(64)
    except TimeoutError:
        raise HandshakeFailed(
            f"{where} accepted a connection and did not answer: it hangs, or is no engine"
        ) from None
    except OSError:
        greeting = b""
    if greeting.startswith(b"\xff"):
        return
    problem = "it closed the connection"
    if greeting:
        problem = f"its answer begins with {greeting[:24]!r}"
    raise HandshakeFailed(
        f"{where} is no side channel: {problem}; the side channel has a port of its own, "
        "VLLM_NIXL_SIDE_CHANNEL_PORT"
    )
