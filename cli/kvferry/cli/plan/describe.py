"""`kvferry describe`: a running engine's description over its side channel."""

from __future__ import annotations

import argparse
import sys

from kvferry.cli.arguments import number_option, read_address
from kvferry.cli.plan.engine import side_of
from kvferry.cli.plan.tables import print_engine
from kvferry.plan.refusals import check_description
from kvferry.protocol.description_json import encode_engine_json, engine_json_of
from kvferry.protocol.handshake import UNKNOWN_ENGINE, EngineDescription
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.secrets import Secrets, secrets_from_environment

ASKER = "kvferry describe"


def run_describe(options: argparse.Namespace) -> int:
    """Run the command; gives the exit code. Raises `KvferryError`."""
    host, port = read_address(options.address)
    engine = fetch(host, port, number_option("--timeout", options.timeout, 0.1, 600), secrets_from_environment())
    engine_json = engine_json_of(engine)
    if options.json:
        sys.stdout.write(encode_engine_json(engine_json).decode())
        return 0
    print_engine(engine_json, side_of(engine))
    return 0


def fetch(host: str, port: int, timeout_s: float, secrets: Secrets = ()) -> EngineDescription:
    """The description of the engine at this address.

    Raises:
        HandshakeFailed: no answer in time.
        PeerRefused: the engine has no description yet, speaks another version, or has none of the secrets.
        InvalidMessage: the answer is invalid, or contradicts itself.
    """
    with SideChannelClient(secrets) as client:
        description = client.fetch_description(host, port, UNKNOWN_ENGINE, ASKER, timeout_s)
    check_description(description)
    return description
