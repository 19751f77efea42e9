"""A handshake with any engine, as a test or a benchmark needs one."""

from __future__ import annotations

from kvferry.link.client import SideChannelClient
from kvferry.link.secrets import Secrets
from kvferry.protocol.handshake import EngineDescription


def fetch_description(
    host: str,
    port: int,
    engine_id: str,
    client_id: str,
    timeout_s: float,
    secrets: Secrets = (),
) -> EngineDescription:
    """The description of the engine at this address, by a client of its own."""
    with SideChannelClient(secrets) as client:
        return client.fetch_description(host, port, engine_id, client_id, timeout_s)
