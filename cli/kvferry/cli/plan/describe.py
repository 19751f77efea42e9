"""`kvferry describe`: a running engine's description over its side channel."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

from kvferry.cli.arguments import number_option, read_address
from kvferry.cli.formatting import digits
from kvferry.cli.plan.engine import side_of
from kvferry.cli.plan.tables import print_engine
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import encode_engine_json, to_engine_json
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import UNKNOWN_ENGINE, EngineDescription
from kvferry.protocol.side_channel.allowed_hosts import ANY_HOST
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.hosts import host_port
from kvferry.protocol.side_channel.secrets import Secrets, secrets_from_environment
from kvferry.protocol.visible import visible_json

ASKER = "kvferry describe"
_PROBE_S = 0.5
_SIGNATURE_S = 0.5
"""For the bytes that ZMQ sends to every client at once; afterwards another server is asked for its own."""


def run_describe(options: argparse.Namespace) -> int:
    """Run the command; gives the exit code. Raises `KvferryError`."""
    host, port = read_address("HOST:PORT", options.address)
    engine = fetch(
        host,
        port,
        number_option("--timeout", options.timeout, 0.1, 600),
        secrets_from_environment(),
    )
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
    end_s, where = time.monotonic() + timeout_s, host_port(host, port)
    try:
        with ThreadPoolExecutor(1) as pool, SideChannelClient(secrets, ANY_HOST) as client:
            asked = pool.submit(
                client.fetch_description, host, port, UNKNOWN_ENGINE, ASKER, timeout_s
            )
            try:
                wait([asked], timeout=_PROBE_S)
                if not asked.done():
                    _check_listener(host, port, end_s)
                description = asked.result()
            except (HandshakeFailed, PeerRefused):
                _check_listener(host, port, max(end_s, time.monotonic() + _PROBE_S))
                raise
        check_description(description)
    except InvalidMessage as wrong:
        raise HandshakeFailed(
            f"{where} is no side channel of kvferry, or of another version: {wrong}"
        ) from None
    return description


def _check_listener(host: str, port: int, end_s: float) -> None:
    """Connect, and read the signature that ZMQ sends first: ZMQ itself would try again until the deadline.

    Not before ZMQ has failed, or has not succeeded in `_PROBE_S`: an engine logs a connection without a handshake.

    Raises:
        HandshakeFailed: as `fetch`.
    """
    where = host_port(host, port)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as refused:
        why = refused.strerror if isinstance(refused, OSError) else refused
        raise HandshakeFailed(f"{host} does not resolve to an address: {why}") from None
    # As the client does: IPv4 before IPv6.
    family, kind, protocol, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
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
            waited = f"within {digits(end_s - started_s)} s"
            raise HandshakeFailed(
                f"{where} did not accept a connection {waited}: host down, or a firewall"
            ) from None
        except OSError as refused:
            raise HandshakeFailed(f"{where} cannot be reached: {refused.strerror}") from None
        _check_signature(connection, where, end_s)


def _check_signature(connection: socket.socket, where: str, end_s: float) -> None:
    try:
        connection.settimeout(max(0.05, min(_SIGNATURE_S, (end_s - time.monotonic()) / 2)))
        try:
            found = connection.recv(64)
        except TimeoutError:  # a server that waits for its client, as those of HTTP do
            connection.settimeout(max(0.05, end_s - time.monotonic()))
            connection.sendall(b"kvferry describe\r\n\r\n")
            found = connection.recv(64)
    except TimeoutError:
        raise HandshakeFailed(
            f"{where} accepted a connection and did not answer: it hangs, or is no engine"
        ) from None
    except OSError:
        found = b""
    if not found.startswith(b"\xff"):
        said = f"its answer begins with {found[:24]!r}" if found else "it closed the connection"
        hint = "the side channel has a port of its own, VLLM_NIXL_SIDE_CHANNEL_PORT"
        raise HandshakeFailed(f"{where} is no side channel: {said}; {hint}")
