"""`kvferry describe`: a running engine's description over its side channel."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys

from kvferry.cli.arguments import number_option, read_address
from kvferry.cli.plan.tables import print_engine
from kvferry.link.allowed_hosts import ANY_HOST
from kvferry.link.client import SideChannelClient
from kvferry.link.secrets import Secrets, secrets_from_environment
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import encode_engine_json, to_engine_json
from kvferry.protocol.errors import (
    HandshakeFailed,
    InvalidMessage,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import UNKNOWN_ENGINE, EngineDescription
from kvferry.protocol.hosts import advice, host_port
from kvferry.protocol.visible import visible_json

CLIENT_ID = "kvferry describe"
# ZMQ sends it to every client at once.
_SIGNATURE = b"\xff"
_GREETING_S = 0.5


def run_describe(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        KvferryError: an argument is invalid, or the engine has not answered.
    """
    host, port = read_address("HOST:PORT", options.address)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    engine = fetch(host, port, timeout_s, secrets_from_environment())
    if options.json:
        engine_json = encode_engine_json(to_engine_json(engine))
        sys.stdout.write(visible_json(engine_json.decode()))
    else:
        print_engine(engine)
    return 0


def fetch(
    host: str, port: int, timeout_s: float, secrets: Secrets = ()
) -> EngineDescription:
    """The description of the engine at this address.

    Raises:
        HandshakeFailed: the name does not resolve, the port is closed, something else listens there, or no answer came
            in time; the text says which.
        PeerRefused: the engine has no description yet, speaks another version, or has none of the secrets.
    """
    try:
        # A port that is closed is an answer for a person; an engine would wait for its producer to start.
        with SideChannelClient(secrets, ANY_HOST) as client:
            description = client.fetch_description(
                host, port, UNKNOWN_ENGINE, CLIENT_ID, timeout_s, waits=False
            )
        check_description(description)
    except NothingListens:
        raise HandshakeFailed(_why_unreached(host, port)) from None
    except (HandshakeFailed, PeerRefused):
        # To ZMQ a server of something else looks like an engine with a secret: both cut its connection.
        greeting = greeting_of(host, port)
        if greeting and not greeting.startswith(_SIGNATURE):
            problem = f"{host_port(host, port)} is no side channel: its answer begins with {greeting[:24]!r}"
            hint = "the side channel has a port of its own, VLLM_NIXL_SIDE_CHANNEL_PORT"
            raise HandshakeFailed(f"{problem}; {hint}") from None
        raise
    except InvalidMessage as wrong:
        where = host_port(host, port)
        raise HandshakeFailed(
            f"{where} is not a side channel of kvferry, or is one of another version: {wrong}"
        ) from None
    return description


def _why_unreached(host: str, port: int) -> str:
    """Why there is no connection to this address, in one line."""
    where = host_port(host, port)
    # By a socket: ZMQ has one event for a closed port and a missing route, and does not pass the system's reason on.
    try:
        socket.create_connection((host, port), _GREETING_S).close()
    except ConnectionRefusedError:
        # The last is for the operator of a decoder, who wonders why.
        closed = f"{where} is closed: nothing listens there{advice(host)}"
        return f"{closed}; of engines only producers listen"
    except OSError as unreachable:
        why = unreachable.strerror or str(unreachable)
        return f"{where} cannot be reached: {why}"
    return f"{where} was closed, and listens now: try again"


def greeting_of(host: str, port: int) -> bytes:
    """The first bytes of what listens there; empty if it says nothing."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), _GREETING_S) as connection,
    ):
        with contextlib.suppress(TimeoutError):
            return connection.recv(64)
        # It waits for its client to begin, as servers of HTTP do.
        connection.sendall(b"kvferry describe\r\n\r\n")
        return connection.recv(64)
    return b""
